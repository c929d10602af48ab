"""Section IV-E of FOLA: figures 10, 11 and 12. `scripts/fola.py` calls what is here."""

import statistics
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from bfl_bench import records, report
from bfl_bench.evaluation import columns
from bfl_bench.report import Config, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STRUCTURES = {"full": "C0", "eigenvalue": "C1", "diagonal": "C2"}
CURVES = "bfl-run -m experiment=fola_laplace"
MESSAGES = "bfl-run experiment=fola_laplace row=fola_laplace/full_online eval.keep_messages=[1]"
OPTIMUM = "bfl-run -m experiment=fola_figure12 row=fola_figure12/full rounds=15 partition.alpha=0.1,1,100"


# Figures 10 and 11: structures of the Laplace approximation


def label_of(config: Config) -> str | None:
    if config["model.name"] != "softmax" or config["num_clients"] != 2 or config["partition.name"] != "disjoint":
        return None
    if config["method.name"] == "fedavg":
        return "FedAvg"
    return f"{config['method.structure']}, {config['method.evaluation']}" if config["method.name"] == "fola" else None


def find_curves(arguments: Namespace) -> tuple[dict[str, Run], list[str]]:
    runs, notes = report.find_runs(arguments.runs, arguments.where, label_of)
    report.need(runs, "Sec. IV-E", CURVES)
    found: dict[str, Run] = {}
    for run in runs:
        label = label_of(run.config) or ""
        if label in found:
            raise report.ReportError(
                f"two runs of {label}, {found[label].folder} and {run.folder}: choose with --where"
            )
        found[label] = run
    wanted = ["FedAvg", *(f"{s}, {e}" for s in STRUCTURES for e in ("online", "offline"))]
    if missing := [label for label in wanted if label not in found]:
        notes.append(f"no run of {'; '.join(missing)}. To make them: `{CURVES}`")
    return {label: found[label] for label in wanted if label in found}, notes


def style_of(label: str) -> dict[str, str]:
    if label == "FedAvg":
        return {"color": "black", "linestyle": "-."}
    structure, evaluation = label.split(", ")
    return {"color": STRUCTURES[structure], "linestyle": "-" if evaluation == "online" else "--"}


def make_figure10(arguments: Namespace) -> None:
    from matplotlib.figure import Figure

    curves, notes = find_curves(arguments)
    sweeps = {label: records.read_table(run.folder / records.WEIGHTS) for label, run in curves.items()}
    rounds = sorted({int(row["round"] or 0) for rows in sweeps.values() for row in rows})
    figure = Figure(figsize=(4.2 * (1 + len(rounds)), 3.6), layout="constrained")
    axes = figure.subplots(1, 1 + len(rounds))
    draw_precision(axes[0], curves, notes)
    cells: list[dict[str, object]] = []
    for panel, round_ in zip(axes[1:], rounds, strict=True):
        for label, rows in sweeps.items():
            points = [(row["weight"] or 0.0, 100 * (row["ga"] or 0.0)) for row in rows if row["round"] == round_]
            panel.plot(*zip(*points, strict=True), label=label, lw=1.3, **style_of(label))
            best = max(points, key=lambda point: point[1])
            mean = statistics.fmean(y for _, y in points)
            cells.append({"round": round_, "method": label, "best GA": best[1], "at pi_1": best[0], "mean GA": mean})
        panel.set(xlabel=r"$\pi_1$", ylabel="global accuracy (%)", title=f"round {round_}")
        panel.grid(alpha=0.3)
    axes[-1].legend(fontsize=7)
    text = "# FOLA, Fig. 10: accuracy over the first client's weight\n\n" + report.cells_as_markdown(cells)
    report.write(arguments.to, "fola_figure10", text + report.describe_notes(notes), cells)
    report.save_figure(figure, arguments.to, "fola_figure10")


def draw_precision(axes: "Axes", curves: Mapping[str, Run], notes: list[str], size: int = 1000) -> None:
    """The first client's precision after round 1, less its smallest entry and divided by its largest."""
    files = [run.folder / records.MESSAGES / "round-1-client-0.safetensors" for run in curves.values()]
    file = next((file for file in files if file.exists() and file.stat().st_size > 10**8), None)
    if file is None:
        axes.text(0.5, 0.5, "no run keeps its messages", ha="center", va="center")
        notes.append(f"no full precision for panel (a). To keep one: `{MESSAGES}`")
        return
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as tensors:
        precision = tensors.get_slice("precision")
        whole = tensors.get_tensor("precision")
        low, high = whole.min(), whole.max()
        part = (precision[:size, :size] - low) / (high - low)
    zero = -low / (high - low)
    image = axes.imshow(part, cmap="viridis", vmin=zero - 0.02, vmax=zero + 0.02)
    axes.figure.colorbar(image, ax=axes, shrink=0.8, extend="both")
    axes.set_title(f"precision of client 1, {size} parameters", fontsize=9)


