"""Figure 1 and tables 1 to 5 of BFL-P out of finished runs.

    python scripts/bfl_p.py figure1|table1|table2|table3|table4|table4_100|table5 [--runs outputs] [--to outputs/report]

Ozer et al., "How to Combine Variational Bayesian Networks in Federated Learning", 2022. Nothing is trained: what is
missing is named, with the lines that make it. conf/paper/bfl_p.yaml says which runs are whose. Tables 1 and 4 are of 10
clients, 3 and 4_100 of 100. Figure 1 and table 2 need no runs.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bfl_bench import records, report
from bfl_bench.papers.pages import Maker, Page
from bfl_bench.papers.rules import METRICS, compare
from bfl_bench.papers.tables import read_published_rows
from bfl_bench.report import Group, Run

Floats = NDArray[np.float64]


def combine_toy() -> dict[str, tuple[float, float]]:
    """Mean and variance of N(0, 1) and N(2, 0.25) with equal weights under each rule: the toy of BA-BFL's figure 1."""
    import torch

    from bfl_bench import aggregators as rules

    means, variances, weights = (
        torch.tensor(values, dtype=torch.float64) for values in ([[0.0], [2.0]], [[1.0], [0.25]], [0.5, 0.5])
    )
    chosen: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
        "EAA": rules.eaa,
        "GAA": rules.gaa,
        "AALV": rules.aalv,
        "PPA's limit (moments)": rules.moments,
        "CF": rules.cf,
        "RKLB": rules.rklb,
        "WB": rules.wb,
        "alpha-divergence, 0.5": rules.alpha,
    }
    combined = {title: rule(means, variances, weights) for title, rule in chosen.items()}
    return {title: (mean.item(), variance.item()) for title, (mean, variance) in combined.items()}


def density(x: Floats, mean: float, variance: float) -> Floats:
    values: Floats = np.exp(-((x - mean) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)
    return values


def draw_toy(to: Path, name: str, title: str, panels: Sequence[Sequence[str]], shape: tuple[int, int]) -> None:
    """Density curves; each panel shows the two Gaussians and the rules it names."""
    from matplotlib.figure import Figure

    combined = combine_toy()
    x = np.linspace(-3.5, 4.5, 600)
    figure = Figure(figsize=(11, 2.6 * shape[0] if shape[0] > 1 else 4), layout="constrained")
    grid = figure.subplots(*shape, sharex=True, sharey=True)
    for axes, names in zip(grid.flat, panels, strict=True):
        for label, style, mean, variance in (("client 1", "--", 0.0, 1.0), ("client 2", ":", 2.0, 0.25)):
            axes.plot(x, density(x, mean, variance), style, c="0.4", label=label)
        for rule in names:
            axes.plot(x, density(x, *combined[rule]), lw=2, label=rule if len(names) > 1 else "combined")
        if len(names) == 1:
            axes.set_title(names[0], fontsize=10)
        if len(names) > 1 or axes is grid.flat[0]:
            axes.legend(fontsize=9, loc="upper left", frameon=False)
    figure.supxlabel("weight")
    figure.supylabel("density")
    lines = [{"rule": rule, "mean": mean, "variance": variance} for rule, (mean, variance) in combined.items()]
    rows = [
        [rule, f"{mean:.4f}", f"{variance:.4f}", f"{variance**0.5:.4f}"] for rule, (mean, variance) in combined.items()
    ]
    report.write(to, name, f"# {title}\n\n{report.markdown(['rule', 'mean', 'variance', 'std'], rows)}", lines)
    report.save_figure(figure, to, name)


def draw_figure1(to: Path) -> None:
    title = "BFL-P, figure 1: N(0, 1) and N(2, 0.25), BA-BFL's, as BFL-P does not give its own; equal weights"
    draw_toy(to, "bfl_p_figure1", title, [[rule] for rule in combine_toy()], (2, 4))


def make_table(page: Page) -> None:
    compare(page, "BFL-P", "Model", "standard_error")


def make_equations(page: Page) -> None:
    compare(page, "BFL-P", "Model", "standard_error", "runs by the paper's equations")


def make_variances(page: Page) -> None:
    """A row per rule, each quantity by the equations and by the released code."""
    found: dict[str, dict[str, Group]] = {}
    for group in page.groups():
        rule, way = page.cell(group).label.split(" / ")
        found.setdefault(rule, {})[way] = group
    lines: list[list[str]] = []
    cells: list[dict[str, object]] = []
    for rule, ways in found.items():
        stats = {
            f"{title}, {way}": ways[way].stats(column, factor) if way in ways else None
            for title, column, factor in METRICS.values()
            for way in ("equations", "released")
        }
        lines.append([rule, *("-" if found is None else f"{found.mean:.4g}" for found in stats.values())])
        cells.append({"rule": rule} | {name: found.mean if found else None for name, found in stats.items()})
    text = "# BFL-P's setting, last round: variances learnt, by the equations, or frozen, by the released code\n\n"
    page.write(text + report.markdown(["rule", *stats], lines), cells)


def make_table5(page: Page) -> None:
    """By the clock, as clients' seconds overlap."""
    published = {} if page.scale == "smoke" else read_published_rows("bfl_p", "5")
    found: dict[tuple[str, str, int], float] = {}
    for cell, run in page.entries:
        model, rule = cell.label.split(" / ", 1)
        found[model, rule, int(cell.names["engine.workers"])] = seconds_per_round(run)
    cells: list[dict[str, object]] = []
    for (model, rule, workers), seconds in sorted(found.items()):
        metric = f"seconds_per_round, {workers} processes"
        theirs, _ = published.get(("cifar10", ("IID", model, rule), metric), (None, None))
        alone = found.get((model, rule, 1))
        row = {"model": model, "rule": rule, "processes": workers, "seconds per round": seconds, "paper": theirs}
        cells.append(row | {"of one process": seconds / alone if alone else None})
    text = "# BFL-P, table 5: seconds per round by number of processes\n\n" + report.cells_as_markdown(cells)
    text += "\nThe paper's seconds are of another machine, on a GPU; what compares is the share of one process.\n"
    page.write(text, cells)


def seconds_per_round(run: Run) -> float:
    """By the clock, as clients' seconds overlap; without the last round, in which local models are evaluated too."""
    rows = records.read_table(run.folder / records.TIMING)
    return statistics.fmean(float(row["wall_seconds"] or 0) for row in rows[:-1] or rows)


def make_table2(to: Path) -> None:
    """The datasets as the paper lists them."""
    from bfl_bench.data.images import SHAPES

    sizes = {"fashion_mnist": (60_000, 10_000), "cifar10": (50_000, 10_000), "svhn": (73_257, 26_032)}
    cells: list[dict[str, object]] = []
    for name, (train, test) in sizes.items():
        channels, side = SHAPES[name]
        cells.append({"dataset": name, "image": f"{channels} x {side} x {side}", "train": train, "test": test})
    text = "# BFL-P, table 2: datasets, as in the paper\n\n" + report.cells_as_markdown(cells)
    report.write(to, "bfl_p_table2", text, cells)


MAKERS: dict[str, Maker] = {
    **dict.fromkeys(("table1", "table3", "table4", "table4_100"), make_table),
    "table1_equations": make_equations,
    "table5": make_table5,
    "variances": make_variances,
}
WITHOUT_RUNS: dict[str, Callable[[Path], None]] = {"figure1": draw_figure1, "table2": make_table2}
