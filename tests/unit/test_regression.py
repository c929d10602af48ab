"""Metrics of predicted numbers against scipy: densities, numerical integrals, root finding; and slow loops."""

import math

import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor

from bfl_bench.evaluation.regression import (
    central_intervals,
    crps,
    mixture_cdf,
    mixture_nll,
    mixture_quantile,
    quantile_calibration_error,
    root_mean_squared_error,
)

EXACT = 1e-12  # sums of some hundred float64 numbers of order 1


def mixtures(members: int, num: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Means, variances and targets; members far apart and close, wide and narrow."""
    generator = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(members, num, generator=generator, dtype=torch.float64)
    variances = torch.rand(members, num, generator=generator, dtype=torch.float64) * 2 + 0.05
    return means, variances, 2 * torch.randn(num, generator=generator, dtype=torch.float64)


def slow_cdf(means: Tensor, variances: Tensor, i: int, at: float) -> float:
    pairs = zip(means[:, i].tolist(), variances[:, i].tolist(), strict=True)
    return sum(math.erfc((mean - at) / math.sqrt(2 * variance)) / 2 for mean, variance in pairs) / len(means)


def slow_quantile(means: Tensor, variances: Tensor, i: int, level: float) -> float:
    return brentq(lambda x: slow_cdf(means, variances, i, x) - level, -50, 50, xtol=1e-13)


each_number_of_members = pytest.mark.parametrize("members", [1, 2, 5])


def test_rmse_is_of_the_mean_of_the_members() -> None:
    means = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    assert root_mean_squared_error(means, torch.tensor([0.0, 1.0])) == pytest.approx(math.sqrt((4 + 1) / 2), abs=EXACT)


@each_number_of_members
def test_nll_of_densities(members: int) -> None:
    means, variances, targets = mixtures(members, 20)
    total = 0.0
    for i, target in enumerate(targets.tolist()):
        pairs = zip(means[:, i].tolist(), variances[:, i].tolist(), strict=True)
        total -= math.log(sum(norm.pdf(target, mean, math.sqrt(variance)) for mean, variance in pairs) / members)
    assert mixture_nll(means, variances, targets) == pytest.approx(total / 20, abs=EXACT)


def test_nll_far_from_all_members_is_finite() -> None:
    """The density itself would be zero in floating point."""
    value = mixture_nll(torch.tensor([[0.0], [1.0]]), torch.ones(2, 1), torch.tensor([1001.0]))
    assert value == pytest.approx(1000**2 / 2 + math.log(2 * math.pi) / 2 + math.log(2), rel=1e-12)


@each_number_of_members
def test_crps_of_numerical_integration(members: int) -> None:
    means, variances, targets = mixtures(members, 12)
    total = 0.0
    for i, target in enumerate(targets.tolist()):
        below = quad(lambda x, i=i: slow_cdf(means, variances, i, x) ** 2, -30, target, epsabs=1e-10, limit=200)[0]
        above = quad(lambda x, i=i: (1 - slow_cdf(means, variances, i, x)) ** 2, target, 30, epsabs=1e-10, limit=200)[0]
        total += below + above
    assert crps(means, variances, targets) == pytest.approx(total / 12, abs=1e-8)


def test_crps_of_one_gaussian_in_closed_form() -> None:
    means, variances, targets = mixtures(1, 30)
    z = ((targets - means[0]) / variances[0].sqrt()).numpy()
    expected = variances[0].sqrt().numpy() * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert crps(means, variances, targets) == pytest.approx(expected.mean(), abs=EXACT)


def test_crps_without_spread_is_that_of_the_members_as_sample() -> None:
    means, _, targets = mixtures(4, 10)
    targets[3] = means[0, 3]
    total = 0.0
    for i, target in enumerate(targets.tolist()):
        sample = means[:, i].tolist()
        total += sum(abs(x - target) for x in sample) / 4 - sum(abs(x - y) for x in sample for y in sample) / 32
    assert crps(means, torch.zeros(4, 10), targets) == pytest.approx(total / 10, abs=EXACT)
    absolute = (means[0] - targets).abs().mean().item()
    assert crps(means[:1], torch.zeros(1, 10), targets) == pytest.approx(absolute, abs=EXACT)


@each_number_of_members
@pytest.mark.parametrize("level", [0.025, 0.25, 0.5, 0.95])
def test_quantiles_and_cdf(members: int, level: float) -> None:
    means, variances, _ = mixtures(members, 15)
    quantiles = mixture_quantile(means, variances, level)
    expected = [slow_quantile(means, variances, i, level) for i in range(15)]
    assert quantiles.tolist() == pytest.approx(expected, abs=1e-8)  # 2e-10 of the distance of members, about 10
    slow = [slow_cdf(means, variances, i, quantiles[i].item()) for i in range(15)]
    assert mixture_cdf(means, variances, quantiles).tolist() == pytest.approx(slow, abs=EXACT)


@each_number_of_members
def test_central_intervals(members: int) -> None:
    means, variances, targets = mixtures(members, 40)
    intervals = central_intervals(means, variances, targets)
    assert [interval.level for interval in intervals] == [0.5, 0.9, 0.95]
    for interval in intervals:
        covered, width = 0, 0.0
        for i, target in enumerate(targets.tolist()):
            low, high = (slow_quantile(means, variances, i, (1 + s * interval.level) / 2) for s in (-1, 1))
            covered += low <= target <= high
            width += high - low
        assert 0 < covered < 40
        assert interval.coverage == covered / 40
        assert interval.width == pytest.approx(width / 40, abs=1e-8)


@each_number_of_members
def test_quantile_calibration_error(members: int) -> None:
    means, variances, targets = mixtures(members, 40)
    errors = []
    for level in [j / 10 for j in range(1, 10)]:
        below = sum(target <= slow_quantile(means, variances, i, level) for i, target in enumerate(targets.tolist()))
        errors.append(abs(below / 40 - level))
    assert quantile_calibration_error(means, variances, targets, 9) == pytest.approx(sum(errors) / 9, abs=EXACT)


def test_targets_drawn_from_the_prediction_are_calibrated() -> None:
    """And targets with half the spread are not: their intervals cover too much."""
    num = 20_000
    generator = torch.Generator().manual_seed(1)
    means, variances, _ = mixtures(3, num)
    member = torch.randint(3, (num,), generator=generator)
    noise = torch.randn(num, generator=generator, dtype=torch.float64)
    mean, variance = means[member, torch.arange(num)], variances[member, torch.arange(num)]
    targets = mean + variance.sqrt() * noise
    for interval in central_intervals(means, variances, targets):
        error = math.sqrt(interval.level * (1 - interval.level) / num)
        assert interval.coverage == pytest.approx(interval.level, abs=5 * error)
    assert quantile_calibration_error(means, variances, targets, 19) < 0.01
    one = mean[None], variance[None]
    assert central_intervals(*one, mean + variance.sqrt() * noise / 2)[0].coverage > 0.7
    assert quantile_calibration_error(*one, mean + variance.sqrt() * noise / 2, 19) > 0.05


def test_one_example_at_the_centre() -> None:
    mean, variance, target = torch.tensor([[1.0]]), torch.tensor([[4.0]]), torch.tensor([1.0])
    assert root_mean_squared_error(mean, target) == 0
    (interval,) = central_intervals(mean, variance, target, [0.95])
    assert interval.coverage == 1
    assert interval.width == pytest.approx(2 * 1.959963984540054 * 2, abs=EXACT)
    (point,) = central_intervals(mean, torch.zeros(1, 1), target, [0.9])
    assert (point.coverage, point.width) == (1, 0)


def test_target_at_its_quantile_counts_as_below() -> None:
    zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
    assert quantile_calibration_error(zeros, ones, torch.tensor([0.0, 1.0]), 1) == 0


def test_very_narrow_gaussians() -> None:
    """A unit of measurement is only a factor."""
    means, variances, targets = mixtures(3, 20)
    narrow = 1e-9 * means, 1e-18 * variances, 1e-9 * targets
    assert crps(*narrow) == pytest.approx(1e-9 * crps(means, variances, targets), rel=1e-12, abs=0)


def test_order_of_examples_and_members_does_not_matter() -> None:
    means, variances, targets = mixtures(4, 30)
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.randperm(4, generator=generator), torch.randperm(30, generator=generator)
    other = means[rows][:, columns], variances[rows][:, columns], targets[columns]
    for function in (mixture_nll, crps):
        assert function(*other) == pytest.approx(function(means, variances, targets), abs=EXACT)
    for ours, again in zip(central_intervals(means, variances, targets), central_intervals(*other), strict=True):
        assert vars(ours) == pytest.approx(vars(again), abs=EXACT)


def test_float32_inputs_are_computed_in_float64() -> None:
    """A float32 sum over 2^20 equal terms would lose far more than these digits."""
    ones = torch.ones(1, 2**20)
    target = torch.full((2**20,), 1.7)
    distance = target[0].item() - 1
    assert root_mean_squared_error(ones, target) == pytest.approx(distance, abs=1e-10)
    expected = (math.log(2 * math.pi) + distance**2) / 2
    assert mixture_nll(ones, ones, target) == pytest.approx(expected, abs=1e-10)
