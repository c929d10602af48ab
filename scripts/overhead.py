"""What the runner and the Bayesian methods cost, measured side by side.

    python scripts/overhead.py [--repeats 7]

The runner against a bare PyTorch loop that takes the same SGD steps. Ours is the whole round loop, with records and a
checkpoint after every round, on a test set of one example, so that evaluation does not count; the accuracy printed was
taken on training data afterwards. The bare loop copies the model for each client, trains it with torch.optim.SGD on
batches indexed out of a tensor (no DataLoader), and averages the parameters. Then a client's training with `fvb` and
with `fola` against FedAvg's, on LeNet, and what FedLPA adds, on client and server. Two loops alternate within one
process on one thread; the median ratio counts.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bfl_bench.aggregators import rklb
from bfl_bench.data.dataset import Split
from bfl_bench.engine import EvalSettings, Sequential, Worker
from bfl_bench.flat import FlatModel
from bfl_bench.method import Client, LocalSettings, Method, Task
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fedlpa import FedLpa
from bfl_bench.methods.fola import Fola
from bfl_bench.methods.fvb import Fvb
from bfl_bench.models.gaussian import GaussianSettings, make_gaussian
from bfl_bench.models.networks import lenet, mlp
from bfl_bench.run import Experiment, run

Loop = Callable[[Experiment], nn.Module]
LR, BATCH_SIZE, ROUNDS = 0.01, 32, 3
WORKLOADS = {
    "10 of 100 clients, 600 samples, 5 epochs": (100, 10, 600, 5),
    "50 of 1000 clients, 60 samples, 1 epoch": (1000, 50, 60, 1),
}


def make_experiment(num_clients: int, cohort: int, samples: int, epochs: int) -> Experiment:
    torch.manual_seed(0)
    num_samples = num_clients * samples
    y = torch.randint(0, 10, (num_samples,))
    x = torch.randn(num_samples, 1, 28, 28) + 0.3 * torch.randn(10, 1, 28, 28)[y]
    model = FlatModel(mlp((1, 28, 28), 10, [200, 200]), torch.device("cpu"))
    task = Task(model, LocalSettings(epochs, BATCH_SIZE, LR, 0.0, 0.0, None), 1.0, (samples,) * num_clients)
    worker = Worker(
        task=task,
        method=FedAvg("fedavg", "size"),
        train=Split(x, y),
        test=Split(x[:1], y[:1]),
        augment=None,
        client_indices=tuple(torch.arange(num_samples).view(num_clients, samples)),
        settings=EvalSettings(ROUNDS, ROUNDS + 1, 1000, 1, 1, 15, 0.0, {}, [], 2, []),
        seed=0,
    )
    return Experiment(worker, Sequential("sequential"), 0, ROUNDS, cohort, 1, {})


def run_ours(experiment: Experiment) -> nn.Module:
    model = experiment.worker.task.model
    with tempfile.TemporaryDirectory() as folder:
        run(experiment, Path(folder), lambda round_, row: None)
    return model.module  # the evaluation of the last round left the final global model in it


def run_bare(experiment: Experiment) -> nn.Module:
    worker, epochs = experiment.worker, experiment.worker.task.local.epochs
    tensors = worker.task.model.layout.to_state_dict(worker.task.model.initial)
    model = mlp((1, 28, 28), 10, [200, 200])
    model.load_state_dict(tensors)
    for round_ in range(1, ROUNDS + 1):
        cohort = experiment.cohort(round_)
        total = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for client in cohort:
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=LR)
            indices = worker.client_indices[client]
            for _ in range(epochs):
                for batch in torch.split(indices[torch.randperm(len(indices))], BATCH_SIZE):
                    optimizer.zero_grad()
                    cross_entropy(local(worker.train.x[batch]), worker.train.y[batch]).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
            for sum_, parameter in zip(total, local.parameters(), strict=True):
                sum_ += parameter.detach() / len(cohort)
        with torch.no_grad():
            for parameter, mean in zip(model.parameters(), total, strict=True):
                parameter.copy_(mean)
    return model


def make_lenet(gaussian: bool) -> FlatModel:
    module = lenet((1, 28, 28), 10)
    if gaussian:
        module = make_gaussian(module, None, GaussianSettings("auto", "network", -9.0, 0.001, "none", [-8.0, 8.0]))
    return FlatModel(module, torch.device("cpu"))


def train_client(method: Method, model: FlatModel, data: Split) -> None:
    settings = GaussianSettings("auto", "network", -9.0, 0.001, "none", [-8.0, 8.0])
    task = Task(model, LocalSettings(1, 64, LR, 0.9, 1e-5, None), 1.0, (len(data),), settings)
    state = method.init(task, torch.Generator())
    client = Client(0, data, torch.arange(len(data)), None)
    method.client_update(task, method.broadcast(task, state), None, client, torch.Generator().manual_seed(0))


def compare(loops: Mapping[str, Callable[[], object]], repeats: int) -> list[float]:
    """Ratios of the first loop's time to the second's; the two alternate, and the first time does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(repeats + 1):
        for name, loop in loops.items():
            started = time.perf_counter()
            loop()
            seconds[name].append(time.perf_counter() - started)
    first, second = (times[1:] for times in seconds.values())
    return [a / b for a, b in zip(first, second, strict=True)]


