"""The workloads of the benchmark, run by bfl-bench and by a bare PyTorch loop.

    python -c 'import workloads; workloads.main()' ours|processes|bare '{"network": "mlp", ...}'

runs one of them in a process of its own and prints a line of JSON.
"""

import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from peers.work import (
    LOG_VARIANCE,
    LOG_VARIANCE_INIT,
    LOG_VARIANCE_INIT_STD,
    NUM_CLASSES,
    Result,
    Workload,
    accuracy_of,
    loss_of,
    make_data,
    make_network,
    peak_mb,
    print_result,
)
from torch import Tensor, nn

from bfl_bench import records
from bfl_bench.aggregators import eaa
from bfl_bench.aggregators.server_step import ServerStep
from bfl_bench.data.dataset import Split
from bfl_bench.engines.process_setup import set_up_process
from bfl_bench.engines.processes import Processes
from bfl_bench.engines.worker import TEST, Engine, EvalSettings, EvaluationSet, Sequential, Worker
from bfl_bench.likelihood import Categorical
from bfl_bench.method import DataInfo, LocalSettings, Method, Task
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fvb import Fvb
from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import GaussianSettings, make_gaussian
from bfl_bench.models.networks import lenet, mlp
from bfl_bench.run.checkpoint import CheckpointFolder
from bfl_bench.run.loop import Experiment, run
from bfl_bench.run.observers import RunInfo

T = TypeVar("T")

CPU = torch.device("cpu")
WORKERS = 2
GAUSSIAN = GaussianSettings("auto", "network", LOG_VARIANCE_INIT, LOG_VARIANCE_INIT_STD, "none", [-8.0, 8.0])
ENGINES: dict[str, Engine] = {"ours": Sequential("sequential"), "processes": Processes("processes", WORKERS)}
LENET = Workload(
    "lenet", num_clients=10, cohort=10, samples=6000, epochs=1, batch_size=64, rounds=3, lr=0.05, signal=0.5
)
WORKLOADS = {
    "A": Workload("mlp", num_clients=100, cohort=10, samples=600, epochs=5, batch_size=32, rounds=5, lr=0.01),
    "B": Workload("mlp", num_clients=1000, cohort=50, samples=60, epochs=1, batch_size=32, rounds=5, lr=0.1),
    "C": LENET,
    "D": replace(LENET, bayesian=True),
}


def make_experiment(
    work: Workload, data: Split, engine: Engine = ENGINES["ours"], checkpoint_every: int | None = None
) -> Experiment:
    """Evaluated once, after the last round, on one example; a checkpoint then, or more often where it is asked for."""
    torch.manual_seed(work.seed)
    shape = tuple(data.x.shape[1:])
    module = mlp(shape, NUM_CLASSES, [work.hidden] * 2) if work.network == "mlp" else lenet(shape, NUM_CLASSES)
    method: Method = FedAvg("fedavg", "size")
    if work.bayesian:
        module = make_gaussian(module, None, GAUSSIAN)
        method = Fvb("fvb", "size", eaa, 1.0, 1.0, "fixed", 1, [1e-10, 100.0])
    sizes = (work.samples,) * work.num_clients
    task = make_task(FlatModel(module, CPU), sizes, epochs=work.epochs, batch_size=work.batch_size, lr=work.lr)
    worker = Worker(
        task=task,
        method=method,
        train=data,
        sets={TEST: EvaluationSet(Split(data.x[:1], data.y[:1]))},
        augment=None,
        client_indices=tuple(rows.clone() for rows in torch.arange(len(data)).view(work.num_clients, work.samples)),
        settings=EvalSettings(
            every=work.rounds,
            local_every=work.rounds + 1,
            scored="test",
            batch_size=1000,
            draws=1,
            local_draws=1,
            local_share=1.0,
            predictive="auto",
            also_predict=[],
            prior_precision="auto",
            laplace_layers="all",
            ece_bins=15,
            nll_epsilon=0.0,
            uncertainty=False,
            posterior=False,
            truth=None,
            ood={},
            shift=[],
            severities=[],
            also_aggregate={},
            weight_rounds=[],
            weight_points=2,
            keep_messages=[],
            unseen_steps=[],
            personalise=[],
            personalise_rule="wb",
        ),
        seed=work.seed,
        rounds=work.rounds,
    )
    return Experiment(
        worker=worker,
        engine=engine,
        seed=work.seed,
        cohort_size=work.cohort,
        checkpoint_every=checkpoint_every or work.rounds,
        partition_info={},
    )


def make_task(model: FlatModel, sizes: tuple[int, ...], **local: Any) -> Task:
    """A task of ten classes with plain SGD, on clients and server."""
    values: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "clip": None, "optimizer": "sgd"}
    values |= {"betas": [0.9, 0.999], "schedule": "constant"} | local
    return Task(
        model=model,
        likelihood=Categorical(NUM_CLASSES),
        data=DataInfo((1, 28, 28), torch.zeros(()), torch.ones(())),
        local=LocalSettings(**values),
        server=ServerStep(rule="sgd", lr=1.0, momentum=0.0, beta2=0.99, tau=1e-3, bias_correction=False),
        sizes=sizes,
        initials=model.initial[None],
        gaussian=GAUSSIAN,
    )


