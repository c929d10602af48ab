"""Clients in lockstep (`engine=stacked`) beside one client after the other: processor time, in turns, medians.

    pip install -e '.[stacked]' && python benchmarks/lockstep.py [--repeats 7] [--only PART_OF_A_ROW]

What is timed is what the round loop asks of an engine in a round, the local updates of 100 clients, on one thread and
without evaluation. Clients have ten minibatches of 32 and take one epoch of plain SGD, or as it says. With unequal
sizes these are shares of as many examples from a Dirichlet distribution with concentration 1. A ratio, of sequential to
stacked, is taken within a turn; in the last column stands the largest distance of a client's message from sequential's.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from peers.work import Workload
from torch import nn
from workloads import CPU, GAUSSIAN, make_experiment, make_task

from bfl_bench.aggregators import eaa
from bfl_bench.data.dataset import Split
from bfl_bench.engines.process_setup import set_up_process
from bfl_bench.engines.stacked import Stacked
from bfl_bench.engines.worker import Engine, Job, Reply, Runner, Sequential, Worker
from bfl_bench.methods.fvb import Fvb
from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import make_gaussian
from bfl_bench.rng import stream

ENGINES: tuple[Engine, ...] = (Sequential("sequential"), Stacked("stacked", 100))
SMALLEST = Workload("mlp", num_clients=1, cohort=1, samples=1, epochs=1, batch_size=1, rounds=1, lr=0.05, side=1)


@dataclass(frozen=True)
class Case:
    name: str
    widths: tuple[int, ...]
    clients: int = 100
    samples: int = 320
    epochs: int = 1
    momentum: float = 0.0
    unequal: bool = False
    gaussian: bool = False


DIGITS, LARGER, HAR = (64, 32, 32, 10), (64, 100, 100, 10), (561, 100, 6)
CASES = (
    Case("digits", DIGITS),
    Case("digits", LARGER),
    Case("HAR", HAR),
    Case("MNIST", (784, 10)),
    Case("MNIST", (784, 100, 100, 10)),
    Case("digits, 5 epochs", DIGITS, epochs=5),
    Case("digits, unequal sizes", DIGITS, unequal=True),
    Case("digits, unequal sizes", LARGER, unequal=True),
    Case("digits, momentum", DIGITS, momentum=0.9),
    Case("digits, fvb", DIGITS, gaussian=True),
    Case("digits, fvb", LARGER, gaussian=True),
    Case("A of benchmark.md", (784, 200, 200, 10), clients=10, samples=600, epochs=5),
    Case("B of benchmark.md", (784, 200, 200, 10), clients=50, samples=60),
    Case("`many` of benchmark.md", (64, 32, 32, 10), samples=20, epochs=2),
)


def make_worker(case: Case) -> Worker:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(case.widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    module: nn.Module = nn.Sequential(*layers[:-1])
    if case.gaussian:
        module = make_gaussian(module, None, GAUSSIAN)
    sizes = [case.samples] * case.clients
    if case.unequal:
        shares = np.random.default_rng(0).dirichlet([1.0] * case.clients)
        sizes = [max(1, round(case.samples * case.clients * share)) for share in shares]
    data = Split(torch.randn(sum(sizes), case.widths[0]), torch.randint(case.widths[-1], (sum(sizes),)))
    local = {"epochs": case.epochs, "batch_size": 32, "lr": 0.05, "momentum": case.momentum}
    task = make_task(FlatModel(module, CPU), tuple(sizes), **local)
    task = replace(task, data=replace(task.data, input_shape=case.widths[:1]))
    worker: Worker = make_experiment(SMALLEST, Split(data.x[:1, None, None, :1], data.y[:1])).worker
    indices = torch.split(torch.arange(len(data)), sizes)
    worker = replace(worker, task=task, train=data, client_indices=indices)
    if case.gaussian:
        worker = replace(worker, method=Fvb("fvb", "size", eaa, 1.0, 1.0, "fixed", 1, [1e-10, 100.0]))
    return worker


def run_round(runner: Runner, worker: Worker) -> list[Reply]:
    state = worker.method.init(worker.task, stream(0, "init"))
    broadcast = worker.method.broadcast(worker.task, state)
    clients = range(len(worker.client_indices))
    return list(
        runner.run(broadcast, [Job(round=1, client_id=id_, memory={}, evaluate_local=False) for id_ in clients])
    )


def compare_messages(sequential: list[Reply], stacked: list[Reply]) -> float:
    pairs = [(a.message["params"], b.message["params"]) for a, b in zip(sequential, stacked, strict=True)]
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    set_up_process(threads=1)
    print("| network | parameters | clients | sequential / stacked (minimum, maximum) | largest distance |")
    print("|---|---|---|---|---|")
    for case in CASES:
        shape = "-".join(map(str, case.widths))
        if options.only not in f"{case.name}, {shape}":
            continue
        worker, ratios = make_worker(case), list[float]()
        with ExitStack() as stack:
            runners = [stack.enter_context(engine.start(worker)) for engine in ENGINES]
            apart = compare_messages(*(run_round(runner, worker) for runner in runners))
            for _ in range(options.repeats):
                seconds = []
                for runner in runners:
                    begun = time.process_time()
                    run_round(runner, worker)
                    seconds.append(time.process_time() - begun)
                ratios.append(seconds[0] / seconds[1])
        numbers = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
        size = worker.task.model.layout.size
        print(f"| {case.name}, {shape} | {size} | {case.clients} | {numbers} | {apart:.0e} |", flush=True)


if __name__ == "__main__":
    main()
