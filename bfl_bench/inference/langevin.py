"""Langevin dynamics as local steps: gradients with noise, whose iterates are draws from a posterior.

The posterior is that of n examples with the mean loss l and the prior N(0, 1/d): its density is proportional to
exp(-(n l(theta) + d theta^2 / 2) / T), T a temperature. A step of length lr on l, as SGD has it, is one of eta = lr / n
on n l, so that the noise that belongs to it has the variance 2 eta T = 2 lr T / n: with T = 0 it is SGD.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bfl_bench.devices import bring
from bfl_bench.errors import ConfigError
from bfl_bench.inference.train import Gradient
from bfl_bench.method import Task, Tensors


@dataclass(frozen=True, kw_only=True, eq=False)
class Langevin:
    """A step of stochastic gradient Langevin dynamics: theta - lr (scale g + decay theta) + noise."""

    scale: float  # of the gradient of the minibatch mean
    decay: float  # d / n
    variance: float  # of the noise, divided by lr
    common_variance: float = 0.0  # of noise that clients share, divided by lr
    common: torch.Generator | None = None  # where that is drawn from

    def begin(self, parameters: Tensor) -> Tensors:
        return {}

    def step(self, parameters: Tensor, gradient: Gradient, memory: Tensors, lr: float, rng: torch.Generator) -> None:
        change = gradient(None)
        if self.scale != 1:
            change.mul_(self.scale)
        if self.decay:
            change.add_(parameters, alpha=self.decay)
        parameters.add_(change, alpha=-lr)
        if self.variance:
            parameters.add_(_normal(parameters, rng), alpha=math.sqrt(lr * self.variance))
        if self.common is not None:
            parameters.add_(_normal(parameters, self.common), alpha=math.sqrt(lr * self.common_variance))


@dataclass(frozen=True, kw_only=True)
class CyclicalSghmc:
    """Stochastic gradient Hamiltonian Monte Carlo with a learning rate that falls from lr to 0 in every cycle.

    b = (1 - friction) b - lr (g + decay theta) + noise of variance 2 lr friction T / n;  theta = theta + b. The noise
    is there in the last steps of a cycle alone, which explores before it samples.
    """

    friction: float
    decay: float
    variance: float  # T / n
    cycle_steps: int
    noisy_steps: int  # of these, the last

    def begin(self, parameters: Tensor) -> Tensors:
        # On the CPU: reading the number of steps there does not wait for the device.
        return {"velocity": torch.zeros_like(parameters), "steps": torch.zeros((), dtype=torch.float64)}

    def step(self, parameters: Tensor, gradient: Gradient, memory: Tensors, lr: float, rng: torch.Generator) -> None:
        position = int(memory["steps"].item()) % self.cycle_steps
        memory["steps"].add_(1)
        lr *= 0.5 * (1 + math.cos(math.pi * position / self.cycle_steps))
        velocity = memory["velocity"].mul_(1 - self.friction)
        velocity.add_(gradient(None), alpha=-lr).add_(parameters, alpha=-lr * self.decay)
        if position >= self.cycle_steps - self.noisy_steps and self.variance:
            velocity.add_(_normal(parameters, rng), alpha=math.sqrt(2 * lr * self.friction * self.variance))
        parameters.add_(velocity)


def _normal(like: Tensor, rng: torch.Generator) -> Tensor:
    return bring(torch.randn(like.shape, generator=rng, device=rng.device).to(like.dtype), like.device)


def refuse_other_settings(task: Task, method: str, **instead: str) -> None:
    """Refuse keys of `local` that these steps have no place for, momentum and weight decay, and say what there is."""
    for key, what in instead.items():
        if value := getattr(task.local, key):
            raise ConfigError(f"local.{key}", value, f"0; method {method} has {what}")


def count_steps(task: Task, size: int, steps: int | None) -> int:
    """Count the steps of a client of this size in a round: `steps`, or as many as local.epochs makes."""
    return steps or task.local.epochs * math.ceil(size / task.local.batch_size)


@dataclass(frozen=True)
class Thinning:
    """Which of a chain's models are kept as samples: one in `every` rounds after `burn_in` of them, the last `num`."""

    burn_in: int
    every: int
    num: int

    def collect(self, samples: Tensor, models: Tensor, round_: int) -> Tensor:
        """Add models (C, P) of a round, counted from 1, to the samples (m, P) where it is their turn."""
        since = round_ - self.burn_in
        if since < 1 or (since - 1) % self.every:
            return samples
        return torch.cat([samples, models])[-self.num :]


def spread(samples: Tensor, num: int) -> Tensor:
    """Choose at most `num` of the samples (m, P), evenly from the oldest to the newest."""
    if num == 1:
        return samples[-1:]
    chosen = torch.linspace(0, len(samples) - 1, min(num, len(samples))).round().long()
    return samples[chosen.to(samples.device)]
