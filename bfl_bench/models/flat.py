"""A network whose parameters are views into one flat vector.

Loading a model is one copy, a gradient is one vector, and an SGD step, a prior pull or a sum of squared gradients is
one operation, whatever the network. The vector is `[points | means | log variances | rest]`. A parameter
`X_log_variance` holds the log variances of Gaussian weights with mean X; means and log variances lie in the same order.
The other trainable parameters are points. The rest, frozen parameters and floating-point buffers such as BatchNorm's
running statistics, travels along and takes no gradient.

Convolution weights (out, in, height, width) lie channels-last in the vector, in the order (out, height, width, in),
and the module sees them through `permute`: that memory format makes a convolution step cheaper on a CPU, by how much
depends on its instructions (docs/scaling.md).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bfl_bench.errors import PartError

LOG_VARIANCE = "_log_variance"
"""The end of the names of parameters that hold log variances."""


@dataclass(frozen=True)
class Entry:
    """One tensor of the module and where it lies in the vector."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def view(self, vector: Tensor) -> Tensor:
        """This tensor, in the module's shape, as a view into `vector`."""
        part = vector[self.start : self.stop]
        if len(self.shape) == 4:
            out_channels, in_channels, height, width = self.shape
            return part.view(out_channels, height, width, in_channels).permute(0, 3, 1, 2)
        return part.view(self.shape)


@dataclass(frozen=True)
class Layout:
    """Which part of the vector is which tensor, and which is which kind."""

    entries: tuple[Entry, ...]
    points: slice
    means: slice
    log_variances: slice

    @property
    def num_trainable(self) -> int:
        return int(self.log_variances.stop)

    @property
    def size(self) -> int:
        return self.entries[-1].stop if self.entries else 0

    def to_state_dict(self, vector: Tensor) -> dict[str, Tensor]:
        """Named tensors in PyTorch's own shapes and order in memory, for files and other programs."""
        return {entry.name: entry.view(vector).clone(memory_format=torch.contiguous_format) for entry in self.entries}

    def from_state_dict(self, tensors: dict[str, Tensor]) -> Tensor:
        vector = torch.empty(self.size)
        for entry in self.entries:
            entry.view(vector).copy_(tensors[entry.name])
        return vector


@dataclass(frozen=True)
class Objective:
    """What a step on a minibatch makes smaller."""

    loss: Callable[[Tensor, Tensor], Tensor]  # of outputs and labels
    extra: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # of inputs, labels and outputs; added to the loss


def _lay_out(module: nn.Module) -> Layout:
    parameters = dict(module.named_parameters())
    trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
    log_variances = [name for name in trainable if name.endswith(LOG_VARIANCE)]
    means = [name.removesuffix(LOG_VARIANCE) for name in log_variances]
    points = [name for name in trainable if name not in means and name not in log_variances]
    tensors = {**parameters, **dict(module.named_buffers())}
    rest = [name for name, tensor in tensors.items() if tensor.is_floating_point() and name not in trainable]
    entries: list[Entry] = []
    ends: list[int] = []
    for names in (points, means, log_variances, rest):
        for name in names:
            entries.append(Entry(name, tensors[name].shape, entries[-1].stop if entries else 0))
        ends.append(entries[-1].stop if entries else 0)
    return Layout(tuple(entries), slice(0, ends[0]), slice(ends[0], ends[1]), slice(ends[1], ends[2]))


def _split_at_gaussian(module: nn.Module) -> tuple[nn.Sequential | None, nn.Module]:
    """Split a sequence of layers before the first with Gaussian weights; None where nothing comes before."""
    if isinstance(module, nn.Sequential):
        for number, layer in enumerate(module):
            if any(name.endswith(LOG_VARIANCE) for name, _ in layer.named_parameters()):
                return (module[:number] if number else None), module[number:]
    return None, module


