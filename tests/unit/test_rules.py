"""The rules for Gaussians with independent coordinates, against integrals, the papers and the rules' symmetries."""

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from bfl_bench.aggregators import aalv, alpha, cf, eaa, gaa, moments, ppa, rklb, wb
from tests.federation import generator

Gaussian = tuple[Tensor, Tensor]
Rule = Callable[[Tensor, Tensor, Tensor], Gaussian]
Federation = tuple[Tensor, Tensor, Tensor]
"""Means (K, D), variances (K, D), weights (K,)."""

gaa_normalised = partial(gaa, normalised=True)


def ppa_seeded(means: Tensor, variances: Tensor, weights: Tensor) -> Gaussian:
    """The random rule, with the same noise whenever the counts are the same."""
    return ppa(means, variances, weights, generator=generator(9), num_samples=40)


CLOSED_FORMS: dict[str, Rule] = {
    "eaa": eaa,
    "gaa": gaa,
    "gaa_normalised": gaa_normalised,
    "aalv": aalv,
    "moments": moments,
    "rklb": rklb,
    "cf": cf,
    "wb": wb,
}


def tensor(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def make_federation(num_clients: int = 4, columns: int = 3, seed: int = 11) -> Federation:
    """Clients that overlap well, of unequal weight."""
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.5, 3, num_clients)
    return (
        tensor(rng.normal(0.5, 1.0, (num_clients, columns))),
        tensor(np.exp(rng.normal(-0.5, 0.7, (num_clients, columns)))),
        tensor(weights / weights.sum()),
    )


def assert_gaussian(
    result: Gaussian, mean: object, variance: object, rtol: float = 1e-13, mean_scale: float = 1.0
) -> None:
    """The mean to `rtol` of `mean_scale` (it may cancel to nothing), the variance to `rtol` of itself."""
    np.testing.assert_allclose(result[0].numpy(), np.asarray(mean), rtol=rtol, atol=rtol * mean_scale)
    np.testing.assert_allclose(result[1].numpy(), np.asarray(variance), rtol=rtol, atol=0)


# --- Closed forms ---

POINTS = np.linspace(-40, 40, 80_001)
"""Sums over these are integrals to rounding: a smooth density of deviation above 0.1, zero at both ends."""


def log_densities(means: Tensor, variances: Tensor, column: int) -> np.ndarray:
    """Of each client at POINTS, (K, N)."""
    m, v = means[:, column].numpy()[:, None], variances[:, column].numpy()[:, None]
    return stats.norm.logpdf(POINTS, m, np.sqrt(v))


def moments_of(log_density: np.ndarray) -> tuple[float, float]:
    """Mean and variance of the density at POINTS, normalised here."""
    mass = np.exp(log_density - log_density.max())
    mass /= mass.sum()
    mean = float(mass @ POINTS)
    return mean, float(mass @ (POINTS - mean) ** 2)


def each_column(oracle: Callable[[int], tuple[float, float]], columns: int) -> tuple[np.ndarray, np.ndarray]:
    results = np.array([oracle(column) for column in range(columns)])
    return results[:, 0], results[:, 1]


def test_rklb_is_the_normalised_product_of_powers() -> None:
    means, variances, weights = make_federation()
    expected = each_column(lambda c: moments_of(weights.numpy() @ log_densities(means, variances, c)), 3)
    assert_gaussian(rklb(means, variances, weights), *expected, rtol=1e-11)  # 80 001 terms in float64


def test_moments_are_those_of_the_mixture() -> None:
    means, variances, weights = make_federation()
    expected = each_column(
        lambda c: moments_of(np.log(weights.numpy() @ np.exp(log_densities(means, variances, c)) + 1e-300)), 3
    )
    assert_gaussian(moments(means, variances, weights), *expected, rtol=1e-11)  # 80 001 terms in float64


def test_cf_of_equal_weights_is_the_conflation() -> None:
    """Hill's definition: the normalised product of the densities themselves."""
    means, variances, _ = make_federation()
    weights = tensor([0.25] * 4)
    expected = each_column(lambda c: moments_of(log_densities(means, variances, c).sum(0)), 3)
    assert_gaussian(cf(means, variances, weights), *expected, rtol=1e-11)  # 80 001 terms in float64


