"""Table II and figures 2 to 12 of FOLA out of finished runs.

    python scripts/fola.py table2|figure2|...|figure12|figure6c|precision|digits [--runs outputs] [--to outputs/report]

Liu et al., "A Bayesian Federated Learning Framework with Online Laplace Approximation", IEEE TPAMI 2023. Nothing is
trained: what is missing is named, with the lines that make it. conf/paper/fola.yaml says which runs are whose. `table2`
compares with the numbers printed in the paper; lambda is the one that is best on validation examples. `figure3` is the
accuracy after the first round, FOLA's aggregation against the average of the same clients.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bfl_bench import report
from bfl_bench.evaluation import columns
from bfl_bench.papers.fola_laplace import (
    FEWEST_POINTS,
    make_figure10,
    make_figure11,
    make_figure12,
    make_precision,
    use_whole_rounds,
)
from bfl_bench.papers.pages import Maker, Page, numbers
from bfl_bench.report import Config, Group, Run, Stats, summarise

Floats = npt.NDArray[np.float64]

# Lambda


def family(label: str) -> str:
    """What cells that differ in lambda alone are called together."""
    return label.partition(", lambda ")[0]


def lambda_of(config: Config) -> str:
    """Name the strength of a method's pull, as FOLA and FedCurv have it."""
    pulled = config.get("method.prior_loss", True)
    value = config.get("method.prior_weight" if "method.prior_weight" in config else "method.penalty_weight")
    if value is None or not pulled:
        return "-"
    live = config.get("method.prior_gradient", config.get("method.penalty_gradient", True))
    return f"{value:g}" if live else f"{value:g} (without gradient)"


class Chosen(NamedTuple):
    """A row of a table: of the cells that differ in lambda, the one that validation examples choose."""

    name: str
    group: Group
    note: str  # what was chosen from; empty: nothing to choose


def choose_lambda(page: Page) -> list[Chosen]:
    """Choose by the mean accuracy on validation examples in the last round, over the seeds that all rivals have."""
    rivals: dict[str, list[Group]] = {}
    for group in page.groups():
        rivals.setdefault(family(page.cell(group).label), []).append(group)
    return [_choose(name, groups) for name, groups in rivals.items()]


def _choose(name: str, groups: Sequence[Group]) -> Chosen:
    if len(groups) == 1:
        return Chosen(name, groups[0], "")
    seeds = sorted(set.intersection(*({run.config["seed"] for run in group.runs} for group in groups)))
    if not seeds:
        raise report.ReportError(f"{name}: no seed has a run with every lambda that there is")

    def accuracy(group: Group) -> float:
        return statistics.fmean(
            100 * float(run.final["validation_ga"] or 0) for run in group.runs if run.config["seed"] in seeds
        )

    tried = ", ".join(f"{lambda_of(group.config)}: {accuracy(group):.2f} %" for group in groups)
    note = f"lambda of {name}: the best accuracy on validation examples in the last round, mean over seeds "
    return Chosen(name, max(groups, key=accuracy), f"{note}{', '.join(map(str, seeds))} ({tried}).")


# Table II


def reached(run: Run, percent: int) -> int | None:
    """The first evaluated round with that global accuracy."""
    return next((int(round_) for round_, accuracy in run.curve("ga") if 100 * accuracy >= percent), None)


def rounds_text(values: Sequence[int | None]) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return "never"
    return f"{statistics.fmean(there):.1f}" + (f" ({len(there)} of {len(values)})" if len(there) < len(values) else "")


def last(group: Group, metric: str = "ga") -> Stats:
    """Percent, in the last round."""
    return summarise([100 * float(run.final[metric] or 0) for run in group.runs])


