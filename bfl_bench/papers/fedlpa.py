"""Tables and figures of FedLPA out of finished runs.

    python scripts/fedlpa.py table1|...|table12|initials|merging|costs|figure1|figure2|figure3|figure4|figure5|figure6
        [--runs outputs] [--to outputs/report]

Liu et al., "FedLPA: One-shot Federated Learning with Layer-Wise Posterior Aggregation", NeurIPS 2024. Nothing is
trained: what is missing is named, with the lines that make it. conf/paper/fedlpa.yaml says which runs are whose.
Figures 1, 4 and 5 are t-SNE pictures of the networks' last hidden layer, figure 3 is a Fisher matrix and its blocks,
figure 6 needs no runs.
"""

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bfl_bench import records, report
from bfl_bench.papers.pages import Maker, Page
from bfl_bench.papers.spec import Cell
from bfl_bench.report import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bfl_bench.engines.worker import Worker

Floats = NDArray[Any]

PAPERS_COSTS = ("CIFAR-10, communication (MB), E=200", "CIFAR-10, computation (minutes), E=200")
SOLVERS = {"ea": "closed form (EA)", "gd": "gradient descent", "cg": "conjugate gradients"}


# Tables


def accuracies(cell: Cell, run: Run) -> dict[str, float]:
    """By solver, of FedLPA; the authors' rule takes the better of two on the test set. Percent."""
    final = run.final
    if not cell.label.startswith("FedLPA"):
        return {"": 100 * float(final["ga"] or 0)}
    values = {SOLVERS[run.config["method.solver"]]: float(final["ga"] or 0)}
    values |= {SOLVERS[s]: float(v) for s in SOLVERS if (v := final.get(f"ga@{s}")) is not None}
    if run.config["method.name"] == "fedlpa_released" and SOLVERS["ea"] in values:
        values["the better of EA and gradient descent on the test set"] = max(
            values[SOLVERS["ea"]], values[SOLVERS["gd"]]
        )
    return {f": lr {run.config['local.lr']}, {name}": 100 * value for name, value in values.items()}


def make_table(page: Page) -> None:
    paper = page.published("5" if page.table.name == "initials" else None)
    found: dict[tuple[str, str, str, str], list[float]] = {}
    for cell, run in page.entries:
        row, column = page.table.row(cell), page.table.column(cell)
        for solver, value in accuracies(cell, run).items():
            found.setdefault((row, column, column + solver, cell.own), []).append(value)
    lines: list[list[str]] = []
    output: list[dict[str, object]] = []
    for (row, column, name, own), values in sorted(found.items()):
        ours, theirs = report.summarise(values), paper.get((row, column))
        lines.append([row, name, *ours.compare(theirs), str(ours.num), own])
        output.append({"row": row, "method": name, "mean": ours.mean, "std": ours.std, "paper": theirs, "n": ours.num})
        output[-1]["set for this cell"] = own
    text = f"# FedLPA, {page.table.name.replace('table', 'table ')}: accuracy (%) after one round\n\n"
    text += "Ours: mean +- standard deviation over seeds. What "
    text += "follows the paper's +- is no standard deviation over its three partitions and is left out; (!): the "
    text += "difference is beyond our standard deviation.\n\n"
    head = ["cell", "method", "ours", "paper", "diff.", "seeds", "set for this cell"]
    if not any(own for *_, own in found):
        head, lines = head[:-1], [line[:-1] for line in lines]
    page.write(text + report.markdown(head, lines), output)