def test_wb_averages_the_quantile_functions() -> None:
    means, variances, weights = make_federation()
    # u = Phi(z) spreads the levels; what lies beyond |z| = 7.5 has a share of 1e-12 of the second moment.
    z = np.linspace(-7.5, 7.5, 20_001)
    levels, mass = stats.norm.cdf(z), stats.norm.pdf(z) * (z[1] - z[0])

    def oracle(column: int) -> tuple[float, float]:
        quantiles = sum(
            w * stats.norm.ppf(levels, m, math.sqrt(v))
            for w, m, v in zip(weights.tolist(), means[:, column].tolist(), variances[:, column].tolist(), strict=True)
        )
        mean = float(mass @ quantiles)
        return mean, float(mass @ (quantiles - mean) ** 2)

    # The level 1 - u near one is known to 1e-16 only: a quantile at z = 7.5 to 1e-3, weighted there by 2e-13.
    assert_gaussian(wb(means, variances, weights), *each_column(oracle, 3), rtol=1e-10)


def test_cf_by_literal_products() -> None:
    """As BFL-P's code writes eq. 8: the product of all variances over the weighted sum of products of the others."""
    means, variances, weights = make_federation(num_clients=3)
    m, v, w = means.numpy(), variances.numpy(), weights.numpy()
    others = np.stack([v[1] * v[2], v[0] * v[2], v[0] * v[1]])
    denominator = w @ others
    result = cf(means, variances, weights)
    assert_gaussian(result, (w @ (m * others)) / denominator, w.max() * v.prod(0) / denominator)
    torch.testing.assert_close(result[0], rklb(means, variances, weights)[0], rtol=0, atol=0)


TWO_CLIENTS = tensor([[0.0], [2.0]]), tensor([[1.0], [0.25]])
"""N(0, 1) and N(2, 1/4), the toy example of BA-BFL's figure 1."""

BY_HAND = [
    (eaa, (0.5, 0.5), 1.0, 0.625),
    (gaa, (0.5, 0.5), 1.0, 0.3125),
    (gaa_normalised, (0.5, 0.5), 1.0, 0.625),
    (aalv, (0.5, 0.5), 1.0, 0.5),
    (moments, (0.5, 0.5), 1.0, 1.625),
    (rklb, (0.5, 0.5), 1.6, 0.4),
    (cf, (0.5, 0.5), 1.6, 0.2),
    (wb, (0.5, 0.5), 1.0, 0.5625),
    (eaa, (0.25, 0.75), 1.5, 0.4375),
    (gaa, (0.25, 0.75), 1.5, 13 / 64),
    (gaa_normalised, (0.25, 0.75), 1.5, 13 / 40),
    (aalv, (0.25, 0.75), 1.5, 2**-1.5),
    (moments, (0.25, 0.75), 1.5, 1.1875),
    (rklb, (0.25, 0.75), 24 / 13, 4 / 13),
    (cf, (0.25, 0.75), 24 / 13, 3 / 13),
    (wb, (0.25, 0.75), 1.5, 0.390625),
]


@pytest.mark.parametrize(("rule", "weights", "mean", "variance"), BY_HAND)
def test_by_hand(rule: Rule, weights: tuple[float, float], mean: float, variance: float) -> None:
    assert_gaussian(rule(*TWO_CLIENTS, tensor(weights)), [mean], [variance], rtol=1e-15)  # a few roundings


def test_gaa_normalised_is_the_average_by_squared_weights() -> None:
    """`np.average(covs, weights=w**2)`, as BA-BFL's released code has it."""
    means, variances, weights = make_federation()
    result = gaa(means, variances, weights, normalised=True)
    squares = weights.numpy() ** 2
    assert_gaussian(
        result,
        np.average(means.numpy(), axis=0, weights=weights.numpy()),
        np.average(variances.numpy(), axis=0, weights=squares),
    )


