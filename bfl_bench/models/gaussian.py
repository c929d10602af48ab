"""Layers with independent Gaussian weights, and how a network gets them.

A parameter `X_log_variance` beside a parameter `X` says: the weights are Gaussian with mean X. In training mode a layer
samples its outputs rather than its weights (local reparametrisation, Kingma et al. 2015): given its inputs an output is
Gaussian, and every example gets noise of its own; an LSTM draws its weights, once per minibatch. In evaluation mode it
uses X as it is: parameters drawn from the posterior are loaded as X. Biases are points, as in the released code of
BFL-P and BA-BFL.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bfl_bench.checks import AtLeast, Interval
from bfl_bench.models.networks import Recurrent

TINY = 1e-8  # keeps the square root differentiable where an input is all zeros


@dataclass(frozen=True)
class GaussianSettings:
    """How Gaussian layers start, and what happens at the ends of the range of log variances."""

    bayesian_layers: Literal["auto", "auto_all", "all"] | Annotated[int, AtLeast(0)]
    mean_init: Literal["network", "normal"]
    log_variance_init: float
    log_variance_init_std: Annotated[float, AtLeast(0)]
    log_variance_clamp: Literal["none", "hard", "straight_through"]
    log_variance_range: Annotated[list[float], Interval()]
    sampling: Literal["outputs", "weights"] = "outputs"
    noise: Annotated[float, AtLeast(0)] = 1.0

    def clamp(self, log_variance: Tensor) -> Tensor:
        """The log variance in effect. `hard` takes the gradient from what it clamps, `straight_through` does not."""
        if self.log_variance_clamp == "none":
            return log_variance
        clamped = log_variance.detach().clamp(*self.log_variance_range)
        if self.log_variance_clamp == "hard":
            return torch.where(log_variance.detach() == clamped, log_variance, clamped)
        return log_variance + (clamped - log_variance.detach())

    def scale(self, deviation: Tensor) -> Tensor:
        """The deviation of the noise that is drawn."""
        return deviation if self.noise == 1 else self.noise * deviation

    def passes_gradient(self, log_variance: Tensor) -> Tensor | None:
        """Where the clamp lets the gradient through, the ends of the range included; None: everywhere."""
        return self.clamp(log_variance) == log_variance if self.log_variance_clamp == "hard" else None


class GaussianLayer(nn.Module):
    """A linear or convolutional layer whose weights are Gaussian."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, settings: GaussianSettings) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.weight_log_variance = _log_variances(layer.weight, settings)
        self.settings = settings
        self._apply_weights = _function_of(layer)
        if settings.mean_init == "normal":
            nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight[0].numel()))
            if self.bias is not None:
                nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.settings.sampling == "weights":
            weight = _sample(self.weight, self.weight_log_variance, self.settings)
            return self._apply_weights(x, weight, self.bias)
        mean = self._apply_weights(x, self.weight, self.bias)
        if not self.training:
            return mean
        variance = self._apply_weights(x.square(), self.settings.clamp(self.weight_log_variance).exp(), None)
        return mean + self.settings.scale((variance + TINY).sqrt()) * torch.randn_like(mean)


def _function_of(layer: nn.Linear | nn.Conv2d) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    if isinstance(layer, nn.Linear):
        return F.linear

    return layer._conv_forward  # knows the layer's stride, padding and its mode


class GaussianEmbedding(nn.Module):
    """An embedding whose rows are Gaussian: every occurrence of a token gets noise of its own."""

    def __init__(self, layer: nn.Embedding, settings: GaussianSettings) -> None:
        super().__init__()
        self.weight = layer.weight
        self.weight_log_variance = _log_variances(layer.weight, settings)
        self._settings = settings

    def forward(self, x: Tensor) -> Tensor:
        mean = F.embedding(x, self.weight)
        if not self.training:
            return mean
        deviation = (0.5 * self._settings.clamp(F.embedding(x, self.weight_log_variance))).exp()
        return mean + self._settings.scale(deviation) * torch.randn_like(mean)


class GaussianRecurrent(nn.Module):
    """An LSTM whose weights are Gaussian; one draw per minibatch, as its outputs are not linear in them."""

    def __init__(self, layer: Recurrent, settings: GaussianSettings) -> None:
        super().__init__()
        self._settings, self._num_layers, self._units = settings, layer.lstm.num_layers, layer.lstm.hidden_size
        self._names: list[str] = []
        for number in range(self._num_layers):
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                name = f"{kind}_l{number}"
                self._names.append(name)
                parameter = getattr(layer.lstm, name)
                setattr(self, name, parameter)
                if kind.startswith("weight"):
                    setattr(self, f"{name}_log_variance", _log_variances(parameter, settings))

    def forward(self, x: Tensor) -> Tensor:
        weights: list[Tensor] = []
        for name in self._names:
            weight = getattr(self, name)
            if self.training and name.startswith("weight"):
                weight = _sample(weight, getattr(self, f"{name}_log_variance"), self._settings)
            weights.append(weight)
        start = x.new_zeros(self._num_layers, len(x), self._units)
        outputs: Tensor = torch.lstm(x, (start, start), weights, True, self._num_layers, 0.0, False, False, True)[0]
        return outputs


def _log_variances(weight: Tensor, settings: GaussianSettings) -> nn.Parameter:
    noise = torch.randn_like(weight) * settings.log_variance_init_std
    return nn.Parameter(noise + settings.log_variance_init)


def _sample(mean: Tensor, log_variance: Tensor, settings: GaussianSettings) -> Tensor:
    return mean + settings.scale((0.5 * settings.clamp(log_variance)).exp()) * torch.randn_like(mean)


_KINDS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Linear: GaussianLayer,
    nn.Conv2d: GaussianLayer,
    nn.Embedding: GaussianEmbedding,
    Recurrent: GaussianRecurrent,
}


def make_gaussian(module: nn.Module, num_layers: int | None, settings: GaussianSettings) -> nn.Module:
    """Make the last `num_layers` layers Gaussian; None: all but convolutions."""
    layers = [(path, layer) for path, layer in module.named_modules() if type(layer) in _KINDS]
    if num_layers is None:
        layers = [(path, layer) for path, layer in layers if type(layer) is not nn.Conv2d]
    else:
        layers = layers[len(layers) - num_layers :]
    for path, layer in layers:
        parent, _, name = path.rpartition(".")
        gaussian = _KINDS[type(layer)](layer, settings)
        if not name:
            return gaussian  # the network is this one layer
        setattr(module.get_submodule(parent), name, gaussian)
    return module


def count_layers(module: nn.Module) -> int:
    """Layers each of which can be Gaussian."""
    return sum(type(child) in _KINDS for child in module.modules())
