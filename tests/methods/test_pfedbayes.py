"""pFedBayes: clients learn alone without a pull and do not move under a strong one; the steps of the shared copy."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from bfl_bench.inference.train import Trained, train
from bfl_bench.inference.variational import draw
from bfl_bench.method import Client, Task, Update
from bfl_bench.methods.pfedbayes import PFedBayes
from tests.composing import resolve
from tests.federation import (
    generator,
    make_clients,
    make_gaussian_settings,
    make_gaussian_task,
    make_split,
    random_start,
)


def method(name: str = "pfedbayes", **changes: Any) -> PFedBayes:
    values = {key: value for key, value in resolve(f"method={name}")["method"].items() if key != "_target_"}
    return replace(PFedBayes(**values), **changes)


def turn(pfedbayes: PFedBayes, task: Task, client: Client, shared: Tensor, personal: Tensor, seed: int = 9) -> Update:
    memory = pfedbayes.init_client(task, {"params": shared}, client.id) | {"personal": personal}
    return pfedbayes.client_update(task, {"params": shared}, memory, client, generator(seed))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_without_a_pull_clients_learn_alone_and_the_global_model_stays(optimizer: str) -> None:
    task, client = make_gaussian_task(optimizer=optimizer, lr=0.05), make_clients()[1]
    shared, personal = random_start(task), random_start(task, seed=7)
    update = turn(method(zeta=0.0, personal_steps=2), task, client, shared, personal)
    alone = train(task, personal, client, generator(9)).vector
    assert torch.equal(update.local["params"], alone)
    assert torch.equal(update.memory["personal"], alone)
    assert torch.equal(update.message["params"], shared)
    assert not torch.allclose(alone, personal, atol=0.05)


def test_a_strong_pull_keeps_the_personal_network_at_the_global_one() -> None:
    """From one start the distance is the loss's slope over zeta times the precision; SGD's steps suit the strongest."""
    task = make_gaussian_task(make_gaussian_settings(log_variance_init_std=0.0), epochs=100, lr=0.005)
    client, start, distances = make_clients()[1], task.model.initial, []
    for zeta in (1.0, 10.0, 100.0):
        update = turn(method(zeta=zeta, personal_steps=10_000), task, client, start, start)
        moved = update.local["params"] - start
        distances.append(moved[: task.model.layout.log_variances.start].norm().item())
    assert distances[0] > 5 * distances[1] > 25 * distances[2]
    assert distances[2] < 0.1


def shared_kl(task: Task, own: Tensor, shared: Tensor) -> Tensor:
    """KL(q || w), points being means of Gaussians with the initial variance."""
    layout = task.model.layout
    assert task.gaussian is not None
    width = torch.full_like(own[layout.points], task.gaussian.log_variance_init)
    first = layout.log_variances.start
    q, w = (
        Normal(vector[:first], torch.cat([width, vector[layout.log_variances]]).mul(0.5).exp())
        for vector in (own, shared)
    )
    return kl_divergence(q, w).sum()


def stay(task: Task, start: Tensor, client: Client, rng: torch.Generator, steps: int, after_step: Any) -> Trained:
    task.model.load(start)
    for _ in range(steps):
        after_step(task.model.trainable, False)
    return Trained(start, steps, {}, {})


@pytest.mark.parametrize(("steps", "taken"), [(1, 1), (3, 1), (4, 2), (6, 2)])
def test_the_copy_takes_a_gradient_step_on_the_divergence_after_so_many(
    steps: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every third personal step, and after a rest of them."""
    task, client = make_gaussian_task(lr=0.01), make_clients()[1]
    shared, personal = random_start(task), random_start(task, seed=7)
    monkeypatch.setattr(
        "bfl_bench.methods.pfedbayes.train",
        lambda task, start, client, rng, after_step, **_: stay(task, start, client, rng, steps, after_step),
    )
    update = turn(method(zeta=6.0, personal_steps=3), task, client, shared, personal)
    expected = shared.clone()
    for _ in range(taken):
        copy = expected.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(shared_kl(task, personal, copy) * 6.0 / len(client), copy)
        expected = expected - 0.01 * gradient
    torch.testing.assert_close(update.message["params"], expected, rtol=1e-4, atol=1e-5)
    assert update.metrics["kl"] == pytest.approx(shared_kl(task, personal, expected).item(), rel=1e-4)


def test_the_copy_alone_becomes_the_personal_network(monkeypatch: pytest.MonkeyPatch) -> None:
    task, client = make_gaussian_task(lr=0.05), make_clients()[1]
    monkeypatch.setattr(
        "bfl_bench.methods.pfedbayes.train",
        lambda task, start, client, rng, after_step, **_: stay(task, start, client, rng, 2000, after_step),
    )
    shared, personal = random_start(task), random_start(task, seed=7)
    update = turn(method(zeta=12.0, personal_steps=1), task, client, shared, personal)
    torch.testing.assert_close(update.message["params"], personal, rtol=1e-3, atol=1e-3)


def test_the_personal_networks_pull_is_the_gradient_of_the_divergence() -> None:
    """One SGD step on all of the client's examples, with the pull and without, from the same noise."""
    task, client = make_gaussian_task(lr=0.01, epochs=1, batch_size=12), make_clients()[1]
    shared, personal = random_start(task), random_start(task, seed=7)
    free, pulled = (turn(method(zeta=zeta), task, client, shared, personal).local["params"] for zeta in (0.0, 5.0))
    copy = personal.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(shared_kl(task, copy, shared) * 5.0 / 12, copy)
    torch.testing.assert_close(pulled - free, -0.01 * gradient, rtol=1e-3, atol=1e-5)


def test_the_released_codes_weight_of_the_divergence_and_its_lasting_moments() -> None:
    """zeta KL / 20 beside a sum over 100 examples; steps are counted over two local updates."""
    released = method("pfedbayes_released")
    assert released.zeta / float(released.examples) == pytest.approx(10 / 20 / 100)
    task, client = make_gaussian_task(optimizer="adam", lr=0.01), make_clients()[1]
    state = released.init(task, generator())
    first = released.client_update(task, state, released.init_client(task, state, 1), client, generator())
    second = released.client_update(task, state, first.memory, client, generator())
    assert [second.memory[f"{whose} steps"].item() for whose in ("own", "shared")] == [12, 4]  # 6 and 2 each time
    assert first.memory["own steps"] == 6
    assert method().client_update(task, state, {"personal": state["params"]}, client, generator()).memory.keys() == {
        "personal"
    }


def test_noise_scales_draws_in_training_and_prediction() -> None:
    settings = make_gaussian_settings()
    x = make_split(4).x
    outputs, draws = {}, {}
    for noise in (0.0, 1.0, 3.0):
        torch.manual_seed(0)
        task = make_gaussian_task(replace(settings, noise=noise), num_layers=1)
        torch.manual_seed(1)
        outputs[noise] = task.model.module.train()(x).detach()
        draws[noise] = next(draw(task, task.model.initial, 1, generator()))
    mean = task.model.module.eval()(x).detach()
    assert torch.equal(outputs[0.0], mean)
    torch.testing.assert_close(outputs[3.0] - mean, 3 * (outputs[1.0] - mean), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(draws[3.0] - draws[0.0], 3 * (draws[1.0] - draws[0.0]), rtol=1e-4, atol=1e-6)
    assert math.isclose(replace(settings).noise, 1.0)