def make_table2(page: Page) -> None:
    paper, text_says = page.published(), page.published("text of Sec. IV-C")
    first = page.runs[0].config
    text = (
        "# FOLA, Table II: CIFAR-10, CNN\n\nOurs: mean +- standard deviation over seeds. GA: the best round, chosen on "
        "the test set, as in the paper's figures, and the last; LA: the last round. diff.: ours - paper's, of GA that "
        "of the best round; (!): beyond our standard deviation, the paper printing none.\n"
    )
    text += f"\n## alpha {first['partition.alpha']}, {first['num_clients']} clients, {first['rounds']} rounds"
    text += f", split {first['partition.mode'].replace('_', ' ')}"
    text += f", augmentation {'on' if first['dataset.autoaugment'] else 'off'}"
    text += f", {first['dataset.server_samples']} images on the server\n\n"
    lines: list[list[str]] = []
    cells: list[dict[str, object]] = []
    chosen = choose_lambda(page)
    for name, group, _ in chosen:
        printed = {column: value for (row, column), value in paper.items() if row == name}
        best = summarise([100 * max(run.column("ga")) for run in group.runs])
        rounds = {percent: [reached(run, percent) for run in group.runs] for percent in (20, 30, 40)}
        values = {
            "lambda": lambda_of(group.config),
            "E": f"{group.config['local.epochs']}",
            "best GA (%)": best.describe(),
            "last GA (%)": last(group).describe(),
            "LA (%)": last(group, "la").describe(),
            **{f"rounds to {percent} %": rounds_text(found) for percent, found in rounds.items()},
            "seeds": f"{len(group.runs)}",
        }
        ga = f"{printed['GA (%)']:.2f}" if printed else "-"
        ga += f" ({text_says[name, 'GA (%)']:.2f} in the text)" if (name, "GA (%)") in text_says else ""
        theirs = {"paper's E": f"{printed.get('E', 0):.0f}" if printed else "-", "paper's GA": ga}
        theirs["diff."] = best.compare(printed.get("GA (%)"))[2]
        theirs |= {"paper's LA": f"{printed['LA (%)']:.2f}" if printed else "-"}
        theirs["diff. of LA"] = last(group, "la").compare(printed.get("LA (%)"))[2]
        for percent in (30, 40):
            value = printed.get(f"rounds to {percent} %")
            theirs[f"paper's {percent} %"] = f"{value:.0f}" if value else "-"
        lines.append([name, *values.values(), *theirs.values()])
        cell: dict[str, object] = {"method": name, "alpha": group.config["partition.alpha"]}
        cell |= {"lambda": lambda_of(group.config), "rounds": group.config["rounds"]}
        cell |= {"E": group.config["local.epochs"]}
        cell |= (
            numbers("best GA (%)", best) | numbers("last GA (%)", last(group)) | numbers("LA (%)", last(group, "la"))
        )
        for percent, found in rounds.items():
            there = [value for value in found if value is not None]
            cell[f"rounds to {percent} %"] = statistics.fmean(there) if there else None
            cell[f"runs that reach {percent} %"] = len(there)
        theirs_by = ("E", "GA (%)", "LA (%)", "rounds to 30 %", "rounds to 40 %")
        cell |= {f"paper's {column}": printed.get(column) for column in theirs_by}
        cells.append(cell | {"paper's GA in its text": text_says.get((name, "GA (%)"))})
    text += report.markdown(["Method", *values, *theirs], lines)
    page.write(text + "".join(f"\n{row.note}\n" for row in chosen if row.note), cells)


# Figures 3 and 4: the first round

GRID = ("local.lr", "local.epochs", "local.batch_size")
SETTING = ("partition.alpha", "num_clients")


def make_figure3(page: Page) -> None:
    """Paired by seed: both methods see the same split, the same initial model and the same local training."""
    keys = (*SETTING, *GRID)
    notes: list[str] = []
    pairs: dict[tuple[float, ...], dict[int, dict[str, float]]] = {}
    for cell, run in page.entries:
        seeds = pairs.setdefault(tuple(run.config[key] for key in keys), {})
        seeds.setdefault(cell.seed, {})[cell.label] = 100 * float(run.final["ga"] or 0)
    lines: list[list[str]] = []
    cells: list[dict[str, object]] = []
    head = [*keys, "FOLA", "FedAvg", "FOLA - FedAvg", "seeds where FOLA is ahead"]
    for setting in sorted(pairs):
        both = [found for found in pairs[setting].values() if len(found) == 2]
        if not both:
            notes.append(f"{dict(zip(keys, setting, strict=True))}: no seed with both methods")
            continue
        differences = [found["Ours"] - found["FedAvg"] for found in both]
        ours, theirs = (summarise([found[method] for found in both]) for method in ("Ours", "FedAvg"))
        ahead = sum(d > 0 for d in differences)
        line = [f"{value}" for value in setting]
        line += [ours.describe(), theirs.describe(), summarise(differences).describe(), f"{ahead} of {len(both)}"]
        lines.append(line)
        row: dict[str, object] = dict(zip(keys, setting, strict=True))
        row |= numbers("FOLA", ours) | numbers("FedAvg", theirs) | numbers("FOLA - FedAvg", summarise(differences))
        cells.append(row | {"seeds where FOLA is ahead": ahead})
    if not lines:
        raise report.ReportError("no seed has both methods; to make them:\n\n    bfl-paper run fola_figure3\n")
    text = "# FOLA, Fig. 3: MNIST-MLP, global accuracy (%) after the first round\n\nMean +- standard deviation over "
    text += "seeds, paired by seed. The paper averages 30 runs and prints curves, no numbers.\n\n"
    text += report.markdown(head, lines) + f"\n{report.describe_choice(GRID)}\n"
    best = report.best_over(page.groups(), GRID)
    text += report.cells_as_markdown(first_rows(page, best))
    page.write(text + report.describe_notes(notes), cells)
    draw_over(page, best, ("partition.alpha",), "num_clients", "N")


