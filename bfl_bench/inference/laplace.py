"""Laplace approximations that predict: Gaussians around a model, by parameter draws or through a linearised network.

The precision is that of the data, H, plus d I, where d is the precision of a prior. H is a product of blocks, one per
layer (a diagonal, or a Kronecker product A x B), or one matrix for all parameters. Each block is kept by the
eigenvalues of its H, so that every d costs one pass over numbers and no new factorisation.

The linearised predictive (Khan et al. 2019; Immer et al. 2021, "GLM"): outputs f(x) of the network are Gaussian with
variances diag(J (H + d I)^-1 J^T), J their derivatives by the parameters at the mean; the likelihood makes predictions
of these.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bfl_bench.devices import bring
from bfl_bench.errors import UnsuitableError
from bfl_bench.evaluation.truth import Moments
from bfl_bench.inference.curvature import mean_squared_gradient
from bfl_bench.inference.kronecker import Layer, find_layers, inputs_and_jacobians
from bfl_bench.likelihood import AnyPrediction
from bfl_bench.method import Layers, Task

Derivatives = Sequence[tuple[Layer, Tensor, Tensor]]
"""Of each layer its inputs and the outputs' derivatives, as `inputs_and_jacobians` has them."""

AT_ONCE = 250  # examples whose derivatives are in memory together


class Block(Protocol):
    """Parameters that are independent of all others."""

    @property
    def positions(self) -> Tensor:
        """Where they lie in the flat vector, in the order of `rotate`."""
        ...

    @property
    def eigenvalues(self) -> Tensor:
        """Of the data's precision, in any shape."""
        ...

    def rotate(self, noise: Tensor) -> Tensor:
        """Map numbers, one per eigenvalue and in that shape, to the parameters (m,)."""
        ...

    def spread(self, variances: Tensor) -> Tensor:
        """Compute the variances (m,) of the parameters from those of independent numbers that `rotate` would map."""
        ...

    def concerns(self, layer: Layer) -> bool:
        """Tell whether some of the parameters are the layer's."""
        ...

    def variances(self, derivatives: Derivatives, prior_precisions: Sequence[float]) -> list[Tensor]:
        """Compute what the parameters add to the variances (n, C) of the outputs, for each d."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayerBlock:
    """A layer whose precision is diagonal in the bases `left` and `right` of its matrix M; None: as it is."""

    layer: Layer
    positions: Tensor  # (out (in + 1),)
    eigenvalues: Tensor  # (out, in + 1)
    left: Tensor | None = None  # (out, out), eigenvectors of B as columns
    right: Tensor | None = None  # (in + 1, in + 1), those of A

    def rotate(self, noise: Tensor) -> Tensor:
        if self.left is not None and self.right is not None:
            noise = self.left @ noise @ self.right.T
        return noise.flatten()

    def spread(self, variances: Tensor) -> Tensor:
        if self.left is not None and self.right is not None:
            variances = self.left.square() @ variances @ self.right.square().T
        return variances.flatten()

    def concerns(self, layer: Layer) -> bool:
        return layer.name == self.layer.name

    def variances(self, derivatives: Derivatives, prior_precisions: Sequence[float]) -> list[Tensor]:
        inputs, slopes = next((i, s) for layer, i, s in derivatives if self.concerns(layer))
        if self.left is not None and self.right is not None:
            inputs, slopes = inputs @ self.right, slopes @ self.left
        by_prior = [1 / (self.eigenvalues + d) for d in prior_precisions]
        if inputs.shape[1] == 1:  # one position: the derivative by M is an outer product
            inputs, slopes = inputs[:, 0].square(), slopes[:, :, 0].square()  # (n, in + 1), (n, C, out)
            return [torch.einsum("nco,no->nc", slopes, inputs @ variance.T) for variance in by_prior]
        squares = (slopes.mT @ inputs[:, None]).square().flatten(2)  # (n, C, out (in + 1))
        return [squares @ variance.flatten() for variance in by_prior]


@dataclass(frozen=True, kw_only=True)
class DenseBlock:
    """Parameters with one precision matrix, in its eigenbasis; without a basis, a diagonal over any network."""

    size: int  # of the trainable part of the flat vector
    positions: Tensor  # (m,)
    eigenvalues: Tensor  # (m,)
    basis: Tensor | None = None  # (m, m), eigenvectors as columns

    def rotate(self, noise: Tensor) -> Tensor:
        return noise if self.basis is None else self.basis @ noise

    def spread(self, variances: Tensor) -> Tensor:
        return variances if self.basis is None else self.basis.square() @ variances

    def concerns(self, layer: Layer) -> bool:
        return bool((self.positions == layer.weight.start).any())

    def variances(self, derivatives: Derivatives, prior_precisions: Sequence[float]) -> list[Tensor]:
        assert self.basis is not None  # a diagonal of plain layers is made of their blocks
        (n, num_outputs), index = derivatives[0][2].shape[:2], torch.arange(self.size, device=self.positions.device)
        jacobian = derivatives[0][1].new_zeros(n, num_outputs, self.size)
        for layer, inputs, slopes in derivatives:
            jacobian[:, :, layer.read(index).flatten()] = (slopes.mT @ inputs[:, None]).flatten(2)
        squares = (jacobian[:, :, self.positions] @ self.basis).square()
        return [squares @ (1 / (self.eigenvalues + d)) for d in prior_precisions]


@dataclass(frozen=True, kw_only=True)
class LaplacePosterior:
    """Independent blocks around a model; parameters in no block stay as they are."""

    task: Task
    params: Tensor  # (P,) the whole vector
    blocks: Sequence[Block]

    def draw(self, prior_precision: float, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        for _ in range(num):
            drawn = self.params.clone()
            for block in self.blocks:
                noise = bring(torch.randn(block.eigenvalues.shape, generator=rng), drawn.device)
                drawn[block.positions] += block.rotate(noise / (block.eigenvalues + prior_precision).sqrt())
            yield drawn

    def deviations(self, prior_precision: float) -> Tensor:
        """Compute the standard deviation of each parameter, (P,), zero where it stays as it is."""
        found = torch.zeros_like(self.params)
        for block in self.blocks:
            found[block.positions] = block.spread(1 / (block.eigenvalues + prior_precision)).sqrt()
        return found

    def linearise(self, x: Tensor, prior_precisions: Sequence[float], batch_size: int) -> list[AnyPrediction]:
        model = self.task.model
        layers = [layer for layer in find_layers(model) if any(b.concerns(layer) for b in self.blocks)]
        model.load(self.params)
        model.module.eval()
        means: list[Tensor] = []
        parts: list[list[Tensor]] = [[] for _ in prior_precisions]
        for part in torch.split(x, min(batch_size, AT_ONCE)):
            outputs, derivatives = inputs_and_jacobians(model, layers, part)
            by_block = [block.variances(derivatives, prior_precisions) for block in self.blocks]
            means.append(outputs)
            for found, variances in zip(parts, zip(*by_block, strict=True), strict=True):
                found.append(torch.stack(variances).sum(0))
        return [self.task.likelihood.linearise(torch.cat(means), torch.cat(found)) for found in parts]

    def moments(self, prior_precision: float) -> Moments:
        mean = self.params[: self.task.model.layout.num_trainable].double()
        covariance = mean.new_zeros(len(mean), len(mean))
        for block in self.blocks:
            units = torch.eye(len(block.positions), device=mean.device).to(block.eigenvalues)
            rotated = torch.stack([block.rotate(unit.view_as(block.eigenvalues)) for unit in units], dim=1).double()
            variances = 1 / (block.eigenvalues.flatten().double() + prior_precision)
            covariance[block.positions[:, None], block.positions] = rotated * variances @ rotated.T
        return Moments(mean, covariance)

    def log_evidence(self, prior_precision: float) -> float:
        total = 0.0
        for block in self.blocks:
            eigenvalues, mean = block.eigenvalues.double(), self.params[block.positions].double()
            shrinkage = (prior_precision / (eigenvalues + prior_precision)).log().sum()
            total += 0.5 * float(shrinkage - prior_precision * mean.square().sum())
        return total

    def compare_with_fisher(self, x: Tensor, y: Tensor) -> float:
        self.task.model.load(self.params)
        self.task.model.module.eval()
        fisher = sum(self.task.sizes) * mean_squared_gradient(self.task, x, y)
        ours, theirs = (
            math.fsum(float(part.double().sum()) for part in parts)
            for parts in (
                [block.eigenvalues for block in self.blocks],
                [fisher[block.positions] for block in self.blocks],
            )
        )
        return ours / theirs


def laplace(task: Task, params: Tensor, precision: Tensor, layers: Layers) -> LaplacePosterior:
    """Make the posterior of the data's precision on the trainable parameters: a diagonal (D,), or a matrix (D, D)."""
    index = torch.arange(len(precision), device=params.device)
    found = _choose(task, layers)
    blocks: list[Block]
    if precision.dim() == 2:
        of_layers = [layer.read(index).flatten() for layer in found or []]
        positions = index if layers == "all" else torch.cat(of_layers)
        eigenvalues, basis = torch.linalg.eigh(precision[positions][:, positions].double())
        eigenvalues = eigenvalues.clamp(min=0).to(params.dtype)  # what rounding leaves of zero
        basis = basis.to(params.dtype)
        blocks = [DenseBlock(size=len(index), positions=positions, eigenvalues=eigenvalues, basis=basis)]
    elif found is None:
        blocks = [DenseBlock(size=len(index), positions=index, eigenvalues=precision)]
    else:
        blocks = [
            LayerBlock(layer=layer, positions=layer.read(index).flatten(), eigenvalues=layer.read(precision))
            for layer in found
        ]
    return LaplacePosterior(task=task, params=params, blocks=blocks)


