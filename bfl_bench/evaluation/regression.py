"""Metrics of predictive distributions of a number: mixtures of Gaussians with equal weights.

`means` and `variances` are (S, n): one row for each member (draw of the parameters), so S = 1 is a Gaussian. `targets`
is (n,). Everything is computed in float64. A variance of 0 is a prediction without spread; only the NLL has no use for
it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BISECTIONS = 32  # to 2e-10 of the distance between the members' own quantiles
TINY = torch.finfo(torch.float64).tiny


def root_mean_squared_error(means: Tensor, targets: Tensor) -> float:
    """Compute the RMSE of the mixture's mean."""
    return (means.double().mean(0) - targets.double()).square().mean().sqrt().item()


def mixture_nll(means: Tensor, variances: Tensor, targets: Tensor) -> float:
    """Compute the mean of -log of the mixture's density at the target, in nats; variances must be positive."""
    means, variances, targets = means.double(), variances.double(), targets.double()
    log_density = -((2 * math.pi * variances).log() + (targets - means).square() / variances) / 2
    return (math.log(len(means)) - log_density.logsumexp(0).mean()).item()


def crps(means: Tensor, variances: Tensor, targets: Tensor) -> float:
    """Compute the mean continuous ranked probability score, E|X - y| - E|X - X'| / 2, in the unit of the targets.

    Both terms are closed, by members and by pairs of members (Grimit et al. 2006); of one Gaussian it is
    s (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)) with z = (y - m) / s. Without spread it is the absolute error.
    """
    means, variances, targets = means.double(), variances.double(), targets.double()
    to_target = _mean_absolute(targets - means, variances).mean(0)
    between = torch.zeros_like(targets)
    for mean, variance in zip(means, variances, strict=True):  # all pairs at once would need S times the memory
        between += _mean_absolute(mean - means, variance + variances).mean(0)
    return (to_target - between / (2 * len(means))).mean().item()


@dataclass(frozen=True)
class Interval:
    """Central intervals of one level: how many targets lie in theirs, and how wide they are on average."""

    level: float
    coverage: float
    width: float


def central_intervals(
    means: Tensor, variances: Tensor, targets: Tensor, levels: Sequence[float] = (0.5, 0.9, 0.95)
) -> list[Interval]:
    """Measure the intervals between the quantiles (1 - level) / 2 and (1 + level) / 2 of the mixture."""
    means, variances = means.double(), variances.double()
    at_targets = mixture_cdf(means, variances, targets)
    measured = []
    for level in levels:
        low, high = (1 - level) / 2, (1 + level) / 2
        covered = (at_targets >= low) & (at_targets <= high)
        width = mixture_quantile(means, variances, high) - mixture_quantile(means, variances, low)
        measured.append(torch.stack([covered.double().mean(), width.mean()]))
    return [Interval(level, *pair) for level, pair in zip(levels, torch.stack(measured).tolist(), strict=True)]


def quantile_calibration_error(means: Tensor, variances: Tensor, targets: Tensor, num_levels: int) -> float:
    """Average |share of targets below their quantile of level p - p| over p = 1/(L+1), ..., L/(L+1)."""
    levels = torch.arange(1, num_levels + 1, dtype=torch.float64, device=targets.device) / (num_levels + 1)
    below = mixture_cdf(means, variances, targets) <= levels[:, None]  # (L, n)
    return (below.double().mean(1) - levels).abs().mean().item()


def mixture_cdf(means: Tensor, variances: Tensor, at: Tensor) -> Tensor:
    """Compute P(X <= at) of each example's mixture, (n,); where a member without spread lies there, half of it."""
    members: Tensor = torch.special.ndtr(_standardise(at.double() - means.double(), variances.double()))
    return members.mean(0)


def mixture_quantile(means: Tensor, variances: Tensor, level: float) -> Tensor:
    """Find the quantile of each example's mixture, (n,), by bisection between its members' lowest and highest."""
    means, variances = means.double(), variances.double()
    standard: Tensor = torch.special.ndtri(torch.tensor(level, dtype=torch.float64, device=means.device))
    low, high = (means + variances.sqrt() * standard).aminmax(dim=0)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = mixture_cdf(means, variances, middle) < level
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def _mean_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    """Compute E|X| of Gaussians."""
    standard = _standardise(mean, variance)
    density = (-standard.square() / 2).exp() / math.sqrt(2 * math.pi)
    return mean * torch.erf(standard / math.sqrt(2)) + 2 * variance.sqrt() * density


def _standardise(difference: Tensor, variance: Tensor) -> Tensor:
    """Divide by the standard deviation; without spread the result is 0 or beyond any quantile."""
    return difference / variance.sqrt().clamp(min=TINY)