def describe(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} (median of {len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for title, workload in WORKLOADS.items():
        experiment = make_experiment(*workload)
        models: dict[str, nn.Module] = {}

        def run_one(name: str, loop: Loop, models: dict[str, nn.Module] = models, of: Experiment = experiment) -> None:
            models[name] = loop(of)

        loops = {name: partial(run_one, name, loop) for name, loop in (("ours", run_ours), ("bare", run_bare))}
        ratios = compare(loops, repeats)
        x, y = experiment.worker.train.x[:5000], experiment.worker.train.y[:5000]
        with torch.inference_mode():
            accuracies = [f"{(model(x).argmax(1) == y).float().mean():.3f}" for model in models.values()]
        print(f"{title}: ours / bare = {describe(ratios)}; accuracy {' and '.join(accuracies)}")

    torch.manual_seed(0)
    data = Split(torch.rand(1280, 1, 28, 28), torch.randint(0, 10, (1280,)))
    fvb = Fvb("fvb", rklb, "size", 1.0, 1.0, "fixed", 1, [1e-10, 100.0])
    fola = Fola("fola", None, "size", True, 1.0, True, "diagonal", "batch_gradient", "online", True, True, 0.0, 1e-5)
    fedavg = FedAvg("fedavg", "size")
    point, gaussian = make_lenet(False), make_lenet(True)
    for name, method, model in (("fvb", fvb, gaussian), ("fola", fola, point)):
        loops = {name: partial(train_client, method, model, data), "fedavg": partial(train_client, fedavg, point, data)}
        print(f"LeNet, 20 steps of 64: {name} / fedavg = {describe(compare(loops, repeats))}")
    compare_fedlpa(data, fedavg, repeats)


def compare_fedlpa(data: Split, fedavg: Method, repeats: int) -> None:
    """What FedLPA adds: a pass for the factors on the client, and on the server one of two solvers."""
    model = make_lenet(False)
    options: tuple[Any, ...] = (0.001, "trace", "kfac", 1e-8, 5000, 10_000, 1.0, [])
    fedlpa = FedLpa("fedlpa", "size", "cg", *options)
    loops = {m.name: partial(train_client, m, model, data) for m in (fedlpa, fedavg)}
    print(f"LeNet, one epoch of 20 steps of 64: fedlpa / fedavg = {describe(compare(loops, repeats))}")
    task = Task(model, LocalSettings(2, 64, LR, 0.9, 1e-5, None), 1.0, (128,) * 10)
    state = fedlpa.init(task, torch.Generator())
    clients = [Client(i, data, part, None) for i, part in enumerate(torch.split(torch.arange(1280), 128))]
    replies = [
        (c.id, fedlpa.client_update(task, state, None, c, torch.Generator().manual_seed(c.id)).message) for c in clients
    ]
    seconds = {}
    for solver in ("cg", "gd"):
        started = time.perf_counter()
        _, metrics = replace(fedlpa, solver=solver).server_update(task, state, iter(replies), torch.Generator())
        seconds[solver] = time.perf_counter() - started
        print(f"server, 10 clients, {solver}: {seconds[solver]:.2f} s, relative residual {metrics['residual']:.1e}")
    print(f"server: gd / cg = {seconds['gd'] / seconds['cg']:.1f}")


if __name__ == "__main__":
    main()
