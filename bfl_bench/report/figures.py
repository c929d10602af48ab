"""The two figures of a run's folder: who holds what, and how the rounds went. Never torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bfl_bench import records
from bfl_bench.evaluation import columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {
    "accuracy": ("ga", "la", "worst10", "train_acc"),
    "loss (nats)": ("nll", "train_loss"),
    "calibration": ("ece", "brier"),
}


def draw_partition(counts: np.ndarray, folder: Path) -> None:
    """Draw how many training examples of each class each client holds, as a heat map."""
    from matplotlib.figure import Figure

    num_clients, num_classes = counts.shape
    figure = Figure(figsize=(min(12, 2 + 0.35 * num_clients), 1.5 + 0.3 * min(num_classes, 30)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest")
    axes.set(xlabel="client", ylabel="class")
    if counts.size <= 400:
        axes.set_xticks(range(num_clients))
        axes.set_yticks(range(num_classes))
        threshold = counts.max() / 2
        for client, label in np.argwhere(counts > 0):
            shade = "white" if counts[client, label] > threshold else "black"
            axes.text(client, label, str(counts[client, label]), ha="center", va="center", fontsize=6, color=shade)
    figure.colorbar(image, label="training examples")
    _save(figure, folder / records.PARTITION_FIGURE)


def draw_curves(folder: Path) -> None:
    """Draw accuracy, loss and calibration over the rounds of the run in a folder."""
    path = folder / records.METRICS
    _save(make_curves(records.read_table(path) if path.exists() else []), folder / records.CURVES_FIGURE)


def make_curves(rows: Sequence[Mapping[str, records.Cell]]) -> "Figure":
    """Make a panel for each group of columns, with its legend below, out of the rows of metrics.csv."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for name in names:
            points = [(row["round"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                style = {"label": columns.label(name), "marker": "." if len(points) < 40 else None}
                axes.plot(*zip(*points, strict=True), **style)
        axes.set(title=title, xlabel="round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        if axes.lines:
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2}
            axes.legend(**below, fontsize=9, columnspacing=1.2, handlelength=1.5, frameon=False)
        axes.grid(alpha=0.3)
    return figure


def _save(figure: "Figure", path: Path) -> None:
    aside = path.with_name(path.name + ".tmp")
    figure.savefig(aside, dpi=120, format="png")
    aside.replace(path)
