"""Table II and figures 2 to 12 of FOLA out of finished runs.

    python scripts/fola.py table2|figure2|figure3|...|figure12 [--runs outputs] [--to outputs/report]

Liu et al., "A Bayesian Federated Learning Framework with Online Laplace Approximation", IEEE TPAMI 2023. Nothing is
trained: what is missing is named, with the `bfl-run` lines that make it. `table2` compares with the numbers printed in
the paper. `figure3` is the accuracy after the first round, FOLA's aggregation against the average of the same clients.
"""

import json
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from bfl_bench import report
from bfl_bench.evaluation import columns
from bfl_bench.papers import tables
from bfl_bench.papers.fola_laplace import make_figure10, make_figure11, make_figure12
from bfl_bench.report import Config, Run

METHODS = {"fola": "Ours", "fedavg": "FedAvg", "fedcurv": "FedCurv", "fednova": "FedNova", "scaffold": "SCAFFOLD"}
METHODS |= {"fedbe": "FedBE", "fedprox": "FedProx (not in the paper)"}
TABLE = "bfl-run -m experiment=fola_table2"
FIRST_ROUND = "bfl-run -m experiment=fola_figure3"


# Table II


def reached(run: Run, percent: int) -> int | None:
    """The first evaluated round with that global accuracy."""
    return next((int(round_) for round_, accuracy in run.curve("ga") if 100 * accuracy >= percent), None)


def spread(values: Sequence[float]) -> str:
    return report.summarise(values).describe()


def rounds_text(values: Sequence[int | None]) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return "never"
    return f"{statistics.fmean(there):.1f}" + (f" ({len(there)} of {len(values)})" if len(there) < len(values) else "")


def make_table2(arguments: Namespace) -> None:
    def keep(config: Config) -> bool:
        return config["dataset.name"] == "cifar10" and config["method.name"] in METHODS

    runs, notes = report.find_runs(arguments.runs, arguments.where, keep)
    report.need(runs, "Table II", TABLE)
    paper, text_says = tables.read_published("fola", "2"), tables.read_published("fola", "text of Sec. IV-C")
    settings: dict[str, list[report.Group]] = {}
    for group in report.group_over_seeds(runs):
        shared = {k: v for k, v in group.config.items() if not k.startswith(("method.", "local.epochs", "aggregator."))}
        settings.setdefault(json.dumps(shared, sort_keys=True), []).append(group)
    text = (
        "# FOLA, Table II: CIFAR-10, CNN\n\nOurs: mean +- standard deviation over seeds. GA: the best round, chosen on "
        "the test set, as in the paper's figures, and the last; LA: the last round. diff.: ours - paper's, of GA that "
        "of the best round; (!): beyond our standard deviation, the paper printing none.\n"
    )
    cells: list[dict[str, object]] = []
    for key, groups in settings.items():
        config = json.loads(key)
        text += f"\n## alpha {config['partition.alpha']}, {config['num_clients']} clients, {config['rounds']} rounds"
        text += f", augmentation {'on' if config['dataset.autoaugment'] else 'off'}"
        text += f", {config['dataset.server_samples']} images on the server\n\n"
        lines: list[list[str]] = []
        for group in sorted(groups, key=lambda g: list(METHODS).index(g.config["method.name"])):
            name = METHODS[group.config["method.name"]]
            printed = {column: value for (row, column), value in paper.items() if row == name}
            best = [100 * max(run.column("ga")) for run in group.runs]
            local = [100 * float(run.final["la"] or 0) for run in group.runs]
            values = {
                "E": f"{group.config['local.epochs']}",
                "best GA (%)": spread(best),
                "last GA (%)": spread([100 * float(run.final["ga"] or 0) for run in group.runs]),
                "LA (%)": spread(local),
                **{f"rounds to {p} %": rounds_text([reached(run, p) for run in group.runs]) for p in (20, 30, 40)},
                "seeds": f"{len(group.runs)}",
            }
            ga = f"{printed['GA (%)']:.2f}" if printed else "-"
            ga += f" ({text_says[name, 'GA (%)']:.2f} in the text)" if (name, "GA (%)") in text_says else ""
            theirs = {"paper's E": f"{printed.get('E', 0):.0f}" if printed else "-", "paper's GA": ga}
            theirs["diff."] = report.summarise(best).compare(printed.get("GA (%)"))[2]
            theirs |= {"paper's LA": f"{printed['LA (%)']:.2f}" if printed else "-"}
            theirs["diff. of LA"] = report.summarise(local).compare(printed.get("LA (%)"))[2]
            for percent in (30, 40):
                value = printed.get(f"rounds to {percent} %")
                theirs[f"paper's {percent} %"] = f"{value:.0f}" if value else "-"
            lines.append([name, *values.values(), *theirs.values()])
            cells.append({"method": name, "partition": config["partition.alpha"], "rounds": config["rounds"]})
            cells[-1] |= values | theirs
        text += report.markdown(["Method", *values, *theirs], lines)
        text += tables.describe_scale("fola_table2", (group.config for group in groups))
    there = {run.config["method.name"] for run in runs}
    missing = {METHODS[name]: f"{TABLE} row=fola_table2/{name}" for name in METHODS if name not in there}
    text += report.describe_missing(missing) + f"\nThe paper's setting: `{TABLE}`\n"
    report.write(arguments.to, "fola_table2", text + report.describe_notes(notes), cells)


