"""The Gaussian that is closest to K Gaussians in alpha-divergence: Theorem 1 of BA-BFL within the Gaussian family.

BA-BFL gives the barycenter of the alpha-divergences D(p || q) = (1 - integral p^alpha q^(1-alpha)) / (alpha (1-alpha))
over all distributions; it is not Gaussian, and the paper leaves it to future work. Restricted to Gaussians, the
barycenter maximises the sum of w_k times the overlaps, the integrals of p_k^alpha q^(1-alpha), each of which has a
closed form. At alpha -> 0 it is `rklb`, at alpha = 1 it is `moments`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from bfl_bench.aggregators.rules import Gaussian, moments
from bfl_bench.checks import Above, AtLeast, Between

_AT_ONCE = 1 << 18  # numbers of a (K, columns) matrix: two megabytes, of which a few are in use at a time
_STEPS_PER_LOOK = 4  # on a GPU, where a look at the moves waits for the device
_NEAR = 0.5  # Newton's steps are taken below this length, in deviations and in log variance
_CLOSE = 0.05  # a maximum that near, likewise, is the same
_ROUNDING = 1e-13  # by which Newton's step may lower the objective: nothing but rounding


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
    width = max(_AT_ONCE // len(means), 64)
    blocks = zip(torch.split(means, width, dim=1), torch.split(variances, width, dim=1), strict=True)
    found = [_maximise(_Clients(*block, weights, alpha), tolerance, max_iterations) for block in blocks]
    return torch.cat([mean for mean, _ in found]), torch.cat([variance for _, variance in found])


@dataclass(frozen=True)
class _Clients:
    """Some columns of the clients' Gaussians."""

    means: Tensor  # (K, D)
    variances: Tensor  # (K, D)
    weights: Tensor  # (K,)
    alpha: float

    def constant(self) -> Tensor:
        """Compute the part of the log overlaps that no step changes, (K, D)."""
        return self.variances.log().mul_((1 - self.alpha) / 2).add_(self.weights.log()[:, None])


@dataclass(frozen=True)
class _Place:
    """Where a climb is, coordinate by coordinate, and what it sees from there; all (D,)."""

    mean: Tensor
    variance: Tensor
    value: Tensor  # log of the objective
    matched: Gaussian  # moments of the tilted mixture
    newton: Gaussian  # where Newton's step leads, in mean and log variance
    near: Tensor  # whether that is a short step to a maximum


def _maximise(clients: _Clients, tolerance: float, max_iterations: int) -> Gaussian:
    constant, (means, variances, weights) = clients.constant(), (clients.means, clients.variances, clients.weights)
    centre, precisions = weights @ means, variances.reciprocal()
    precision = weights @ precisions
    starts = (  # `moments` and `rklb`, of all clients at once
        (centre, weights @ (means - centre).square_().add_(variances)),
        (weights @ precisions.mul_(means) / precision, precision.reciprocal()),
    )
    first = _climb(clients, constant, starts[0], tolerance, max_iterations)
    second = _climb(clients, constant, starts[1], tolerance, max_iterations, known=first)
    # A second climb that ends beside a maximum that the first one reached may have stopped short of it.
    same = first[3] & (_distance(second, first) < _CLOSE)
    higher = (second[2] > first[2]) & ~same
    return torch.where(higher, second[0], first[0]), torch.where(higher, second[1], first[1])


