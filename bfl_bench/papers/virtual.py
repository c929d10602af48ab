"""Tables and figures of VIRTUAL out of finished runs.

    python scripts/virtual.py table1|table2|table3|table4|figure2|figure3|figure4|figure5|figure6
        [--runs outputs] [--to outputs/report]

Corinzia, Beuret, Buhmann, "Variational Federated Multi-Task Learning", 2019. Nothing is trained: what is missing is
named, with the `bfl-run` lines that make it. S is the server's model on all clients' test examples, MT each client's
own model on its own. The paper's statistic is the maximum over rounds, taken on the test set; so it is here.
"""

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bfl_bench import records, report
from bfl_bench.evaluation import columns
from bfl_bench.papers import tables
from bfl_bench.report import Config, Group, Run, Stats

DATASETS = {"femnist": "FEMNIST", "pmnist": "PMNIST", "vsn": "VSN", "har": "HAR", "shakespeare": "NLP"}
METHODS = {"fedavg": "FedAvg", "fedprox": "FedProx", "virtual": "Virtual", "virtual_released": "Virtual (released)"}
COLORS = {"FedAvg": "C0", "FedProx": "C1", "Virtual": "C2", "Virtual (released)": "C3"}
ROWS = {"FEMNIST, mlp": "femnist_mlp", "FEMNIST, conv": "femnist_conv", "MNIST, mlp": "mnist", "PMNIST, mlp": "pmnist"}
ROWS |= {"VSN, mlp": "vsn", "HAR, mlp": "har", "NLP, lstm": "shakespeare"}
"""Files of conf/row/virtual."""
LINES = {
    name: f"bfl-run -m experiment=virtual_{name}"
    for name in ("table1", "table2", "table3", "table4", "figure2", "figure4")
}


def dataset_of(config: Config) -> str | None:
    """The paper's name of a run's data and network, for runs whose clients have their own test examples."""
    name = DATASETS.get(config["dataset.name"])
    if name == "PMNIST" and not config.get("dataset.permute", True):
        name = "MNIST"
    if name is None and config["dataset.name"] == "mnist":
        name = "MNIST"
    return f"{name}, {config['model.name']}" if name and config["method.name"] in METHODS else None


def is_plain(config: Config) -> bool:
    """FedAvg, FedProx, or VIRTUAL as the paper has it, neither pruned nor started from the server."""
    return bool(config.get("method.prune", 0) == 0 and config.get("method.init_from", "own") == "own")


def is_virtual(config: Config) -> bool:
    """VIRTUAL on FEMNIST with the MLP: Table III, Figs. 2 and 4."""
    return "virtual" in config["method.name"] and dataset_of(config) == "FEMNIST, mlp"


def find(arguments: Namespace, keep: Callable[[Config], bool], line: str) -> tuple[list[Run], list[str]]:
    runs, notes = report.find_runs(arguments.runs, arguments.where, lambda c: bool(dataset_of(c)) and keep(c))
    runs = [run for run in runs if run.final.get("mt_acc") is not None]
    report.need(runs, "VIRTUAL's federations", line)
    return runs, notes


def describe_scale(name: str, runs: list[Run]) -> str:
    return tables.describe_scale(f"virtual_{name}", (run.config for run in runs))


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


