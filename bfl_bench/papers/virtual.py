"""Tables and figures of VIRTUAL out of finished runs.

    python scripts/virtual.py table1|table2|table3|table4|figure2|figure3|figure4|figure5|figure6
        [--runs outputs] [--to outputs/report]

Corinzia, Beuret, Buhmann, "Variational Federated Multi-Task Learning", 2019. Nothing is trained: what is missing is
named, with the lines that make it. S is the server's model on all clients' test examples, MT each client's
own model on its own. The paper's statistic is the maximum over rounds, taken on the test set; so it is here.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bfl_bench import records, report
from bfl_bench.evaluation import columns
from bfl_bench.papers.pages import Maker, Page
from bfl_bench.report import Group, Run, Stats

COLORS = {
    "FedAvg": "C0",
    "FedProx": "C1",
    "Virtual": "C2",
    "Virtual, no private network": "C3",
    "Virtual, released": "C4",
}
SEARCHED = {  # keys, and what they are called
    "local.lr": "lr",
    "server.lr": "server.lr",
    "method.beta": "beta",
    "method.mu": "mu",
    "method.natural_lr": "natural_lr",
}
MOST_SETTINGS = 60  # listed one by one


class Score(NamedTuple):
    """Accuracy (%): the mean over seeds of the maximum over rounds, and how it compares."""

    group: Group
    stats: Stats
    paper: float | None

    @property
    def cells(self) -> list[str]:
        return [*self.stats.compare(self.paper, 1), str(self.stats.num)]

    @property
    def values(self) -> dict[str, object]:
        return {"mean": self.stats.mean, "std": self.stats.std, "paper": self.paper, "seeds": self.stats.num}


HEAD = ["ours", "paper", "diff.", "seeds"]
MARK = "(!): beyond our standard deviation over seeds; the paper prints no spread.\n"


def score(groups: list[Group], metric: str, paper: float | None) -> Score:
    """Of the best group: a search over what distinguishes them."""
    scores = [
        Score(g, report.summarise([100 * max(run.column(f"{metric.lower()}_acc")) for run in g.runs]), paper)
        for g in groups
    ]
    return max(scores, key=lambda found: found.stats.mean)


def by_federation(page: Page) -> dict[tuple[str, str], list[Group]]:
    """The groups by federation and method: they differ in what the paper searches."""
    found: dict[tuple[str, str], list[Group]] = {}
    for group in page.groups():
        cell = page.cell(group)
        found.setdefault((cell.names["federation"], cell.label), []).append(group)
    return dict(sorted(found.items()))


def make_accuracies(page: Page) -> None:
    """Tables II and IV: E = 20 and E = 100."""
    table = page.table.name.removeprefix("table")
    paper = page.published()
    lines: list[list[str]] = []
    tried: list[list[str]] = []
    output: list[dict[str, object]] = []
    for (dataset, method), groups in by_federation(page).items():
        for metric in ("MT", "S"):
            found = score(groups, metric, paper.get((f"{dataset}, {metric}", method)))
            lines.append([dataset, metric, method, *found.cells, str(len(groups)), describe_setting(found.group)])
            row = {"dataset": dataset, "metric": metric, "method": method, **found.values, "best of": len(groups)}
            output.append(row | {"the best": describe_setting(found.group)})
        for group in groups:
            best = [score([group], metric, None).stats for metric in ("MT", "S")]
            shown = [stats.describe(1) for stats in best]
            tried.append([dataset, method, describe_setting(group), *shown, str(best[0].num)])
    text = (
        f"# VIRTUAL, table {table}: accuracy (%), maximum over rounds, of the best setting tried, on the test set\n\n"
    )
    text += report.markdown(["dataset", "metric", "method", *HEAD, "settings tried", "the best"], lines)
    text += f"\n{MARK}The paper's setting: E = {100 if table == '4' else 20}, 10 clients per round, each method's best "
    text += (
        "of 5 learning rates, 5 server learning rates and 5 values of beta or mu. FEMNIST, HAR and VSN here are what "
        "data could be had, not the paper's.\n"
    )
    if absent := page.absent("federation"):
        text += f"No run here of {'; '.join(absent)}.\n"
    if len(lines) / 2 < len(tried) <= MOST_SETTINGS:
        text += "\n## Every setting\n\n" + report.markdown(["dataset", "method", "setting", "MT", "S", "seeds"], tried)
    page.write(text, output)


def describe_setting(group: Group) -> str:
    """Name the rounds, the clients and what the paper searches, as far as the method has it."""
    config = group.config
    found = [f"{config['rounds']} rounds, E {config['local.epochs']}"]
    natural = config.get("method.natural_lr") is not None
    for key, name in SEARCHED.items():
        if config.get(key) is not None and not (natural and key == "local.lr" and config.get("model.bias") is False):
            found.append(f"{name} {config[key]:g}")
    return ", ".join([*found, f"{config['num_clients'] or 'all'} clients"])


def make_pruning(page: Page) -> None:
    """Table III."""
    paper = page.published()
    lines: list[list[str]] = []
    output: list[dict[str, object]] = []
    groups = {(group.config["method.prune"], page.cell(group).label): group for group in page.groups()}
    for (prune, name), group in sorted(groups.items(), key=lambda item: (item[0][0], len(item[0][1]))):
        sent = float(group.runs[0].final["bytes_up"] or 0) / group.config["rounds"] / 1e6
        for metric in ("MT", "S"):
            found = score([group], metric, paper.get((f"{prune:g} % pruned, {metric}", name)))
            lines.append([f"{prune:g} %", name, metric, *found.cells, f"{sent:.2f}"])
            output.append({"pruned": prune, "variant": name, "metric": metric, **found.values, "megabytes": sent})
    text = "# VIRTUAL, table III: accuracy (%) with pruned messages, maximum over rounds\n\n"
    text += report.markdown(["pruned", "variant", "metric", *HEAD, "MB sent per round"], lines)
    page.write(f"{text}\n{MARK}", output)


def make_sizes(page: Page) -> None:
    """Table I: how large the clients are."""
    paper = page.published()
    notes: list[str] = []
    lines: list[list[str]] = []
    output: list[dict[str, object]] = []
    names = ["K", "size", "mean size of a client", "standard deviation of sizes"]
    for cell, run in page.entries:
        dataset, file = cell.names["dataset"], run.folder / records.PARTITION_COUNTS
        if not file.exists():
            notes.append(f"{dataset}: no run has a file {records.PARTITION_COUNTS}")
            continue
        counts: Counter[float | None] = Counter()
        for row in records.read_table(file):
            counts[row["client"]] += int(row["count"] or 0)
        sizes = np.array(list(counts.values())) * run.config.get("dataset.sequence_length", 1)  # of text: characters
        ours = [len(sizes), float(sizes.sum()), float(sizes.mean()), float(sizes.std())]
        theirs = [paper.get((dataset, name)) for name in names]
        lines.append([dataset, *(f"{x:.0f}" for x in ours), *(f"{x:g}" if x is not None else "-" for x in theirs)])
        output.append({"dataset": dataset, **dict(zip(names, ours, strict=True))})
        output[-1] |= {f"paper's {name}": value for name, value in zip(names, theirs, strict=True)}
    head = ["dataset", "K", "training examples", "mean", "std", *(f"paper's {x}" for x in ("K", "size", "mean", "std"))]
    text = "# VIRTUAL, table I: the clients; sizes of NLP in characters\n\n" + report.markdown(head, lines)
    page.write(text + report.describe_notes(notes), output)


PANELS = {
    "figure3": ("s_loss", "mt_loss"),
    "figure5": ("train_loss", "train_acc", "s_acc", "mt_acc"),
    "figure6": ("s_acc", "mt_acc"),
}


def choose_rate(groups: dict[str, list[Group]]) -> float:
    """Choose one learning rate for all methods of a panel: the best on average over them, by MT."""
    rates = set.intersection(*({g.config["local.lr"] for g in of} for of in groups.values()))
    rates = rates or {g.config["local.lr"] for of in groups.values() for g in of}

    def mean(rate: float) -> float:
        found = [[g for g in of if g.config["local.lr"] == rate] for of in groups.values()]
        return float(np.mean([score(of, "mt", None).stats.mean for of in found if of]))

    return float(max(sorted(rates), key=mean))


def make_curves(page: Page) -> None:
    """Figures 3, 5 and 6: S and MT over the rounds, a column per dataset, a line per method; the best run of each.

    Of the runs with one learning rate, which stands above the column; steps on natural parameters have their own.
    """
    from matplotlib.figure import Figure

    panels = PANELS[page.table.name]
    groups = by_federation(page)
    datasets = sorted({dataset for dataset, _ in groups})
    figure = Figure(figsize=(3.4 * len(datasets) + 1, 2.6 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), len(datasets), squeeze=False)
    cells: list[dict[str, object]] = []
    for j, dataset in enumerate(datasets):
        here = {method: groups[dataset, method] for method in COLORS if (dataset, method) in groups}
        plain = {method: of for method, of in here.items() if of[0].config.get("method.natural_lr") is None}
        rate = choose_rate(plain or here)
        for method, of in here.items():
            chosen = [g for g in of if method not in plain or g.config["local.lr"] == rate]
            if not chosen:
                continue
            best = score(chosen, "mt", None).group
            run = best.runs[0]
            for i, name in enumerate(panels):
                values = run.column(name)
                grid[i, j].plot(*zip(*run.curve(name), strict=True), color=COLORS[method], lw=1, label=method)
                cell = {"dataset": dataset, "method": method, "quantity": name, "setting": describe_setting(best)}
                cells.append(cell | {"seed": run.config["seed"], "last": values[-1]})
        for i, name in enumerate(panels):
            scale, label = "log" if name.endswith("loss") else "linear", columns.label(name)
            title = f"{dataset}, lr {rate:g}" if i == 0 else None
            grid[i, j].set(yscale=scale, ylabel=label if j == 0 else None, title=title)
            grid[i, j].grid(alpha=0.3)
    shown = {label: line for axes in grid[0] for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        [shown[m] for m in COLORS if m in shown],
        [m for m in COLORS if m in shown],
        loc="outside upper left",
        ncols=len(shown),
        fontsize=9,
    )
    figure.supxlabel("round")
    rows = [[*(str(v) for v in list(c.values())[:5]), f"{c['last']:.4f}"] for c in cells]
    text = f"# VIRTUAL, {page.table.name}: one learning rate per dataset, each method's best of the rest, by MT\n\n"
    head = ["dataset", "method", "quantity", "setting", "seed", "last round"]
    page.write(text + report.markdown(head, rows), cells)
    page.save_figure(figure)


def smooth(rounds: Sequence[float], values: Sequence[float], window: int) -> tuple[Any, Any]:
    """Average over windows, each at the middle of its rounds."""
    window = min(window, len(values))
    kernel = np.ones(window) / window
    return np.convolve(rounds, kernel, mode="valid"), np.convolve(values, kernel, mode="valid")


def make_figure2(page: Page) -> None:
    """S and MT loss over the rounds, one curve per beta, with centred moving averages over 20 rounds."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    runs = {run.config["method.beta"]: run for run in page.runs}
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    cells: list[dict[str, object]] = []
    for axes, name in zip(figure.subplots(1, 2), ("s_loss", "mt_loss"), strict=True):
        label = columns.label(name)
        for number, (beta, run) in enumerate(sorted(runs.items())):
            rounds, values = zip(*run.curve(name), strict=True)
            color = colormaps["viridis"](number / max(1, len(runs) - 1))
            axes.plot(rounds, values, color=color, lw=0.5, alpha=0.5)
            axes.plot(*smooth(rounds, values, 20), color=color, lw=2, label=f"beta {beta:g}")
            cells.append({"beta": beta, "quantity": label, "last": values[-1], "smallest": min(values)})
        axes.set(xlabel="round", ylabel=label, yscale="log")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    rows = [[f"{c['beta']:g}", str(c["quantity"]), f"{c['last']:.4f}", f"{c['smallest']:.4f}"] for c in cells]
    text = "# VIRTUAL, figure 2: the weight of the KL divergence\n\n"
    page.write(text + report.markdown(["beta", "quantity", "last round", "smallest"], rows), cells)
    page.save_figure(figure)


