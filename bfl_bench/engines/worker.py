"""Engines map jobs (data, not closures) to replies, in the order of the jobs. A job is one client's turn."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch

from bfl_bench.checks import AtLeast
from bfl_bench.data.dataset import Augment, Split
from bfl_bench.errors import DivergedError
from bfl_bench.evaluation.predict import Scores, predict, score
from bfl_bench.inference.precision import Gaussian
from bfl_bench.method import Client, Method, Task, Tensors
from bfl_bench.rng import stream


@dataclass(frozen=True)
class EvalSettings:
    """When and how models are evaluated."""

    every: Annotated[int, AtLeast(1)]
    local_every: Annotated[int, AtLeast(0)]
    batch_size: Annotated[int, AtLeast(1)]
    draws: Annotated[int, AtLeast(1)]
    local_draws: Annotated[int, AtLeast(1)]
    ece_bins: Annotated[int, AtLeast(1)]
    nll_epsilon: Annotated[float, AtLeast(0)]
    also_aggregate: dict[str, Any]  # names of rules, and their configs
    weight_rounds: list[Annotated[int, AtLeast(1)]]
    weight_points: Annotated[int, AtLeast(2)]
    keep_messages: list[Annotated[int, AtLeast(1)]]


@dataclass(frozen=True)
class Job:
    round: int
    client_id: int
    memory: Tensors | None
    evaluate_local: bool


@dataclass(frozen=True)
class Reply:
    client_id: int
    message: Tensors
    memory: Tensors | None
    metrics: dict[str, float]
    scores: Scores | None  # of the local model on the global test set
    own_scores: Scores | None  # of the local model on the client's own test examples
    train_seconds: float
    evaluation_seconds: float


@dataclass(frozen=True)
class Worker:
    """Everything a job needs besides itself: the same in every process of a run."""

    task: Task
    method: Method
    train: Split
    test: Split
    augment: Augment | None
    client_indices: tuple[torch.Tensor, ...]  # per client, where `train` lies
    settings: EvalSettings
    seed: int
    known: Gaussian | None = None  # a posterior that is taken as the true one
    own_test: tuple[torch.Tensor, ...] | None = None  # per client, its own examples in the test set

    def run(self, broadcast: Tensors, job: Job) -> Reply:
        started = time.perf_counter()
        client = Client(job.client_id, self.train, self.client_indices[job.client_id], self.augment)
        names = ("client", job.round, job.client_id)
        update = self.method.client_update(self.task, broadcast, job.memory, client, stream(self.seed, *names))
        where = f"round {job.round}, client {job.client_id}"
        check_finite({**update.message, **update.metrics}, where)
        check_finite({k: v for k, v in update.local.items() if v is not update.message.get(k)}, where)
        trained = time.perf_counter()
        scores = self.score(self._local_draws(update.local, names)) if job.evaluate_local else None
        own_scores = None
        if self.own_test is not None and len(own := self.own_test[job.client_id]):
            own_scores = self.score(self._local_draws(update.local, names), own)
        metrics = update.metrics if self.known is None else {**update.metrics, "lf": self.distance(update.local)}
        return Reply(
            client_id=job.client_id,
            message=update.message,
            memory=update.memory,
            metrics=metrics,
            scores=scores,
            own_scores=own_scores,
            train_seconds=trained - started,
            evaluation_seconds=time.perf_counter() - trained,
        )

    def _local_draws(self, model: Tensors, names: tuple[str, int, int]) -> Iterator[torch.Tensor]:
        rng = stream(self.seed, *names, "evaluate")
        return self.method.draws(self.task, model, self.settings.local_draws, rng)

    def distance(self, model: Tensors) -> float:
        """How far a point model lies from the known posterior."""
        assert self.known is not None
        (vector,) = self.method.draws(self.task, model, 1, stream(self.seed, "distance"))
        return self.known.distance(vector[: self.task.model.layout.num_trainable])

    def score(self, draws: Iterator[torch.Tensor], examples: torch.Tensor | None = None) -> Scores:
        """The predictions of parameter draws on the test set, or on these examples of it."""
        x, y = (self.test.x, self.test.y) if examples is None else (self.test.x[examples], self.test.y[examples])
        return score(self.predict(draws, x), y, self.settings.ece_bins, self.settings.nll_epsilon)

    def predict(self, draws: Iterator[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        num_classes = self.task.data.num_classes if self.task.data else None
        return predict(self.task.model, draws, x, self.settings.batch_size, num_classes)


class Runner(Protocol):
    """An engine at work for one run."""

    def run(self, broadcast: Tensors, jobs: Iterable[Job]) -> Iterator[Reply]:
        """The replies to a round's jobs, in their order; jobs are asked for as they can be taken."""
        ...


class Engine(Protocol):
    @property
    def name(self) -> str: ...

    def start(self, worker: Worker) -> AbstractContextManager[Runner]:
        """For the length of a run; whatever it needs is gone afterwards."""
        ...


def check_finite(values: Mapping[str, torch.Tensor | float], where: str) -> None:
    """A sum is finite if and only if its terms are, unless it overflows, which is as bad; to ask it costs far less."""
    for name, value in values.items():
        if not math.isfinite(value.sum().item() if isinstance(value, torch.Tensor) else value):
            raise DivergedError(f"{where}: {name} became NaN or infinite; a smaller local.lr often helps")
