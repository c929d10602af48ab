"""Layers with independent Gaussian weights, and how a network gets them.

A parameter `X_log_variance` beside a parameter `X` says: the weights are Gaussian with mean X. In training mode a layer
samples its outputs rather than its weights (local reparametrisation, Kingma et al. 2015): given its inputs an output is
Gaussian, and every example gets noise of its own. In evaluation mode it uses X as it is: parameters drawn from the
posterior are loaded as X. Biases are points, as in the released code of BFL-P and BA-BFL.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bfl_bench.checks import AtLeast, Interval

_TINY = 1e-8  # keeps the square root differentiable where an input is all zeros


@dataclass(frozen=True)
class GaussianSettings:
    """How Gaussian layers start, and what happens at the ends of the range of log variances."""

    bayesian_layers: Literal["auto", "all"] | Annotated[int, AtLeast(0)]
    mean_init: Literal["network", "normal"]
    log_variance_init: float
    log_variance_init_std: Annotated[float, AtLeast(0)]
    log_variance_clamp: Literal["none", "hard", "straight_through"]
    log_variance_range: Annotated[list[float], Interval()]

    def clamp(self, log_variance: Tensor) -> Tensor:
        """The log variance in effect. `hard` takes the gradient from what it clamps, `straight_through` does not."""
        if self.log_variance_clamp == "none":
            return log_variance
        clamped = log_variance.detach().clamp(*self.log_variance_range)
        if self.log_variance_clamp == "hard":
            return torch.where(log_variance.detach() == clamped, log_variance, clamped)
        return log_variance + (clamped - log_variance.detach())

    def passes_gradient(self, log_variance: Tensor) -> Tensor | None:
        """Where the clamp lets the gradient through, the ends of the range included; None: everywhere."""
        return self.clamp(log_variance) == log_variance if self.log_variance_clamp == "hard" else None


class GaussianLayer(nn.Module):
    """A linear or convolutional layer whose weights are Gaussian."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, settings: GaussianSettings) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        noise = torch.randn_like(layer.weight) * settings.log_variance_init_std
        self.weight_log_variance = nn.Parameter(noise + settings.log_variance_init)
        self._clamp = settings.clamp
        self._apply_weights = _function_of(layer)
        if settings.mean_init == "normal":
            nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight[0].numel()))
            if self.bias is not None:
                nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        mean = self._apply_weights(x, self.weight, self.bias)
        if not self.training:
            return mean
        variance = self._apply_weights(x.square(), self._clamp(self.weight_log_variance).exp(), None)
        return mean + (variance + _TINY).sqrt() * torch.randn_like(mean)


def _function_of(layer: nn.Linear | nn.Conv2d) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    if isinstance(layer, nn.Linear):
        return F.linear

    return layer._conv_forward  # knows the layer's stride, padding and its mode


def make_gaussian(module: nn.Module, num_layers: int | None, settings: GaussianSettings) -> nn.Module:
    """Make the last `num_layers` linear or convolutional layers Gaussian; None: all linear ones and no other."""
    kinds = (nn.Linear,) if num_layers is None else (nn.Linear, nn.Conv2d)
    layers = [(path, layer) for path, layer in module.named_modules() if type(layer) in kinds]
    for path, layer in layers if num_layers is None else layers[len(layers) - num_layers :]:
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        parent, _, name = path.rpartition(".")
        if not name:
            return GaussianLayer(layer, settings)  # the network is this one layer
        setattr(module.get_submodule(parent), name, GaussianLayer(layer, settings))
    return module


def count_layers(module: nn.Module) -> int:
    """Linear and convolutional layers, each of which can be Gaussian."""
    return sum(type(child) in (nn.Linear, nn.Conv2d) for child in module.modules())
