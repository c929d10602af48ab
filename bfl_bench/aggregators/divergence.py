"""The Gaussian that is closest to K Gaussians in alpha-divergence: Theorem 1 of BA-BFL within the Gaussian family.

BA-BFL gives the barycenter of the alpha-divergences D(p || q) = (1 - integral p^alpha q^(1-alpha)) / (alpha (1-alpha))
over all distributions; it is not Gaussian, and the paper leaves it to future work. Restricted to Gaussians, the
barycenter maximises the sum of w_k times the overlaps, the integrals of p_k^alpha q^(1-alpha), each of which has a
closed form. At alpha -> 0 it is `rklb`, at alpha = 1 it is `moments`.
"""

from typing import Annotated

import torch
from torch import Tensor

from bfl_bench.aggregators.rules import Gaussian, moments, rklb
from bfl_bench.checks import Above, AtLeast, Between


def alpha(
    means: Tensor,
    variances: Tensor,
    weights: Tensor,
    alpha: Annotated[float, Between(1e-6, 1)] = 0.5,
    tolerance: Annotated[float, Above(0)] = 1e-10,
    max_iterations: Annotated[int, AtLeast(1)] = 500,
) -> Gaussian:
    """Climb from `moments` and from `rklb`, coordinate by coordinate, and keep what is higher.

    For clients that lie far apart the objective has several peaks, and neither climb need find the highest.
    """
    if alpha == 1:
        return moments(means, variances, weights)
    ends = []
    for start in (moments, rklb):
        mean, variance = _climb(
            means, variances, weights, start(means, variances, weights), alpha, tolerance, max_iterations
        )
        ends.append((mean, variance, _log_overlap(means, variances, weights, mean, variance, alpha).logsumexp(0)))
    first, second = ends
    higher = second[2] > first[2]
    return torch.where(higher, second[0], first[0]), torch.where(higher, second[1], first[1])


def _climb(
    means: Tensor,
    variances: Tensor,
    weights: Tensor,
    start: Gaussian,
    alpha: float,
    tolerance: float,
    max_iterations: int,
) -> Gaussian:
    """To a peak of the objective near the start.

    Matching the moments of the tilted mixture sum_k w_k p_k^alpha q^(1-alpha) never lowers the objective, but its steps
    shrink with alpha. So the step in natural parameters is first taken 1/alpha times as far, and only a coordinate that
    would lose by it takes the plain step.
    """
    mean, variance = start
    value = _log_overlap(means, variances, weights, mean, variance, alpha).logsumexp(0)
    for _ in range(max_iterations):
        matched = _match_tilted(means, variances, weights, mean, variance, alpha)
        far = _extrapolate((mean, variance), matched, 1 / alpha)
        far_value = _log_overlap(means, variances, weights, *far, alpha).logsumexp(0)
        better = far_value > value  # false for a NaN
        new_mean, new_variance = (torch.where(better, a, b) for a, b in zip(far, matched, strict=True))
        moved = torch.maximum((new_mean - mean).abs() / variance.sqrt(), (new_variance / variance - 1).abs())
        moved = torch.where(better, moved, moved / alpha)  # a plain step is alpha times as long
        mean, variance = new_mean, new_variance
        value = _log_overlap(means, variances, weights, mean, variance, alpha).logsumexp(0)
        if moved.max() < tolerance:
            break
    return mean, variance


def _log_overlap(
    means: Tensor, variances: Tensor, weights: Tensor, mean: Tensor, variance: Tensor, alpha: float
) -> Tensor:
    """log of w_k times the integral of p_k^alpha q^(1-alpha), (K, D)."""
    spread = (1 - alpha) * variances + alpha * variance
    return (
        weights.log()[:, None]
        + 0.5 * ((1 - alpha) * variances.log() + alpha * variance.log() - spread.log())
        - 0.5 * alpha * (1 - alpha) * (means - mean) ** 2 / spread
    )


def _match_tilted(
    means: Tensor, variances: Tensor, weights: Tensor, mean: Tensor, variance: Tensor, alpha: float
) -> Gaussian:
    """Mean and variance of the mixture of the tilted components p_k^alpha q^(1-alpha)."""
    share = _log_overlap(means, variances, weights, mean, variance, alpha).softmax(0)
    spread = (1 - alpha) * variances + alpha * variance
    tilted_means = ((1 - alpha) * variances * mean + alpha * variance * means) / spread
    tilted_variances = variances * variance / spread
    new_mean = (share * tilted_means).sum(0)
    return new_mean, (share * (tilted_variances + (tilted_means - new_mean) ** 2)).sum(0)


def _extrapolate(old: Gaussian, new: Gaussian, factor: float) -> Gaussian:
    """`factor` times the step from `old` to `new` in natural parameters; NaN where no Gaussian is there."""
    precision = (1 - factor) / old[1] + factor / new[1]
    shift = (1 - factor) * old[0] / old[1] + factor * new[0] / new[1]
    precision = torch.where(precision > 0, precision, torch.nan)
    return shift / precision, precision.reciprocal()