def _climb(
    clients: _Clients,
    constant: Tensor,
    start: Gaussian,
    tolerance: float,
    max_iterations: int,
    known: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Find a peak of the objective near the start: mean, variance, the objective's logarithm, whether it is one; (D,).

    Matching the moments of the tilted mixture sum_k w_k p_k^alpha q^(1-alpha) never lowers the objective, but its steps
    shrink with alpha. So the step in natural parameters is first taken 1/alpha times as far, and only a coordinate that
    would lose by it takes the plain step. Near a maximum steps are Newton's. A coordinate that has arrived stays, and
    where most have, the others go on without them. One whose next step is Newton's to a maximum that is known already
    need not take it.
    """
    steps_per_look = 1 if constant.device.type == "cpu" else _STEPS_PER_LOOK
    here = _look(clients, constant, *start)
    result = [here.mean.clone(), here.variance.clone(), here.value.clone(), torch.zeros_like(here.near)]
    places: Tensor | None = None  # of the coordinates that still climb; None: all
    left = torch.ones_like(here.mean, dtype=torch.bool) if known is None else ~_leads_to(here, known)
    for step in range(1, max_iterations + 1):
        here, moved = _step(clients, constant, here, left)
        left = left & ~(moved < tolerance)
        if known is not None:
            left = left & ~_leads_to(here, known)
        if step % steps_per_look and step < max_iterations:
            continue
        num_left = int(left.sum())
        if num_left == 0 or step == max_iterations:
            break
        if num_left <= len(left) // 2:
            _store(result, here, left, places)
            kept = left.nonzero()[:, 0]
            places = kept if places is None else places[kept]
            clients = _Clients(clients.means[:, kept], clients.variances[:, kept], clients.weights, clients.alpha)
            constant = constant[:, kept]
            here = _select(here, kept)
            left = left[kept]
            known = known and [part[kept] for part in known]
    _store(result, here, left, places)
    return result


def _leads_to(here: _Place, known: Sequence[Tensor]) -> Tensor:
    """Tell in which coordinates a step of Newton's ends at a known maximum, or close by."""
    return here.near & (_distance(here.newton, known) < _CLOSE) & known[3]


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """Measure how far apart means and variances are, in deviations and relative variance of the other."""
    return torch.maximum((one[0] - other[0]).abs() / other[1].sqrt(), (one[1] / other[1] - 1).abs())


def _store(result: list[Tensor], here: _Place, left: Tensor, places: Tensor | None) -> None:
    for whole, part in zip(result, (here.mean, here.variance, here.value, ~left), strict=True):
        if places is None:
            whole.copy_(part)
        else:
            whole[places] = part


def _select(here: _Place, kept: Tensor) -> _Place:
    return _Place(
        here.mean[kept],
        here.variance[kept],
        here.value[kept],
        (here.matched[0][kept], here.matched[1][kept]),
        (here.newton[0][kept], here.newton[1][kept]),
        here.near[kept],
    )


def _choose(condition: Tensor, one: _Place, other: _Place) -> _Place:
    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(condition, a, b)

    return _Place(
        pick(one.mean, other.mean),
        pick(one.variance, other.variance),
        pick(one.value, other.value),
        (pick(one.matched[0], other.matched[0]), pick(one.matched[1], other.matched[1])),
        (pick(one.newton[0], other.newton[0]), pick(one.newton[1], other.newton[1])),
        pick(one.near, other.near),
    )


def _step(clients: _Clients, constant: Tensor, here: _Place, left: Tensor) -> tuple[_Place, Tensor]:
    """Take a step in the coordinates that are `left`, and say how far it is to go, in deviations and relative variance.

    That is at most about as far as the step went.
    """
    far = _extrapolate((here.mean, here.variance), here.matched, 1 / clients.alpha)
    target = [torch.where(here.near, a, b) for a, b in zip(here.newton, far, strict=True)]
    there = _look(clients, constant, target[0], target[1])
    better = torch.where(here.near, there.value >= here.value - _ROUNDING, there.value > here.value)  # false for a NaN
    if left.device.type != "cpu" or not (better | ~left).all():  # on a GPU to ask takes longer than to look
        there = _choose(better, there, _look(clients, constant, *here.matched))
    by_mean, by_variance = (there.mean - here.mean) / here.variance.sqrt(), there.variance / here.variance - 1
    moved = torch.maximum(by_mean.abs(), by_variance.abs())
    moved = torch.where(better, moved, moved / clients.alpha)  # a plain step is alpha times as long
    # What is left after a step of Newton's is about its square; a hundred times that is to spare.
    moved = torch.where(better & here.near, 100 * moved.square(), moved)
    return _choose(left, there, here), moved


def _look(clients: _Clients, constant: Tensor, mean: Tensor, variance: Tensor) -> _Place:
    """Evaluate the objective at a Gaussian, and where steps would lead from there.

    With S = (1-a) variances + a variance, e = (means - mean) / S and u = (variances - variance) / S, the derivative of
    a log overlap by the mean is e, that by the log variance (u + a variance e^2) / 2, both divided by a (1-a), so that
    no alpha costs digits. Second derivatives are made of the same e and u, 1 / S being (1 - (1-a) u) / variance: what
    is summed over the clients are products of them, weighted by the clients' shares of the objective.
    """
    a, b = clients.alpha, 1 - clients.alpha
    inverse = torch.mul(clients.variances, b).add_(a * variance)
    share = inverse.log().mul_(-0.5).add_(constant)
    inverse.reciprocal_()
    product = clients.means - mean
    e = product * inverse
    share.add_(product.mul_(e), alpha=-0.5 * a * b)  # the log overlaps
    u = torch.sub(clients.variances, variance, out=product).mul_(inverse)
    highest = share.amax(0)
    share.sub_(highest).exp_()
    total = share.sum(0)
    product = torch.mul(share, u, out=inverse)
    sum_u, sum_uu = product.sum(0), product.mul_(u).sum(0)
    product = torch.mul(share, e, out=inverse)
    sum_e, sum_eu = product.sum(0), torch.mul(product, u, out=share).sum(0)
    sum_ee, sum_eeu = product.mul_(e).sum(0), share.mul_(e).sum(0)
    sum_eee, sum_eeee = product.mul_(e).sum(0), product.mul_(e).sum(0)
    sums = torch.stack([sum_e, sum_u, sum_ee, sum_eu, sum_uu, sum_eee, sum_eeu, sum_eeee]).div_(total)
    e1, u1, e2, eu, u2, e3, e2u, e4 = sums

    av = a * variance
    slope = 0.5 * (u1 + av * e2)  # by the log variance, as e1 is by the mean
    slope_e = 0.5 * (eu + av * e3)
    slope_slope = 0.25 * (u2 + 2 * av * e2u + av**2 * e4)
    by_mean = a * b * (e2 - e1**2) - (1 - b * u1) / variance
    mixed = a * b * (slope_e - slope * e1) - a * (e1 - b * eu)
    by_log = a * b * (slope_slope - slope**2)
    by_log += 0.5 * (av * (e2 - 2 * a * (e2 - b * e2u)) - (1 + (a - b) * u1 - a * b * u2))
    determinant = by_mean * by_log - mixed**2
    step_mean = (mixed * slope - by_log * e1) / determinant
    step_log = (mixed * e1 - by_mean * slope) / determinant
    near = (by_mean < 0) & (determinant > 0) & (step_log.abs() < _NEAR) & (step_mean.abs() < _NEAR * variance.sqrt())
    # The tilted components have means `mean + a variance e` and variances `variance (1 + a u)`.
    return _Place(
        mean=mean,
        variance=variance,
        value=highest + total.log() + 0.5 * a * variance.log(),
        matched=(mean + av * e1, variance * (1 + a * u1) + av**2 * (e2 - e1**2)),
        newton=(mean + step_mean, variance * step_log.exp()),
        near=near,
    )


def _extrapolate(old: Gaussian, new: Gaussian, factor: float) -> Gaussian:
    """`factor` times the step from `old` to `new` in natural parameters; NaN where no Gaussian is there."""
    precision = (1 - factor) / old[1] + factor / new[1]
    shift = (1 - factor) * old[0] / old[1] + factor * new[0] / new[1]
    precision = torch.where(precision > 0, precision, torch.nan)
    return shift / precision, precision.reciprocal()
