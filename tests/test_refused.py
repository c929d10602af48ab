"""What used to be accepted and was wrong, or ended in a traceback: each is refused in a sentence, before it is run."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bfl_bench import records
from bfl_bench.build import load, plan
from bfl_bench.data.dataset import Dataset, Split
from bfl_bench.data.synthetic import Synthetic
from bfl_bench.errors import ConfigError, PartError
from bfl_bench.method import Client, Replies, Task, Tensors, Update
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.run.loop import run
from tests.composing import SMALL, only_folder, resolve
from tests.conftest import BflRun
from tests.unit.test_run import make_experiment

STAND_IN = ["data_dir=stand-in", "rounds=1", "partition=natural"]


@dataclass(frozen=True)
class WrongLabels(Synthetic):
    """The labels of one part are changed."""

    part: str
    label: int
    num_dropped: int

    def load(self, data_dir: Path) -> Dataset:
        dataset = super().load(data_dir)
        split: Split = getattr(dataset, self.part)
        y = split.y.clone()
        y[3] = self.label
        return replace(dataset, **{self.part: Split(split.x, y[self.num_dropped :])})


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize(
    ("label", "dropped", "sentence"),
    [
        (3, 0, "the labels of {part} are torch.int64 from 0 to 3; expected: torch.int64 from 0 to 2"),
        (-1, 0, "the labels of {part} are torch.int64 from -1 to 2; expected: torch.int64 from 0 to 2"),
        (0, 2, "{part} has {n} inputs and {m} labels; expected: one label per input"),
    ],
)
def test_labels_that_are_no_class(part: str, label: int, dropped: int, sentence: str) -> None:
    config = resolve(*SMALL)
    config["dataset"] |= {"_target_": f"{__name__}.WrongLabels", "part": part, "label": label, "num_dropped": dropped}
    num = 120 if part == "train" else 40
    with pytest.raises(PartError) as caught:
        load(plan(config))
    assert str(caught.value).startswith("dataset synthetic: " + sentence.format(part=part, n=num, m=num - dropped))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["dataset=shakespeare", "model=mlp", *STAND_IN],
            "model: got 'mlp', allowed: one for inputs of shape (80,) and type torch.int64 (",
        ),
        (
            ["dataset=har", "model=lstm", *STAND_IN],
            "model: got 'lstm', allowed: one for inputs of shape (561,) and type torch.float32 (",
        ),
    ],
)
def test_a_network_for_other_data(overrides: list[str], sentence: str, bfl_run: BflRun, tmp_path: Path) -> None:
    result = bfl_run(*overrides)
    assert result.code == 2
    assert result.err.startswith(f"bfl-run: {sentence}"), result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


def misshapen(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes + 1))


class NoTensor(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x]


def no_tensor(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return NoTensor()


def batch_norm(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, num_classes))


def batch_norm_2d(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, num_classes))


def with_model(name: str, *overrides: str) -> dict[str, Any]:
    config = resolve(*SMALL, "method=fedavg", *overrides)
    config["model"] = {"_target_": f"{__name__}.{name}", "name": name}
    return config


@pytest.mark.parametrize(("name", "found"), [("misshapen", "(2, 4)"), ("no_tensor", "list")])
def test_a_network_with_other_outputs(name: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(plan(with_model(name)))
    said = f"model: got '{name}', allowed: one that makes (2, 3) of inputs of shape (2, 1, 4, 4) (it makes {found})"
    assert str(caught.value) == said


def test_batch_norm_and_a_minibatch_of_one() -> None:
    config = with_model("batch_norm", "num_clients=4", "local.batch_size=29")
    config["partition"] = resolve("partition=iid")["partition"]  # 30 examples each
    with pytest.raises(ConfigError) as caught:
        load(plan(config))
    assert str(caught.value).startswith(
        "local.batch_size: got 29, allowed: one that leaves no client a minibatch of one"
    )
    assert "client 0 has 30 examples" in str(caught.value)
    config["local"]["batch_size"] = 28
    load(plan(config))
    config["local"]["batch_size"] = 29
    config["model"]["_target_"] = f"{__name__}.batch_norm_2d"  # has a variance over positions
    before = torch.get_rng_state()
    model = load(plan(config))[0].worker.task.model
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.vector, model.initial)  # its statistics too: trying it out leaves no trace


@dataclass(frozen=True)
class Spoiling(FedAvg):
    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        update = super().client_update(task, broadcast, memory, client, rng)
        return replace(update, memory={"drift": torch.tensor([1.0, torch.nan])})


def test_nan_in_a_private_state_is_seen(tmp_path: Path) -> None:
    summary = run(make_experiment(Spoiling("spoiling", "size")), tmp_path)
    assert summary["status"] == "diverged"
    assert "drift of its private state became NaN" in summary["reason"]


@dataclass(frozen=True)
class Nothing:
    """Takes what a part of any group is given, and can do nothing."""

    name: str


@pytest.mark.parametrize(
    ("group", "function"), [("dataset", "load"), ("partition", "split"), ("engine", "check"), ("observer", "begin")]
)
def test_an_object_that_is_no_part(group: str, function: str) -> None:
    config = resolve(*SMALL)
    config[group] = {"_target_": f"{__name__}.Nothing", "name": "nothing"}
    with pytest.raises(ConfigError) as caught:
        plan(config)
    assert caught.value.key == f"{group}._target_"
    assert caught.value.allowed.startswith(f"a class whose objects have the function {function}")


def no_module(input_shape: tuple[int, ...], num_classes: int) -> int:
    return num_classes


def test_a_network_that_is_no_module() -> None:
    with pytest.raises(ConfigError, match=r"model\._target_: got 'int', allowed: what makes a torch\.nn\.Module"):
        load(plan(with_model("no_module")))


def test_too_little_memory_is_one_sentence(bfl_run: BflRun) -> None:
    result = bfl_run(*SMALL, "dataset.train_samples=1000000000000000", "rounds=1")
    assert result.code == 1
    assert result.err.startswith("bfl-run: out of memory: a smaller size in the config may help (")
    assert result.err.count("\n") == 1


@dataclass(frozen=True)
class Returns(FedAvg):
    """Returns something else than it should, somewhere."""

    where: str
    what: Any

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        return self.what if self.where == "init" else super().init(task, rng)

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        update = super().client_update(task, broadcast, memory, client, rng)
        if self.where == "update":
            return self.what
        return replace(update, **{self.where: self.what}) if self.where in ("message", "memory", "metrics") else update

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        new = super().server_update(task, state, replies, rng)
        if self.where == "server":
            return self.what
        return (self.what, {}) if self.where == "state" else new


@pytest.mark.parametrize(
    ("where", "what", "sentence"),
    [
        ("init", None, "method own: init returned NoneType; expected: a dictionary of tensors"),
        ("update", None, "client_update returned NoneType; expected: an Update"),
        ("message", [1], "client_update returned as message list; expected: a dictionary of tensors"),
        ("message", {"params": 3.0}, "client_update returned as message 'params': float; expected: tensors by their"),
        ("memory", {3: torch.ones(1)}, "client_update returned as memory 3: Tensor; expected: tensors by their names"),
        ("metrics", {"a": torch.ones(1)}, "client_update returned as metrics 'a': Tensor; expected: numbers"),
        ("metrics", None, "client_update returned as metrics NoneType; expected: a dictionary of numbers"),
        ("server", {"params": torch.ones(1)}, "round 1: server_update returned dict; expected: the state and metrics"),
        ("state", {"params": None}, "server_update returned as state 'params': NoneType; expected: tensors"),
        ("state", {"params": torch.ones(1, requires_grad=True)}, "a tensor with its gradient's graph"),
    ],
)
def test_a_method_that_returns_something_else(where: str, what: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(PartError) as caught:
        run(make_experiment(Returns("own", "size", where, what)), tmp_path)
    assert str(caught.value).startswith("method own")
    assert sentence in str(caught.value)


@pytest.mark.slow
def test_another_processor_is_said_and_recorded(bfl_run: BflRun, tmp_path: Path) -> None:
    words = [*SMALL, "method=fedavg", "rounds=1"]
    assert bfl_run(*words).code == 0
    folder = only_folder(tmp_path / "outputs")
    path = folder / records.ENVIRONMENT
    first = json.loads(path.read_text())
    assert set(first["cpu"]) == {"name", "instructions"}
    other = {"name": "Abacus", "instructions": "BEADS"}
    path.write_text(json.dumps(first | {"cpu": other}))
    (folder / records.SUMMARY).unlink()
    result = bfl_run(*words)
    assert result.code == 0
    now = f"{first['cpu']['name']} ({first['cpu']['instructions']})"
    assert f"begun on Abacus (BEADS), continued on {now}: the result is that of neither alone" in result.err
    second = json.loads(path.read_text())
    assert (second["cpu"], second["earlier_cpus"]) == (first["cpu"], [other])
    (folder / records.SUMMARY).unlink()
    assert "begun on" not in bfl_run(*words).err
    assert json.loads(path.read_text())["earlier_cpus"] == [other]
