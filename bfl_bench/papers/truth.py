"""Methods against true posteriors: a table and a figure of the distances, by problem and heterogeneity."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from bfl_bench import records, report
from bfl_bench.evaluation import columns
from bfl_bench.papers.pages import Maker, Page
from bfl_bench.report import Run

SHOWN = ("truth_tv", "truth_mean", "truth_spread", "truth_kl", "truth_calibration")
DISTANCES = ("truth_kl", "truth_w2", "truth_mean", "truth_spread", "truth_tv", "truth_agreement", "truth_calibration")


def _axis(page: Page, axis: str) -> list[str]:
    """List what there is along an axis, in the order of the cells."""
    return list(dict.fromkeys(cell.names[axis] for cell, _ in page.entries))


def _last(runs: Sequence[Run], column: str) -> list[float]:
    """List the last round of each seed; empty where a run has no such number."""
    values = [run.final.get(column) for run in runs]
    return [] if None in values else [float(value) for value in values if value is not None]


def _mean(runs: Sequence[Run], column: str) -> float | None:
    values = _last(runs, column)
    return statistics.mean(values) if values else None


def _at(page: Page, method: str, problem: str, alpha: str) -> list[Run]:
    wanted = {"cell": method, "problem": problem, "partition.alpha": alpha}
    return [run for cell, run in page.entries if all(cell.names[axis] == name for axis, name in wanted.items())]


def make_table(page: Page) -> None:
    """Write a table of each distance, the alphas side by side in a cell."""
    methods, problems, alphas = (_axis(page, axis) for axis in ("cell", "problem", "partition.alpha"))
    text = (
        f"# {page.table.title}\n\nIn a cell: alpha {' / '.join(alphas)}, mean and standard deviation over seeds; -: no "
    )
    text += "run, a point, or parameters that cannot be told apart.\n\n"
    for column in SHOWN:
        lines: list[list[str]] = []
        for method in methods:
            cells = [[_last(_at(page, method, problem, alpha), column) for alpha in alphas] for problem in problems]
            if any(values for cell in cells for values in cell):
                lines.append([method, *(" / ".join(map(_write, cell)) for cell in cells)])
        if lines:
            text += f"## {columns.heading(column)}\n\n{columns.describe(column)}\n\n"
            text += report.markdown(["method", *problems], lines) + "\n"
    rows: list[dict[str, object]] = [
        {"method": cell.label, "problem": cell.names["problem"], "alpha": cell.names["partition.alpha"]}
        | {"seed": cell.seed, **{column: run.final.get(column) for column in DISTANCES}}
        for cell, run in page.entries
    ]
    page.write(text, rows)


def _write(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.1g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3g}{spread}"


def _over_rounds(runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Average the total variation over seeds, in every evaluated round that all have."""
    found: dict[float, list[float]] = defaultdict(list)
    for run in runs:
        for row in records.read_table(run.folder / records.METRICS):
            round_, value = row["round"], row.get("truth_tv")
            if round_ is not None and value is not None:
                found[round_].append(value)
    return [(round_, statistics.mean(values)) for round_, values in found.items() if len(values) == len(runs)]


def choose_styles(methods: Sequence[str]) -> dict[str, dict[str, str]]:
    """Choose a colour of the common style and a dash pattern for each method, no two alike."""
    import matplotlib

    num = len(matplotlib.rcParams["axes.prop_cycle"])
    dashes = ("-", "--", ":", "-.")
    return {name: {"color": f"C{i % num}", "linestyle": dashes[i // num % 4]} for i, name in enumerate(methods)}


def make_figure(page: Page) -> None:
    """Draw the total variation of predictions over rounds, and at the end over heterogeneity, problem by problem."""
    from matplotlib.figure import Figure

    methods, problems, alphas = (_axis(page, axis) for axis in ("cell", "problem", "partition.alpha"))
    figure = Figure(figsize=(2.9 * len(problems), 7.2), layout="constrained")
    axes = figure.subplots(2, len(problems), squeeze=False)
    styles = choose_styles(methods)
    for column, problem in enumerate(problems):
        over_rounds, over_alphas = axes[0][column], axes[1][column]
        for method in methods:
            style = {"linewidth": 1.3, "marker": ".", "label": method, **styles[method]}
            if points := _over_rounds(_at(page, method, problem, alphas[-1])):
                over_rounds.plot(*zip(*points, strict=True), **style)
            ends = [(float(alpha), _mean(_at(page, method, problem, alpha), "truth_tv")) for alpha in alphas]
            found = [(alpha, value) for alpha, value in ends if value is not None]
            if found:
                over_alphas.plot(*zip(*found, strict=True), **style)
        over_rounds.set(title=f"{problem}, alpha {alphas[-1]}", xlabel="round", yscale="log")
        over_alphas.set(title=f"{problem}, last round", xlabel="alpha", xscale="log", yscale="log")
        for panel in (over_rounds, over_alphas):
            panel.grid(alpha=0.3)
    for row in axes:
        row[0].set_ylabel(columns.label("truth_tv"))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(2, len(problems)), fontsize=8, frameon=False)
    cells: list[dict[str, object]] = [
        {
            "method": method,
            **{problem: _mean(_at(page, method, problem, alphas[-1]), "truth_tv") for problem in problems},
        }
        for method in methods
    ]
    text = f"# {page.table.title}\n\n{columns.label('truth_tv')} at alpha {alphas[-1]}, last round\n\n"
    page.write(text + report.cells_as_markdown(cells), cells)
    page.save_figure(figure)


MAKERS: dict[str, Maker] = {"posteriors": make_table, "figure": make_figure}
WITHOUT_RUNS: dict[str, Callable[[Path], None]] = {}
