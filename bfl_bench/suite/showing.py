"""A suite's results written down: Markdown, LaTeX, figures, a page, and what they say in plain words."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bfl_bench import records
from bfl_bench.errors import RunError
from bfl_bench.evaluation import columns
from bfl_bench.report.comparison import SIGNIFICANT, Ranks, Row, mark_best, rank, text_of
from bfl_bench.report.output import latex_of, markdown, save_figure
from bfl_bench.suite import drawing
from bfl_bench.suite.choosing import SEARCH
from bfl_bench.suite.page import TITLES, make_page
from bfl_bench.suite.ranking import Against, compare_orders, compare_with, find_front, find_ties
from bfl_bench.suite.results import Result, as_rows, read_results
from bfl_bench.suite.spec import Suite
from bfl_bench.suite.tables import read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE = "fedavg"
COSTS = ("bytes_up", "client_seconds")


def show(suite: Suite, sources: Sequence[Path], to: Path) -> None:
    """Write table.md, table.tex, the figures and page.html, and print the Markdown."""
    results = [one for one in read_results(sources) if one.setting in suite.settings and one.method in suite.methods]
    if not results:
        raise RunError(f"there are no results of {suite.name} yet: bfl-suite tune {suite.name}, then run")
    rows = as_rows(results)
    metrics = [name for name in (*suite.metrics, *_detection_columns(rows)) if any(row.stats(name) for row in rows)]
    mark_best(rows, metrics, "t")
    ranks = rank(rows, suite.metrics[0])
    sentences = describe(suite, results, rows, ranks)
    tables = [f"## {setting}\n\n{_table(suite, results, rows, setting, metrics)}" for setting in suite.settings]
    text = f"# {suite.title}\n\n" + "\n".join(f"- {line}" for line in sentences) + "\n\n" + "\n".join(tables)
    to.mkdir(parents=True, exist_ok=True)
    records.write_text(to / "table.md", text)
    records.write_text(to / "table.tex", latex_of(text))
    fronts = name_fronts(suite, rows)
    figures: dict[str, Figure] = {name: drawing.draw_fronts(rows, found, COSTS) for name, found in fronts.items()}
    if ranks is not None:
        figures["ranks"] = drawing.draw_ranks(ranks, find_ties(ranks), columns.label(suite.metrics[0]))
    searched = [row for source in sources for row in read_rows(source / SEARCH) if row["setting"] in suite.settings]
    if searched:
        labels = {name: entry.label for name, entry in suite.methods.items()}
        figures["sensitivity"] = drawing.draw_search(searched, labels, list(suite.settings))
    for name, figure in figures.items():
        save_figure(figure, to, name)
    pictures = {name: (to / f"{name}.png").read_bytes() for name in TITLES if name in figures}
    records.write_text(to / "page.html", make_page(suite, rows, metrics, sentences, pictures))
    print(text)


def name_fronts(suite: Suite, rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Name the columns whose fronts are drawn, by figure and setting: the first that it has, accuracy, detection.

    A setting that does not have the column is left out, and so is a figure without settings.
    """
    found: dict[str, dict[str, str]] = {"pareto": {}, "pareto_accuracy": {}, "pareto_ood": {}}
    for setting in suite.settings:
        there = [row for row in rows if row.block == setting]
        candidates = {"pareto": suite.metrics, "pareto_accuracy": ("ga",), "pareto_ood": _detection_columns(there)}
        for name, metrics in candidates.items():
            if metric := next((one for one in metrics if any(row.stats(one) for row in there)), None):
                found[name][setting] = metric
    return {name: metrics for name, metrics in found.items() if metrics}


def _detection_columns(rows: Iterable[Row]) -> list[str]:
    """List how well foreign examples are told by entropy, one column for each set."""
    names = {name for row in rows for run in row.runs for name in run.final if name.startswith("auroc_entropy@")}
    return sorted(name for name in names if name.count("@") == 1)


def _table(suite: Suite, results: Sequence[Result], rows: Sequence[Row], setting: str, metrics: Sequence[str]) -> str:
    """Write the table of a setting, the best first, with what each search chose and cost."""
    there = [row for row in rows if row.block == setting]
    if not there:
        return "Not run yet.\n"
    shown = [name for name in metrics if any(row.stats(name) for row in there)]
    sign = -1 if columns.direction(shown[0]) == "up" else 1
    means = {row.name: found.mean if (found := row.stats(shown[0])) else float("inf") * sign for row in there}
    there.sort(key=lambda row: (sign * means[row.name], row.name))
    baseline = next((row for row in there if row.group and row.group.config["method.name"] == BASELINE), None)
    head = ["method", *(columns.heading(name) for name in shown), "MB up", "client time / FedAvg", "points", "seeds"]
    lines: list[list[str]] = []
    for row in there:
        mine = [one for one in results if one.setting == setting and one.label == row.name]
        cells = [
            f"**{text_of(row, name, 'std')}**" if name in row.best_in else text_of(row, name, "std") for name in shown
        ]
        sent = row.stats("bytes_up")
        lines.append(
            [
                row.name,
                *cells,
                f"{sent.mean / 1e6:.1f}" if sent else "-",
                _ratio(row, baseline),
                str(mine[0].points),
                f"{row.num_seeds}" + (f" ({row.num_diverged} diverged)" if row.num_diverged else ""),
            ]
        )
    return markdown(head, lines)