def make_figure11(arguments: Namespace) -> None:
    from matplotlib.figure import Figure

    curves, notes = find_curves(arguments)
    tables = {label: records.read_table(run.folder / records.METRICS) for label, run in curves.items()}
    panels = ("precision_cosine", "ga", "la")
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for panel, column in zip(axes, panels, strict=True):
        factor = 1 if column == "precision_cosine" else 100
        for label, rows in tables.items():
            points = [(row["round"], factor * value) for row in rows if (value := row.get(column)) is not None]
            if points:
                panel.plot(*zip(*points, strict=True), label=label, marker="o", ms=3, lw=1.2, **style_of(label))
        panel.set(xlabel="round", ylabel=columns.label(column) + (" (%)" if factor == 100 else ""))
        panel.grid(alpha=0.3)
    axes[1].legend(fontsize=7)
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
    text += "60 % LA; offline diagonal stays below 83 % GA.\n"
    report.write(arguments.to, "fola_figure11", text + report.describe_notes(notes), cells)
    report.save_figure(figure, arguments.to, "fola_figure11")


# Figure 12: aggregation error and local forgetting


class Point(NamedTuple):
    kind: str  # AE: a global model; LF: local models
    alpha: float
    method: str
    epochs: int
    distance: float
    accuracy: float  # percent


def find_points(runs: Iterable[Run], optima: Mapping[str, Run]) -> list[Point]:
    """Runs that measured their distance to one of the optima; those that also started there measure forgetting."""
    points: list[Point] = []
    for run in runs:
        posterior, start = run.config["reference_posterior"], run.config["start_from"]
        if posterior not in optima or start not in (None, posterior):
            continue
        kind, distance, accuracy = ("AE", "ae", "ga") if start is None else ("LF", "lf", "la")
        method = run.config.get("method.structure", "FedAvg")
        values = (float(run.final[distance] or 0), 100 * float(run.final[accuracy] or 0))
        points.append(Point(kind, run.config["partition.alpha"], method, run.config["local.epochs"], *values))
    return sorted(points)


def make_figure12(arguments: Namespace) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator
    from scipy.stats import spearmanr

    def keep(config: Config) -> bool:
        return config["model.name"] == "softmax" and config["num_clients"] == 2 and "partition.alpha" in config

    runs, notes = report.find_runs(arguments.runs, arguments.where, keep)
    optima = [run for run in runs if run.config.get("method.structure") == "full" and run.config["rounds"] >= 15]
    report.need(optima, "15 rounds with the full Hessian", OPTIMUM)
    points = find_points(runs, report.by_name(optima))
    text = "# FOLA, Fig. 12: accuracy against aggregation error (AE) and local forgetting (LF)\n\n"
    for run in optima:
        name = run.folder.name
        alpha, accuracy = run.config["partition.alpha"], 100 * float(run.final["ga"] or 0)
        text += f"Known posterior, alpha {alpha}: GA {accuracy:.2f} % after {run.config['rounds']} rounds ({name})\n\n"
        there = {point.kind for point in points if point.alpha == alpha}
        line = f"bfl-run -m experiment=fola_figure12 partition.alpha={alpha} reference_posterior={run.folder}"
        if "AE" not in there:
            notes.append(f"no AE at alpha {alpha}. To make it: `{line} local.epochs=1,5,20`")
        if "LF" not in there:
            line += f" start_from={run.folder} rounds=1 local.epochs=1,2,5,10,20"
            notes.append(f"no LF at alpha {alpha}. To make it: `{line} row=fola_figure12/full,fola_figure12/fedavg`")
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
            axes.annotate(f"{point.epochs}", (point.distance, point.accuracy), fontsize=6, **offset)
        xlabel = f"{kind}: distance to the known posterior (beside a point: E)"
        axes.set(xscale="log", xlabel=xlabel, ylabel=f"{name} accuracy (%)")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.grid(alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        axes.legend(unique.values(), unique.keys(), fontsize=6)
        distances, accuracies = [point.distance for point in here], [point.accuracy for point in here]
        if len(here) > 2 and len(set(distances)) > 1 and len(set(accuracies)) > 1:
            rho = spearmanr(distances, accuracies).statistic
            text += f"\nSpearman correlation of {kind} and {name} accuracy over all points: {rho:.2f}\n"
    report.write(arguments.to, "fola_figure12", text + report.describe_notes(notes), cells)
    report.save_figure(figure, arguments.to, "fola_figure12")
