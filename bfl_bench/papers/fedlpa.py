"""Tables and figures of FedLPA out of finished runs.

    python scripts/fedlpa.py table1|table2|table3|table5|...|table12|figure1|figure2|figure3|figure4|figure5|figure6
        [--runs outputs] [--to outputs/report]

Liu et al., "FedLPA: One-shot Federated Learning with Layer-Wise Posterior Aggregation", NeurIPS 2024. Nothing is
trained: what is missing is named, with the `bfl-run` lines that make it. Figures 1, 4 and 5 are t-SNE pictures of the
networks' last hidden layer, figure 3 is a Fisher matrix and its blocks, figure 6 needs no runs.
"""

import re
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bfl_bench import records, report
from bfl_bench.papers import tables
from bfl_bench.report import Config, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bfl_bench.engines.worker import Worker

Floats = NDArray[Any]

DATASETS = {"fashion_mnist": "FMNIST", "cifar10": "CIFAR-10", "mnist": "MNIST", "svhn": "SVHN"}
METHODS = {"fedlpa": "FedLPA", "fedlpa_released": "FedLPA", "fednova": "FedNova", "scaffold": "SCAFFOLD"}
METHODS |= {"fedavg": "FedAvg", "fedprox": "FedProx", "dense": "DENSE", "dense_fedlpa": "DENSE"}
METHODS |= {"fedov": "FedOV"}
PAPERS_COSTS = ("CIFAR-10, communication (MB), E=200", "CIFAR-10, computation (minutes), E=200")
SOLVERS = {"ea": "closed form (EA)", "gd": "gradient descent", "cg": "conjugate gradients"}


def line_of(command: str) -> str:
    """The command that makes the runs of a table or figure; with scale=cpu, some of them in an hour at most."""
    return f"bfl-run -m experiment=fedlpa_{command}"


# Tables


def row_of(config: Config) -> str | None:
    """The row of a table that a run belongs to, as published/fedlpa.csv names it."""
    dataset, clients = DATASETS.get(config["dataset.name"]), config["num_clients"]
    if dataset is None or config["rounds"] != 1 or config["method.name"] not in METHODS:
        return None
    if config["partition.name"] not in ("niid_bench", "classes"):
        return None
    if clients in (20, 50) and dataset == "FMNIST":
        dataset = f"{clients} clients"
    elif clients == 5:
        dataset += ", 5 clients"
    elif clients != 10:
        return None
    if config["partition.name"] == "classes":
        part = f"#C={config['partition.classes_per_client']}"
    else:
        alpha = config.get("partition.alpha")
        part = f"beta={float(alpha) if alpha == 1 else alpha}"
    return f"{dataset}, {part}, E={config['local.epochs']}"


def accuracies(run: Run, table: str) -> dict[str, float]:
    """By column and, for FedLPA, solver; the authors' rule takes the better of two on the test set."""
    column, final = METHODS[run.config["method.name"]], run.final
    values = {"": float(final["ga"] or 0)}
    if column == "FedLPA":
        damping = run.config["method.damping"]
        column = f"lambda={damping}" if damping != 0.001 or table == "3" else column
        values = {SOLVERS[run.config["method.solver"]]: float(final["ga"] or 0)}
        values |= {SOLVERS[s]: float(v) for s in SOLVERS if (v := final.get(f"ga@{s}")) is not None}
        if run.config["method.name"] == "fedlpa_released" and SOLVERS["ea"] in values:
            values["the better of EA and gradient descent on the test set"] = max(
                values[SOLVERS["ea"]], values[SOLVERS["gd"]]
            )
        values = {f"lr {run.config['local.lr']}, {name}": value for name, value in values.items()}
    return {f"{column}: {name}" if name else column: 100 * value for name, value in values.items()}


