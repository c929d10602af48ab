"""Metrics of predictive distributions, as pure functions. docs/metrics.md says when and on what they are taken.

`log_probabilities` is (n, C), `labels` is (n,). Everything is computed in float64.
"""

import math
from collections.abc import Sequence

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


def expected_calibration_error(log_probabilities: Tensor, labels: Tensor, num_bins: int) -> float:
    """sum_m n_m/n |accuracy_m - confidence_m| over `num_bins` bins of equal width, the m-th being (m-1, m] / M.

    A confidence of exactly 1 lies in the last bin, one of exactly 0 in the first.
    """
    confidence, prediction = log_probabilities.double().exp().max(1)
    bins = (confidence * num_bins).ceil().long().clamp(1, num_bins) - 1
    gap = (prediction == labels).double() - confidence
    return torch.zeros(num_bins, dtype=torch.float64, device=gap.device).index_add(
        0, bins, gap
    ).abs().sum().item() / len(labels)


def worst_tenth(accuracies: Sequence[float]) -> float:
    """Mean of the lowest tenth of the values, their number rounded up."""
    count = math.ceil(len(accuracies) / 10)
    return math.fsum(sorted(accuracies)[:count]) / count
