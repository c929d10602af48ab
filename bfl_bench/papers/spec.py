"""A paper's tables and figures as cells, read from conf/paper/NAME.yaml; a cell is the overrides of one run.

A table is the product of its cells, the axes of its grid and its seeds. An item of an axis is a value of the key that
the axis is called by, or a label with several values. What counts more than what: values of the table, of the cell, of
the grid's items, then of the scale, and of cells that a scale itself defines. Nothing here looks at a run.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bfl_bench.errors import ConfigError
from bfl_bench.identity import RUNS
from bfl_bench.records import config_folder

SCALES = ("paper", "cpu", "smoke")
KEYS = {"title", "of", "experiment", "values", "row", "column", "cells", "grid", "seeds", "scales"}
SCALE_KEYS = {"values", "cells", "also", "grid", "seeds", "limit"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run of a table: what it is called along each axis, and what it is."""

    names: Mapping[str, str]  # by axis; `cell` among them
    values: Mapping[str, Any]  # by key, groups and the seed among them
    own: str = ""  # of a cell that a scale adds or replaces: what it has otherwise than the paper's, if there is one
    words: tuple[str, ...] = ()  # of the command line; they count more than the values
    starts: Mapping[str, "Cell"] = field(default_factory=dict)  # by key: the cell that it begins with

    @property
    def label(self) -> str:
        return self.names["cell"]

    @property
    def seed(self) -> int:
        return int(self.values["seed"])

    def overrides(self) -> list[str]:
        """The words for bfl-run, without those of `starts`, whose folders are known only with a config."""
        return [*(override(key, value) for key, value in self.values.items()), *self.words]

    def with_words(self, words: Sequence[str]) -> "Cell":
        """Let words of the command line win over the values of the same keys; of its starts, too."""
        keys = {word.lstrip("+~").partition("=")[0] for word in words}
        values = {key: value for key, value in self.values.items() if key not in keys}
        starts = {key: cell.with_words(words) for key, cell in self.starts.items()}
        return replace(self, values=values, words=(*self.words, *words), starts=starts)

    def fill(self, template: str) -> str:
        """Replace {axis} by the name there, and {key} by its value."""
        return re.sub(r"\{([^}]+)\}", lambda m: str(self.names.get(m[1], self.values.get(m[1], ""))), template)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table or figure of a paper."""

    paper: str
    name: str  # table2
    title: str
    runs_of: str  # the table whose cells these are; itself, unless it is a view
    content: Mapping[str, Any]

    @property
    def full_name(self) -> str:
        return f"{self.paper}_{self.name}"

    @property
    def scales(self) -> list[str]:
        return ["paper", *self.content["scales"]]

    def scale(self, scale: str) -> Mapping[str, Any]:
        if scale not in self.scales:
            raise ConfigError("scale", scale, ", ".join(self.scales))
        found: Mapping[str, Any] = self.content["scales"].get(scale, {})
        return found

    def limit(self, scale: str) -> int | None:
        """How many points of a sweep are run unless the command line says otherwise."""
        return self.scale(scale).get("limit", read_smoke()[1] if scale == "smoke" else None)

    def row(self, cell: Cell) -> str:
        return cell.fill(self.content.get("row", "{cell}"))

    def column(self, cell: Cell) -> str:
        return cell.fill(self.content.get("column", "{cell}"))


def override(key: str, value: Any) -> str:
    """Write a value as on the command line; text with signs that mean something there stands in quotes."""
    if isinstance(value, str):
        return f"{key}={value}" if re.fullmatch(r"[\w./${}\[\]-]*", value) else f"{key}='{value}'"
    return f"{key}={json.dumps(value, separators=(',', ':'))}"


@cache
def read_smoke() -> tuple[dict[str, Any], int]:
    """Read what conf/scale/smoke.yaml shortens of everything, and its limit of a sweep."""
    content = yaml.safe_load((config_folder() / "scale" / "smoke.yaml").read_text())
    limit = content.pop("hydra")["sweeper"]["limit"]
    del content["scale"]
    return dict(_flatten(content)), limit


def _flatten(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@cache
def read_tables() -> dict[str, Table]:
    """Read all tables and figures, by their full names such as fola_table2."""
    tables: dict[str, Table] = {}
    for path in sorted((config_folder() / "paper").glob("*.yaml")):
        tables |= read_paper(path)
    return tables


def read_paper(path: Path) -> dict[str, Table]:
    """Read a paper's file; a misspelt key is refused."""
    content = yaml.safe_load(path.read_text())
    tables: dict[str, Table] = {}
    for name, entry in content.items():
        base = content.get(entry.get("of", name))
        if base is None:
            raise ConfigError(f"{path.name}: {name}.of", entry["of"], ", ".join(content))
        _check_keys(f"{path.name}: {name}", entry, KEYS)
        for scale, changed in base["scales"].items():
            _check_keys(f"{path.name}: {name}.scales.{scale}", changed, SCALE_KEYS)
        table = Table(
            paper=path.stem, name=name, title=entry["title"], runs_of=entry.get("of", name), content=base
        )
        tables[table.full_name] = table
    return tables