class FlatModel:
    """The one working copy of a network: `vector` and `gradient` are its storage, to be overwritten at will.

    `initial` keeps the parameters that the network was made with. `suffix` after `prefix` is the network; draws of its
    Gaussian weights differ in the suffix only.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        # Moving or casting afterwards would give the module storage of its own, so that comes first.
        self.module = module.to(device=device, dtype=torch.float32)
        self.layout = _lay_out(self.module)
        self.vector = torch.empty(self.layout.size, device=device)
        self.gradient = torch.zeros(self.layout.num_trainable, device=device)
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        self._trainable: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, its part of the vector, of the gradient
        for entry in self.layout.entries:
            tensor = tensors.pop(entry.name)
            view = entry.view(self.vector)
            view.copy_(tensor.data)
            tensor.data = view
            if entry.stop <= self.layout.num_trainable:
                self._trainable.append((tensor, view, entry.view(self.gradient)))
        self._counters = {tensor: tensor.clone() for tensor in tensors.values()}  # integer buffers
        # Where modules keep them: to go through all modules takes ten times as long as to look them up here.
        kept: list[dict[str, Any]] = [
            place for child in self.module.modules() for place in (child._parameters, child._buffers)
        ]
        self._places = [(place, name) for place in kept for name, tensor in place.items() if tensor is not None]
        self._storage = self._pointers()
        self.prefix, self.suffix = _split_at_gaussian(self.module)
        self._prefix_has_tensors = self.prefix is not None and bool(self.prefix.state_dict())
        self.initial = self.vector.clone()

    def __getstate__(self) -> dict[str, object]:
        """A copy, in another process say, gets storage of its own: from the module, and the initial parameters."""
        return {"module": copy.deepcopy(self.module), "initial": self.initial}

    def __setstate__(self, state: dict[str, Any]) -> None:
        initial: Tensor = state["initial"]
        self.__init__(state["module"], initial.device)  # type: ignore[misc]
        self.initial = initial

    @property
    def trainable(self) -> Tensor:
        return self.vector[: self.layout.num_trainable]

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(x)
        return logits

    def has_prefix_of(self, vector: Tensor) -> bool:
        """Tell whether the prefix has the tensors, in this vector, that it has now; all but Gaussian weights count."""
        if not self._prefix_has_tensors:
            return True
        points, rest = self.layout.points, slice(self.layout.num_trainable, None)
        return torch.equal(vector[points], self.vector[points]) and torch.equal(vector[rest], self.vector[rest])

    def load(self, vector: Tensor) -> None:
        """Make this the network's parameters; its integer buffers, which count batches, start anew."""
        if getattr(vector, "shape", None) != self.vector.shape or not vector.is_floating_point():  # copy_ takes more
            found = f"{vector.dtype} {tuple(vector.shape)}" if isinstance(vector, Tensor) else type(vector).__name__
            expected = f"{self.vector.dtype} {tuple(self.vector.shape)}"
            raise PartError(f"parameters to load: got {found}; expected: {expected}")
        self.vector.copy_(vector)
        for counter, initial in self._counters.items():
            counter.copy_(initial)

    def differentiate(
        self, x: Tensor, y: Tensor, objective: Objective, lr: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Leave the objective's gradient in `gradient` or, given a learning rate, take a step of plain descent.

        Return the loss, without what is added to it, and the outputs.
        """
        outputs = self(x)
        loss = objective.loss(outputs, y)
        whole = loss if objective.extra is None else loss + objective.extra(x, y, outputs)
        if lr is None:
            self.backward(whole)
        else:
            self.descend(whole, lr)
        return loss, outputs

    def backward(self, loss: Tensor) -> Tensor:
        """The gradient of `loss` as one vector (P,); the same storage at every call."""
        self._differentiate(loss)
        for parameter, _, part in self._trainable:
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad)
        return self.gradient

    def descend(self, loss: Tensor, lr: float) -> None:
        """A step of plain gradient descent. Without the gradient as a vector, a pass over the memory is saved."""
        self._differentiate(loss)
        for parameter, part, _ in self._trainable:
            if parameter.grad is not None:
                part.add_(parameter.grad, alpha=-lr)

    def _differentiate(self, loss: Tensor) -> None:
        """Into gradients of their own: where there is none yet, torch keeps what it computed and adds nothing up."""
        for parameter, _, _ in self._trainable:
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]

    def assert_views(self) -> None:
        """A cast silently detaches the module from the vector: better to stop."""
        if self._pointers() != self._storage:
            raise AssertionError("a parameter or buffer is no longer a view into the flat vector")

    def _pointers(self) -> list[int]:
        return [place[name].data_ptr() for place, name in self._places]
