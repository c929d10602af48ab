"""The words of the command line, checked one by one before Hydra reads them.

Hydra says what is wrong with a word in many ways, and takes some wrong ones without a word. Here each is refused with
one sentence; what only the composed config can tell is left to Hydra, and `composing` puts its errors into that form.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bfl_bench.commands.config_files import find_file, is_group, list_options, read_file
from bfl_bench.errors import ConfigError
from bfl_bench.groups import GROUPS
from bfl_bench.papers.spec import read_tables
from bfl_bench.records import config_folder

FLAGS = {
    "--help": "-h",
    "--version": "",
    "--multirun": "-m",
    "--run": "-r",
    "--resolve": "",
    "--hydra-help": "",
    "--shell-completion": "-sc",
}
"""Options that take no value, and their short forms."""

TAKING_A_VALUE = {
    "--config-dir": "-cd",
    "--config-name": "-cn",
    "--config-path": "-cp",
    "--cfg": "-c",
    "--package": "-p",
    "--info": "-i",
}
"""Options that take a value, and their short forms."""

CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
COMMANDS = ("--run", "--multirun", "--cfg", "--info", "--shell-completion")
LONG = {short: name for name, short in (FLAGS | TAKING_A_VALUE).items() if short}

READABLE = (
    "a number, a text, [a list] or {keys: values}; brackets and quotes come in pairs, and a text with other signs than "
    "letters, digits and . / - _ + % stands in quotes, which the shell must leave to it: \"key='a=b'\""
)

LISTING = ("bfl", "basic")
"""Sweepers that go through lists of values; others may search in intervals."""

MOST_POINTS = 100_000  # of a sweep

SWEPT = object()
"""The value of an override that has several: each is checked as part of its point of the sweep."""


@dataclass(frozen=True)
class CommandLine:
    """A command line: its options by their long names, flags with an empty value, and its overrides."""

    options: dict[str, str]
    overrides: list[str]

    @property
    def folders(self) -> list[Path]:
        """The folders in which config files are looked for, in this order."""
        main = self.options.get("--config-path")
        own = self.options.get("--config-dir")
        return [Path(main) if main else config_folder(), *([Path(own)] if own else [])]

    def as_words(self) -> list[str]:
        """The command line as Hydra's parser of arguments takes it: the options first."""
        options = [f"{name}={value}" if value else name for name, value in self.options.items()]
        return options + self.overrides


@dataclass(frozen=True, kw_only=True)
class Override:
    """A word of the form key=value, +key=value, ++key=value, ~key or ~key=value."""

    word: str
    prefix: str
    key: str
    value: str | None  # None: there is no =

    @property
    def typed(self) -> str:
        """What a sentence about the key says was given: the value or, if it is not only that, the word."""
        return self.word if self.prefix or self.value is None else self.value


def read_words(words: Sequence[str]) -> CommandLine:
    """Tell options from overrides; refuse unknown options and values that an option does not take."""
    options: dict[str, str] = {}
    overrides: list[str] = []
    expecting = ""  # the option whose value may be the next word
    for word in words:
        if expecting and not word.startswith("-") and "=" not in word:
            options[expecting], expecting = word, ""
        elif word.startswith("-"):
            name, _, value = word.partition("=")
            name = LONG.get(name, name)
            if name in FLAGS and not value:
                options[name], expecting = "", ""
            elif name in TAKING_A_VALUE:
                options[name], expecting = value, "" if value else name
            elif name in FLAGS:
                raise ConfigError(name, value, "no value")
            elif name == "--experimental-rerun":
                raise ConfigError(name, word, "a command line instead: the file that it takes can execute anything")
            else:
                raise ConfigError("option", word, _known_options(word))
        else:
            overrides.append(word)
    return CommandLine(options, overrides)


def _known_options(word: str) -> str:
    names = [*FLAGS, *TAKING_A_VALUE]
    close = [word.lstrip("-")] if "=" in word.lstrip("-") else get_close_matches(word, [*names, *LONG], 1)
    shown = (f"{name} ({short})" if short else name for name, short in (FLAGS | TAKING_A_VALUE).items())
    return ", ".join(shown) + hint(close)


def hint(close: Sequence[str]) -> str:
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def list_names(names: Sequence[str], given: str) -> str:
    """List the names, and say which of them was perhaps meant."""
    return ", ".join(names) + hint(get_close_matches(given, names, 1))


