"""Section IV-E of FOLA: figures 10, 11 and 12."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bfl_bench import records, report
from bfl_bench.evaluation import columns
from bfl_bench.papers.pages import Page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEWEST_POINTS = 8  # of a rank correlation: chance alone gives one beyond 0.74 once in twenty times, of fewer oftener
STRUCTURES = {"full": "C0", "eigenvalue": "C1", "diagonal": "C2"}


def use_whole_rounds(axes: "Axes") -> None:
    """Put ticks of an axis of rounds at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


# Figures 10 and 11: structures of the Laplace approximation


def style_of(label: str) -> dict[str, str]:
    if label == "FedAvg":
        return {"color": "black", "linestyle": "-."}
    structure, evaluation = label.split(", ")
    return {"color": STRUCTURES[structure], "linestyle": "-" if evaluation == "online" else "--"}


def make_figure10(page: Page) -> None:
    from matplotlib.figure import Figure

    curves = {cell.label: run for cell, run in page.entries}
    sweeps = {label: records.read_table(run.folder / records.WEIGHTS) for label, run in curves.items()}
    rounds = sorted({int(row["round"] or 0) for rows in sweeps.values() for row in rows})
    figure = Figure(figsize=(4.2 * len(rounds), 3.6), layout="constrained")
    axes = figure.subplots(1, len(rounds), squeeze=False)[0]
    cells: list[dict[str, object]] = []
    for panel, round_ in zip(axes, rounds, strict=True):
        for label, rows in sweeps.items():
            points = [(row["weight"] or 0.0, 100 * (row["ga"] or 0.0)) for row in rows if row["round"] == round_]
            panel.plot(*zip(*points, strict=True), label=label, lw=1.3, **style_of(label))
            best = max(points, key=lambda point: point[1])
            mean = statistics.fmean(y for _, y in points)
            cells.append({"round": round_, "method": label, "best GA": best[1], "at pi_1": best[0], "mean GA": mean})
        panel.set(xlabel=r"$\pi_1$", ylabel="global accuracy (%)", title=f"round {round_}")
        panel.grid(alpha=0.3)
    axes[-1].legend(fontsize=9)
    text = "# FOLA, Fig. 10: accuracy over the first client's weight\n\n" + report.cells_as_markdown(cells)
    page.write(text, cells)
    page.save_figure(figure)


def make_precision(page: Page, size: int = 1000) -> None:
    """Fig. 10 a: the first client's precision after round 1, less its smallest entry and divided by its largest."""
    from matplotlib.figure import Figure

    folders = [run.folder for run in page.runs if isinstance(run.folder, Path)]  # archives have no messages
    kept = [folder / records.MESSAGES / "round-1-client-0.safetensors" for folder in folders]
    file = next((file for file in kept if file.exists()), None)
    line = f"bfl-paper run {page.table.full_name} scale={page.scale} force=true"
    report.need(file, "Fig. 10 a, with its messages", line)
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as tensors:
        whole = tensors.get_tensor("precision")
    num, low, high = len(whole), whole.min(), whole.max()
    corner = whole[:size, :size] if whole.ndim == 2 else np.diag(whole[:size])
    part = (corner - low) / (high - low)
    zero = -low / (high - low)
    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(part, cmap="viridis", vmin=zero - 0.02, vmax=zero + 0.02)
    figure.colorbar(image, ax=axes, shrink=0.8, extend="both")
    axes.set_title(f"precision of client 1, {size} parameters", fontsize=9)
    cells: list[dict[str, object]] = [{"smallest": float(low), "largest": float(high), "parameters": num}]
    page.write("# FOLA, Fig. 10 a: the first client's precision\n\n" + report.cells_as_markdown(cells), cells)
    page.save_figure(figure)