def make_accuracies(table: str, arguments: Namespace) -> None:
    """Tables II and IV: E = 20 and E = 100."""
    long, line = table == "4", LINES[f"table{table}"]
    runs, notes = find(arguments, lambda c: is_plain(c) and (c["local.epochs"] == 100) == long, line)
    paper = tables.read_published("virtual", table)
    cells: dict[tuple[str, str], list[Group]] = {}
    for group in report.group_over_seeds(runs):
        cells.setdefault((dataset_of(group.config) or "", METHODS[group.config["method.name"]]), []).append(group)
    lines: list[list[str]] = []
    output: list[dict[str, object]] = []
    for (dataset, method), groups in sorted(cells.items()):
        for metric in ("MT", "S"):
            found = score(groups, metric, paper.get((f"{dataset}, {metric}", method.split(" ")[0])))
            config = found.group.config
            setting = f"{config['rounds']} rounds, E {config['local.epochs']}, lr {config['local.lr']}, "
            setting += f"server.lr {config['server.lr']}, {config['num_clients'] or 'all'} clients"
            lines.append([dataset, metric, method, *found.cells, str(len(groups)), setting])
            output.append(
                {"dataset": dataset, "metric": metric, "method": method, **found.values, "best of": len(groups)}
            )
    missing = {
        f"{METHODS[name]} on {dataset}": f"{line} row=virtual/{ROWS[dataset]} method={name}"
        for dataset in dict.fromkeys(row.rsplit(", ", 1)[0] for row, _ in paper)
        for name in ("fedavg", "fedprox", "virtual")
        if (dataset, METHODS[name]) not in cells
    }
    text = (
        f"# VIRTUAL, table {table}: accuracy (%), maximum over rounds, of the best setting tried, on the test set\n\n"
    )
    text += report.markdown(["dataset", "metric", "method", *HEAD, "settings tried", "the best"], lines)
    text += f"\n{MARK}The paper's setting: E = {100 if long else 20}, 10 clients per round, each method's best of 5 "
    text += (
        "learning rates, 5 server learning rates and 5 values of beta or mu. FEMNIST, HAR and VSN here are what data "
    )
    text += "could be had, not the paper's.\n" + describe_scale(f"table{table}", runs)
    text += report.describe_missing(missing) + report.describe_notes(notes)
    report.write(arguments.to, f"virtual_table{table}", text, output)


def setting_of(config: Config) -> str:
    """What the runs of Table III have in common."""
    return json.dumps(report.without(config, ["seed", "method.prune", "method.init_from"]), sort_keys=True)


def make_pruning(arguments: Namespace) -> None:
    """Table III."""
    runs, notes = find(arguments, is_virtual, LINES["table3"])
    paper = tables.read_published("virtual", "3")
    pruned = [run for run in runs if run.config["method.prune"]]  # Table II, without it, may have other settings
    settings = {setting_of(run.config) for run in pruned or runs}
    if len(settings) > 1:
        raise report.ReportError("runs of several settings, which are not one table; choose with --where KEY=VALUE")
    groups = {
        (group.config["method.prune"], group.config["method.init_from"]): group
        for group in report.group_over_seeds(runs)
        if setting_of(group.config) in settings
    }
    lines: list[list[str]] = []
    output: list[dict[str, object]] = []
    missing: dict[str, str] = {}
    for prune in sorted({prune for prune, _ in groups} | {0, 50, 75, 90}):
        for init, name in (("own", "Virtual"), ("server", "Virtual + FedAvg init")):
            if (prune, init) not in groups:
                missing[f"{prune:g} % pruned, {name}"] = (
                    f"{LINES['table3']} method.prune={prune:g} method.init_from={init}"
                )
                continue
            group = groups[prune, init]
            sent = float(group.runs[0].final["bytes_up"] or 0) / group.config["rounds"] / 1e6
            for metric in ("MT", "S"):
                found = score([group], metric, paper.get((f"{prune:g} % pruned, {metric}", name)))
                lines.append([f"{prune:g} %", name, metric, *found.cells, f"{sent:.2f}"])
                output.append({"pruned": prune, "variant": name, "metric": metric, **found.values, "megabytes": sent})
    text = "# VIRTUAL, table III: accuracy (%) with pruned messages, maximum over rounds\n\n"
    text += report.markdown(["pruned", "variant", "metric", *HEAD, "MB sent per round"], lines)
    text += f"\n{MARK}" + describe_scale("table3", [run for group in groups.values() for run in group.runs])
    text += report.describe_missing(missing) + report.describe_notes(notes)
    report.write(arguments.to, "virtual_table3", text, output)


