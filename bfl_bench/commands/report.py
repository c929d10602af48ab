"""`bfl-report`: any set of runs side by side, grouped by what differs between them; lists of runs; two compared."""

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from bfl_bench import records
from bfl_bench.checks import AtLeast, check_value
from bfl_bench.commands.printing import forgiving
from bfl_bench.commands.words import list_names
from bfl_bench.errors import BflError, ConfigError
from bfl_bench.evaluation import columns
from bfl_bench.identity import meaning
from bfl_bench.report.cleaning import KINDS, describe_useless, find_useless, remove_runs
from bfl_bench.report.comparison import (
    MAX_MISSING,
    SIGNIFICANT,
    SPREADS,
    Comparison,
    Row,
    Verdict,
    compare,
    is_below,
    rank,
    text_of,
)
from bfl_bench.report.html import make_page
from bfl_bench.report.latex import latex_tables
from bfl_bench.report.listing import compare_two, list_runs
from bfl_bench.report.output import describe_notes, empty_if_nan, markdown, parse_where, wrapped
from bfl_bench.report.provenance import codes_of, describe_mixtures, describe_repairs
from bfl_bench.report.runs import Config, Run, find_runs, on_stand_in

FORMATS = ("terminal", "markdown", "latex", "csv")
NAME_WIDTH = 2 + max(len(column.name) for column in columns.METRICS)
DEFAULT_METRICS = ("ga", "la", "worst10", "ece", "nll")
SHARED = ("dataset.name", "partition.name", "partition.alpha", "num_clients", "model.name", "rounds", "method.name")
MARKS = {"terminal": ("{} *", "{} _"), "markdown": ("**{}**", "<u>{}</u>")}
CALLED = {"terminal": ("*", "_"), "markdown": ("Bold", "Underlined"), "latex": ("Bold", "Underlined")}
"""How a caption calls what is the best by a test, and what has the best mean without one."""


@forgiving
def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no arrows shows question marks
    arguments = parse(argv)
    try:
        return run(arguments)
    except BflError as error:
        print(f"bfl-report: {error}", file=sys.stderr)
        return error.exit_code


def run(arguments: argparse.Namespace) -> int:
    for option, path in (("--to", arguments.to), ("--html", arguments.html)):
        if path is not None and path.is_dir():
            raise ConfigError(option, str(path), "the name of a file")
    if arguments.diff is not None or arguments.list:
        text = compare_two(*arguments.diff) if arguments.diff is not None else list_runs(arguments.runs)
        _give(arguments.to, text)
        return 0
    if arguments.clean is not None:
        return clean(arguments)
    chosen = choose_runs(arguments)
    if not chosen.runs:
        print("bfl-report: no finished run there" + "".join(f"\n- {note}" for note in chosen.notes), file=sys.stderr)
        return 1
    by = [*arguments.by, *(["dataset.name"] if any(on_stand_in(run.config) for run in chosen.runs) else [])]
    comparison = compare(
        [label_stand_in(run) for run in chosen.runs],
        arguments.metrics,
        by=list(dict.fromkeys(by)),
        compared=arguments.compare,
        test=arguments.test,
    )
    remarks = [
        *describe_settings(comparison, columns_too=arguments.format == "latex"),
        *describe_missing_rows(comparison),
        *rank_sentences(arguments, comparison.rows),
        *describe_mixtures(comparison.rows),
        *describe_repairs(chosen.runs),
        *describe_withheld(comparison.rows),
    ]
    _give(arguments.to, report(arguments, comparison, remarks, chosen.notes))
    if arguments.html is not None:
        caption = describe(arguments, comparison, ("Bold", "Underlined"))
        notes = [*remarks, *(f"Left out: {note}" for note in chosen.notes)]
        save("--html", arguments.html, make_page(comparison, arguments.metrics, arguments.spread, caption, notes))
        print(f"page: {arguments.html}", file=sys.stderr)
    return 0


