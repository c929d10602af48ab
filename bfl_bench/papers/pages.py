"""A table or figure at a scale, with the runs of its cells, and what is written of it.

A run belongs to a cell if it is what the cell's config says, and to none otherwise. What a scale shortens stands in the
table itself: as its last row, and in CSV as a column; so do splits that were repaired, as a row.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bfl_bench import report
from bfl_bench.papers.spec import Cell, Table, axes_of, list_cells
from bfl_bench.papers.tables import read_published
from bfl_bench.report import Group, Run, Stats
from bfl_bench.report.provenance import describe_repairs

MOST_LINES = 20  # of commands for what is missing, before there is one for all


@dataclass(frozen=True, kw_only=True)
class Page:
    """A table or figure at a scale, with the finished runs of its cells, in their order."""

    table: Table
    scale: str
    entries: tuple[tuple[Cell, Run], ...]
    missing: tuple[Cell, ...]
    notes: tuple[str, ...]
    shortened: str  # what the scale has otherwise than the paper; empty: nothing
    to: Path

    @property
    def name(self) -> str:
        return self.table.full_name + ("" if self.scale == "paper" else f"_{self.scale}")

    @property
    def runs(self) -> list[Run]:
        return [run for _, run in self.entries]

    def cell(self, found: Run | Group) -> Cell:
        run = found if isinstance(found, Run) else found.runs[0]
        return next(cell for cell, other in self.entries if other is run)

    def groups(self) -> list[Group]:
        """The runs, by cell but for the seed, in the order of the cells."""
        members: dict[str, list[Run]] = {}
        for cell, run in self.entries:
            key = json.dumps([sorted(cell.names.items()), cell.own])
            members.setdefault(key, []).append(run)
        return [Group(report.without(runs[0].config, ["seed"]), tuple(runs)) for runs in members.values()]

    def absent(self, axis: str) -> list[str]:
        """List what the paper has along an axis and no run here is of."""
        there = {cell.names.get(axis) for cell, _ in self.entries}
        names = [cell.names[axis] for cell in list_cells(self.table) if axis in cell.names]
        return [name for name in dict.fromkeys(names) if name not in there]

    def published(self, number: str | None = None) -> dict[tuple[str, str], float]:
        """What the paper prints, by row and column; nothing beside random stand-in data."""
        if self.scale == "smoke":
            return {}
        return read_published(self.table.paper, number or self.table.published)

    def write(self, text: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Write Markdown, LaTeX and CSV, with the scale in the tables, and the commands for what is missing."""
        said = [f"scale {self.scale}: {self.shortened}"] if self.shortened else []
        said += ["(?): one seed here, so that no difference can be marked as beyond the spread"] * ("(?)" in text)
        last = "".join(f"| {sentence} |\n" for sentence in [*said, *describe_repairs(self.runs)])
        body = add_last_row(text, last) + self.describe_missing() + report.describe_notes(self.notes)
        scale = {"scale": f"{self.scale}: {self.shortened}" if self.shortened else self.scale}
        report.write(self.to, self.name, body, [{**row, **scale} for row in rows])

    def save_figure(self, figure: Any) -> None:
        """Save a figure; along an axis of rounds there are ticks at whole rounds only."""
        from matplotlib.ticker import MaxNLocator

        for axes in figure.axes:
            if "round" in (axes.get_xlabel(), figure.get_supxlabel()):
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        report.save_figure(figure, self.to, self.name)

    def describe_missing(self) -> str:
        """Name the cells without a run, with the commands that make them."""
        if not self.missing:
            return ""
        together: dict[str, list[Cell]] = {}
        for cell in self.missing:
            together.setdefault(cell.label, []).append(cell)
        start = f"bfl-paper run {self.table.full_name}" + ("" if self.scale == "paper" else f" scale={self.scale}")
        if len(together) > MOST_LINES:
            return f"\nNo run of {len(self.missing)} cells:\n\n- all: `{start}`\n"
        lines = {
            f"{label}{_where(self.table, cells)}": f"{start} {_words(self.table, label, cells)}"
            for label, cells in together.items()
        }
        return report.describe_missing(lines)


def _where(table: Table, cells: Sequence[Cell]) -> str:
    """Say where along the axes cells lie, of axes with several places."""
    parts = [f"{axis} {', '.join(names)}" for axis, names in _places(table, cells).items()]
    parts += [f"seed {', '.join(dict.fromkeys(str(cell.seed) for cell in cells))}"]
    return f" ({'; '.join(parts)})"


def _places(table: Table, cells: Sequence[Cell]) -> dict[str, list[str]]:
    axes = [axis for axis in axes_of(table) if axis != "cell" and all(axis in cell.names for cell in cells)]
    return {axis: list(dict.fromkeys(cell.names[axis] for cell in cells)) for axis in axes}


def _words(table: Table, label: str, cells: Sequence[Cell]) -> str:
    words = {"cell": label} | {axis: ",".join(names) for axis, names in _places(table, cells).items()}
    words["seed"] = ",".join(dict.fromkeys(str(cell.seed) for cell in cells))
    return " ".join(
        f"'{key}={value}'" if set(value) & set(" #()") else f"{key}={value}" for key, value in words.items()
    )


def add_last_row(text: str, row: str) -> str:
    """Put a row below the last of every Markdown table in a text."""
    if not row:
        return text
    lines = text.splitlines(keepends=True)
    found: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        found.append(line)
        if line.startswith("| ") and not following.startswith("| "):
            found.append(row)
    return "".join(found)


def place(runs: Iterable[Run], cells: Iterable[tuple[Cell, str]]) -> dict[int, Run]:
    """Find the run of each cell, by what it is; by the cell's id."""
    by_key = {key_of(run.config): run for run in runs}
    return {id(cell): by_key[key] for cell, key in cells if key in by_key}


def key_of(config: Mapping[str, Any]) -> str:
    """What a run is, as one text, of a flat config."""
    return json.dumps(config, sort_keys=True)


def find_near(runs: Iterable[Run], configs: Sequence[Mapping[str, Any]], most: int = 5) -> list[str]:
    """List runs that are no cell's but differ from one in a few keys, with the differences, nearest first."""
    found: list[tuple[int, str]] = []
    cells = {key_of(config) for config in configs}
    for run in runs:
        if key_of(run.config) in cells:
            continue
        nearest = min((_differences(run.config, config) for config in configs), key=len, default={})
        if 0 < len(nearest) <= most:
            told = ", ".join(f"{key} {json.dumps(a)} (cell: {json.dumps(b)})" for key, (a, b) in nearest.items())
            found.append((len(nearest), f"{run.folder}: {told}"))
    return [line for _, line in sorted(found)]


def _differences(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = sorted(config.keys() | other.keys())
    return {key: (config.get(key), other.get(key)) for key in keys if config.get(key) != other.get(key)}


def numbers(name: str, found: Stats) -> dict[str, object]:
    """Mean, spread and number of runs in columns of their own."""
    return {f"{name} mean": found.mean, f"{name} std": found.std if found.num > 1 else None, f"{name} n": found.num}


Maker = Callable[[Page], None]
