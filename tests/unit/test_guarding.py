"""Parts of a user's own that break their contract are named, with what they returned and what was expected."""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bfl_bench.aggregators import eaa
from bfl_bench.build.guarding import (
    GuardedMethod,
    check_dataset,
    check_declarations,
    check_partition,
    guard,
    guard_rule,
    is_ours,
)
from bfl_bench.data.dataset import Dataset, Split
from bfl_bench.data.partition import Partition
from bfl_bench.engines.pool import answer
from bfl_bench.engines.worker import Job
from bfl_bench.errors import PartError, find_own_frame
from bfl_bench.likelihood import Categorical, Prediction
from bfl_bench.method import Client, Replies, Task, Tensors, Update
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.run.loop import run
from tests.federation import make_worker
from tests.unit.test_run import make_experiment

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Own(FedAvg):
    """Changes what is returned in one place."""

    where: str
    change: Any

    def _at(self, where: str, good: Any) -> Any:
        return self.change(good) if where == self.where else good

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        return self._at("init", super().init(task, rng))

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        return self._at("broadcast", super().broadcast(task, state))

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        update = super().client_update(task, broadcast, memory, client, rng)
        changed = {name: self._at(name, getattr(update, name)) for name in ("message", "local", "metrics")}
        return replace(update, **changed)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        new, metrics = super().server_update(task, state, replies, rng)
        return self._at("state", new), metrics

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        yield from self._at("draws", list(super().draws(task, model, num, rng)))


@dataclass(frozen=True)
class Predicts(Own):
    def predict(self, *arguments: Any) -> Prediction:
        return self._at("predict", super().predict(*arguments))


def of(change: Callable[[Tensor], object]) -> Change:
    return lambda good: {name: change(tensor) for name, tensor in good.items()}


@pytest.mark.parametrize(
    ("where", "change", "sentence"),
    [
        ("init", of(lambda t: t[:-1]), r"init returned 'params': float32 \(\d+,\); expected: float32 \(\d+,\)"),
        ("init", of(lambda t: t.sum()), r"init returned 'params': float32 \(\); expected"),
        ("broadcast", lambda _: None, "broadcast returned nothing; expected: a dictionary of tensors"),
        ("broadcast", of(lambda t: t.double()), "broadcast returned 'params': float64"),
        ("broadcast", lambda _: {}, r"client_update failed with KeyError: 'params' \(test_guarding.py, line \d+\)"),
        ("message", of(lambda t: t[None]), "client_update returned as message 'params'"),
        ("message", lambda m: {"delta": m["params"]}, "server_update failed with KeyError: 'params'"),
        ("message", lambda m: m | {"variance": -torch.ones(3)}, "'variance' with 3 negative entries; expected: none"),
        ("message", of(lambda t: t.to_sparse()), "a sparse tensor; expected: a dense one"),
        ("local", of(lambda t: t.to(torch.complex64)), "a complex tensor; expected"),
        ("metrics", lambda _: {"a,b": 1.0}, "a metric named 'a,b'; expected: a name without commas"),
        ("state", of(lambda t: t.long()), "server_update returned as state 'params': int64"),
        ("state", lambda s: {"other": s["params"]}, "failed with KeyError: 'params'"),
        ("draws", lambda _: [], "draws yielded nothing; expected: at least one"),
        ("draws", lambda d: [d[0][:1]], r"draws yielded float32 \(1,\); expected: float32"),
        ("draws", lambda _: ["text"], "draws yielded str; expected"),
    ],
)
def test_methods(where: str, change: Change, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(PartError, match=sentence) as caught:
        run(make_experiment(guard(Own("own", "size", where, change))), tmp_path)
    assert str(caught.value).startswith("method own: ")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda _: None, "predict returned nothing; expected: a Prediction"),
        (lambda p: replace(p, log_probabilities=p.log_probabilities[:-1]), r"log probabilities float\d+ \(\d+, 3\)"),
        (lambda p: replace(p, log_probabilities=p.log_probabilities + 1), "that do not sum to one"),
    ],
)
def test_predictions(change: Change, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(PartError, match=f"method own: predict returned .*{sentence}|{sentence}"):
        run(make_experiment(guard(Predicts("own", "size", "predict", change))), tmp_path)


def test_a_good_method_of_ones_own_gives_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for name, method in (("plain", Own("own", "size", "", None)), ("guarded", guard(Own("own", "size", "", None)))):
        torch.manual_seed(0)
        (tmp_path / name).mkdir()
        run(make_experiment(method), tmp_path / name)
        written.append((tmp_path / name / "metrics.csv").read_bytes())
    assert written[0] == written[1]


def test_ours_are_not_watched() -> None:
    ours = FedAvg("fedavg", "size")
    assert guard(ours) is ours
    assert guard_rule("eaa", eaa) is eaa
    assert is_ours(make_worker(ours).method)
    own = guard(Own("own", "size", "", None))
    assert isinstance(own, GuardedMethod)
    assert own.needs == ours.needs
    assert own.predictives == ("draws",)


def average(means: Tensor, variances: Tensor, weights: Tensor) -> Any:
    return weights @ means, weights @ variances


def alone(means: Tensor, variances: Tensor, weights: Tensor) -> Any:
    return weights @ means


def broadcasting(means: Tensor, variances: Tensor, weights: Tensor) -> Any:
    return weights @ means, variances.mean()


def single(means: Tensor, variances: Tensor, weights: Tensor) -> Any:
    return (weights @ means).float(), weights @ variances


def negative(means: Tensor, variances: Tensor, weights: Tensor) -> Any:
    return weights @ means, -variances[0]


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (alone, r"returned float64 \(4,\); expected: two tensors float64 \(4,\), mean and variance"),
        (broadcasting, r"returned float64 \(\) as variance; expected"),
        (single, r"returned float32 \(4,\) as mean; expected"),
        (negative, "returned variances of -2; expected: all above zero"),
    ],
)
def test_rules(rule: Any, sentence: str) -> None:
    arguments = (torch.ones(2, 4).double(), torch.full((2, 4), 2.0).double(), torch.tensor([0.25, 0.75]).double())
    with pytest.raises(PartError, match=f"^aggregator own {sentence}"):
        guard_rule("own", rule)(*arguments)
    mean, variance = pickle.loads(pickle.dumps(guard_rule("own", average)))(*arguments)
    assert torch.equal(mean, torch.ones(4).double())
    assert torch.equal(variance, torch.full((4,), 2.0).double())


