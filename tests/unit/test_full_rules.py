"""Barycenters with full covariances, against the diagonal rules, integrals, least squares and the W2 geodesic."""

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.linalg import sqrtm
from torch import Tensor

from bfl_bench.aggregators import rklb, rklb_full, wb, wb_full


def tensor(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def make_federation(num_clients: int, dimension: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means (K, D), random rotated covariances (K, D, D) with eigenvalues from e^-1.5 to e^1.5, unequal weights."""
    rng = np.random.default_rng(seed)
    rotations = np.linalg.qr(rng.normal(size=(num_clients, dimension, dimension)))[0]
    eigenvalues = np.exp(rng.uniform(-1.5, 1.5, (num_clients, dimension)))
    covariances = np.einsum("kij,kj,klj->kil", rotations, eigenvalues, rotations)
    weights = rng.uniform(0.5, 2, num_clients)
    return rng.normal(size=(num_clients, dimension)), covariances, weights / weights.sum()


def as_tensors(*arrays: np.ndarray) -> list[Tensor]:
    return [tensor(array) for array in arrays]


def close(result: Tensor, expected: np.ndarray, tolerance: float) -> None:
    """Entries of the order of one, to an absolute tolerance."""
    np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=tolerance)


# The eigenvalues of covariances span e^3, so that inverses and roots lose a digit or two of sixteen.
ROUNDING = 1e-12

both = pytest.mark.parametrize("rule", [rklb_full, wb_full])
seeds = pytest.mark.parametrize("seed", [1, 2, 3])


@pytest.mark.parametrize(("full", "diagonal"), [(rklb_full, rklb), (wb_full, wb)])
@pytest.mark.parametrize("dimension", [1, 4])
def test_diagonal_covariances(full: object, diagonal: object, dimension: int) -> None:
    rng = np.random.default_rng(5)
    means, variances = rng.normal(size=(3, dimension)), np.exp(rng.normal(size=(3, dimension)))
    weights = np.array([0.2, 0.5, 0.3])
    mean, variance = diagonal(*as_tensors(means, variances, weights))  # type: ignore[operator]
    covariances = np.stack([np.diag(row) for row in variances])
    full_mean, full_covariance = full(*as_tensors(means, covariances, weights))  # type: ignore[operator]
    close(full_mean, mean.numpy(), ROUNDING)
    close(full_covariance, np.diag(variance.numpy()), ROUNDING)


# --- Reverse KL ---


@seeds
def test_rklb_full_is_the_normalised_product(seed: int) -> None:
    means, covariances, weights = make_federation(3, 2, seed)
    axis = np.linspace(-18, 18, 361)
    points = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    log_density = sum(
        w * stats.multivariate_normal(m, c).logpdf(points) for w, m, c in zip(weights, means, covariances, strict=True)
    )
    mass = np.exp(log_density - log_density.max())
    mass /= mass.sum()
    mean = mass @ points
    covariance = (points - mean).T @ (mass[:, None] * (points - mean))
    result = rklb_full(*as_tensors(means, covariances, weights))
    # Sums over a grid of step 0.1 are integrals of Gaussians of deviation above 0.45 to e^(-2 pi^2 0.45^2 / 0.1^2).
    close(result[0], mean, 1e-11)
    close(result[1], covariance, 1e-11)


@seeds
def test_rklb_full_mean_is_weighted_least_squares(seed: int) -> None:
    """The product's mode minimises sum_k w_k |L_k^T (x - m_k)|^2 with C_k^-1 = L_k L_k^T; its curvature is the rest."""
    means, covariances, weights = make_federation(5, 4, seed)
    roots = np.stack(
        [np.linalg.cholesky(np.linalg.inv(c)).T * np.sqrt(w) for c, w in zip(covariances, weights, strict=True)]
    )
    design, target = roots.reshape(-1, 4), np.einsum("kij,kj->ki", roots, means).reshape(-1)
    expected = np.linalg.lstsq(design, target, rcond=None)[0]
    mean, covariance = rklb_full(*as_tensors(means, covariances, weights))
    close(mean, expected, ROUNDING)
    close(covariance @ tensor(design.T @ design), np.eye(4), ROUNDING)


@seeds
def test_rklb_full_is_affine_equivariant(seed: int) -> None:
    means, covariances, weights = make_federation(3, 3, seed)
    rng = np.random.default_rng(seed + 100)
    matrix, shift = np.eye(3) + 0.3 * rng.normal(size=(3, 3)), rng.normal(size=3)
    mean, covariance = rklb_full(*as_tensors(means, covariances, weights))
    moved = rklb_full(*as_tensors(means @ matrix.T + shift, matrix @ covariances @ matrix.T, weights))
    close(moved[0], matrix @ mean.numpy() + shift, ROUNDING)
    close(moved[1], matrix @ covariance.numpy() @ matrix.T, ROUNDING)


# --- Wasserstein ---


@seeds
@pytest.mark.parametrize("dimension", [2, 5])
def test_wb_full_satisfies_its_equation(seed: int, dimension: int) -> None:
    """S = sum_k w_k (S^1/2 C_k S^1/2)^1/2, with SciPy's roots."""
    means, covariances, weights = make_federation(4, dimension, seed)
    mean, covariance = wb_full(*as_tensors(means, covariances, weights))
    root = sqrtm(covariance.numpy())
    close(covariance, sum(w * sqrtm(root @ c @ root) for w, c in zip(weights, covariances, strict=True)), ROUNDING)
    close(mean, weights @ means, ROUNDING)


@seeds
@pytest.mark.parametrize("t", [0.1, 0.5, 0.8])
def test_wb_full_of_two_lies_on_the_geodesic(seed: int, t: float) -> None:
    """McCann's interpolation along the optimal map T x from N(0, S_0) to N(0, S_1)."""
    means, (start, end), _ = make_federation(2, 3, seed)
    root = sqrtm(start)
    inverse = np.linalg.inv(root)
    transport = inverse @ sqrtm(root @ end @ root) @ inverse
    np.testing.assert_allclose(transport @ start @ transport, end, rtol=0, atol=1e-11)  # it does take S_0 to S_1
    step = (1 - t) * np.eye(3) + t * transport
    mean, covariance = wb_full(*as_tensors(means, np.stack([start, end]), np.array([1 - t, t])))
    close(mean, (1 - t) * means[0] + t * means[1], ROUNDING)
    close(covariance, step @ start @ step, 1e-11)  # six products and three roots


def squared_distance(one: np.ndarray, other: np.ndarray) -> float:
    """W2 squared between centred Gaussians (Bures)."""
    root = sqrtm(one)
    return float(np.trace(one + other - 2 * sqrtm(root @ other @ root)))


@seeds
def test_wb_full_is_a_minimum(seed: int) -> None:
    means, covariances, weights = make_federation(3, 3, seed)
    best = wb_full(*as_tensors(means, covariances, weights))[1].numpy()

    def objective(covariance: np.ndarray) -> float:
        return sum(w * squared_distance(covariance, c) for w, c in zip(weights, covariances, strict=True))

    rng = np.random.default_rng(seed)
    for _ in range(5):
        direction = rng.normal(size=(3, 3))
        near = best + 0.02 * (direction + direction.T)
        assert objective(near) > objective(best) + 1e-6  # 0.02 squared, times a curvature of about one


@seeds
def test_wb_full_is_equivariant_under_rotation_scaling_and_shift(seed: int) -> None:
    means, covariances, weights = make_federation(3, 3, seed)
    rng = np.random.default_rng(seed + 200)
    matrix, shift = 1.7 * np.linalg.qr(rng.normal(size=(3, 3)))[0], rng.normal(size=3)
    mean, covariance = wb_full(*as_tensors(means, covariances, weights))
    moved = wb_full(*as_tensors(means @ matrix.T + shift, matrix @ covariances @ matrix.T, weights))
    close(moved[0], matrix @ mean.numpy() + shift, ROUNDING)
    close(moved[1], matrix @ covariance.numpy() @ matrix.T, ROUNDING)


def test_wb_full_iterates() -> None:
    means, covariances, weights = as_tensors(*make_federation(4, 3, 7))
    start = wb_full(means, covariances, weights, num_iterations=0)[1]
    close(start, np.einsum("k,kij->ij", weights.numpy(), covariances.numpy()), ROUNDING)
    limit = wb_full(means, covariances, weights, num_iterations=500)[1]
    assert (limit - start).abs().max() > 0.1
    close(wb_full(means, covariances, weights)[1], limit.numpy(), ROUNDING)


def test_wb_full_needs_one_iteration_where_covariances_commute() -> None:
    """Then (sum_k w_k S^1/2 C_k^1/2)^2 S^-1 is the answer whatever S is: what makes this iteration the fast one."""
    rng = np.random.default_rng(8)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    eigenvalues, weights = np.exp(rng.uniform(-1.5, 1.5, (4, 3))), np.array([0.1, 0.2, 0.3, 0.4])
    covariances = np.einsum("ij,kj,lj->kil", rotation, eigenvalues, rotation)
    expected = rotation @ np.diag((weights @ np.sqrt(eigenvalues)) ** 2) @ rotation.T
    close(wb_full(*as_tensors(np.zeros((4, 3)), covariances, weights), num_iterations=1)[1], expected, ROUNDING)


# --- Both ---


@both
@seeds
def test_symmetries(rule: object, seed: int) -> None:
    means, covariances, weights = as_tensors(*make_federation(4, 3, seed))
    mean, covariance = rule(means, covariances, weights)  # type: ignore[operator]
    close(covariance, covariance.mT.numpy(), ROUNDING)
    assert (torch.linalg.eigvalsh(covariance) > 0.1).all()  # the clients' are above e^-1.5 = 0.22
    order = [2, 0, 3, 1]
    permuted = rule(means[order], covariances[order], weights[order])  # type: ignore[operator]
    close(permuted[0], mean.numpy(), ROUNDING)
    close(permuted[1], covariance.numpy(), ROUNDING)
    alone = rule(means[:1], covariances[:1], tensor([1.0]))  # type: ignore[operator]
    close(alone[0], means[0].numpy(), ROUNDING)
    close(alone[1], covariances[0].numpy(), ROUNDING)
    same = rule(means[:1].expand(4, -1), covariances[:1].expand(4, -1, -1), weights)  # type: ignore[operator]
    close(same[0], means[0].numpy(), ROUNDING)
    close(same[1], covariances[0].numpy(), ROUNDING)
