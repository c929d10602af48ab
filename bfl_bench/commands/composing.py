"""Why a config does not compose: Hydra's and OmegaConf's errors as `key: got X, allowed: Y`.

Their texts name the key in a dozen ways, or not at all. So the override that is to blame is found by composing with one
override after the other, and the sentence says what stands at its key without it.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from bfl_bench.checks import unknown_key
from bfl_bench.commands.config_files import find_file, is_group, list_options, read_option
from bfl_bench.commands.words import CommandLine, Override, list_names, parse_override, read_by_hydra, read_words
from bfl_bench.errors import ConfigError, as_written
from bfl_bench.groups import GROUPS

ADVICE = ("full_key:", "See https:", "Config search path:", "To append", "Did you mean")
"""How the lines begin that follow the reason in an error of Hydra or OmegaConf."""

LAUNCHERS = {"joblib": "joblib", "submitit_local": "slurm", "submitit_slurm": "slurm", "ray": "ray"}
"""Hydra's launchers that an extra of this package installs."""


def explain(error: BaseException, words: Sequence[str]) -> ConfigError:
    """Say which key is wrong, what was given and what is allowed."""
    try:
        return _explain(error, read_words(words))
    except ConfigError as found:  # a word that is wrong by itself, out of what a file sweeps
        return found


def _explain(error: BaseException, line: CommandLine) -> ConfigError:
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue

    reason = _reason(error)
    if isinstance(error, OverrideParseException):  # of what a file sweeps; that of the command line is checked before
        key, _, value = error.override.partition("=")
        return ConfigError(key, value, f"a value, or several, that can be read ({reason})")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(error.missing_cfg_file, error.options or (), str(error), line)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return ConfigError(error.problem_mark.name, f"line {error.problem_mark.line + 1}", f"YAML ({error.problem})")
    if isinstance(error, InterpolationResolutionError | MissingMandatoryValue) and error.full_key:
        return _wrong_reference(error, error.full_key, line, reason)
    if blamed := _find_culprit(line, str(error)):
        override, config = blamed
        if _is_choice(override, line):
            return ConfigError(override.key, override.typed, f"an option that fits to the others ({reason})")
        return _wrong_override(override, config, reason)
    of_hydra = [word for word in line.overrides if word.lstrip("+~").startswith("hydra")]  # composes, but is of no use
    key = of_hydra[0].lstrip("+~").partition("=")[0] if len(of_hydra) == 1 else "config"
    typed = " ".join(of_hydra or line.overrides)
    return ConfigError(key, typed, f"files and values that fit together ({reason})")


def _reason(error: BaseException) -> str:
    """Take what Hydra or OmegaConf says, on one line, without the places and advice that follow it."""
    lines = str(error.__cause__ or error).strip().splitlines()
    said = itertools.takewhile(lambda text: not text.strip().startswith(ADVICE), lines)
    return " ".join(" ".join(said).split())


def check_package(line: CommandLine) -> None:
    """Refuse a --package that the config does not have; Hydra would end there with an exit code of its own."""
    package = line.options.get("--package", "_global_")
    if package != "_global_":
        config = _compose(line, [parse_override(word) for word in line.overrides])
        if config is not None and _find(config, package)[1]:
            raise ConfigError("--package", package, _unknown(package, config))


def _find_culprit(line: CommandLine, text: str) -> tuple[Override, dict[str, Any]] | None:
    """Find the first override with which the config does not compose, and give the config without it.

    Choices of groups come first, because they decide which keys there are, and then what the error's text names.
    """
    overrides = [parse_override(word) for word in line.overrides if not read_by_hydra(word).is_sweep_override()]
    choices = [override for override in overrides if _is_choice(override, line)]
    config = _compose(line, choices)
    if config is None:
        kept: list[Override] = []
        for choice in choices:
            before = _compose(line, kept)
            if before is not None and _compose(line, [*kept, choice]) is None:
                return choice, before
            kept.append(choice)
        return None
    values = [override for override in overrides if override not in choices]
    for override in sorted(values, key=lambda override: override.key not in text):
        if len(values) == 1 or _compose(line, [*choices, override]) is None:
            return override, config
    return None


def _is_choice(override: Override, line: CommandLine) -> bool:
    """Tell whether an override chooses an option; {a: 1} stands for keys below the group."""
    key = override.key
    chooses = "/" in key or key in GROUPS or is_group(key, line.folders)
    return chooses and not (override.value or "").startswith("{")