def check_words(line: CommandLine) -> None:
    """Refuse what is wrong with an option or an override by itself."""
    if "--shell-completion" in line.options:
        shells = r"(install|uninstall|query)=(bash|fish|zsh)"
        if len(line.overrides) != 1 or not re.fullmatch(shells, line.overrides[0]):
            allowed = "install=SHELL, uninstall=SHELL or query=SHELL; SHELL is bash, fish or zsh"
            raise ConfigError("--shell-completion", " ".join(line.overrides), allowed)
        return
    _check_options(line.options)
    check_places(line)
    overrides = [parse_override(word) for word in line.overrides]
    swept = "--multirun" in line.options or "hydra.mode=MULTIRUN" in line.overrides
    elsewhere = {"--config-path", "--config-name"} & set(line.options)
    if any(override.key == "hydra.searchpath" for override in overrides):
        elsewhere.add("hydra.searchpath")
    searches = any(override.key == "hydra/sweeper" and override.value not in LISTING for override in overrides)
    for override in overrides:
        value = _read_value(override, swept, searches, line.folders)
        if override.key == "hydra.searchpath":
            _check_search_path(override, value)
        elif not elsewhere and value is not SWEPT:
            _check_choice(override, value, line.folders)


def _check_options(options: Mapping[str, str]) -> None:
    for name, choices in CHOICES.items():
        if name in options and options[name] not in choices and (name, options[name]) != ("--info", ""):
            raise ConfigError(name, options[name], list_names(choices, options[name]))
    commands = [name for name in COMMANDS if name in options]
    if len(commands) > 1:
        raise ConfigError("option", " ".join(commands), "one of these at a time")
    for name in ("--package", "--resolve"):
        if name in options and "--cfg" not in options:
            raise ConfigError(name, f"{name} {options[name]}".strip(), "only together with --cfg")
    if options.get("--package") == "":
        raise ConfigError("--package", "", "a group of keys, such as local")


def check_places(line: CommandLine) -> None:
    """Refuse folders and files that do not exist; an address such as pkg://module is left to Hydra."""
    own, main, name = (line.options.get(option) for option in ("--config-dir", "--config-path", "--config-name"))
    if own is not None and not (own and Path(own).is_dir()):
        raise ConfigError("--config-dir", own, "a folder with config files")
    if main is not None and "://" not in main and not (Path(main).is_absolute() and Path(main).is_dir()):
        raise ConfigError("--config-path", main, "the absolute path of a folder that has config files for everything")
    if name is not None and "://" not in (main or "") and find_file(name.removesuffix(".yaml"), line.folders) is None:
        raise ConfigError("--config-name", name, "config, or the name of a file in the folder of --config-dir")


def _check_search_path(override: Override, value: Any) -> None:
    for place in value if isinstance(value, list) else [None]:
        here = isinstance(place, str) and ("://" not in place or place.startswith("file://"))
        if not isinstance(place, str) or (here and not Path(place.removeprefix("file://")).is_dir()):
            raise ConfigError(override.key, override.typed, "a list of folders with config files")


def parse_override(word: str) -> Override:
    """Take an override apart; refuse one whose key cannot be one."""
    pattern = r"(\+\+|\+|~|)([A-Za-z_][\w-]*(?:[./][\w-]+)*)(@[^=]*)?(?:=(.*))?"
    match = re.fullmatch(pattern, word, re.ASCII | re.DOTALL)
    if match is None:
        raise ConfigError("override", word, "key=value, with a key of `bfl-run --help`")
    prefix, key, package, value = match.groups()
    if package is not None:
        raise ConfigError(key + package, word, f"{key}=NAME; a group has one place in the config")
    return Override(word=word, prefix=prefix, key=key, value=value)


