"""Training labels that are wrong: a test of whether a method believes its data too much."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from bfl_bench.checks import Between


@dataclass(frozen=True)
class LabelNoise:
    """A share of the labels that are made wrong, and which class these get."""

    rate: Annotated[float, Between(0, 1)]
    kind: Literal["uniform", "next"]  # any other class, all alike; the class after, and 0 after the last

    def apply(self, y: Tensor, num_classes: int, rng: torch.Generator) -> Tensor:
        """Return labels of which round(rate x number) are wrong, of sequences at any position.

        With the same stream, those that are wrong at one rate are so at every higher one, and in the same way.
        """
        chosen = torch.randperm(y.numel(), generator=rng)
        others = torch.randint(1, num_classes, (y.numel(),), generator=rng)
        away = others if self.kind == "uniform" else torch.ones_like(others)
        away[chosen[round(self.rate * y.numel()) :]] = 0
        return (y + away.view_as(y)) % num_classes
