"""A paper's tables and figures as cells, read from conf/paper/NAME.yaml; a cell is the overrides of one run.

A table is the product of its cells, the axes of its grid and its seeds. An item of an axis is a value of the key that
the axis is called by, or a label with several values. What counts more than what: values of the table, of the cell, of
the grid's items, then of the scale, and of cells that a scale itself defines. A cell may have axes of its own; a scale
narrows those that there are. Nothing here looks at a run.
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

Place = tuple[str, dict[str, Any]]
"""An item of an axis: what it is called, and its values."""

KEYS = {
    *("title", "of", "published", "experiment", "values", "row", "column", "cells", "grid", "seeds"),
    *("ours", "released", "scales"),
}
SILENT = ("eval.batch_size", "eval.local_every")  # they change no result, only which are taken along
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
    def published(self) -> str:
        """Which of the paper's tables its numbers stand beside, as published/*.csv call it."""
        return str(self.content.get("published", self.name.removeprefix("table")))

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
        found: int | None = self.scale(scale).get("limit", read_smoke()[1] if scale == "smoke" else None)
        return found

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
        check_keys(f"{path.name}: {name}", entry, KEYS)
        for scale, changed in base["scales"].items():
            check_keys(f"{path.name}: {name}.scales.{scale}", changed, SCALE_KEYS)
        table = Table(paper=path.stem, name=name, title=entry["title"], runs_of=entry.get("of", name), content=base)
        tables[table.full_name] = table
    return tables


