"""Mean-field Gaussian posteriors of a network's weights: the pull of a prior, KL divergences, draws."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bfl_bench.inference.train import Adjust
from bfl_bench.method import Task
from bfl_bench.models.gaussian import GaussianSettings


@dataclass(frozen=True)
class Prior:
    """An independent Gaussian for every Gaussian weight of the network, in the order of the flat vector's means."""

    mean: Tensor  # (D,)
    log_precision: Tensor  # (D,)

    def pull(self, task: Task, scale: float) -> Adjust:
        """Adds the gradient of scale KL(q || prior), where q are the means and log variances of the parameters."""
        layout, settings = task.model.layout, settings_of(task)
        precision = self.log_precision.exp()

        def add_gradient(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
            log_variance = parameters[layout.log_variances]
            widen = (settings.clamp(log_variance) + self.log_precision).exp_().sub_(1)
            if (passes := settings.passes_gradient(log_variance)) is not None:
                widen *= passes
            gradient[layout.means].addcmul_(parameters[layout.means] - self.mean, precision, value=scale)
            gradient[layout.log_variances].add_(widen, alpha=0.5 * scale)

        return add_gradient

    def kl(self, task: Task, vector: Tensor) -> float:
        """KL(q || prior) in nats."""
        layout = task.model.layout
        distance = (vector[layout.means] - self.mean).square() * self.log_precision.exp()
        ratio = settings_of(task).clamp(vector[layout.log_variances]) + self.log_precision
        return 0.5 * float((distance + ratio.exp() - 1 - ratio).sum())


def draw(task: Task, vector: Tensor, num: int, rng: torch.Generator, variance_scale: float = 1.0) -> Iterator[Tensor]:
    """Parameter vectors whose Gaussian weights are drawn and stand in the place of the means."""
    layout = task.model.layout
    mean = vector[layout.means]
    deviation = (0.5 * settings_of(task).clamp(vector[layout.log_variances])).exp() * variance_scale**0.5
    for _ in range(num if len(mean) else 1):
        drawn = vector.clone()
        drawn[layout.means] += deviation * torch.randn(len(mean), generator=rng).to(mean.device)
        yield drawn


def settings_of(task: Task) -> GaussianSettings:
    assert task.gaussian is not None  # the builder sees to it for a method with Gaussian layers
    return task.gaussian
