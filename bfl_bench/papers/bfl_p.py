"""Figure 1 and tables 1 to 5 of BFL-P out of finished runs.

    python scripts/bfl_p.py figure1|table1|table2|table3|table4|table4_100|table5 [--runs outputs] [--to outputs/report]

Ozer et al., "How to Combine Variational Bayesian Networks in Federated Learning", 2022. Nothing is trained: a table
ends with the `bfl-run` lines that make what is missing. Tables 1 and 4 are of 10 clients, 3 and 4_100 of 100. Figure 1
and table 2 need no runs.
"""

import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bfl_bench import records, report
from bfl_bench.identity import read_config
from bfl_bench.papers import tables
from bfl_bench.papers.tables import Row
from bfl_bench.report import Config, Run

Floats = NDArray[np.float64]

PARTITIONS = {"iid": "IID", "dirichlet": "Non-IID", "niid_bench": "Non-IID"}
MODELS = {
    ("fedavg", "uniform"): "FED",
    ("fedavg", "size"): "FEDAVG",
    ("fvb", "uniform"): "FVBA",
    ("fvb", "size"): "FVBWA",
}
RULES = {"EAA": "eaa", "GAA": "gaa", "AALV": "aalv", "PPA": "ppa", "CF": "cf"}
RULES_RELEASED = {rule: name if rule == "AALV" else f"{name}_released" for rule, name in RULES.items()}
# The released code pads, crops and flips CIFAR-10; the paper does not say.
CROPPED = {"dataset.crop_padding": 4, "dataset.crop_fill": "reflect", "dataset.flip": True}
DATASETS: dict[str, Config] = {"fashion_mnist": {}, "cifar10": CROPPED, "svhn": {}}


def is_of_another_paper(config: Config) -> bool:
    """Other data, one-shot learning, other splits: neither BFL-P's nor BA-BFL's."""
    other_split = config.get("partition.alpha", 0.5) != 0.5
    return config["dataset.name"] not in DATASETS or config["rounds"] == 1 or other_split


def row_of(num_clients: int, config: Config) -> Row | None:
    """The row of tables 1, 3 and 4 that a run belongs to, if any."""
    if config.get("model.bayesian_layers") not in ("auto", "all") or config["num_clients"] != num_clients:
        return None
    if is_of_another_paper(config):
        return None
    partition = PARTITIONS.get(config["partition.name"])
    model = MODELS.get((config["method.name"], config.get("method.weights", "")))
    rules = RULES_RELEASED if tables.is_released(config) else RULES
    names = {"none": "N/A"} | {name: rule for rule, name in rules.items()}
    aggregator = names.get(config["aggregator.name"])
    return (partition, model, aggregator) if partition and model and aggregator else None


def overrides_of(row: Row, released: bool) -> tuple[list[str], str]:
    partition, model, rule = row
    method, weights = next(key for key, name in MODELS.items() if name == model)
    overrides = [f"method={method}", f"method.weights={weights}"]
    if partition == "IID":
        overrides.append("partition=iid")
    return overrides, "" if rule == "N/A" else (RULES_RELEASED if released else RULES)[rule]


PAPER = tables.Paper(
    name="bfl_p",
    title="BFL-P",
    seeds=(0, 1, 2, 3, 4),
    spread="standard_error",
    labels=("method.weights",),
    row_of=partial(row_of, 10),
    overrides_of=overrides_of,
    datasets=DATASETS,
)
LARGE = replace(
    PAPER, row_of=partial(row_of, 100), values={"num_clients": 100, "participation": 0.1, "rounds": 500}
)  # of 100 clients, a tenth per round


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
            axes.legend(fontsize=8, loc="upper left", frameon=False)
    figure.supxlabel("weight")
    figure.supylabel("density")
    lines = [{"rule": rule, "mean": mean, "variance": variance} for rule, (mean, variance) in combined.items()]
    rows = [
        [rule, f"{mean:.4f}", f"{variance:.4f}", f"{variance**0.5:.4f}"] for rule, (mean, variance) in combined.items()
    ]
    report.write(to, name, f"# {title}\n\n{report.markdown(['rule', 'mean', 'variance', 'std'], rows)}", lines)
    report.save_figure(figure, to, name)


