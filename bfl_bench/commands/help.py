"""`bfl-run --help`: the groups with their options; of options and keys that are named, what their files say.

The files are read as text, so that this needs neither torch nor Hydra.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from bfl_bench.commands.config_files import (
    ConfigFile,
    Entry,
    Option,
    find_file,
    is_group,
    list_options,
    read_file,
    read_option,
    read_title,
)
from bfl_bench.commands.words import CommandLine, check_places, hint, list_names, parse_override
from bfl_bench.errors import ConfigError
from bfl_bench.groups import GROUPS, PARTS
from bfl_bench.papers.spec import list_cells, read_tables, setting_of
from bfl_bench.records import config_folder

SWEPT = "hydra.sweeper.params."
WIDTH = 36  # of a key with its value; the comments beside begin behind it


def help_text(line: CommandLine) -> str:
    """Say what the words beside --help ask for: of nothing named, everything in short."""
    check_places(line)
    if not line.overrides:
        return _overview(line.folders)
    return "\n\n".join(_answer(word, line) for word in line.overrides)


def _overview(folders: Sequence[Path]) -> str:
    lines = [
        "bfl-run [key=value ...]        run one federated experiment",
        "bfl-run -m [key=a,b,c ...]     run every combination of the values",
        "bfl-run --help method=fola     the keys of that option; also of several, of a group, of a key (local.lr)",
        "",
        "For example: bfl-run method=fedprox dataset=mnist partition.alpha=0.01 local.epochs=5 local.lr=0.01",
    ]
    for group in GROUPS:
        lines += ["", *_group(group, folders)]
    lines += ["", "Other keys, with their defaults (conf/config.yaml):", ""]
    text = (config_folder() / "config.yaml").read_text()
    lines += ["  " + line for line in text.split("\n\n", 1)[1].split("hydra:")[0].strip().splitlines()]
    lines += [
        "",
        "bfl-run --cfg job         print the composed config and stop",
        "bfl-run --config-dir D    look for config files of your own in D too",
        "bfl-run --version         print the version",
        'bfl-run --hydra-help      Hydra\'s own options; tab completion: eval "$(bfl-run -sc install=bash)"',
        "bfl-data list             datasets and whether they are here",
    ]
    return "\n".join(lines)


def _group(group: str, folders: Sequence[Path]) -> list[str]:
    """List a group's options, each with the comment that its file begins with."""
    names = list_options(group, folders)
    width = max(16, *(len(name) for name in names)) if names else 16
    titles = (read_title(path) if (path := find_file(f"{group}/{name}", folders)) else "" for name in names)
    return [group, *(f"  {name:<{width}} {title}".rstrip() for name, title in zip(names, titles, strict=True))]


def _answer(word: str, line: CommandLine) -> str:
    """Say what one word asks for: group=option, a group, or a key."""
    override = parse_override(word)
    key, value = override.key, override.value
    if is_group(key, line.folders) and key != "hydra":
        if value is None:
            return "\n".join(_group(key, line.folders))
        return "\n\n".join(_option(key, name.strip(), line.folders) for name in value.split(","))
    found = _keys(key, line)
    if not found:
        named = ("--help", word) if value is None else (key, value)
        raise ConfigError(*named, _what_there_is(key, line.folders))
    return "\n".join(found)


def _option(group: str, name: str, folders: Sequence[Path]) -> str:
    names = list_options(group, folders)
    if group == "experiment" and find_file(f"{group}/{name}", folders) is None and name in read_tables():
        return _table(name)
    if find_file(f"{group}/{name}", folders) is None or Path(name).name.startswith("_"):
        raise ConfigError(group, name, list_names(names, name))
    option = read_option(group, name, folders)
    lines = [f"{group}={name}", *(f"  {text}" for text in (option.title, *option.description) if text)]
    brought = _all_brought(option, folders)
    if (values := brought.pop("brings", None)) is not None:  # a file that only sets values
        entries = read_option("brings", values, folders).entries.values()
        lines += ["", f"It brings {', '.join(f'{entry.key}={entry.value}' for entry in entries)}; yours wins."]
    if brought:
        choices = ", ".join(f"{other}={chosen}" for other, chosen in brought.items())
        lines += ["", f"It chooses {choices}; what the command line chooses wins."]
    swept = [entry for key, entry in option.entries.items() if key.startswith(SWEPT)]
    plain = [entry for entry in option.entries.values() if entry not in swept]
    for source in reversed(option.titles):  # its own file, then those that it builds on
        if own := [entry for entry in plain if entry.source == source]:
            lines += ["", _heading(source, option, names), *_lines(own)]
    if swept:
        as_typed = (replace(entry, key=entry.key.removeprefix(SWEPT), value=_unquoted(entry.value)) for entry in swept)
        lines += ["", "It sweeps, with -m:", *_lines(as_typed)]
    return "\n".join(lines)