# Figures 3 and 4: the first round

GRID = ("local.lr", "local.epochs", "local.batch_size")
SETTING = ("partition.alpha", "num_clients")


def find_first_rounds(arguments: Namespace) -> tuple[list[Run], list[str]]:
    def keep(config: Config) -> bool:
        first = config["rounds"] == 1 and config["dataset.name"] == "mnist"
        return first and config["method.name"] in ("fola", "fedavg") and config["model.name"] == "mlp"

    runs, notes = report.find_runs(arguments.runs, arguments.where, keep)
    report.need(runs, "the first round", FIRST_ROUND)
    return runs, notes


def make_figure3(arguments: Namespace) -> None:
    """Paired by seed: both methods see the same split, the same initial model and the same local training."""
    runs, notes = find_first_rounds(arguments)
    keys = (*SETTING, *GRID)
    pairs: dict[tuple[float, ...], dict[int, dict[str, float]]] = {}
    for run in runs:
        seeds = pairs.setdefault(tuple(run.config[key] for key in keys), {})
        found = seeds.setdefault(run.config["seed"], {})
        if run.config["method.name"] in found:
            raise report.ReportError(f"two runs of one method in one setting: choose with --where; one is {run.folder}")
        found[run.config["method.name"]] = 100 * float(run.final["ga"] or 0)
    lines: list[list[str]] = []
    cells: list[dict[str, object]] = []
    for setting in sorted(pairs):
        both = [found for found in pairs[setting].values() if len(found) == 2]
        if not both:
            notes.append(f"{dict(zip(keys, setting, strict=True))}: no seed with both methods")
            continue
        differences = [found["fola"] - found["fedavg"] for found in both]
        line = [f"{value}" for value in setting]
        line += [spread([found[method] for found in both]) for method in ("fola", "fedavg")]
        lines.append([*line, spread(differences), f"{sum(d > 0 for d in differences)} of {len(both)}"])
        head = [*keys, "FOLA", "FedAvg", "FOLA - FedAvg", "seeds where FOLA is ahead"]
        cells.append(dict(zip(head, lines[-1], strict=True)))
    if not lines:
        raise report.ReportError(f"no seed has both methods; to make them:\n\n    {FIRST_ROUND}\n")
    groups = report.group_over_seeds(runs)
    text = "# FOLA, Fig. 3: MNIST-MLP, global accuracy (%) after the first round\n\nMean +- standard deviation over "
    text += "seeds, paired by seed. The paper averages 30 runs and prints curves, no numbers.\n\n"
    text += report.markdown(head, lines) + f"\nMore: `{FIRST_ROUND}`\n\n{report.describe_choice(GRID)}\n"
    best = report.best_over(groups, GRID)
    text += report.cells_as_markdown(first_cells(best))
    report.write(arguments.to, "fola_figure3", text + report.describe_notes(notes), cells)
    draw_over(arguments, "fola_figure3", best, ("partition.alpha",), "num_clients", "N")


def make_figure4(arguments: Namespace) -> None:
    """Along each learning hyperparameter the best of the others."""
    runs, notes = find_first_rounds(arguments)
    groups = report.group_over_seeds(runs)
    largest = max(group.config["num_clients"] for group in groups)
    groups = [group for group in groups if group.config["num_clients"] == largest]
    best = [g for key in GRID for g in report.best_over(groups, [other for other in GRID if other != key])]
    cells = first_cells(best)
    text = f"# FOLA, Fig. 4: MNIST-MLP with {largest} clients, the first round along each hyperparameter\n\n"
    text += report.describe_choice([f"the others of {', '.join(GRID)}"]) + "\n" + report.cells_as_markdown(cells)
    report.write(arguments.to, "fola_figure4", text + report.describe_notes(notes), cells)
    draw_over(arguments, "fola_figure4", best, GRID, "partition.alpha", "alpha")