def make_sizes(arguments: Namespace) -> None:
    """Table I: how large the clients are."""
    runs, notes = find(arguments, lambda _: True, LINES["table1"])
    paper = tables.read_published("virtual", "1")
    lines: list[list[str]] = []
    for dataset in sorted({(dataset_of(run.config) or "").split(",")[0] for run in runs}):
        here = [run.folder for run in runs if (dataset_of(run.config) or "").startswith(dataset)]
        file = next((f / records.PARTITION_COUNTS for f in here if (f / records.PARTITION_COUNTS).exists()), None)
        if file is None:
            notes.append(f"{dataset}: no run has a file {records.PARTITION_COUNTS}")
            continue
        counts: Counter[float | None] = Counter()
        for row in records.read_table(file):
            counts[row["client"]] += int(row["count"] or 0)
        sizes = np.array(list(counts.values()))
        ours = [len(sizes), sizes.sum(), sizes.mean(), sizes.std()]
        names = ["K", "size", "mean size of a client", "standard deviation of sizes"]
        theirs = [f"{paper[dataset, name]:g}" if (dataset, name) in paper else "-" for name in names]
        lines.append([dataset, *(f"{value:.0f}" for value in ours), *theirs])
    head = ["dataset", "K", "training examples", "mean", "std", *(f"paper's {x}" for x in ("K", "size", "mean", "std"))]
    text = "# VIRTUAL, table I: the clients\n\n" + report.markdown(head, lines)
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    report.write(arguments.to, "virtual_table1", text + report.describe_notes(notes), rows)


def make_curves(figure_name: str, arguments: Namespace) -> None:
    """Figures 3, 5 and 6: S and MT over the rounds, a column per dataset, a line per method; the best run of each."""
    from matplotlib.figure import Figure

    panels = {
        "figure3": ("s_loss", "mt_loss"),
        "figure5": ("train_loss", "s_acc", "mt_acc"),
        "figure6": ("s_acc", "mt_acc"),
    }[figure_name]
    long = figure_name == "figure6"
    line = LINES["table4" if long else "table2"]
    runs, notes = find(arguments, lambda c: is_plain(c) and (c["local.epochs"] == 100) == long, line)
    datasets = sorted({dataset_of(run.config) or "" for run in runs})
    figure = Figure(figsize=(3.4 * len(datasets) + 1, 2.6 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), len(datasets), squeeze=False)
    cells: list[dict[str, object]] = []
    for j, dataset in enumerate(datasets):
        here = [run for run in runs if dataset_of(run.config) == dataset]
        for method, color in COLORS.items():
            members = [run for run in here if METHODS[run.config["method.name"]] == method]
            if not members:
                notes += [f"no run of {method} on {dataset}"] if "released" not in method else []
                continue
            run = score(report.group_over_seeds(members), "mt", None).group.runs[0]
            for i, name in enumerate(panels):
                values = run.column(name)
                grid[i, j].plot(*zip(*run.curve(name), strict=True), color=color, lw=1, label=method)
                cells.append({"dataset": dataset, "method": method, "quantity": name, "last": values[-1]})
        for i, name in enumerate(panels):
            scale, label = "log" if name.endswith("loss") else "linear", columns.label(name)
            grid[i, j].set(yscale=scale, ylabel=label if j == 0 else None, title=dataset if i == 0 else None)
            grid[i, j].grid(alpha=0.3)
    grid[0, 0].legend(fontsize=8)
    figure.supxlabel("round")
    rows = [[*(str(v) for v in list(c.values())[:3]), f"{c['last']:.4f}"] for c in cells]
    text = f"# VIRTUAL, {figure_name}\n\n" + report.markdown(["dataset", "method", "quantity", "last round"], rows)
    text += describe_scale(figure_name, runs)
    report.write(arguments.to, f"virtual_{figure_name}", text + report.describe_notes(notes), cells)
    report.save_figure(figure, arguments.to, f"virtual_{figure_name}")


