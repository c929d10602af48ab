"""Rules for K Gaussians with independent coordinates.

Each is a function (means (K, D), variances (K, D), weights (K,)) -> (mean (D,), variance (D,)).

The weights sum to one. A rule computes in the precision it is given; `combine` gives it float64. Products of densities
are sums of precisions, so nothing underflows, however many clients there are. A rule whose arguments are `Rows` goes
over the clients one by one, and K x D numbers need never be held.

BFL-P: Ozer et al., "How to Combine Variational Bayesian Networks in Federated Learning", 2022.
BA-BFL: Jamoussi et al., "BA-BFL: Barycentric Aggregation for Bayesian Federated Learning", 2024.
"""

from collections.abc import Iterable
from typing import Annotated

import torch
from torch import Tensor

from bfl_bench.checks import AtLeast, Interval
from bfl_bench.devices import bring

Gaussian = tuple[Tensor, Tensor]
"""Mean (D,) and variance (D,)."""

Rows = Tensor | Iterable[Tensor]
"""K rows (D,) one after the other; a row need not outlast the step to the next. `moments` goes over the means twice."""

Clamp = Annotated[list[float], Interval()]
"""[lowest, highest] log variance."""


def average(weights: Tensor, rows: Rows) -> Tensor:
    """sum_k w_k x_k, (D,)."""
    total: Tensor | None = None
    for weight, row in zip(weights.tolist(), rows, strict=True):
        total = row * weight if total is None else total.add_(row, alpha=weight)
    assert total is not None
    return total


def eaa(means: Rows, variances: Rows, weights: Tensor, running_clamp: Clamp | None = None) -> Gaussian:
    """Empirical arithmetic aggregation (BFL-P eq. 4): averages of means and of variances."""
    if running_clamp is not None:
        return average(weights, means), _clamped_running_sum(variances, weights, running_clamp)
    return average(weights, means), average(weights, variances)


def gaa(
    means: Rows, variances: Rows, weights: Tensor, normalised: bool = False, running_clamp: Clamp | None = None
) -> Gaussian:
    """Gaussian arithmetic aggregation (BFL-P eq. 5): the law of the weighted sum of independent variables.

    `normalised` divides by the sum of squared weights, as BA-BFL's released code does.
    """
    squares = weights**2
    if running_clamp is not None:
        variance = _clamped_running_sum(variances, squares, running_clamp)
    else:
        variance = average(squares, variances)
    return average(weights, means), variance / squares.sum() if normalised else variance


def aalv(means: Rows, variances: Rows, weights: Tensor) -> Gaussian:
    """Arithmetic aggregation with log variance (BFL-P eq. 6): geometric mean of the variances."""
    return average(weights, means), average(weights, (variance.log() for variance in variances)).exp()


def moments(means: Rows, variances: Rows, weights: Tensor) -> Gaussian:
    """Mean and variance of the mixture: the forward-KL barycenter, PPA's limit, and eqs. 6-7 of FOLA."""
    centre = average(weights, means)
    pairs = zip(means, variances, strict=True)
    return centre, average(weights, (variance + (mean - centre) ** 2 for mean, variance in pairs))


def ppa(
    means: Tensor,
    variances: Tensor,
    weights: Tensor,
    generator: torch.Generator,
    num_samples: Annotated[int, AtLeast(2)] = 1000,
    unbiased: bool = False,
    clamp: Clamp | None = None,
) -> Gaussian:
    """Population pooling (BFL-P eq. 7): moments of a sample with about N w_k draws, at least one, from each client.

    With more clients than `num_samples` that one draw each weighs the small clients up.
    """
    deviations = (variances if clamp is None else _clamp(variances, clamp)).sqrt()
    counts = (weights * num_samples).floor().long().clamp(min=1).tolist()
    total, total_square = torch.zeros_like(means[0]), torch.zeros_like(means[0])
    centre = average(weights, means)  # sums of squares about a point nearby, so that nothing cancels
    for mean, deviation, count in zip(means, deviations, counts, strict=True):
        noise = bring(torch.randn(count, len(mean), dtype=mean.dtype, generator=generator), mean.device)
        draws = mean - centre + deviation * noise
        total += draws.sum(0)
        total_square += draws.square().sum(0)
    size = sum(counts)
    mean = total / size
    return centre + mean, (total_square - size * mean**2) / (size - 1 if unbiased else size)


def rklb(means: Rows, variances: Rows, weights: Tensor) -> Gaussian:
    """Reverse-KL barycenter (BA-BFL eq. 8): the normalised product of the densities raised to their weights."""
    precision: Tensor | None = None
    for weight, mean, variance in zip(weights.tolist(), means, variances, strict=True):
        share = weight / variance
        if precision is None:
            precision, shift = share, share * mean
        else:
            precision.add_(share)
            shift.addcmul_(share, mean)
    assert precision is not None
    return shift / precision, precision.reciprocal()


def cf(means: Rows, variances: Rows, weights: Tensor, clamp: Clamp | None = None) -> Gaussian:
    """Conflation (BFL-P eq. 8): the mean of `rklb`, its variance times the largest weight."""
    if clamp is not None:
        variances = (_clamp(variance, clamp) for variance in variances)
    mean, variance = rklb(means, variances, weights)
    return mean, weights.max() * variance


def wb(means: Rows, variances: Rows, weights: Tensor) -> Gaussian:
    """Wasserstein-2 barycenter (BA-BFL eq. 9): averages of means and of standard deviations."""
    return average(weights, means), average(weights, (variance.sqrt() for variance in variances)) ** 2


def _clamp(variances: Tensor, clamp: Clamp) -> Tensor:
    """Variances as the released code sees them: their logarithms clamped."""
    lowest, highest = torch.tensor(clamp, dtype=variances.dtype).exp().tolist()
    return variances.clamp(lowest, highest)


def _clamped_running_sum(variances: Rows, factors: Tensor, clamp: Clamp) -> Tensor:
    """sum_k f_k v_k as BFL-P's released code adds it up: the sum so far is clamped before each further client.

    The result depends on the order of the clients, there as here.
    """
    total: Tensor | None = None
    for factor, variance in zip(factors.tolist(), variances, strict=True):
        term = factor * _clamp(variance, clamp)
        total = term if total is None else _clamp(total, clamp) + term
    assert total is not None
    return total