def make_table(table: str, arguments: Namespace) -> None:
    paper = tables.read_published("fedlpa", table)
    rows = {row for row, _ in paper}
    runs, notes = report.find_runs(arguments.runs, arguments.where, lambda config: row_of(config) in rows)
    report.need(runs, f"table {table}", line_of(f"table{table}"))
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    groups = report.best_over(report.group_over_seeds(runs), arguments.best_over)
    for run in (run for group in groups for run in group.runs):
        weights = f", weights {w}" if (w := run.config.get("method.weights")) != "size" else ""
        for name, value in accuracies(run, table).items():
            seeds = found.setdefault((row_of(run.config) or "", name.split(":")[0], name + weights), {})
            if run.config["seed"] in seeds:
                raise report.ReportError(f"two runs are one cell; choose with --where; one is {run.folder}")
            seeds[run.config["seed"]] = value
    lines: list[list[str]] = []
    output: list[dict[str, object]] = []
    for (row, column, name), seeds in sorted(found.items()):
        ours, theirs = report.summarise(list(seeds.values())), paper.get((row, column))
        lines.append([row, name, *ours.compare(theirs), str(ours.num)])
        output.append({"row": row, "method": name, "mean": ours.mean, "std": ours.std, "paper": theirs, "n": ours.num})
    text = (
        f"# FedLPA, table {table}: accuracy (%) after one round\n\nOurs: mean +- standard deviation over seeds. What "
    )
    text += "follows the paper's +- is no standard deviation over its three partitions and is left out; (!): the "
    text += f"difference is beyond our standard deviation.\n{report.describe_choice(arguments.best_over)}\n"
    text += report.markdown(["cell", "method", "ours", "paper", "diff.", "seeds"], lines)
    text += report.describe_missing(missing_cells(table, paper, {(row, column) for row, column, _ in found}))
    report.write(arguments.to, f"fedlpa_table{table}", text + report.describe_notes(notes), output)


def missing_cells(table: str, paper: Iterable[tuple[str, str]], found: set[tuple[str, str]]) -> dict[str, str]:
    """What the paper's table has and no run makes, with the command; one entry for rows that lack the same columns."""
    lacking: dict[str, list[str]] = {}
    for row, column in paper:
        if (row, column) not in found:
            lacking.setdefault(row, []).append(column)
    together: dict[tuple[str, ...], list[str]] = {}
    for row, columns in lacking.items():
        *start, _, _ = row.split(", ")
        together.setdefault((", ".join(start), *columns), []).append(row)
    return {
        f"{', '.join(columns)} in {start}, {'; '.join(', '.join(row.split(', ')[-2:]) for row in rows)}": " ".join(
            [line_of(f"table{table}"), *overrides_of(start, rows, columns)]
        )
        for (start, *columns), rows in together.items()
    }


def overrides_of(start: str, rows: list[str], columns: list[str]) -> list[str]:
    """Of rows that begin alike, such as "FMNIST, beta=0.5, E=10" and "FMNIST, beta=0.1, E=10"."""
    dataset = next((name for name, title in DATASETS.items() if title in start), "fashion_mnist")
    dataset += "_cropped" if dataset == "cifar10" else ""
    parts, epochs = zip(*(row.split(", ")[-2:] for row in rows), strict=True)
    files = [f"fedlpa/{part.replace('#C=', 'classes_').replace('beta=', 'beta_')}" for part in parts]
    found = [f"dataset={dataset}", f"row={','.join(dict.fromkeys(files))}"]
    if clients := re.search(r"(\d+) clients", start):
        found.append(f"num_clients={clients[1]}")
    found.append(f"local.epochs={','.join(dict.fromkeys(epoch.removeprefix('E=') for epoch in epochs))}")
    if dampings := [column.removeprefix("lambda=") for column in columns if column.startswith("lambda")]:
        return [*found, f"method.damping={','.join(dampings)}"]
    names = {title: name for name, title in METHODS.items()}  # of two that are FedLPA, the released one
    return [*found, f"method={','.join(names[column] for column in columns)}"]