def make_figure2(arguments: Namespace) -> None:
    """S and MT loss over the rounds, one curve per beta, with moving averages over 20 rounds."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    runs, notes = find(arguments, lambda c: is_plain(c) and is_virtual(c), LINES["figure2"])
    betas = Counter(run.config["method.beta"] for run in runs)
    notes += [f"{num} runs of beta {beta:g}: the first is drawn" for beta, num in betas.items() if num > 1]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    cells: list[dict[str, object]] = []
    for axes, name in zip(figure.subplots(1, 2), ("s_loss", "mt_loss"), strict=True):
        label = columns.label(name)
        for number, beta in enumerate(sorted(betas)):
            run = next(run for run in runs if run.config["method.beta"] == beta)
            values, color = run.column(name), colormaps["viridis"](number / max(1, len(betas) - 1))
            window = min(20, len(values))
            smooth = np.convolve(values, np.ones(window) / window, mode="valid")
            axes.plot(*zip(*run.curve(name), strict=True), color=color, lw=0.5, alpha=0.5)
            axes.plot(range(window, len(values) + 1), smooth, color=color, lw=2, label=f"beta {beta:g}")
            cells.append({"beta": beta, "quantity": label, "last": values[-1], "smallest": min(values)})
        axes.set(xlabel="round", ylabel=label, yscale="log")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    rows = [[f"{c['beta']:g}", str(c["quantity"]), f"{c['last']:.4f}", f"{c['smallest']:.4f}"] for c in cells]
    text = "# VIRTUAL, figure 2: the weight of the KL divergence\n\n"
    text += report.markdown(["beta", "quantity", "last round", "smallest"], rows) + describe_scale("figure2", runs)
    report.write(arguments.to, "virtual_figure2", text + report.describe_notes(notes), cells)
    report.save_figure(figure, arguments.to, "virtual_figure2")


def posteriors(run: Run) -> list[tuple[str, Any]]:
    """Per layer, the signal-to-noise ratios |mean| / deviation in the posteriors of the last round's clients.

    A message is a known power of the ratio of a client's posterior and what the server held before.
    """
    from safetensors.torch import load_file

    from bfl_bench.build import reload
    from bfl_bench.models.lateral import SHARED

    experiment, state = reload(run.folder)
    last, layout = run.config["rounds"], experiment.worker.task.model.layout
    files = sorted((run.folder / records.MESSAGES).glob(f"round-{last}-client-*.safetensors"))
    report.need(files, f"{run.folder.name} with its last messages", LINES["figure4"])
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


def make_figure4(arguments: Namespace) -> None:
    from matplotlib.figure import Figure

    runs, notes = find(arguments, lambda c: is_virtual(c) and c["method.prune"] == 0, LINES["figure4"])
    kept = [run for run in runs if run.config["rounds"] in (run.config["eval.keep_messages"] or [])]
    report.need(kept, "virtual that keeps its last messages", LINES["figure4"])
    found = {run.config["method.init_from"]: posteriors(run) for run in kept}
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
    axes.legend(fontsize=8)
    rows = [[str(c["layer"]), str(c["init_from"]), f"{c['median SNR']:.3f}"] for c in cells]
    text = "# VIRTUAL, figure 4: signal-to-noise ratios in the clients' posteriors\n\n"
    text += report.markdown(["layer", "init_from", "median"], rows) + describe_scale("figure4", kept)
    report.write(arguments.to, "virtual_figure4", text + report.describe_notes(notes), cells)
    report.save_figure(figure, arguments.to, "virtual_figure4")


COMMANDS: dict[str, Callable[[Namespace], None]] = {
    "table1": make_sizes,
    "table2": partial(make_accuracies, "2"),
    "table3": make_pruning,
    "table4": partial(make_accuracies, "4"),
    "figure2": make_figure2,
    **{name: partial(make_curves, name) for name in ("figure3", "figure5", "figure6")},
    "figure4": make_figure4,
}


def main() -> None:
    report.run_script(__doc__ or "", COMMANDS)


if __name__ == "__main__":
    main()
