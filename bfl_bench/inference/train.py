"""Local training that the methods share: minibatch SGD on the flat vector."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bfl_bench.method import Client, LocalSettings, Task
from bfl_bench.rng import derive_seed, seeded_globally

ExtraLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Called as `extra_loss(x, y, logits)` in each step; a part of the objective beside the cross-entropy."""

Adjust = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Called as `adjust(parameters, gradient, x, y)` before each step; changes `gradient` in place."""

# Minibatches are sliced out of blocks of about this size: fewer, larger gathers. Augmentation draws block by block, so
# that another size gives other augmented images.
_GATHERED_EXAMPLES = 1024


@dataclass(frozen=True)
class Trained:
    vector: Tensor  # (P,) the network after training
    num_steps: int
    metrics: dict[str, float]  # train_loss and train_acc over the last epoch


def minibatches(client: Client, local: LocalSettings, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Inputs, labels and whether the epoch is the last, over all local epochs, each in an order of its own."""
    orders = torch.stack([torch.randperm(len(client), generator=rng) for _ in range(local.epochs)])
    orders = orders.to(client.indices.device)  # (epochs, n), one transfer
    block = local.batch_size * max(1, _GATHERED_EXAMPLES // local.batch_size)
    for epoch, order in enumerate(orders):
        last = epoch == local.epochs - 1
        for positions in order.split(block):
            x, y = client.gather(positions, rng)
            for start in range(0, len(y), local.batch_size):
                stop = start + local.batch_size
                yield x[start:stop], y[start:stop], last


def train_sgd(
    task: Task,
    start: Tensor,
    client: Client,
    rng: torch.Generator,
    adjust: Adjust | None = None,
    num_samples: int = 1,
    extra_loss: ExtraLoss | None = None,
) -> Trained:
    """SGD from `start` on the client's cross-entropy, as torch.optim.SGD computes it; nothing waits for the device.

    The order within a step: gradient of the minibatch mean, `adjust`, clipping of the norm, weight decay, momentum.
    Layers that draw noise, such as dropout, draw it from a stream of their own that belongs to `rng`.
    `extra_loss` adds to the objective, not to the recorded loss.
    A network that samples its weights sees every minibatch `num_samples` times at once; the loss is the mean.
    """
    local, model = task.local, task.model
    model.load(start)
    model.assert_views()
    if not model.module.training:  # it goes through all modules
        model.module.train()
    parameters = model.trainable
    velocity = torch.zeros_like(parameters) if local.momentum else None
    plain = adjust is None and local.clip is None and not local.weight_decay and velocity is None
    tally = Tally(parameters.device)
    num_steps = 0
    with seeded_globally(derive_seed(rng.initial_seed(), "layers"), parameters.device):  # for noise inside the network
        for x, y, last_epoch in minibatches(client, local, rng):
            if num_samples > 1:
                x, y = torch.cat([x] * num_samples), torch.cat([y] * num_samples)
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            objective = loss if extra_loss is None else loss + extra_loss(x, y, logits)
            if plain:
                model.descend(objective, local.lr)
            else:
                gradient = model.backward(objective)
                if adjust is not None:
                    adjust(parameters, gradient, x, y)
                if local.clip is not None:
                    gradient.mul_((local.clip / (gradient.norm() + 1e-6)).clamp(max=1.0))
                if local.weight_decay:
                    gradient.add_(parameters, alpha=local.weight_decay)
                if velocity is not None:
                    gradient = velocity.mul_(local.momentum).add_(gradient)
                parameters.add_(gradient, alpha=-local.lr)
            num_steps += 1
            if last_epoch:
                tally.add(loss, logits, y)
    return Trained(model.vector.clone(), num_steps, tally.result())


class Tally:
    """Mean loss and accuracy over minibatches, which are kept and counted many at a time: that is cheaper."""

    def __init__(self, device: torch.device) -> None:
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._correct = torch.zeros((), dtype=torch.long, device=device)
        self._num = 0

    def add(self, loss: Tensor, logits: Tensor, y: Tensor) -> None:
        self._kept.append((loss.detach(), logits.detach(), y))
        if len(self._kept) == 64:
            self._count()

    def _count(self) -> None:
        losses, logits, labels = zip(*self._kept, strict=True)
        sizes = [label.numel() for label in labels]
        weights = torch.tensor(sizes, dtype=torch.float64, device=self._loss.device)
        self._loss += torch.stack(losses).double() @ weights
        self._correct += (torch.cat(logits).argmax(1) == torch.cat(labels)).sum()
        self._num += sum(sizes)
        self._kept = []

    def result(self) -> dict[str, float]:
        if self._kept:
            self._count()
        return {"train_loss": self._loss.item() / self._num, "train_acc": self._correct.item() / self._num}


def effective_steps(num_steps: int, momentum: float) -> float:
    """How often a constant gradient would be added up: the number of steps, more with momentum (FedNova's |a_i|)."""
    return (num_steps - momentum * (1 - momentum**num_steps) / (1 - momentum)) / (1 - momentum)


def full_gradient(task: Task, vector: Tensor, client: Client, rng: torch.Generator) -> Tensor:
    """Gradient of the mean cross-entropy over all of the client's data at `vector`, (P,)."""
    model = task.model
    model.load(vector)
    model.module.train()
    total = torch.zeros_like(model.gradient)
    with seeded_globally(derive_seed(rng.initial_seed(), "full gradient"), vector.device):
        for positions in torch.split(torch.arange(len(client), device=client.indices.device), _GATHERED_EXAMPLES):
            x, y = client.gather(positions, rng)
            total.add_(model.backward(F.cross_entropy(model(x), y)), alpha=len(y) / len(client))
    return total
