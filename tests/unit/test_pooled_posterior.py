"""A federation whose exact posterior is known: linear regression with orthogonal designs and known noise.

Client k has a design X_k with X_k^T X_k diagonal, targets y_k = X_k theta + noise of variance s^2, and the prior
N(0, t^2 I). Its posterior has the precision lambda_k = I_k + 1/t^2 in each coordinate, with the information I_k =
diag(X_k^T X_k) / s^2, and the mean b_k / lambda_k with b_k = X_k^T y_k / s^2. All data together have the precision
L = sum_k I_k + 1/t^2 and the mean sum_k b_k / L. What each rule makes of the local posteriors can then be said exactly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from bfl_bench.aggregators import aalv, alpha, cf, eaa, gaa, moments, rklb, wb

Rule = Callable[..., tuple[Tensor, Tensor]]

gaa_normalised = partial(gaa, normalised=True)

DIMENSION = 3
NOISE = 0.7**2
TRUE = np.array([1.0, -2.0, 0.5])

# Least squares with orthogonal columns of lengths from 2 to 10: a few hundred roundings in float64.
ROUNDING = 1e-11


@dataclass(frozen=True)
class Federation:
    designs: list[np.ndarray]
    targets: list[np.ndarray]
    prior_precision: float

    def posterior(self, *clients: int, powers: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Mean (D,) and covariance (D, D) given these clients' data, each likelihood to its power.

        By least squares on all rows at once, the prior being rows of its own: no formula about the clients.
        """
        roots = np.ones(len(clients)) if powers is None else np.sqrt(powers)
        rows = [root * self.designs[k] / np.sqrt(NOISE) for root, k in zip(roots, clients, strict=True)]
        values = [root * self.targets[k] / np.sqrt(NOISE) for root, k in zip(roots, clients, strict=True)]
        design = np.concatenate([*rows, np.sqrt(self.prior_precision) * np.eye(DIMENSION)])
        target = np.concatenate([*values, np.zeros(DIMENSION)])
        return np.linalg.lstsq(design, target, rcond=None)[0], np.linalg.inv(design.T @ design)

    @property
    def clients(self) -> range:
        return range(len(self.designs))

    def pooled(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variances given all data."""
        mean, covariance = self.posterior(*self.clients)
        return mean, np.diag(covariance)

    def local(self) -> tuple[Tensor, Tensor]:
        """The clients' own posteriors, means (K, D) and variances (K, D)."""
        posteriors = [self.posterior(k) for k in self.clients]
        for _, covariance in posteriors:
            off_diagonal = covariance - np.diag(np.diag(covariance))
            assert np.abs(off_diagonal).max() < 1e-14  # independent coordinates, as the rules want them
        means, variances = zip(*((mean, np.diag(covariance)) for mean, covariance in posteriors), strict=True)
        return torch.from_numpy(np.stack(means)), torch.from_numpy(np.stack(variances))

    def with_prior(self, precision: float) -> "Federation":
        return Federation(self.designs, self.targets, precision)


def make_federation(scales: np.ndarray, prior_precision: float, seed: int = 1) -> Federation:
    """Column j of client k's design has the length scales[k, j]."""
    rng = np.random.default_rng(seed)
    designs = [np.linalg.qr(rng.normal(size=(12, DIMENSION)))[0] * row for row in scales]
    targets = [design @ TRUE + np.sqrt(NOISE) * rng.normal(size=12) for design in designs]
    return Federation(designs, targets, prior_precision)


ANY_SCALES = np.array([[2.0, 3.0, 5.0], [4.0, 2.5, 3.0], [6.0, 3.5, 2.0], [2.0, 8.0, 4.0]])
ANY_WEIGHTS = np.array([0.1, 0.2, 0.3, 0.4])
PRIOR = 4.0  # not weak beside information of 8 to 130


def apply(rule: Rule, federation: Federation, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, variance = rule(*federation.local(), torch.from_numpy(weights))
    return mean.numpy(), variance.numpy()


def close(
    result: tuple[np.ndarray, np.ndarray], mean: np.ndarray, variance: np.ndarray, rtol: float = ROUNDING
) -> None:
    np.testing.assert_allclose(result[0], mean, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(result[1], variance, rtol=rtol)


def uniform(federation: Federation) -> np.ndarray:
    return np.full(len(federation.designs), 1 / len(federation.designs))


# --- Products of posteriors: any designs, a prior that matters ---


def test_the_product_over_the_prior_is_the_pooled_posterior() -> None:
    """prod_k p(theta | D_k) / p(theta)^(K-1), from rklb at uniform weights, the K-th root of the product."""
    federation = make_federation(ANY_SCALES, PRIOR)
    mean, variance = apply(rklb, federation, uniform(federation))
    precision = 4 / variance - 3 * PRIOR
    close((4 / variance * mean / precision, 1 / precision), *federation.pooled())


def test_rklb_is_the_posterior_of_tempered_likelihoods() -> None:
    """Each likelihood to its weight, the prior once: the product of p(D_k | theta)^w_k p(theta)^w_k."""
    federation = make_federation(ANY_SCALES, PRIOR)
    for weights in (ANY_WEIGHTS, uniform(federation)):
        mean, covariance = federation.posterior(*federation.clients, powers=weights)
        close(apply(rklb, federation, weights), mean, np.diag(covariance))


def test_rklb_at_uniform_weights_counts_the_prior_k_times_and_the_data_once_in_k() -> None:
    """Precision (L + (K-1)/t^2) / K: K times the variance of a pooled posterior with K priors, and its mean."""
    federation = make_federation(ANY_SCALES, PRIOR)
    pooled_mean, pooled_variance = federation.pooled()
    sharpened = 1 / pooled_variance + 3 * PRIOR
    close(
        apply(rklb, federation, uniform(federation)),
        pooled_mean / pooled_variance / sharpened,  # shrunk towards the prior's zero
        4 / sharpened,
    )


def test_cf_at_uniform_weights_is_the_pooled_posterior_with_k_priors() -> None:
    federation = make_federation(ANY_SCALES, PRIOR)
    mean, covariance = federation.with_prior(4 * PRIOR).posterior(*federation.clients)
    close(apply(cf, federation, uniform(federation)), mean, np.diag(covariance))
    pooled_mean, pooled_variance = federation.pooled()
    assert (np.diag(covariance) < pooled_variance).all()
    assert (np.abs(mean) < np.abs(pooled_mean)).all()


def test_flat_prior_at_uniform_weights() -> None:
    """rklb: the pooled mean exactly, K times its variance; cf: the pooled posterior itself."""
    federation = make_federation(ANY_SCALES, 0.0)
    pooled_mean, pooled_variance = federation.pooled()
    close(apply(rklb, federation, uniform(federation)), pooled_mean, 4 * pooled_variance)
    close(apply(cf, federation, uniform(federation)), pooled_mean, pooled_variance)


# --- Averages: clients alike but for their sizes c_k (I_k = c_k I), weights c_k / C, flat prior ---

SIZES = np.array([1.0, 2.0, 5.0, 8.0])
SHARES = SIZES / SIZES.sum()
BASE = np.array([2.0, 3.0, 1.5])


def entropy(shares: np.ndarray) -> float:
    return float(-(shares * np.log(shares)).sum())


# The pooled variance V is 1 / (C I), a client's is V / w_k with its share w_k = c_k / C. Hence sum_k w_k V / w_k = K V,
# sum_k w_k^2 V / w_k = V, exp(sum_k w_k log(V / w_k)) = V e^H(w), (sum_k w_k sqrt(V / w_k))^2 = V (sum_k sqrt w_k)^2,
# 1 / sum_k w_k (w_k / V) = V / sum_k w_k^2. And sum_k w_k m_k is the pooled mean: sum_k c_k I m_k / (C I).
FACTORS = [
    (gaa, 1.0),
    (eaa, len(SIZES)),
    (gaa_normalised, 1 / (SHARES**2).sum()),
    (aalv, np.exp(entropy(SHARES))),
    (wb, np.sqrt(SHARES).sum() ** 2),
]


@pytest.mark.parametrize(("rule", "factor"), FACTORS)
def test_averages_by_size_have_the_pooled_mean(rule: Rule, factor: float) -> None:
    """Under the name of each rule, its variance in pooled variances; gaa alone is exact."""
    federation = make_federation(np.sqrt(SIZES)[:, None] * BASE, 0.0)
    pooled_mean, pooled_variance = federation.pooled()
    close(apply(rule, federation, SHARES), pooled_mean, factor * pooled_variance)


def test_moments_by_size_add_what_lies_between_the_clients() -> None:
    federation = make_federation(np.sqrt(SIZES)[:, None] * BASE, 0.0)
    pooled_mean, pooled_variance = federation.pooled()
    estimates = np.stack([federation.posterior(k)[0] for k in federation.clients])
    between = SHARES @ (estimates - pooled_mean) ** 2
    assert (between > 0.1 * pooled_variance).all()
    close(apply(moments, federation, SHARES), pooled_mean, 4 * pooled_variance + between)


@pytest.mark.parametrize(("rule", "factor"), [(rklb, 1.0), (cf, SHARES.max())])
def test_products_by_size_count_the_sizes_twice(rule: Rule, factor: float) -> None:
    """Weights c_k^2 in the mean, not c_k: not the pooled one; variance V / sum_k w_k^2, cf the largest share of it."""
    federation = make_federation(np.sqrt(SIZES)[:, None] * BASE, 0.0)
    pooled_mean, pooled_variance = federation.pooled()
    estimates = np.stack([federation.posterior(k)[0] for k in federation.clients])
    mean = np.average(estimates, axis=0, weights=SIZES**2)
    assert (np.abs(mean - pooled_mean) > 1e-4).all()
    close(apply(rule, federation, SHARES), mean, factor * pooled_variance / (SHARES**2).sum())


# --- All rules: clients of the same design, uniform weights, a prior that matters ---

ALIKE = [(rklb, 4.0), (eaa, 4.0), (aalv, 4.0), (wb, 4.0), (gaa_normalised, 4.0), (gaa, 1.0), (cf, 1.0)]


@pytest.mark.parametrize(("rule", "factor"), ALIKE)
def test_clients_of_one_design(rule: Rule, factor: float) -> None:
    """Every mean is that of the pooled posterior with K priors; gaa and cf have its variance, the others K times it."""
    federation = make_federation(np.tile(BASE, (4, 1)), PRIOR)
    mean, covariance = federation.with_prior(4 * PRIOR).posterior(*federation.clients)
    close(apply(rule, federation, uniform(federation)), mean, factor * np.diag(covariance))


def test_moments_and_alpha_of_clients_of_one_design() -> None:
    """The mixture's variance exceeds K times the pooled one by that of the local means; alpha's lies between."""
    federation = make_federation(np.tile(BASE, (4, 1)), PRIOR)
    mean, covariance = federation.with_prior(4 * PRIOR).posterior(*federation.clients)
    within, between = 4 * np.diag(covariance), federation.local()[0].numpy().var(0)
    close(apply(moments, federation, uniform(federation)), mean, within + between)
    variances = [apply(partial(alpha, alpha=order), federation, uniform(federation))[1] for order in (0.01, 0.5, 0.99)]
    assert (within < variances[0]).all()
    assert (variances[0] < variances[1]).all()
    assert (variances[1] < variances[2]).all()
    assert (variances[2] < within + between).all()


def test_the_pooled_posterior_is_calibrated() -> None:
    """The oracle itself: over draws of theta from the prior, its standardised error is standard normal."""
    rng = np.random.default_rng(3)
    federation = make_federation(ANY_SCALES, PRIOR)
    variance = federation.pooled()[1]
    errors = []
    for _ in range(500):
        theta = rng.normal(size=DIMENSION) / np.sqrt(PRIOR)
        targets = [x @ theta + np.sqrt(NOISE) * rng.normal(size=len(x)) for x in federation.designs]
        mean = Federation(federation.designs, targets, PRIOR).posterior(*federation.clients)[0]
        errors.append((mean - theta) / np.sqrt(variance))
    # Four standard errors of a variance over 1500 numbers.
    assert np.var(errors) == pytest.approx(1, abs=4 * np.sqrt(2 / 1500))
