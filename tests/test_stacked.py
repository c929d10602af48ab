"""Clients in lockstep: the sequential engine's results within rounding, the same bytes at every repeat."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bfl_bench import records
from bfl_bench.build import load, plan
from bfl_bench.engines.worker import Job, Reply, Worker
from bfl_bench.errors import ConfigError, PartError
from bfl_bench.identity import folder_name
from bfl_bench.likelihood import Categorical
from bfl_bench.method import Client, Task, Tensors, Update
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.rng import stream
from bfl_bench.run.loop import Experiment, run
from tests.composing import SMALL, choose, experiment, resolve, run_in
from tests.test_alone import METHODS
from tests.test_contract import Killer
from tests.test_processes import files

STACKED = "engine=stacked"
QUICK = ("fedavg", "fola", "fvb", "mcdropout", "scaffold", "virtual")
TWO_EPOCHS = ("fedep", "fedpa")  # of which the first is burn-in


def replies_of(experiment_: Experiment, worker: Worker | None = None) -> list[Reply]:
    """Let all clients train in the first round."""
    worker = worker or experiment_.worker
    state = worker.method.init(worker.task, stream(1, "init"))
    broadcast = worker.method.broadcast(worker.task, state)
    jobs = [
        Job(round=1, client_id=id_, memory=worker.method.init_client(worker.task, state, id_), evaluate_local=True)
        for id_ in range(len(worker.client_indices))
    ]
    with experiment_.engine.start(worker) as runner:
        return list(runner.run(broadcast, jobs))


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative to the expected tensor's norm."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def check_close(stacked: list[Reply], sequential: list[Reply]) -> None:
    for found, expected in zip(stacked, sequential, strict=True):
        assert found.client_id == expected.client_id
        for kind in ("message", "memory", "local"):
            tensors, others = getattr(found, kind), getattr(expected, kind)
            assert tensors.keys() == others.keys()
            for name, tensor in tensors.items():
                assert distance(tensor, others[name]) < 1e-5, f"{kind} {name}"
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
        assert found.scores is not None
        assert expected.scores is not None
        assert found.scores.values["nll"] == pytest.approx(expected.scores.values["nll"], rel=1e-5)
        assert found.train_seconds > 0


@pytest.mark.parametrize(
    "method", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_every_method_gives_the_sequential_engines_results(method: str) -> None:
    """After one local epoch, clients being of unequal size; five at a time, or two."""
    overrides = [*choose(method), f"local.epochs={2 if method in TWO_EPOCHS else 1}"]
    sequential = replies_of(experiment(*overrides))
    check_close(replies_of(experiment(*overrides, STACKED)), sequential)
    check_close(replies_of(experiment(*overrides, STACKED, "engine.clients=2")), sequential)


def test_numbers_as_labels() -> None:
    overrides = ["dataset=diabetes", "method=fedavg", "model.hidden=[5]", "local.epochs=1", "local.lr=0.01"]
    check_close(replies_of(experiment(*overrides, STACKED)), replies_of(experiment(*overrides)))


class Smooth(Categorical):
    """A user's own loss, whose slopes nobody has written."""

    def loss(self, outputs: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:  # type: ignore[override]
        return super().loss(0.5 * outputs, labels, reduction)  # type: ignore[arg-type]


def test_a_likelihood_without_slopes_of_its_own_is_differentiated_one_by_one() -> None:
    made = [experiment(*choose("fedavg"), "local.epochs=1", *engine) for engine in ([], [STACKED])]
    for one in made:
        object.__setattr__(one.worker.task, "likelihood", Smooth(3))
    sequential, stacked = (replies_of(one) for one in made)
    check_close(stacked, sequential)
    plain = replies_of(experiment(*choose("fedavg"), "local.epochs=1"))
    assert distance(stacked[0].message["params"], plain[0].message["params"]) > 1e-3


@pytest.mark.parametrize("method", ["fvb", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_a_run_repeats_and_continues_byte_for_byte(method: str, tmp_path: Path) -> None:
    overrides = [*choose(method), STACKED, "participation=0.8"]
    run_in(tmp_path / "whole", *overrides)
    run_in(tmp_path / "again", *overrides)
    assert files(tmp_path / "whole") == files(tmp_path / "again")
    (tmp_path / "parts").mkdir()
    with pytest.raises(MemoryError):
        run(experiment(*overrides), tmp_path / "parts", [Killer(2, tmp_path / "parts")])
    run_in(tmp_path / "parts", *overrides)
    assert files(tmp_path / "whole") == files(tmp_path / "parts")


def test_the_engine_is_a_part_of_the_runs_identity() -> None:
    sequential, stacked, fewer = (
        folder_name(resolve(*SMALL, "method=fedavg", *more)) for more in ([], [STACKED], [STACKED, "engine.clients=2"])
    )
    assert len({sequential, stacked, fewer}) == 3
    assert sequential == folder_name(resolve(*SMALL, "method=fedavg", "engine=processes"))


def test_a_network_that_is_not_known_is_refused() -> None:
    images = ["dataset=synthetic", "dataset.shape=[1,16,16]", "method=fedavg"]
    sentence = (
        "engine: got 'stacked', allowed: another engine, or a network of linear layers, each used once, on vectors "
    )
    with pytest.raises(ConfigError, match=re.escape(f"{sentence}(0 is Conv2d")):
        experiment(*images, "model=lenet", STACKED)


def test_where_greenlet_is_not_installed_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    sentence = "engine: got 'stacked', allowed: sequential or processes; greenlet has to be installed first: "
    with pytest.raises(ConfigError, match=re.escape(sentence + "pip install -e '.[stacked]'")):
        plan(resolve(*SMALL, STACKED))


def test_a_diverged_client_ends_the_run_as_it_does_sequentially(tmp_path: Path) -> None:
    summaries = []
    for name, engine in (("sequential", []), ("stacked", [STACKED])):
        (tmp_path / name).mkdir()
        overrides = [*SMALL, "method=fedavg", "local.lr=1e30", *engine]
        summaries.append(run(experiment(*overrides), tmp_path / name))
    assert summaries[0]["status"] == "diverged"
    assert summaries[0] == summaries[1]


@dataclass(frozen=True)
class Fragile(FedAvg):
    """Client 3 is interrupted in the middle of the second round's training, or hands back something else."""

    interrupted: bool

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        update = super().client_update(task, broadcast, memory, client, rng)
        if client.id != 3:
            return update
        if self.interrupted:
            raise KeyboardInterrupt
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(("interrupted", "error"), [(True, KeyboardInterrupt), (False, PartError)])
def test_what_a_client_raises_ends_the_run(interrupted: bool, error: type[BaseException], tmp_path: Path) -> None:
    config = resolve(*SMALL, "method=fedavg", STACKED)
    config["method"] |= {"_target_": f"{__name__}.Fragile", "interrupted": interrupted}
    before = torch.get_rng_state()
    with pytest.raises(error):
        run(load(plan(config))[0], tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert not (tmp_path / records.METRICS).exists() or not (tmp_path / records.METRICS).read_text().count("\n") > 1
