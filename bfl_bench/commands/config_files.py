"""The config files as text: which options a group has, and what a file says, comments included.

Help and error messages need no Hydra for that. A file's keys are found by PyYAML, with the places where they stand, so
that the comments beside and above them can be read too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from bfl_bench.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A key of a config file, complete, with its value as written and its comments."""

    key: str
    value: str
    above: tuple[str, ...]
    beside: str
    source: str  # the file, as group/option


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A config file: what it begins with, its defaults list, and its keys."""

    title: str
    description: tuple[str, ...]  # what its first comment says beyond the title
    package: str  # where its keys go; "": to the top
    defaults: list[Any]
    entries: list[Entry]
    sections: dict[str, str]  # the comment beside a key that has keys below it


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a group with all that its file and the files below it in its defaults list say."""

    group: str
    name: str
    title: str
    description: tuple[str, ...]
    brings: dict[str, str]  # group -> the option that it chooses there
    entries: dict[str, Entry]  # by key
    titles: dict[str, str]  # of the files that the entries come from


def list_options(group: str, folders: Sequence[Path]) -> list[str]:
    """List what can be chosen in a group: its files or, where it has only folders, the files in these.

    A file with a leading underscore is a part of others.
    """
    for pattern in ("[!_]*.yaml", "*/[!_]*.yaml"):
        paths = (path.relative_to(folder / group) for folder in folders for path in (folder / group).glob(pattern))
        if names := {path.with_suffix("").as_posix() for path in paths}:
            return sorted(names)
    return []


def is_group(key: str, folders: Sequence[Path]) -> bool:
    return any((folder / key).is_dir() for folder in folders)


def find_file(name: str, folders: Sequence[Path]) -> Path | None:
    """Find a config file by its name below a folder, without suffix: the first folder wins, as in Hydra."""
    return next((path for folder in folders if (path := folder / f"{name}.yaml").is_file()), None)


def read_title(path: Path) -> str:
    """Read the first line that a file's comment says, without reading the rest of the file as YAML."""
    return next((line for line in _header(path.read_text()) if not line.startswith("@package")), "")


def read_file(path: Path, source: str, package: str) -> ConfigFile:
    """Read a file; `package` is where its keys go unless its header says otherwise."""
    text = path.read_text()
    header = _header(text)
    stated = next((line.split()[1] for line in header if line.startswith("@package ")), None)
    package = package if stated in (None, "_group_") else "" if stated == "_global_" else str(stated)
    comment = [line for line in header if not line.startswith("@package")]
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(str(path), f"line {line}", f"YAML ({error.problem})") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError(str(path), text.split("\n", 1)[0], "keys with values")
    entries: list[Entry] = []
    sections: dict[str, str] = {}
    if root is not None:
        entries = list(_entries(root, package, text, source, sections))
        _give_header(entries, comment, first_key=root.value[0][0].value if root.value else "")
    taken = entries[0].above if entries else ()
    defaults = (content or {}).get("defaults")
    return ConfigFile(
        title=comment[0] if comment else "",
        description=tuple(line for line in comment[1:] if line not in taken),
        package=package,
        defaults=defaults if isinstance(defaults, list) else [],
        entries=entries,
        sections=sections,
    )


def _header(text: str) -> list[str]:
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(_uncomment(line))
    return lines


def _uncomment(line: str) -> str:
    return line.strip()[1:].removeprefix(" ").rstrip()


def _give_header(entries: list[Entry], comment: Sequence[str], first_key: str) -> None:
    """Give what the first comment says below its title to the key that follows it, if that is one to set."""
    if entries and first_key not in ("defaults", "_target_") and entries[0].key.split(".")[-1] == first_key:
        entries[0] = replace(entries[0], above=tuple(comment[1:]))


def _entries(node: yaml.MappingNode, prefix: str, text: str, source: str, sections: dict[str, str]) -> Iterator[Entry]:
    lines = text.splitlines()
    for key_node, value_node in node.value:
        name, line = str(key_node.value), key_node.start_mark.line
        if name == "defaults" and key_node.start_mark.column == 0:
            continue
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value_node, yaml.MappingNode) and not value_node.flow_style:
            sections[key] = _beside(lines[line][key_node.end_mark.column + 1 :])
            yield from _entries(value_node, key, text, source, sections)
            continue
        end = value_node.end_mark
        beside = _beside(lines[end.line][end.column :]) if end.line < len(lines) else ""
        yield Entry(key=key, value=_written(value_node, text), above=_above(lines, line), beside=beside, source=source)


def _written(node: yaml.Node, text: str) -> str:
    """Cut the value out of the file, on one line."""
    if isinstance(node, yaml.SequenceNode) and not node.flow_style:
        return "[" + ", ".join(_written(item, text) for item in node.value) + "]"
    return " ".join(text[node.start_mark.index : node.end_mark.index].split()) or "null"


def _beside(rest: str) -> str:
    return _uncomment(rest) if rest.strip().startswith("#") else ""


def _above(lines: Sequence[str], line: int) -> tuple[str, ...]:
    """Collect the comment lines above a line; those that a file begins with are its header."""
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return tuple(_uncomment(lines[index]) for index in range(first, line)) if first > 0 else ()


def read_option(group: str, name: str, folders: Sequence[Path]) -> Option:
    """Read an option together with the files of its group that it builds on."""
    return _read(group, f"{group}/{name}", folders, group.replace("/", "."), ())


def _read(group: str, source: str, folders: Sequence[Path], package: str, above: tuple[str, ...]) -> Option:
    path = find_file(source, folders)
    if path is None or source in above:
        raise ConfigError(f"defaults of {above[-1] if above else group}", source, "another file of the config folders")
    file = read_file(path, source, package)
    chosen = (_chosen(item, source) for item in file.defaults if isinstance(item, dict))
    brings = {other: option for other, option in chosen if option is not None}
    own = {entry.key: entry for entry in file.entries}
    entries: dict[str, Entry] = {}
    titles: dict[str, str] = {}
    names = [item.split("@")[0] for item in file.defaults if isinstance(item, str)]
    for item in names if "_self_" in names else [*names, "_self_"]:
        if item == "_self_":
            entries |= {key: _explained(entry, entries.get(key)) for key, entry in own.items()}
            continue
        base = _read(group, _resolve(item, source), folders, file.package, (*above, source))
        entries |= base.entries
        titles |= base.titles
        brings = base.brings | brings
    name = source.removeprefix(f"{group}/")
    return Option(
        group=group,
        name=name,
        title=file.title,
        description=file.description,
        brings=brings,
        entries=entries,
        titles={**titles, source: file.title},
    )


def _chosen(item: dict[str, Any], source: str) -> tuple[str, str | None]:
    """Take apart an item such as `override /model@_global_.model: lenet`: the group and its option."""
    key, value = next(iter(item.items()))
    group = _resolve(key.split()[-1].split("@")[0], source)
    return group, None if value is None else ",".join(value) if isinstance(value, list) else str(value)


def _resolve(name: str, source: str) -> str:
    """Complete a name of a defaults list: it counts from the folder of its file, or with a slash from the top."""
    return name[1:] if name.startswith("/") else f"{source.rpartition('/')[0]}/{name}".lstrip("/")


def _explained(entry: Entry, base: Entry | None) -> Entry:
    """Add what another file says about a key to a value that replaces its own."""
    if base is None:
        return entry
    beside = "; ".join(comment for comment in (entry.beside, base.beside) if comment)
    return replace(entry, above=(*base.above, *entry.above), beside=beside)
