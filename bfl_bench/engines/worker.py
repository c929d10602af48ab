"""Engines map jobs (data, not closures) to replies, in the order of the jobs. A job is one client's local update."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor

from bfl_bench.aggregators.algebra import Gaussian
from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.data.corruptions import Pixels
from bfl_bench.data.dataset import Augment, Split
from bfl_bench.errors import DivergedError, PartError
from bfl_bench.evaluation.truth import Truth
from bfl_bench.likelihood import AnyPrediction, Scores, average
from bfl_bench.method import Client, Layers, Method, Predictive, Task, Tensors, Update
from bfl_bench.rng import stream

TEST, VALIDATION, UNKNOWN, UNSEEN = "test", "validation", "unknown_classes", "unseen"


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """When and how models are evaluated."""

    every: Annotated[int, AtLeast(1)]
    local_every: Annotated[int, AtLeast(0)]
    scored: Literal["test", "validation"]
    batch_size: Annotated[int, AtLeast(1)]
    draws: Annotated[int, AtLeast(1)]
    local_draws: Annotated[int, AtLeast(1)]
    local_share: Annotated[float, Between(0.001, 1)]
    predictive: Literal["auto"] | Predictive
    also_predict: list[Predictive]
    prior_precision: Literal["auto", "evidence"] | Annotated[float, Above(0)]
    laplace_layers: Layers
    ece_bins: Annotated[int, AtLeast(1)]
    nll_epsilon: Annotated[float, AtLeast(0)]
    uncertainty: bool
    posterior: bool
    truth: str | None
    ood: dict[str, Any]  # names of datasets, and their configs
    shift: list[str]
    severities: list[Annotated[int, Between(1, 5)]]
    also_aggregate: dict[str, Any]  # names of rules, and their configs
    weight_rounds: list[Annotated[int, AtLeast(1)]]
    weight_points: Annotated[int, AtLeast(2)]
    keep_messages: list[Annotated[int, AtLeast(1)]]
    unseen_steps: list[Annotated[int, AtLeast(0)]]
    personalise: list[Annotated[float, Between(0, 1)]]
    personalise_rule: Literal["wb", "rklb", "eaa", "aalv", "moments"]


@dataclass(frozen=True)
class EvaluationSet:
    """Examples that models are evaluated on, and which of them are whose."""

    split: Split
    own: tuple[Tensor, ...] | None = None  # per client, its examples in the set; None: everybody's
    foreign: bool = False  # of another dataset: to be told from the test set, not to be classified

    def of(self, client_id: int) -> Tensor | None:
        """Return where a client's own examples are; None where it has none."""
        return self.own[client_id] if self.own is not None and len(self.own[client_id]) else None


