"""Precisions of Gaussians: a vector (D,) stands for a diagonal matrix, a matrix (D, D) for a full one."""

from dataclasses import dataclass

import torch
from torch import Tensor


def multiply(precision: Tensor, vector: Tensor) -> Tensor:
    return precision @ vector if precision.dim() == 2 else precision * vector


def shift(precision: Tensor, amount: float) -> Tensor:
    """precision + amount I."""
    if precision.dim() == 1:
        return precision + amount
    shifted = precision.clone()
    shifted.diagonal().add_(amount)
    return shifted


def diagonal(precision: Tensor) -> Tensor:
    return precision.diagonal() if precision.dim() == 2 else precision


def solve(precision: Tensor, right: Tensor, fallback: Tensor) -> Tensor:
    """Compute precision^-1 right, and `fallback` where the precision says nothing.

    That is at zero entries or, in a matrix, in the whole null space: there `fallback` gets a weight that is tiny
    beside the largest curvatures. Entries that were float32 once move an eigenvalue by at most eps times the Frobenius
    norm; ten times that leaves room for sums.
    """
    known = diagonal(precision) > 0
    result = fallback.clone()
    if precision.dim() == 1:
        result[known] = right[known] / precision[known]
    else:
        matrix, right = precision[known][:, known], right[known]
        factor, failed = torch.linalg.cholesky_ex(matrix)
        pivots = factor.diagonal()
        if failed or (pivots.min() / pivots.max()).square() < 1e-14:  # what rounding leaves of zero
            tiny = 10 * torch.finfo(torch.float32).eps * torch.linalg.matrix_norm(matrix).item()
            factor, right = torch.linalg.cholesky(shift(matrix, tiny)), right + tiny * fallback[known]
        result[known] = torch.cholesky_solve(right[:, None], factor)[:, 0]
    return result


def project(symmetric: Tensor) -> tuple[Tensor, int]:
    """The nearest matrix without negative eigenvalues, and how many were repaired."""
    values, vectors = torch.linalg.eigh(symmetric)
    projected: Tensor = (vectors * values.clamp(min=0)) @ vectors.T
    return projected, int((values < 0).sum())


@dataclass(frozen=True)
class Gaussian:
    mean: Tensor  # (D,)
    precision: Tensor  # (D,) or (D, D)

    def distance(self, vector: Tensor) -> float:
        """Half the squared Mahalanobis distance to the mean: the negative log density without its constant."""
        difference = vector - self.mean
        return 0.5 * (difference @ multiply(self.precision, difference)).item()


class MeanCosine:
    """Cosine similarity of precisions, each less its smallest entry, averaged over all pairs; one at a time."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None  # of precisions scaled to length one
        self._num = 0

    def add(self, precision: Tensor) -> None:
        entries = precision.flatten() - precision.min()
        length = torch.linalg.vector_norm(entries, dtype=torch.float64)  # float32 sums of so many squares are too rough
        entries /= length.clamp(min=torch.finfo(entries.dtype).tiny)
        self._sum = entries if self._sum is None else self._sum.add_(entries)
        self._num += 1

    def result(self) -> float | None:
        """The squared length of a sum of unit vectors holds every pair twice, and each with itself once."""
        if self._sum is None or self._num < 2:
            return None
        return (self._sum.square().sum(dtype=torch.float64).item() - self._num) / (self._num * (self._num - 1))
