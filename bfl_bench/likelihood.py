"""What the labels are, given a network's outputs: the one place that knows losses, decisions and scores.

A dataset brings its likelihood. Methods train on `loss`, the engines mix and score predictions with it.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch.nn.functional as F
from torch import Tensor

from bfl_bench.evaluation import metrics
from bfl_bench.evaluation.prediction import Mixture, Prediction, Scores

Reduction = Literal["mean", "sum"]


class Likelihood(Protocol):
    @property
    def num_outputs(self) -> int:
        """What a network has to put out for an example, or for a position of a sequence."""
        ...

    def loss(self, outputs: Tensor, labels: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Compute the negative log-likelihood, in nats: its mean over examples and positions, or their sum."""
        ...

    def measure(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Sum up over examples and positions what training reports beside the loss, by name of its column."""
        ...

    def mixture(self) -> Mixture:
        """Begin a prediction without members."""
        ...

    def score(self, prediction: Prediction, labels: Tensor, ece_bins: int, nll_epsilon: float) -> Scores: ...


@dataclass(frozen=True)
class Categorical:
    """Labels are classes 0 to C - 1, outputs (n, C, ...) their logits.

    Labels are (n, ...) of whole numbers, or probabilities (n, C, ...) where a network learns from another. A method may
    give its networks further outputs, such as one for "none of these": predictions are then given that it is none.
    """

    num_classes: int

    @property
    def num_outputs(self) -> int:
        return self.num_classes

    def loss(self, outputs: Tensor, labels: Tensor, reduction: Reduction = "mean") -> Tensor:
        return F.cross_entropy(outputs, labels, reduction=reduction)

    def decide(self, outputs: Tensor) -> Tensor:
        """Return the most probable class of each example, (n, ...)."""
        return outputs.argmax(1)

    def measure(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"train_acc": (self.decide(outputs) == labels).sum()}

    def mixture(self) -> "CategoricalMixture":
        return CategoricalMixture(self.num_classes)

    def score(self, prediction: Prediction, labels: Tensor, ece_bins: int, nll_epsilon: float = 0.0) -> Scores:
        """Score predictions (n, C) for labels (n,), or (n, C, positions) for (n, positions): each position counts."""
        log_probabilities = prediction.log_probabilities
        if log_probabilities.dim() > 2:
            log_probabilities, labels = log_probabilities.movedim(1, -1).flatten(0, -2), labels.flatten()
        bins = metrics.calibration_bins(log_probabilities, labels, ece_bins)
        values = {
            "accuracy": metrics.accuracy(log_probabilities, labels),
            "ece": metrics.calibration_error(bins),
            "nll": metrics.negative_log_likelihood(log_probabilities, labels, nll_epsilon),
            "brier": metrics.brier_score(log_probabilities, labels),
        }
        return Scores(values, tuple(bins))


class CategoricalMixture:
    """The mean of the members' probabilities."""

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self._total: Tensor | None = None  # log of the sum of probabilities
        self._first: Tensor | None = None
        self._entropies: Tensor | None = None  # their sum; there is none to compute for a single member
        self._num = 0

    def add(self, outputs: Tensor) -> None:
        log_probabilities = outputs.log_softmax(1)
        self._num += 1
        if self._total is None:
            self._total = self._first = log_probabilities
            return
        if self._entropies is None:
            assert self._first is not None
            self._entropies, self._first = self._entropy(self._first), None
        self._entropies = self._entropies + self._entropy(log_probabilities)
        self._total = self._total.logaddexp(log_probabilities)

    def result(self) -> Prediction:
        if self._total is None:
            raise ValueError("a prediction needs at least one draw of the parameters")
        entropy = None if self._entropies is None else self._entropies / self._num
        if self._has_further_outputs(self._total):
            return Prediction(self._total[:, : self._num_classes].log_softmax(1), entropy)
        return Prediction(self._total - math.log(self._num), entropy)

    def _entropy(self, log_probabilities: Tensor) -> Tensor:
        """Compute the entropies (n, ...) of one member."""
        if self._has_further_outputs(log_probabilities):
            log_probabilities = log_probabilities[:, : self._num_classes].log_softmax(1)
        probabilities = log_probabilities.exp()
        terms = (probabilities * log_probabilities).masked_fill(probabilities == 0, 0.0)  # 0 log 0 is 0
        return -terms.sum(1)

    def _has_further_outputs(self, log_probabilities: Tensor) -> bool:
        return log_probabilities.shape[1] > self._num_classes