def make_costs(page: Page) -> None:
    """Bytes as they were sent, and seconds, each also as a multiple of FedAvg's in the same cell."""
    paper = page.published() if page.table.name.startswith("table") else {}
    cells: dict[tuple[str, str], list[dict[str, float]]] = {}
    for cell, run in page.entries:
        timing = records.read_table(run.folder / records.TIMING)[-1]
        client, server = float(timing["client_seconds"] or 0), float(timing["server_seconds"] or 0)
        found = {"megabytes": float(run.final["bytes_up"] or 0) / 1e6, "client_seconds": client}
        found |= {"server_seconds": server, "seconds": client + server}
        cells.setdefault((page.table.row(cell), cell.label), []).append(found)
    lines: list[list[str]] = []
    rows: list[dict[str, object]] = []
    for (row, method), members in sorted(cells.items()):
        median = {key: statistics.median(member[key] for member in members) for key in members[0]}
        fedavg = cells.get((row, "FedAvg"), [])
        ratios = [
            f"{median[key] / statistics.median(member[key] for member in fedavg):.2f}" if fedavg else "-"
            for key in ("megabytes", "seconds")
        ]
        printed = [
            f"{value:g} ({value / paper[quantity, 'FedAvg']:.2f})" if (value := paper.get((quantity, method))) else "-"
            for quantity in PAPERS_COSTS
        ]
        numbers = [f"{median['megabytes']:.2f}", f"{median['client_seconds']:.1f}", f"{median['server_seconds']:.1f}"]
        lines.append([row, method, str(len(members)), *numbers, *ratios, *(printed if paper else [])])
        rows.append({"cell": row, "method": method, "runs": len(members), **median})
    head = ["cell", "method", "runs", "MB sent by all clients", "client seconds", "server seconds"]
    head += ["MB / FedAvg's", "seconds / FedAvg's"]
    head += ["paper's MB (/ FedAvg's)", "paper's minutes (/ FedAvg's)"] if paper else []
    text = f"# FedLPA, {page.table.name}: what a round costs\n\n{report.markdown(head, lines)}"
    text += "\nThe paper's numbers are of CIFAR-10, 10 clients and E = 200. It prints 2.77 MB for FedLPA. By its own "
    text += "formula, the model and the upper triangles of all A and B, it is 7.16 MB: 4 bytes times 62 006 + 117 081, "
    text += "times 10. Ours: medians over runs; seconds on one thread.\n"
    page.write(text, rows)


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


def pictures_of(page: Page) -> Iterator[tuple[str, "Worker", Any]]:
    """Title, worker and parameters of every network that the figure shows."""
    from safetensors.torch import load_file

    from bfl_bench.build import reload

    line = f"bfl-paper run {page.table.full_name} force=true"
    for cell, run in page.entries:
        folder = run.path(line)
        report.need((folder / records.CHECKPOINT).exists(), f"{cell.label} that has its model", line)
        experiment, state = reload(folder)
        if page.table.name != "figure4":
            yield cell.label, experiment.worker, state["params"]
            continue
        report.need((folder / records.MESSAGES).exists(), f"{cell.label} that keeps its messages", line)
        for client in range(len(experiment.worker.task.sizes)):
            file = folder / records.MESSAGES / f"round-1-client-{client}.safetensors"
            yield f"client {client + 1}", experiment.worker, load_file(file)["params"]


def make_pictures(page: Page) -> None:
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    pictures = list(pictures_of(page))
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
    text = f"# FedLPA, {page.table.name}: t-SNE of the last hidden layer, 2000 training images of MNIST, beta 0.05, "
    shares = [[str(cell["network"]), f"{list(cell.values())[1]:.1f}"] for cell in cells]
    page.write(f"{text}seed {page.entries[0][0].seed}\n\n" + report.markdown(list(cells[0]), shares), cells)
    page.save_figure(figure)


def neighbour_agreement(points: Floats, labels: Floats) -> float:
    """Share of points whose nearest neighbour has the same label: a number beside the picture."""
    from sklearn.neighbors import NearestNeighbors

    _, nearest = NearestNeighbors(n_neighbors=2).fit(points).kneighbors(points)
    return float((labels[nearest[:, 1]] == labels).mean())


# Figure 2: more rounds


def curve_of(run: Run) -> list[float]:
    """Global accuracy in percent, round by round."""
    return [100 * value for value in run.column("ga")]


