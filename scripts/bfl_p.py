"""Figure 1 and tables 1 and 4 of BFL-P out of finished runs.

    python scripts/bfl_p.py figure1|table1|table4 [--runs outputs] [--to outputs/report] [--dataset NAME]

Ozer et al., "How to Combine Variational Bayesian Networks in Federated Learning", 2022. Nothing is trained: a table
ends with the `bfl-run` lines that make what is missing. The tables are those of 10 clients. Figure 1 needs no runs.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bfl_bench import report
from bfl_bench.report import Config, Row

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


def row_of(config: Config) -> Row | None:
    """The row of tables 1 and 4 that a run belongs to, if any."""
    if config.get("model.bayesian_layers") not in ("auto", "all"):
        return None
    partition = PARTITIONS.get(config["partition.name"])
    model = MODELS.get((config["method.name"], config.get("method.weights", "")))
    rules = RULES_RELEASED if report.is_released(config) else RULES
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


PAPER = report.Paper(
    name="bfl_p",
    title="BFL-P",
    seeds=(0, 1, 2, 3, 4),
    spread="standard_error",
    labels=("method.weights",),
    row_of=row_of,
    overrides_of=overrides_of,
    datasets={"fashion_mnist": {}, "cifar10": CROPPED, "svhn": {}},
)


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


COMMANDS: dict[str, Callable[[Namespace], None]] = {
    "figure1": draw_figure1,
    "table1": partial(report.compare, PAPER, "1"),
    "table4": partial(report.compare, PAPER, "4"),
}

if __name__ == "__main__":
    report.run_script(__doc__ or "", COMMANDS)