def make_costs(table: str, arguments: Namespace) -> None:
    """Bytes as they were sent, and seconds, each also as a multiple of FedAvg's in the same cell."""
    runs, notes = report.find_runs(arguments.runs, arguments.where, lambda config: row_of(config) is not None)
    report.need(runs, f"table {table}", line_of(f"table{table}"))
    paper = tables.read_published("fedlpa", table)
    cells: dict[tuple[str, str], list[dict[str, float]]] = {}
    for run in runs:
        timing = records.read_table(run.folder / records.TIMING)[-1]
        client, server = float(timing["client_seconds"] or 0), float(timing["server_seconds"] or 0)
        found = {"megabytes": float(run.final["bytes_up"] or 0) / 1e6, "client_seconds": client}
        found |= {"server_seconds": server, "seconds": client + server}
        cells.setdefault((str(row_of(run.config)), run.config["method.name"]), []).append(found)
    lines: list[list[str]] = []
    rows: list[dict[str, object]] = []
    for (cell, method), members in sorted(cells.items()):
        median = {key: statistics.median(member[key] for member in members) for key in members[0]}
        fedavg = cells.get((cell, "fedavg"), [])
        ratios = [
            f"{median[key] / statistics.median(member[key] for member in fedavg):.2f}" if fedavg else "-"
            for key in ("megabytes", "seconds")
        ]
        printed = [
            f"{value:g} ({value / paper[row, 'FedAvg']:.2f})" if (value := paper.get((row, METHODS[method]))) else "-"
            for row in PAPERS_COSTS
        ]
        numbers = [f"{median['megabytes']:.2f}", f"{median['client_seconds']:.1f}", f"{median['server_seconds']:.1f}"]
        lines.append([cell, method, str(len(members)), *numbers, *ratios, *printed])
        rows.append({"cell": cell, "method": method, "runs": len(members), **median})
    head = ["cell", "method", "runs", "MB sent by all clients", "client seconds", "server seconds"]
    head += ["MB / FedAvg's", "seconds / FedAvg's", "paper's MB (/ FedAvg's)", "paper's minutes (/ FedAvg's)"]
    text = f"# FedLPA, table {table}: what a round costs\n\n{report.markdown(head, lines)}"
    text += "\nThe paper's numbers are of CIFAR-10, 10 clients and E = 200. It prints 2.77 MB for FedLPA. By its own "
    text += "formula, the model and the upper triangles of all A and B, it is 7.16 MB: 4 bytes times 62 006 + 117 081, "
    text += "times 10. Ours: medians over runs; seconds on one thread.\n"
    report.write(arguments.to, f"fedlpa_table{table}", text + report.describe_notes(notes), rows)


# Figures 1, 4 and 5: the last hidden layer


def features(worker: "Worker", vector: Any, x: Any) -> Floats:
    """What the network's last linear layer gets, for the inputs x, (n, d)."""
    import torch
    from torch import nn

    model = worker.task.model
    model.load(vector)
    model.module.eval()
    last = [layer for layer in model.module.modules() if isinstance(layer, nn.Linear)][-1]
    seen: list[torch.Tensor] = []
    handle = last.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.inference_mode():
        model(x)
    handle.remove()
    return seen[0].cpu().numpy()


def find_pictures(command: str, arguments: Namespace) -> dict[str, Run]:
    def keep(config: Config) -> bool:
        alpha = config.get("partition.alpha")
        return config["dataset.name"] == "mnist" and alpha == 0.05 and row_of(config) is not None

    runs, _ = report.find_runs(arguments.runs, arguments.where, keep)
    runs = [run for run in runs if (run.folder / records.CHECKPOINT).exists()]
    report.need(runs, "MNIST with beta 0.05 that has its model", line_of(command))
    if len({run.config["local.epochs"] for run in runs}) > 1:
        raise report.ReportError("runs of several E; choose with --where local.epochs=E")
    first = min(run.config["seed"] for run in runs)
    return {run.config["method.name"]: run for run in runs if run.config["seed"] == first}


def pictures_of(command: str, runs: dict[str, Run]) -> Iterator[tuple[str, "Worker", Any]]:
    """Title, worker and parameters of every network that the figure shows."""
    from safetensors.torch import load_file

    from bfl_bench.build import reload

    if command == "figure4":
        run = next((run for run in runs.values() if (run.folder / records.MESSAGES).exists()), None)
        report.need(run, "MNIST with beta 0.05 that keeps its messages", line_of(command))
        assert run is not None
        experiment, _ = reload(run.folder)
        for client in range(len(experiment.worker.task.sizes)):
            file = run.folder / records.MESSAGES / f"round-1-client-{client}.safetensors"
            yield f"client {client + 1}", experiment.worker, load_file(file)["params"]
        return
    for name, run in runs.items():
        if name.startswith("fedlpa") == (command == "figure1") and name != "fedov":  # an ensemble has no one layer
            experiment, state = reload(run.folder)
            yield METHODS[name], experiment.worker, state["params"]


