"""Local training that the methods share: minibatch steps on the flat vector, and the optimizers that take them.

A step is a value: an optimizer is a frozen record of numbers, what it remembers a dictionary of tensors.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bfl_bench.devices import bring
from bfl_bench.likelihood import Likelihood
from bfl_bench.meter import METER
from bfl_bench.method import Client, LocalSettings, Task, Tensors
from bfl_bench.models.flat import Objective
from bfl_bench.rng import derive_seed, seeded_globally

Loss = Callable[[Tensor, Tensor], Tensor]
"""Called as `loss(outputs, labels)`: the mean over a minibatch."""

ExtraLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Called as `extra_loss(x, y, outputs)` in each step; a part of the objective beside the loss."""

Adjust = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Called as `adjust(parameters, gradient, x, y)` before each step; changes `gradient` in place."""

AfterStep = Callable[[Tensor, bool], None]
"""Called as `after_step(parameters, epoch_ends)` after each step; may change the parameters in place."""

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


# Minibatches are sliced out of blocks of about this size: fewer, larger gathers. Augmentation draws block by block, so
# that another size gives other augmented images.
_GATHERED_EXAMPLES = 1024


@dataclass(frozen=True)
class Trained:
    """A network after local training."""

    vector: Tensor  # (P,)
    num_steps: int
    metrics: dict[str, float]  # train_loss and, by the likelihood, train_acc over the last epoch
    memory: Tensors  # the optimizer's, at the end


class Minibatch(NamedTuple):
    x: Tensor
    y: Tensor
    in_last_epoch: bool
    ends_epoch: bool


def minibatches(client: Client, local: LocalSettings, rng: torch.Generator) -> Iterator[Minibatch]:
    """Yield the minibatches of all local epochs, each epoch in an order of its own."""
    num = len(client)
    orders = torch.stack([torch.randperm(num, generator=rng) for _ in range(local.epochs)])
    orders = bring(orders, client.indices.device)  # (epochs, n), one transfer
    block = local.batch_size * max(1, _GATHERED_EXAMPLES // local.batch_size)
    for epoch, order in enumerate(orders):
        in_last_epoch = epoch == local.epochs - 1
        for number, positions in enumerate(order.split(block)):
            x, y = client.gather(positions, rng)
            for start in range(0, len(y), local.batch_size):
                stop = start + local.batch_size
                METER.steps += 1
                yield Minibatch(x[start:stop], y[start:stop], in_last_epoch, number * block + stop >= num)


def train(
    task: Task,
    start: Tensor,
    client: Client,
    rng: torch.Generator,
    *,
    optimizer: Optimizer | None = None,
    memory: Tensors | None = None,
    adjust: Adjust | None = None,
    loss: Loss | None = None,
    extra_loss: ExtraLoss | None = None,
    after_step: AfterStep | None = None,
    num_samples: int = 1,
    steps: int | None = None,
) -> Trained:
    """Train from `start` on the client's data; nothing waits for the device.

    The optimizer is that of `task.local` unless another is given, and goes on from `memory`, which it changes, where
    that is given. The loss is the likelihood's unless another is given; `extra_loss` adds to the objective, not to the
    recorded loss. The order within a step: gradient of the minibatch mean, `adjust`, clipping of the norm, then what
    the optimizer does.
    Layers that draw noise, such as dropout, draw it from a stream of their own that belongs to `rng`, and so does an
    optimizer: the order of minibatches depends on neither.
    A network that samples its weights sees every minibatch `num_samples` times at once; the loss is the mean.
    With `steps` there are so many of them, whatever the number of epochs; the last epoch may then be cut short.
    """
    local, model = task.local, task.model
    if steps is not None:
        local = replace(local, epochs=math.ceil(steps / math.ceil(len(client) / local.batch_size)))
    most = min((limit for limit in (steps, task.max_steps) if limit is not None), default=None)
    optimizer = make_optimizer(local) if optimizer is None else optimizer
    objective = Objective(task.likelihood.loss if loss is None else loss, extra_loss)
    model.load(start)
    model.assert_views()
    if not model.module.training:  # it goes through all modules
        model.module.train()
    parameters = model.trainable
    memory = optimizer.begin(parameters) if memory is None else memory
    noise = torch.Generator().manual_seed(derive_seed(rng.initial_seed(), "optimizer"))
    plain = isinstance(optimizer, Sgd) and optimizer.is_plain and adjust is None and local.clip is None
    tally = Tally(task.likelihood, parameters.device)
    num_steps = 0
    x = y = outputs = value = parameters  # of the current minibatch

    def gradient(offset: Tensor | None) -> Tensor:
        nonlocal outputs, value
        found = model.gradient
        if offset is None:
            value, outputs = model.differentiate(x, y, objective)
        else:
            kept = parameters.clone()
            parameters.add_(offset)
            value, outputs = model.differentiate(x, y, objective)
            parameters.copy_(kept)
        if adjust is not None:
            adjust(parameters, found, x, y)
        if local.clip is not None:
            found.mul_((local.clip / (found.norm() + 1e-6)).clamp(max=1.0))
        return found

    with seeded_globally(derive_seed(rng.initial_seed(), "layers"), parameters.device):  # for noise inside the network
        for batch in itertools.islice(minibatches(client, local, rng), most):
            x, y = batch.x, batch.y
            if num_samples > 1:
                x, y = torch.cat([x] * num_samples), torch.cat([y] * num_samples)
            if plain:
                value, outputs = model.differentiate(x, y, objective, local.lr)
            else:
                optimizer.step(parameters, gradient, memory, local.lr, noise)
            num_steps += 1
            if batch.in_last_epoch:
                tally.add(value, outputs, y)
            if after_step is not None:
                after_step(parameters, batch.ends_epoch or num_steps == most)
    return Trained(model.vector.clone(), num_steps, tally.result(), memory)


class Tally:
    """Means over minibatches of the loss and of what the likelihood measures.

    Minibatches are kept and counted many at a time: that is cheaper.
    """

    def __init__(self, likelihood: Likelihood, device: torch.device) -> None:
        self._likelihood = likelihood
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._sums: dict[str, Tensor] = {}
        self._num = 0

    def add(self, loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        self._kept.append((loss.detach(), outputs.detach(), y))
        if len(self._kept) == 64:
            self._count()

    def _count(self) -> None:
        losses, outputs, labels = zip(*self._kept, strict=True)
        sizes = [label.numel() for label in labels]
        weights = bring(torch.tensor(sizes, dtype=torch.float64), self._loss.device)
        self._loss += torch.stack(losses).double() @ weights
        for name, total in self._likelihood.measure(torch.cat(outputs), torch.cat(labels)).items():
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._num += sum(sizes)
        self._kept = []

    def result(self) -> dict[str, float]:
        if self._kept:
            self._count()
        sums = torch.stack([self._loss, *(total.double() for total in self._sums.values())]).tolist()  # one read
        return {name: total / self._num for name, total in zip(("train_loss", *self._sums), sums, strict=True)}


def effective_steps(num_steps: int, momentum: float) -> float:
    """Count how often a constant gradient would be added up: once a step, more with momentum (FedNova's |a_i|)."""
    return (num_steps - momentum * (1 - momentum**num_steps) / (1 - momentum)) / (1 - momentum)


def full_gradient(task: Task, vector: Tensor, client: Client, rng: torch.Generator) -> Tensor:
    """Compute the gradient of the mean loss over all of the client's data at `vector`, (P,)."""
    model = task.model
    model.load(vector)
    model.module.train()
    total = torch.zeros_like(model.gradient)
    with seeded_globally(derive_seed(rng.initial_seed(), "full gradient"), vector.device):
        for positions in torch.split(torch.arange(len(client), device=client.indices.device), _GATHERED_EXAMPLES):
            x, y = client.gather(positions, rng)
            model.differentiate(x, y, Objective(task.likelihood.loss))
            total.add_(model.gradient, alpha=len(y) / len(client))
    return total
