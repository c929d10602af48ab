"""Every method runs with nothing else given, and parts of a user's own take part in a run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bfl_bench.build import load, plan
from bfl_bench.method import Needs, Task, Tensors
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.records import Cell, config_folder
from bfl_bench.run.loop import run
from bfl_bench.run.observers import RunInfo
from tests.composing import NEEDS, SMALL, experiment, resolve, run_in
from tests.conftest import BflRun

METHODS = sorted(path.stem for path in (config_folder() / "method").glob("[!_]*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_method_alone_is_a_whole_experiment(method: str) -> None:
    """On the default data, with nothing else: composed, built and checked by the method itself."""
    worker = experiment(f"method={method}").worker
    worker.method.check(worker.task)
    assert worker.method.init(worker.task, torch.Generator().manual_seed(0))["params"].isfinite().all()


@pytest.mark.slow
def test_a_sweep_over_all_methods(bfl_run: BflRun) -> None:
    """In one command, whose other keys only make it short; keys of one method are left out of the others' points."""
    short = ["rounds=1", "local.epochs=2", "eval.local_every=0"]
    long = ("dense", "dense_fedlpa", "fedlpa_released", "fedfisher_released", "fedbens", "fedbens_released")
    quick = [method for method in METHODS if method not in long]
    result = bfl_run("-m", f"method={','.join(quick)}", *short)
    assert result.code == 0, result.err
    assert f"Sweep of {len(quick)}: {len(quick)} done" in result.out
    for method in sorted(set(METHODS) - set(quick)):
        single = bfl_run(f"method={method}", *short, *NEEDS[method])
        assert single.code == 0, single.err


@dataclass(frozen=True)
class Members(FedAvg):
    """Predicts with all of its initial models, and learns from the first."""

    needs: ClassVar[Needs] = Needs(num_initials=3)

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        return {"params": task.model.initial.clone(), "members": task.initials.clone()}

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        yield from model.get("members", model["params"][None])


def test_a_method_gets_the_initial_models_that_it_needs() -> None:
    config = resolve(*SMALL, "method=fedavg")
    config["method"]["_target_"] = f"{__name__}.Members"
    task = load(plan(config))[0].worker.task
    assert task.initials.shape == (3, len(task.model.vector))
    assert torch.equal(task.initials[0], experiment(*SMALL).worker.task.model.initial)
    assert len({tuple(row.tolist()) for row in task.initials}) == 3
    again = load(plan(config))[0].worker.task
    assert torch.equal(task.initials, again.initials)


@dataclass(frozen=True)
class Diary:
    """An observer that writes down what it is told."""

    name: str
    path: str

    def _write(self, *words: object) -> None:
        with Path(self.path).open("a") as file:
            print(*words, file=file)

    def begin(self, info: RunInfo) -> None:
        self._write("begin", info.finished, info.rounds)

    def round(self, round_: int, row: Mapping[str, Cell] | None) -> None:
        self._write("round", round_, None if row is None else row["round"])

    def end(self, summary: Mapping[str, Any]) -> None:
        self._write("end", summary["status"])


def test_an_observer_of_ones_own_follows_the_run(bfl_run: BflRun, tmp_path: Path) -> None:
    own = tmp_path / "own" / "observer"
    own.mkdir(parents=True)
    (own / "diary.yaml").write_text(f"_target_: {__name__}.Diary\nname: diary\npath: {tmp_path / 'diary.txt'}\n")
    options = ["--config-dir", str(own.parent), *SMALL, "method=fedavg", "eval.every=2", "observer=diary"]
    assert bfl_run(*options).code == 0
    assert (tmp_path / "diary.txt").read_text().splitlines() == [
        "begin 0 3", "round 1 None", "round 2 2", "round 3 3", "end done"
    ]  # fmt: skip
    with_it = next((tmp_path / "outputs").iterdir()).name
    assert "finished earlier" in bfl_run(*SMALL, "method=fedavg", "eval.every=2").out, with_it  # it is the same run


def test_a_run_continues_for_its_observers(tmp_path: Path) -> None:
    run_in(tmp_path, *SMALL, "method=fedavg", "rounds=1")
    diary = Diary("diary", str(tmp_path / "diary.txt"))
    run(experiment(*SMALL, "method=fedavg", "rounds=3"), tmp_path, [diary])
    assert (tmp_path / "diary.txt").read_text().splitlines()[0] == "begin 1 3"
