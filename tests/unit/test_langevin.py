"""Langevin steps: by hand, their noise, and their moments on a Gaussian with correlations."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from bfl_bench.inference.langevin import CyclicalSghmc, Langevin, Thinning, spread
from tests.federation import generator


def test_moments_of_a_chain_on_a_correlated_gaussian() -> None:
    """The loss is (theta - m)'H(theta - m) / 2 for each of n examples, the posterior N(m, (n H)^-1).

    In H's eigenbasis each coordinate is an AR(1) process with the variance 2 lr / n / (1 - (1 - lr h)^2), which is that
    of the posterior as lr goes to 0.
    """
    n, lr, num = 20, 0.1, 20_000
    root = torch.randn(3, 3, generator=generator(1), dtype=torch.float64)
    hessian, mean = root @ root.T + torch.eye(3), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    values, basis = torch.linalg.eigh(hessian)
    langevin = Langevin(scale=1.0, decay=0.0, variance=2 / n)
    theta, rng, found = mean.clone(), generator(2), torch.empty(num, 3, dtype=torch.float64)
    for step in range(num):
        langevin.step(theta, lambda _: hessian @ (theta - mean), {}, lr, rng)
        found[step] = theta
    errors = (found - mean) @ basis
    decay = 1 - lr * values
    variance = 2 * lr / n / (1 - decay**2)
    torch.testing.assert_close(variance, 1 / (n * values), rtol=0.4, atol=0)
    assert (errors.mean(0).abs() < 3 * (variance / num * (1 + decay) / (1 - decay)).sqrt()).all()
    relative = errors.square().mean(0) / variance - 1
    assert (relative.abs() < 3 * (2 / num * (1 + decay**2) / (1 - decay**2)).sqrt()).all()
    for i, j in ((0, 1), (0, 2), (1, 2)):  # coordinates are independent
        product = (errors[:, i] * errors[:, j]).mean() / (variance[i] * variance[j]).sqrt()
        both = decay[i] * decay[j]
        assert product.abs() < 3 * ((1 + both) / (1 - both) / num).sqrt()


def test_one_step_by_hand() -> None:
    theta = torch.tensor([1.0, -1.0])
    shared, own = generator(3), generator(4)
    langevin = Langevin(scale=2.0, decay=0.5, variance=0.3, common_variance=0.7, common=generator(3))
    langevin.step(theta, lambda _: torch.tensor([0.1, 0.2]), {}, 0.25, generator(4))
    noise = math.sqrt(0.25 * 0.3) * torch.randn(2, generator=own) + math.sqrt(0.25 * 0.7) * torch.randn(
        2, generator=shared
    )
    drift = torch.tensor([1.0 - 0.25 * (0.2 + 0.5), -1.0 - 0.25 * (0.4 - 0.5)])
    torch.testing.assert_close(theta, drift + noise)


def follow(sghmc: CyclicalSghmc, num: int, gradient: float, size: int = 1) -> list[Tensor]:
    theta = torch.ones(size, dtype=torch.float64)
    memory, rng, found = sghmc.begin(theta), generator(5), [theta.clone()]
    for _ in range(num):
        sghmc.step(theta, lambda _: torch.full_like(theta, gradient), memory, 0.2, rng)
        found.append(theta.clone())
    return found


def test_sghmc_without_noise_is_momentum_on_a_cosine() -> None:
    sghmc = CyclicalSghmc(friction=0.9, decay=0.5, variance=0.0, cycle_steps=4, noisy_steps=2)
    theta, velocity = 1.0, 0.0
    for step, found in enumerate(follow(sghmc, 6, gradient=0.3)[1:]):
        lr = 0.2 * (1 + math.cos(math.pi * (step % 4) / 4)) / 2
        velocity = 0.1 * velocity - lr * (0.3 + 0.5 * theta)
        theta += velocity
        assert found.item() == pytest.approx(theta)


def test_sghmc_has_noise_at_the_end_of_a_cycle_alone() -> None:
    """Without a gradient a step is what is left of the one before, and noise of variance 2 lr friction T / n."""
    sghmc = CyclicalSghmc(friction=0.6, decay=0.0, variance=0.01, cycle_steps=4, noisy_steps=2)
    found = follow(sghmc, 8, gradient=0.0, size=20_000)
    variance = 0.0
    for step, (before, after) in enumerate(itertools.pairwise(found)):
        lr = 0.2 * (1 + math.cos(math.pi * (step % 4) / 4)) / 2
        variance = 0.4**2 * variance + (2 * lr * 0.6 * 0.01 if step % 4 >= 2 else 0.0)
        # four standard errors of a variance over 20 000 draws
        assert (after - before).square().mean().item() == pytest.approx(variance, rel=4 * (2 / 20_000) ** 0.5)


def test_thinning_and_spreading() -> None:
    thinning, samples = Thinning(burn_in=2, every=3, num=2), torch.zeros(0, 1)
    for round_ in range(1, 12):
        samples = thinning.collect(samples, torch.full((1, 1), float(round_)), round_)
    assert samples.flatten().tolist() == [6, 9]  # of rounds 3, 6 and 9
    rows = torch.arange(10.0)[:, None]
    assert spread(rows, 4).flatten().tolist() == [0, 3, 6, 9]
    assert spread(rows, 1).flatten().tolist() == [9]
    assert spread(rows, 99).flatten().tolist() == list(range(10))