def _ratio(row: Row, baseline: Row | None) -> str:
    ours, theirs = row.stats("client_seconds"), baseline.stats("client_seconds") if baseline else None
    return f"{ours.mean / theirs.mean:.2f}" if ours and theirs else "-"


def describe(suite: Suite, results: Sequence[Result], rows: Sequence[Row], ranks: Ranks | None) -> list[str]:
    """Say in sentences what the numbers show and what they do not."""
    primary = suite.metrics[0]
    budgets = sorted({one.points for one in results})
    chosen = "negative log-likelihood" if suite.select == "nll" else "accuracy"
    sentences = [
        f"Every method searched {_join(map(str, budgets))} points per setting, chosen by the {chosen} of validation "
        f"examples; reported runs have fresh seeds, at most {len(suite.seeds)}. Mean +- standard deviation over seeds; "
        "bold: beats every other of its setting by a paired t-test with Holm's correction, at 5 %.",
    ]
    commits = sorted({one.commit[:8] for one in results if one.commit})
    if len(commits) > 1:
        sentences.append(f"Runs were made with {len(commits)} commits: {', '.join(commits)}.")
    if ranks is None:
        sentences.append("Ranks need three methods in three settings: there are not as many yet.")
    else:
        order = sorted(ranks.mean_ranks, key=lambda name: ranks.mean_ranks[name])
        listed = ", ".join(f"{name} {ranks.mean_ranks[name]:.2f}" for name in order)
        sentences.append(
            f"Mean rank by {columns.label(primary)} over {ranks.num_blocks} settings: {listed}. Friedman's test: "
            f"p = {ranks.p_value:.3g}; mean ranks closer than {ranks.critical_difference:.2f} are ties (Nemenyi, 5 %)."
        )
    for setting in suite.settings:
        there = [row for row in rows if row.block == setting]
        found = compare_orders(there, "ece", "ece_calibrated")
        if found:
            sentences.append(
                f"{setting}: of {found.num_pairs} pairs of methods that ECE tells apart, {found.num_kept} keep their "
                f"order after a temperature, {found.num_reversed} reverse it, the rest become ties (Kendall's tau "
                f"{found.correlation:.2f})."
            )
    for metrics in name_fronts(suite, rows).values():
        for setting, metric in metrics.items():
            sentences += _describe_front([row for row in rows if row.block == setting], setting, metric)
    baseline = suite.methods[BASELINE].label if BASELINE in suite.methods else None
    if baseline is not None:
        sentences += _describe_against(compare_with(rows, primary, baseline), baseline, columns.label(primary))
    return sentences


def _describe_front(rows: Sequence[Row], setting: str, metric: str) -> list[str]:
    sign = 1 if columns.direction(metric) == "up" else -1
    points = {
        row.name: (cost.mean, sign * value.mean)
        for row in rows
        if (cost := row.stats("client_seconds")) and (value := row.stats(metric))
    }
    front = find_front(points)
    return (
        [f"{setting}: on the front of {columns.label(metric)} against client time: {', '.join(front)}."]
        if front
        else []
    )


def _describe_against(found: Sequence[Against], baseline: str, metric: str) -> list[str]:
    """Say of each method in which settings it beats the baseline, and in which it is worse."""
    sentences: list[str] = []
    for method in dict.fromkeys(one.method for one in found):
        mine = [one for one in found if one.method == method]
        told = [one for one in mine if one.p_value is not None and one.p_value < SIGNIFICANT]
        better, worse = ([one.setting for one in told if one.difference * sign > 0] for sign in (1, -1))
        parts = [f"better than {baseline} in {_join(better)}"] if better else []
        parts += [f"worse in {_join(worse)}"] if worse else []
        rest = len(mine) - len(told)
        parts += [f"not told apart from it in {rest} of {len(mine)} settings"] if rest else []
        sentences.append(f"{method}, by {metric}: {'; '.join(parts)}.")
    return sentences


def _join(words: Iterable[str]) -> str:
    return ", ".join(words)