def test_gaa_is_the_law_of_the_weighted_sum() -> None:
    means, variances, weights = make_federation(columns=1)
    draws = np.random.default_rng(3).normal(means[:, 0], variances[:, 0].sqrt(), (100_000, 4)) @ weights.numpy()
    mean, variance = (value.item() for value in gaa(means, variances, weights))
    error = 4 / math.sqrt(100_000)  # four standard errors: s / sqrt(N) and s^2 sqrt(2 / N)
    assert abs(draws.mean() - mean) < error * math.sqrt(variance)
    assert abs(draws.var() - variance) < error * math.sqrt(2) * variance


# --- Population pooling ---


@pytest.mark.parametrize("num_samples", [100, 10_000, 1_000_000])
def test_ppa_tends_to_the_moments(num_samples: int) -> None:
    means, variances = tensor([[0.0, 1.0], [2.0, -1.0], [1.0, 3.0]]), tensor([[1.0, 0.3], [0.25, 2.0], [0.5, 0.1]])
    weights = tensor([0.2, 0.5, 0.3])  # the counts are whole numbers
    mean, variance = ppa(means, variances, weights, generator(), num_samples)
    limit_mean, limit_variance = moments(means, variances, weights)
    deviations = means - limit_mean
    fourth = weights @ (deviations**4 + 6 * deviations**2 * variances + 3 * variances**2)
    # Four standard errors of a sample of N from the mixture (drawing client by client has less).
    assert ((mean - limit_mean).abs() < 4 * (limit_variance / num_samples).sqrt()).all()
    assert ((variance - limit_variance).abs() < 4 * ((fourth - limit_variance**2) / num_samples).sqrt()).all()
    assert not torch.equal(mean, limit_mean)


@pytest.mark.parametrize("unbiased", [False, True])
def test_ppa_expected_variance(unbiased: bool) -> None:
    """With n_k = N w_k draws each, E of the variance over N is that of the mixture less E[variance within] / N."""
    copies, num = 20_000, 10
    means = tensor([0.0, 1.0])[:, None].expand(2, copies)
    variances = tensor([1.0, 0.5])[:, None].expand(2, copies)
    mean, variance = ppa(means, variances, tensor([0.6, 0.4]), generator(), num, unbiased)
    within, between = 0.6 * 1.0 + 0.4 * 0.5, 0.6 * 0.4
    expected = within + between - within / num
    if unbiased:
        expected *= num / (num - 1)
    # Four standard errors of the average over the columns: 1.4 %; the two cases are 11 % apart.
    assert abs(variance.mean().item() - expected) < 4 * variance.std().item() / math.sqrt(copies)
    assert abs(mean.mean().item() - 0.4) < 4 * mean.std().item() / math.sqrt(copies)
    assert mean.var().item() == pytest.approx(within / num, rel=4 * math.sqrt(2 / copies))  # a chi-square of 20 000


@pytest.mark.parametrize(
    ("weights", "num_samples", "counts"),
    [
        ((0.5, 0.25, 0.25), 8, (4, 2, 2)),
        ((0.55, 0.44, 0.01), 10, (5, 4, 1)),  # floors, and at least one
        ((0.9375, 0.03125, 0.03125), 4, (3, 1, 1)),
        ((0.9375, 0.03125, 0.03125), 1, (1, 1, 1)),
    ],
)
def test_ppa_counts(weights: tuple[float, ...], num_samples: int, counts: tuple[int, ...]) -> None:
    """Clients without spread show how often each was drawn."""
    means = tensor([[0.0], [1.0], [10.0]])
    result = ppa(means, torch.full_like(means, 1e-40), tensor(weights), generator(), num_samples)
    population = np.repeat(means[:, 0].numpy(), counts)
    assert_gaussian(result, [population.mean()], [population.var()], rtol=1e-14)  # noise of 1e-20, a few roundings


def test_ppa_clamp() -> None:
    """The spread of the draws is the clamped one: e^-8 for e^-20, e^8 for e^20, e^-3 as it is."""
    copies = 300
    variances = tensor([-20.0, 20.0, -3.0]).exp().repeat_interleave(copies)[None]
    clamped = ppa(torch.zeros_like(variances), variances, tensor([1.0]), generator(), 200, clamp=[-8.0, 8.0])[1]
    free = ppa(torch.zeros_like(variances), variances, tensor([1.0]), generator(), 200)[1]
    tolerance = 4 * math.sqrt(2 / (200 * copies)) + 1 / 200  # four standard errors, and the bias of 1 / N
    for part, expected in zip(clamped.view(3, copies), (-8.0, 8.0, -3.0), strict=True):
        assert part.mean().item() == pytest.approx(math.exp(expected), rel=tolerance)
    for part, expected in zip(free.view(3, copies), (-20.0, 20.0, -3.0), strict=True):
        assert part.mean().item() == pytest.approx(math.exp(expected), rel=tolerance)


