"""Methods that break the contract: each ends in a sentence that says what is wrong, or is no problem at all."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from bfl_bench import records
from bfl_bench.build import plan
from bfl_bench.errors import ConfigError, PartError
from bfl_bench.method import Client, Needs, Replies, Task, Tensors, Update
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.run.loop import run
from tests.composing import SMALL, resolve
from tests.conftest import BflRun
from tests.unit.test_run import make_experiment, rows_of


@dataclass(frozen=True)
class ReadsSome(FedAvg):
    """Reads so many replies and leaves the others."""

    num: int = 1

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        some = [reply for _, reply in zip(range(self.num), replies, strict=False)]
        return super().server_update(task, state, some, rng) if some else (state, {})


@pytest.mark.parametrize("num", [0, 1])
@pytest.mark.parametrize("keep_messages", [[], [1]])
def test_replies_that_are_not_read(num: int, keep_messages: list[int], tmp_path: Path) -> None:
    experiment = make_experiment(ReadsSome("some", "size", num), keep_messages=keep_messages)
    unread = experiment.cohort(1)[num]
    sentence = f"method some: server_update did not read the reply of client {unread}; expected: all 2 replies"
    with pytest.raises(PartError, match=sentence):
        run(experiment, tmp_path)


@dataclass(frozen=True)
class Reports(FedAvg):
    """Reports a metric of the server from round 2 on, and one of client 1 alone."""

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        return super().init(task, rng) | {"round": torch.zeros(())}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        update = super().client_update(task, broadcast, memory, client, rng)
        return replace(update, metrics=update.metrics | ({"special": 4.5} if client.id == 1 else {}))

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        new, _ = super().server_update(task, state, replies, rng)
        round_ = state["round"] + 1
        return new | {"round": round_}, ({"late": round_.item()} if round_ >= 2 else {})


def test_metrics_of_some_rounds_and_of_some_clients_are_empty_elsewhere(tmp_path: Path) -> None:
    experiment = make_experiment(Reports("reports", "size"), rounds=6)
    rows = rows_of(experiment, tmp_path)
    assert [row["late"] for row in rows] == [None, 2, 3, 4, 5, 6]
    with_client_1 = [1 in experiment.cohort(round_) for round_ in range(1, 7)]
    assert any(with_client_1)
    assert not all(with_client_1)
    assert [row["special"] for row in rows] == [4.5 if there else None for there in with_client_1]


def test_a_run_that_gained_a_column_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    """It is killed in the round that brings the column, after the table was written and before the checkpoint."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()

    def begin(rounds: int, folder: Path) -> None:
        torch.manual_seed(0)  # of the initial network
        run(make_experiment(Reports("reports", "size"), rounds=rounds), folder)

    begin(4, whole)
    begin(1, parts)
    table = records.Table(parts / records.METRICS, ())
    manifest = records.read_json(parts / records.CHECKPOINT / "manifest.json")
    assert manifest is not None
    table.resume(manifest["notes"]["tables"][records.METRICS])
    table.append([{"round": 2, "late": 2.0}])
    begin(4, parts)
    for name in (records.METRICS, records.CLIENTS, records.RELIABILITY):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()


@dataclass(frozen=True)
class Overwrites(FedAvg):
    metric: str

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        return super().server_update(task, state, replies, rng)[0], {self.metric: 1.0}


@pytest.mark.parametrize("metric", ["ga", "nll", "bytes_up", "mt_acc", "ga@eaa", "validation_nll"])
def test_a_metric_named_as_a_column_of_the_runner(metric: str, tmp_path: Path) -> None:
    with pytest.raises(PartError, match=f"a metric '{metric}', which is a column of the runner's own"):
        run(make_experiment(Overwrites("overwrites", "size", metric)), tmp_path)


def test_a_misspelt_need_is_a_type_error() -> None:
    misspelt: dict[str, Any] = {"gausian_layers": True}
    with pytest.raises(TypeError, match="gausian_layers"):
        Needs(**misspelt)


@dataclass(frozen=True)
class Misplaced(FedAvg):
    gaussian_layers: ClassVar[bool] = True


@dataclass(frozen=True)
class NoMethod:
    name: str
    weights: str

    def draws(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("Misplaced", "a class that declares gaussian_layers in `needs = Needs"),
        ("NoMethod", "a subclass of bfl_bench.method.Method"),
    ],
)
def test_what_is_no_method_is_refused(target: str, sentence: str) -> None:
    config = resolve(*SMALL, "method=fedavg")
    config["method"]["_target_"] = f"{__name__}.{target}"
    with pytest.raises(ConfigError, match=sentence):
        plan(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["method.structure=full", "model.hidden=[300]"], "model: got 'mlp', allowed: a network of at most 3000"),
        (["method=fedlpa", "model=lstm", "dataset=shakespeare", "partition=natural"], "model: got 'lstm', allowed: a"),
        (["method=dense", "model=mlp", "dataset=synthetic"], "dataset: got 'synthetic', allowed: square images"),
        (["method=fedov", "model=mlp", "dataset=synthetic"], "dataset: got 'synthetic', allowed: images"),
        (
            ["model=lenet"],
            "model: got 'lenet', allowed: one for inputs of shape (1, 8, 8); lenet needs images with sides",
        ),
        (["method=virtual", "server.lr=1.5"], "method.damping: got null"),
        (["method=virtual", "model.bayesian_layers=0"], "model.bayesian_layers: got 0"),
        (["method=fednova", "local.optimizer=adam"], "local.optimizer: got 'adam', allowed: sgd"),
    ],
)
def test_what_a_method_cannot_take_is_refused_before_anything_is_written(
    overrides: list[str], sentence: str, bfl_run: BflRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BFL_DATA_DIR", records.STAND_IN)
    result = bfl_run(*overrides, "rounds=1")
    assert result.code == 2, result.err
    assert sentence in result.err
    assert not (tmp_path / "outputs").exists()


def test_a_full_precision_without_gamma_runs(bfl_run: BflRun) -> None:
    result = bfl_run("method.structure=full", "model=softmax", "rounds=2", "local.epochs=1")
    assert result.code == 0, result.err
