"""Parts of a user's own that misbehave in one place: `where` it is and `what` is returned there instead."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bfl_bench.data.dataset import Dataset, Split
from bfl_bench.data.partition import Partition
from bfl_bench.likelihood import Categorical
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fola import Fola

KEPT: dict[str, Any] = {
    "extra": lambda good: {**good, "more": torch.ones(2)},
    "twice": lambda good: {name: 2 * value for name, value in good.items()},
}
"""Changes that the contract allows."""

OF_ITS_OWN = (
    "empty",
    "renamed",
    "shorter",
    "longer",
    "of one",
    "scalars",
    "rows",
    "columns",
    "double",
    "half",
    "whole",
    "truths",
)
"""Changes that are nobody's business in a client's private state."""

HARMLESS = ("double parameters", "half parameters", "whole buffer", "fractions")
"""Changes after which a part is still one: networks are made float32, `Partition.of` makes whole numbers."""

TENSORS: dict[str, Any] = {
    "none": lambda good: None,
    "text": lambda good: "text",
    "number": lambda good: 3.0,
    "list": lambda good: [1, 2],
    "empty": lambda good: {},
    "of none": lambda good: dict.fromkeys(good),
    "of numbers": lambda good: dict.fromkeys(good, 1.5),
    "of arrays": lambda good: {name: value.numpy() for name, value in good.items()},
    "renamed": lambda good: {name + "_": value for name, value in good.items()},
    "shorter": lambda good: {name: value[:-1] if value.dim() else value for name, value in good.items()},
    "longer": lambda good: {name: torch.cat([value, value]) if value.dim() else value for name, value in good.items()},
    "of one": lambda good: {name: value.flatten()[:1] for name, value in good.items()},
    "scalars": lambda good: {name: value.sum() for name, value in good.items()},
    "rows": lambda good: {name: value[None] for name, value in good.items()},
    "columns": lambda good: {name: value[..., None] for name, value in good.items()},
    "double": lambda good: {name: value.double() for name, value in good.items()},
    "half": lambda good: {name: value.half() for name, value in good.items()},
    "whole": lambda good: {name: value.long() for name, value in good.items()},
    "truths": lambda good: {name: value > 0 for name, value in good.items()},
    "complex": lambda good: {name: value.to(torch.complex64) for name, value in good.items()},
    "sparse": lambda good: {name: value.to_sparse() for name, value in good.items()},
    "nan": lambda good: {name: value * math.nan for name, value in good.items()},
    "infinite": lambda good: {name: value + math.inf for name, value in good.items()},
    "graph": lambda good: {name: value.clone().requires_grad_() for name, value in good.items()},
    "elsewhere": lambda good: {name: value.to("meta") for name, value in good.items()},
    "raises": lambda good: 1 / 0,
}
NEGATIVE: dict[str, Any] = {"negative": lambda good: {name: -value - 1 for name, value in good.items()}}
NUMBERS: dict[str, Any] = {
    "none": lambda good: None,
    "list": lambda good: [1],
    "of none": lambda good: {"own": None},
    "of texts": lambda good: {"own": "high"},
    "of tensors": lambda good: {"own": torch.ones(3)},
    "of nan": lambda good: {"own": math.nan},
    "numbered": lambda good: {3: 1.0},
    "a column": lambda good: {"ga": 1.0},
    "empty name": lambda good: {"": 1.0},
    "comma": lambda good: {'a,b"\n': 1.0},
    "raises": lambda good: 1 / 0,
}
VECTOR: dict[str, Any] = {
    "none": lambda good: None,
    "text": lambda good: "text",
    "number": lambda good: 3.0,
    "shorter": lambda good: good[:-1],
    "longer": lambda good: torch.cat([good, good]),
    "of one": lambda good: good[:1],
    "scalar": lambda good: good.sum(),
    "row": lambda good: good[None],
    "column": lambda good: good[:, None],
    "double": lambda good: good.double(),
    "whole": lambda good: good.long(),
    "complex": lambda good: good.to(torch.complex64),
    "nan": lambda good: good * math.nan,
    "infinite": lambda good: good + math.inf,
    "raises": lambda good: 1 / 0,
}
PREDICTION: dict[str, Any] = {
    "none": lambda good: None,
    "tensor": lambda good: good.log_probabilities,
    "fewer": lambda good: replace(good, log_probabilities=good.log_probabilities[:-1]),
    "fewer classes": lambda good: replace(good, log_probabilities=good.log_probabilities[:, :-1]),
    "one axis": lambda good: replace(good, log_probabilities=good.log_probabilities.flatten()),
    "nan": lambda good: replace(good, log_probabilities=good.log_probabilities * math.nan),
    "not probabilities": lambda good: replace(good, log_probabilities=good.log_probabilities + 5),
    "whole": lambda good: replace(good, log_probabilities=good.log_probabilities.long()),
    "raises": lambda good: 1 / 0,
}
UPDATE: dict[str, Any] = {
    "none": lambda good: None,
    "tuple": lambda good: (good.message, good.local),
    "dictionary": lambda good: good.message,
    "raises": lambda good: 1 / 0,
}
SERVER: dict[str, Any] = {
    "none": lambda good: None,
    "state alone": lambda good: good[0],
    "three": lambda good: (*good, 3),
    "swapped": lambda good: (good[1], good[0]),
    "list": lambda good: list(good),
    "raises": lambda good: 1 / 0,
}

METHODS: dict[str, dict[str, Any]] = {
    "init": TENSORS,
    "init_client": TENSORS,
    "broadcast": TENSORS,
    "update": UPDATE,
    "message": TENSORS,
    "local": TENSORS,
    "memory": TENSORS,
    "metrics": NUMBERS,
    "server": SERVER,
    "state": TENSORS,
    "server_metrics": NUMBERS,
    "draws": VECTOR | {"nothing": lambda good: None},
    "predict": PREDICTION,
    "mean": VECTOR,
    "needs": {"none": lambda _: None, "dictionary": lambda _: {"sgd": True}, "raises": lambda _: 1 / 0},
    "predictives": {
        "none": lambda _: None,
        "empty": lambda _: (),
        "unknown": lambda _: ("guess",),
        "text": lambda _: "mean",
    },
    "alternatives": {"none": lambda _: None, "list": lambda _: [1], "no method": lambda _: {"a": 3}},
    "check": {"raises": lambda _: 1 / 0},
}
GAUSSIANS: dict[str, dict[str, Any]] = {
    "message": TENSORS | NEGATIVE,
    "state": TENSORS | NEGATIVE,
    "init": TENSORS | NEGATIVE,
    "broadcast": TENSORS | NEGATIVE,
}
"""Of a method whose state has precisions."""


class _Misbehaving:
    """Changes what a method returns, in one place; only in round `since` and later."""

    where: str
    what: str

    def change(self, where: str, good: Any, among: dict[str, Any]) -> Any:
        return among[self.what](good) if where == self.where else good

    def init(self, task: Any, rng: Any) -> Any:
        return self.change("init", super().init(task, rng), TENSORS | NEGATIVE | KEPT)

    def init_client(self, task: Any, state: Any, client_id: int) -> Any:
        return self.change("init_client", {"seen": torch.zeros(3)}, TENSORS | KEPT)

    def broadcast(self, task: Any, state: Any) -> Any:
        return self.change("broadcast", super().broadcast(task, state), TENSORS | NEGATIVE | KEPT)

    def client_update(self, task: Any, broadcast: Any, memory: Any, client: Any, rng: Any) -> Any:
        update = super().client_update(task, broadcast, {}, client, rng)
        if self.where in ("init_client", "memory"):
            update = replace(update, memory={"seen": memory["seen"] + 1})
        if self.where in ("message", "local", "memory"):
            good = getattr(update, self.where)
            return replace(update, **{self.where: self.change(self.where, good, TENSORS | NEGATIVE | KEPT)})
        update = replace(update, metrics=self.change("metrics", update.metrics, NUMBERS))
        return self.change("update", update, UPDATE)

    def server_update(self, task: Any, state: Any, replies: Any, rng: Any) -> Any:
        new, metrics = super().server_update(task, state, replies, rng)
        new = self.change("state", new, TENSORS | NEGATIVE | KEPT)
        return self.change("server", (new, self.change("server_metrics", metrics, NUMBERS)), SERVER)

    def draws(self, task: Any, model: Any, num: int, rng: Any) -> Iterator[Tensor]:
        for vector in super().draws(task, model, num, rng):
            if (self.where, self.what) != ("draws", "nothing"):
                yield self.change("draws", vector, VECTOR)

    def predict(self, *arguments: Any) -> Any:
        return self.change("predict", super().predict(*arguments), PREDICTION)

    def mean(self, task: Any, model: Any) -> Any:
        return self.change("mean", super().mean(task, model), VECTOR)

    @property
    def needs(self) -> Any:
        return self.change("needs", super().needs, METHODS["needs"])

    @property
    def predictives(self) -> Any:
        ways = ("draws", "mean") if self.where == "mean" else ("mean",)
        return self.change("predictives", ways, METHODS["predictives"])

    def alternatives(self) -> Any:
        return self.change("alternatives", {}, METHODS["alternatives"])

    def check(self, task: Any) -> None:
        self.change("check", None, METHODS["check"])


@dataclass(frozen=True)
class Point(_Misbehaving, FedAvg):
    where: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Gaussian(_Misbehaving, Fola):
    where: str
    what: str


RULES: dict[str, Any] = {
    "none": lambda mean, variance: None,
    "mean alone": lambda mean, variance: mean,
    "three": lambda mean, variance: (mean, variance, mean),
    "texts": lambda mean, variance: ("a", "b"),
    "shorter": lambda mean, variance: (mean[:-1], variance[:-1]),
    "rows": lambda mean, variance: (mean[None], variance[None]),
    "scalars": lambda mean, variance: (mean.sum(), variance.sum()),
    "of one": lambda mean, variance: (mean[:1], variance[:1]),
    "single": lambda mean, variance: (mean.float(), variance.float()),
    "complex": lambda mean, variance: (mean.to(torch.complex64), variance),
    "negative": lambda mean, variance: (mean, -variance),
    "zero": lambda mean, variance: (mean, 0 * variance),
    "nan": lambda mean, variance: (mean * math.nan, variance),
    "infinite": lambda mean, variance: (mean, variance + math.inf),
    "raises": lambda mean, variance: 1 / 0,
}


def rule(means: Tensor, variances: Tensor, weights: Tensor, what: str) -> Any:
    return RULES[what](weights @ means, weights @ variances)


NETWORKS: dict[str, Any] = {
    "none": lambda outputs: None,
    "tuple": lambda outputs: (outputs, outputs),
    "fewer outputs": lambda outputs: outputs[:, :-1],
    "more outputs": lambda outputs: torch.cat([outputs, outputs], 1),
    "fewer examples": lambda outputs: outputs[:1],
    "one axis": lambda outputs: outputs.flatten(),
    "column": lambda outputs: outputs[..., None],
    "double": lambda outputs: outputs.double(),
    "whole": lambda outputs: outputs.long(),
    "complex": lambda outputs: outputs.to(torch.complex64),
    "detached": lambda outputs: outputs.detach(),
    "nan": lambda outputs: outputs * math.nan,
    "raises": lambda outputs: 1 / 0,
}
MADE: dict[str, Any] = {
    "no parameters": lambda net: nn.Flatten(),
    "frozen": lambda net: net.requires_grad_(False),
    "double parameters": lambda net: net.double(),
    "half parameters": lambda net: net.half(),
    "whole buffer": lambda net: _with_buffer(net, torch.zeros(2, dtype=torch.int64)),
    "nan parameters": lambda net: _filled(net, math.nan),
    "lazy": lambda net: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)),
    "a class": lambda net: nn.Linear,
    "none": lambda net: None,
    "raises": lambda net: 1 / 0,
}


def _with_buffer(net: nn.Module, buffer: Tensor) -> nn.Module:
    net.register_buffer("count", buffer)
    return net


def _filled(net: nn.Module, value: float) -> nn.Module:
    for parameter in net.parameters():
        nn.init.constant_(parameter, value)
    return net


class Net(nn.Module):
    def __init__(self, inputs: int, num_classes: int, where: str, what: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(inputs, num_classes))
        self.where, self.what = where, what

    def forward(self, x: Tensor) -> Any:
        outputs = self.net(x)
        bad = self.where == "always" or (self.where == "training" and self.training)
        return NETWORKS[self.what](outputs) if bad else outputs


def network(input_shape: tuple[int, ...], num_classes: int, where: str, what: str) -> Any:
    net = Net(math.prod(input_shape), num_classes, where, what)
    return MADE[what](net) if where == "made" else net


DATASETS: dict[str, Any] = {
    "none": lambda good: None,
    "tuple": lambda good: (good.train, good.test),
    "fewer labels": lambda good: replace(good, train=Split(good.train.x, good.train.y[:-1])),
    "no examples": lambda good: replace(good, train=Split(good.train.x[:0], good.train.y[:0])),
    "no test": lambda good: replace(good, test=Split(good.test.x[:0], good.test.y[:0])),
    "labels too large": lambda good: replace(good, train=Split(good.train.x, good.train.y + 1)),
    "labels with fractions": lambda good: replace(good, train=Split(good.train.x, good.train.y.float())),
    "labels of two axes": lambda good: replace(good, train=Split(good.train.x, good.train.y[:, None])),
    "double": lambda good: replace(good, train=Split(good.train.x.double(), good.train.y)),
    "whole": lambda good: replace(good, train=Split(good.train.x.long(), good.train.y)),
    "nan": lambda good: replace(good, train=Split(good.train.x * math.nan, good.train.y)),
    "nan test": lambda good: replace(good, test=Split(good.test.x * math.nan, good.test.y)),
    "other test": lambda good: replace(good, test=Split(good.test.x[:, :, :2], good.test.y)),
    "lists": lambda good: replace(good, train=Split(good.train.x.tolist(), good.train.y.tolist())),
    "arrays": lambda good: replace(good, train=Split(good.train.x.numpy(), good.train.y.numpy())),
    "no likelihood": lambda good: replace(good, likelihood=None),
    "one axis": lambda good: replace(good, train=Split(good.train.x[:, 0, 0, 0], good.train.y)),
    "raises": lambda good: 1 / 0,
}


@dataclass(frozen=True)
class Data:
    name: str
    what: str

    def load(self, data_dir: Path) -> Any:
        generator = torch.Generator().manual_seed(0)
        y = torch.arange(90) % 3
        x = torch.randn(90, 1, 3, 3, generator=generator)
        good = Dataset(Split(x[:60], y[:60]), Split(x[60:], y[60:]), Categorical(3))
        return DATASETS[self.what](good)


PARTITIONS: dict[str, Any] = {
    "none": lambda labels, num: None,
    "lists": lambda labels, num: [[0, 1], [2]],
    "out of range": lambda labels, num: Partition.of(labels, _shares(len(labels) + 7, num)),
    "negative": lambda labels, num: Partition.of(labels, [share - 3 for share in _shares(len(labels), num)]),
    "overlapping": lambda labels, num: Partition.of(labels, _shares(len(labels), 1) * num),
    "fewer clients": lambda labels, num: Partition.of(labels, _shares(len(labels), num - 1)),
    "nobody": lambda labels, num: Partition.of(labels, [share[:0] for share in _shares(len(labels), num)]),
    "fractions": lambda labels, num: Partition.of(labels, [share + 0.5 for share in _shares(len(labels), num)]),
    "raises": lambda labels, num: 1 / 0,
}


def _shares(total: int, num: int) -> list[Any]:
    return [part.numpy() for part in torch.arange(total).tensor_split(num)]


@dataclass(frozen=True)
class Shares:
    name: str
    what: str

    def split(self, labels: Any, num_classes: int, num_clients: int, seed: int) -> Any:
        return PARTITIONS[self.what](labels, num_clients)


@dataclass(frozen=True)
class Watcher:
    name: str
    where: str
    what: str

    def begin(self, info: Any) -> None:
        self._raise("begin")

    def round(self, round_: int, row: Any) -> None:
        self._raise("round")

    def end(self, summary: Any) -> None:
        self._raise("end")

    def _raise(self, when: str) -> None:
        if when == self.where:
            raise ZeroDivisionError(when)