def check_keys(place: str, entry: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Refuse a key that is not among those allowed."""
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
    shortened = _shortened(table, scale)
    base = {"experiment": content.get("experiment")} | content.get("values", {})
    cells: list[Cell] = []
    for item, added in _items(table, scale):
        of_table, of_item = content.get("grid", {}), item.get("grid", {})
        of_scale = {axis: items for axis, items in changed.get("grid", {}).items() if axis in of_table | of_item}
        grid = _grid(of_table, *((of_scale, of_item) if added else (of_item, of_scale)))
        grid = {axis: items if axis not in shortened else [(str(shortened[axis]), {})] for axis, items in grid.items()}
        label, values = _expand("cell", item, {})
        own = _list(values) if added else ""
        axes: list[list[Place]] = list(grid.values())
        for places in itertools.product(*axes):
            names = {"cell": label} | {axis: name for axis, (name, _) in zip(grid, places, strict=True)}
            along = {key: value for _, found in places for key, value in found.items()}
            merged = base | along | shortened | values if added else base | values | along | shortened
            for seed in _seeds(item.get("seeds", changed.get("seeds", content["seeds"]))):
                cells.append(_link(names, merged | {"seed": seed}, own, cells))
    return cells


def _items(table: Table, scale: str) -> list[tuple[Mapping[str, Any], bool]]:
    """List the cells before they are multiplied, and whether the scale defines them itself."""
    changed = table.scale(scale)
    papers = {_label(item): item for item in table.content["cells"]}
    found: list[tuple[Mapping[str, Any], bool]] = []
    for item in [*changed.get("cells", papers), *changed.get("also", [])]:
        if not isinstance(item, dict) and item not in papers:
            raise ConfigError(f"{table.full_name}: scales.{scale}.cells", item, "; ".join(papers))
        found.append((item, True) if isinstance(item, dict) else (papers[item], False))
    return found


def _shortened(table: Table, scale: str) -> dict[str, Any]:
    common = read_smoke()[0] if scale == "smoke" else {}
    return {**common, **table.scale(scale).get("values", {})}


def _grid(*grids: Mapping[str, Sequence[Any]]) -> dict[str, list[Place]]:
    """Read a grid; the axes of later ones replace those of earlier ones, whose labels they may use."""
    found: dict[str, list[Place]] = {}
    known: dict[str, dict[str, dict[str, Any]]] = {}
    for grid in grids:
        for axis, items in grid.items():
            labels = known.setdefault(axis, {})
            found[axis] = [_expand(axis, item, labels) for item in items]
            labels |= dict(found[axis])
    return found


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


def _expand(axis: str, item: Any, known: Mapping[str, Mapping[str, Any]]) -> Place:
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
    chosen = {"experiment": name} if (name := table.content.get("experiment")) else {}
    values = chosen | table.content.get("values", {}) | _shortened(table, scale)
    return Cell(names={"cell": table.name}, values=values)


def narrow(cells: Iterable[Cell], axis: str, wanted: str) -> list[Cell]:
    """Keep the cells that are called so along an axis: one name, or several with commas between."""
    cells = list(cells)
    there = list(dict.fromkeys(cell.names[axis] for cell in cells))
    names = split_names(wanted, there)
    if names is None:
        raise ConfigError(axis, wanted, "; ".join(there))
    return [cell for cell in cells if cell.names[axis] in names]


def split_names(wanted: str, there: Iterable[str]) -> list[str] | None:
    """Take names with commas between them apart, although names may have commas of their own; None: not of these."""
    if not wanted:
        return []
    for name in sorted(there, key=len, reverse=True):
        if wanted == name:
            return [name]
        if wanted.startswith(f"{name},") and (rest := split_names(wanted[len(name) + 1 :], there)) is not None:
            return [name, *rest]
    return None


def describe_scale(table: Table, scale: str, papers: Mapping[str, Any]) -> str:
    """Say what a scale has otherwise than the paper, by its definition; `papers` is the table's setting, flat."""
    changed = table.scale(scale)
    parts = [
        f"{key} {json.dumps(value)} ({_whose(table, key)}: {_papers(table, key, papers)})"
        for key, value in _shortened(table, scale).items()
        if key not in (*SILENT, "data_dir")
    ]
    parts += ["random stand-ins for the data"] if "data_dir" in _shortened(table, scale) else []
    for axis, items in changed.get("grid", {}).items():
        grids = [table.content.get("grid", {}), *(cell.get("grid", {}) for cell in table.content["cells"])]
        there = list(dict.fromkeys(_label(item) for grid in grids for item in grid.get(axis, [])))
        kept = [_label(item) for item in items]
        if kept != there:
            parts.append(f"only {axis} {_join(kept)} ({_whose(table, axis)}: {_join(there)})")
        own = [item for item in items if isinstance(item, dict)]
        parts += [f"{_label(item)} with {_list(item)}" for item in own]
    cells = changed.get("cells", [])
    names = [_label(item) for item in table.content["cells"]]
    if left_out := [name for name in names if cells and name not in map(_label, cells)]:
        parts.append(f"without {_join(left_out)}")
    parts += [f"{_label(c)} with {_list(c)}" for c in (*cells, *changed.get("also", [])) if isinstance(c, dict)]
    if "seeds" in changed and _seeds(changed["seeds"]) != _seeds(table.content["seeds"]):
        num, published = len(_seeds(changed["seeds"])), len(_seeds(table.content["seeds"]))
        parts.append(f"{num} {'seed' if num == 1 else 'seeds'} ({_whose(table, 'seeds')}: {published})")
    return "; ".join(parts)


def _join(names: Sequence[str]) -> str:
    return (" and " if any("," in name for name in names) else ", ").join(names)


def _list(item: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in item.items() if key not in ("label", "grid", "seeds", *RUNS)}
    along = [f"{axis} {_join([_label(item) for item in items])}" for axis, items in item.get("grid", {}).items()]
    return ", ".join([f"{key} {json.dumps(value)}" for key, value in shown.items()] + along)


def _whose(table: Table, key: str) -> str:
    """Say whose the value at full length is: the paper's, or the released code's or ours where it prints none."""
    if key in table.content.get("released", ()):
        return "released code"
    return "ours at full length" if key in table.content.get("ours", ()) else "paper"


def _papers(table: Table, key: str, papers: Mapping[str, Any]) -> str:
    """What a key has at the paper's scale: of the grid, of the cells, or else of the table's setting."""
    content = table.content
    if key in content.get("grid", {}):
        return " or ".join(map(_label, content["grid"][key]))
    found = [item.get(key, papers.get(key)) for item in content["cells"]]
    for items in content.get("grid", {}).values():
        found = [item.get(key, value) if isinstance(item, dict) else value for value in found for item in items]
    return " or ".join(dict.fromkeys(map(json.dumps, found)))
