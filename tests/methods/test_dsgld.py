"""DSGLD: chains that travel, each at one client in a round, and sample the posterior of all data."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bfl_bench.methods.dsgld import Dsgld
from tests.federation import generator, make_clients, make_task, train_clients
from tests.langevin import SIZES, D, make_point_task, run_chain


def method(**changes: Any) -> Dsgld:
    default = Dsgld(
        name="dsgld", weights="size", temperature=1.0, prior_precision=0.0, steps=None, burn_in=1, every=1, samples=7
    )
    return replace(default, **changes)


def within_three_standard_errors(values: Tensor, expected: float) -> bool:
    """Judge a mean by the spread of those of 15 stretches of the chains, each much longer than their memory."""
    stretches = torch.stack([part.mean() for part in values.chunk(15)])
    return bool((stretches.mean() - expected).abs() < 3 * stretches.std() / 15**0.5)


def test_moments_on_a_gaussian_posterior() -> None:
    """Of a chain at client k: theta = a_k theta + b_k + noise, k drawn anew in every step."""
    lr, prior, n = 0.05, 3.0, sum(SIZES)
    task, clients, y = make_point_task(lr)
    found = run_chain(method(prior_precision=prior, steps=1), task, clients, rounds=900, burn_in=150)
    scales = [len(SIZES) * size / n for size in SIZES]
    a = torch.tensor([1 - lr * (scale + prior / n) for scale in scales], dtype=torch.float64)
    b = torch.stack([lr * s * part.mean(0) for s, part in zip(scales, y.split(SIZES), strict=True)])  # (N, D)
    mean = b.mean(0) / (1 - a.mean())
    torch.testing.assert_close(mean, y.sum(0) / (n + prior))  # the posterior's
    square = b.square().mean(0) + 2 * (a[:, None] * b).mean(0) * mean + 2 * lr / n
    variance = square / (1 - a.square().mean()) - mean.square()
    errors = found - mean  # (rounds, chains, D)
    assert within_three_standard_errors(errors, 0.0)
    assert within_three_standard_errors(errors.square() / variance, 1.0)
    assert variance.mean() == pytest.approx(1 / (n + prior), rel=0.5)  # more: the clients' disagreement is noise too
    assert errors.shape[1:] == (3, D)


def test_the_gradient_is_scaled_by_a_clients_share_of_the_steps() -> None:
    """Without noise one step is theta - lr n_k / (n q_k) (theta - mean of the client's points)."""
    for steps, batch_size, shares in (
        (1, 10, [1 / 3, 1 / 3, 1 / 3]),
        (None, 10, [1 / 3, 1 / 3, 1 / 3]),
        (None, 2, [1 / 6, 3 / 6, 2 / 6]),
    ):
        task, clients, y = make_point_task(0.2)
        task = replace(task, local=replace(task.local, batch_size=batch_size))
        of = method(temperature=0.0, steps=steps)
        broadcast = of.broadcast(task, of.init(task, generator()))
        update = of.client_update(task, broadcast, {}, clients[0], generator())  # two examples: one step in any case
        expected = 0.2 * SIZES[0] / (sum(SIZES) * shares[0]) * y[:2].mean(0)
        torch.testing.assert_close(update.message["params"].double(), expected, rtol=1e-5, atol=1e-6)


def test_chains_travel_by_permutations() -> None:
    task, clients = make_task(), make_clients()
    of = method()
    state = of.init(task, generator())
    state["chains"] += torch.arange(3.0)[:, None]
    visits = set()
    for round_ in range(12):
        assert sorted(state["visits"].tolist()) == [0, 1, 2]
        visits.add(tuple(state["visits"].tolist()))
        replies = train_clients(of, task, state, clients[:2])  # the third takes no part
        new, _ = of.server_update(task, state, iter(replies), generator(round_))
        for id_, message in replies:
            assert torch.equal(new["chains"][state["visits"][id_]], message["params"])
        idle = state["visits"][2]
        assert torch.equal(new["chains"][idle], state["chains"][idle])
        state = new
    assert len(visits) > 3


def test_samples_are_of_all_chains_and_the_last_are_kept() -> None:
    task, clients = make_task(), make_clients()
    of, state, kept = method(), method().init(task, generator()), []
    assert len(list(of.draws(task, state, 10, generator()))) == 3  # the chains as they are
    for _ in range(4):
        replies = train_clients(of, task, state, clients)
        state, _ = of.server_update(task, state, iter(replies), generator())
        kept.append(state["chains"])
    assert torch.equal(state["samples"], torch.cat(kept[1:])[-7:])
    torch.testing.assert_close(state["params"], state["chains"].mean(0))
    local = of.client_update(task, of.broadcast(task, state), {}, clients[0], generator()).local
    assert len(list(of.draws(task, local, 10, generator()))) == 1
