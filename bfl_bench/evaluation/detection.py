"""Detection of out-of-distribution examples: scores of single examples, and how well a score tells two sets apart.

A score is higher where the example looks more foreign. Examples from outside the distribution are the positive ones in
every metric. `inside` (n,) and `outside` (m,) are scores of at least one example each. Everything is computed in
float64; a NaN among the scores makes the metric NaN, because as a number it would count as the highest score.
"""

import math

import torch
from torch import Tensor


def lack_of_confidence(log_probabilities: Tensor) -> Tensor:
    """Score each example of (n, C) by 1 - max p."""
    return -torch.expm1(log_probabilities.double().max(1).values)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Score each example of (n, C) by the entropy of its predictive distribution, in nats."""
    terms: Tensor = torch.special.entr(log_probabilities.double().exp())
    return terms.sum(1)


def mutual_information(log_probabilities: Tensor, expected_entropy: Tensor) -> Tensor:
    """Score each example by the entropy of the mean less the members' mean entropy (n,), in nats.

    It is the information that the label would give about the parameters. Rounding below 0 is cut off.
    """
    return (entropy(log_probabilities) - expected_entropy.double()).clamp(min=0)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Compute the area under the ROC curve: how often a foreign example scores higher, ties counting half."""
    inside, outside = inside.double().sort().values, outside.double()
    lower, not_higher = torch.searchsorted(inside, outside), torch.searchsorted(inside, outside, right=True)
    wins = (lower + not_higher).double().sum() / 2
    return _unless_nan(wins, inside, outside).item() / (len(inside) * len(outside))


def average_precision(inside: Tensor, outside: Tensor) -> float:
    """Compute the area under the precision-recall curve (AUPR) as the average precision, not interpolated.

    It is the mean over the foreign examples of the precision at the threshold of their own score.
    """
    inside, outside = inside.double().sort().values, outside.double().sort().values
    found = len(outside) - torch.searchsorted(outside, outside)
    false_alarms = len(inside) - torch.searchsorted(inside, outside)
    precision = found.double() / (found + false_alarms)
    return _unless_nan(precision.mean(), inside, outside).item()


def false_positive_rate_at_95(inside: Tensor, outside: Tensor) -> float:
    """Compute the share of `inside` that is reported at the highest threshold that finds 95 % of `outside`.

    What scores the threshold itself is reported.
    """
    inside, outside = inside.double(), outside.double()
    needed = -(-95 * len(outside) // 100)  # rounded up
    threshold = outside.sort(descending=True).values[needed - 1]
    return _unless_nan((inside >= threshold).double().mean(), inside, outside).item()


def _unless_nan(value: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    return value.masked_fill(inside.isnan().any() | outside.isnan().any(), math.nan)