def curves_of(page: Page) -> dict[str, list[list[float]]]:
    """By label the curves of all seeds; a run that begins with another goes on where that one ended."""
    found = {(cell.label, cell.seed): curve_of(run) for cell, run in page.entries}
    begun = {start.label for cell, _ in page.entries for start in cell.starts.values()}
    curves: dict[str, list[list[float]]] = {}
    for cell, _ in page.entries:
        start = cell.starts.get("start_from")
        before = [] if start is None else found.get((start.label, start.seed))
        if cell.label not in begun and before is not None:
            curves.setdefault(cell.label, []).append([*before, *found[cell.label, cell.seed]])
    return curves


def make_figure2(page: Page) -> None:
    """Draw every method's mean over seeds, and write every round's."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    lines: list[list[str]] = []
    cells: list[dict[str, object]] = []
    curves = curves_of(page)
    num_rounds = max(len(curve) for found in curves.values() for curve in found)
    for (name, found), marker in zip(curves.items(), "osv^Dx*P<>", strict=False):
        stats = [report.summarise(values) for values in zip(*found, strict=True)]
        axes.plot(range(1, len(stats) + 1), [one.mean for one in stats], marker=marker, ms=4, label=name)
        shown = [one.describe() for one in stats]
        lines.append([name, str(len(found)), *shown, *["-"] * (num_rounds - len(shown))])
        for number, one in enumerate(stats, 1):
            cells.append({"method": name, "round": number, "accuracy": one.mean, "std": one.std, "n": one.num})
    axes.set(xlabel="round", ylabel="global accuracy (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    text = "# FedLPA, figure 2: MNIST, beta 0.5, accuracy (%) round by round\n\n"
    text += "Mean +- standard deviation over seeds.\n\n"
    text += report.markdown(["method", "seeds", *map(str, range(1, num_rounds + 1))], lines)
    page.write(text, cells)
    page.save_figure(figure)


# Figure 3: the Fisher matrix


def make_figure3(page: Page) -> None:
    """The empirical Fisher of a whole network and the blocks that FedLPA keeps of it, on 2000 training images."""
    import torch
    from matplotlib.colors import SymLogNorm
    from matplotlib.figure import Figure
    from torch.func import functional_call, grad, vmap
    from torch.nn.functional import cross_entropy

    from bfl_bench.build import reload
    from bfl_bench.inference import kronecker
    from bfl_bench.method import Client

    line = "bfl-paper run fedlpa_figure3"
    folder = page.runs[0].path(line)
    report.need((folder / records.CHECKPOINT).exists(), "Fig. 3 that has its model", line)
    experiment, state = reload(folder)
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
    page.write(text, cells)
    page.save_figure(figure)


# Figure 6: two Gaussians


MEANS = np.array([[-1.0, 0.4], [1.2, 0.9]])
PRECISIONS = np.array([[[2.0, -1.5], [-1.5, 1.6]], [[1.2, 1.0], [1.0, 2.4]]])


def mean_of_product(precisions: Floats) -> Floats:
    return np.asarray(np.linalg.solve(precisions.sum(0), np.einsum("kij,kj->i", precisions, MEANS)))


def draw_contours(axes: "Axes", mean: Floats, precision: Floats, **style: Any) -> None:
    x, y = np.meshgrid(np.linspace(-4, 4, 300), np.linspace(-3, 5, 300))
    difference = np.stack([x, y], axis=-1) - mean
    axes.contour(x, y, np.einsum("...i,ij,...j", difference, precision, difference), levels=[0.5, 2, 4.5], **style)


def make_figure6(to: Path) -> None:
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
    report.write(to, "fedlpa_figure6", text, cells)
    report.save_figure(figure, to, "fedlpa_figure6")


ACCURACIES = ("1", "2", "3", "5", "6", "7", "8", "9", "10", "11")
MAKERS: dict[str, Maker] = {
    **{f"table{table}": make_table for table in ACCURACIES},
    **dict.fromkeys(("initials", "merging"), make_table),
    **dict.fromkeys(("table4", "table12", "costs"), make_costs),
    **dict.fromkeys(("figure1", "figure4", "figure5"), make_pictures),
    "figure2": make_figure2,
    "figure3": make_figure3,
}
WITHOUT_RUNS: dict[str, Callable[[Path], None]] = {"figure6": make_figure6}