def clean(arguments: argparse.Namespace) -> int:
    """Show the runs that are of no use any more, ask, and remove them."""
    check_value("--older-than", arguments.older_than, Annotated[float, AtLeast(0)])
    found = find_useless(arguments.runs, arguments.clean, arguments.older_than)
    if not found:
        print("nothing to remove")
        return 0
    size = sum(one.size for one in found) / 1e6
    print(describe_useless(found))
    question = f"Remove {len(found)} run{'s' * (len(found) != 1)}, {size:.2f} MB, for good?"
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise ConfigError("--clean", " ".join(arguments.clean), "together with --yes where nobody can be asked")
        if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return 1
    kept = remove_runs(found)
    for sentence in kept:
        print(f"bfl-report: {sentence}", file=sys.stderr)
    print(f"removed {len(found) - len(kept)} of {len(found)}")
    return 1 if kept else 0


def _give(to: Path | None, text: str) -> None:
    if to is None:
        print(text, end="")
    else:
        save("--to", to, text)


def save(option: str, path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        records.write_text(path, text)
    except OSError as error:
        raise ConfigError(option, str(path), f"a file that can be written ({error.strerror or error})") from None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bfl-report",
        description="Means over seeds of any set of runs, grouped by what differs between them. Rows of the same\n"
        "setting are compared, the best mean first. It is marked * (bold) where a paired test over seeds, Holm-\n"
        f"corrected, says at {SIGNIFICANT} that it is better than each other row, and _ (underlined) elsewhere.\n"
        "A hyperparameter of which each method has one value of its own within a setting, such as a tuned\n"
        "learning rate, is shown and divides nothing.",
        epilog=list_metrics(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", type=Path, nargs="*", default=[Path("outputs")], help="folders with runs below (default: outputs)"
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=list(DEFAULT_METRICS),
        metavar="NAME",
        help="columns of metrics.csv, last round, or seconds_per_round; the first one sorts; see below",
    )
    parser.add_argument("--by", nargs="+", default=[], metavar="KEY", help="config keys to show first")
    parser.add_argument(
        "--compare", nargs="+", default=["method", "aggregator"], metavar="KEY", help="what is compared"
    )
    parser.add_argument(
        "--where", nargs="+", default=[], metavar="KEY=VALUE", help="only runs with these config values"
    )
    parser.add_argument("--stand-in", action="store_true", help="also runs on random stand-in data")
    parser.add_argument("--spread", choices=list(SPREADS), default="std")
    parser.add_argument("--test", choices=("t", "wilcoxon"), default="t", help="the paired test")
    parser.add_argument(
        "--format", choices=FORMATS, default="terminal", help="latex: methods in rows, settings in columns, percent"
    )
    parser.add_argument("--to", type=Path, metavar="FILE", help="a file instead of the terminal")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also a page for the browser: tables to sort and filter, charts"
    )
    parser.add_argument(
        "--list", action="store_true", help="instead: every run, finished or not, with rounds, age and size"
    )
    parser.add_argument(
        "--diff", type=Path, nargs=2, metavar="RUN", help="instead: which values differ between two runs"
    )
    parser.add_argument(
        "--clean",
        nargs="+",
        choices=KINDS,
        help="instead: remove runs, after a question: those that are unfinished, or damaged, and that no process works "
        "on; stale ones, whose folder no command finds any more, because its config has another name by now",
    )
    parser.add_argument(
        "--older-than", type=float, default=0.0, metavar="DAYS", help="with --clean: untouched for so many days"
    )
    parser.add_argument("--yes", action="store_true", help="with --clean: do not ask")
    return parser.parse_args(argv)


def list_metrics() -> str:
    """The names that --metrics takes."""
    lines = [f"  {column.name:<{NAME_WIDTH}}{columns.heading(column.name)}" for column in columns.METRICS]
    under = f"  {'NAME@RULE':<{NAME_WIDTH}}NAME under a rule of eval.also_aggregate or a solver of method.also_solve"
    return "\n".join(["metrics, with an arrow to the better values:", *lines, under])


# Which runs