def _table(name: str) -> str:
    """Describe a table or figure of a paper: its setting and its cells."""
    table = read_tables()[name]
    setting = setting_of(table, "paper").overrides()
    lines = [f"experiment={name}", f"  {table.title}", "", "It sets:", *(f"  {word}" for word in setting)]
    lines += ["", "Its cells, which -m runs:"]
    for cell in list({cell.label: cell for cell in list_cells(table)}.values()):
        own = [word for word in cell.overrides() if word not in setting]
        lines.append(f"  cell={cell.label}: {' '.join(own)}")
    for scale in table.scales[1:]:
        lines.append(f"scale={scale}: {len(list_cells(table, scale))} of {len(list_cells(table))} runs")
    return "\n".join(lines)


def _all_brought(option: Option, folders: Sequence[Path]) -> dict[str, str]:
    """Collect what an option chooses in other groups, and what these choose in turn where it does not."""
    brought = dict(option.brings)
    for group, name in option.brings.items():
        if find_file(f"{group}/{name}", folders):
            brought |= _all_brought(read_option(group, name, folders), folders) | brought
    return brought


def _heading(source: str, option: Option, names: Sequence[str]) -> str:
    """Say where keys come from; another option is named by the words that choose it."""
    name = source.removeprefix(f"{option.group}/")
    if name == option.name:
        return "Its keys:" if option.group in PARTS else "It sets:"
    return f"As {option.group}={name}:" if name in names else f"{source}.yaml: {option.titles[source]}"


def _unquoted(value: str) -> str:
    return value[1:-1] if value[:1] in ("'", '"') and value[-1:] == value[:1] else value


def _lines(entries: Iterable[Entry]) -> list[str]:
    lines: list[str] = []
    for entry in entries:
        lines += [f"  # {comment}" for comment in entry.above]
        word = f"{entry.key}={entry.value}"
        lines.append(f"  {word:<{WIDTH}}  # {entry.beside}" if entry.beside else f"  {word}")
    return lines


def _top() -> ConfigFile:
    return read_file(config_folder() / "config.yaml", "config", "")


def _keys(key: str, line: CommandLine) -> list[str]:
    """List the keys of this name, or below it: of conf/config.yaml, or of the options of a group that have it."""
    top = _top()
    if found := [entry for entry in top.entries if _is_below(entry.key, key) and not _is_below(entry.key, "hydra")]:
        comment = top.sections.get(key)
        return [*([f"{key}  # {comment}"] if comment else []), *_lines(found)]
    group = key.split(".")[0]
    if group not in GROUPS or "." not in key:
        return []
    lines: list[str] = []
    for name in list_options(group, line.folders):
        entries = read_option(group, name, line.folders).entries.values()
        if below := [entry for entry in entries if _is_below(entry.key, key)]:
            lines += [f"{group}={name}", *_lines(below)]
    return lines


def _is_below(key: str, above: str) -> bool:
    return key == above or key.startswith(f"{above}.")


def _what_there_is(key: str, folders: Sequence[Path]) -> str:
    """Say what --help knows, and what was perhaps meant."""
    keys = [entry.key for entry in _top().entries if not _is_below(entry.key, "hydra")]
    heads = list(dict.fromkeys(name.split(".")[0] for name in keys))
    close = get_close_matches(key, [*GROUPS, *heads], 1) or [name for name in keys if name.split(".")[-1] == key]
    if "." in key:
        group = key.split(".")[0]
        names = list_options(group, folders) if group in GROUPS else []
        options = (read_option(group, name, folders) for name in names)
        close = get_close_matches(key, [*keys, *(name for option in options for name in option.entries)], 1)
    return f"group=option, a group ({', '.join(GROUPS)}) or a key ({', '.join(heads)}){hint(close)}"
