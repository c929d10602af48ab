"""Precisions of Gaussians: a vector (D,) stands for a diagonal matrix, a matrix (D, D) for a full one."""

import torch
from torch import Tensor

from bfl_bench.errors import ConfigError


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
    """precision^-1 right, and `fallback` where nothing is known: zero entries, or zero rows and columns."""
    known = diagonal(precision) > 0
    result = fallback.clone()
    if precision.dim() == 1:
        result[known] = right[known] / precision[known]
    else:
        factor, failed = torch.linalg.cholesky_ex(precision[known][:, known])
        if failed:
            raise ConfigError("method.eps", "too little", "more, or more gamma: the full precision is singular")
        result[known] = torch.cholesky_solve(right[known][:, None], factor)[:, 0]
    return result


def project(symmetric: Tensor) -> tuple[Tensor, int]:
    """The nearest matrix without negative eigenvalues, and how many were repaired."""
    values, vectors = torch.linalg.eigh(symmetric)
    projected: Tensor = (vectors * values.clamp(min=0)) @ vectors.T
    return projected, int((values < 0).sum())