def make_figure11(page: Page) -> None:
    from matplotlib.figure import Figure

    curves = {cell.label: run for cell, run in page.entries}
    tables = {label: records.read_table(run.folder / records.METRICS) for label, run in curves.items()}
    panels = ("precision_cosine", "ga", "la")
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for panel, column in zip(axes, panels, strict=True):
        factor = 1 if column == "precision_cosine" else 100
        for label, rows in tables.items():
            points = [(row["round"], factor * value) for row in rows if (value := row.get(column)) is not None]
            if points:
                panel.plot(*zip(*points, strict=True), label=label, marker="o", ms=3, lw=1.2, **style_of(label))
        panel.set(xlabel="round", ylabel=columns.label(column) + (" (%)" if factor == 100 else ""))
        use_whole_rounds(panel)
        panel.grid(alpha=0.3)
    axes[1].legend(fontsize=9)
    cells = [
        {
            "method": label,
            "rounds": rows[-1]["round"],
            "GA in round 3 (%)": 100 * (rows[min(2, len(rows) - 1)]["ga"] or 0),
            "last GA (%)": 100 * (rows[-1]["ga"] or 0),
            "last LA (%)": 100 * (rows[-1]["la"] or 0),
            "last cosine": rows[-1].get("precision_cosine"),
        }
        for label, rows in tables.items()
    ]
    text = "# FOLA, Fig. 11: structures and evaluations of the Laplace approximation\n\n"
    text += report.cells_as_markdown(cells)
    text += "\nThe paper: full reaches nearly 90 % GA in 3 rounds and more than 80 % LA after 10, the others less than "
    text += (
        "60 % LA; offline diagonal stays below 83 % GA.\nThe cosine of full Hessians is near 1 by construction: less "
    )
    text += "the smallest entry, which is negative, nearly all of their entries are the same positive number.\n"
    page.write(text, cells)
    page.save_figure(figure)


# Figure 12: aggregation error and local forgetting


class Point(NamedTuple):
    kind: str  # AE: a global model; LF: local models
    alpha: float
    method: str
    epochs: int
    distance: float
    accuracy: float  # percent


def find_points(page: Page) -> list[Point]:
    """The cells that measure their distance to the known posterior, or how a client that starts there forgets it."""
    points: list[Point] = []
    for cell, run in page.entries:
        kind, _, method = cell.label.partition(" ")
        if not method:
            continue
        distance, accuracy = ("ae", "ga") if kind == "AE" else ("lf", "la")
        values = (float(run.final[distance] or 0), 100 * float(run.final[accuracy] or 0))
        points.append(Point(kind, run.config["partition.alpha"], method, run.config["local.epochs"], *values))
    return sorted(points)


def make_figure12(page: Page) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator
    from scipy.stats import spearmanr

    points = find_points(page)
    text = "# FOLA, Fig. 12: accuracy against aggregation error (AE) and local forgetting (LF)\n\n"
    for cell, run in page.entries:
        if cell.label == "known":
            alpha, accuracy = run.config["partition.alpha"], 100 * float(run.final["ga"] or 0)
            text += f"Known posterior, alpha {alpha}: GA {accuracy:.2f} % after {run.config['rounds']} rounds "
            text += f"({run.folder.name})\n\n"
    cells = [point._asdict() for point in points]
    text += report.cells_as_markdown(cells) if cells else ""
    alphas = sorted({point.alpha for point in points})
    markers = {"full": "o", "diagonal": "^", "FedAvg": "s", "eigenvalue": "v"}
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, kind, name in zip(figure.subplots(1, 2), ("AE", "LF"), ("global", "local"), strict=True):
        here = [point for point in points if point.kind == kind]
        for point in here:
            label = f"{point.method}, alpha {point.alpha}"
            style = {"color": f"C{alphas.index(point.alpha)}", "marker": markers[point.method]}
            axes.scatter(point.distance, point.accuracy, label=label, **style)
            offset = {"xytext": (4, 3), "textcoords": "offset points"}
            axes.annotate(f"{point.epochs}", (point.distance, point.accuracy), fontsize=9, **offset)
        xlabel = f"{kind}: distance to the posterior (numbers: E)"
        axes.set(xscale="log", xlabel=xlabel, ylabel=f"{name} accuracy (%)")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.grid(alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        axes.legend(unique.values(), unique.keys(), fontsize=9)
        distances, accuracies = [point.distance for point in here], [point.accuracy for point in here]
        if len(here) >= FEWEST_POINTS and len(set(distances)) > 1 and len(set(accuracies)) > 1:
            rho = spearmanr(distances, accuracies).statistic
            text += f"\nSpearman correlation of {kind} and {name} accuracy over all points: {rho:.2f}\n"
    page.write(text, cells)
    page.save_figure(figure)