def make_figure4(page: Page) -> None:
    """Along each learning hyperparameter the best of the others."""
    groups = page.groups()
    largest = max(group.config["num_clients"] for group in groups)
    groups = [group for group in groups if group.config["num_clients"] == largest]
    best = [g for key in GRID for g in report.best_over(groups, [other for other in GRID if other != key])]
    text = f"# FOLA, Fig. 4: MNIST-MLP with {largest} clients, the first round along each hyperparameter\n\n"
    text += report.describe_choice([f"the others of {', '.join(GRID)}"]) + "\n"
    page.write(text + report.cells_as_markdown(first_rows(page, best)), first_cells(page, best))
    draw_over(page, best, GRID, "partition.alpha", "alpha")


def sorted_groups(page: Page, groups: Sequence[Group]) -> list[Group]:
    """In an order that does not depend on the names of folders."""
    keys = (*SETTING, *GRID)
    return sorted(groups, key=lambda g: (-len(page.cell(g).label), *(g.config[key] for key in keys)))


def first_rows(page: Page, groups: Sequence[Group]) -> list[dict[str, object]]:
    return [
        {
            "method": page.cell(g).label,
            **{key: g.config[key] for key in (*SETTING, *GRID)},
            "GA (%)": last(g).describe(),
        }
        for g in sorted_groups(page, groups)
    ]


def first_cells(page: Page, groups: Sequence[Group]) -> list[dict[str, object]]:
    return [
        {
            "method": page.cell(g).label,
            **{key: g.config[key] for key in (*SETTING, *GRID)},
            **numbers("GA (%)", last(g)),
        }
        for g in sorted_groups(page, groups)
    ]


# A colour per setting; as in the paper solid for FedAvg, dashed for FOLA. Of a single point only the marker is seen.
METHOD_STYLES: dict[str, dict[str, Any]] = {
    "FedAvg": {"linestyle": "-", "lw": 1.0, "marker": "o", "ms": 5, "mfc": "white"},
    "Ours": {"linestyle": "--", "lw": 1.8, "marker": "^", "ms": 7},
}


AXES = {
    "local.lr": "learning rate",
    "local.epochs": "local epochs",
    "method.gamma": "gamma",
    "partition.alpha": "alpha",
}
"""How axes are called."""


def draw_over(page: Page, groups: Sequence[Group], keys: Sequence[str], line: str, label: str) -> None:
    """A panel per key with the best mean accuracy at each of its values, a line per method and value of `line`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(keys) + 1, 3.6), layout="constrained")
    values = sorted({group.config[line] for group in groups})
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        for number, value in enumerate(values):
            for method, style in METHOD_STYLES.items():
                points: dict[float, float] = {}
                for group in groups:
                    if (page.cell(group).label, group.config[line]) == (method, value):
                        points[group.config[key]] = max(last(group).mean, points.get(group.config[key], 0.0))
                curve = zip(*sorted(points.items()), strict=True)
                named = f"{method}, {label} {value}"
                axes.plot(*curve, c=f"C{number}", label=named, **style)
        axes.set(
            xscale="linear" if key == "local.epochs" else "log", xlabel=AXES.get(key, key), ylabel="global accuracy (%)"
        )
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=9, loc="outside right upper", handlelength=3)
    page.save_figure(figure)


# Figures 5, 7 and 9: learning curves


class Curves(NamedTuple):
    """Runs drawn over the rounds: a colour per cell's label, a line per value of a key."""

    title: str
    key: str
    label: str
    columns: tuple[str, ...]


