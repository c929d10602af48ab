"""Clients in lockstep (`engine=stacked`) beside one client after the other: processor time, in turns, medians.

    pip install -e '.[stacked]' && python benchmarks/lockstep.py [--repeats 7] [--only PART_OF_A_NAME]

What is timed is a round's local updates as the round loop has them from an engine, on one thread, without evaluation.
Clients have ten minibatches of 32 and one epoch, or where it says so, sizes of a Dirichlet distribution with the same
mean. Then come the networks of docs/benchmark.md that can be stacked. A ratio is taken within a turn.
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

BATCH_SIZE, BATCHES = 32, 10
ENGINES: tuple[Engine, ...] = (Sequential("sequential"), Stacked("stacked", 100))
PLAIN = Workload("mlp", num_clients=1, cohort=1, samples=1, epochs=1, batch_size=BATCH_SIZE, rounds=1, lr=0.05)


@dataclass(frozen=True)
class Case:
    name: str
    widths: tuple[int, ...]
    clients: int = 100
    batches: int = BATCHES
    batch_size: int = BATCH_SIZE
    epochs: int = 1
    unequal: bool = False
    bayesian: bool = False
    momentum: float = 0.0


CASES = (
    Case("digits, MLP", (64, 32, 32, 10)),
    Case("digits, MLP", (64, 100, 100, 10)),
    Case("HAR, MLP", (561, 100, 6)),
    Case("MNIST, softmax", (784, 10)),
    Case("MNIST, MLP", (784, 100, 100, 10)),
)


def make_worker(case: Case) -> Worker:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(case.widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    module: nn.Module = nn.Sequential(*layers[:-1])
    if case.bayesian:
        module = make_gaussian(module, None, GAUSSIAN)
    size = case.batch_size * case.batches
    sizes = [size] * case.clients
    if case.unequal:
        shares = np.random.default_rng(0).dirichlet([1.0] * case.clients)
        sizes = [max(1, round(size * case.clients * share)) for share in shares]
    data = Split(torch.randn(sum(sizes), case.widths[0]), torch.randint(case.widths[-1], (sum(sizes),)))
    task = make_task(
        FlatModel(module, CPU),
        tuple(sizes),
        epochs=case.epochs,
        batch_size=case.batch_size,
        lr=0.05,
        momentum=case.momentum,
    )
    task = replace(task, data=replace(task.data, input_shape=case.widths[:1]))
    worker = make_experiment(PLAIN, Split(data.x[:1, None, None], data.y[:1])).worker
    worker = replace(worker, task=task, train=data, client_indices=torch.split(torch.arange(len(data)), sizes))
    if case.bayesian:
        worker = replace(worker, method=Fvb("fvb", "size", eaa, 1.0, 1.0, "fixed", 1, [1e-10, 100.0]))
    return worker


def run_round(runner: Runner, worker: Worker) -> list[Reply]:
    state = worker.method.init(worker.task, stream(0, "init"))
    broadcast = worker.method.broadcast(worker.task, state)
    jobs = [
        Job(
            round=1,
            client_id=client,
            memory=worker.method.init_client(worker.task, state, client),
            evaluate_local=False,
        )
        for client in range(len(worker.client_indices))
    ]
    return list(runner.run(broadcast, jobs))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    set_up_process(threads=1)
    for case in CASES:
        worker = make_worker(case)
        with ExitStack() as stack:
            runners = [stack.enter_context(engine.start(worker)) for engine in ENGINES]
            first, second = (run_round(runner, worker) for runner in runners)
            ratios = []
            secs = []
            for _ in range(options.repeats):
                seconds = []
                for runner in runners:
                    begun = time.process_time()
                    run_round(runner, worker)
                    seconds.append(time.process_time() - begun)
                ratios.append(seconds[0] / seconds[1])
                secs.append(seconds)
        apart = (
            max(
                float((a.local["params"] - b.local["params"]).norm() / a.local["params"].norm())
                for a, b in zip(first, second, strict=True)
                if False
            )
            if False
            else 0
        )
        n = case.clients * case.batches
        print(
            case.name,
            case.widths,
            worker.task.model.layout.size,
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            "us per step: " + " ".join(f"{min(s[i] for s in secs) / n * 1e6:.0f}" for i in (0, 1)),
            flush=True,
        )


if __name__ == "__main__":
    main()
