"""`bfl-report`: any set of runs side by side, grouped by what differs between them."""

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from bfl_bench import records
from bfl_bench.evaluation import columns
from bfl_bench.report.comparison import SIGNIFICANT, SPREADS, Row, make_rows, mark_best, rank, text_of
from bfl_bench.report.html import make_page
from bfl_bench.report.output import describe_notes, latex, markdown, parse_where, wrapped
from bfl_bench.report.runs import find_runs

FORMATS = ("terminal", "markdown", "latex", "csv")
NAME_WIDTH = 2 + max(len(column.name) for column in columns.METRICS)
DEFAULT_METRICS = ("ga", "la", "worst10", "ece", "nll")


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no arrows shows question marks
    arguments = parse(argv)
    runs, notes = find_runs(arguments.runs, arguments.where, diverged=True)
    if not runs:
        print("bfl-report: no finished run there" + "".join(f"\n- {note}" for note in notes), file=sys.stderr)
        return 1
    rows = make_rows(runs, arguments.by, arguments.compare)
    mark_best(rows, arguments.metrics, arguments.test)
    text = report(arguments, rows, notes)
    if arguments.to is None:
        print(text, end="")
    else:
        save(arguments.to, text)
    if arguments.html is not None:
        caption = describe(arguments, "Bold")
        remarks = [*rank_sentences(arguments, rows), *(f"Left out: {note}" for note in notes)]
        save(arguments.html, make_page(rows, arguments.metrics, arguments.spread, arguments.compare, caption, remarks))
        print(f"page: {arguments.html}", file=sys.stderr)
    return 0


def save(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write_text(path, text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bfl-report",
        description="Means over seeds of any set of runs, grouped by what differs between them. A number is bold (or\n"
        "marked *) where it is the best of those it is compared with and a paired test over seeds,\n"
        f"Holm-corrected, supports it at {SIGNIFICANT}.",
        epilog=list_metrics(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders with runs below")
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=list(DEFAULT_METRICS),
        metavar="NAME",
        help="columns of metrics.csv, last round, or seconds_per_round; see below",
    )
    parser.add_argument("--by", nargs="+", default=[], metavar="KEY", help="config keys to show first")
    parser.add_argument(
        "--compare", nargs="+", default=["method", "aggregator"], metavar="KEY", help="what is compared"
    )
    parser.add_argument(
        "--where", nargs="+", default=[], metavar="KEY=VALUE", help="only runs with these config values"
    )
    parser.add_argument("--spread", choices=list(SPREADS), default="std")
    parser.add_argument("--test", choices=("t", "wilcoxon"), default="t", help="the paired test")
    parser.add_argument("--format", choices=FORMATS, default="terminal")
    parser.add_argument("--to", type=Path, help="a file instead of the terminal")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also a page for the browser: tables to sort and filter, charts"
    )
    arguments = parser.parse_args(argv)
    arguments.where = parse_where(arguments.where)
    return arguments


def list_metrics() -> str:
    """The names that --metrics takes."""
    lines = [f"  {column.name:<{NAME_WIDTH}}{columns.heading(column.name)}" for column in columns.METRICS]
    under = f"  {'NAME@RULE':<{NAME_WIDTH}}NAME under a rule of eval.also_aggregate or a solver of method.also_solve"
    return "\n".join(["metrics, with an arrow to the better values:", *lines, under])


def report(arguments: argparse.Namespace, rows: Sequence[Row], notes: Sequence[str]) -> str:
    if arguments.format == "csv":
        return as_csv(rows, arguments.metrics)
    keys = list(rows[0].label)
    only = rows[0].group
    shown = "" if keys or only is None else f"{only.runs[0].folder.name}\n"
    bold = {"markdown": "**{}**", "latex": "**{}**", "terminal": "{} *"}[arguments.format]
    body: list[list[str]] = []
    for row in rows:
        cells = [text_of(row, metric, arguments.spread) for metric in arguments.metrics]
        marked = [
            bold.format(cell) if metric in row.best_in else cell
            for metric, cell in zip(arguments.metrics, cells, strict=True)
        ]
        num = 0 if row.group is None else len(row.group.runs)
        label = ["-" if value is None else str(value) for value in row.label.values()]
        body.append([*label, *marked, str(num - row.num_diverged), str(row.num_diverged)])
    head = [*keys, *map(columns.heading, arguments.metrics), "seeds", "diverged"]
    caption = describe(arguments, "Marked")
    if arguments.format == "latex":
        return latex(head, body, caption)
    ranks = "".join(f"\n{sentence}\n" for sentence in rank_sentences(arguments, rows))
    table = wrapped(head, body) if arguments.format == "terminal" else markdown(head, body)
    return f"{shown}{caption}\n\n{table}{ranks}{describe_notes(notes)}"


def describe(arguments: argparse.Namespace, mark: str) -> str:
    """What the numbers are, and which of them are marked."""
    spread = f"mean and {SPREADS[arguments.spread]} over seeds"
    test = {"t": "t-test", "wilcoxon": "Wilcoxon test"}[arguments.test]
    best = f"{mark}: best by a paired {test} over seeds, Holm-corrected, p < {SIGNIFICANT}."
    return f"Last round; {spread}. Arrows point to better values. {best}"


def rank_sentences(arguments: argparse.Namespace, rows: Sequence[Row]) -> list[str]:
    sentences: list[str] = []
    for metric in arguments.metrics:
        if (ranks := rank(rows, metric, arguments.compare)) is not None:
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
    writer.writerow([*keys, "metric", "mean", "std", "standard_error", "seeds", "diverged", "best"])
    for row in rows:
        for metric in metrics:
            found = row.stats(metric)
            numbers = [found.mean, found.std, found.standard_error, found.num] if found else ["", "", "", 0]
            writer.writerow([*row.label.values(), metric, *numbers, row.num_diverged, metric in row.best_in])
    return text.getvalue()
