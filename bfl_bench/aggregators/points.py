"""Rules that combine what the clients send. Torch only: usable outside the runner."""

import torch
from torch import Tensor


class WeightedMean:
    """sum_k w_k x_k / sum_k w_k in float64, one client at a time: K x P numbers are never held together."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._total_weight = 0.0

    @property
    def empty(self) -> bool:
        return self._sum is None

    def add(self, vector: Tensor, weight: float) -> None:
        if self._sum is None:
            self._sum = torch.zeros(vector.shape, dtype=torch.float64, device=vector.device)
        self._sum.add_(vector, alpha=weight)
        self._total_weight += weight

    def result(self) -> Tensor:
        """The mean, in float64."""
        if self._sum is None:
            raise ValueError("the mean of no vectors is not defined")
        return self._sum / self._total_weight


def step_towards(old: Tensor, aggregated: Tensor, server_lr: float) -> Tensor:
    """The server's step from the old model to the aggregated one; exactly the aggregated one at `server_lr` 1."""
    return torch.lerp(old.double(), aggregated.double(), server_lr).to(old.dtype)
