"""Predictions of several clients as one: their product, their mixture, and what lies between.

All are log probabilities (n, C), at positions of sequences (n, C, ...).
"""

import math

from torch import Tensor


def product_and_mixture(clients: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise the product of what clients predict, (K, n, C), and take their mean; log probabilities (n, C)."""
    return clients.sum(0).log_softmax(1), clients.logsumexp(0) - math.log(len(clients))


def combine(product: Tensor, mixture: Tensor, beta: float) -> Tensor:
    """Compute log probabilities (n, C), proportional to product^beta mixture^(1 - beta)."""
    return (beta * product + (1 - beta) * mixture).log_softmax(1)


def fit_beta(product: Tensor, mixture: Tensor, labels: Tensor) -> float:
    """Find the beta in [0, 1] with the lowest negative log-likelihood, which is convex in it."""
    difference = product - mixture
    observed = difference.gather(1, labels[:, None]).mean()

    def slope(beta: float) -> float:
        return float((combine(product, mixture, beta).exp() * difference).sum(1).mean() - observed)

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return high if slope(1.0) > 0 else 1.0
