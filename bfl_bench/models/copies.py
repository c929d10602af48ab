"""Copies of a network, each with parameters of its own, in one pass: products in batches, gradients written by hand.

Parameters are rows of a matrix (copies, P), laid out as the network's flat vector. Values are (copies, units,
examples): with the examples last every product of a step is one of matrices as they lie in memory, and a softmax over
few classes goes along them. The copies are in training mode.

What a network draws at random is drawn beforehand, copy by copy: by `draw`, the numbers and the order of the network's
own layers.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bfl_bench.errors import UnsuitableError
from bfl_bench.models.flat import LOG_VARIANCE, Entry, FlatModel
from bfl_bench.models.gaussian import TINY, GaussianLayer, GaussianSettings
from bfl_bench.models.lateral import GATES, Lateral
from bfl_bench.models.networks import AppendOne

Noise = Iterator[Tensor]
"""Layer by layer what `draw` gave, stacked (copies, ...)."""

Change = Callable[[Entry, Tensor], None]
"""Called with the gradient (copies, ...) of a tensor as soon as nothing needs its value any more."""

Pull = Callable[[Tensor, Change, bool], Tensor]
"""Called with the gradient of a layer's outputs; gives that of its inputs, or anything if that is not needed."""


SlopesOf = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Called with outputs (copies, units, n); gives losses (copies, n), and their gradients at the outputs."""


class Layer(ABC):
    @property
    def has_parameters(self) -> bool:
        return False

    def draw(self, num: int, like: Tensor) -> list[Tensor]:
        """Draw the noise of one copy for so many examples, from torch's own generator."""
        return []

    @abstractmethod
    def forward(self, rows: Tensor, x: Tensor, noise: Noise) -> tuple[Tensor, Pull]:
        """Compute outputs (copies, out, n) of inputs (copies, in, n), and what their gradients give."""


@dataclass(frozen=True)
class Linear(Layer):
    weight: Entry
    bias: Entry | None

    @property
    def has_parameters(self) -> bool:
        return True

    def forward(self, rows: Tensor, x: Tensor, noise: Noise) -> tuple[Tensor, Pull]:
        return self.apply(rows, view_copies(self.weight, rows), x)

    def apply(self, rows: Tensor, weight: Tensor, x: Tensor) -> tuple[Tensor, Pull]:
        """Do so with this weight (copies, out, in)."""
        bias = None if self.bias is None else view_copies(self.bias, rows)
        outputs = weight @ x if bias is None else torch.baddbmm(bias[:, :, None], weight, x)

        def pull(slopes: Tensor, change: Change, needed: bool) -> Tensor:
            below = weight.mT @ slopes if needed else slopes
            change(self.weight, slopes @ x.mT)
            if self.bias is not None:
                change(self.bias, slopes.sum(2))
            return below

        return outputs, pull


@dataclass(frozen=True)
class Gaussian(Layer):
    """A linear layer whose weights are Gaussian."""

    mean: Linear
    log_variance: Entry
    settings: GaussianSettings

    @property
    def has_parameters(self) -> bool:
        return True

    def draw(self, num: int, like: Tensor) -> list[Tensor]:
        shape = self.log_variance.shape
        drawn = shape if self.settings.sampling == "weights" else (num, shape[0])
        return [torch.randn(drawn, device=like.device)]

    def forward(self, rows: Tensor, x: Tensor, noise: Noise) -> tuple[Tensor, Pull]:
        log_variance = view_copies(self.log_variance, rows)
        if self.settings.sampling == "weights":
            return self._sample_weights(rows, x, log_variance, next(noise))
        return self._sample_outputs(rows, x, log_variance, next(noise).mT.contiguous())

    def _sample_outputs(self, rows: Tensor, x: Tensor, log_variance: Tensor, noise: Tensor) -> tuple[Tensor, Pull]:
        outputs, pull_mean = self.mean.forward(rows, x, iter(()))
        variances, squares = self.settings.clamp(log_variance).exp(), x.square()
        deviation = (variances @ squares).add_(TINY).sqrt_()
        noise = self.settings.scale(noise)

        def pull(slopes: Tensor, change: Change, needed: bool) -> Tensor:
            widen = 0.5 * slopes * noise / deviation  # along the outputs' variances
            below = 2 * x * (variances.mT @ widen) if needed else slopes
            change(self.log_variance, self._through_clamp((widen @ squares.mT).mul_(variances), log_variance))
            through_mean = pull_mean(slopes, change, needed)
            return below.add_(through_mean) if needed else slopes

        return outputs.addcmul_(deviation, noise), pull

    def _sample_weights(self, rows: Tensor, x: Tensor, log_variance: Tensor, noise: Tensor) -> tuple[Tensor, Pull]:
        deviations = self.settings.scale((0.5 * self.settings.clamp(log_variance)).exp()).mul_(noise)
        outputs, pull_sampled = self.mean.apply(rows, view_copies(self.mean.weight, rows) + deviations, x)

        def pull(slopes: Tensor, change: Change, needed: bool) -> Tensor:
            def change_both(entry: Entry, gradient: Tensor) -> None:
                if entry is self.mean.weight:
                    change(self.log_variance, self._through_clamp(0.5 * deviations * gradient, log_variance))
                change(entry, gradient)

            return pull_sampled(slopes, change_both, needed)

        return outputs, pull

    def _through_clamp(self, gradient: Tensor, log_variance: Tensor) -> Tensor:
        passes = self.settings.passes_gradient(log_variance)
        return gradient if passes is None else gradient.mul_(passes)


