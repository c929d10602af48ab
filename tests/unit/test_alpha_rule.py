"""The Gaussian barycenter in alpha-divergence, against its limits, numerical minimisation and a case in closed form."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor

from bfl_bench.aggregators import alpha, moments, rklb
from bfl_bench.build import plan
from bfl_bench.errors import ConfigError
from tests.composing import resolve

Federation = tuple[Tensor, Tensor, Tensor]


def tensor(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def make_federation(columns: int, seed: int, spread: float = 0.5, num_clients: int = 3) -> Federation:
    """Variances of about one; at a `spread` up to 1 the clients overlap well and there is one optimum."""
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.5, 2, num_clients)
    return (
        tensor(rng.normal(0, spread, (num_clients, columns))),
        tensor(np.exp(rng.normal(0, 0.5, (num_clients, columns)))),
        tensor(weights / weights.sum()),
    )


POINTS = np.linspace(-30, 30, 4001)
"""Sums over these are integrals to rounding: smooth densities of deviations from 0.2 to 3."""


class Column:
    """The divergences to one column's clients, by integration: nothing of the closed form of the overlap."""

    def __init__(self, federation: Federation, column: int, order: float) -> None:
        means, variances, weights = (values.numpy() for values in federation)
        logs = stats.norm.logpdf(POINTS, means[:, column, None], np.sqrt(variances[:, column, None]))
        self.mixture = weights @ np.exp(order * logs)
        self.order = order

    def divergence(self, mean: float, variance: float) -> float:
        """sum_k w_k D_alpha(p_k || q), as BA-BFL defines it."""
        q = stats.norm.pdf(POINTS, mean, math.sqrt(variance))
        overlap = (POINTS[1] - POINTS[0]) * float(self.mixture @ q ** (1 - self.order))
        return (1 - overlap) / (self.order * (1 - self.order))

    def minimise(self, mean: float, variance: float) -> tuple[float, float]:
        found = optimize.minimize(
            lambda x: self.divergence(x[0], math.exp(x[1])),
            (mean, math.log(variance)),
            method="Nelder-Mead",
            options={"xatol": 1e-8, "fatol": 1e-16, "maxiter": 1000},
        )
        return float(found.x[0]), math.exp(found.x[1])


# --- Limits ---


