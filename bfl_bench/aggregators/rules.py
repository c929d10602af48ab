"""Rules for K Gaussians with independent coordinates.

Each is a function (means (K, D), variances (K, D), weights (K,)) -> (mean (D,), variance (D,)).

The weights sum to one. A rule computes in the precision it is given; `combine` gives it float64. Products of densities
are sums of precisions, so nothing underflows, however many clients there are.

BFL-P: Ozer et al., "How to Combine Variational Bayesian Networks in Federated Learning", 2022.
BA-BFL: Jamoussi et al., "BA-BFL: Barycentric Aggregation for Bayesian Federated Learning", 2024.
"""

from typing import Annotated

import torch
from torch import Tensor

from bfl_bench.checks import AtLeast, Interval

Gaussian = tuple[Tensor, Tensor]
"""Mean (D,) and variance (D,)."""

Clamp = Annotated[list[float], Interval()]
"""[lowest, highest] log variance."""


def eaa(means: Tensor, variances: Tensor, weights: Tensor, running_clamp: Clamp | None = None) -> Gaussian:
    """Empirical arithmetic aggregation (BFL-P eq. 4): averages of means and of variances."""
    if running_clamp is not None:
        return weights @ means, _clamped_running_sum(variances, weights, running_clamp)
    return weights @ means, weights @ variances


def gaa(
    means: Tensor, variances: Tensor, weights: Tensor, normalised: bool = False, running_clamp: Clamp | None = None
) -> Gaussian:
    """Gaussian arithmetic aggregation (BFL-P eq. 5): the law of the weighted sum of independent variables.

    `normalised` divides by the sum of squared weights, as BA-BFL's released code does.
    """
    squares = weights**2
    variance = squares @ variances if running_clamp is None else _clamped_running_sum(variances, squares, running_clamp)
    return weights @ means, variance / squares.sum() if normalised else variance


def aalv(means: Tensor, variances: Tensor, weights: Tensor) -> Gaussian:
    """Arithmetic aggregation with log variance (BFL-P eq. 6): geometric mean of the variances."""
    return weights @ means, (weights @ variances.log()).exp()


def moments(means: Tensor, variances: Tensor, weights: Tensor) -> Gaussian:
    """Mean and variance of the mixture: the forward-KL barycenter, PPA's limit, and eqs. 6-7 of FOLA."""
    mean = weights @ means
    return mean, weights @ (variances + (means - mean) ** 2)


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
    centre = weights @ means  # sums of squares about a point nearby, so that nothing cancels
    for mean, deviation, count in zip(means, deviations, counts, strict=True):
        noise = torch.randn(count, len(mean), dtype=mean.dtype, generator=generator).to(mean.device)
        draws = mean - centre + deviation * noise
        total += draws.sum(0)
        total_square += draws.square().sum(0)
    size = sum(counts)
    mean = total / size
    return centre + mean, (total_square - size * mean**2) / (size - 1 if unbiased else size)


def rklb(means: Tensor, variances: Tensor, weights: Tensor) -> Gaussian:
    """Reverse-KL barycenter (BA-BFL eq. 8): the normalised product of the densities raised to their weights."""
    precision = weights @ variances.reciprocal()
    return (weights @ (means / variances)) / precision, precision.reciprocal()


def cf(means: Tensor, variances: Tensor, weights: Tensor, clamp: Clamp | None = None) -> Gaussian:
    """Conflation (BFL-P eq. 8): the mean of `rklb`, its variance times the largest weight."""
    mean, variance = rklb(means, variances if clamp is None else _clamp(variances, clamp), weights)
    return mean, weights.max() * variance


def wb(means: Tensor, variances: Tensor, weights: Tensor) -> Gaussian:
    """Wasserstein-2 barycenter (BA-BFL eq. 9): averages of means and of standard deviations."""
    return weights @ means, (weights @ variances.sqrt()) ** 2


def _clamp(variances: Tensor, clamp: Clamp) -> Tensor:
    """Variances as the released code sees them: their logarithms clamped."""
    lowest, highest = torch.tensor(clamp, dtype=variances.dtype).exp().tolist()
    return variances.clamp(lowest, highest)


def _clamped_running_sum(variances: Tensor, factors: Tensor, clamp: Clamp) -> Tensor:
    """sum_k f_k v_k as BFL-P's released code adds it up: the sum so far is clamped before each further client.

    The result depends on the order of the clients, there as here.
    """
    terms = factors[:, None] * _clamp(variances, clamp)
    total = terms[0]
    for term in terms[1:]:
        total = _clamp(total, clamp) + term
    return total
