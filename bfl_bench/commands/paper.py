"""bfl-paper: the tables and figures of papers: which there are, making their runs, showing them.

    bfl-paper list [PAPER]
    bfl-paper run fola_table2 scale=cpu [cell=FedAvg] [key=value ...]
    bfl-paper show fola_table2 scale=cpu [--runs outputs] [--to outputs/report] [--near]

`run` is `bfl-run -m experiment=fola_table2 scale=cpu`. `show` trains nothing. It looks for the run of each cell by what
the cell's config says; a run that is no cell's is never in the table, but --near lists it with its differences.
"""

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from bfl_bench import report
from bfl_bench.commands import run
from bfl_bench.commands.cells import NAMING, Composed, compose_cells
from bfl_bench.commands.config_files import find_file
from bfl_bench.commands.printing import forgiving
from bfl_bench.errors import BflError, ConfigError
from bfl_bench.identity import RUNS, complete, folder_name, meaning, read_config
from bfl_bench.papers.pages import Maker, Page, find_near, key_of, place
from bfl_bench.papers.spec import Cell, Table, describe_scale, find_table, list_cells, read_tables, setting_of
from bfl_bench.records import config_folder
from bfl_bench.report import Config, ReportError, Run, flatten
from bfl_bench.report.style import style

PAPERS = ("fola", "virtual", "ba_bfl", "fedlpa", "bfl_p", "truth")