def posteriors(run: Run) -> list[tuple[str, Any]]:
    """Per layer, the signal-to-noise ratios |mean| / deviation in the posteriors of the last round's clients.

    A message is a known power of the ratio of a client's posterior and what the server held before.
    """
    from safetensors.torch import load_file

    from bfl_bench.build import reload
    from bfl_bench.models.lateral import SHARED

    line = "bfl-paper run virtual_figure4 force=true"
    folder = run.path(line)
    experiment, state = reload(folder)
    last, layout = run.config["rounds"], experiment.worker.task.model.layout
    files = sorted((folder / records.MESSAGES).glob(f"round-{last}-client-*.safetensors"))
    report.need(files, f"{folder.name} with its last messages", line)
    changes = [load_file(file)["changes"].double() for file in files]
    before = [state[name] - sum(change[i] for change in changes) for i, name in enumerate(("precision", "shift"))]
    lr, damping = run.config["server.lr"], run.config["method.damping"]
    step = lr * (1 - lr if damping is None else damping)
    ratios = []
    for change in changes:
        precision, shift = (old + part / step for old, part in zip(before, change, strict=True))
        ratios.append(shift.abs() / precision.clamp(min=1e-12).sqrt())
    names = [entry for entry in layout.entries if layout.means.start <= entry.start < layout.means.stop]
    shared = [entry for entry in names if entry.name.startswith(SHARED)] or names
    found = []
    for entry in shared:
        start = entry.start - layout.means.start
        values = [ratio[start : start + entry.shape.numel()].numpy() for ratio in ratios]
        found.append((entry.name.removeprefix(SHARED), np.sort(np.concatenate(values))))
    return found


