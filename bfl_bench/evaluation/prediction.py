"""What a model predicts for examples: the mixture of what its parameter draws say."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bfl_bench.evaluation.metrics import Bin
from bfl_bench.models.flat import FlatModel


@dataclass(frozen=True)
class Prediction:
    """Predictive distributions of n examples, of sequences at every position."""

    log_probabilities: Tensor  # (n, C, ...)
    expected_entropy: Tensor | None  # (n, ...) mean over the members of their entropies, in nats; None: one member

    def __getitem__(self, examples: Tensor) -> "Prediction":
        entropy = self.expected_entropy
        return Prediction(self.log_probabilities[examples], None if entropy is None else entropy[examples])


@dataclass(frozen=True)
class Scores:
    """How good a prediction is: numbers by the names that the registry of columns has, and the reliability diagram."""

    values: dict[str, float]
    bins: tuple[Bin, ...]


class Mixture(Protocol):
    """The members of a prediction, added one by one."""

    def add(self, outputs: Tensor) -> None:
        """Add what one parameter vector makes of all examples, (n, ...)."""
        ...

    def result(self) -> Prediction: ...


@torch.inference_mode()
def average(model: FlatModel, draws: Iterable[Tensor], x: Tensor, batch_size: int, mixture: Mixture) -> Prediction:
    """Mix the predictions of parameter vectors (P,), all alike. The model is left in the last of them."""
    model.module.eval()
    for params in draws:
        model.load(params)
        mixture.add(torch.cat([model(part) for part in torch.split(x, batch_size)]))
    return mixture.result()