@forgiving
def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["run"] and len(words) > 1:
            table = find_table(words[1])
            sys.argv = ["bfl-paper", "-m", f"experiment={table.full_name}", *words[2:]]
            run.main()
        else:
            _answer(words)
    except BrokenPipeError:
        raise
    except (BflError, OSError) as error:
        print(f"bfl-paper: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, BflError) else 1
    return 0


def _answer(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bfl-paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|run|show")
    listing = commands.add_parser("list", help="the tables and figures, with their numbers of cells")
    listing.add_argument("paper", nargs="?", choices=PAPERS)
    running = commands.add_parser("run", help="make the runs of a table")
    running.add_argument("table", help="a name of `bfl-paper list`; then scale=, cell= and any words of bfl-run")
    showing = commands.add_parser("show", help="a table or figure out of finished runs")
    showing.add_argument("table", help="a name of `bfl-paper list`")
    showing.add_argument("words", nargs="*", metavar="scale=SCALE")
    told = "folders with runs below, or archives of runs; `reference`: those that are shipped"
    showing.add_argument("--runs", type=Path, nargs="+", default=[Path("outputs")], help=told)
    showing.add_argument("--to", type=Path, default=Path("outputs/report"), help="folder for what is made")
    showing.add_argument("--near", action="store_true", help="also list runs that are nearly those of cells")
    arguments = parser.parse_args(words)
    if arguments.command == "list":
        print(list_tables(arguments.paper))
        return
    table, scale = find_table(arguments.table), "paper"
    for word in arguments.words:
        key, _, scale = word.partition("=")
        if key != "scale":
            raise ConfigError("show", word, "scale=SCALE")
    show(table, [scale], collect(arguments.runs, {}), arguments.to, arguments.near)


def list_tables(paper: str | None) -> str:
    tables = [table for table in read_tables().values() if paper in (None, table.paper)]
    width = max(len(table.full_name) for table in tables)
    lines: list[str] = []
    for table in tables:
        counts = ", ".join(f"{scale} {len(list_cells(table, scale))}" for scale in table.scales)
        lines.append(f"{table.full_name:<{width}}  {table.title} ({counts} runs)")
    return "\n".join(lines)


@dataclass(frozen=True)
class Collected:
    """All runs below some paths, and sentences on those left out, with the configs of those that have one."""

    paths: Sequence[Path]
    runs: Sequence[Run]
    notes: Mapping[str, Config | None]

    @property
    def configs(self) -> list[Config]:
        left_out = [flatten(complete(config)) for config in self.notes.values() if config]
        return [run_.config for run_ in self.runs] + left_out


def collect(paths: Sequence[Path], where: Config) -> Collected:
    runs, notes = report.find_runs(paths, where, diverged=True)
    folders = {str(folder): folder for folder in report.find_folders(paths)[0]}
    places = {note: folders.get(note.partition(": ")[0]) for note in notes}
    return Collected(
        paths, runs, {note: None if folder is None else read_config(folder) for note, folder in places.items()}
    )


def show(table: Table, scales: Sequence[str], collected: Collected, to: Path, near: bool = False) -> None:
    """Write a table or figure at each of the scales; of several, at those that have a run at all."""
    maker: Maker = import_module(f"bfl_bench.papers.{table.paper}").MAKERS[table.name]
    every, noted, known = collected.runs, collected.notes, collected.configs
    shown = False
    configs: list[Config] = []
    for scale in scales:
        cells = list_cells(table, scale)
        composed = compose_cells(possible(cells, known))
        configs += [flatten(complete(one.config)) for one in composed]
        by_engine = _by_engine(cells)
        found = _find_by_engine(collected.paths, composed) if by_engine else place(every, composed_keys(composed))
        entries = [(cell, found[id(cell)]) for cell in cells if id(cell) in found and not found[id(cell)].diverged]
        if not entries:
            continue
        shown = True
        page = Page(
            table=table,
            scale=scale,
            entries=tuple(entries),
            missing=tuple(cell for cell in cells if id(cell) not in found),
            notes=tuple(_notes(found.values(), noted, {one.name for one in composed})),
            shortened=describe_scale(table, scale, _papers_values(table)) if scale != "paper" else "",
            to=to,
        )
        with style():
            maker(page)
    if near:
        lines = find_near(every, configs or [_papers_values(table)])
        print(
            "Near, but not in the table:\n\n" + "".join(f"- {line}\n" for line in lines) if lines else "Nothing near."
        )
    if not shown:
        scale = scales[-1] if len(scales) == 1 else "cpu" if "cpu" in scales else "paper"
        command = f"bfl-paper run {table.full_name}" + ("" if scale == "paper" else f" scale={scale}")
        raise ReportError(
            f"no finished run of {table.full_name} there; give other --runs, or make it:\n\n    {command}\n"
        )


def runs_of_cells(table: Table, collected: Collected, scales: Sequence[str] = ()) -> list[Run]:
    """List the runs that are a cell's of the table, at any scale or at some."""
    cells = [cell for scale in scales or table.scales for cell in list_cells(table, scale)]
    found = place(collected.runs, composed_keys(compose_cells(possible(cells, collected.configs))))
    return list({run_.folder: run_ for run_ in found.values()}.values())


def possible(cells: Sequence[Cell], configs: Sequence[Config]) -> list[Cell]:
    """Leave out cells with a value that no run has: large grids are then quick to compose."""
    seen: dict[str, set[str]] = {}
    for config in configs:
        for key, value in config.items():
            seen.setdefault(key, set()).add(json.dumps(value))

    @cache
    def fits(key: str, text: str) -> bool:
        value = json.loads(text)
        if f"{key}.name" in seen and (name := _name_in(key, value)) is not None:
            return json.dumps(name) in seen[f"{key}.name"]
        if key not in seen or key in NAMING or "${" in text:
            return True
        return json.dumps(meaning({key: value})[key]) in seen[key]

    def fit(cell: Cell) -> bool:
        return all(fits(key, json.dumps(value)) for key, value in cell.values.items() if key not in RUNS)

    return [cell for cell in cells if fit(cell)]


def _name_in(group: str, option: str) -> str | None:
    """Read the name that an option's file gives, and so any config with it; None where it has one from elsewhere."""
    path = find_file(f"{group}/{option}", [config_folder()])
    found: str | None = None if path is None else yaml.safe_load(path.read_text()).get("name")
    return found


def composed_keys(composed: Sequence[Composed]) -> list[tuple[Cell, str]]:
    return [(one.cell, _key(one)) for one in composed]


def _notes(runs: Iterable[Run], noted: Mapping[str, Config | None], names: Collection[str]) -> list[str]:
    """Keep what concerns the cells: runs of theirs that diverged, are not finished, or are there twice."""
    told = [f"{run_.folder}: diverged; not in the means" for run_ in runs if run_.diverged]
    return told + [note for note, config in noted.items() if config is None or folder_name(config) in names]


def _key(composed: Composed) -> str:
    return key_of(flatten(complete(composed.config)))


def _papers_values(table: Table) -> dict[str, Any]:
    (setting,) = compose_cells([setting_of(table, "paper")])
    return flatten(setting.config)


def _by_engine(cells: Sequence[Cell]) -> bool:
    """Whether cells differ in what changes no result, such as the number of processes."""
    return any(key.startswith("engine.") for cell in cells for key in cell.values)


def _find_by_engine(paths: Sequence[Path], composed: Sequence[Composed]) -> dict[int, Run]:
    """Find runs likewise, but each folder by itself, as runs that differ in the engine alone are the same."""
    wanted = {(_key(one), one.cell.values["engine.workers"]): id(one.cell) for one in composed}
    found: dict[int, Run] = {}
    for run_ in report.find_runs(paths, {}, each_folder=True)[0]:
        engine = (read_config(run_.folder) or {})["engine"]
        if (cell := wanted.get((key_of(run_.config), engine.get("workers", 1)))) is not None:
            found.setdefault(cell, run_)
    return found


def run_script(paper: str) -> None:
    """The main function of scripts/PAPER.py: each table and figure at all scales of which there are runs."""
    module = import_module(f"bfl_bench.papers.{paper}")
    commands: dict[str, Callable[[Namespace], None]] = {
        table.name: partial(_show_all, table) for table in read_tables().values() if table.paper == paper
    }
    commands = {name: command for name, command in commands.items() if name in module.MAKERS}
    commands |= {name: partial(_draw, maker) for name, maker in module.WITHOUT_RUNS.items()}
    report.run_script(module.__doc__ or "", commands)


def distinct_scales(table: Table) -> list[str]:
    """List the scales; one that shortens nothing is as published, but smoke always shortens, for all tables alike."""
    return [scale for scale in table.scales if scale in ("paper", "smoke") or table.scale(scale)]


def _show_all(table: Table, arguments: Namespace) -> None:
    show(table, distinct_scales(table), collect(arguments.runs, arguments.where), arguments.to)


def _draw(maker: Callable[[Path], None], arguments: Namespace) -> None:
    with style():
        maker(arguments.to)


if __name__ == "__main__":
    sys.exit(main())