class Relu(Layer):
    def forward(self, rows: Tensor, x: Tensor, noise: Noise) -> tuple[Tensor, Pull]:
        outputs = x.relu()

        def pull(slopes: Tensor, change: Change, needed: bool) -> Tensor:
            return torch.ops.aten.threshold_backward(slopes, outputs, 0) if needed else slopes

        return outputs, pull


@dataclass(frozen=True)
class Elementwise(Layer):
    """An activation function, whatever its gradient."""

    module: nn.Module

    def forward(self, rows: Tensor, x: Tensor, noise: Noise) -> tuple[Tensor, Pull]:
        with torch.enable_grad():
            inputs = x.detach().requires_grad_()
            outputs: Tensor = self.module(inputs)

        def pull(slopes: Tensor, change: Change, needed: bool) -> Tensor:
            return torch.autograd.grad(outputs, inputs, slopes)[0] if needed else slopes

        return outputs.detach(), pull


@dataclass(frozen=True)
class Dropout(Layer):
    """Dropout of a layer with so many units."""

    rate: float
    units: int

    def draw(self, num: int, like: Tensor) -> list[Tensor]:
        return [F.dropout(torch.ones(num, self.units, device=like.device), self.rate)]

    def forward(self, rows: Tensor, x: Tensor, noise: Noise) -> tuple[Tensor, Pull]:
        kept = next(noise).mT

        def pull(slopes: Tensor, change: Change, needed: bool) -> Tensor:
            return slopes * kept

        return x * kept, pull


class One(Layer):
    """Appends a one."""

    def forward(self, rows: Tensor, x: Tensor, noise: Noise) -> tuple[Tensor, Pull]:
        def pull(slopes: Tensor, change: Change, needed: bool) -> Tensor:
            return slopes[:, :-1]

        return F.pad(x, (0, 0, 0, 1), value=1.0), pull


@dataclass(frozen=True)
class Chain(Layer):
    layers: tuple[Layer, ...]

    @property
    def has_parameters(self) -> bool:
        return any(layer.has_parameters for layer in self.layers)

    def draw(self, num: int, like: Tensor) -> list[Tensor]:
        return [noise for layer in self.layers for noise in layer.draw(num, like)]

    def forward(self, rows: Tensor, x: Tensor, noise: Noise) -> tuple[Tensor, Pull]:
        pulls: list[Pull] = []
        for layer in self.layers:
            x, pull = layer.forward(rows, x, noise)
            pulls.append(pull)
        first = next((number for number, layer in enumerate(self.layers) if layer.has_parameters), 0)

        def pull_all(slopes: Tensor, change: Change, needed: bool) -> Tensor:
            for number in reversed(range(0 if needed else first, len(pulls))):
                slopes = pulls[number](slopes, change, needed or number > first)
            return slopes

        return x, pull_all


@dataclass(frozen=True)
class Coupled(Layer):
    """What `Lateral` computes: of every layer both networks' versions, and the gate where there is one."""

    layers: tuple[tuple[Layer, Layer, Entry | None], ...]

    def draw(self, num: int, like: Tensor) -> list[Tensor]:
        return [noise for shared, own, _ in self.layers for layer in (shared, own) for noise in layer.draw(num, like)]

    def forward(self, rows: Tensor, x: Tensor, noise: Noise) -> tuple[Tensor, Pull]:
        shared = private = x
        steps: list[tuple[Pull, Pull, Entry | None, Tensor, Tensor]] = []
        for layer, own, entry in self.layers:
            shared, pull_shared = layer.forward(rows, shared, noise)
            private, pull_private = own.forward(rows, private, noise)
            gate = rows.new_empty(0)
            if entry is not None:
                gate = view_copies(entry, rows).reshape(len(rows), -1, 1)  # of the layer, or one for each of its units
                shared = shared + gate * private
            steps.append((pull_shared, pull_private, entry, gate, private))
        first = next((number for number, (_, _, entry) in enumerate(self.layers) if entry is not None), 0)

        def pull(slopes: Tensor, change: Change, needed: bool) -> Tensor:
            along_private = torch.zeros_like(slopes)
            for number, (pull_shared, pull_private, entry, gate, values) in reversed([*enumerate(steps)]):
                if entry is not None:
                    along_private = along_private + gate * slopes
                    opened = (slopes * values).sum(2)
                    opened = opened if entry.shape else opened.sum(1)
                    change(entry, opened.view(len(rows), *entry.shape))
                slopes = pull_shared(slopes, change, number > first)
                along_private = pull_private(along_private, change, number > first)
            return slopes

        return shared, pull


