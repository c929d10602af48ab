"""Distillation: a network learns from a teacher's predictions."""

from collections.abc import Callable

import torch
from torch import Tensor

from bfl_bench.devices import bring
from bfl_bench.inference.train import Optimizer
from bfl_bench.method import Task
from bfl_bench.rng import derive_seed, seeded_globally


class Student:
    """A network that learns; it works in the task's model, which nobody else may load until it is done."""

    def __init__(self, task: Task, start: Tensor, optimizer: Optimizer, lr: float) -> None:
        self.model, self._likelihood = task.model, task.likelihood
        self.model.load(start)
        self._optimizer, self._lr = optimizer, lr
        self._memory = optimizer.begin(self.model.trainable)
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
        """Pass once over the examples; return the mean loss to the targets (n, C), which are probabilities.

        With a temperature, the loss is that of the outputs divided by it, times its square, so that gradients keep
        their size.
        """
        model = self.model
        model.module.train()
        loss_sum = torch.zeros((), device=targets.device)
        order = bring(torch.randperm(len(targets), generator=rng), targets.device)
        noise = torch.Generator().manual_seed(derive_seed(rng.initial_seed(), "optimizer", self._epoch))
        loss = loss_sum
        batch = order

        def gradient(offset: Tensor | None) -> Tensor:
            nonlocal loss
            assert offset is None  # the optimizers that students have ask for none
            loss = self._likelihood.loss(model(x[batch]) / temperature, targets[batch])
            return model.backward(loss * temperature**2)

        with seeded_globally(derive_seed(rng.initial_seed(), "layers", self._epoch), targets.device):
            for batch in torch.split(order, batch_size):
                self._optimizer.step(model.trainable, gradient, self._memory, self._lr, noise)
                loss_sum.add_(loss.detach(), alpha=len(batch) / len(targets))
                after_step()
        self._epoch += 1
        return loss_sum.item()
