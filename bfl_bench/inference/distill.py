"""Distillation: a network learns from a teacher's predictions, by SGD with momentum on the flat vector."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bfl_bench.models.flat import FlatModel
from bfl_bench.rng import derive_seed, seeded_globally


class Student:
    """Works in `model`, which nobody else may load until it is done."""

    def __init__(self, model: FlatModel, start: Tensor, lr: float, momentum: float) -> None:
        model.load(start)
        self.model = model
        self._lr, self._momentum = lr, momentum
        self._velocity = torch.zeros_like(model.trainable)
        self._epoch = 0

    def train_epoch(
        self,
        x: Tensor,
        targets: Tensor,
        batch_size: int,
        rng: torch.Generator,
        temperature: float = 1.0,
        after_step: Callable[[], None] = lambda: None,
    ) -> float:
        """One pass over the examples; the mean cross-entropy to the targets (n, C), which are probabilities.

        With a temperature, the loss is that of the logits divided by it, times its square, so that gradients keep
        their size.
        """
        model = self.model
        model.module.train()
        loss_sum = torch.zeros((), device=targets.device)
        order = torch.randperm(len(targets), generator=rng).to(targets.device)
        with seeded_globally(derive_seed(rng.initial_seed(), "layers", self._epoch), targets.device):
            for batch in torch.split(order, batch_size):
                loss = cross_entropy(model(x[batch]) / temperature, targets[batch])
                self._velocity.mul_(self._momentum).add_(model.backward(loss * temperature**2))
                model.trainable.add_(self._velocity, alpha=-self._lr)
                loss_sum.add_(loss.detach(), alpha=len(batch) / len(targets))
                after_step()
        self._epoch += 1
        return loss_sum.item()
