"""Table 1 and figures 1 to 5 of BA-BFL out of finished runs.

    python scripts/ba_bfl.py figure1|...|figure5|table1 [--runs outputs] [--to outputs/report] [--dataset NAME]

Jamoussi et al., "BA-BFL: Barycentric Aggregation for Bayesian Federated Learning", 2024. Nothing is trained: the table
ends with the `bfl-run` lines that make what is missing. Figure 1 needs no runs. Figure 2 is the partition of the first
run found. Figures 3 to 5 show mean and population standard deviation over seeds against the number of Bayesian layers;
at 0 stands FedAvg, the same for all rules.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from bfl_bench import records, report
from bfl_bench.papers import tables
from bfl_bench.papers.bfl_p import DATASETS, PARTITIONS, draw_toy, is_of_another_paper
from bfl_bench.papers.tables import Row
from bfl_bench.report import Config

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RULES = {"AALV": "aalv", "EAA": "eaa", "GAA": "gaa", "RKLB": "rklb", "WB": "wb"}
RULES_RELEASED = RULES | {"GAA": "gaa_normalised"}
FIGURES = {  # quantity: label, factor
    "figure3": {"ece": ("ECE (%)", 100), "nll": ("NLL", 1)},
    "figure4": {"seconds_per_round": ("seconds per round", 1)},
    "figure5": {"la": ("average local accuracy (%)", 100), "worst10": ("worst 10 % of clients (%)", 100)},
}


def row_of(config: Config) -> Row | None:
    """The row of table 1 that a run belongs to, if any: partition, number of Bayesian layers, rule."""
    if PARTITIONS.get(config["partition.name"]) != "Non-IID" or config.get("method.weights") != "size":
        return None
    if is_of_another_paper(config):
        return None
    layers = config.get("model.bayesian_layers")
    if config["method.name"] == "fedavg":
        return "Non-IID", "0", "FedAVG"
    rules = RULES_RELEASED if tables.is_released(config) else RULES
    rule = {name: rule for rule, name in rules.items()}.get(config["aggregator.name"])
    return ("Non-IID", str(layers), rule) if config["method.name"] == "fvb" and rule and layers in (1, 2, 3) else None


def overrides_of(row: Row, released: bool) -> tuple[list[str], str]:
    _, layers, rule = row
    method = ["method=fedavg"] if layers == "0" else []
    rules = RULES_RELEASED if released else RULES
    return [*method, f"model.bayesian_layers={layers}"], "" if layers == "0" else rules[rule]


PAPER = tables.Paper(
    name="ba_bfl",
    title="BA-BFL",
    seeds=(0, 1, 2),
    spread="population_std",
    labels=("model.bayesian_layers",),
    row_of=row_of,
    overrides_of=overrides_of,
    datasets=DATASETS,
)


def draw_partition(arguments: Namespace) -> None:
    """Figure 2: how many examples of each class each client has."""
    from matplotlib.figure import Figure

    runs, notes = report.find_runs(arguments.runs, arguments.where, row_of)
    runs = [run for run in runs if (run.folder / records.PARTITION_COUNTS).exists()]
    report.need(runs, "BA-BFL's partition", "bfl-run experiment=ba_bfl_released")
    run = min(runs, key=lambda run: (run.config["dataset.name"], run.config["seed"], str(run.folder)))
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
    text += report.markdown(head, rows) + report.describe_notes(notes)
    report.write(arguments.to, "ba_bfl_figure2", text, counts)
    report.save_figure(figure, arguments.to, "ba_bfl_figure2")


def draw_lines(axes: "Axes", stats: Mapping[tuple[str, int], report.Stats]) -> None:
    """By rule and number of layers; rules stand a little apart, so that their bars do not hide one another."""
    start = [(0.0, stats["FedAVG", 0])] if ("FedAVG", 0) in stats else []
    for number, rule in enumerate(RULES):
        points = [(n + 0.06 * (number - 2), stats[rule, n]) for n in (1, 2, 3) if (rule, n) in stats]
        if points:
            x, y = zip(*((x, found.mean) for x, found in start + points), strict=True)
            axes.plot(x, y, lw=1, color=f"C{number}")
            x, y, error = zip(*((x, found.mean, found.population_std) for x, found in points), strict=True)
            axes.errorbar(x, y, error, fmt="o", ms=4, capsize=2, color=f"C{number}", label=rule)
    for position, found in start:
        axes.errorbar(
            position, found.mean, found.population_std, fmt="s", ms=5, capsize=2, color="black", label="FedAvg"
        )
    axes.grid(alpha=0.3)


def draw_layers(arguments: Namespace) -> None:
    """A panel per quantity and dataset, a line per rule."""
    from matplotlib.figure import Figure

    runs, notes = report.find_runs(arguments.runs, arguments.where, row_of)
    settings = tables.find_settings(PAPER, runs, arguments.best_over)
    if not settings:
        raise report.ReportError("no finished run of BA-BFL there; `table1` prints the lines that make them")
    quantities = FIGURES[arguments.command]
    for setting in settings:
        datasets = setting.datasets
        size = (max(5.0, 3.8 * len(datasets)), 0.4 + 3 * len(quantities))
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(quantities), len(datasets), squeeze=False, sharex=True)
        lines: list[dict[str, object]] = []
        for i, (quantity, (label, factor)) in enumerate(quantities.items()):
            for j, dataset in enumerate(datasets):
                stats = {
                    (row[2], int(row[1])): found
                    for (name, row), group in setting.cells.items()
                    if name == dataset and (found := group.stats(quantity, factor))
                }
                for (rule, layers), found in sorted(stats.items(), key=lambda item: (item[0][1], item[0][0])):
                    cell = {"dataset": dataset, "quantity": label, "layers": layers, "rule": rule, "mean": found.mean}
                    lines.append(cell | {"population_std": found.population_std, "seeds": found.num})
                draw_lines(grid[i, j], stats)
                grid[i, j].set(xticks=range(4), ylabel=label if j == 0 else None, title=dataset if i == 0 else None)
        figure.supxlabel("Bayesian layers (0: FedAvg)")
        legends = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in grid.flat]
        handles = {label: handle for legend in legends for handle, label in legend}
        shown = [label for label in ("FedAvg", *RULES) if label in handles]
        figure.legend([handles[label] for label in shown], shown, loc="outside right upper", fontsize=8)
        name = f"ba_bfl_{arguments.command}_{setting.name}"
        head = ["dataset", "quantity", "layers", "rule", "mean", "population std", "seeds"]
        rows = [[f"{v:.4f}" if isinstance(v, float) else str(v) for v in line.values()] for line in lines]
        changed = tables.describe_changes(PAPER, setting.cells.values())
        text = f"# BA-BFL, {arguments.command}: {setting.title}\n{report.describe_choice(arguments.best_over)}{changed}"
        text += "\n" + report.markdown(head, rows)
        report.write(arguments.to, name, text + report.describe_notes(notes), lines)
        report.save_figure(figure, arguments.to, name)


def draw_figure1(arguments: Namespace) -> None:
    panels = [["EAA", "GAA", "AALV", "RKLB", "WB"], ["PPA's limit (moments)", "CF", "alpha-divergence, 0.5"]]
    title = "BA-BFL, figure 1: N(0, 1) and N(2, 0.25), equal weights"
    draw_toy(arguments.to, "ba_bfl_figure1", title, panels, (1, 2))


COMMANDS: dict[str, Callable[[Namespace], None]] = {
    "table1": partial(tables.compare, PAPER, "1"),
    "figure1": draw_figure1,
    "figure2": draw_partition,
    **dict.fromkeys(FIGURES, draw_layers),
}


def main() -> None:
    report.run_script(__doc__ or "", COMMANDS, ["table1", *FIGURES])


if __name__ == "__main__":
    main()
