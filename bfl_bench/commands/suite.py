"""bfl-suite: the benchmark: every method tuned with the same budget, run with fresh seeds, ranked.

    bfl-suite list
    bfl-suite tune small [--setting digits] [--method fedavg] [--dry-run] [key=value ...]
    bfl-suite run small [likewise]
    bfl-suite show small
    bfl-suite verify small [--sample 20]
    bfl-suite add small mine --config-dir FOLDER [--search method.mu=0.001:1]
    bfl-suite cards [--to FOLDER]

`tune` runs each method's search and freezes what scored best on validation examples; `run` makes the reported runs;
both begin where they were stopped. `show` writes tables, figures and a page. `verify` makes some of the reported runs
again and compares. `add` does all of it for a method of your own and shows it beside the others. `cards` writes a page
per method and per dataset. Words key=value are bfl-run's, such as out=FOLDER, hydra/launcher=joblib.
"""

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bfl_bench import records
from bfl_bench.commands import run
from bfl_bench.commands.cells import Composed, compose_cells
from bfl_bench.commands.printing import forgiving
from bfl_bench.errors import BflError, ConfigError, RunError
from bfl_bench.identity import finished_summary
from bfl_bench.papers.spec import Cell
from bfl_bench.records import reference_folder
from bfl_bench.suite import choosing, results
from bfl_bench.suite.showing import show
from bfl_bench.suite.spec import (
    Suite,
    choose,
    find_suite,
    list_suites,
    make_entry,
    report_cells,
    search_cells,
    with_method,
)
from bfl_bench.suite.verifying import compare_result

OUTPUTS = Path("outputs/suite")
CARDS = Path("outputs/cards")


