"""FedPA: the closed form against a dense solve and a recursion, samples of epochs, and FedAvg while it burns in."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bfl_bench.errors import ConfigError
from bfl_bench.inference.train import train
from bfl_bench.method import Task
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fedpa import FedPa, posterior_step
from tests.composing import SMALL, experiment
from tests.federation import generator, make_clients, make_server, make_task, random_start, run_round

DOUBLE = torch.float64


def method(**changes: Any) -> FedPa:
    return replace(FedPa("fedpa", "size", 0, 1, 0.3), **changes)


def recursion(start: Tensor, samples: Tensor, rho: float) -> Tensor:
    """One sample after the other, as the paper's appendix does it: no system is solved."""
    delta, mean = start - samples[0], samples[0]
    vs: list[Tensor] = []
    factors: list[Tensor] = []
    for t, sample in enumerate(samples[1:], start=2):
        u = sample - mean
        v = u - sum((factor * (w @ u) * w for factor, w in zip(factors, vs, strict=True)), torch.zeros_like(u))
        c = rho * (t - 1) / t
        uv = u @ v
        delta = delta - (1 + c * (t * (u @ delta) - uv) / (1 + c * uv)) * v / t
        vs.append(v)
        factors.append(c / (1 + c * uv))
        mean = mean + u / t
    return (1 + (len(samples) - 1) * rho) * delta


@pytest.mark.parametrize("rho", [0.0, 0.01, 0.3, 5.0])
@pytest.mark.parametrize("num", [1, 2, 6, 30])
def test_closed_form_is_the_dense_solve_and_the_recursion(rho: float, num: int) -> None:
    rng = generator(num)
    samples = torch.randn(num, 9, generator=rng, dtype=DOUBLE) * torch.linspace(0.2, 2, 9, dtype=DOUBLE) + 1
    start = torch.randn(9, generator=rng, dtype=DOUBLE)
    found = posterior_step(start, samples, rho)
    shrinkage = 1 / (1 + (num - 1) * rho)
    covariance = samples.T.cov() if num > 1 else torch.zeros(9, 9, dtype=DOUBLE)
    sigma = shrinkage * torch.eye(9, dtype=DOUBLE) + (1 - shrinkage) * covariance
    expected = torch.linalg.solve(sigma, start - samples.mean(0))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found, recursion(start, samples, rho), rtol=1e-10, atol=1e-10)


def test_many_samples_of_quadratics_give_their_gradients_which_vanish_at_the_product() -> None:
    rng = generator(3)
    deltas, gradients = [], []
    roots = [torch.randn(3, 3, generator=rng, dtype=DOUBLE) for _ in range(2)]
    curvatures = [root @ root.T + torch.eye(3, dtype=DOUBLE) for root in roots]
    optima = torch.randn(2, 3, generator=rng, dtype=DOUBLE)
    rights = [curvature @ optimum for curvature, optimum in zip(curvatures, optima, strict=True)]
    mode = torch.linalg.solve(curvatures[0] + curvatures[1], rights[0] + rights[1])
    for curvature, optimum in zip(curvatures, optima, strict=True):
        factor = torch.linalg.cholesky(torch.linalg.inv(curvature))
        samples = optimum + torch.randn(2000, 3, generator=rng, dtype=DOUBLE) @ factor.T
        deltas.append(posterior_step(mode, samples, 1.0))
        gradients.append(curvature @ (mode - optimum))
    for delta, gradient in zip(deltas, gradients, strict=True):
        torch.testing.assert_close(delta, gradient, rtol=0.0, atol=0.4)  # curvatures up to 6, known to 1 / sqrt(1000)
        assert gradient.abs().max() > 0.3
    torch.testing.assert_close(sum(deltas), torch.zeros(3, dtype=DOUBLE), rtol=0.0, atol=0.4)


def epoch_means(task: Task, start: Tensor, seed: int) -> Tensor:
    """The mean of the iterates of each epoch of a client's training."""
    epochs: list[list[Tensor]] = [[]]

    def note(parameters: Tensor, epoch_ends: bool) -> None:
        epochs[-1].append(parameters.double())
        if epoch_ends:
            epochs.append([])

    train(task, start, make_clients()[1], generator(seed), after_step=note)
    return torch.stack([torch.stack(iterates).mean(0) for iterates in epochs[:-1]])


@pytest.mark.parametrize(("mixing", "rho"), [(1, 0.3), (0, 0.3), (3, 0.3), (1, 0.0)])
def test_each_later_epoch_gives_a_sample(mixing: int, rho: float) -> None:
    task, client = make_task(epochs=4, momentum=0.5), make_clients()[1]
    fedpa = method(burn_in_epochs=mixing, rho=rho)
    start = random_start(task)
    update = fedpa.client_update(task, {"params": start, "round": torch.tensor(0.0)}, {}, client, generator(4))
    samples = epoch_means(task, start, 4)[mixing:]
    expected = start.double() - posterior_step(start.double(), samples, rho)
    torch.testing.assert_close(update.message["params"], expected.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(update.local["params"], samples.mean(0).float(), rtol=1e-6, atol=1e-6)
    if rho == 0 or mixing == 3:  # the identity as covariance: the mean of the samples is sent
        torch.testing.assert_close(update.message["params"], update.local["params"], rtol=1e-6, atol=1e-6)


def test_the_servers_step_is_along_the_mean_of_deltas() -> None:
    task, clients = make_task(), make_clients()
    task = replace(task, server=make_server(lr=0.5, momentum=0.9))
    fedpa = method()
    state = fedpa.init(task, generator()) | {"params": random_start(task)}
    first = run_round(fedpa, task, state, clients)
    plain = run_round(fedpa, make_task(), state, clients)
    torch.testing.assert_close(first["params"], (state["params"] + plain["params"]) / 2, rtol=1e-5, atol=1e-6)
    assert first["server_first"].abs().max() > 1e-3
    assert first["round"] == 1


def test_burning_in_is_fedavg_bit_for_bit() -> None:
    """Over all rounds; and the round after is another."""
    task, clients = make_task(momentum=0.5), make_clients()
    fedpa, fedavg = method(burn_in_rounds=3), FedAvg("fedavg", "size")
    ours, theirs = fedpa.init(task, generator()), fedavg.init(task, generator())
    for _ in range(3):
        ours, theirs = run_round(fedpa, task, ours, clients), run_round(fedavg, task, theirs, clients)
        assert torch.equal(ours["params"], theirs["params"])
    ours, theirs = run_round(fedpa, task, ours, clients), run_round(fedavg, task, theirs, clients)
    assert not torch.allclose(ours["params"], theirs["params"], atol=1e-4)


def test_an_epoch_has_to_be_left_for_a_sample() -> None:
    with pytest.raises(ConfigError, match=r"method\.burn_in_epochs: got 2, allowed: less than local\.epochs=2"):
        experiment(*SMALL, "method=fedpa", "method.burn_in_epochs=2")