CURVE_FIGURES = {
    "figure5": Curves("MNIST-MLP", "num_clients", "N", ("ga",)),
    "figure7": Curves("CIFAR10-CNN", "partition.alpha", "alpha", ("ga",)),
    "figure9": Curves("CIFAR10-CNN", "partition.alpha", "alpha", ("ga", "la")),
}


DASHES = ("-", "--", ":", "-.", (0, (9, 2, 1.5, 2, 1.5, 2)))  # five values of alpha and of N, in the paper


def make_curves(page: Page) -> None:
    from matplotlib.figure import Figure

    spec = CURVE_FIGURES[page.table.name]
    groups = page.groups()
    values = sorted({group.config[spec.key] for group in groups})
    variants = list(dict.fromkeys(cell.label for cell, _ in page.entries))
    figure = Figure(figsize=(4.8 * len(spec.columns) + 1.8, 4), layout="constrained")
    cells: list[dict[str, object]] = []
    rows: list[dict[str, object]] = []
    panels = figure.subplots(1, len(spec.columns), squeeze=False)[0]
    for group in groups:
        variant, value = page.cell(group).label, group.config[spec.key]
        dashes = DASHES[values.index(value) % len(DASHES)]
        style: dict[str, Any] = {"color": f"C{variants.index(variant)}", "linestyle": dashes}
        for axes, column in zip(panels, spec.columns, strict=True):
            report.draw_curve(axes, group, column, label=f"{variant}, {spec.label} {value}", **style)
        ga, la = last(group), last(group, "la")
        cell: dict[str, object] = {"variant": variant, spec.key: value, "lambda": lambda_of(group.config)}
        cell["E"] = group.config["local.epochs"]
        ends = {"rounds": group.config["rounds"], "seeds": len(group.runs)}
        rows.append(cell | {"last GA (%)": ga.describe(), "last LA (%)": la.describe()} | ends)
        cells.append(cell | numbers("last GA (%)", ga) | numbers("last LA (%)", la) | ends)
    for axes, column in zip(panels, spec.columns, strict=True):
        axes.set(xlabel="round", ylabel=f"{columns.label(column)} (%)")
        use_whole_rounds(axes)
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=9, loc="outside right upper", handlelength=4)
    text = f"# FOLA, Fig. {page.table.name.removeprefix('figure')}: {spec.title}, learning curves\n\n"
    page.write(text + report.cells_as_markdown(rows), cells)
    page.save_figure(figure)


# Figure 6 c: all alphas


def make_figure6c(page: Page) -> None:
    from matplotlib.figure import Figure

    cells: list[dict[str, object]] = []
    figure = Figure(figsize=(5.4, 4), layout="constrained")
    axes = figure.subplots()
    groups = page.groups()
    for number, name in enumerate(dict.fromkeys(page.cell(group).label for group in groups)):
        here = sorted((g for g in groups if page.cell(g).label == name), key=lambda g: g.config["partition.alpha"])
        alphas, found = [g.config["partition.alpha"] for g in here], [last(g) for g in here]
        style: dict[str, Any] = {"marker": "^so"[number % 3], "ms": 6, "capsize": 3}
        axes.errorbar(
            alphas, [s.mean for s in found], [s.std if s.num > 1 else 0.0 for s in found], label=name, **style
        )
        for alpha, stats, group in zip(alphas, found, here, strict=True):
            cell: dict[str, object] = {"method": name, "alpha": alpha, "lambda": lambda_of(group.config)}
            cell |= {"E": group.config["local.epochs"], "rounds": group.config["rounds"]}
            cells.append(cell | numbers("last GA (%)", stats))
    axes.set(xscale="log", xlabel="alpha", ylabel="global accuracy (%), last round")
    axes.grid(alpha=0.3)
    axes.legend()
    text = "# FOLA, Fig. 6 c: CIFAR10-CNN, GA after all rounds over alpha\n\n" + report.cells_as_markdown(cells)
    page.write(text, cells)
    page.save_figure(figure)


# Figures 6 and 8: the search over hyperparameters

COLORS = {"FOLA": "C0", "FedAvg": "black", "FedCurv": "C1"}


def search_cells(page: Page) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    for group in page.groups():
        cell: dict[str, Any] = {"method": family(page.cell(group).label), "lambda": lambda_of(group.config)}
        cell |= {"alpha": group.config["partition.alpha"]}
        cell |= {"E": group.config["local.epochs"], "lr": group.config["local.lr"]}
        cell |= {"rounds": group.config["rounds"], "seeds": len(group.runs)}
        cells.append(cell | {column: last(group, column).mean for column in ("ga", "la")})
    return cells


