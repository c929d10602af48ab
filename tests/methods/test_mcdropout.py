"""MC dropout: FedAvg without dropout, masks of their own for every example and pass, all other layers as ever."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bfl_bench.likelihood import Categorical, Prediction
from bfl_bench.method import Task
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.mcdropout import McDropout
from tests.composing import SMALL, experiment, resolve, run_in
from tests.federation import NUM_CLASSES, generator, make_clients, make_task, random_start, run_round

MC = McDropout("mcdropout", "size")
FEDAVG = FedAvg("fedavg", "size")


@dataclass
class Collector:
    """A mixture that keeps the outputs of its members."""

    outputs: list[Tensor] = field(default_factory=list)

    def add(self, outputs: Tensor) -> None:
        self.outputs.append(outputs)

    def result(self) -> Prediction:
        return Prediction(torch.stack(self.outputs), None)


@dataclass(frozen=True)
class Collecting(Categorical):
    def mixture(self) -> Collector:  # type: ignore[override] # logits instead of probabilities
        return Collector()


def make_dropout_task(*layers: nn.Module) -> Task:
    """Dropout before the last linear layer, behind the given layers."""
    last = nn.Linear(6, NUM_CLASSES)
    return make_task(nn.Sequential(nn.Linear(5, 6), *layers, nn.Tanh(), nn.Dropout(0.4), last))


def logits_of(task: Task, params: Tensor, x: Tensor, num: int, batch_size: int = 8) -> Tensor:
    """Logits of every pass, (num, n, C)."""
    collecting = replace(task, likelihood=Collecting(NUM_CLASSES))
    return MC.predict(collecting, {"params": params}, x, num, batch_size, generator()).log_probabilities


def test_without_dropout_it_is_fedavg(tmp_path: Path) -> None:
    fedavg = run_in(tmp_path / "fedavg", *SMALL, "method=fedavg")
    assert run_in(tmp_path / "off", *SMALL, "method=mcdropout", "model.dropout=0") == fedavg
    assert run_in(tmp_path / "on", *SMALL, "method=mcdropout") != fedavg


def test_training_is_that_of_fedavg() -> None:
    """Predictions alone differ, dropout or not."""
    task = make_dropout_task()
    state = {"params": random_start(task)}
    rounds = [run_round(method, task, state, make_clients())["params"] for method in (MC, FEDAVG)]
    assert torch.equal(*rounds)


def test_mean_logits_are_those_without_dropout() -> None:
    """Behind the last dropout all is linear."""
    task = make_dropout_task()
    params, x = random_start(task), torch.randn(10, 5, generator=generator(1))
    found = logits_of(task, params, x, 4000)
    task.model.load(params)
    task.model.module.eval()
    with torch.no_grad():
        expected = task.model(x)
    assert found.std(0).min() > 0.05
    # Standard errors are below 1 / sqrt(4000) = 0.016.
    torch.testing.assert_close(found.mean(0), expected, rtol=0.0, atol=0.06)


@pytest.mark.parametrize("batch_size", [3, 50])
def test_masks_are_fresh_for_every_example_and_pass(batch_size: int) -> None:
    """The same example fifty times: 64 masks are possible, of which few coincide."""
    task = make_dropout_task()
    x = torch.randn(1, 5, generator=generator(1)).expand(50, 5)
    found = logits_of(task, random_start(task), x, 3, batch_size)
    assert all(len({tuple(row) for row in logits.tolist()}) > 20 for logits in found)
    assert not torch.equal(found[0], found[1])


def test_batch_norm_predicts_as_ever() -> None:
    task = make_dropout_task(nn.BatchNorm1d(6))
    params, x = random_start(task), torch.randn(10, 5, generator=generator(1))
    found = logits_of(task, params, x, 2000)
    assert torch.equal(task.model.vector, params)  # its statistics, too
    expected = FEDAVG.predict(
        replace(task, likelihood=Collecting(NUM_CLASSES)), {"params": params}, x, 1, 8, generator()
    )
    torch.testing.assert_close(found.mean(0), expected.log_probabilities[0], rtol=0.0, atol=0.1)


def test_predictions_repeat_and_leave_the_global_generator_alone() -> None:
    task = make_dropout_task()
    params, x = random_start(task), torch.randn(10, 5, generator=generator(1))
    before = torch.get_rng_state()
    first, second = (MC.predict(task, {"params": params}, x, 3, 8, generator()) for _ in range(2))
    assert torch.equal(first.log_probabilities, second.log_probabilities)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.expected_entropy is not None
    other = MC.predict(task, {"params": params}, x, 3, 8, generator(9))
    assert not torch.equal(first.log_probabilities, other.log_probabilities)


def test_the_method_brings_dropout_and_the_command_line_wins() -> None:
    assert resolve("method=mcdropout")["model"]["dropout"] > 0
    assert resolve("method=mcdropout", "model.dropout=0.5")["model"]["dropout"] == 0.5
    assert resolve("method=mcdropout", "dataset=fashion_mnist")["model"]["dropout"] > 0
    module = experiment(*SMALL, "method=mcdropout", "model.dropout=0.5").worker.task.model.module
    assert [layer.p for layer in module.modules() if isinstance(layer, nn.Dropout)] == [0.5]
