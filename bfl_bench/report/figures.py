"""The figures of a run's folder: who holds what, how the rounds went, what the model knows of itself. Never torch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bfl_bench import records
from bfl_bench.evaluation import columns
from bfl_bench.report.style import styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, records.Cell]]

PANELS: dict[str, tuple[int, tuple[str, ...]]] = {
    "accuracy (%)": (100, ("ga", "la", "worst10", "train_acc")),
    "loss (nats)": (1, ("nll", "train_loss")),
    "calibration": (1, ("ece", "brier")),
}
NUMERIC_PANELS: dict[str, tuple[int, tuple[str, ...]]] = {
    "error": (1, ("rmse", "crps")),
    "loss (nats)": (1, ("nll", "train_loss")),
    "calibration": (1, ("covered50", "covered90", "covered95", "quantile_error")),
}
"""What a panel shows: its title with the unit, the factor that the unit asks for, the columns."""


@styled
def draw_partition(counts: np.ndarray, folder: Path) -> None:
    """Draw how many training examples of each class each client holds, as a heat map."""
    from matplotlib.figure import Figure

    num_clients, num_classes = counts.shape
    figure = Figure(figsize=(min(12, 2 + 0.45 * num_clients), 1.5 + 0.3 * min(num_classes, 30)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest")
    axes.set(xlabel="client", ylabel="class")
    if counts.size <= 400:
        axes.set_xticks(range(num_clients))
        axes.set_yticks(range(num_classes))
        threshold = counts.max() / 2
        for client, label in np.argwhere(counts > 0):
            shade = "white" if counts[client, label] > threshold else "black"
            axes.text(client, label, str(counts[client, label]), ha="center", va="center", fontsize=8, color=shade)
    figure.colorbar(image, label="training examples")
    _save(figure, folder / records.PARTITION_FIGURE)


def draw_curves(folder: Path) -> None:
    """Draw accuracy, loss and calibration over the rounds of the run in a folder."""
    path = folder / records.METRICS
    _save(make_curves(records.read_table(path) if path.exists() else []), folder / records.CURVES_FIGURE)


@styled
def make_curves(rows: Sequence[Mapping[str, records.Cell]]) -> "Figure":
    """Make a panel for each group of columns, with its legend below, out of the rows of metrics.csv."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = NUMERIC_PANELS if any(row.get("rmse") is not None for row in rows) else PANELS
    figure = Figure(figsize=(9.6, 4), layout="constrained")
    for axes, (title, (factor, names)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for name in names:
            points = [(row["round"], factor * value) for row in rows if (value := row.get(name)) is not None]
            if points:
                style = {"label": columns.label(name), "marker": "." if len(points) < 40 else None}
                axes.plot(*zip(*points, strict=True), **style)
        axes.set(title=title, xlabel="round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        if axes.lines:
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
            axes.legend(**below, columnspacing=1.2, handlelength=1.5)
        axes.grid()
    return figure


def draw_uncertainty(folder: Path) -> None:
    """Draw what `eval.uncertainty`, `eval.ood` and `eval.shift` have measured in the last round, where they have."""
    names = (records.RELIABILITY, records.RISK, records.ENTROPY, records.SHIFT)
    tables = {name: _last_round(folder / name) for name in names}
    if any(tables[name] for name in names[1:]) or any("count_calibrated" in row for row in tables[names[0]]):
        _save(make_uncertainty(tables), folder / records.UNCERTAINTY_FIGURE)


@styled
def make_uncertainty(tables: Mapping[str, Rows]) -> "Figure":
    """Make a panel of each kind for which there are rows: of the last round, by the name of their file."""
    from matplotlib.figure import Figure

    shifted = tables.get(records.SHIFT, ())
    panels: list[tuple[str, Callable[[Axes], None]]] = []
    if reliability := tables.get(records.RELIABILITY, ()):
        panels.append(("reliability", lambda axes: _fill_reliability(axes, reliability)))
    if risk := tables.get(records.RISK, ()):
        panels.append(("risk over coverage", lambda axes: _fill_risk(axes, risk)))
    if entropies := tables.get(records.ENTROPY, ()):
        panels.append(("entropy of predictions", lambda axes: _fill_entropies(axes, entropies)))
    if shifted:
        panels.append(("accuracy under shift", lambda axes: _fill_shift(axes, shifted, "accuracy")))
        panels.append(("loss under shift (nats)", lambda axes: _fill_shift(axes, shifted, "nll")))
    figure = Figure(figsize=(3.6 * len(panels), 4.4), layout="constrained")
    for axes, (title, fill) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        fill(axes)
        axes.set(title=title)
        axes.grid()
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2}
        axes.legend(**below, fontsize=9, columnspacing=1.2, handlelength=1.5)
    return figure


def _fill_reliability(axes: "Axes", rows: Rows) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1, label="calibrated")
    for suffix, label in (("", "as predicted"), ("_calibrated", "after temperature")):
        total = sum(row.get(f"count{suffix}") or 0 for row in rows)
        filled = [row for row in rows if 100 * (row.get(f"count{suffix}") or 0) >= max(total, 1)]  # at least 1 %
        points = [[row[f"{name}{suffix}"] or 0.0 for row in filled] for name in ("confidence", "accuracy")]
        if filled:
            axes.plot(*points, marker="o", markersize=4, label=label)
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))


def _fill_risk(axes: "Axes", rows: Rows) -> None:
    points = [[row[name] or 0.0 for row in rows] for name in ("coverage", "risk")]
    axes.plot(*points, label="most confident first")
    axes.axhline(points[1][-1], color="grey", linestyle="--", linewidth=1, label="any order")
    axes.set(xlabel="coverage", ylabel="share of errors", xlim=(0, 1))
    axes.set_ylim(bottom=0)


def _fill_entropies(axes: "Axes", rows: Rows) -> None:
    middles = [row["entropy"] or 0.0 for row in rows]
    width = 2 * middles[0]
    edges = [0.0, *(middle + width / 2 for middle in middles)]
    for name in (name for name in rows[0] if name not in ("round", "entropy")):
        counts = np.array([row[name] or 0.0 for row in rows])
        axes.stairs(
            counts / max(counts.sum(), 1), edges, fill=True, alpha=0.45, label="test set" if name == "test" else name
        )
    axes.set(xlabel="entropy (nats)", ylabel="share of examples")


def _fill_shift(axes: "Axes", rows: Rows, score: str) -> None:
    severities = [row["severity"] or 0.0 for row in rows]
    names = [name for name in rows[0] if name.startswith(f"{score}@")]
    for name in names:
        axes.plot(severities, [row[name] or 0.0 for row in rows], alpha=0.6, label=name.partition("@")[2])
    axes.plot(severities, [row[score] or 0.0 for row in rows], color="black", linewidth=2.5, label="mean")
    axes.set(xlabel="severity", xticks=severities)


def _last_round(path: Path) -> Rows:
    rows = records.read_table(path) if path.exists() else []
    return [row for row in rows if row["round"] == rows[-1]["round"]]


def _save(figure: "Figure", path: Path) -> None:
    aside = path.with_name(path.name + ".tmp")
    figure.savefig(aside, dpi=120, format="png")
    aside.replace(path)