def make_figure6(page: Page) -> None:
    """A colour per method, a line per lambda."""
    from matplotlib.figure import Figure

    cells = search_cells(page)
    lines = list(dict.fromkeys((str(cell["method"]), str(cell["lambda"])) for cell in cells))
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2), ("ga", "la"), strict=True):
        for method, strength in lines:
            number = [other for name, other in lines if name == method].index(strength)
            points = sorted((c["E"], c[column]) for c in cells if (c["method"], c["lambda"]) == (method, strength))
            style: dict[str, Any] = {"linestyle": DASHES[number % len(DASHES)], "marker": "o^svD"[number % 5], "ms": 4}
            label = method if strength == "-" else f"{method}, lambda {strength}"
            axes.plot(*zip(*points, strict=True), color=COLORS[method], label=label, **style)
        axes.set(xlabel="local epochs E", ylabel=f"{columns.label(column)} (%), last round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=9, loc="outside right upper", handlelength=4)
    text = "# FOLA, Fig. 6 a, b: CIFAR10-CNN, GA and LA over E and lambda\n\n"
    page.write(text + report.cells_as_markdown(cells), cells)
    page.save_figure(figure)


def make_figure8(page: Page) -> None:
    from matplotlib.figure import Figure
    from scipy.stats import spearmanr

    cells = search_cells(page)
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    for number, method in enumerate(dict.fromkeys(str(cell["method"]) for cell in cells)):
        here = [cell for cell in cells if cell["method"] == method]
        style: dict[str, Any] = {"color": COLORS[method], "marker": "^so"[number % 3], "s": 22}
        axes.scatter([cell["la"] for cell in here], [cell["ga"] for cell in here], label=method, **style)
    axes.set(xlabel="local accuracy (%)", ylabel="global accuracy (%)")
    axes.legend()
    axes.grid(alpha=0.3)
    text = "# FOLA, Fig. 8: GA against LA over all hyperparameters\n\n" + report.cells_as_markdown(cells)
    local, overall = [cell["la"] for cell in cells], [cell["ga"] for cell in cells]
    if len(cells) < FEWEST_POINTS:
        text += f"\nNo correlation of {len(cells)} settings: fewer than {FEWEST_POINTS} say nothing.\n"
    elif len(set(local)) > 1 and len(set(overall)) > 1:
        rho = spearmanr(local, overall).statistic
        text += f"\nSpearman correlation over {len(cells)} settings: {rho:.2f}. The paper calls the two generally "
        text += "positively correlated and prints no number.\n"
    page.write(text, cells)
    page.save_figure(figure)


# Beside the paper: what gamma, lambda and the sums of squared gradients do, on digits


def make_digits(page: Page) -> None:
    cells: list[dict[str, object]] = []
    rows: list[dict[str, object]] = []
    for group in page.groups():
        ga, la, same = last(group), last(group, "la"), group.stats("ga@rklb", 100)
        prior = group.stats("prior_loss")
        cell: dict[str, object] = {"method": page.cell(group).label, "lambda": lambda_of(group.config)}
        cell |= {"gamma": f"{group.config.get('method.gamma', '-')}", "GA (%)": ga.describe(), "LA (%)": la.describe()}
        cell |= {"GA (%), rklb on the same replies": same.describe() if same else "-"}
        cell |= {"prior loss": f"{prior.mean:.1e}" if prior else "-"}
        cell |= {"train loss": f"{stats.mean:.3f}" if (stats := group.stats("train_loss")) else "-"}
        cells.append(cell | {"seeds": len(group.runs)})
        row: dict[str, object] = {"method": cell["method"], "lambda": cell["lambda"], "gamma": cell["gamma"]}
        for name in ("ga", "la", "ga@rklb", "prior_loss", "train_loss"):
            found = group.stats(name)
            row |= numbers(name, found) if found else dict.fromkeys(f"{name} {part}" for part in ("mean", "std", "n"))
        rows.append(row)
    text = f"# FOLA on digits, {page.runs[0].config['rounds']} rounds, last round; not in the paper\n\n"
    page.write(text + report.cells_as_markdown(cells), rows)


# Figure 2: two Gaussians

# Each client knows one weight well and the other hardly: the well-known values together are the product's mode, where
# both densities are high. The average lies between the modes, where both are low.
MEANS = np.array([[-2.6, 0.2], [0.3, 2.6]])
PRECISIONS = np.array([[[0.25, 0.15], [0.15, 4.0]], [[4.0, 0.15], [0.15, 0.25]]])


def log_density(point: Floats, mean: Floats, precision: Floats) -> float:
    """Of a Gaussian in two dimensions."""
    difference = point - mean
    return float(0.5 * np.linalg.slogdet(precision)[1] - 0.5 * difference @ precision @ difference - np.log(2 * np.pi))


def make_figure2(to: Path) -> None:
    """The paper gives no numbers; these two posteriors are ours."""
    from matplotlib.figure import Figure

    def mode(weights: Sequence[float]) -> Floats:
        precision = np.einsum("k,kij->ij", weights, PRECISIONS)
        return np.asarray(np.linalg.solve(precision, np.einsum("k,kij,kj->i", weights, PRECISIONS, MEANS)))

    product, average = mode([0.5, 0.5]), MEANS.mean(0)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    grid = np.stack(np.meshgrid(np.linspace(-6, 3, 200), np.linspace(-3, 6, 200)), axis=-1)
    mixture = np.zeros(grid.shape[:2])
    for mean, precision, color in zip(MEANS, PRECISIONS, ("C0", "C2"), strict=True):
        offset = grid - mean
        density = np.exp(-0.5 * np.einsum("...i,ij,...j", offset, precision, offset))
        mixture += 0.5 * np.sqrt(np.linalg.det(precision)) / (2 * np.pi) * density
        left.plot(*mean, "o", c=color)
    levels = mixture.max() * np.array([0.02, 0.1, 0.25, 0.5, 0.75, 1.0])
    left.contourf(grid[..., 0], grid[..., 1], mixture, levels=levels, cmap="Greys", alpha=0.6)
    left.plot(*np.transpose([mode([w, 1 - w]) for w in np.linspace(0, 1, 100)]), "--", c="C1", label="ridge")
    left.plot(*product, "^", c="C3", ms=9, label="FOLA: product of Gaussians")
    left.plot(*average, "s", c="black", ms=8, mfc="white", label="FedAvg: average")
    left.set(xlabel="weight 1", ylabel="weight 2", title="mixture of the clients' posteriors")
    left.legend(fontsize=9)
    x = np.linspace(-6, 3, 400)
    posteriors = [("client 1", MEANS[0], PRECISIONS[0], "C0"), ("client 2", MEANS[1], PRECISIONS[1], "C2")]
    for name, mean, precision, color in [*posteriors, ("global (product)", product, PRECISIONS.mean(0), "C3")]:
        variance = np.linalg.inv(precision)[0, 0]
        density = np.exp(-((x - mean[0]) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)
        right.plot(x, density, c=color, label=name)
    right.axvline(product[0], c="C3", ls="--", label="FOLA")
    right.axvline(average[0], c="black", ls=":", label="FedAvg")
    right.set(xlabel="weight 1", ylabel="density", title="projected on weight 1")
    right.legend(fontsize=9)
    cells: list[dict[str, object]] = []
    for name, point in (("FOLA", product), ("FedAvg", average)):
        logs = [log_density(point, mean, precision) for mean, precision in zip(MEANS, PRECISIONS, strict=True)]
        cell: dict[str, object] = {"way": name, "weight 1": float(point[0]), "weight 2": float(point[1])}
        cell |= {"log density, client 1": logs[0], "client 2": logs[1]}
        cells.append(cell | {"product": log_density(point, product, PRECISIONS.mean(0))})
    text = "# FOLA, Fig. 2: two posteriors and what becomes of them\n\n" + report.cells_as_markdown(cells)
    text += "\nThe paper does not give its numbers; these are ours.\n"
    report.write(to, "fola_figure2", text, cells)
    report.save_figure(figure, to, "fola_figure2")


MAKERS: dict[str, Maker] = {
    "table2": make_table2,
    "figure3": make_figure3,
    "figure4": make_figure4,
    **dict.fromkeys(CURVE_FIGURES, make_curves),
    "digits": make_digits,
    "figure6": make_figure6,
    "figure6c": make_figure6c,
    "figure8": make_figure8,
    "laplace": make_figure11,
    "figure10": make_figure10,
    "precision": make_precision,
    "figure11": make_figure11,
    "figure12": make_figure12,
}
WITHOUT_RUNS: dict[str, Callable[[Path], None]] = {"figure2": make_figure2}
