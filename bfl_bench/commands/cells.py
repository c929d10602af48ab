"""From a cell of a paper's table to the run that it is: cell -> overrides -> config -> identity -> folder."""

import contextlib
import copy
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bfl_bench.commands.config_files import find_file
from bfl_bench.commands.resolving import FILLED_IN, resolve
from bfl_bench.commands.words import CommandLine
from bfl_bench.errors import ConfigError
from bfl_bench.groups import GROUPS
from bfl_bench.identity import folder_name
from bfl_bench.papers.spec import (
    Cell,
    Table,
    axes_of,
    find_table,
    list_cells,
    narrow,
    override,
    read_tables,
    setting_of,
    split_names,
)
from bfl_bench.records import config_folder

NAMING = tuple(f"eval.{key}" for key in FILLED_IN)
"""Keys whose values name options of a group."""


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A cell with its config and the name of its folder."""

    cell: Cell
    config: dict[str, Any]
    name: str


_CHOSEN: dict[str | None, dict[tuple[str, ...], dict[str, Any]]] = {}
"""Configs of choices of options, by where data lie: conf/ does not change while a program runs."""


def compose_cells(cells: Iterable[Cell]) -> list[Composed]:
    """Compose the configs of cells. Hydra composes each choice of options once; values are set in copies of it."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    done: dict[int, Composed] = {}
    chosen: dict[tuple[str, ...], dict[str, Any]] = {}
    cells = list(cells)
    composed = (*GROUPS, *NAMING)
    inside = GlobalHydra().is_initialized()  # of a sweep
    with contextlib.nullcontext() if inside else initialize_config_dir(str(config_folder()), version_base="1.3"):

        def add(cell: Cell) -> Composed:
            if id(cell) in done:
                return done[id(cell)]
            # a value that refers to other keys is Hydra's to read, together with all others
            whole = bool(cell.words) or any("${" in str(value) for value in cell.values.values())
            words = cell.overrides() if whole else [override(k, v) for k, v in cell.values.items() if k in composed]
            known = chosen if whole or inside else _CHOSEN.setdefault(os.environ.get("BFL_DATA_DIR"), {})
            if tuple(words) not in known:
                known[tuple(words)] = resolve(compose("config", words))
            config = copy.deepcopy(known[tuple(words)])
            if not whole:
                for key, value in cell.values.items():
                    if key not in composed:
                        _set(config, key, value)
            for key, other in cell.starts.items():
                config[key] = f"{config['out']}/{add(other).name}"
            done[id(cell)] = Composed(cell=cell, config=config, name=folder_name(config))
            return done[id(cell)]

        return [add(cell) for cell in cells]


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    node: Any = config
    for section in sections:
        node = node[section]
    if last not in node:
        raise ConfigError(key, value, f"a key that the config has; {'.'.join(sections) or 'it'} has {', '.join(node)}")
    node[last] = value


def words_of(cells: Iterable[Cell]) -> list[list[str]]:
    """Write the words of each cell for bfl-run; where a cell begins with another, its folder is composed."""
    cells = list(cells)
    folders = {
        id(composed.cell): [override(key, composed.config[key]) for key in composed.cell.starts]
        for composed in compose_cells([cell for cell in cells if cell.starts])
    }
    return [[*cell.overrides(), *folders.get(id(cell), [])] for cell in cells]


def choose_cells(table: Table, scale: str, names: Mapping[str, str]) -> list[Cell]:
    """List the cells of a table that are called so along the axes given, and those that they begin with."""
    cells = list_cells(table, scale)
    chosen = cells
    for axis, wanted in names.items():
        chosen = narrow(chosen, axis, wanted)
    needed = {id(start) for cell in chosen for start in cell.starts.values()} | {id(cell) for cell in chosen}
    return [cell for cell in cells if id(cell) in needed]


def sweep_points(table: str, scale: str, names: Mapping[str, str], points: Sequence[Sequence[str]]) -> list[list[str]]:
    """Write the points of a sweep over a table's cells, each with each of the points that the command line sweeps.

    A key of the command line replaces an axis, as it does with any sweep.
    """
    cells = choose_cells(find_table(table), scale, names)
    changed = [cell.with_words(list(words)) for cell in cells for words in points]
    return list({json.dumps(words): words for words in words_of(changed)}.values())


def expand_table(line: CommandLine) -> CommandLine:
    """Replace `experiment=TABLE` by what a table is: in a sweep its cells, else its only cell or its setting.

    Beside it stand `scale=` and, to choose among the cells, names along axes: `cell=FedAvg`, `dataset=FMNIST`.
    """
    words = {word.partition("=")[0]: word for word in line.overrides}
    chosen, scale = (words.get(key, "").partition("=")[2] for key in ("experiment", "scale"))
    sweep = "--multirun" in line.options
    own_file = find_file(f"experiment/{chosen}", line.folders) is not None
    if not chosen or chosen not in read_tables() or (own_file and not sweep):
        if scale == "cpu":
            raise ConfigError("scale", "cpu", "paper or smoke; only experiments that are a table or figure have it")
        return line
    table, scale = read_tables()[chosen], scale or "paper"
    labels = {axis: {cell.names[axis] for cell in list_cells(table, scale)} for axis in axes_of(table)}
    names: dict[str, str] = {}
    for key, word in words.items():
        wanted = word.partition("=")[2]
        if key == "cell" or ("." not in key and split_names(wanted, labels.get(key, ()))):  # a dotted key replaces
            names[key] = wanted
    rest = [word for word in line.overrides if word.partition("=")[0] not in ("experiment", *names)]
    if sweep:
        limit = table.limit(scale)
        given = [f"hydra.sweeper.table={chosen}", f"hydra.sweeper.scale={scale}"]
        given += [f"+hydra.sweeper.names.{axis}='{wanted}'" for axis, wanted in names.items()]
        given += [f"hydra.sweeper.limit={limit}"] if limit and "hydra.sweeper.limit" not in words else []
        return CommandLine(line.options, [*given, *rest])
    first: dict[str, Cell] = {}  # of cells that differ in the seed alone
    for cell in (cell.with_words(rest) for cell in choose_cells(table, scale, names)):
        first.setdefault(json.dumps([word for word in cell.overrides() if not word.startswith("seed=")]), cell)
    if len(first) > 1 and names:
        raise ConfigError("cell", names.get("cell", ""), f"a choice of one cell; these are {len(first)}: -m runs them")
    setting = next(iter(first.values())) if len(first) == 1 else setting_of(table, scale).with_words(rest)
    return CommandLine(line.options, setting.overrides())