class Clock:
    """An observer that notes how long each round takes and, where it is asked for, the peak memory after it."""

    def __init__(self, with_memory: bool, between_rounds: Callable[[], object] | None = None) -> None:
        self.rounds: list[float] = []
        self.peaks: list[float] = []
        self._with_memory, self._between_rounds = with_memory, between_rounds
        self.begin_round()

    def begin(self, info: RunInfo) -> None:
        return

    def round(self, round_: int, row: object) -> None:
        self.end_round()
        if self._between_rounds is not None:
            self._between_rounds()
            self.begin_round()

    def end(self, summary: object) -> None:
        return

    def begin_round(self) -> None:
        self._before = time.perf_counter()

    def end_round(self) -> None:
        """The next one begins."""
        self.rounds.append(time.perf_counter() - self._before)
        if self._with_memory:
            self.peaks.append(peak_mb())
        self.begin_round()


def run_experiment(
    experiment: Experiment, with_memory: bool = False, between_rounds: Callable[[], object] | None = None
) -> Result:
    worker, model = experiment.worker, experiment.worker.task.model
    clock = Clock(with_memory, between_rounds)
    with tempfile.TemporaryDirectory() as folder:
        run(experiment, Path(folder), [clock])
        saved = CheckpointFolder(Path(folder) / records.CHECKPOINT).load(CPU)
    assert saved is not None
    model.load(saved.state["params"])
    accuracy = accuracy_of(model.module, worker.train.x, worker.train.y)
    return Result(clock.rounds, experiment.count_steps(), accuracy, clock.peaks)


def run_ours(work: Workload, data: Split, engine: str = "ours", with_memory: bool = False) -> Result:
    return run_experiment(make_experiment(work, data, ENGINES[engine]), with_memory)


def run_in_turns(work: Workload, data: Split) -> tuple[Result, Result]:
    """Ours and the bare loop, a round of one and a round of the other: what else the machine does falls on both."""
    results: list[Result] = []
    bare = bare_rounds(work, data)
    ours = run_experiment(make_experiment(work, data), between_rounds=lambda: results.append(next(bare)))
    return ours, results[-1]


def run_bare(work: Workload, data: Split, with_memory: bool = False) -> Result:
    *_, result = bare_rounds(work, data, with_memory)
    return result


def bare_rounds(work: Workload, data: Split, with_memory: bool = False) -> Iterator[Result]:
    """What one writes by hand: copy the model for each client, train the copy, average the parameters.

    Gives what has been found so far after each round.
    """
    model = make_network(work)
    indices = torch.arange(len(data)).view(work.num_clients, work.samples)
    steps = 0
    clock = Clock(with_memory)
    for _ in range(work.rounds):
        clock.begin_round()
        total = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for client in torch.randperm(work.num_clients)[: work.cohort].tolist():
            local = copy.deepcopy(model)
            steps += train_bare(local, work, data, indices[client])
            for sum_, (name, parameter) in zip(total, local.named_parameters(), strict=True):
                sum_ += averaged(name, parameter.detach()) / work.cohort
        with torch.no_grad():
            for (name, parameter), mean in zip(model.named_parameters(), total, strict=True):
                parameter.copy_(mean.log() if name.endswith(LOG_VARIANCE) else mean)
        clock.end_round()
        yield Result(clock.rounds, steps, accuracy_of(model, data.x, data.y), clock.peaks)


def train_bare(local: nn.Module, work: Workload, data: Split, indices: Tensor) -> int:
    """The number of steps taken."""
    local.train()
    optimizer = torch.optim.SGD(local.parameters(), lr=work.lr)
    steps = 0
    for _ in range(work.epochs):
        for batch in torch.split(indices[torch.randperm(len(indices))], work.batch_size):
            optimizer.zero_grad()
            loss_of(work, local, data.x[batch], data.y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps += 1
    return steps


def averaged(name: str, parameter: Tensor) -> Tensor:
    """Means are averaged as they are, variances in place of their logarithms."""
    return parameter.exp() if name.endswith(LOG_VARIANCE) else parameter


def load_data(work: Workload) -> Split:
    return Split(*make_data(work))


def take_turns(loops: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """What each loop gives back, one after the other again and again; the first time does not count."""
    found: dict[str, list[T]] = {name: [] for name in loops}
    for _ in range(repeats + 1):
        for name, loop in loops.items():
            found[name].append(loop())
    return {name: results[1:] for name, results in found.items()}


def compare(loops: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each loop."""
    return take_turns({name: partial(seconds_of, loop) for name, loop in loops.items()}, repeats)


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def divide(first: Iterable[float], second: Iterable[float]) -> list[float]:
    return [a / b for a, b in zip(first, second, strict=True)]


def describe(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} (median of {len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f})"


def main() -> None:
    loop, work = sys.argv[1], Workload(**json.loads(sys.argv[2]))
    if loop == "bare":
        torch.set_num_threads(1)
        print_result(run_bare(work, load_data(work), with_memory=True))
    else:
        set_up_process(threads=1)
        print_result(run_ours(work, load_data(work), loop, with_memory=True))