def distance(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Of means and of variances, (2, D)."""
    return torch.stack([(one[0] - other[0]).abs(), (one[1] - other[1]).abs()])


def test_tends_to_rklb_in_proportion_to_alpha() -> None:
    federation = make_federation(columns=20, seed=1)
    limit = rklb(*federation)
    errors = {order: distance(alpha(*federation, order), limit) for order in (1e-1, 1e-2, 1e-3, 1e-4)}
    # Each is the slope at zero times alpha, up to terms of the order of alpha; a mean may have almost no slope.
    # The climb ends 1e-10 / alpha from the optimum, 1e-4 of the slope at 1e-3 but 1e-2 of it at 1e-4.
    for larger, smaller in ((1e-1, 1e-2), (1e-2, 1e-3)):
        assert ((errors[larger] / larger - errors[smaller] / smaller).abs() < 3 * larger).all()
    assert ((errors[1e-3] / 1e-3 - errors[1e-4] / 1e-4).abs() < 0.02).all()
    for order, error in errors.items():
        assert (error < order).all()
    assert (errors[1e-4] / 1e-4).median() > 0.01  # an approach, not the same thing


def test_tends_to_the_moments_in_proportion_to_one_minus_alpha() -> None:
    federation = make_federation(columns=20, seed=2)
    limit = moments(*federation)
    errors = {gap: distance(alpha(*federation, 1 - gap), limit) for gap in (1e-1, 1e-2, 1e-3)}
    for larger, smaller in ((1e-1, 1e-2), (1e-2, 1e-3)):
        assert ((errors[larger] / larger - errors[smaller] / smaller).abs() < 3 * larger).all()  # as above
        assert (errors[smaller] < smaller).all()
    assert (errors[1e-3] / 1e-3).median() > 0.01


def test_is_the_moments_at_one() -> None:
    federation = make_federation(columns=20, seed=3, spread=5.0)
    for one, other in zip(alpha(*federation, 1.0), moments(*federation), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(alpha(*federation, 1), moments(*federation), strict=True):
        assert torch.equal(one, other)


# --- The optimum ---


@pytest.mark.parametrize("half_distance", [0.25, 0.5, 1.0, 1.5, 2.0])
def test_two_equal_deviations_in_closed_form(half_distance: float) -> None:
    """N(-d, s^2) and N(d, s^2), equal weights, alpha 1/2: with v in s^2 and d in s, v^2 - d^2 v - 1 = 0.

    The overlap with N(0, v) is (4 v)^(1/4) (1 + v)^(-1/2) exp(-d^2 / (4 (1 + v))), up to a factor; its derivative is
    zero there. At d = 1 the variance is the golden ratio.
    """
    deviation = 3.0
    means = deviation * tensor([[-half_distance], [half_distance]]) + 0.7
    mean, variance = alpha(means, torch.full_like(means, deviation**2), tensor([0.5, 0.5]), 0.5)
    square = half_distance**2
    # The last move is below 1e-10 and the moves shrink by half or better.
    assert mean.item() == pytest.approx(0.7, abs=1e-9)
    assert variance.item() == pytest.approx(deviation**2 * (square + math.sqrt(square**2 + 4)) / 2, rel=1e-9)


@pytest.mark.parametrize("order", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("seed", [10, 11, 12])
def test_equals_numerical_minimisation(order: float, seed: int) -> None:
    federation = make_federation(columns=1, seed=seed, spread=0.8, num_clients=2 + seed % 3)
    mean, variance = (value.item() for value in alpha(*federation, order))
    column = Column(federation, 0, order)
    for start in (rklb, moments):
        expected = column.minimise(*(value.item() for value in start(*federation)))
        # A minimum of a function known to 1e-16 is found to the root of that, times what its curvature makes of it.
        assert (mean, variance) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("order", [0.1, 0.5, 0.9])
def test_never_worse_than_rklb_moments_and_neighbours(order: float) -> None:
    federation = make_federation(columns=8, seed=20, spread=1.0, num_clients=4)
    mean, variance = alpha(*federation, order)
    rivals = [rklb(*federation), moments(*federation)]
    for step in (-1e-2, 1e-2):
        rivals += [(mean + step, variance), (mean, variance * (1 + step))]
    for index in range(8):
        column = Column(federation, index, order)
        value = column.divergence(mean[index].item(), variance[index].item())
        for rival_mean, rival_variance in rivals:
            # Better by far more than the integral's error of 1e-15 / (alpha (1 - alpha)).
            assert value < column.divergence(rival_mean[index].item(), rival_variance[index].item()) - 1e-9


@pytest.mark.parametrize("order", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_climbs(order: float, spread: float) -> None:
    """From the moments, no iteration makes any coordinate worse, overlapping or not."""
    federation = make_federation(columns=5, seed=21, spread=spread)
    columns = [Column(federation, index, order) for index in range(5)]
    before = [math.inf] * 5
    for iterations in (0, 1, 2, 3, 5, 10, 100):
        mean, variance = alpha(*federation, order, max_iterations=iterations)
        after = [c.divergence(m, v) for c, m, v in zip(columns, mean.tolist(), variance.tolist(), strict=True)]
        slack = 1e-14 / (order * (1 - order))  # the integral's rounding
        assert all(new <= old + slack for new, old in zip(after, before, strict=True))
        before = after


def test_stops_by_tolerance_or_by_iterations() -> None:
    federation = make_federation(columns=10, seed=22)
    exact = alpha(*federation, 0.3, tolerance=1e-14, max_iterations=2000)
    starts = [torch.stack(rule(*federation)) for rule in (moments, rklb)]
    none = torch.stack(alpha(*federation, 0.3, max_iterations=0))
    # Column by column one of the two starts, but for rounding: clients are added up in another order.
    assert (torch.isclose(none, starts[0], 1e-13).all(0) | torch.isclose(none, starts[1], 1e-13).all(0)).all()
    by_default = distance(alpha(*federation, 0.3), exact).max().item()
    loose = distance(alpha(*federation, 0.3, tolerance=1e-3), exact).max().item()
    short = distance(alpha(*federation, 0.3, max_iterations=2), exact).max().item()
    # Moves shrink by 0.7 or better, so that what is left is a few times the last move.
    assert by_default < 1e-9
    assert 1e-9 < loose < 1e-2
    assert short > by_default


@pytest.mark.parametrize("order", [1e-3, 0.5])
def test_a_narrow_and_a_wide_client(order: float) -> None:
    """Where the long step would leave the Gaussians: variances six orders of magnitude apart, the same mean."""
    means, variances, weights = tensor([[0.0], [0.0]]), tensor([[1e-3], [1e3]]), tensor([0.5, 0.5])
    mean, variance = alpha(means, variances, weights, order)
    assert torch.isfinite(variance).all()
    assert mean.item() == 0
    ratio = variance / variances[:, 0]
    # The overlap of N(0, s) and N(0, v): its derivative in log v is zero, independent of how it was found.
    share = 0.5 * ratio ** (order / 2) / (1 - order + order * ratio).sqrt()
    slope = (share * (1 - ratio / (1 - order + order * ratio))).sum().item()
    assert abs(slope) < 1e-7  # what a relative error of 1e-7 leaves


@pytest.mark.parametrize("order", ["0", "1.5"])
def test_orders_outside_are_refused(order: str) -> None:
    with pytest.raises(ConfigError, match=r"aggregator\.alpha"):
        plan(resolve("dataset=synthetic", "method=fvb", "aggregator=alpha", f"aggregator.alpha={order}"))
