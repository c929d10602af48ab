"""Split conformal prediction: sets of classes that hold the label of a new example with probability 1 - alpha.

The score of an example is 1 - p(label). A set holds the classes whose score is at most the quantile of the scores on
examples kept apart for it, of level ceil((n + 1)(1 - alpha)) / n. Scores are compared by the log probability, which
gives the same order and also separates probabilities that 1 - p rounds to 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def conformal_threshold(log_probabilities: Tensor, labels: Tensor, alpha: float) -> float:
    """Find the log probability from which on a class belongs to the set, from predictions (n, C) and labels (n,).

    With q the quantile of the scores it is log(1 - q). Where n < 1 / alpha - 1 the level is above 1: no quantile of so
    few examples promises the coverage, the threshold is -inf, and every set holds all classes.
    """
    n = len(labels)
    rank = max(math.ceil(round((n + 1) * (1 - alpha), 9)), 1)  # rounded: 100 x (1 - 0.43) is a little more than 57
    if rank > n:
        return -math.inf
    of_labels = log_probabilities.double().gather(1, labels[:, None])[:, 0]
    threshold = of_labels.sort(descending=True).values[rank - 1]
    return threshold.masked_fill(of_labels.isnan().any(), math.nan).item()


@dataclass(frozen=True)
class Coverage:
    """Sets of `count` examples: the share that holds the label, and their mean size; NaN where there is no example."""

    count: int
    coverage: float
    set_size: float


def conformal_coverage(log_probabilities: Tensor, labels: Tensor, threshold: float) -> Coverage:
    """Measure the sets of a threshold on other examples than those that it was found on."""
    (overall,) = coverage_of_clients(log_probabilities, labels, threshold, torch.zeros_like(labels), 1)
    return overall


def coverage_of_clients(
    log_probabilities: Tensor, labels: Tensor, threshold: float, clients: Tensor, num_clients: int
) -> list[Coverage]:
    """Measure the sets for each client by itself; `clients` (n,) is the number of each example's client, from 0."""
    sets = log_probabilities.double() >= threshold
    covered = sets.gather(1, labels[:, None])[:, 0]
    values = torch.stack([torch.ones_like(labels), covered.long(), sets.sum(1)])
    sums = values.new_zeros(3, num_clients).index_add(1, clients, values)
    return [
        Coverage(count, hits / count, size / count) if count else Coverage(0, math.nan, math.nan)
        for count, hits, size in zip(*sums.tolist(), strict=True)
    ]


def worst_covered(coverages: Sequence[Coverage]) -> int:
    """Return the number of the client with the lowest coverage, the first of several, among those with examples."""
    return min((k for k, client in enumerate(coverages) if client.count), key=lambda k: coverages[k].coverage)