@dataclass(frozen=True)
class Copies:
    """A network that several copies of can be computed at once."""

    whole: Layer

    def draw(self, num: int, like: Tensor) -> list[Tensor]:
        """Draw the noise of one copy for so many examples, from torch's own generator."""
        return self.whole.draw(num, like)

    @property
    def draws(self) -> bool:
        """Tell whether there is any noise to be drawn."""
        return bool(self.draw(1, torch.empty(0)))

    @torch.no_grad()
    def differentiate(
        self, rows: Tensor, x: Tensor, noise: Sequence[Tensor], slopes_of: SlopesOf, shares: Tensor, change: Change
    ) -> tuple[Tensor, Tensor]:
        """Hand each copy's gradients to `change`; return the losses (copies,) and the outputs (copies, n, ...).

        A copy's loss is the sum over examples of the losses that `slopes_of` gives, times `shares` (copies, n). Inputs
        x are (copies, n, ...), and the layers' noise has the copies first, too.
        """
        outputs, pull = self.whole.forward(rows, x.flatten(2).mT, iter(noise))
        losses, slopes = slopes_of(outputs)
        pull(slopes.mul_(shares[:, None]), change, False)
        return (losses * shares).sum(1), outputs.mT.contiguous()


def copy_network(model: FlatModel, input_shape: tuple[int, ...]) -> Copies:
    """Find out how copies of a network are computed; an `UnsuitableError` names a layer that is not known here."""
    module, finder = model.module, _Finder(model)
    values, of_private = (_Values(math.prod(input_shape), len(input_shape) == 1) for _ in range(2))
    if not isinstance(module, Lateral):
        return Copies(finder.find("", module, values))
    gates = itertools.count()
    layers: list[tuple[Layer, Layer, Entry | None]] = []
    for (name, shared), private in zip(module.shared.named_children(), module.private, strict=True):
        gated = any(True for _ in shared.parameters())
        pair = finder.find(f"shared.{name}", shared, values), finder.find(f"private.{name}", private, of_private)
        layers.append((*pair, finder.entries[f"{GATES}{next(gates)}"] if gated else None))
    return Copies(Coupled(tuple(layers)))


@dataclass
class _Values:
    """What goes into a layer."""

    units: int
    flat: bool


_ELEMENTWISE = (nn.Identity, nn.Tanh, nn.Sigmoid, nn.ELU, nn.GELU, nn.LeakyReLU, nn.SiLU, nn.Softplus)


class _Finder:
    def __init__(self, model: FlatModel) -> None:
        self.entries = {entry.name: entry for entry in model.layout.entries}

    def find(self, path: str, module: nn.Module, values: _Values) -> Layer:
        """Find what computes a module, and note what comes out of it in `values`."""
        prefix = f"{path}." if path else ""
        if type(module) is nn.Sequential:
            layers = [self.find(f"{prefix}{name}", layer, values) for name, layer in module._modules.items() if layer]
            return Chain(tuple(layers))
        if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            values.flat = True
            return Chain(())
        known = values.flat and f"{prefix}weight" in self.entries  # a layer that is used again has no entry
        if known and type(module) is nn.Linear:
            values.units = module.out_features
            return self._linear(prefix)
        if known and type(module) is GaussianLayer and module.weight.dim() == 2:
            values.units = len(module.weight)
            return Gaussian(self._linear(prefix), self.entries[f"{prefix}weight{LOG_VARIANCE}"], module.settings)
        if values.flat and type(module) is AppendOne:
            values.units += 1
            return One()
        if values.flat and type(module) is nn.Dropout:
            return Dropout(module.p, values.units)
        if type(module) is nn.ReLU:
            return Relu()
        if type(module) in _ELEMENTWISE:
            return Elementwise(module)
        found = " ".join(f"{path or 'the network'} is {module}".split())
        raise UnsuitableError(f"a network of linear layers, each used once, on vectors ({found})")

    def _linear(self, prefix: str) -> Linear:
        return Linear(self.entries[f"{prefix}weight"], self.entries.get(f"{prefix}bias"))


def view_copies(entry: Entry, rows: Tensor) -> Tensor:
    """This tensor of every copy, (copies, ...), as a view into their parameters."""
    return rows[:, entry.start : entry.stop].view(len(rows), *entry.shape)