def test_ppa_of_small_spread_far_from_zero() -> None:
    """Sums of squares about zero would lose a variance of 1e-6 beside 1e12 squared."""
    means, variances = tensor([[1e6], [1e6]]), tensor([[1e-6], [1e-6]])
    mean, variance = ppa(means, variances, tensor([0.5, 0.5]), generator(), 10_000)
    assert abs(mean.item() - 1e6) < 4 * 1e-3 / 100 + 1e-9  # four standard errors; 1e6 is known to 1e-10
    assert variance.item() == pytest.approx(1e-6, rel=4 * math.sqrt(2 / 10_000))  # four standard errors


def test_ppa_draws_from_its_generator_only() -> None:
    federation = make_federation()
    before = torch.get_rng_state()
    first, again, other = (ppa(*federation, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert (first[0] != other[0]).all()
    assert (first[1] != other[1]).all()


# --- Symmetries, for every rule ---


@st.composite
def federations(draw: st.DrawFn, min_clients: int = 1, wide: bool = True) -> Federation:
    """`wide` clients may be 1e4 deviations apart; the others overlap, as the iteration of `alpha` wants it."""
    num_clients, columns = draw(st.integers(min_clients, 6)), draw(st.integers(1, 3))
    reach, lowest, highest = (50.0, -9.0, 4.0) if wide else (1.0, -1.0, 1.0)

    def matrix(low: float, high: float) -> Tensor:
        row = st.lists(st.floats(low, high), min_size=columns, max_size=columns)
        return tensor(draw(st.lists(row, min_size=num_clients, max_size=num_clients)))

    weights = tensor(draw(st.lists(st.floats(0.05, 1), min_size=num_clients, max_size=num_clients)))
    return matrix(-reach, reach), matrix(lowest, highest).exp(), weights / weights.sum()


PROPERTY = settings(deadline=None, derandomize=True, max_examples=20)
ALPHA_PROPERTY = settings(deadline=None, derandomize=True, max_examples=12)

# Where `alpha` stops is rounding's choice: its last move is below 1e-10, and the moves before shrink geometrically.
ALPHA_ERROR = 1e-7

with_closed_forms = pytest.mark.parametrize("rule", CLOSED_FORMS.values(), ids=CLOSED_FORMS.keys())


def check_permutation(rule: Rule, federation: Federation, order: list[int], tolerance: float) -> None:
    means, variances, weights = federation
    result = rule(means[order], variances[order], weights[order])
    assert_gaussian(result, *rule(*federation), rtol=tolerance, mean_scale=1 + means.abs().max().item())


@with_closed_forms
@PROPERTY
@given(federations(min_clients=2), st.randoms(use_true_random=False))
def test_order_of_clients(rule: Rule, federation: Federation, random: object) -> None:
    order = list(range(len(federation[2])))
    random.shuffle(order)  # type: ignore[attr-defined]
    # Six terms in another order, differing in the last bits; the variances' terms are all positive.
    check_permutation(rule, federation, order, 1e-12)
    check_permutation(rule, federation, order[::-1], 1e-12)


@ALPHA_PROPERTY
@given(federations(min_clients=2, wide=False))
def test_order_of_clients_alpha(federation: Federation) -> None:
    check_permutation(alpha, federation, list(range(len(federation[2])))[::-1], ALPHA_ERROR)


def test_order_of_clients_in_law_ppa() -> None:
    """Draws go to the clients in their order, so that only the law stays: means over columns of the same clients."""
    copies = 20_000
    means = tensor([0.0, 1.0, 5.0])[:, None].expand(3, copies)
    variances = tensor([1.0, 0.5, 2.0])[:, None].expand(3, copies)
    weights = tensor([0.5, 0.3, 0.2])
    one = ppa(means, variances, weights, generator(1), 10)
    other = ppa(means.flip(0), variances.flip(0), weights.flip(0), generator(2), 10)
    for a, b in zip(one, other, strict=True):
        error = math.sqrt((a.var().item() + b.var().item()) / copies)
        assert abs(a.mean().item() - b.mean().item()) < 4 * error  # four standard errors of the difference


@with_closed_forms
@PROPERTY
@given(federations(min_clients=1))
def test_one_client_comes_back(rule: Rule, federation: Federation) -> None:
    mean, variance = federation[0][:1], federation[1][:1]
    # A reciprocal or a logarithm and back: |log v| < 9 units in the last place.
    assert_gaussian(rule(mean, variance, tensor([1.0])), mean[0], variance[0], rtol=1e-14)


@ALPHA_PROPERTY
@given(federations(min_clients=1), st.floats(0.05, 1))
def test_one_client_comes_back_alpha(federation: Federation, order: float) -> None:
    mean, variance = federation[0][:1], federation[1][:1]
    # It starts there; steps of rounding errors only, 1/0.05 times as far at the most.
    assert_gaussian(alpha(mean, variance, tensor([1.0]), order), mean[0], variance[0], rtol=1e-12, mean_scale=50)


@with_closed_forms
@PROPERTY
@given(federations(min_clients=2))
def test_equal_clients(rule: Rule, federation: Federation) -> None:
    weights = federation[2]
    mean, variance = (values[:1].expand(len(weights), -1) for values in federation[:2])
    factor = {gaa: (weights**2).sum().item(), cf: weights.max().item()}.get(rule, 1.0)
    # The weights sum to one within a few units in the last place.
    assert_gaussian(rule(mean, variance, weights), mean[0], factor * variance[0], rtol=1e-13, mean_scale=50)


@ALPHA_PROPERTY
@given(federations(min_clients=2), st.floats(0.05, 1))
def test_equal_clients_alpha(federation: Federation, order: float) -> None:
    weights = federation[2]
    mean, variance = (values[:1].expand(len(weights), -1) for values in federation[:2])
    # It starts there; steps of rounding errors only, 1/0.05 times as far at the most.
    assert_gaussian(alpha(mean, variance, weights, order), mean[0], variance[0], rtol=1e-12, mean_scale=50)


def check_affine(rule: Rule, federation: Federation, scale: float, shift: float, tolerance: float) -> None:
    means, variances, weights = federation
    mean, variance = rule(means, variances, weights)
    result = rule(scale * means + shift, scale**2 * variances, weights)
    reach = abs(scale) * (1 + means.abs().max().item()) + abs(shift)
    assert_gaussian(result, scale * mean + shift, scale**2 * variance, rtol=tolerance, mean_scale=reach)


signed_scales = st.one_of(st.floats(0.1, 10), st.floats(-10, -0.1))


@with_closed_forms
@PROPERTY
@given(federations(), signed_scales, st.floats(-100, 100))
def test_affine_equivariance(rule: Rule, federation: Federation, scale: float, shift: float) -> None:
    # A shift of up to 100 costs differences of the means, squared beside variances of 1e-4, 1e-12 of these.
    check_affine(rule, federation, scale, shift, 1e-11)


@ALPHA_PROPERTY
@given(federations(wide=False), signed_scales, st.floats(-100, 100))
def test_affine_equivariance_alpha(federation: Federation, scale: float, shift: float) -> None:
    check_affine(alpha, federation, scale, shift, ALPHA_ERROR)


@PROPERTY
@given(federations(), st.floats(0.1, 10), st.floats(-100, 100))
def test_affine_equivariance_ppa(federation: Federation, scale: float, shift: float) -> None:
    """With the same noise; a negative scale would need its opposite."""
    # A centre of up to 600 is known to 1e-13, a deviation is at least 1e-3, and the variance of draws may be less.
    check_affine(ppa_seeded, federation, scale, shift, 1e-9)


ALL_RULES: dict[str, Rule] = {**CLOSED_FORMS, "ppa": ppa_seeded, "alpha": alpha}
with_all = pytest.mark.parametrize("rule", ALL_RULES.values(), ids=ALL_RULES.keys())


@with_all
@settings(deadline=None, derandomize=True, max_examples=10)
@given(federations(), st.floats(-30, 20))
def test_positive_variance_and_mean_between_the_clients(rule: Rule, federation: Federation, level: float) -> None:
    """Also for variances of e^-39 or e^24, and clients far apart."""
    means, variances, weights = federation
    mean, variance = rule(means, variances * math.exp(level), weights)
    assert torch.isfinite(mean).all()
    assert torch.isfinite(variance).all()
    assert (variance > 0).all()
    if rule is not ppa_seeded:  # a sample's mean may lie beyond
        assert (mean >= means.min(0).values - 1e-12).all()  # 50 times a few units in the last place
        assert (mean <= means.max(0).values + 1e-12).all()


@PROPERTY
@given(federations(min_clients=2))
def test_order_of_variances(federation: Federation) -> None:
    """Weighted power means of the variances, of orders -1, 0, 1/2 and 1; the mixture adds what lies between clients."""
    chain = [rule(*federation)[1] for rule in (cf, rklb, aalv, wb, eaa, moments)]
    for smaller, larger in itertools.pairwise(chain):
        assert (smaller <= larger * (1 + 1e-13)).all()  # equal for equal clients, to rounding
    assert (gaa(*federation)[1] < chain[4]).all()


@with_all
def test_weights_matter(rule: Rule) -> None:
    """The heavier client pulls mean and variance to its own; at weight 1 nothing else is left."""
    variances = tensor([[1.0], [3.0]])
    light, heavy = (rule(tensor([[0.0], [1.0]]), variances, tensor([1 - w, w])) for w in (0.25, 0.75))
    assert (heavy[0] > light[0] + 0.2).all()
    same_mean = [rule(tensor([[0.0], [0.0]]), variances, tensor([1 - w, w]))[1] for w in (0.3, 0.7)]
    assert (same_mean[1] > same_mean[0] * 1.2).all()
    if rule is not ppa_seeded:  # which draws at least once from each
        assert_gaussian(rule(tensor([[0.0], [1.0]]), variances, tensor([0.0, 1.0])), [1.0], [3.0], rtol=1e-9)


@with_all
def test_inputs_are_left_alone_and_types_kept(rule: Rule) -> None:
    federation = make_federation()
    kept = [values.clone() for values in federation]
    for value in rule(*federation):
        assert value.dtype == torch.float64
        assert value.shape == (3,)
    for value, before in zip(federation, kept, strict=True):
        assert torch.equal(value, before)


@with_all
def test_columns_are_independent(rule: Rule) -> None:
    means, variances, weights = make_federation(columns=5)
    before = rule(means, variances, weights)
    means[:, 3] += torch.arange(4)
    variances[:, 3] *= 2
    after = rule(means, variances, weights)
    others = [0, 1, 2, 4]
    # The same sums, for ppa the same noise; `alpha` goes on until the last column stands still.
    tolerance = ALPHA_ERROR if rule is alpha else 1e-14
    assert_gaussian((after[0][others], after[1][others]), before[0][others], before[1][others], rtol=tolerance)
    assert (after[0][3] != before[0][3]).all()
    assert (after[1][3] != before[1][3]).all()


# --- What BFL-P's released code computes ---

FLOOR = math.exp(-8)
CLAMP = [-8.0, 8.0]
FMNIST_WEIGHTS = 41_640
"""Gaussian weights of BFL-P's network for FashionMNIST, whose deviations' norm its Table 4 prints."""


def equal_clients(log_variance: float) -> Federation:
    return tensor(np.full((10, 2), 0.3)), tensor(np.full((10, 2), math.exp(log_variance))), tensor([0.1] * 10)


def running_sum(log_variances: np.ndarray, factors: np.ndarray, clamp: list[float]) -> float:
    """The log variance as the released code adds it up, in logarithms throughout."""

    def clamped(value: float) -> float:
        return min(max(value, clamp[0]), clamp[1])

    total = math.log(factors[0] * math.exp(clamped(log_variances[0])))
    for log_variance, factor in zip(log_variances[1:], factors[1:], strict=True):
        total = math.log(math.exp(clamped(total)) + factor * math.exp(clamped(log_variance)))
    return total


@pytest.mark.parametrize("log_variance", [-9.0, -8.0, -20.0])
def test_eaa_released_at_the_floor(log_variance: float) -> None:
    """The first client's tenth is lifted to the floor: 1 + 9/10 of it."""
    means, variances, weights = equal_clients(log_variance)
    assert_gaussian(eaa(means, variances, weights, running_clamp=CLAMP), [0.3] * 2, [1.9 * FLOOR] * 2)
    assert_gaussian(eaa(means, variances, weights), [0.3] * 2, [math.exp(log_variance)] * 2)


@pytest.mark.parametrize("log_variance", [-9.0, -8.0])
def test_gaa_released_at_the_floor(log_variance: float) -> None:
    """Fact 4: a log variance of -7.914 for 10 equal clients, where eq. 5 has -10.303 at the floor."""
    means, variances, weights = equal_clients(log_variance)
    mean, variance = gaa(means, variances, weights, running_clamp=CLAMP)
    assert_gaussian((mean, variance), [0.3] * 2, [1.09 * FLOOR] * 2)
    assert variance.log()[0].item() == pytest.approx(-7.914, abs=5e-4)  # as printed
    assert math.sqrt(FMNIST_WEIGHTS * variance[0].item()) == pytest.approx(3.90, abs=5e-3)  # as printed
    plain = gaa(means, variances, weights)[1].log()[0].item()
    assert plain == pytest.approx(log_variance + 8 - 10.303, abs=5e-4)  # as printed


def test_eaa_released_without_training() -> None:
    """v -> e^-8 + 9/10 v: round by round towards 10 e^-8, never beyond; gaa towards e^-8 / 0.91."""
    means, variances, weights = equal_clients(-9.0)
    norms = []
    for round_ in range(1, 301):
        variance = eaa(means, variances, weights, running_clamp=CLAMP)[1]
        expected = (10 - 9 * 0.9**round_) * FLOOR
        np.testing.assert_allclose(variance.numpy(), expected, rtol=1e-12)  # roundings do not add up: they shrink
        variances = variance.expand(10, 2)
        norms.append(math.sqrt(FMNIST_WEIGHTS * variance[0].item()))
    np.testing.assert_allclose(variances[0].numpy(), 10 * FLOOR, rtol=1e-12)  # 0.9^300 is 2e-14
    assert norms[-1] == pytest.approx(11.8, abs=0.05)  # as printed
    for _ in range(30):
        variances = gaa(means, variances, weights, running_clamp=CLAMP)[1].expand(10, 2)
    np.testing.assert_allclose(variances[0].numpy(), FLOOR / 0.91, rtol=1e-12)  # 0.09^30 is nothing


@pytest.mark.parametrize("clamp", [[-8.0, 8.0], [-1.0, 0.0], [-3.0, 3.0]])
@pytest.mark.parametrize("power", [1, 2])
def test_running_clamp_by_literal_recursion(clamp: list[float], power: int) -> None:
    rng = np.random.default_rng(17)
    rule = (eaa, gaa)[power - 1]
    for _ in range(20):
        weights = rng.dirichlet(np.ones(5))
        log_variances = rng.uniform(-12, 10, 5)
        means = rng.normal(size=(5, 1))
        expected = math.exp(running_sum(log_variances, weights**power, clamp))
        result = rule(tensor(means), tensor(np.exp(log_variances))[:, None], tensor(weights), running_clamp=clamp)
        assert_gaussian(result, weights @ means, [expected], rtol=1e-13)  # e^x and back five times


def test_running_clamp_depends_on_the_order() -> None:
    """The first client alone is lifted: an artefact that the released variant keeps."""
    means, variances = tensor([[0.0], [0.0]]), tensor([[FLOOR], [FLOOR]])
    results = [eaa(means, variances, tensor(w), running_clamp=CLAMP)[1].item() for w in ([0.75, 0.25], [0.25, 0.75])]
    np.testing.assert_allclose(results, [1.25 * FLOOR, 1.75 * FLOOR], rtol=1e-14)


def test_running_clamp_of_one_client() -> None:
    """No sum to clamp; the client's own variance is."""
    result = eaa(tensor([[1.0, 1.0]]), tensor([[-9.0, -7.0]]).exp(), tensor([1.0]), running_clamp=CLAMP)
    assert_gaussian(result, [1.0, 1.0], [FLOOR, math.exp(-7)], rtol=1e-14)


def test_cf_clamp() -> None:
    """Below the floor all variances are the same: the mean is the plain one, the variance a tenth of e^-8."""
    means = tensor(np.arange(10.0))[:, None]
    variances = tensor(np.linspace(-15, -8, 10)).exp()[:, None]
    weights = tensor([0.1] * 10)
    assert_gaussian(cf(means, variances, weights, clamp=CLAMP), [4.5], [0.1 * FLOOR])
    high = cf(means, tensor(np.linspace(8, 15, 10)).exp()[:, None], weights, clamp=CLAMP)
    assert_gaussian(high, [4.5], [0.1 * math.exp(8)])
    inside = make_federation()
    assert_gaussian(cf(*inside, clamp=CLAMP), *cf(*inside), rtol=0)


# --- Ten thousand clients ---

MANY = 10_000
# Sums of 10 000 terms of one sign in float64: at the worst 1e4 roundings of 1e-16 each.
MANY_ERROR = 1e-12


@pytest.mark.slow
@with_closed_forms
@pytest.mark.parametrize("log_variance", [-8.0, -30.0, 10.0])
def test_ten_thousand_equal_clients(rule: Rule, log_variance: float) -> None:
    """The product of their variances is e^-80000: nothing may underflow."""
    weights = tensor(np.full(MANY, 1 / MANY))
    mean, variance = tensor(np.full((MANY, 2), -0.7)), tensor(np.full((MANY, 2), math.exp(log_variance)))
    factor = 1 / MANY if rule in (gaa, cf) else 1.0
    expected = [factor * math.exp(log_variance)] * 2
    tolerance = MANY_ERROR * (1 + abs(log_variance))  # a logarithm's relative error is a variance's, times it
    assert_gaussian(rule(mean, variance, weights), mean[0], expected, rtol=tolerance)


@pytest.mark.slow
@with_all
def test_ten_thousand_clients_of_two_kinds(rule: Rule) -> None:
    """As two clients, N(0, 1) and N(2, 1/4) at equal weights; but gaa and cf sum over all."""
    means, variances = (values.repeat(MANY // 2, 1) for values in TWO_CLIENTS)
    result = rule(means, variances, tensor(np.full(MANY, 1 / MANY)))
    if rule is ppa_seeded:  # one draw from each
        mean, variance = moments(*TWO_CLIENTS, tensor([0.5, 0.5]))
        assert abs(result[0] - mean).item() < 4 * math.sqrt(variance.item() / MANY)  # four standard errors
        assert abs(result[1] / variance - 1).item() < 4 * math.sqrt(2 / MANY)  # a mixture's tails are no heavier
        return
    mean, variance = rule(*TWO_CLIENTS, tensor([0.5, 0.5]))
    factor = 2 / MANY if rule in (gaa, cf) else 1.0
    assert_gaussian(result, mean, factor * variance, rtol=ALPHA_ERROR if rule is alpha else MANY_ERROR)


def test_ten_thousand_unequal_weights() -> None:
    """Equal clients, weights from 1 to 10 000: cf by the largest, gaa by the sum of squares."""
    sizes = np.arange(1, MANY + 1)
    weights = tensor(sizes / sizes.sum())
    mean, variance = tensor(np.ones((MANY, 1))), tensor(np.full((MANY, 1), FLOOR))
    total = MANY * (MANY + 1) // 2
    squares = MANY * (MANY + 1) * (2 * MANY + 1) // 6
    assert_gaussian(cf(mean, variance, weights), [1.0], [FLOOR * MANY / total], rtol=MANY_ERROR)
    assert_gaussian(gaa(mean, variance, weights), [1.0], [FLOOR * squares / total**2], rtol=MANY_ERROR)
    assert_gaussian(rklb(mean, variance, weights), [1.0], [FLOOR], rtol=MANY_ERROR)