def kronecker_laplace(
    task: Task, params: Tensor, factors: Mapping[str, tuple[Tensor, Tensor]], scale: float, layers: Layers
) -> LaplacePosterior:
    """Make the posterior whose data have, layer by layer, the precision `scale` A x B; factors by the layer's name."""
    index = torch.arange(task.model.layout.num_trainable, device=params.device)
    blocks: list[Block] = []
    for layer in _choose(task, layers) or []:
        (values_a, right), (values_b, left) = (torch.linalg.eigh(factor.double()) for factor in factors[layer.name])
        eigenvalues = scale * torch.outer(values_b.clamp(min=0), values_a.clamp(min=0))
        values, left, right = (tensor.to(params.dtype) for tensor in (eigenvalues, left, right))
        positions = layer.read(index).flatten()
        blocks.append(LayerBlock(layer=layer, positions=positions, eigenvalues=values, left=left, right=right))
    return LaplacePosterior(task=task, params=params, blocks=blocks)


def check_laplace(task: Task) -> None:
    """Refuse a network that has no linearised predictive here."""
    find_layers(task.model)


def _choose(task: Task, layers: Layers) -> list[Layer] | None:
    """List the layers concerned; None for all of a network that has others than linear and convolutional ones."""
    try:
        found = find_layers(task.model)
    except UnsuitableError:
        if layers == "last":
            raise
        return None
    return found if layers == "all" else found[-1:]