@dataclass
class Chosen:
    """The runs that were asked for, and sentences on those left out."""

    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def choose_runs(arguments: argparse.Namespace) -> Chosen:
    """Find the runs; refuse names that none of them has."""
    where = parse_where(arguments.where)
    asked = arguments.stand_in or where.get("data_dir") == records.STAND_IN
    wanted = meaning(where)
    configs: list[Config] = []
    num_stand_in = 0

    def keep(config: Config) -> bool:
        nonlocal num_stand_in
        configs.append(config)
        if any(_value_of(config, key) != value for key, value in wanted.items()):
            return False
        if on_stand_in(config) and not asked:
            num_stand_in += 1
            return False
        return True

    runs, notes = find_runs(arguments.runs, {}, keep, diverged=True)
    if configs:
        _check_names(arguments, configs, where)
    if runs:
        check_metrics(arguments.metrics, runs)
    if num_stand_in:
        number = "1 run" if num_stand_in == 1 else f"{num_stand_in} runs"
        notes.append(f"{number} on random stand-in data; --stand-in shows them")
    return Chosen(runs, notes)


def _value_of(config: Config, key: str) -> object:
    """Look up a key; that of a group, as on the command line of bfl-run, stands for the name in it."""
    return config.get(key, config.get(f"{key}.name"))


def _check_names(arguments: argparse.Namespace, configs: Sequence[Config], where: Config) -> None:
    keys = sorted({key for config in configs for key in config})
    sections = {section for key in keys for section in _sections(key)}
    for option, given in (("--by", arguments.by), ("--compare", arguments.compare), ("--where", list(where))):
        for i, key in enumerate(given):
            known = [*keys, *sorted(sections if option == "--compare" else _groups(keys))]
            if key not in known and not (option == "--where" and key == "data_dir"):
                raise ConfigError(option, key, _allowed(key, known))
            if option != "--where" and key == "seed":
                raise ConfigError(option, key, "any other key; runs that differ in the seed alone are one row")
            if option == "--by" and key not in keys:
                given[i] = f"{key}.name"
    for key, value in meaning(where).items():
        values = [_value_of(config, key) for config in configs]
        if value not in values:
            there = sorted({str(other) for other in values if other is not None})
            raise ConfigError(f"--where {key}", value, list_names(there, str(value)))


def _groups(keys: Sequence[str]) -> set[str]:
    return {key.removesuffix(".name") for key in keys if key.endswith(".name")}


