"""What the labels are, given a network's outputs: the one place that knows losses, decisions, predictions and scores.

A dataset brings its likelihood. Methods train on `loss`, and `average` mixes what several parameter vectors predict.
The metrics are pure functions of `log_probabilities` (n, C) and `labels` (n,), computed in float64; docs/metrics.md
says when and on what they are taken.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bfl_bench.models.flat import FlatModel

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Bin:
    """Predictions of one range of confidence: how many, how confident on average, how often right."""

    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Prediction:
    """Predictive distributions of n examples, of sequences at every position."""

    log_probabilities: Tensor  # (n, C, ...)
    expected_entropy: Tensor | None  # (n, ...) mean over the members of their entropies, in nats; None: one member

    def __getitem__(self, examples: Tensor) -> "Prediction":
        entropy = self.expected_entropy
        return Prediction(self.log_probabilities[examples], None if entropy is None else entropy[examples])


@dataclass(frozen=True)
class NumericPrediction:
    """Predictive distributions of numbers: a mixture of S Gaussians for each of n examples, all members alike."""

    means: Tensor  # (S, n)
    variances: Tensor  # (S, n)

    def __getitem__(self, examples: Tensor) -> "NumericPrediction":
        return NumericPrediction(self.means[:, examples], self.variances[:, examples])


AnyPrediction = Prediction | NumericPrediction


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

    def result(self) -> AnyPrediction: ...


@torch.inference_mode()
def average(model: FlatModel, draws: Iterable[Tensor], x: Tensor, batch_size: int, mixture: Mixture) -> AnyPrediction:
    """Mix the predictions of parameter vectors (P,), all alike. The model is left in the last of them.

    What the layers before the first Gaussian one put out is computed once, as long as their parameters are the same.
    """
    model.module.eval()
    features: list[Tensor] = []
    for params in draws:
        same = bool(features) and model.has_prefix_of(params)
        model.load(params)
        if not same:
            parts = torch.split(x, batch_size)
            features = list(parts) if model.prefix is None else [model.prefix(part) for part in parts]
        mixture.add(torch.cat([model.suffix(part) for part in features]))
    return mixture.result()


class Likelihood(Protocol):
    @property
    def num_outputs(self) -> int:
        """What a network has to put out for an example, or for a position of a sequence."""
        ...

    def loss(self, outputs: Tensor, labels: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Compute the negative log-likelihood, in nats: its mean over examples and positions, or their sum."""
        ...

    def slopes(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of every label (n, ...) by itself, (n, ...), and its gradient at the outputs (n, C, ...)."""
        ...

    def measure(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Sum up over examples and positions what training reports beside the loss, by name of its column."""
        ...

    def mixture(self) -> Mixture:
        """Begin a prediction without members."""
        ...

    def score(self, prediction: AnyPrediction, labels: Tensor, ece_bins: int, nll_epsilon: float) -> Scores: ...

    def linearise(self, outputs: Tensor, variances: Tensor) -> AnyPrediction:
        """Predict where the outputs (n, C) are Gaussian around these values, with these variances (n, C)."""
        ...

    def expected_labels(self, outputs: Tensor) -> tuple[Tensor, float]:
        """Make labels whose squared gradients, averaged and multiplied by the number, are those of predicted labels.

        Each example has k labels in a row, (n k, ...).
        """
        ...


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

    def slopes(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        log_probabilities, labels = outputs.log_softmax(1), labels.unsqueeze(1)
        losses = -log_probabilities.gather(1, labels).squeeze(1)
        minus = log_probabilities.new_full((), -1.0).expand_as(labels)
        return losses, log_probabilities.exp_().scatter_add_(1, labels, minus)

    def generalised_loss(self, outputs: Tensor, labels: Tensor, power: float) -> Tensor:
        """Compute the mean generalised cross-entropy (1 - p(label)^power) / power: 1 - p(label) at 1, the NLL near 0.

        An example that the network is sure to be of another class has hardly any gradient (Zhang and Sabuncu 2018).
        """
        losses = F.cross_entropy(outputs, labels, reduction="none")
        return -torch.expm1(-power * losses).mean() / power

    def decide(self, outputs: Tensor) -> Tensor:
        """Return the most probable class of each example, (n, ...)."""
        return outputs.argmax(1)

    def measure(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"train_acc": (self.decide(outputs) == labels).sum()}

    def mixture(self) -> "CategoricalMixture":
        return CategoricalMixture(self.num_classes)

    def score(self, prediction: AnyPrediction, labels: Tensor, ece_bins: int, nll_epsilon: float = 0.0) -> Scores:
        """Score predictions (n, C) for labels (n,), or (n, C, positions) for (n, positions): each position counts."""
        assert isinstance(prediction, Prediction)
        log_probabilities, labels = flatten_positions(prediction.log_probabilities, labels)
        bins = calibration_bins(log_probabilities, labels, ece_bins)
        values = {
            "accuracy": accuracy(log_probabilities, labels),
            "ece": calibration_error(bins),
            "nll": negative_log_likelihood(log_probabilities, labels, nll_epsilon),
            "brier": brier_score(log_probabilities, labels),
        }
        return Scores(values, tuple(bins))

    def linearise(self, outputs: Tensor, variances: Tensor) -> Prediction:
        """Take MacKay's approximation, softmax(f / sqrt(1 + pi/8 variance)), with each class's variance alone."""
        return Prediction((outputs / (1 + math.pi / 8 * variances).sqrt()).log_softmax(1), None)

    def expected_labels(self, outputs: Tensor) -> tuple[Tensor, float]:
        """Make one label for each class: with the root of its probability, the squared gradient is that for the class
        times its probability."""
        return outputs.softmax(1).sqrt().diag_embed().flatten(0, 1), outputs.shape[1]


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


def flatten_positions(log_probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Make every position of sequences an example: (n, C, positions) and (n, positions) to (m, C) and (m,)."""
    if log_probabilities.dim() == 2:
        return log_probabilities, labels
    return log_probabilities.movedim(1, -1).flatten(0, -2), labels.flatten()


def accuracy(log_probabilities: Tensor, labels: Tensor) -> float:
    return (log_probabilities.argmax(1) == labels).double().mean().item()


def negative_log_likelihood(log_probabilities: Tensor, labels: Tensor, epsilon: float = 0.0) -> float:
    """Mean of -log(p(label) + epsilon), in nats."""
    log_likelihood = log_probabilities.double().gather(1, labels[:, None])
    if epsilon:
        log_likelihood = (log_likelihood.exp() + epsilon).log()
    return -log_likelihood.mean().item()


def brier_score(log_probabilities: Tensor, labels: Tensor) -> float:
    """Mean over examples of the squared distance between the probabilities and the one-hot label (0 to 2)."""
    difference = log_probabilities.double().exp()
    difference[torch.arange(len(labels), device=labels.device), labels] -= 1
    return difference.square().sum(1).mean().item()


def calibration_bins(log_probabilities: Tensor, labels: Tensor, num_bins: int) -> list[Bin]:
    """The bins of a reliability diagram: `num_bins` of equal width, the m-th being (m-1, m] / M; zeros where empty.

    A confidence of exactly 1 lies in the last bin, one of exactly 0 in the first.
    """
    confidence, prediction = log_probabilities.double().exp().max(1)
    bins = (confidence * num_bins).ceil().long().clamp(1, num_bins) - 1
    values = torch.stack([torch.ones_like(confidence), confidence, (prediction == labels).double()])
    sums = torch.zeros(3, num_bins, dtype=torch.float64, device=values.device).index_add(1, bins, values)
    counts, confidences, rights = sums.tolist()
    return [
        Bin(int(count), confidence / max(count, 1), right / max(count, 1))
        for count, confidence, right in zip(counts, confidences, rights, strict=True)
    ]


def expected_calibration_error(log_probabilities: Tensor, labels: Tensor, num_bins: int) -> float:
    return calibration_error(calibration_bins(log_probabilities, labels, num_bins))


def calibration_error(bins: Sequence[Bin]) -> float:
    """sum_m n_m/n |accuracy_m - confidence_m|."""
    total = sum(bin_.count for bin_ in bins)
    return math.fsum(bin_.count * abs(bin_.accuracy - bin_.confidence) for bin_ in bins) / total