@forgiving
def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    try:
        _answer(arguments)
    except BrokenPipeError:
        raise
    except (BflError, OSError) as error:
        print(f"bfl-suite: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, BflError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bfl-suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|tune|run|show|verify|add|cards")
    commands.add_parser("list", help="the suites, with their numbers of runs")
    cards = commands.add_parser("cards", help="a page per method and per dataset, of what the code knows")
    cards.add_argument("--to", type=Path, default=CARDS, help=f"folder for the pages (default: {CARDS})")
    for name, text in (
        ("tune", "search hyperparameters, with the same budget for every method"),
        ("run", "make the runs that are reported, with the values that the search chose"),
        ("show", "tables, ranks, figures and a page"),
        ("verify", "make some of the reported runs again and compare"),
        ("add", "tune, run and show a method of your own"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("suite", help="a name of `bfl-suite list`, or a file like conf/suite/small.yaml")
        command.add_argument("--to", type=Path, help=f"folder for what is made (default: {OUTPUTS}/SUITE)")
        if name == "add":
            command.add_argument("name", help="of the method: NAME.yaml in the folder method/ of --config-dir")
            command.add_argument("--config-dir", type=Path, required=True, help="folder with method/NAME.yaml")
            command.add_argument("--search", action="append", default=[], metavar="KEY=LOW:HIGH", help="or KEY=A,B")
        if name != "show":
            command.add_argument("--setting", action="append", default=[], help="only this one; may be given again")
        if name in ("tune", "run", "verify"):
            command.add_argument("--method", action="append", default=[], help="only this one; may be given again")
        if name in ("tune", "run"):
            command.add_argument("--dry-run", action="store_true", help="count runs and hours, and stop")
        if name == "verify":
            command.add_argument("--sample", type=int, default=20, help="how many runs (default: 20)")
            command.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    arguments, words = parser.parse_known_args(argv)
    arguments.words = words
    for word in words:
        if "=" not in word or word.startswith("--") or arguments.command in ("list", "show", "cards"):
            parser.error(f"unrecognized argument: {word}")
    return arguments


def _answer(arguments: argparse.Namespace) -> None:
    if arguments.command == "list":
        for name in list_suites():
            suite = find_suite(name)
            searched, reported = _count(suite)
            print(f"{name}  {suite.title} ({len(suite.settings)} settings, {len(suite.methods)} methods, ", end="")
            print(f"{searched} search runs, {reported} reported runs)")
        return
    if arguments.command == "cards":
        from bfl_bench.commands.cards import write_cards  # torch takes long to import

        pages = write_cards(arguments.to, [shipped(find_suite(name)) for name in list_suites()])
        print(f"{len(pages)} pages in {arguments.to}")
        return
    suite = find_suite(arguments.suite)
    to = arguments.to or OUTPUTS / suite.name
    if arguments.command == "show":
        show(suite, [shipped(suite), to], to)
    elif arguments.command == "verify":
        chosen = choose(suite, arguments.setting, arguments.method)
        verify(chosen, to, arguments.words, arguments.sample, arguments.seed)
    elif arguments.command == "add":
        add(suite, to, arguments)
    else:
        chosen = choose(suite, arguments.setting, arguments.method)
        (tune if arguments.command == "tune" else report)(chosen, to, arguments.words, arguments.dry_run)


def _count(suite: Suite) -> tuple[int, int]:
    pairs = len(suite.settings) * len(suite.methods)
    return pairs * suite.points, pairs * len(suite.seeds)


def shipped(suite: Suite) -> Path:
    """Find the folder with the results that come with bfl-bench."""
    return reference_folder() / "suite" / suite.name


def tune(suite: Suite, to: Path, words: Sequence[str], dry_run: bool = False) -> None:
    """Run the searches that are not finished, then freeze what they chose."""
    trials: list[choosing.Trial] = []
    unfinished: set[tuple[str, str]] = set()
    kept: dict[tuple[str, str], list[int]] | None = None
    for rung in range(suite.halvings + 1):
        composed = _compose(search_cells(suite, rung, kept), words)
        if dry_run:
            _say_budget(suite)
            _say_cost(composed)
            if suite.halvings:
                print(f"then {suite.halvings} times the better half of the points again, twice as long")
            return
        _sweep(composed, words)
        found = [choosing.read_trial(folder_of(one), one.cell, _searched(suite, one.cell)) for one in composed]
        for one, trial in zip(composed, found, strict=True):
            if trial is None:
                unfinished.add((one.cell.names["setting"], one.cell.names["method"]))
        rungs = [one for one in found if one is not None and (one.setting, one.method) not in unfinished]
        kept = choosing.keep_better_half(rungs, suite.select, suite.points >> rung + 1)
        trials = [one for one in (*trials, *rungs) if (one.setting, one.method) not in unfinished]
    incomplete = choosing.freeze(suite, trials, to)
    for setting, methods in incomplete.items():
        print(f"{setting}: not every point was run of {', '.join(methods)}; the same command continues")
    print(f"{to / choosing.CHOSEN}: {suite.points} points for every method, chosen by {suite.select} on validation")


def _searched(suite: Suite, cell: Cell) -> dict[str, Any]:
    keys = {**suite.search, **suite.methods[cell.names["method"]].search}
    return {key: cell.values[key] for key in keys if key not in suite.methods[cell.names["method"]].values}


def report(suite: Suite, to: Path, words: Sequence[str], dry_run: bool = False) -> None:
    """Make the reported runs that are not finished, and add all of them to the results."""
    choices = read_choices(suite, to)
    cells = report_cells(suite, choosing.values_of(choices))
    if not cells:
        raise RunError(f"nothing is chosen for these methods and settings yet: bfl-suite tune {suite.name}")
    composed = _compose(cells, words)
    if dry_run:
        _say_cost(composed)
        return
    _sweep(composed, words)
    rows = [
        results.read_result(folder_of(one), suite, setting, method, one.cell.seed, choices[setting][method])
        for one in composed
        for setting, method in [(one.cell.names["setting"], one.cell.names["method"])]
    ]
    finished = [row for row in rows if row is not None]
    results.write_results(to, finished)
    print(f"{to / results.RESULTS}: {len(finished)} of {len(rows)} runs")


def read_choices(suite: Suite, to: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Read the choices that come with bfl-bench, and in their place those in the folder."""
    choices = choosing.read_choices(shipped(suite), suite.name)
    for setting, methods in choosing.read_choices(to, suite.name).items():
        choices.setdefault(setting, {}).update(methods)
    return choices


def add(suite: Suite, to: Path, arguments: argparse.Namespace) -> None:
    """Give a method of a user's own what every other method got, and show it among them."""
    entry = make_entry(arguments.name, arguments.name, {}, _read_search(arguments.search))
    alone = choose(with_method(suite, arguments.name, entry), arguments.setting, [arguments.name])
    folder = arguments.config_dir.resolve()
    if not (folder / "method" / f"{arguments.name}.yaml").is_file():
        raise ConfigError("--config-dir", str(arguments.config_dir), f"a folder with method/{arguments.name}.yaml")
    words = [f"hydra.searchpath=[file://{folder}]", *arguments.words]
    sys.path.insert(0, str(Path.cwd()))  # the method's class may lie here
    tune(alone, to, words)
    report(alone, to, words)
    show(with_method(suite, arguments.name, entry), [shipped(suite), to], to)


def _read_search(words: Sequence[str]) -> dict[str, Any]:
    space: dict[str, Any] = {}
    for word in words:
        key, _, values = word.partition("=")
        low, colon, high = values.partition(":")
        try:
            space[key] = (
                {"low": float(low), "high": float(high)} if colon else [json.loads(v) for v in values.split(",")]
            )
        except ValueError:
            raise ConfigError("--search", word, "KEY=LOW:HIGH, or KEY=A,B,... with values as JSON has them") from None
    return space


def verify(suite: Suite, to: Path, words: Sequence[str], sample: int, seed: int) -> None:
    """Make a random sample of the reported runs again, elsewhere, and compare them with the results."""
    found = results.read_results([shipped(suite), to])
    there = [one for one in found if one.setting in suite.settings and one.method in suite.methods]
    if not there:
        raise RunError(f"there are no results of {suite.name} yet: bfl-suite run {suite.name}")
    drawn = random.Random(seed).sample(there, min(sample, len(there)))
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        for one in drawn:
            chosen = {one.setting: {one.method: dict(one.values)}}
            cells = [cell for cell in report_cells(suite, chosen) if cell.seed == one.seed]
            (composed,) = _compose(cells, [*words, f"out={folder}"])
            _sweep([composed], words)
            choice = {"values": one.values, "points": one.points}
            again = results.read_result(folder_of(composed), suite, one.setting, one.method, one.seed, choice)
            problems = compare_result(one, again, composed.name)
            differing += bool(problems)
            print(f"{one.setting}, {one.label}, seed {one.seed}: {'; '.join(problems) or 'the same'}", flush=True)
    if differing:
        raise RunError(f"{differing} of {len(drawn)} runs are not what the results say")
    print(f"{len(drawn)} runs made again: all as the results say")


def _compose(cells: Sequence[Cell], words: Sequence[str]) -> list[Composed]:
    """Compose cells with the words that count for a run; what is Hydra's own counts for the sweep."""
    own = [word for word in words if not word.startswith("hydra") or word.startswith("hydra.searchpath")]
    return compose_cells([cell.with_words(own) for cell in cells] if own else cells)


def folder_of(composed: Composed) -> Path:
    return Path(composed.config["out"]) / composed.name


def _sweep(composed: Sequence[Composed], words: Sequence[str]) -> None:
    """Make the runs that are not finished, with whatever launcher the words name."""
    missing = [one.cell.overrides() for one in composed if not _is_finished(one)]
    if not missing:
        return
    launcher = [word for word in words if word.startswith("hydra")]
    points = [[word for word in cell if not word.startswith("hydra.")] for cell in missing]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(f"{json.dumps(words)}\n" for words in points))
        file.flush()
        sys.argv = ["bfl-suite", "-m", f"hydra.sweeper.points='{file.name}'", *launcher]
        try:
            run.main()
        except SystemExit as error:
            if error.code == 130:
                raise KeyboardInterrupt from None  # it has said so
            if error.code == 2:
                raise RunError("the runs could not be started") from None


def _is_finished(one: Composed) -> bool:
    return finished_summary(folder_of(one), one.config) is not None


def _say_budget(suite: Suite) -> None:
    """Say what every method gets in each setting."""
    rounds = {name: {**suite.values, **values}.get("rounds", "the default") for name, values in suite.settings.items()}
    print(f"every method: {suite.points} search points on seed {suite.search_seed}, {len(suite.seeds)} reported seeds")
    print(f"rounds: {', '.join(f'{name} {number}' for name, number in rounds.items())}")


def _say_cost(composed: Sequence[Composed]) -> None:
    """Say how many runs are missing and about how long they take, setting by setting."""
    runs: dict[str, dict[str, list[Composed]]] = {}
    for one in composed:
        runs.setdefault(one.cell.names["setting"], {}).setdefault(one.cell.names["method"], []).append(one)
    total, num_missing = 0.0, 0
    for setting, methods in runs.items():
        seconds, count, unknown = 0.0, 0, list[str]()
        for method, cells in methods.items():
            missing = [one for one in cells if not _is_finished(one)]
            count += len(missing)
            try:
                seconds += len(missing) * _seconds_of_a_run(cells) if missing else 0.0
            except (BflError, RuntimeError, ValueError) as error:
                unknown.append(f"without {method} ({next(iter(str(error).splitlines()), type(error).__name__)})")
        if count:
            hours = "; ".join([f"about {seconds / 3600:.2f} CPU hours", *unknown])
            print(f"{setting}: {count} runs to make, {hours}", flush=True)
        total, num_missing = total + seconds, num_missing + count
    print(f"{num_missing} of {len(composed)} runs to make, about {total / 3600:.1f} CPU hours")


def _seconds_of_a_run(cells: Sequence[Composed]) -> float:
    """Take what finished runs of a method in a setting took; else estimate the first one from some timed steps."""
    finished = [one for one in cells if _is_finished(one)]
    if finished:
        tables = [records.read_table(folder_of(one) / records.TIMING) for one in finished]
        known = [(row["wall_seconds"] or 0) + (row["evaluation_seconds"] or 0) for rows in tables for row in rows]
        return math.fsum(known) / len(finished)
    from bfl_bench.build import load, plan  # torch takes long to import
    from bfl_bench.run.estimate import estimate

    found = estimate(load(plan(cells[0].config))[0])
    return found.training + found.evaluation


if __name__ == "__main__":
    sys.exit(main())
