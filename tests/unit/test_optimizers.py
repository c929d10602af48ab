"""Local steps as values: Sgd and Adam against torch.optim, schedules, what happens after a step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bfl_bench.errors import ConfigError
from bfl_bench.inference.train import Adam, Sgd, make_optimizer, train
from bfl_bench.method import Tensors
from bfl_bench.methods.fedavg import FedAvg
from tests.composing import SMALL, experiment
from tests.federation import generator, make_clients, make_local, make_task, make_worker, random_start

# float32 on both sides; Adam divides by roots of squared gradients, which amplifies the rounding of small ones.
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}


class Recorder:
    """An optimizer that notes what it is asked, and steps by hand."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def begin(self, parameters: Tensor) -> Tensors:
        return {"count": torch.zeros(())}

    def step(self, parameters: Tensor, gradient: Any, memory: Tensors, lr: float, rng: torch.Generator) -> None:
        before = parameters.clone()
        plain = gradient(None).clone()
        moved = gradient(torch.full_like(parameters, 0.1)).clone()
        assert torch.equal(parameters, before)  # an offset is taken back to the last bit
        assert not torch.allclose(plain, moved)
        self.gradients.append(plain)
        memory["count"] += 1
        parameters.sub_(plain, alpha=lr)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_adam_is_that_of_torch(weight_decay: float, clip: float | None) -> None:
    local: dict[str, Any] = {"optimizer": "adam", "betas": [0.8, 0.95], "lr": 0.02, "weight_decay": weight_decay}
    task, client = make_task(clip=clip, epochs=3, **local), make_clients()[1]
    start = random_start(task)
    batches: list[tuple[Tensor, Tensor]] = []

    def note(x: Tensor, y: Tensor, outputs: Tensor) -> Tensor:
        batches.append((x.clone(), y.clone()))
        return torch.zeros(())

    trained = train(task, start, client, generator(), extra_loss=note)
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    module.load_state_dict(task.model.layout.to_state_dict(start))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02, betas=(0.8, 0.95), weight_decay=weight_decay)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    assert len(batches) == 9
    torch.testing.assert_close(task.model.layout.to_state_dict(trained.vector), dict(module.state_dict()), **ROUNDING)
    assert trained.memory["steps"] == 9


@pytest.mark.parametrize("local", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"clip": 0.3}, {"optimizer": "adam"}])
def test_the_default_given_explicitly_changes_no_bit(local: dict[str, Any]) -> None:
    task, client = make_task(**local), make_clients()[1]
    start = random_start(task)
    default = train(task, start, client, generator())
    given = train(task, start, client, generator(), optimizer=make_optimizer(task.local))
    assert torch.equal(default.vector, given.vector)
    assert default.metrics == given.metrics


def test_plain_sgd_by_the_gradient_as_a_vector_is_the_fast_path() -> None:
    """An adjustment that does nothing leads through the optimizer; without it, parameters move tensor by tensor."""
    task, client = make_task(), make_clients()[1]
    start = random_start(task)
    slow = train(task, start, client, generator(), adjust=lambda parameters, gradient, x, y: None)
    assert torch.equal(train(task, start, client, generator()).vector, slow.vector)


def test_memory_is_returned_and_taken_up() -> None:
    task, client = make_task(momentum=0.9, epochs=1), make_clients()[1]
    start = random_start(task)
    first = train(task, start, client, generator(1))
    assert first.memory.keys() == {"velocity"}
    assert first.memory["velocity"].abs().sum() > 0
    fresh = train(task, first.vector, client, generator(2))
    going_on = train(task, first.vector, client, generator(2), memory={"velocity": first.memory["velocity"].clone()})
    assert not torch.allclose(fresh.vector, going_on.vector)
    assert train(make_task(), start, client, generator()).memory == {}


def test_an_optimizer_sees_gradients_at_offsets_adjusted_and_clipped() -> None:
    task, client, recorder = make_task(clip=0.05), make_clients()[1], Recorder()
    trained = train(task, random_start(task), client, generator(), optimizer=recorder)
    assert trained.memory["count"] == trained.num_steps == len(recorder.gradients)
    assert all(gradient.norm() <= 0.05 for gradient in recorder.gradients)


def test_after_step_sees_every_step_and_where_epochs_end() -> None:
    task, client = make_task(epochs=2, batch_size=5), make_clients()[1]
    seen: list[tuple[Tensor, bool]] = []
    start = random_start(task)
    trained = train(task, start, client, generator(), after_step=lambda p, ends: seen.append((p.clone(), ends)))
    assert [ends for _, ends in seen] == [False, False, True] * 2
    assert torch.equal(seen[-1][0], trained.vector[: task.model.layout.num_trainable])
    assert len({tuple(parameters.tolist()) for parameters, _ in seen}) == 6


def test_another_loss_is_what_is_trained_on() -> None:
    """Twice the loss at half the learning rate gives the same model."""
    task, client = make_task(lr=0.2), make_clients()[1]
    start = random_start(task)
    twice = train(make_task(lr=0.1), start, client, generator(), loss=lambda out, y: 2 * task.likelihood.loss(out, y))
    torch.testing.assert_close(twice.vector, train(task, start, client, generator()).vector, rtol=1e-5, atol=1e-6)
    assert twice.metrics["train_loss"] > 1.5 * train(task, start, client, generator()).metrics["train_loss"]


def test_settings_make_the_optimizer() -> None:
    assert make_optimizer(make_local(momentum=0.5, weight_decay=0.1)) == Sgd(0.5, 0.1)
    assert make_optimizer(make_local(optimizer="adam", weight_decay=0.1)) == Adam((0.9, 0.999), 0.1)
    with pytest.raises(ConfigError, match=r"momentum: got 0\.9, allowed: 0 with local\.optimizer=adam"):
        make_local(optimizer="adam", momentum=0.9)
    with pytest.raises(ConfigError, match=r"betas: got \[0\.9\], allowed: two numbers"):
        make_local(betas=[0.9])


def test_cosine_goes_from_the_learning_rate_down_over_the_rounds() -> None:
    worker = make_worker(FedAvg("fedavg", "size"), lr=0.2, schedule="cosine")
    rates = [worker.task_of_round(round_).local.lr for round_ in range(1, 6)]
    expected = [0.2 * (1 + torch.cos(torch.tensor(torch.pi * i / 5)).item()) / 2 for i in range(5)]
    assert rates == pytest.approx(expected, rel=1e-5)
    assert rates[0] == 0.2
    constant = make_worker(FedAvg("fedavg", "size"))
    assert constant.task_of_round(3) is constant.task


@pytest.mark.parametrize("method", ["fednova", "scaffold"])
def test_methods_that_count_sgd_steps_refuse_another_optimizer(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"local\.optimizer: got 'adam', allowed: sgd; method {method}"):
        experiment(*SMALL, f"method={method}", "local.optimizer=adam")
    experiment(*SMALL, "method=scaffold", "method.option=I", "local.optimizer=adam")
