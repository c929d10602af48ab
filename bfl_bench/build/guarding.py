"""Parts of a user's own, watched: what they return is compared with the contract, at once and by name.

Only parts that are not of this package are watched, so that ours cost nothing; they have tests of the contract instead.
A sentence says which part, which function, what it returned and what was expected. What a part raises in its own file
is left alone: its author needs the traceback, and the sentence after it names that file.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from bfl_bench.data.dataset import Dataset, Split
from bfl_bench.data.partition import Partition
from bfl_bench.errors import BflError, PartError, find_own_frame
from bfl_bench.evaluation.posterior import Posterior
from bfl_bench.likelihood import AnyPrediction, Categorical, NumericPrediction, Prediction
from bfl_bench.method import Client, Laplace, Layers, Method, Needs, Predictive, Replies, Task, Tensors, Update

KEPT_BY_OTHERS = (OSError, MemoryError, KeyboardInterrupt)  # have sentences of their own
SPREADS = ("precision", "precisions", "variance", "variances")  # names of what is never negative
LARGEST_LOG = 1e-3  # of a probability: what rounding may add to zero


def is_ours(part: object) -> bool:
    """Tell whether a part is of this package, by the module of its class or function."""
    function = getattr(part, "func", part)  # of functools.partial
    named = function if hasattr(function, "__qualname__") else type(function)
    return str(getattr(named, "__module__", "")).startswith("bfl_bench.")


def guard(method: Method) -> Method:
    """Watch a method, unless it is ours."""
    return method if is_ours(method) else GuardedMethod(method.name, method.weights, method)


@contextmanager
def blaming(what: str, *given: tuple[str, object]) -> Iterator[None]:
    """Say an error that was not raised in a file of the user's as one of the part, with the values that it had."""
    part = what.partition(":")[0]
    try:
        yield
    except PartError as error:
        raise error if str(error).startswith(part) else PartError(f"{what}: {error}") from None
    except (BflError, *KEPT_BY_OTHERS):
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        own = find_own_frame(error)
        if (own and own.innermost) or "allocate memory" in reason:
            raise
        where = f" ({own})" if own else ""
        had = "".join(f"; {name} {describe(value)}" for name, value in given)
        raise PartError(f"{what} failed with {type(error).__name__}: {reason}{where}{had}") from error


def describe(value: object) -> str:
    """Say what a value is, tensors by type and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {describe(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return "nothing" if value is None else type(value).__name__


def _check_state(what: str, value: object, task: Task) -> Any:
    """Check a dictionary of tensors: where they lie, what they are made of, and the model's own vector among them."""
    if not isinstance(value, dict):
        raise PartError(f"{what} {describe(value)}; expected: a dictionary of tensors")
    vector = task.model.vector
    for name, item in value.items():
        if not isinstance(name, str) or not isinstance(item, Tensor):
            raise PartError(f"{what} {name!r}: {describe(item)}; expected: tensors by their names")
        if item.layout != torch.strided or item.device.type == "meta" or item.is_complex():
            kind = "complex" if item.is_complex() else "sparse" if item.layout != torch.strided else "empty (meta)"
            raise PartError(f"{what} {name!r}, a {kind} tensor; expected: a dense one of real numbers")
        if item.requires_grad:
            raise PartError(f"{what} {name!r}, a tensor with its gradient's graph; expected: a detached one")
        if name == "params" and (item.shape != vector.shape or item.dtype != vector.dtype):
            raise PartError(f"{what} 'params': {describe(item)}; expected: {describe(vector)}, all of the network's")
        if name in SPREADS and item.dim() == 1 and bool((item < 0).any()):
            raise PartError(f"{what} {name!r} with {int((item < 0).sum())} negative entries; expected: none below zero")
    return value


def _check_vector(what: str, value: object, task: Task) -> Any:
    vector = task.model.vector
    if not isinstance(value, Tensor) or value.shape != vector.shape or value.dtype != vector.dtype:
        raise PartError(f"{what} {describe(value)}; expected: {describe(vector)}, the network's parameters")
    return value


def _check_names(what: str, metrics: object) -> None:
    for name in metrics if isinstance(metrics, dict) else ():
        if isinstance(name, str) and (not name or not name.isprintable() or set(name) & set(",\"'")):
            raise PartError(f"{what} a metric named {name!r}; expected: a name without commas, quotes and line ends")


