"""FA-LD: FedAvg without noise, the moments of a Gaussian posterior with it, and samples that predict."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bfl_bench.errors import ConfigError
from bfl_bench.inference.train import train
from bfl_bench.methods.fald import Fald
from bfl_bench.methods.fedavg import FedAvg
from tests.composing import SMALL, run_in
from tests.federation import generator, make_clients, make_task, random_start, run_round, train_clients
from tests.langevin import SIZES, D, make_point_task, run_chain


def method(**changes: Any) -> Fald:
    default = Fald(
        name="fald",
        weights="size",
        temperature=1.0,
        correlation=0.0,
        prior_precision=0.0,
        steps=None,
        burn_in=1,
        every=2,
        samples=3,
    )
    return replace(default, **changes)


def test_without_noise_it_is_fedavg() -> None:
    task, clients = make_task(), make_clients()
    state = method().init(task, generator()) | {"params": random_start(task)}
    cold = run_round(method(temperature=0.0), task, state, clients)["params"]
    assert torch.equal(cold, run_round(FedAvg("fedavg", "size"), task, state, clients)["params"])
    assert not torch.allclose(run_round(method(), task, state, clients)["params"], cold, atol=1e-3)


@pytest.mark.parametrize(
    ("correlation", "temperature", "steps"), [(0.0, 1.0, 1), (0.6, 1.0, 1), (1.0, 0.5, 2), (0.3, 2.0, 3)]
)
def test_moments_on_a_gaussian_posterior(correlation: float, temperature: float, steps: int) -> None:
    """All clients have the same curvature, so that averages of the steps are steps of one chain, an AR(1) process.

    Its mean is the posterior's, its variance that of the posterior but for the length of a step; both within three
    standard errors over coordinates and rounds.
    """
    lr, prior, rounds = 0.2, 3.0, 300
    task, clients, y = make_point_task(lr)
    n = sum(SIZES)
    of = method(correlation=correlation, temperature=temperature, prior_precision=prior, steps=steps)
    found = run_chain(of, task, clients, rounds, burn_in=30)
    mean = y.sum(0) / (n + prior)
    decay = 1 - lr * (1 + prior / n)
    variance = 2 * lr * temperature / n / (1 - decay**2)
    assert variance == pytest.approx(temperature / (n + prior), rel=0.15)  # the posterior's
    after = decay**steps  # correlation of two rounds
    errors = found - mean
    spread = (variance / (len(errors) * D) * (1 + after) / (1 - after)) ** 0.5
    assert errors.mean().abs() < 3 * spread
    relative = errors.square().mean() / variance - 1
    assert relative.abs() < 3 * (2 / (len(errors) * D) * (1 + after**2) / (1 - after**2)) ** 0.5


def test_all_clients_can_take_the_same_number_of_steps() -> None:
    task, clients = make_task(), make_clients()
    of = method(temperature=0.0, steps=3)
    state = of.init(task, generator()) | {"params": random_start(task)}
    for client, (_, message) in zip(clients, train_clients(of, task, state, clients), strict=True):
        expected = train(task, state["params"], client, generator(100 + client.id), steps=3)
        assert torch.equal(message["params"], expected.vector)


def test_common_noise_is_common_and_new_in_every_round() -> None:
    task, clients, _ = make_point_task(0.2)
    same = [(client, replace(client, id=k)) for k, client in ((0, clients[0]), (1, clients[0]))]
    of = method(correlation=1.0)
    state = of.init(task, generator())
    broadcast = of.broadcast(task, state)
    first, second = (of.client_update(task, broadcast, {}, c, generator(k)).message for k, (_, c) in enumerate(same))
    assert torch.equal(first["params"], second["params"])
    replies = train_clients(of, task, state, clients)
    seeds = {int(of.server_update(task, state, iter(replies), generator(round_))[0]["seed"]) for round_ in range(3)}
    assert len(seeds | {int(state["seed"])}) == 4


def test_samples_are_collected_after_the_burn_in_and_predict() -> None:
    task, clients = make_task(), make_clients()
    of, state, models = method(), method().init(task, generator()), []
    assert torch.equal(next(iter(of.draws(task, state, 5, generator()))), state["params"])
    for _ in range(9):
        state = run_round(of, task, state, clients)
        models.append(state["params"])
    assert torch.equal(state["samples"], torch.stack(models[3::2]))  # rounds 2, 4, 6, 8, the last three of them
    drawn = list(of.draws(task, state, 2, generator()))
    assert [torch.equal(a, b) for a, b in zip(drawn, (models[3], models[7]), strict=True)] == [True, True]
    assert torch.equal(next(iter(of.draws(task, state, 1, generator()))), models[7])


@pytest.mark.parametrize("key", ["momentum", "weight_decay"])
def test_steps_of_another_kind_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"local.{key}: got 0.1, allowed: 0; method fald has"):
        run_in(tmp_path, *SMALL, "method=fald", f"local.{key}=0.1")