def _check_keys(place: str, entry: Mapping[str, Any], allowed: Iterable[str]) -> None:
    for key in entry:
        if key not in allowed:
            raise ConfigError(place, key, ", ".join(sorted(allowed)))


def find_table(name: str) -> Table:
    tables = read_tables()
    if name not in tables:
        close = get_close_matches(name, tables, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError("table", name, f"a name of `bfl-paper list`{hint}")
    return tables[name]


def list_cells(table: Table, scale: str = "paper") -> list[Cell]:
    """List a table's cells at a scale; a cell that others begin with comes before them."""
    content, changed = table.content, table.scale(scale)
    shortened = (read_smoke()[0] if scale == "smoke" else {}) | changed.get("values", {})
    own = {_label(item): item for item in content["cells"]}
    chosen = [(item, True) if isinstance(item, dict) else (own.get(item, item), False) for item in changed.get("cells", own)]
    chosen += [(item, True) for item in changed.get("also", [])]
    cells: list[Cell] = []
    for item, added in chosen:
        if isinstance(item, str):
            raise ConfigError(f"{table.full_name}: scales.{scale}.cells", item, ", ".join(own))
        grid = {axis: [_expand(axis, i, {}) for i in items] for axis, items in content.get("grid", {}).items()}
        for narrower in (changed.get("grid", {}), item.get("grid", {})):
            known = {axis: {label: values for label, values in items} for axis, items in grid.items()}
            grid |= {axis: [_expand(axis, i, known.get(axis, {})) for i in items] for axis, items in narrower.items()}
        grid = {axis: items if axis not in shortened else [(str(shortened[axis]), {})] for axis, items in grid.items()}
        seeds = item.get("seeds", changed.get("seeds", content["seeds"]))
        label, values = _expand("cell", item, {})
        for *places, seed in itertools.product(*grid.values(), _seeds(seeds)):
            names = {"cell": label, **{axis: name for axis, (name, _) in zip(grid, places, strict=True)}}
            along = {key: value for _, found in places for key, value in found.items()}
            before, after = ({}, values) if added else (values, {})
            own = _list(values) if added else ""
            merged = {"experiment": content.get("experiment")} | content.get("values", {}) | before | along
            merged |= shortened | after | {"seed": seed}
            cells.append(_link(names, merged, own, cells))
    return cells


def _link(names: Mapping[str, str], values: Mapping[str, Any], own: str, earlier: Sequence[Cell]) -> Cell:
    """Find the cells that a cell begins with: of that label, and alike in all axes that they have."""
    starts: dict[str, Cell] = {}
    for key in RUNS:
        if isinstance(wanted := values.get(key), dict):
            there = {**names, "cell": wanted["cell"]}
            (starts[key],) = (
                cell
                for cell in earlier
                if cell.seed == values["seed"] and all(there.get(axis) == name for axis, name in cell.names.items())
            )
    rest = {key: value for key, value in values.items() if key not in starts and (key, value) != ("experiment", None)}
    return Cell(names=names, values=rest, own=own, starts=starts)


def _label(item: Any) -> str:
    return str(item["label"]) if isinstance(item, dict) else str(item)


def _expand(axis: str, item: Any, known: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Give an item's label and values; a label that the axis has already stands for the values there."""
    if isinstance(item, dict):
        return _label(item), {key: value for key, value in item.items() if key not in ("label", "grid", "seeds")}
    if str(item) in known:
        return str(item), dict(known[str(item)])
    return str(item), {axis: item}


def _seeds(seeds: int | Sequence[int]) -> Sequence[int]:
    return range(seeds) if isinstance(seeds, int) else seeds


def axes_of(table: Table) -> list[str]:
    return ["cell", *table.content.get("grid", {})]


def setting_of(table: Table, scale: str) -> Cell:
    """What all cells have in common: the values of the table and of the scale."""
    shortened = (read_smoke()[0] if scale == "smoke" else {}) | table.scale(scale).get("values", {})
    chosen = {"experiment": name} if (name := table.content.get("experiment")) else {}
    return Cell(names={"cell": table.name}, values=chosen | table.content.get("values", {}) | shortened)


def narrow(cells: Iterable[Cell], axis: str, wanted: str) -> list[Cell]:
    """Keep the cells that are called so along an axis: one name, or several with commas between."""
    cells = list(cells)
    there = list(dict.fromkeys(cell.names[axis] for cell in cells))
    names = [wanted] if wanted in there else wanted.split(",")
    for name in names:
        if name not in there:
            raise ConfigError(axis, name, "; ".join(there))
    return [cell for cell in cells if cell.names[axis] in names]


def describe_scale(table: Table, scale: str) -> str:
    """Say what a scale has otherwise than the paper, by its definition."""
    changed = table.scale(scale)
    parts = [
        f"{key} {json.dumps(value)} ({_papers(table, key)})"
        for key, value in ((read_smoke()[0] if scale == "smoke" else {}) | changed.get("values", {})).items()
        if key != "eval.batch_size"  # changes no result
    ]
    for axis, items in changed.get("grid", {}).items():
        there = [_label(item) for item in table.content.get("grid", {}).get(axis, [])]
        kept = [_label(item) for item in items]
        if kept != there:
            parts.append(f"only {axis} {', '.join(kept)} (paper: {', '.join(there)})")
        own = [item for item in items if isinstance(item, dict)]
        parts += [f"{_label(item)} with {_list(item)}" for item in own]
    cells = changed.get("cells", [])
    names = [_label(item) for item in table.content["cells"]]
    if left_out := [name for name in names if cells and name not in map(_label, cells)]:
        parts.append(f"without {', '.join(left_out)}")
    parts += [f"{_label(c)} with {_list(c)}" for c in (*cells, *changed.get("also", [])) if isinstance(c, dict)]
    if "seeds" in changed and _seeds(changed["seeds"]) != _seeds(table.content["seeds"]):
        num, papers = len(_seeds(changed["seeds"])), len(_seeds(table.content["seeds"]))
        parts.append(f"{num} seeds (here as published: {papers})" if num > papers else f"{num} of {papers} seeds")
    return "; ".join(parts)


def _list(item: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in item.items() if key not in ("label", *RUNS)}
    return ", ".join(f"{key} {json.dumps(value)}" for key, value in shown.items())


def _papers(table: Table, key: str) -> str:
    """What a key has at the paper's scale: of the cells, of the grid, of the table, or of its experiment."""
    found = dict.fromkeys(json.dumps(cell.values[key]) for cell in list_cells(table) if key in cell.values)
    return f"paper: {' or '.join(found)}" if found else "paper: as in the experiment"