@dataclass(frozen=True)
class GuardedMethod(Method):
    """A method of a user's own, between two checks."""

    original: Method

    def _says(self, function: str) -> str:
        return f"method {self.name}: {function}"

    @property
    def needs(self) -> Needs:
        return self.original.needs

    @property
    def predictives(self) -> tuple[Predictive, ...]:
        return self.original.predictives

    def check(self, task: Task) -> None:
        with blaming(self._says("check")):
            self.original.check(task)

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        with blaming(self._says("init")):
            made: object = self.original.init(task, rng)
        return self._check(f"{self._says('init')} returned", made, task)

    def init_client(self, task: Task, state: Tensors, client_id: int) -> Tensors:
        with blaming(self._says("init_client"), ("the state has", state)):
            made: object = self.original.init_client(task, state, client_id)
        return self._check(f"{self._says('init_client')} returned", made, task)

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        with blaming(self._says("broadcast"), ("the state has", state)):
            made: object = self.original.broadcast(task, state)
        return self._check(f"{self._says('broadcast')} returned", made, task)

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        with blaming(self._says("client_update"), ("the broadcast has", broadcast), ("the private state has", memory)):
            made: Update = self.original.client_update(task, broadcast, memory, client, rng)
        if isinstance(made, Update):
            for name in ("message", "local", "memory"):
                self._check(f"{self._says('client_update')} returned as {name}", getattr(made, name), task)
            _check_names(f"{self._says('client_update')} returned", made.metrics)
        return made  # the loop says what else is wrong

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        last: dict[str, Tensor] = {}  # what was read last

        def read() -> Iterator[tuple[int, Tensors]]:
            for client_id, message in replies:
                last.clear()
                last.update(message)
                yield client_id, message

        with blaming(self._says("server_update"), ("the state has", state), ("the message read last has", last)):
            made: tuple[Tensors, dict[str, float]] = self.original.server_update(task, state, read(), rng)
        if isinstance(made, tuple) and len(made) == 2:
            what = f"{self._says('server_update')} returned"
            self._check(f"{what} as state", made[0], task)
            for name, tensor in made[0].items():
                if name in state and state[name].dtype != tensor.dtype:
                    raise PartError(
                        f"{what} as state {name!r}: {tensor.dtype}; expected: {state[name].dtype}, as before"
                    )
            _check_names(what, made[1])
        return made  # the loop says what else is wrong

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        with blaming(self._says("draws"), ("the model has", model)):
            drawn = iter(self.original.draws(task, model, num, rng))
        some = False
        while True:
            with blaming(self._says("draws"), ("the model has", model)):
                vector: object = next(drawn, self)
            if vector is self:
                break
            some = True
            yield _check_vector(f"{self._says('draws')} yielded", vector, task)
        if not some:
            raise PartError(f"{self._says('draws')} yielded nothing; expected: at least one parameter vector")

    def predict(
        self, task: Task, model: Tensors, x: Tensor, num: int, batch_size: int, rng: torch.Generator
    ) -> AnyPrediction:
        if type(self.original).predict is Method.predict:  # of vectors that are checked one by one
            return super().predict(task, model, x, num, batch_size, rng)
        with blaming(self._says("predict"), ("the model has", model)):
            made: object = self.original.predict(task, model, x, num, batch_size, rng)
        return self._check_prediction(made, task, len(x))

    def posterior(self, task: Task, state: Tensors) -> Posterior | None:
        with blaming(self._says("posterior"), ("the state has", state)):
            return self.original.posterior(task, state)

    def mean(self, task: Task, model: Tensors) -> Tensor:
        with blaming(self._says("mean"), ("the model has", model)):
            made: object = self.original.mean(task, model)
        return _check_vector(f"{self._says('mean')} returned", made, task)  # type: ignore[no-any-return]

    def laplace(self, task: Task, state: Tensors, layers: Layers) -> Laplace | None:
        with blaming(self._says("laplace"), ("the state has", state)):
            return self.original.laplace(task, state, layers)

    def _check(self, what: str, value: object, task: Task) -> Tensors:
        return _check_state(what, value, task)  # type: ignore[no-any-return]

    def _check_prediction(self, made: object, task: Task, num: int) -> AnyPrediction:
        what = f"{self._says('predict')} returned"
        if isinstance(made, NumericPrediction) and not isinstance(task.likelihood, Categorical):
            return made
        if not isinstance(made, Prediction) or not isinstance(made.log_probabilities, Tensor):
            raise PartError(f"{what} {describe(made)}; expected: a Prediction")
        found = made.log_probabilities
        if isinstance(task.likelihood, Categorical):
            shape = (num, task.likelihood.num_classes)
            if found.shape[:2] != shape or not found.is_floating_point():
                raise PartError(f"{what} log probabilities {describe(found)}; expected: {shape}, with fractions")
            if bool((torch.logsumexp(found.double(), 1).abs() > LARGEST_LOG).any()):
                raise PartError(f"{what} log probabilities that do not sum to one; expected: normalised ones")
        return made