@dataclass(frozen=True, kw_only=True)
class Job:
    round: int
    client_id: int
    memory: Tensors
    evaluate_local: bool


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a client hands back, and what was measured on the way."""

    client_id: int
    message: Tensors
    memory: Tensors
    metrics: dict[str, float]
    scores: Scores | None  # of the local model on the test set
    own_scores: Scores | None  # of the local model on the client's own test examples
    train_seconds: float
    evaluation_seconds: float
    local: Tensors = field(default_factory=dict)  # the local model, where it is to be combined with the global one


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Everything a job needs besides itself: the same in every process of a run."""

    task: Task
    method: Method
    train: Split
    sets: Mapping[str, EvaluationSet]  # by name; `test` is always there
    augment: Augment | None
    client_indices: tuple[Tensor, ...]  # per client, where `train` lies
    settings: EvalSettings
    seed: int
    rounds: int
    reference_posterior: Gaussian | None = field(default=None)  # taken as the true one
    truth: Truth | None = field(default=None)  # the posterior of all data, of eval.truth
    pixels: Pixels | None = field(default=None)  # how test images became network inputs, where these are corrupted
    unseen: Mapping[int, Tensor] = field(default_factory=dict)  # clients that never train, and their training examples

    def run(self, broadcast: Tensors, job: Job) -> Reply:
        started = time.perf_counter()
        client = Client(job.client_id, self.train, self.client_indices[job.client_id], self.augment)
        names = ("client", job.round, job.client_id)
        task = self.task_of_round(job.round)
        update = self.method.client_update(task, broadcast, job.memory, client, stream(self.seed, *names))
        where = f"round {job.round}, client {job.client_id}"
        self._check_update(update, where)
        check_finite({**update.message, **update.metrics}, where)
        check_finite({k: v for k, v in update.local.items() if v is not update.message.get(k)}, where)
        check_finite({f"{k} of its private state": v for k, v in update.memory.items()}, where)
        trained = time.perf_counter()
        scores = self.score_local(update.local, names, None) if job.evaluate_local else None
        own = self.sets[TEST].of(job.client_id)
        own_scores = None if own is None else self.score_local(update.local, names, own)
        metrics = update.metrics
        if self.reference_posterior is not None:
            metrics = {**metrics, "lf": self.distance(update.local, self.reference_posterior)}
        return Reply(
            client_id=job.client_id,
            message=update.message,
            memory=update.memory,
            metrics=metrics,
            scores=scores,
            own_scores=own_scores,
            train_seconds=trained - started,
            evaluation_seconds=time.perf_counter() - trained,
            local=update.local if self.settings.personalise and job.evaluate_local else {},
        )

    def _check_update(self, update: object, where: str) -> None:
        what = f"method {self.method.name}, {where}: client_update"
        if not isinstance(update, Update):
            raise PartError(f"{what} returned {type(update).__name__}; expected: an Update")
        for name in ("message", "local", "memory"):
            check_tensors(f"{what} returned as {name}", getattr(update, name))
        check_numbers(f"{what} returned as metrics", update.metrics)

    def task_of_round(self, round_: int) -> Task:
        """Return the task with the learning rate that the schedule gives the round."""
        local = self.task.local
        if local.schedule == "constant":
            return self.task
        factor = 0.5 * (1 + math.cos(math.pi * (round_ - 1) / self.rounds))
        return replace(self.task, local=replace(local, lr=local.lr * factor))

    def predict(self, method: Method, model: Tensors, x: Tensor, num: int, rng: torch.Generator) -> AnyPrediction:
        """Predict as the method does, or by the mean alone where `eval.predictive` says so."""
        if self.settings.predictive == "mean":
            return self.predict_by_mean(method, model, x)
        return method.predict(self.task, model, x, num, self.settings.batch_size, rng)

    def predict_by_mean(self, method: Method, model: Tensors, x: Tensor) -> AnyPrediction:
        return self.mix([method.mean(self.task, model)], x)

    def mix(self, draws: Iterable[Tensor], x: Tensor) -> AnyPrediction:
        """Predict with parameter vectors (P,), all alike."""
        return average(self.task.model, draws, x, self.settings.batch_size, self.task.likelihood.mixture())

    def score(self, prediction: AnyPrediction, labels: Tensor) -> Scores:
        return self.task.likelihood.score(prediction, labels, self.settings.ece_bins, self.settings.nll_epsilon)

    def predict_global(self, name: str, method: Method, state: Tensors, round_: int) -> AnyPrediction:
        """Predict the set of this name with a global model; all sets are predicted with the same draws."""
        x, rng = self.sets[name].split.x, stream(self.seed, "evaluate", round_)
        return self.predict(method, state, x, self.settings.draws, rng)

    def score_local(self, model: Tensors, names: tuple[str, int, int], examples: Tensor | None) -> Scores:
        """Score a local model on `eval.local_share` of the test set, or on these examples of it."""
        split = self.sets[TEST].split
        if examples is None and self.settings.local_share < 1:
            order = torch.randperm(len(split), generator=stream(self.seed, "local_share"))
            examples = order[: math.ceil(self.settings.local_share * len(split))].sort().values.to(split.y.device)
        x, y = (split.x, split.y) if examples is None else (split.x[examples], split.y[examples])
        rng = stream(self.seed, *names, "evaluate")
        return self.score(self.predict(self.method, model, x, self.settings.local_draws, rng), y)

    def distance(self, model: Tensors, posterior: Gaussian) -> float:
        """Measure how far a point model lies from a posterior."""
        (vector,) = self.method.draws(self.task, model, 1, stream(self.seed, "distance"))
        return posterior.distance(vector[: self.task.model.layout.num_trainable])

    def tensors(self) -> list[Tensor]:
        """List the data, to be handed to other processes apart from the rest."""
        return [tensor for split in self._splits() for tensor in (split.x, split.y)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Worker":
        """Return the same worker with other tensors in the places of its data."""
        train, *splits = (Split(x, y) for x, y in zip(tensors[::2], tensors[1::2], strict=True))
        sets = {name: replace(set_, split=split) for (name, set_), split in zip(self.sets.items(), splits, strict=True)}
        return replace(self, train=train, sets=sets)

    def to(self, device: torch.device) -> "Worker":
        """Return the same worker with its data where the device can use them."""
        train = self.train.to(device)
        sets = {
            name: EvaluationSet(
                Split(set_.split.x.to(device), set_.split.y.to(device)),
                None if set_.own is None else tuple(own.to(device) for own in set_.own),
                set_.foreign,
            )
            for name, set_ in self.sets.items()
        }
        indices = tuple(part.to(train.x.device) for part in self.client_indices)
        unseen = {client: part.to(train.x.device) for client, part in self.unseen.items()}
        return replace(self, train=train, sets=sets, client_indices=indices, unseen=unseen)

    def _splits(self) -> list[Split]:
        return [self.train, *(set_.split for set_ in self.sets.values())]


class Runner(Protocol):
    """An engine at work for one run."""

    def run(self, broadcast: Tensors, jobs: Iterable[Job]) -> Iterator[Reply]:
        """Yield the replies to a round's jobs, in their order; jobs are asked for as they can be taken."""
        ...


class Engine(Protocol):
    @property
    def name(self) -> str: ...

    def check(self, task: Task) -> None:
        """Refuse a device or a network with a `ConfigError`, before anything is trained or written."""
        ...

    def start(self, worker: Worker) -> AbstractContextManager[Runner]:
        """Start for the length of a run; whatever it needs is gone afterwards."""
        ...


@dataclass(frozen=True)
class Sequential:
    """One client after the other in this process; a reply is handed on before the next client starts."""

    name: str

    def check(self, task: Task) -> None:
        return

    @contextmanager
    def start(self, worker: Worker) -> Iterator[Runner]:
        yield _OneByOne(worker)


@dataclass(frozen=True)
class _OneByOne:
    worker: Worker

    def run(self, broadcast: Tensors, jobs: Iterable[Job]) -> Iterator[Reply]:
        for job in jobs:
            yield self.worker.run(broadcast, job)


def check_tensors(what: str, value: object) -> None:
    """Raise where a part of a user's own did not return a dictionary of tensors."""
    if not isinstance(value, dict):
        raise PartError(f"{what} {type(value).__name__}; expected: a dictionary of tensors")
    for name, item in value.items():
        if not isinstance(name, str) or not isinstance(item, Tensor):
            raise PartError(f"{what} {name!r}: {type(item).__name__}; expected: tensors by their names")
        if item.requires_grad:
            raise PartError(f"{what} {name!r}, a tensor with its gradient's graph; expected: a detached one")


def check_numbers(what: str, value: object) -> None:
    if not isinstance(value, dict):
        raise PartError(f"{what} {type(value).__name__}; expected: a dictionary of numbers")
    for name, item in value.items():
        if not isinstance(name, str) or not isinstance(item, int | float):
            raise PartError(f"{what} {name!r}: {type(item).__name__}; expected: numbers by their names")


def check_finite(values: Mapping[str, Tensor | float], where: str) -> None:
    """Raise where a value is not finite.

    A sum is finite if and only if its terms are, unless it overflows, which is as bad; to ask it costs far less.
    """
    for name, value in values.items():
        if not math.isfinite(value.sum().item() if isinstance(value, Tensor) else value):
            raise DivergedError(f"{where}: {name} became NaN or infinite; a smaller local.lr often helps")
