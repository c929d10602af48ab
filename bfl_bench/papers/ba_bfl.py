"""Table 1 and figures 1 to 5 of BA-BFL out of finished runs.

    python scripts/ba_bfl.py figure1|...|figure5|table1 [--runs outputs] [--to outputs/report]

Jamoussi et al., "BA-BFL: Barycentric Aggregation for Bayesian Federated Learning", 2024. Nothing is trained: what is
missing is named, with the lines that make it. conf/paper/ba_bfl.yaml says which runs are whose. Figure 1 needs no runs.
Figure 2 is the partition of the first run. Figures 3 to 5 show mean and population standard deviation over seeds
against the number of Bayesian layers; at 0 stands FedAvg, the same for all rules. Rules whose results agree in four
decimals are one line.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bfl_bench import records, report
from bfl_bench.papers.bfl_p import draw_toy
from bfl_bench.papers.pages import Maker, Page
from bfl_bench.papers.rules import compare, describe_coincidence

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RULES = ("AALV", "EAA", "GAA", "RKLB", "WB")
LAYERS = (1, 2, 3)
FIGURES = {  # quantity: label, factor
    "figure3": {"ece": ("ECE (%)", 100), "nll": ("NLL", 1)},
    "figure4": {"seconds_per_round": ("seconds per round", 1)},
    "figure5": {"la": ("average local accuracy (%)", 100), "worst10": ("worst 10 % of clients (%)", 100)},
}


def make_table1(page: Page) -> None:
    compare(page, "BA-BFL", "Nbl", "population_std")


def make_equations(page: Page) -> None:
    compare(page, "BA-BFL", "Nbl", "population_std", "runs by the paper's equations")


def make_ivon(page: Page) -> None:
    compare(page, "BA-BFL", "Model", "population_std")


def draw_partition(page: Page) -> None:
    """Figure 2: how many examples of each class each client has."""
    from matplotlib.figure import Figure

    runs = [run for run in page.runs if (run.folder / records.PARTITION_COUNTS).exists()]
    report.need(runs, "BA-BFL's partition", "bfl-paper run ba_bfl_figure2")
    run = runs[0]
    counts = [
        {key: int(row[key] or 0) for key in ("client", "class", "count")}
        for row in records.read_table(run.folder / records.PARTITION_COUNTS)
    ]
    matrix = np.zeros((max(c["class"] for c in counts) + 1, max(c["client"] for c in counts) + 1), int)
    for cell in counts:
        matrix[cell["class"], cell["client"]] = cell["count"]
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    figure.colorbar(axes.imshow(matrix, cmap="Blues", aspect="auto"), ax=axes, label="training examples")
    axes.set(xlabel="client", ylabel="class", xticks=range(matrix.shape[1]), yticks=range(matrix.shape[0]))
    alpha, seed = run.config["partition.alpha"], run.config["seed"]
    text = f"# BA-BFL, figure 2: {run.config['dataset.name']}, Dirichlet {alpha}, seed {seed}\n\n"
    head = ["class", *(f"client {client}" for client in range(matrix.shape[1]))]
    rows = [[str(class_), *map(str, row)] for class_, row in enumerate(matrix)]
    page.write(text + report.markdown(head, rows), counts)
    page.save_figure(figure)


def find_equal(stats: Mapping[tuple[str, int], report.Stats]) -> list[tuple[str, ...]]:
    """Put rules together whose results are the same in all digits that the table has, at every number of layers."""
    found: dict[tuple[object, ...], tuple[str, ...]] = {}
    for rule in RULES:
        shown = tuple((n, f"{s.mean:.4f} {s.population_std:.4f}") for n in (1, 2, 3) if (s := stats.get((rule, n))))
        if shown:
            found[shown] = (*found.get(shown, ()), rule)
    return list(found.values())


def draw_lines(axes: "Axes", stats: Mapping[tuple[str, int], report.Stats]) -> None:
    """By rule and number of layers; rules with the same results are one line, others stand a little apart.

    Apart, so that their bars do not hide one another; a single seed has none.
    """
    start = [(0.0, stats["FedAVG", 0])] if ("FedAVG", 0) in stats else []
    lines = find_equal(stats)
    for number, rules in enumerate(lines):
        apart = 0.06 * (number - (len(lines) - 1) / 2)
        points = [(n + apart, stats[rules[0], n]) for n in (1, 2, 3) if (rules[0], n) in stats]
        color = f"C{RULES.index(rules[0])}"
        x, y = zip(*((x, found.mean) for x, found in start + points), strict=True)
        axes.plot(x, y, lw=1, color=color)
        x, y, error = zip(*((x, found.mean, found.population_std) for x, found in points), strict=True)
        axes.errorbar(x, y, error, fmt="o", ms=4, capsize=2, color=color, label=", ".join(rules))
    for position, found in start:
        axes.errorbar(
            position, found.mean, found.population_std, fmt="s", ms=5, capsize=2, color="black", label="FedAvg"
        )
    axes.grid(alpha=0.3)


def draw_layers(page: Page) -> None:
    """A panel per quantity and dataset, a line per rule."""
    from matplotlib.figure import Figure

    quantities = FIGURES[page.table.name]
    groups = page.groups()
    datasets = list(dict.fromkeys(page.cell(group).names["dataset"] for group in groups))
    size = (max(5.0, 3.8 * len(datasets)), 0.4 + 3 * len(quantities))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(quantities), len(datasets), squeeze=False, sharex=True)
    lines: list[dict[str, object]] = []
    for i, (quantity, (label, factor)) in enumerate(quantities.items()):
        for j, dataset in enumerate(datasets):
            stats: dict[tuple[str, int], report.Stats] = {}
            for group in groups:
                cell = page.cell(group)
                layers, rule = cell.label.split(" / ")
                if cell.names["dataset"] == dataset and (found := group.stats(quantity, factor)):
                    stats[rule, int(layers)] = found
            for (rule, number), found in sorted(stats.items(), key=lambda item: (item[0][1], item[0][0])):
                line = {"dataset": dataset, "quantity": label, "layers": number, "rule": rule, "mean": found.mean}
                spread = found.population_std if found.num > 1 else None
                lines.append(line | {"population_std": spread, "seeds": found.num})
            draw_lines(grid[i, j], stats)
            grid[i, j].set(xticks=range(4), ylabel=label if j == 0 else None, title=dataset if i == 0 else None)
    figure.supxlabel("Bayesian layers (0: FedAvg)")
    for axes in grid.flat:  # each has its own, as rules may coincide in one quantity and not in another
        axes.legend(fontsize=9)
    head = ["dataset", "quantity", "layers", "rule", "mean", "population std", "seeds"]
    rows = [[_text(value) for value in line.values()] for line in lines]
    text = f"# BA-BFL, {page.table.name}: runs by the released code\n"
    absent = page.absent("dataset")
    body = report.markdown(head, rows) + (f"\nNo run here of {', '.join(absent)}.\n" if absent else "")
    page.write(text + "\n" + body + describe_coincidence(page), lines)
    page.save_figure(figure)


def _text(value: object) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def draw_figure1(to: Path) -> None:
    panels = [["EAA", "GAA", "AALV", "RKLB", "WB"], ["PPA's limit (moments)", "CF", "alpha-divergence, 0.5"]]
    title = "BA-BFL, figure 1: N(0, 1) and N(2, 0.25), equal weights"
    draw_toy(to, "ba_bfl_figure1", title, panels, (1, 2))


MAKERS: dict[str, Maker] = {
    "table1": make_table1,
    "table1_equations": make_equations,
    "ivon": make_ivon,
    "figure2": draw_partition,
    **dict.fromkeys(FIGURES, draw_layers),
}
WITHOUT_RUNS: dict[str, Callable[[Path], None]] = {"figure1": draw_figure1}
