"""Selective prediction: how few errors remain if only the most confident predictions are kept.

`log_probabilities` is (n, C), `labels` is (n,). Everything is computed in float64. Confidence is the largest
probability. Where several examples have the same, each value is the expectation over their random orders, in closed
form: it does not depend on the order of the examples.
"""

import math

import torch
from torch import Tensor

from bfl_bench.evaluation.ranking import sort_with_ties


def risk_coverage_curve(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the share of errors among the k most confident examples, for k = 1, ..., n."""
    confidence, prediction = log_probabilities.double().max(1)
    errors = sort_with_ties(-confidence, (prediction != labels).double())
    return errors.cumsum(0) / torch.arange(1, len(errors) + 1, device=errors.device)


def area_under_risk_coverage(log_probabilities: Tensor, labels: Tensor) -> float:
    """Compute the AURC: the mean of the risk over the coverages 1/n, 2/n, ..., 1."""
    return risk_coverage_curve(log_probabilities, labels).mean().item()


def excess_area_under_risk_coverage(log_probabilities: Tensor, labels: Tensor) -> float:
    """Compute the E-AURC: the AURC less that of the same predictions in the best order, all right ones first.

    The best order's AURC is exact, not its limit r + (1 - r) log(1 - r) for large n, so the excess is never negative.
    """
    curve = risk_coverage_curve(log_probabilities, labels)
    n = len(curve)
    number = torch.arange(1, n + 1, device=curve.device)
    num_errors = (curve[-1] * n).round()
    best = (number - n + num_errors).clamp(min=0) / number
    return (curve - best).mean().item()


def accuracy_at_coverage(log_probabilities: Tensor, labels: Tensor, coverage: float) -> float:
    """Compute the accuracy on the share `coverage` of most confident examples, their number rounded up."""
    exact = round(coverage * len(labels), 9)  # 0.07 x 100 is a little more than 7
    return 1 - risk_coverage_curve(log_probabilities, labels)[max(math.ceil(exact), 1) - 1].item()
