"""How long a run will take, by a clock that ticks once for each local step and for each prediction."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bfl_bench.likelihood import Prediction
from bfl_bench.meter import METER
from bfl_bench.method import Task, Tensors
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.run import estimate as module
from bfl_bench.run.estimate import describe_time, estimate
from tests.unit.test_run import make_experiment

PREDICTED = 0


@dataclass(frozen=True)
class Counting(FedAvg):
    def predict(
        self, task: Task, model: Tensors, x: Tensor, num: int, batch_size: int, rng: torch.Generator
    ) -> Prediction:
        global PREDICTED
        PREDICTED += len(x)
        return super().predict(task, model, x, num, batch_size, rng)


@pytest.mark.parametrize(("epochs", "batch_size"), [(1, 1), (3, 2), (40, 5)])
def test_seconds_are_those_of_all_steps_and_predictions(
    epochs: int, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes a second here, and an example a second to predict."""
    monkeypatch.setattr(module, "_now", lambda tensor: float(METER.steps + PREDICTED))
    run = make_experiment(Counting("counting", "size"), sizes=(30, 60, 9), every=2, local_every=3)
    task = run.worker.task
    local = replace(task.local, epochs=epochs, batch_size=batch_size)
    run = replace(run, worker=replace(run.worker, task=replace(task, local=local)))
    before = METER.steps
    found = estimate(run)
    assert METER.steps - before <= 1 + 12  # steps are few however many there will be
    assert found.training == pytest.approx(run.count_steps())
    test = len(run.worker.sets["test"].split)
    assert found.evaluation == pytest.approx(3 * test + 2 * 2 * test)  # rounds 2, 4, 5; two clients in rounds 3, 5


def test_many_rounds_are_counted_at_once() -> None:
    """As if they went on as the first do, each of two clients of three."""
    run = make_experiment(FedAvg("fedavg", "size"), sizes=(20, 20, 20), every=7)
    steps = run.count_steps()
    assert steps % run.rounds == 0
    long = replace(run, worker=replace(run.worker, rounds=2**31))
    assert long.count_steps() == steps // run.rounds * 2**31
    for every in (0, 1, 3, 7):
        due = [round_ for round_ in range(1, run.rounds + 1) if run.is_due(round_, every)]
        assert run.count_due(every) == len(due)
    assert long.count_due(2) == 2**30


def test_what_cannot_be_timed_is_not_known() -> None:
    @dataclass(frozen=True)
    class Refusing(FedAvg):
        def init(self, task: Task, rng: torch.Generator) -> Tensors:
            raise ValueError("too few examples\nreally")

    assert describe_time(make_experiment(Refusing("refusing", "size"))) == "time: not known (too few examples)"


def test_it_is_said_in_minutes() -> None:
    text = module.Estimate(90.0, 30.0).describe()
    assert text.startswith("time: about 2.0 minutes (1.5 training, 0.5 evaluation) on this machine")
