"""What the runner and the Bayesian methods cost, measured side by side.

    python benchmarks/overhead.py [--repeats 7]

The runner against a bare PyTorch loop that takes the same SGD steps. Ours is the whole round loop, with records and a
checkpoint after every round, on a test set of one example, so that evaluation does not count; the accuracy printed was
taken on training data afterwards. The bare loop copies the model for each client, trains it with torch.optim.SGD on
batches indexed out of a tensor (no DataLoader), and averages the parameters. Then a client's training with `fvb` and
with `fola` against FedAvg's, on LeNet, with `fedivon` against FedAvg's plain SGD, on LeNet and on a fully connected
network, and what FedLPA adds, on client and server. Two loops alternate within one
process on one thread; the median ratio counts.
"""

import argparse
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peers.work import Workload
from workloads import (
    CPU,
    GAUSSIAN,
    WORKLOADS,
    compare,
    describe,
    divide,
    load_data,
    make_experiment,
    make_task,
    run_bare,
    run_experiment,
    take_turns,
)

from bfl_bench.aggregators import rklb
from bfl_bench.data.dataset import Split
from bfl_bench.method import Client, Method
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fedivon import FedIvon
from bfl_bench.methods.fedlpa import FedLpa
from bfl_bench.methods.fola import Fola
from bfl_bench.methods.fvb import Fvb
from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import make_gaussian
from bfl_bench.models.networks import lenet, mlp

TRAINING: dict[str, Any] = {"batch_size": 64, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5}
ROUNDS = 3


def make_lenet(gaussian: bool) -> FlatModel:
    module = lenet((1, 28, 28), 10)
    if gaussian:
        module = make_gaussian(module, None, GAUSSIAN)
    return FlatModel(module, CPU)


def train_client(method: Method, model: FlatModel, data: Split, training: dict[str, Any] = TRAINING) -> None:
    task = make_task(model, (len(data),), epochs=1, **training)
    state = method.init(task, torch.Generator())
    client = Client(0, data, torch.arange(len(data)), None)
    method.client_update(task, method.broadcast(task, state), {}, client, torch.Generator().manual_seed(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for name in ("A", "B"):
        compare_runner(replace(WORKLOADS[name], rounds=ROUNDS), repeats)

    torch.manual_seed(0)
    data = Split(torch.rand(1280, 1, 28, 28), torch.randint(0, 10, (1280,)))
    fvb = Fvb("fvb", "size", rklb, 1.0, 1.0, "fixed", 1, [1e-10, 100.0])
    fola = Fola(
        *("fola", "size", None, True, 1.0, True),
        structure="diagonal",
        fisher="batch_gradient",
        evaluation="online",
        average_steps=True,
        batch_weight="share",
        round_scaling=True,
        gamma=0.0,
        eps=1e-5,
        server_mean="product",
    )
    fedavg = FedAvg("fedavg", "size")
    point, gaussian = make_lenet(False), make_lenet(True)
    for name, method, model in (("fvb", fvb, gaussian), ("fola", fola, point)):
        loops = {name: partial(train_client, method, model, data), "fedavg": partial(train_client, fedavg, point, data)}
        print(f"LeNet, 20 steps of 64: {name} / fedavg = {describe(divide(*compare(loops, repeats).values()))}")
    compare_fedivon(data, fedavg, repeats)
    compare_fedlpa(data, fedavg, repeats)


def compare_fedivon(data: Split, fedavg: Method, repeats: int) -> None:
    """What a draw and the curvature cost in every step."""
    fedivon = FedIvon(
        name="fedivon",
        weights="size",
        aggregator=None,
        start="server",
        ess="size",
        temperature=1.0,
        h0=5.0,
        beta1=0.9,
        beta2=0.9999,
        delta=1e-4,
        samples=1,
        clip=None,
        rescale=True,
        cosine_steps=None,
        cosine_floor=0.0,
    )
    dense = FlatModel(mlp((1, 28, 28), 10, [200, 200]), CPU)
    for title, model, batch_size in (("LeNet", make_lenet(False), 64), ("784-200-200-10", dense, 32)):
        training = {"batch_size": batch_size, "lr": 0.01}
        loops = {m.name: partial(train_client, m, model, data, training) for m in (fedivon, fedavg)}
        ratios = divide(*compare(loops, repeats).values())
        print(f"{title}, steps of {batch_size}: fedivon / fedavg = {describe(ratios)}")


def compare_runner(work: Workload, repeats: int) -> None:
    data = load_data(work)
    experiment = make_experiment(work, data, checkpoint_every=1)
    results = take_turns({"ours": lambda: run_experiment(experiment), "bare": lambda: run_bare(work, data)}, repeats)
    ours, bare = ([sum(result.rounds) for result in found] for found in results.values())
    accuracies = " and ".join(f"{found[-1].accuracy:.3f}" for found in results.values())
    title = f"{work.cohort} of {work.num_clients} clients, {work.samples} samples, epochs: {work.epochs}"
    print(f"{title}: ours / bare = {describe(divide(ours, bare))}; accuracy {accuracies}")


def compare_fedlpa(data: Split, fedavg: Method, repeats: int) -> None:
    """What FedLPA adds: a pass for the factors on the client, and on the server one of two solvers."""
    model = make_lenet(False)
    options: tuple[Any, ...] = (0.001, "trace", "kfac", 1e-8, 5000, 10_000, 1.0, [])
    fedlpa = FedLpa("fedlpa", "size", "cg", *options)
    loops = {m.name: partial(train_client, m, model, data) for m in (fedlpa, fedavg)}
    print(
        f"LeNet, one epoch of 20 steps of 64: fedlpa / fedavg = {describe(divide(*compare(loops, repeats).values()))}"
    )
    task = make_task(model, (128,) * 10, epochs=2, **TRAINING)
    state = fedlpa.init(task, torch.Generator())
    clients = [Client(i, data, part, None) for i, part in enumerate(torch.split(torch.arange(1280), 128))]
    replies = [
        (c.id, fedlpa.client_update(task, state, {}, c, torch.Generator().manual_seed(c.id)).message) for c in clients
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