def _sections(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _allowed(given: str, keys: Sequence[str]) -> str:
    """List the keys of the section that was meant, or the first of all; and the one that was perhaps meant."""
    section = given.rpartition(".")[0]
    near = [key for key in keys if section and is_below(key, [section])]
    hint = list_names(keys, given).removeprefix(", ".join(keys))
    return ", ".join(near or [key for key in keys if "." not in key]) + hint


def check_metrics(metrics: Sequence[str], runs: Sequence[Run]) -> None:
    """Refuse a name that is neither a registered column nor one that a run has."""
    measured = {name for run in runs for name in run.final}
    known = [*(column.name for column in columns.METRICS), *sorted(measured - {"round"})]
    for name in metrics:
        if name not in known:
            raise ConfigError("--metrics", name, list_names(list(dict.fromkeys(known)), name))


def label_stand_in(run: Run) -> Run:
    """Say with the dataset's name that the data are not that dataset's."""
    if not on_stand_in(run.config):
        return run
    return replace(run, config=run.config | {"dataset.name": f"{records.STAND_IN} {run.config['dataset.name']}"})


# What is written


def report(arguments: argparse.Namespace, comparison: Comparison, remarks: Sequence[str], notes: Sequence[str]) -> str:
    rows, kind = comparison.rows, arguments.format
    if kind == "csv":
        return as_csv(rows, arguments.metrics)
    caption = describe(arguments, comparison, CALLED[kind])
    if kind == "latex":
        said = [*caption, *describe_gaps(rows), *remarks]
        comments = "".join(f"% Left out: {note}\n" for note in notes)
        return comments + latex_tables(comparison, arguments.metrics, arguments.spread, " ".join(said), "tab:report")
    keys = list(rows[0].label)
    only = rows[0].group
    shown = "" if keys or only is None else f"{only.runs[0].folder.name}\n"
    best, leading = MARKS[kind]
    body: list[list[str]] = []
    for row in rows:
        label = ["-" if value is None else str(value) for value in row.label.values()]
        cells: list[str] = []
        for metric in arguments.metrics:
            form = best if metric in row.best_in else leading if metric in row.leads_in else "{}"
            cells.append(form.format(text_of(row, metric, arguments.spread)))
        counts = ["not run", ""] if row.group is None else [str(row.num_seeds), str(row.num_diverged)]
        body.append([*label, *cells, *counts])
    head = [*keys, *map(columns.heading, arguments.metrics), "seeds", "diverged"]
    table = wrapped(head, body) if kind == "terminal" else markdown(head, body)
    below = "".join(f"\n{sentence}\n" for sentence in remarks)
    above = "\n".join(caption)
    return f"{shown}{above}\n\n{table}{below}{describe_notes(notes)}"


def describe(arguments: argparse.Namespace, comparison: Comparison, called: tuple[str, str]) -> list[str]:
    """Say what the numbers are, which of them are marked, and what was tested against what."""
    bold, underlined = called
    lines = [
        f"Last round; mean and {SPREADS[arguments.spread]} over seeds. Arrows point to better values.",
    ]
    stand_in = [row for row in comparison.rows if str(row.label.get("dataset.name", "")).startswith(records.STAND_IN)]
    if stand_in:
        whose = "All rows are" if len(stand_in) == len(comparison.rows) else f"{len(stand_in)} rows are"
        lines.append(f"{whose} of random stand-in data: these numbers say nothing about the datasets.")
    shared = [f"{key.removesuffix('.name')} {comparison.shared[key]}" for key in SHARED if key in comparison.shared]
    if shared and len(comparison.rows) > 1:
        lines.append(f"All rows: {', '.join(shared)}.")
    if comparison.keys.own:
        own = ", ".join(comparison.keys.own)
        lines.append(f"Each row's own, as one tunes a method: {own}. Rows are compared with their own values of it.")
    if comparison.verdicts:
        test = {"t": "t-test", "wilcoxon": "Wilcoxon test"}[arguments.test]
        lines.append(
            f"{bold}: of the rows of a setting with several seeds the best mean, and better than each other one by a "
            f"{test} paired by seed, Holm-corrected, p < {SIGNIFICANT}. {underlined}: the best mean, without that."
        )
        lines += describe_tests(comparison)
    elif len(comparison.rows) > 1:
        lines.append("Nothing is compared: no two rows have the same setting.")
    return lines


def describe_tests(comparison: Comparison) -> list[str]:
    """Say which rows were tested against which, over how many seeds, and where no test was possible and why."""
    tested = [verdict for verdict in comparison.verdicts if not verdict.reason]
    lines: list[str] = []
    settings = list(dict.fromkeys(verdict.setting for verdict in comparison.verdicts))
    by = f" ({', '.join(comparison.keys.setting)})" if comparison.keys.setting else ""
    if tested:
        num = len({verdict.setting for verdict in tested})
        share = f"in each of {num}" if num == len(settings) else f"in {num} of {len(settings)}"
        where = "" if len(settings) == 1 else f"{share} settings{by} "
        num_rows = _range([verdict.num_tests + 1 for verdict in tested])
        others = _range([verdict.num_tests for verdict in tested])
        tests = "1 test" if others == "1" else f"{others} tests"
        seeds = _range([num for verdict in tested for num in verdict.num_seeds])
        lines.append(
            f"Tested: {where}the best of {num_rows} rows against the other {others}, paired over {seeds} seeds, with "
            f"Holm over {tests} per metric."
        )
    alone = {(name, verdict.setting) for verdict in tested for name in verdict.untested}
    if alone:
        listed = [f"{name} at {setting}" if setting else name for name, setting in sorted(alone)]
        lines.append(f"Not tested, having one seed: {_some(listed)}.")
    reasons: dict[str, list[Verdict]] = {}
    for verdict in comparison.verdicts:
        if verdict.reason:
            reasons.setdefault(verdict.reason, []).append(verdict)
    for reason, verdicts in reasons.items():
        blocks = list(dict.fromkeys(verdict.setting for verdict in verdicts))
        metrics = list(dict.fromkeys(columns.label(verdict.metric) for verdict in verdicts))
        where = "" if len(blocks) == len(settings) else f" at {_some(blocks)}"
        whole = len(verdicts) == sum(verdict.setting in blocks for verdict in comparison.verdicts)
        what = "" if whole else f" of {', '.join(metrics)}"
        lines.append(f"No test{what}{where}: {reason}.")
    return lines


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _some(names: Sequence[str], most: int = 5) -> str:
    return "; ".join(names) if len(names) <= most else f"{'; '.join(names[:most])} and {len(names) - most} more"


def describe_settings(comparison: Comparison, columns_too: bool) -> list[str]:
    """Say of each setting the values that have no column, or all that its name does not say."""
    keys = [key for key in comparison.keys.along if columns_too or key not in comparison.rows[0].label]
    found = {row.setting: row.group.config for row in comparison.rows if row.group is not None}
    lines = [
        f"At {setting}: {', '.join(f'{key} {config[key]}' for key in keys if key in config)}."
        for setting, config in found.items()
    ]
    return lines if keys else []


def describe_missing_rows(comparison: Comparison) -> list[str]:
    if not comparison.num_missing:
        return []
    number = f"{comparison.num_missing} combinations of settings and what is compared were not run"
    return [f"{number}; up to {MAX_MISSING} would have rows."]


def describe_gaps(rows: Sequence[Row]) -> list[str]:
    """Say what a pivot table has no column for: rows with fewer seeds than others, and diverged runs."""
    there = [row for row in rows if row.group is not None]
    most = max(row.num_seeds for row in there)
    fewer = [f"{_title(row)}: {row.num_seeds}" for row in there if row.num_seeds < most]
    diverged = [f"{_title(row)}: {row.num_diverged}" for row in there if row.num_diverged]
    sentences = [f"{most} seed{'s' * (most != 1)}" + (f"; fewer for {_some(fewer)}." if fewer else ".")]
    return [*sentences, *([f"Diverged runs, not in the means: {_some(diverged)}."] if diverged else [])]


def describe_withheld(rows: Sequence[Row]) -> list[str]:
    """Say where methods of a comparison train on different examples, because some leave data to the server."""
    held: dict[object, set[str]] = {}
    for row in rows:
        if row.group is not None:
            held.setdefault(row.group.config.get("dataset.server_samples"), set()).add(row.name)
    if len(held) < 2:
        return []
    each = "; ".join(
        f"{num}: {_some(sorted(names))}" for num, names in sorted(held.items(), key=lambda item: str(item[0]))
    )
    return [
        f"Not on equal terms: dataset.server_samples, which no client trains on, differs ({each}). Give all the same."
    ]


def _title(row: Row) -> str:
    return f"{row.name} at {row.setting}" if row.setting else row.name


def rank_sentences(arguments: argparse.Namespace, rows: Sequence[Row]) -> list[str]:
    sentences: list[str] = []
    for metric in arguments.metrics:
        if (ranks := rank(rows, metric)) is not None:
            ordered = sorted(ranks.mean_ranks.items(), key=lambda item: item[1])
            listed = ", ".join(f"{name} {value:.2f}" for name, value in ordered)
            sentences.append(
                f"{columns.label(metric)}: mean ranks over {ranks.num_blocks} settings: {listed}; "
                f"Friedman p = {ranks.p_value:.3g}, differences above {ranks.critical_difference:.2f} are significant "
                "(Nemenyi)."
            )
    return sentences


def as_csv(rows: Sequence[Row], metrics: Sequence[str]) -> str:
    """One line per row and metric, with all numbers."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    keys = list(rows[0].label)
    numbers = ["mean", "std", "standard_error", "seeds", "diverged", "best", "best_mean", "code_versions"]
    writer.writerow([*keys, "metric", *numbers])
    for row in rows:
        codes = len(codes_of(row))
        for metric in metrics:
            found = row.stats(metric)
            cells = [found.mean, found.std, found.standard_error, found.num] if found else ["", "", "", 0]
            marks = [metric in row.best_in, metric in row.leads_in]
            there = [empty_if_nan(cell) for cell in cells]
            writer.writerow([*row.label.values(), metric, *there, row.num_diverged, *marks, codes])
    return text.getvalue()