def draw_figure1(arguments: Namespace) -> None:
    title = "BFL-P, figure 1: N(0, 1) and N(2, 0.25), BA-BFL's, as BFL-P does not give its own; equal weights"
    draw_toy(arguments.to, "bfl_p_figure1", title, [[rule] for rule in combine_toy()], (2, 4))


def make_table5(arguments: Namespace) -> None:
    """The number of processes does not change a result, so it is no part of what tells runs apart elsewhere."""
    published = LARGE.published("5")
    found: dict[tuple[str, str, int], tuple[float, Run]] = {}
    folders = {file.parent for path in arguments.runs for file in path.rglob(records.CONFIG)}
    for folder in sorted(folders):
        runs, _ = report.find_runs([folder], arguments.where, partial(row_of, 100))
        for run in runs:
            _, model, rule = row_of(100, run.config) or ("", "", "")
            engine = (read_config(folder) or {})["engine"]
            found[model, rule, engine.get("workers", 1)] = (seconds_per_round(run), run)
    line = "bfl-run -m experiment=bfl_p_table5"
    report.need(found, "table 5", line)
    cells: list[dict[str, object]] = []
    for (model, rule, workers), (seconds, run) in sorted(found.items()):
        metric = f"seconds_per_round, {workers} processes"
        theirs, _ = published.get(("cifar10", ("IID", model, rule), metric), (None, None))
        alone = found.get((model, rule, 1))
        cell = {"model": model, "rule": rule, "processes": workers, "seconds per round": seconds, "paper": theirs}
        cell |= {"of one process": seconds / alone[0] if alone else None}
        cells.append(cell | {"dataset": run.config["dataset.name"], "E": run.config["local.epochs"]})
    text = "# BFL-P, table 5: seconds per round by number of processes\n\n" + report.cells_as_markdown(cells)
    text += "\nThe paper's seconds are of another machine, on a GPU; what compares is the share of one process.\n"
    report.write(arguments.to, "bfl_p_table5", text + f"\nMore: `{line}`\n", cells)


def seconds_per_round(run: Run) -> float:
    """By the clock, as clients' seconds overlap; without the last round, in which local models are evaluated too."""
    rows = records.read_table(run.folder / records.TIMING)
    return statistics.fmean(float(row["wall_seconds"] or 0) for row in rows[:-1] or rows)


def make_table2(arguments: Namespace) -> None:
    """The datasets as the paper lists them."""
    from bfl_bench.data.images import SHAPES

    sizes = {"fashion_mnist": (60_000, 10_000), "cifar10": (50_000, 10_000), "svhn": (73_257, 26_032)}
    cells: list[dict[str, object]] = []
    for name, (train, test) in sizes.items():
        channels, side = SHAPES[name]
        cells.append({"dataset": name, "image": f"{channels} x {side} x {side}", "train": train, "test": test})
    text = "# BFL-P, table 2: datasets, as in the paper\n\n" + report.cells_as_markdown(cells)
    report.write(arguments.to, "bfl_p_table2", text, cells)


COMMANDS: dict[str, Callable[[Namespace], None]] = {
    "figure1": draw_figure1,
    "table1": partial(tables.compare, PAPER, "1"),
    "table2": make_table2,
    "table3": partial(tables.compare, LARGE, "3"),
    "table4": partial(tables.compare, PAPER, "4"),
    "table4_100": partial(tables.compare, LARGE, "4_100"),
    "table5": make_table5,
}


def main() -> None:
    report.run_script(__doc__ or "", COMMANDS, ["table1", "table3", "table4", "table4_100"])


if __name__ == "__main__":
    main()