@dataclass(frozen=True)
class Declares(FedAvg):
    declared: tuple[Any, Any, Any]

    @property
    def needs(self) -> Any:
        return self.declared[0]

    @property
    def predictives(self) -> Any:
        return self.declared[1]

    def alternatives(self) -> Any:
        return self.declared[2]


@pytest.mark.parametrize(
    ("needs", "predictives", "others", "sentence"),
    [
        (None, ("mean",), {}, "needs is nothing; expected: a record, Needs"),
        (FedAvg("fedavg", "size").needs, "mean", {}, "predictives is 'mean'; expected: some of"),
        (FedAvg("fedavg", "size").needs, ("guess",), {}, r"predictives is \('guess',\)"),
        (FedAvg("fedavg", "size").needs, ("mean",), {"a": 3}, "alternatives returned {a: int}; expected: methods"),
    ],
)
def test_declarations(needs: Any, predictives: Any, others: Any, sentence: str) -> None:
    with pytest.raises(PartError, match=f"^method own: {sentence}"):
        check_declarations(Declares("own", "size", (needs, predictives, others)))


X, Y = torch.zeros(6, 1, 2, 2), torch.arange(6) % 3
GOOD = Dataset(Split(X, Y), Split(X, Y), Categorical(3))


@pytest.mark.parametrize(
    ("loaded", "sentence"),
    [
        (None, "load returned nothing; expected: a Dataset"),
        (replace(GOOD, train=None), "train has nothing; expected: a Split"),  # type: ignore[arg-type]
        (replace(GOOD, test=Split(X.tolist(), Y)), r"test has list of 6 and int64 \(6,\); expected"),  # type: ignore[arg-type]
        (replace(GOOD, train=Split(X / 0, Y)), "the inputs of train have NaN"),
        (replace(GOOD, test=Split(X[..., :1], Y)), r"inputs are float32 \(6, 1, 2, 2\) and float32 \(6, 1, 2, 1\)"),
        (replace(GOOD, train=Split(X, Y[:, None])), r"labels are int64 \(6, 1\) and int64 \(6,\)"),
        (replace(GOOD, likelihood=None), "the likelihood is nothing; expected: Categorical"),  # type: ignore[arg-type]
    ],
)
def test_datasets(loaded: Any, sentence: str) -> None:
    assert check_dataset("own", GOOD) is GOOD
    with pytest.raises(PartError, match=f"^dataset own: {sentence}"):
        check_dataset("own", loaded)


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        (None, "nothing; expected: a Partition"),
        ([[0, 1]], "1 clients; expected: 2"),
        ([[], []], "no examples for anybody"),
        ([[0], [6]], "examples 0 to 6; expected: 0 to 5"),
        ([[-1], [3]], "examples -1 to 3"),
        ([[0, 1], [1]], "examples that two clients hold"),
    ],
)
def test_partitions(clients: Any, sentence: str) -> None:
    made = clients and Partition.of(Y.numpy(), [np.array(client, dtype=np.int64) for client in clients])
    with pytest.raises(PartError, match=f"^partition own: split returned {sentence}"):
        check_partition("own", made, 6, 2)
    good = Partition.of(Y.numpy(), [np.array([0, 5]), np.array([], dtype=np.int64)])
    assert check_partition("own", good, 6, 2) is good


@dataclass(frozen=True)
class Raises(FedAvg):
    def client_update(self, *arguments: Any) -> Update:
        raise ZeroDivisionError("boom")


def test_what_a_part_raises_itself_keeps_its_place_also_from_another_process() -> None:
    worker = make_worker(guard(Raises("own", "size")))
    error = answer(worker, {}, Job(round=1, client_id=0, memory={}, evaluate_local=False))
    assert isinstance(error, ZeroDivisionError)
    travelled = pickle.loads(pickle.dumps(error))
    frame = find_own_frame(travelled)
    assert frame is not None
    assert frame.innermost
    assert str(frame).startswith("test_guarding.py, line ")
