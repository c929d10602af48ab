"""The algebra of the server: weighted means, precisions of Gaussians, the step to a new model. Torch only.

A precision is a vector (D,), which stands for a diagonal matrix, or a matrix (D, D).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_TOGETHER = 8  # vectors that are added in one go over the sum, where that is larger than the cache
_PIECE = 1 << 18  # numbers of a vector at a time: what is added to, and its float64 copy, stay in the cache


class WeightedMean:
    """sum_k w_k x_k / sum_k w_k in float64, a few clients at a time: K x P numbers are never held together."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._waiting: list[tuple[Tensor, float]] = []
        self._total_weight = 0.0

    @property
    def empty(self) -> bool:
        return self._sum is None

    def add(self, vector: Tensor, weight: float) -> None:
        """The vector must stay as it is until the result."""
        if self._sum is None:
            self._sum = torch.zeros(vector.shape, dtype=torch.float64, device=vector.device)
        self._waiting.append((vector, weight))
        self._total_weight += weight
        if len(self._waiting) == _TOGETHER or vector.numel() <= _PIECE:
            self._add_waiting(self._sum)

    def result(self) -> Tensor:
        """The mean, in float64."""
        if self._sum is None:
            raise ValueError("the mean of no vectors is not defined")
        self._add_waiting(self._sum)
        return self._sum / self._total_weight

    def _add_waiting(self, sum_: Tensor) -> None:
        copy = torch.empty(min(_PIECE, sum_.numel()), dtype=torch.float64, device=sum_.device)
        vectors = [(torch.split(vector.reshape(-1), _PIECE), weight) for vector, weight in self._waiting]
        for i, total in enumerate(torch.split(sum_.view(-1), _PIECE)):
            for pieces, weight in vectors:
                total.add_(copy[: len(total)].copy_(pieces[i]), alpha=weight)
        self._waiting.clear()


def step_towards(old: Tensor, aggregated: Tensor, server_lr: float) -> Tensor:
    """The server's step from the old model to the aggregated one; exactly the aggregated one at `server_lr` 1."""
    return torch.lerp(old.double(), aggregated.double(), server_lr).to(old.dtype)


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