def make_pictures(command: str, arguments: Namespace) -> None:
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    runs = find_pictures(command, arguments)
    pictures = list(pictures_of(command, runs))
    report.need(pictures, f"the methods of {command}", line_of(command))
    columns = min(5, len(pictures))
    rows = -(-len(pictures) // columns)
    figure = Figure(figsize=(3.2 * columns, 3.4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    cells: list[dict[str, object]] = []
    for axes, (title, worker, vector) in zip(grid.flat, pictures, strict=False):
        x, y = worker.train.x[:2000], worker.train.y[:2000].cpu().numpy()
        with threadpool_limits(1):  # on a busy machine more threads are slower, by far
            embedded = TSNE(random_state=0, init="pca", perplexity=30).fit_transform(features(worker, vector, x))
        points = axes.scatter(*embedded.T, c=y, s=3, cmap="tab10", vmin=-0.5, vmax=9.5)
        axes.set_title(title, fontsize=10)
        neighbours = neighbour_agreement(embedded, y)
        cells.append({"network": title, "nearest neighbour of the same class (%)": 100 * neighbours})
    figure.colorbar(points, ax=grid, ticks=range(10), shrink=0.7)
    seed = next(iter(runs.values())).config["seed"]
    text = f"# FedLPA, {command}: t-SNE of the last hidden layer, 2000 training images of MNIST, beta 0.05, seed {seed}"
    shares = [[str(cell["network"]), f"{list(cell.values())[1]:.1f}"] for cell in cells]
    text += "\n\n" + report.markdown(list(cells[0]), shares)
    text += tables.describe_scale(f"fedlpa_{command}", (run.config for run in runs.values()))
    report.write(arguments.to, f"fedlpa_{command}", text, cells)
    report.save_figure(figure, arguments.to, f"fedlpa_{command}")


def neighbour_agreement(points: Floats, labels: Floats) -> float:
    """Share of points whose nearest neighbour has the same label: a number beside the picture."""
    from sklearn.neighbors import NearestNeighbors

    _, nearest = NearestNeighbors(n_neighbors=2).fit(points).kneighbors(points)
    return float((labels[nearest[:, 1]] == labels).mean())


# Figure 2: more rounds


def curve_of(run: Run) -> list[float]:
    """Global accuracy in percent, round by round."""
    return [100 * value for value in run.column("ga")]


def make_figure2(arguments: Namespace) -> None:
    from matplotlib.figure import Figure

    def keep(config: Config) -> bool:
        beta = config.get("partition.alpha")
        return config["dataset.name"] == "mnist" and beta == 0.5 and config["num_clients"] == 10

    runs, notes = report.find_runs(arguments.runs, arguments.where, keep)
    several = [run for run in runs if run.config["rounds"] > 1]
    report.need(several, "several rounds of MNIST with beta 0.5", line_of("figure2"))
    starts = report.by_name(runs)
    curves: dict[str, list[float]] = {}
    for run in several:
        name, start = METHODS[run.config["method.name"]], starts.get(run.config["start_from"])
        if start is None:
            curve = curve_of(run)
        else:
            name, curve = f"{METHODS[start.config['method.name']]} once, then {name}", curve_of(start) + curve_of(run)
        if name in curves:
            raise report.ReportError(f"two runs are one curve; choose with --where KEY=VALUE; one is {run.folder}")
        curves[name] = curve
    if not any("then" in name for name in curves):
        epochs, rounds = several[0].config["local.epochs"], several[0].config["rounds"]
        once = [run for run in runs if run.config["rounds"] == 1 and "fedlpa" in run.config["method.name"]]
        once = [run for run in once if run.config["local.epochs"] == epochs]
        line = f"bfl-run experiment=fedlpa_figure2 dataset=mnist local.epochs={epochs} "
        line += f"method=fedavg rounds={rounds - 1} start_from={once[0].folder}" if once else "rounds=1"
        notes.append(f"no run of FedLPA once, then FedAvg. The next step: `{line}`")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve, marker="o", ms=3, label=name)
    axes.set(xlabel="round", ylabel="global accuracy (%)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    rows = [[name, f"{curve[0]:.2f}", f"{curve[-1]:.2f}", str(len(curve))] for name, curve in curves.items()]
    text = "# FedLPA, figure 2: MNIST, beta 0.5, accuracy (%)\n\n"
    text += report.markdown(["method", "first round", "last round", "rounds"], rows)
    text += tables.describe_scale("fedlpa_figure2", (run.config for run in several if not run.config["start_from"]))
    cells = [{"method": n, "round": i + 1, "accuracy": v} for n, curve in curves.items() for i, v in enumerate(curve)]
    report.write(arguments.to, "fedlpa_figure2", text + report.describe_notes(notes), cells)
    report.save_figure(figure, arguments.to, "fedlpa_figure2")


# Figure 3: the Fisher matrix


def make_figure3(arguments: Namespace) -> None:
    """The empirical Fisher of a whole network and the blocks that FedLPA keeps of it, on 2000 training images."""
    import torch
    from matplotlib.colors import SymLogNorm
    from matplotlib.figure import Figure
    from torch.func import functional_call, grad, vmap
    from torch.nn.functional import cross_entropy

    from bfl_bench.build import reload
    from bfl_bench.inference import kronecker
    from bfl_bench.method import Client

    runs, notes = report.find_runs(arguments.runs, arguments.where, lambda config: config["model.name"] == "conv3")
    report.need(runs, "the network conv3", line_of("figure3"))
    experiment, state = reload(runs[0].folder)
    worker, model = experiment.worker, experiment.worker.task.model
    layers = kronecker.find_layers(model)
    client = Client(0, worker.train, worker.client_indices[0][:2000], worker.augment)
    x, y = client.gather(torch.arange(len(client)), torch.Generator())
    tensors = {entry.name: entry.view(state["params"]) for entry in model.layout.entries}

    def loss(parameters: dict[str, torch.Tensor], example: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(model.module, parameters, (example[None],)), label[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(tensors, x, y)
    parts = [
        torch.cat([gradients[f"{layer.name}.weight"].flatten(2), gradients[f"{layer.name}.bias"][:, :, None]], dim=2)
        for layer in layers
    ]
    flat = torch.cat([part.flatten(1) for part in parts], dim=1).double()
    full = flat.T @ flat / len(y)
    factors = kronecker.factors(worker.task, state["params"], client, torch.Generator(), "kfac")
    products = [torch.kron(b, a) for a, b in (factors[layer.name] for layer in layers)]
    blocks = torch.block_diag(*products).double()  # type: ignore[no-untyped-call]
    figure = Figure(figsize=(11, 5), layout="constrained")
    scale = float(full.abs().quantile(0.9999)) if full.numel() < 16_000_000 else float(full.abs().max())
    for axes, (title, matrix) in zip(
        figure.subplots(1, 2), (("empirical Fisher", full), ("Kronecker blocks", blocks)), strict=True
    ):
        image = axes.imshow(matrix.numpy(), cmap="RdBu_r", norm=SymLogNorm(scale / 1000, vmin=-scale, vmax=scale))
        axes.set_title(f"{title}, {len(full)} parameters")
    figure.colorbar(image, ax=axes, shrink=0.8)
    cells: list[dict[str, object]] = []
    start = 0
    for layer, part in zip(layers, parts, strict=True):
        here = slice(start, start + part[0].numel())
        start = here.stop
        exact, kept = full[here, here], blocks[here, here]
        cosine = float((exact * kept).sum() / (exact.norm() * kept.norm()))
        share = float(exact.square().sum() / full.square().sum())
        cells.append({"layer": f"{layer.name}: {layer.module}", "cosine": cosine, "share of the squared norm": share})
    inside = sum(float(str(cell["share of the squared norm"])) for cell in cells)
    text = "# FedLPA, figure 3: the Fisher matrix of a network and its Kronecker blocks\n\n"
    rows = [[str(c["layer"]), f"{c['cosine']:.3f}", f"{c['share of the squared norm']:.3f}"] for c in cells]
    text += report.markdown(["layer", "cosine of block and its approximation", "share of the squared norm"], rows)
    text += f"\nThe diagonal blocks hold {100 * inside:.1f} % of the squared norm of the whole.\n"
    report.write(arguments.to, "fedlpa_figure3", text + report.describe_notes(notes), cells)
    report.save_figure(figure, arguments.to, "fedlpa_figure3")


# Figure 6: two Gaussians


MEANS = np.array([[-1.0, 0.4], [1.2, 0.9]])
PRECISIONS = np.array([[[2.0, -1.5], [-1.5, 1.6]], [[1.2, 1.0], [1.0, 2.4]]])


def mean_of_product(precisions: Floats) -> Floats:
    return np.asarray(np.linalg.solve(precisions.sum(0), np.einsum("kij,kj->i", precisions, MEANS)))


def draw_contours(axes: "Axes", mean: Floats, precision: Floats, **style: Any) -> None:
    x, y = np.meshgrid(np.linspace(-4, 4, 300), np.linspace(-3, 5, 300))
    difference = np.stack([x, y], axis=-1) - mean
    axes.contour(x, y, np.einsum("...i,ij,...j", difference, precision, difference), levels=[0.5, 2, 4.5], **style)


def make_figure6(arguments: Namespace) -> None:
    from matplotlib.figure import Figure

    combined = {
        "FedAvg": MEANS.mean(0),
        "diagonal Fisher": mean_of_product(PRECISIONS * np.eye(2)),
        # one linear output with two inputs: A is the whole precision and B a number, so nothing is lost
        "Kronecker": mean_of_product(PRECISIONS),
    }
    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axes = figure.subplots()
    for mean, precision, color in zip(MEANS, PRECISIONS, ("C0", "C1"), strict=True):
        draw_contours(axes, mean, precision, colors=color, linewidths=0.8)
    draw_contours(axes, combined["Kronecker"], PRECISIONS.sum(0), colors="0.5", linestyles="--", linewidths=0.8)
    cells: list[dict[str, object]] = []
    for (name, mean), marker in zip(combined.items(), "sv*", strict=True):
        axes.plot(*mean, marker, ms=12 if marker == "*" else 8, label=name, c="black", mfc="white")
        log_density = -0.5 * sum(float((mean - m) @ p @ (mean - m)) for m, p in zip(MEANS, PRECISIONS, strict=True))
        cells.append({"way": name, "x": float(mean[0]), "y": float(mean[1]), "log density": log_density})
    axes.set(xlabel="weight 1", ylabel="weight 2", title="two clients' posteriors and their product (dashed)")
    axes.legend()
    rows = [[str(c["way"]), f"{c['x']:.3f}", f"{c['y']:.3f}", f"{c['log density']:.3f}"] for c in cells]
    text = "# FedLPA, figure 6: two Gaussians\n\nThe paper does not give its numbers; these are ours.\n\n"
    text += report.markdown(["way", "weight 1", "weight 2", "log density of the product, without its constant"], rows)
    report.write(arguments.to, "fedlpa_figure6", text, cells)
    report.save_figure(figure, arguments.to, "fedlpa_figure6")


ACCURACIES = ("1", "2", "3", "5", "6", "7", "8", "9", "10", "11")
COMMANDS: dict[str, Callable[[Namespace], None]] = {
    **{f"table{table}": partial(make_table, table) for table in ACCURACIES},
    **{f"table{table}": partial(make_costs, table) for table in ("4", "12")},
    **{f"figure{number}": partial(make_pictures, f"figure{number}") for number in (1, 4, 5)},
    "figure2": make_figure2,
    "figure3": make_figure3,
    "figure6": make_figure6,
}


def main() -> None:
    report.run_script(__doc__ or "", COMMANDS, [f"table{table}" for table in ACCURACIES])


if __name__ == "__main__":
    main()
