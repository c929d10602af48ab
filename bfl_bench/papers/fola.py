"""Table II and figures 2 to 12 of FOLA out of finished runs.

    python scripts/fola.py table2|figure2|figure3|...|figure12 [--runs outputs] [--to outputs/report]

Liu et al., "A Bayesian Federated Learning Framework with Online Laplace Approximation", IEEE TPAMI 2023. Nothing is
trained: what is missing is named, with the lines that make it. conf/paper/fola.yaml says which runs are whose. `table2`
compares with the numbers printed in the paper. `figure3` is the accuracy after the first round, FOLA's aggregation
against the average of the same clients.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bfl_bench import report
from bfl_bench.evaluation import columns
from bfl_bench.papers.fola_laplace import make_figure10, make_figure11, make_figure12, make_precision
from bfl_bench.papers.pages import Maker, Page, numbers
from bfl_bench.report import Group, Run, Stats, summarise

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
    text += f", augmentation {'on' if first['dataset.autoaugment'] else 'off'}"
    text += f", {first['dataset.server_samples']} images on the server\n\n"
    lines: list[list[str]] = []
    cells: list[dict[str, object]] = []
    for group in page.groups():
        name = page.cell(group).label
        printed = {column: value for (row, column), value in paper.items() if row == name}
        best = summarise([100 * max(run.column("ga")) for run in group.runs])
        rounds = {percent: [reached(run, percent) for run in group.runs] for percent in (20, 30, 40)}
        values = {
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
        cell |= {"rounds": group.config["rounds"], "E": group.config["local.epochs"]}
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
    page.write(text + report.markdown(["Method", *values, *theirs], lines), cells)


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


def draw_over(page: Page, groups: Sequence[Group], keys: Sequence[str], line: str, label: str) -> None:
    """A panel per key with the best mean accuracy at each of its values, a line per method and value of `line`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(keys) + 1, 3.6), layout="constrained")
    values = sorted({group.config[line] for group in groups})
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        for number, value in enumerate(values):
            for method, style in (("FedAvg", "-"), ("Ours", "--")):
                points: dict[float, float] = {}
                for group in groups:
                    if (page.cell(group).label, group.config[line]) == (method, value):
                        points[group.config[key]] = max(last(group).mean, points.get(group.config[key], 0.0))
                curve = zip(*sorted(points.items()), strict=True)
                named = f"{method}, {label} {value}"
                axes.plot(*curve, style, c=f"C{number}", marker="o", ms=4, label=named)
        axes.set(xscale="linear" if key == "local.epochs" else "log", xlabel=key, ylabel="global accuracy (%)")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
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


def make_curves(page: Page) -> None:
    from matplotlib.figure import Figure

    spec = CURVE_FIGURES[page.table.name]
    groups = page.groups()
    values = sorted({group.config[spec.key] for group in groups})
    variants = list(dict.fromkeys(cell.label for cell, _ in page.entries))
    figure = Figure(figsize=(5.6 * len(spec.columns), 4), layout="constrained")
    cells: list[dict[str, object]] = []
    rows: list[dict[str, object]] = []
    panels = figure.subplots(1, len(spec.columns), squeeze=False)[0]
    for group in groups:
        variant, value = page.cell(group).label, group.config[spec.key]
        dashes = ("-", "--", ":", "-.")[values.index(value) % 4]
        style: dict[str, Any] = {"color": f"C{variants.index(variant)}", "linestyle": dashes}
        for axes, column in zip(panels, spec.columns, strict=True):
            report.draw_curve(axes, group, column, label=f"{variant}, {spec.label} {value}", **style)
        ga, la = last(group), last(group, "la")
        cell: dict[str, object] = {"variant": variant, spec.key: value, "E": group.config["local.epochs"]}
        ends = {"rounds": group.config["rounds"], "seeds": len(group.runs)}
        rows.append(cell | {"last GA (%)": ga.describe(), "last LA (%)": la.describe()} | ends)
        cells.append(cell | numbers("last GA (%)", ga) | numbers("last LA (%)", la) | ends)
    for axes, column in zip(panels, spec.columns, strict=True):
        axes.set(xlabel="round", ylabel=f"{columns.label(column)} (%)")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    text = f"# FOLA, Fig. {page.table.name.removeprefix('figure')}: {spec.title}, learning curves\n\n"
    page.write(text + report.cells_as_markdown(rows), cells)
    page.save_figure(figure)


# Figures 6 and 8: the search over hyperparameters


def search_cells(page: Page) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    for group in page.groups():
        cell = {"method": page.cell(group).label, "alpha": group.config["partition.alpha"]}
        cell |= {"E": group.config["local.epochs"], "lr": group.config["local.lr"]}
        cell |= {"rounds": group.config["rounds"], "seeds": len(group.runs)}
        cells.append(cell | {column: last(group, column).mean for column in ("ga", "la")})
    return sorted(cells, key=lambda cell: tuple(map(str, cell.values())))


def make_figure6(page: Page) -> None:
    from matplotlib.figure import Figure

    cells = search_cells(page)
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2), ("ga", "la"), strict=True):
        for method in sorted({str(cell["method"]) for cell in cells}):
            points = sorted((float(str(c["E"])), float(str(c[column]))) for c in cells if c["method"] == method)
            axes.plot(*zip(*points, strict=True), marker="o", ms=4, label=method)
        axes.set(xlabel="local epochs E", ylabel=f"{columns.label(column)} (%), last round")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    text = "# FOLA, Fig. 6: CIFAR10-CNN, GA and LA over E and lambda\n\n"
    page.write(text + report.cells_as_markdown(cells), cells)
    page.save_figure(figure)


def make_figure8(page: Page) -> None:
    from matplotlib.figure import Figure
    from scipy.stats import spearmanr

    cells = search_cells(page)
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
    page.write(text, cells)
    page.save_figure(figure)


# Figure 2: two Gaussians


def make_figure2(to: Path) -> None:
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
    report.write(to, "fola_figure2", text, cells)
    report.save_figure(figure, to, "fola_figure2")


MAKERS: dict[str, Maker] = {
    "table2": make_table2,
    "figure3": make_figure3,
    "figure4": make_figure4,
    **dict.fromkeys(CURVE_FIGURES, make_curves),
    "figure6": make_figure6,
    "figure8": make_figure8,
    "laplace": make_figure11,
    "figure10": make_figure10,
    "precision": make_precision,
    "figure11": make_figure11,
    "figure12": make_figure12,
}
WITHOUT_RUNS: dict[str, Callable[[Path], None]] = {"figure2": make_figure2}
