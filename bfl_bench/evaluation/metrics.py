"""Metrics of predictive distributions, as pure functions. docs/metrics.md says when and on what they are taken.

`log_probabilities` is (n, C), `labels` is (n,). Everything is computed in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class Bin:
    """Predictions of one range of confidence: how many, how confident on average, how often right."""

    count: int
    confidence: float
    accuracy: float


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


def worst_tenth(accuracies: Sequence[float]) -> float:
    """Mean of the lowest tenth of the values, their number rounded up."""
    count = math.ceil(len(accuracies) / 10)
    return math.fsum(sorted(accuracies)[:count]) / count
