"""What the runner costs over a bare PyTorch loop that takes the same SGD steps, measured side by side.

    python scripts/overhead.py [--repeats 7]

Ours is the whole round loop, with records and a checkpoint after every round, on a test set of one example, so that
evaluation does not count; the accuracy printed was taken on training data afterwards. The bare loop copies the model
for each client, trains it with torch.optim.SGD on batches indexed out of a tensor (no DataLoader), and averages the
parameters. The two alternate within one process on one thread; the median of the ratios counts.
"""

import argparse
import copy
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bfl_bench.data.dataset import Split
from bfl_bench.engine import EvalSettings, Sequential, Worker
from bfl_bench.flat import FlatModel
from bfl_bench.method import LocalSettings, Task
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.models.networks import mlp
from bfl_bench.run import Experiment, run

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
        settings=EvalSettings(ROUNDS, ROUNDS + 1, 1000, 1, 1, 15, 0.0, {}),
        seed=0,
    )
    return Experiment(worker, Sequential("sequential"), 0, ROUNDS, cohort, 1, {})


def run_ours(experiment: Experiment, start: Tensor) -> nn.Module:
    model = experiment.worker.task.model
    model.load(start)
    with tempfile.TemporaryDirectory() as folder:
        run(experiment, Path(folder), lambda round_, row: None)
    return model.module  # the evaluation of the last round left the final global model in it


def run_bare(experiment: Experiment, start: Tensor) -> nn.Module:
    worker, epochs = experiment.worker, experiment.worker.task.local.epochs
    tensors = worker.task.model.layout.to_state_dict(start)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for title, workload in WORKLOADS.items():
        experiment = make_experiment(*workload)
        start = experiment.worker.task.model.vector.clone()
        seconds: dict[str, list[float]] = {"ours": [], "bare": []}
        accuracy = {}
        x, y = experiment.worker.train.x[:5000], experiment.worker.train.y[:5000]
        for repeat in range(repeats + 1):
            for name, loop in (("ours", run_ours), ("bare", run_bare)):
                started = time.perf_counter()
                model = loop(experiment, start)
                if repeat > 0:  # the first time warms up
                    seconds[name].append(time.perf_counter() - started)
                with torch.inference_mode():
                    accuracy[name] = float((model(x).argmax(1) == y).float().mean())
        ratios = [ours / bare for ours, bare in zip(seconds["ours"], seconds["bare"], strict=True)]
        print(
            f"{title}: ours / bare = {statistics.median(ratios):.3f} (median of {repeats}, "
            f"{min(ratios):.3f} to {max(ratios):.3f}); accuracy {accuracy['ours']:.3f} and {accuracy['bare']:.3f}"
        )


if __name__ == "__main__":
    main()
