"""Local steps as values: an optimizer is a frozen record of numbers, what it remembers a dictionary of tensors."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bfl_bench.method import LocalSettings, Tensors

Gradient = Callable[[Tensor | None], Tensor]
"""Called as `gradient(offset)`: of this minibatch's objective at parameters + offset, adjusted, then clipped; None is
no offset. The parameters stay as they are, and the result lies in the same storage at every call."""


class Optimizer(Protocol):
    def begin(self, parameters: Tensor) -> Tensors:
        """Make what is remembered before the first step."""
        ...

    def step(self, parameters: Tensor, gradient: Gradient, memory: Tensors, lr: float, rng: torch.Generator) -> None:
        """Change parameters and memory in place."""
        ...


@dataclass(frozen=True)
class Sgd:
    """What torch.optim.SGD computes."""

    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether a step is the gradient times the learning rate."""
        return not self.momentum and not self.weight_decay

    def begin(self, parameters: Tensor) -> Tensors:
        return {"velocity": torch.zeros_like(parameters)} if self.momentum else {}

    def step(self, parameters: Tensor, gradient: Gradient, memory: Tensors, lr: float, rng: torch.Generator) -> None:
        change = gradient(None)
        if self.weight_decay:
            change.add_(parameters, alpha=self.weight_decay)
        if self.momentum:
            change = memory["velocity"].mul_(self.momentum).add_(change)
        parameters.add_(change, alpha=-lr)


@dataclass(frozen=True)
class Adam:
    """What torch.optim.Adam computes; weight decay is a part of the gradient."""

    betas: tuple[float, float]
    weight_decay: float = 0.0
    eps: float = 1e-8

    def begin(self, parameters: Tensor) -> Tensors:
        zeros = torch.zeros_like(parameters)
        # On the CPU: reading the number of steps there does not wait for the device.
        return {"first": zeros, "second": zeros.clone(), "steps": torch.zeros((), dtype=torch.float64)}

    def step(self, parameters: Tensor, gradient: Gradient, memory: Tensors, lr: float, rng: torch.Generator) -> None:
        change = gradient(None)
        if self.weight_decay:
            change.add_(parameters, alpha=self.weight_decay)
        beta1, beta2 = self.betas
        num_steps = memory["steps"].add_(1).item()
        first = memory["first"].lerp_(change, 1 - beta1)
        second = memory["second"].mul_(beta2).addcmul_(change, change, value=1 - beta2)
        root = second.sqrt().div_(math.sqrt(1 - beta2**num_steps)).add_(self.eps)
        parameters.addcdiv_(first, root, value=-lr / (1 - beta1**num_steps))


def make_optimizer(local: LocalSettings) -> Optimizer:
    if local.optimizer == "adam":
        return Adam((local.betas[0], local.betas[1]), local.weight_decay)
    return Sgd(local.momentum, local.weight_decay)