def _read_value(override: Override, swept: bool, searches: bool, folders: Sequence[Path]) -> Any:
    """Give the value as Hydra reads it, or SWEPT; refuse what it cannot read, and several values without a sweep."""
    from hydra.errors import HydraException

    key, typed = override.key, override.typed
    names = _names(key, folders)
    if override.value is None and override.prefix != "~":
        raise ConfigError(key, typed, f"{key}=NAME; NAME is {', '.join(names)}" if names else f"{key}=VALUE")
    try:
        parsed = read_by_hydra(override.word)
    except HydraException:
        raise ConfigError(key, typed, list_names(names, typed) if names else READABLE) from None
    if not parsed.is_sweep_override():
        return parsed.value()
    if key.startswith(("hydra.", "hydra/")):
        raise ConfigError(key, typed, "one value; Hydra's own keys cannot be swept")
    if not swept:
        one = "one name" if names else "one value, or [a,b] for a list"
        raise ConfigError(key, typed, f"{one}; -m runs every combination of several")
    if parsed.is_interval_sweep() and not searches:
        raise ConfigError(key, typed, "values that can be counted: a,b,c or range(a,b)")
    return SWEPT


def read_by_hydra(word: str) -> Any:
    """Read an override by Hydra's own grammar, into an override of its own kind."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(word)


def check_points(overrides: Sequence[Any]) -> None:
    """Refuse a sweep, read by Hydra's grammar, that has no end or very many points, before they are listed."""
    points = 1.0
    for override in overrides:
        value = override.value()
        if type(value).__name__ == "RangeSweep":
            ends = (value.start, value.stop, value.step)
            num = (value.stop - value.start) / value.step if value.step and all(map(math.isfinite, ends)) else math.inf
        else:
            num = len(value.list) if type(value).__name__ == "ChoiceSweep" else 1
        points *= max(1, num)
        if points > MOST_POINTS:
            raise ConfigError(override.key_or_group, override.input_line, f"at most {MOST_POINTS:,} points of a sweep")


def _names_a_target(value: Any) -> bool:
    """Tell whether a value names something to call, however deep in it."""
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and "_target_" in map(str, value)) or any(map(_names_a_target, below))


def _check_choice(override: Override, value: Any, folders: Sequence[Path]) -> None:
    """Refuse an option that a group does not have, and what cannot be done to a group or to a key."""
    key, typed, prefix = override.key, override.typed, override.prefix
    names = _names(key, folders)
    if key.startswith("hydra.") and (key.endswith("._target_") or _names_a_target(value)):
        raise ConfigError(key, typed, "hydra/launcher=NAME and the like; parts of Hydra are chosen by name")
    if key in ("hydra.sweeper", "hydra.launcher") and not isinstance(value, dict):
        raise ConfigError(key, typed, f"its keys one by one, {key}.KEY=VALUE")
    if key == "hydra":
        raise ConfigError(key, typed, "Hydra's keys one by one, hydra.KEY=VALUE")
    if "/" in key and not names and not key.startswith("hydra/"):
        group, _, name = key.partition("/")
        dotted = [] if group in GROUPS else [key.replace("/", ".")]
        close = [f"{group}={name}"] if find_file(key, folders) else dotted
        raise ConfigError(key, typed, f"no such group; the groups are {', '.join(GROUPS)}{hint(close)}")
    if value == {} and "." not in key and not prefix:
        allowed = f"{{key: value}}, or the keys one by one, {key}.KEY=VALUE; empty braces change nothing"
        raise ConfigError(key, typed, allowed)
    if prefix == "~" and key in _keys_without_a_group(folders):
        raise ConfigError(key, typed, f"{key}=VALUE; it cannot be left out")
    if not names or isinstance(value, dict):
        return
    if prefix == "~" or (prefix and key in GROUPS):
        raise ConfigError(key, typed, f"{key}=NAME; NAME is {', '.join(names)}")
    if not isinstance(value, str) or not find_file(f"{key}/{value}", folders) or Path(value).name.startswith("_"):
        tables = "; also a table or figure of `bfl-paper list`" if key == "experiment" else ""
        close = get_close_matches(typed, read_tables(), 1) if tables and not get_close_matches(typed, names, 1) else []
        raise ConfigError(key, typed, list_names(names, typed) + tables + hint(close))


def _names(key: str, folders: Sequence[Path]) -> list[str]:
    """List the options of a group, but not of Hydra's own, which are not all files; none if the key is no group."""
    return list_options(key, folders) if is_group(key, folders) and key.split("/")[0] != "hydra" else []


def _keys_without_a_group(folders: Sequence[Path]) -> set[str]:
    file = read_file(folders[0] / "config.yaml", "config", "")
    return {entry.key for entry in file.entries} | set(file.sections)