def first_cells(groups: Iterable[report.Group]) -> list[dict[str, object]]:
    """Make the rows of a table, in an order that does not depend on the names of folders."""
    cells: list[dict[str, object]] = []
    for group in groups:
        setting = {key: group.config[key] for key in (*SETTING, *GRID)}
        cells.append({"method": METHODS[group.config["method.name"]], **setting, "GA (%)": last(group)})
    return sorted(cells, key=lambda cell: [cell[key] for key in ("method", *SETTING, *GRID)])


def last(group: report.Group, metric: str = "ga") -> str:
    return spread([100 * float(run.final[metric] or 0) for run in group.runs])


def draw_over(
    arguments: Namespace, name: str, groups: Sequence[report.Group], keys: Sequence[str], line: str, label: str
) -> None:
    """A panel per key with the best mean accuracy at each of its values, a line per method and value of `line`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(keys) + 1, 3.6), layout="constrained")
    values = sorted({group.config[line] for group in groups})
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        for number, value in enumerate(values):
            for method, style in (("fedavg", "-"), ("fola", "--")):
                points: dict[float, float] = {}
                for group in groups:
                    if (group.config["method.name"], group.config[line]) == (method, value):
                        mean = statistics.fmean(100 * float(run.final["ga"] or 0) for run in group.runs)
                        points[group.config[key]] = max(mean, points.get(group.config[key], 0.0))
                curve = zip(*sorted(points.items()), strict=True)
                named = f"{METHODS[method]}, {label} {value}"
                axes.plot(*curve, style, c=f"C{number}", marker="o", ms=4, label=named)
        axes.set(xscale="linear" if key == "local.epochs" else "log", xlabel=key, ylabel="global accuracy (%)")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    report.save_figure(figure, arguments.to, name)


# Figures 5, 7 and 9: learning curves


class Curves(NamedTuple):
    """Runs of one experiment, drawn over the rounds: a colour per variant, a line per value of a key."""

    title: str
    dataset: str
    key: str
    label: str
    columns: tuple[str, ...]
    variants: tuple[str, ...]


CURVE_FIGURES = {
    "figure5": Curves("MNIST-MLP", "mnist", "num_clients", "N", ("ga",), ("FOLA", "offline, no prior", "FedAvg")),
    "figure7": Curves("CIFAR10-CNN", "cifar10", "partition.alpha", "alpha", ("ga",), ("FOLA", "FedAvg", "FedCurv")),
    "figure9": Curves(
        "CIFAR10-CNN", "cifar10", "partition.alpha", "alpha", ("ga", "la"),
        ("FOLA", "offline, no prior", "prior, plain average"),
    ),
}  # fmt: skip


def variant_of(config: Config) -> str | None:
    """What of FOLA a run keeps."""
    if config["method.name"] != "fola":
        return {"fedavg": "FedAvg", "fedcurv": "FedCurv"}.get(config["method.name"])
    if config["aggregator.name"] == "eaa":
        return "prior, plain average"
    offline = config["method.evaluation"] == "offline" and not config["method.prior_loss"]
    online = config["method.evaluation"] == "online" and config["method.prior_loss"]
    return "offline, no prior" if offline else "FOLA" if online and config["aggregator.name"] == "none" else None


def make_curves(command: str, arguments: Namespace) -> None:
    from matplotlib.figure import Figure

    spec, line = CURVE_FIGURES[command], f"bfl-run -m experiment=fola_{command}"

    def keep(config: Config) -> bool:
        fits = config["dataset.name"] == spec.dataset and config["model.name"] in ("mlp", "cnn")
        return fits and config["rounds"] > 1 and spec.key in config and variant_of(config) in spec.variants

    runs, notes = report.find_runs(arguments.runs, arguments.where, keep)
    report.need(runs, f"Fig. {command.removeprefix('figure')}", line)
    groups = report.best_over(report.group_over_seeds(runs), arguments.best_over)
    values = sorted({group.config[spec.key] for group in groups})
    figure = Figure(figsize=(5.6 * len(spec.columns), 4), layout="constrained")
    cells: list[dict[str, object]] = []
    seen: set[tuple[str, float]] = set()
    panels = figure.subplots(1, len(spec.columns), squeeze=False)[0]
    for group in sorted(groups, key=lambda g: (spec.variants.index(variant_of(g.config) or ""), g.config[spec.key])):
        variant, value = variant_of(group.config) or "", group.config[spec.key]
        if (variant, value) in seen:
            raise report.ReportError(f"two settings are one curve; choose with --where; one is {group.runs[0].folder}")
        seen.add((variant, value))
        dashes = ("-", "--", ":", "-.")[values.index(value) % 4]
        style: dict[str, Any] = {"color": f"C{spec.variants.index(variant)}", "linestyle": dashes}
        for axes, column in zip(panels, spec.columns, strict=True):
            report.draw_curve(axes, group, column, label=f"{variant}, {spec.label} {value}", **style)
        cell = {"variant": variant, spec.key: value, "E": group.config["local.epochs"]}
        cell |= {"last GA (%)": last(group), "last LA (%)": last(group, "la")}
        cells.append(cell | {"rounds": group.config["rounds"], "seeds": len(group.runs)})
    for axes, column in zip(panels, spec.columns, strict=True):
        axes.set(xlabel="round", ylabel=f"{columns.label(column)} (%)")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    text = f"# FOLA, Fig. {command.removeprefix('figure')}: {spec.title}, learning curves\n\n"
    text += report.describe_choice(arguments.best_over) + report.cells_as_markdown(cells)
    text += tables.describe_scale(f"fola_{command}", (group.config for group in groups)) + f"\nMore: `{line}`\n"
    report.write(arguments.to, f"fola_{command}", text + report.describe_notes(notes), cells)
    report.save_figure(figure, arguments.to, f"fola_{command}")


# Figures 6 and 8: the search over hyperparameters


def find_search(arguments: Namespace, line: str) -> tuple[list[report.Group], list[str]]:
    def keep(config: Config) -> bool:
        fits = config["dataset.name"] == "cifar10" and config["model.name"] == "cnn"
        return fits and variant_of(config) in ("FOLA", "FedAvg", "FedCurv")

    runs, notes = report.find_runs(arguments.runs, arguments.where, keep)
    runs = [run for run in runs if run.final.get("la") is not None]
    report.need(runs, "the search on CIFAR-10", line)
    return report.group_over_seeds(runs), notes


def search_cells(groups: Iterable[report.Group]) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    for group in groups:
        strength = group.config.get("method.penalty_weight")
        name = f"{variant_of(group.config)}" + (f", lambda {strength:g}" if strength is not None else "")
        cell = {"method": name, "alpha": group.config["partition.alpha"], "E": group.config["local.epochs"]}
        cell |= {"lr": group.config["local.lr"], "rounds": group.config["rounds"], "seeds": len(group.runs)}
        for column in ("ga", "la"):
            cell[column] = statistics.fmean(100 * float(run.final[column] or 0) for run in group.runs)
        cells.append(cell)
    return sorted(cells, key=lambda cell: tuple(map(str, cell.values())))


def make_figure6(arguments: Namespace) -> None:
    from matplotlib.figure import Figure

    line = "bfl-run -m experiment=fola_figure6"
    groups, notes = find_search(arguments, line)
    groups = report.best_over(groups, arguments.best_over or ["local.lr"])
    cells = search_cells(groups)
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2), ("ga", "la"), strict=True):
        for method in sorted({str(cell["method"]) for cell in cells}):
            points = sorted((float(str(c["E"])), float(str(c[column]))) for c in cells if c["method"] == method)
            axes.plot(*zip(*points, strict=True), marker="o", ms=4, label=method)
        axes.set(xlabel="local epochs E", ylabel=f"{columns.label(column)} (%), last round")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    text = "# FOLA, Fig. 6: CIFAR10-CNN, GA and LA over E and lambda\n\n"
    text += report.describe_choice(arguments.best_over or ["local.lr"]) + "\n" + report.cells_as_markdown(cells)
    text += tables.describe_scale("fola_figure6", (group.config for group in groups)) + f"\nMore: `{line}`\n"
    report.write(arguments.to, "fola_figure6", text + report.describe_notes(notes), cells)
    report.save_figure(figure, arguments.to, "fola_figure6")


def make_figure8(arguments: Namespace) -> None:
    from matplotlib.figure import Figure
    from scipy.stats import spearmanr

    line = "bfl-run -m experiment=fola_figure8"
    groups, notes = find_search(arguments, line)
    cells = search_cells(groups)
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    for method in sorted({str(cell["method"]).split(",")[0] for cell in cells}):
        here = [cell for cell in cells if str(cell["method"]).startswith(method)]
        axes.scatter([cell["la"] for cell in here], [cell["ga"] for cell in here], label=method, s=18)
    axes.set(xlabel="local accuracy (%)", ylabel="global accuracy (%)")
    axes.legend()
    axes.grid(alpha=0.3)
    text = "# FOLA, Fig. 8: GA against LA over all hyperparameters\n\n" + report.cells_as_markdown(cells)
    local, overall = [cell["la"] for cell in cells], [cell["ga"] for cell in cells]
    if len(cells) > 2 and len(set(local)) > 1 and len(set(overall)) > 1:
        rho = spearmanr(local, overall).statistic
        text += f"\nSpearman correlation over {len(cells)} settings: {rho:.2f}. The paper calls the two generally "
        text += "positively correlated and prints no number.\n"
    text += tables.describe_scale("fola_figure8", (group.config for group in groups)) + f"\nMore: `{line}`\n"
    report.write(arguments.to, "fola_figure8", text + report.describe_notes(notes), cells)
    report.save_figure(figure, arguments.to, "fola_figure8")


# Figure 2: two Gaussians


def make_figure2(arguments: Namespace) -> None:
    """The paper gives no numbers; these two posteriors are ours."""
    import numpy as np
    from matplotlib.figure import Figure

    from bfl_bench.papers.fedlpa import MEANS, PRECISIONS, draw_contours, mean_of_product

    product, average = mean_of_product(PRECISIONS), MEANS.mean(0)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for mean, precision, color in zip(MEANS, PRECISIONS, ("C0", "C2"), strict=True):
        draw_contours(left, mean, precision, colors=color, linewidths=0.8)
        left.plot(*mean, "o", c=color)
    ridge = [
        np.linalg.solve(
            np.einsum("k,kij->ij", weights, PRECISIONS), np.einsum("k,kij,kj->i", weights, PRECISIONS, MEANS)
        )
        for weights in (np.array([w, 1 - w]) for w in np.linspace(0, 1, 100))
    ]
    left.plot(*np.transpose(ridge), "--", c="0.4", label="ridge of the mixture")
    left.plot(*product, "^", c="black", ms=9, label="FOLA: product of Gaussians")
    left.plot(*average, "s", c="black", ms=8, mfc="white", label="FedAvg: average")
    left.set(xlabel="weight 1", ylabel="weight 2")
    left.legend(fontsize=8)
    x = np.linspace(-4, 4, 400)
    posteriors = [("client 1", MEANS[0], PRECISIONS[0], "C0"), ("client 2", MEANS[1], PRECISIONS[1], "C2")]
    for name, mean, precision, color in [*posteriors, ("global", product, PRECISIONS.sum(0), "C3")]:
        variance = np.linalg.inv(precision)[0, 0]
        density = np.exp(-((x - mean[0]) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)
        right.plot(x, density, c=color, label=name)
    right.axvline(product[0], c="C3", ls=":", label="FOLA")
    right.axvline(average[0], c="black", ls=":", label="FedAvg")
    right.set(xlabel="weight 1", ylabel="density")
    right.legend(fontsize=8)
    cells: list[dict[str, object]] = [
        {"way": name, "weight 1": float(point[0]), "weight 2": float(point[1])}
        for name, point in (("FOLA", product), ("FedAvg", average))
    ]
    text = "# FOLA, Fig. 2: two posteriors and what becomes of them\n\n" + report.cells_as_markdown(cells)
    report.write(arguments.to, "fola_figure2", text, cells)
    report.save_figure(figure, arguments.to, "fola_figure2")


COMMANDS: dict[str, Callable[[Namespace], None]] = {
    "table2": make_table2,
    "figure2": make_figure2,
    "figure3": make_figure3,
    "figure4": make_figure4,
    **{name: partial(make_curves, name) for name in CURVE_FIGURES},
    "figure6": make_figure6,
    "figure8": make_figure8,
    "figure10": make_figure10,
    "figure11": make_figure11,
    "figure12": make_figure12,
}


def main() -> None:
    report.run_script(__doc__ or "", COMMANDS, [*CURVE_FIGURES, "figure6"])


if __name__ == "__main__":
    main()