@dataclass(frozen=True)
class GuardedRule:
    """An aggregation rule of a user's own, whose result is checked."""

    name: str
    rule: Callable[..., Any]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.rule)

    def __call__(self, means: Tensor, variances: Tensor, weights: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        what, expected = f"aggregator {self.name}", f"two tensors {describe(means[0])}, mean and variance"
        with blaming(what):
            made: Any = self.rule(means, variances, weights, **options)
        if not isinstance(made, tuple) or len(made) != 2:
            raise PartError(f"{what} returned {describe(made)}; expected: {expected}")
        for name, item in zip(("mean", "variance"), made, strict=True):
            if not isinstance(item, Tensor) or item.shape != means.shape[1:] or item.dtype != means.dtype:
                raise PartError(f"{what} returned {describe(item)} as {name}; expected: {expected}")
        if bool((made[1] <= 0).any()):
            raise PartError(f"{what} returned variances of {made[1].min().item():g}; expected: all above zero")
        return made


def guard_rule(name: object, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Watch a rule, unless it is ours."""
    return rule if is_ours(rule) else GuardedRule(str(name), rule)


def check_declarations(method: Method) -> None:
    """Refuse what a method says of itself that is not of the contract's kind."""
    what = f"method {method.name}:"
    if not isinstance(method.needs, Needs):
        raise PartError(f"{what} needs is {describe(method.needs)}; expected: a record, Needs(...)")
    ways: object = method.predictives
    if not isinstance(ways, tuple) or not ways or set(ways) - set(get_args(Predictive)):
        known = ", ".join(get_args(Predictive))
        raise PartError(f"{what} predictives is {ways!r}; expected: some of {known} in a tuple")
    others: object = method.alternatives()
    if not isinstance(others, Mapping) or not all(isinstance(other, Method) for other in others.values()):
        raise PartError(f"{what} alternatives returned {describe(others)}; expected: methods by their names")


def check_dataset(name: str, loaded: object) -> Dataset:
    """Refuse what a dataset of a user's own loaded, where it is none."""
    if not isinstance(loaded, Dataset):
        raise PartError(f"dataset {name}: load returned {describe(loaded)}; expected: a Dataset")
    for part in ("train", "test"):
        split: Any = getattr(loaded, part)
        if not isinstance(split, Split) or not isinstance(split.x, Tensor) or not isinstance(split.y, Tensor):
            found = f"{describe(split.x)} and {describe(split.y)}" if isinstance(split, Split) else describe(split)
            raise PartError(f"dataset {name}: {part} has {found}; expected: a Split of two tensors")
        if split.x.is_floating_point() and not bool(torch.isfinite(split.x).all()):
            raise PartError(f"dataset {name}: the inputs of {part} have NaN or infinite numbers; expected: finite ones")
    if not hasattr(loaded.likelihood, "loss"):
        found = describe(loaded.likelihood)
        raise PartError(f"dataset {name}: the likelihood is {found}; expected: Categorical(num_classes) or its like")
    train, test = loaded.train.x, loaded.test.x
    if loaded.augment is None and (train.shape[1:] != test.shape[1:] or train.dtype != test.dtype):
        raise PartError(f"dataset {name}: inputs are {describe(train)} and {describe(test)}; expected: the same shapes")
    if isinstance(loaded.likelihood, Categorical) and loaded.train.y.shape[1:] != loaded.test.y.shape[1:]:
        found = f"{describe(loaded.train.y)} and {describe(loaded.test.y)}"
        raise PartError(f"dataset {name}: labels are {found}; expected: the same shapes")
    return loaded


def check_partition(name: str, made: object, num_samples: int, num_clients: int) -> Partition:
    """Refuse what a partition of a user's own made, where clients would share examples or have none that exist."""
    what = f"partition {name}: split returned"
    if not isinstance(made, Partition):
        raise PartError(f"{what} {describe(made)}; expected: a Partition, as Partition.of makes it")
    if len(made.indices) != num_clients:
        raise PartError(f"{what} {len(made.indices)} clients; expected: {num_clients}")
    together = np.concatenate(made.indices)
    if not len(together):
        raise PartError(f"{what} no examples for anybody; expected: some")
    low, high = int(together.min()), int(together.max())
    if low < 0 or high >= num_samples:
        raise PartError(f"{what} examples {low} to {high}; expected: 0 to {num_samples - 1}")
    if len(np.unique(together)) != len(together):
        raise PartError(f"{what} examples that two clients hold, or one twice; expected: each once at most")
    return made
