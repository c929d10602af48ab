"""FedIvon: FedAvg where curvatures are equal, rules on variances, draws of the posterior, and no dead switch."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bfl_bench.aggregators import Rule, eaa, rklb, wb
from bfl_bench.errors import ConfigError
from bfl_bench.inference.ivon import Ivon
from bfl_bench.inference.train import train
from bfl_bench.method import Task, Tensors
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fedivon import FedIvon
from tests.composing import SMALL, experiment, resolve
from tests.federation import SIZES, generator, make_clients, make_task, random_start, run_round, train_clients

DELTA = 0.05


def method(**changes: Any) -> FedIvon:
    default = FedIvon(
        name="fedivon",
        weights="size",
        aggregator=None,
        start="server",
        ess="size",
        temperature=1.0,
        h0=2.0,
        beta1=0.9,
        beta2=0.99,
        delta=DELTA,
        samples=1,
        clip=None,
        rescale=True,
        cosine_steps=None,
        cosine_floor=0.01,
    )
    return replace(default, **changes)


def later_state(task: Task, fedivon: FedIvon) -> Tensors:
    precision = torch.rand(len(task.model.gradient), generator=generator(8)) + 0.2 + DELTA
    return fedivon.init(task, generator()) | {"params": random_start(task), "example_precision": precision}


def sent(task: Task, fedivon: FedIvon) -> tuple[Tensors, list[tuple[int, Tensors]], np.ndarray, np.ndarray]:
    """A state, what clients make of it, and of that the means and h + delta, (K, D)."""
    state = later_state(task, fedivon)
    replies = train_clients(fedivon, task, state, make_clients())
    means, precisions = (
        np.stack([message[name].double().numpy() for _, message in replies]) for name in ("params", "example_precision")
    )
    return state, replies, means, precisions


def test_a_client_is_ivon_from_the_servers_mean_and_curvature() -> None:
    task, client = make_task(), make_clients()[1]
    fedivon = method(temperature=2.0, samples=2, clip=0.5)
    state = later_state(task, fedivon)
    ivon = Ivon(ess=6.0, h0=2.0, beta1=0.9, beta2=0.99, delta=DELTA, samples=2, clip=0.5)
    memory = ivon.begin(task.model.gradient) | {"precision": state["example_precision"].clone()}
    expected = train(task, state["params"], client, generator(), optimizer=ivon, memory=memory)
    update = fedivon.client_update(task, fedivon.broadcast(task, state), {}, client, generator())
    assert torch.equal(update.message["params"], expected.vector)
    assert torch.equal(update.message["example_precision"], expected.memory["precision"])
    assert update.message.keys() == {"params", "example_precision"}
    assert update.local["ess"] == 6.0


def test_from_a_fixed_start_the_servers_curvature_is_neither_sent_nor_used() -> None:
    """As BA-BFL's released code: another curvature of the server changes nothing."""
    task, client, fedivon = make_task(), make_clients()[1], method(start="fixed")
    state = later_state(task, fedivon)
    assert fedivon.broadcast(task, state).keys() == {"params"}
    message = fedivon.client_update(task, fedivon.broadcast(task, state), {}, client, generator()).message
    ivon = Ivon(ess=12.0, h0=2.0, beta1=0.9, beta2=0.99, delta=DELTA)
    assert torch.equal(message["params"], train(task, state["params"], client, generator(), optimizer=ivon).vector)


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_means_weigh_by_curvature(weights: Any) -> None:
    task, fedivon = make_task(), method(weights=weights)
    state, replies, means, precisions = sent(task, fedivon)
    new, _ = fedivon.server_update(task, state, iter(replies), generator())
    p = np.array(SIZES if weights == "size" else [1, 1, 1], dtype=float)[:, None]
    p /= p.sum()
    h = precisions - DELTA
    assert h.min() > 0
    # One rounding to float32 at the end.
    np.testing.assert_allclose(new["params"].numpy(), (p * h * means).sum(0) / (p * h).sum(0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(new["example_precision"].numpy(), (p * h).sum(0) + DELTA, rtol=1e-6)
    assert new["ess"] == sum(SIZES)


def test_equal_curvatures_are_fedavg() -> None:
    """Of IVON's means; whatever the curvature is, as long as all clients have the same."""
    task, fedivon = make_task(), method()
    state, replies, _, _ = sent(task, fedivon)
    same = torch.rand(len(state["example_precision"]), generator=generator()) + 0.1
    equal = [(id_, message | {"example_precision": same}) for id_, message in replies]
    new, _ = fedivon.server_update(task, state, iter(equal), generator())
    fedavg, _ = FedAvg("fedavg", "size").server_update(task, {"params": state["params"]}, iter(replies), generator())
    # Products and quotients in float64, then the same rounding to float32: at most the last bit.
    torch.testing.assert_close(new["params"], fedavg["params"], rtol=2e-7, atol=0.0)
    torch.testing.assert_close(new["example_precision"], same, rtol=2e-7, atol=0.0)
    different, _ = fedivon.server_update(task, state, iter(replies), generator())
    assert not torch.allclose(different["params"], fedavg["params"], atol=1e-4)


def test_without_curvature_the_mean_is_the_average() -> None:
    task, fedivon = make_task(), method()
    state, replies, means, _ = sent(task, fedivon)
    flat = [(id_, m | {"example_precision": torch.full_like(m["example_precision"], DELTA / 2)}) for id_, m in replies]
    new, _ = fedivon.server_update(task, state, iter(flat), generator())
    n = np.array(SIZES, dtype=float)[:, None]
    np.testing.assert_allclose(new["params"].numpy(), (n * means).sum(0) / n.sum(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", [rklb, eaa, wb])
def test_a_rule_combines_variances(rule: Rule) -> None:
    """The server's posterior, N(params, 1 / (ess example_precision)), is what the rule gives."""
    task, fedivon = make_task(), method(aggregator=rule)
    state, replies, means, precisions = sent(task, fedivon)
    new, _ = fedivon.server_update(task, state, iter(replies), generator())
    n = np.array(SIZES, dtype=float)
    variances = 1 / (n[:, None] * precisions)
    mean, variance = rule(torch.tensor(means), torch.tensor(variances), torch.tensor(n / n.sum()))
    torch.testing.assert_close(new["params"].double(), mean, rtol=1e-6, atol=1e-7)  # the state is float32
    torch.testing.assert_close(1 / (new["ess"] * new["example_precision"]).double(), variance, rtol=1e-6, atol=0.0)
    assert new["ess"].item() == pytest.approx((n * n).sum() / n.sum())


def test_rklb_by_size_counts_the_size_twice_and_uniform_is_the_product() -> None:
    """Fixed curvatures: weights n_k^2; and the mean of a product of Gaussians with precisions n_k (h_k + delta)."""
    task = make_task()
    state, replies, means, precisions = sent(task, method())
    same = [(id_, m | {"example_precision": torch.ones_like(m["example_precision"])}) for id_, m in replies]
    by_size, _ = method(aggregator=rklb).server_update(task, state, iter(same), generator())
    n = np.array(SIZES, dtype=float)[:, None]
    np.testing.assert_allclose(by_size["params"].numpy(), (n**2 * means).sum(0) / (n**2).sum(), rtol=1e-5, atol=1e-6)
    uniform, _ = method(aggregator=rklb, weights="uniform").server_update(task, state, iter(replies), generator())
    product = (n * precisions * means).sum(0) / (n * precisions).sum(0)
    np.testing.assert_allclose(uniform["params"].numpy(), product, rtol=1e-5, atol=1e-6)


def test_draws_have_the_variance_of_the_posterior() -> None:
    task, fedivon = make_task(), method()
    state = later_state(task, fedivon)
    draws = torch.stack(list(fedivon.draws(task, state, 4000, generator())))
    variance = 1 / (sum(SIZES) * state["example_precision"])
    torch.testing.assert_close(draws.var(0), variance, rtol=0.15, atol=0.0)  # 6 standard errors of a variance
    torch.testing.assert_close(draws.mean(0), state["params"], rtol=0.0, atol=0.05)
    narrow = method(temperature=0.01).init(task, generator())
    assert narrow["ess"] == 100 * sum(SIZES)


def test_the_predictive_entropy_exceeds_that_of_its_members() -> None:
    """A mixture is at least as uncertain as its members on average, and a wide posterior more than a narrow one."""
    task = make_task()
    x = torch.randn(30, 5, generator=generator(3))

    def information(temperature: float) -> Tensor:
        fedivon = method(temperature=temperature)
        state = fedivon.init(task, generator()) | {"params": random_start(task)}
        found = fedivon.predict(task, state, x, 20, 8, generator(4))
        assert found.expected_entropy is not None
        entropy = -(found.log_probabilities.exp() * found.log_probabilities).sum(1)
        return entropy - found.expected_entropy

    wide, narrow = information(1.0), information(1e-4)
    assert (wide > 0).all()
    assert narrow.abs().max() < 1e-3 < wide.mean()


def test_a_number_of_examples_may_be_given() -> None:
    task, fedivon = make_task(), method(ess=50.0, temperature=2.0)
    state = later_state(task, fedivon)
    assert state["ess"] == 75.0
    update = fedivon.client_update(task, fedivon.broadcast(task, state), {}, make_clients()[0], generator())
    assert update.local["ess"] == 25.0


def test_the_learning_rate_swings_within_a_local_update() -> None:
    """Down to the floor in two steps and up again in two, against steps of IVON with those rates."""
    task, client = make_task(epochs=2), make_clients()[1]
    fedivon = method(start="fixed", cosine_steps=2, cosine_floor=0.04)
    state = later_state(task, fedivon)
    found = fedivon.client_update(task, fedivon.broadcast(task, state), {}, client, generator()).message["params"]
    rates = iter([0.2, 0.12, 0.04, 0.12, 0.2, 0.12])

    class Listed(Ivon):
        def step(self, parameters: Any, gradient: Any, memory: Any, lr: float, rng: Any) -> None:
            super().step(parameters, gradient, memory, next(rates), rng)

    ivon = Listed(ess=12.0, h0=2.0, beta1=0.9, beta2=0.99, delta=DELTA)
    expected = train(task, state["params"], client, generator(), optimizer=ivon).vector
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert math.isclose(next(rates, -1.0), -1.0)


def test_server_step_moves_the_means() -> None:
    task, fedivon = make_task(), method()
    state = later_state(task, fedivon)
    whole = run_round(fedivon, task, state, make_clients())["params"]
    half = run_round(fedivon, make_task(server_lr=0.5), state, make_clients())["params"]
    torch.testing.assert_close(half, (state["params"] + whole) / 2)


@pytest.mark.parametrize("key", ["momentum", "weight_decay"])
def test_what_ivon_has_itself_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"local\.{key}: got 0\.5, allowed: 0; method fedivon has method\."):
        experiment(*SMALL, "method=fedivon", f"local.{key}=0.5")


def test_presets_of_ba_bfl() -> None:
    paper, released = (resolve(f"method={name}") for name in ("fedivon_ba_bfl", "ivon_released"))
    differences = {key for key in paper["method"] if paper["method"][key] != released["method"][key]}
    assert differences == {"name", "start", "cosine_steps"}
    assert released["aggregator"]["name"] == "rklb"
    assert resolve("method=ivon_released", "aggregator=wb")["aggregator"]["name"] == "wb"
    assert (paper["method"]["h0"], paper["method"]["beta2"], paper["method"]["delta"]) == (5.0, 0.99999, 2e-4)
