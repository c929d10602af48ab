"""Barycenters of Gaussians with full covariances (K, D, D), for small D: oracles and toy figures."""

import torch
from torch import Tensor

from bfl_bench.aggregators.rules import Gaussian


def rklb_full(means: Tensor, covariances: Tensor, weights: Tensor) -> Gaussian:
    """Reverse-KL barycenter (BA-BFL eq. 8)."""
    precisions = torch.linalg.inv(covariances)
    covariance = torch.linalg.inv(torch.einsum("k,kij->ij", weights, precisions))
    return covariance @ torch.einsum("k,kij,kj->i", weights, precisions, means), covariance


def wb_full(means: Tensor, covariances: Tensor, weights: Tensor, num_iterations: int = 100) -> Gaussian:
    """Wasserstein-2 barycenter: the fixed point S = sum_k w_k (S^1/2 C_k S^1/2)^1/2 (Agueh and Carlier 2011).

    The iteration is that of Alvarez-Esteban et al. (2016), which converges from any positive definite start.
    """
    covariance = torch.einsum("k,kij->ij", weights, covariances)
    for _ in range(num_iterations):
        root = _square_root(covariance)
        inverse_root = torch.linalg.inv(root)
        inner = torch.einsum("k,kij->ij", weights, _square_root(root @ covariances @ root))
        covariance = inverse_root @ inner @ inner @ inverse_root
    return weights @ means, covariance


def _square_root(matrices: Tensor) -> Tensor:
    """The positive definite square root of symmetric matrices."""
    values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT
    return root