def _compose(line: CommandLine, overrides: Sequence[Override]) -> dict[str, Any] | None:
    """Compose a config with Hydra's part, values not resolved; None if it does not compose."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    words = with_own_folder(line, [override.word for override in overrides])
    name = line.options.get("--config-name", "config")
    main = line.folders[0]
    try:
        if GlobalHydra.instance().is_initialized():  # by the sweep that is going on
            config = compose(name, words, return_hydra_config=True)
        else:
            with initialize_config_dir(str(main), version_base="1.3"):
                config = compose(name, words, return_hydra_config=True)
        plain: Any = OmegaConf.to_container(config, resolve=False)
        return dict(plain)
    except Exception:  # whatever it is: it is being explained already
        return None


def with_own_folder(line: CommandLine, words: Sequence[str]) -> list[str]:
    """Add to the overrides where `--config-dir` says that there are further config files."""
    _, *own = line.folders
    return [*words, *(f"hydra.searchpath=['file://{folder.absolute()}']" for folder in own)]


def _missing_option(missing: str, options: Sequence[str], text: str, line: CommandLine) -> ConfigError:
    """Say which option does not exist, and who chose it: a word, or the defaults list of a file."""
    overrides = [parse_override(word) for word in line.overrides]
    group, _, name = missing.rpartition("/")
    for override in overrides:
        if override.value is not None and f"{override.key}/{override.value.strip()}" == missing:
            group, name = override.key, override.value
            break
    names = [option for option in options or list_options(group, line.folders) if not option.startswith("_")]
    allowed = list_names(names, name)
    if group == "hydra/launcher" and name in LAUNCHERS:
        allowed += f"; {name} has to be installed first: pip install -e '.[{LAUNCHERS[name]}]'"
    if any(override.key == group and override.value == name for override in overrides):
        return ConfigError(group, name, allowed)
    chosen = (f"{override.key}/{override.value}" for override in overrides if _brings(override, group, name, line))
    where = next(chosen, text.split("'")[1] if text.startswith("In '") else "a file")
    return ConfigError(f"defaults of {where}", missing, f"{group}/NAME; NAME is {allowed}")


def _brings(choice: Override, group: str, name: str, line: CommandLine) -> bool:
    """Tell whether the option that a word chooses is what chooses this other one."""
    value = choice.value or ""
    if not value or find_file(f"{choice.key}/{value}", line.folders) is None:
        return False
    try:
        return read_option(choice.key, value, line.folders).brings.get(group) == name
    except ConfigError:  # that file is wrong too
        return False


def _wrong_override(override: Override, config: dict[str, Any], reason: str) -> ConfigError:
    """Say what is wrong with an override without which the config composes."""
    key, typed = override.key, override.typed
    for dotted in _dotted(override) if override.prefix in ("", "~") else []:
        if _find(config, dotted)[1]:
            return ConfigError(dotted, typed, _unknown(dotted, config))
    if override.prefix == "+":
        return ConfigError(key, typed, f"{override.word[1:]}; the key is there already")
    if override.prefix == "~":
        return ConfigError(key, typed, f"~{key}, without a value" if override.value else "a key that can be left out")
    node, _ = _find(config, key)
    if isinstance(node, dict):
        return ConfigError(key, typed, f"its keys one by one: {', '.join(f'{key}.{name}' for name in node)}")
    kind = "a list" if isinstance(node, list) else "a value"
    return ConfigError(key, typed, f"{kind} such as {as_written(node)} ({reason})")


def _dotted(override: Override) -> list[str]:
    """List the keys that an override sets: those of {a: 1} one by one."""
    value = read_by_hydra(override.word).value()
    return [f"{override.key}.{name}" for name in _leaves(value)] if isinstance(value, dict) else [override.key]


def _leaves(node: dict[Any, Any]) -> Iterator[str]:
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from (f"{name}.{below}" for below in _leaves(value))
        else:
            yield str(name)


def _find(config: dict[str, Any], key: str) -> tuple[Any, list[str]]:
    """Follow a key as far as it goes: the last node, and the parts of the key that are missing there."""
    node: Any = config
    parts = key.split(".")
    for index, part in enumerate(parts):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return node, parts[index:]
    return node, []


def _unknown(key: str, config: dict[str, Any]) -> str:
    node, missing = _find(config, key)
    above = key.removesuffix("." + ".".join(missing))
    if not isinstance(node, dict):
        return f"no such key; {above} has none below it, it is {as_written(node)}"
    known = {name: value for name, value in config.items() if name != "hydra"}
    elsewhere = [dotted for dotted in _leaves(known) if dotted.split(".")[-1] == missing[0]]
    names = dict.fromkeys([*map(str, node), *(GROUPS if node is config else ())])
    return unknown_key(missing[0], [name for name in names if name != "hydra"], elsewhere)


def _wrong_reference(error: Any, key: str, line: CommandLine, reason: str) -> ConfigError:
    """Say which value of the config is missing, or refers to what is not there."""
    from omegaconf.errors import MissingMandatoryValue

    if isinstance(error, MissingMandatoryValue):
        return ConfigError(key, "???", "a value; the key has no default")
    typed = (override.value for override in map(parse_override, line.overrides) if override.key == key)
    written = next(typed, None) if error.child_node is None else error.child_node._value()
    return ConfigError(key, written, f"a value, or the name of another key as in ${{local.lr}} ({reason})")
