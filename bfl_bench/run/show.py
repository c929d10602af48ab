"""What a person sees of a run: progress, the closing table, two figures. Reads records, never torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bfl_bench import records
from bfl_bench.run.observers import in_short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TABLE = {
    "ga": "global accuracy",
    "la": "local accuracy",
    "worst10": "worst 10 % of clients",
    "nll": "negative log-likelihood",
    "ece": "expected calibration error",
    "brier": "Brier score",
}


def print_summary(summary: Mapping[str, Any], folder: Path, brief: bool = False, note: str = "") -> None:
    """The final metrics, as a table or in one line, and where the files are."""
    final, best = summary["final"], summary["best"]
    status = summary["status"] + (f" ({note})" if note else "")
    if brief:
        print(f"{status}: {folder} {in_short(final) if final else ''}")
        return
    if final is not None:
        print(f"\n{'':<28}{'final':>10}{'best':>10}   (round {final['round']}; best by GA, round {best['round']})")
        for key, label in _TABLE.items():
            cells = (f"{row[key]:>10.4f}" if row.get(key) is not None else f"{'-':>10}" for row in (final, best))
            print(f"{label:<28}" + "".join(cells))
    print(f"\n{status}: {folder}")


def draw_partition(counts: np.ndarray, folder: Path) -> None:
    """Heat-map of how many training examples of each class each client holds."""
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
    """Accuracy, loss and calibration over the rounds."""
    from matplotlib.figure import Figure

    path = folder / records.METRICS
    rows = records.read_table(path) if path.exists() else []
    panels = {
        "accuracy": ("ga", "la", "worst10", "train_acc"),
        "loss": ("nll", "train_loss"),
        "calibration": ("ece", "brier"),
    }
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for name in names:
            points = [(row["round"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 40 else None)
        axes.set(title=title, xlabel="round")
        if axes.lines:
            axes.legend()
        axes.grid(alpha=0.3)
    _save(figure, folder / records.CURVES_FIGURE)


def _save(figure: "Figure", path: Path) -> None:
    aside = path.with_name(path.name + ".tmp")
    figure.savefig(aside, dpi=120, format="png")
    aside.replace(path)
