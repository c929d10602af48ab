"""Rules that combine what the clients send. Torch only: usable outside the runner."""

import torch
from torch import Tensor

_TOGETHER = 8  # vectors that are added in one go over the sum, where that is larger than the cache
_PIECE = 1 << 18  # numbers of a vector at a time: what is added to, and its float64 copy, stay in the cache


class WeightedMean:
    """sum_k w_k x_k / sum_k w_k in float64, a few clients at a time: K x P numbers are never held together."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._waiting: list[tuple[Tensor, float]] = []
        self._total_weight = 0.0

    @property
    def empty(self) -> bool:
        return self._sum is None

    def add(self, vector: Tensor, weight: float) -> None:
        """The vector must stay as it is until the result."""
        if self._sum is None:
            self._sum = torch.zeros(vector.shape, dtype=torch.float64, device=vector.device)
        self._waiting.append((vector, weight))
        self._total_weight += weight
        if len(self._waiting) == _TOGETHER or vector.numel() <= _PIECE:
            self._add_waiting(self._sum)

    def result(self) -> Tensor:
        """The mean, in float64."""
        if self._sum is None:
            raise ValueError("the mean of no vectors is not defined")
        self._add_waiting(self._sum)
        return self._sum / self._total_weight

    def _add_waiting(self, sum_: Tensor) -> None:
        copy = torch.empty(min(_PIECE, sum_.numel()), dtype=torch.float64, device=sum_.device)
        vectors = [(torch.split(vector.reshape(-1), _PIECE), weight) for vector, weight in self._waiting]
        for i, total in enumerate(torch.split(sum_.view(-1), _PIECE)):
            for pieces, weight in vectors:
                total.add_(copy[: len(total)].copy_(pieces[i]), alpha=weight)
        self._waiting.clear()


def step_towards(old: Tensor, aggregated: Tensor, server_lr: float) -> Tensor:
    """The server's step from the old model to the aggregated one; exactly the aggregated one at `server_lr` 1."""
    return torch.lerp(old.double(), aggregated.double(), server_lr).to(old.dtype)
