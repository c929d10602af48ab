"""Mixtures of Laplace approximations, and the density of their product over clients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bfl_bench.inference import kronecker
from bfl_bench.inference.merging import read_factor
from bfl_bench.method import Task, Tensors


class Curvature(Protocol):
    """A client's curvature on the trainable part of the flat vector, in float64."""

    def apply(self, vector: Tensor) -> Tensor:
        """Multiply it by a vector (D,)."""
        ...

    def log_determinant(self, scale: float, shift: float) -> float:
        """Compute that of scale C + shift I."""
        ...


@dataclass(frozen=True)
class DiagonalCurvature:
    entries: Tensor  # (D,)

    def apply(self, vector: Tensor) -> Tensor:
        return self.entries * vector

    def log_determinant(self, scale: float, shift: float) -> float:
        return float((scale * self.entries + shift).log().sum())


@dataclass(frozen=True)
class KroneckerCurvature:
    blocks: Sequence[tuple[kronecker.Layer, Tensor, Tensor]]  # layers with their A and B

    def apply(self, vector: Tensor) -> Tensor:
        result = torch.zeros_like(vector)
        for layer, a, b in self.blocks:
            layer.write(result, b @ layer.read(vector) @ a)
        return result

    def log_determinant(self, scale: float, shift: float) -> float:
        total = 0.0
        for _, a, b in self.blocks:
            eigenvalues = torch.outer(torch.linalg.eigvalsh(b), torch.linalg.eigvalsh(a)).clamp(min=0)
            total += float((scale * eigenvalues + shift).log().sum())
        return total


def read_curvature(task: Task, message: Tensors) -> Curvature:
    """Read what `measure_curvature` made."""
    if "precision" in message:
        return DiagonalCurvature(message["precision"].double())
    layers = kronecker.find_layers(task.model)
    return KroneckerCurvature(
        [(each, read_factor(message, each, "A"), read_factor(message, each, "B")) for each in layers]
    )


@dataclass(frozen=True, kw_only=True)
class Component:
    """A Gaussian of a client's mixture, with the precision scale C + shift I."""

    mean: Tensor  # (D,) float64
    curvature: Curvature
    scale: float
    shift: float
    log_determinant: float

    def climb(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the log density, but for a constant of all components, and its gradient (D,)."""
        distance = theta - self.mean
        pull = self.scale * self.curvature.apply(distance) + self.shift * distance
        return 0.5 * (self.log_determinant - distance @ pull), -pull


def log_product(theta: Tensor, clients: Sequence[Sequence[Component]], prior_precision: float) -> tuple[Tensor, Tensor]:
    """Compute the log density of the product of mixtures, divided by the prior K - 1 times, and its gradient (D,)."""
    surplus = (len(clients) - 1) * prior_precision
    value, gradient = 0.5 * surplus * (theta @ theta), surplus * theta
    for components in clients:
        found = [component.climb(theta) for component in components]
        densities = torch.stack([density for density, _ in found])
        value = value + densities.logsumexp(0) - math.log(len(found))
        for share, (_, slope) in zip(densities.softmax(0), found, strict=True):
            if share > 0:
                gradient = gradient + share * slope
    return value, gradient
