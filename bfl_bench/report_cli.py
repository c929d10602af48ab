"""`bfl-report`: any set of runs side by side, grouped by what differs between them."""

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from bfl_bench import records
from bfl_bench.report.comparison import SIGNIFICANT, SPREADS, Row, make_rows, mark_best, rank, text_of
from bfl_bench.report.output import describe_notes, latex, markdown, parse_where
from bfl_bench.report.runs import ReportError, find_runs

FORMATS = ("terminal", "markdown", "latex", "csv")
DEFAULT_METRICS = ("ga", "la", "worst10", "ece", "nll")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        text = report(arguments)
    except ReportError as error:
        print(f"bfl-report: {error}", file=sys.stderr)
        return 1
    if arguments.to is None:
        print(text, end="")
    else:
        arguments.to.parent.mkdir(parents=True, exist_ok=True)
        records.write_text(arguments.to, text)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bfl-report",
        description="Means over seeds of any set of runs, grouped by what differs between them. A number is bold (or "
        "marked *) where it is the best of those it is compared with and a paired test over seeds, Holm-corrected, "
        f"supports it at {SIGNIFICANT}.",
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders with runs below")
    parser.add_argument(
        "--metrics", nargs="+", default=list(DEFAULT_METRICS), help="columns of metrics.csv, last round"
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
    arguments = parser.parse_args(argv)
    arguments.where = parse_where(arguments.where)
    return arguments


def report(arguments: argparse.Namespace) -> str:
    runs, notes = find_runs(arguments.runs, arguments.where, diverged=True)
    if not runs:
        raise ReportError("no finished run there" + "".join(f"\n- {note}" for note in notes))
    rows = make_rows(runs, arguments.by, arguments.compare)
    mark_best(rows, arguments.metrics, arguments.test)
    if arguments.format == "csv":
        return as_csv(rows, arguments.metrics)
    keys = list(rows[0].label)
    shown = "" if keys else f"{runs[0].folder.name}\n"
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
    head = [*keys, *arguments.metrics, "seeds", "diverged"]
    spread = f"mean and {SPREADS[arguments.spread]} over seeds"
    test = {"t": "t-test", "wilcoxon": "Wilcoxon test"}[arguments.test]
    caption = f"Last round; {spread}. Marked: best by a paired {test} over seeds, Holm-corrected, p < {SIGNIFICANT}."
    if arguments.format == "latex":
        return latex(head, body, caption)
    text = f"{shown}{caption}\n\n{markdown(head, body)}"
    for metric in arguments.metrics:
        if (ranks := rank(rows, metric, arguments.compare)) is not None:
            ordered = sorted(ranks.mean_ranks.items(), key=lambda item: item[1])
            listed = ", ".join(f"{name} {value:.2f}" for name, value in ordered)
            text += (
                f"\n{metric}: mean ranks over {ranks.num_blocks} settings: {listed}; Friedman p = {ranks.p_value:.3g}, "
            )
            text += f"differences above {ranks.critical_difference:.2f} are significant (Nemenyi).\n"
    return text + describe_notes(notes)


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