def make_figure4(page: Page) -> None:
    from matplotlib.figure import Figure

    found = {cell.label: posteriors(run) for cell, run in page.entries}
    layers = next(iter(found.values()))
    figure = Figure(figsize=(3.4 * len(layers), 3.2), layout="constrained")
    cells: list[dict[str, object]] = []
    for number, axes in enumerate(figure.subplots(1, len(layers), squeeze=False)[0]):
        for init, style in (("own", "-"), ("server", "--")):
            if init in found:
                name, values = found[init][number]
                axes.plot(np.log10(values + 1e-12), np.linspace(0, 1, len(values)), style, label=f"start: {init}")
                cells.append({"layer": name, "init_from": init, "median SNR": float(np.median(values))})
        axes.set(xlabel="log10 of the signal-to-noise ratio", title=f"layer {number + 1}", ylabel="share of weights")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    rows = [[str(c["layer"]), str(c["init_from"]), f"{c['median SNR']:.3f}"] for c in cells]
    text = "# VIRTUAL, figure 4: signal-to-noise ratios in the clients' posteriors\n\n"
    page.write(text + report.markdown(["layer", "init_from", "median"], rows), cells)
    page.save_figure(figure)


MAKERS: dict[str, Maker] = {
    "table1": make_sizes,
    "table2": make_accuracies,
    "table3": make_pruning,
    "table4": make_accuracies,
    "figure2": make_figure2,
    **dict.fromkeys(PANELS, make_curves),
    "figure4": make_figure4,
}
WITHOUT_RUNS: dict[str, Callable[[Path], None]] = {}
