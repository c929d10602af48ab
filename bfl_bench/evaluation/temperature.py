"""Temperature scaling of predictive distributions: softmax(log p / T) with one number T > 0.

`log_probabilities` is (n, C), `labels` is (n,). Everything is computed in float64. T < 1 sharpens a model that was
underconfident, T > 1 flattens one that was overconfident.
"""

import math

import torch
from torch import Tensor

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0
STEPS = 30  # of bisection: log T to 1e-8. The NLL is flat at its minimum, so it is exact to rounding
FLAT = 1e-12  # nats per unit of 1/T
LOG_TINY = math.log(torch.finfo(torch.float64).tiny)  # of the smallest normal number, 2e-308


def apply_temperature(log_probabilities: Tensor, temperature: float) -> Tensor:
    """Return log softmax(log p / T), float64. A probability of 0 counts as 2e-308, which flattening can raise."""
    return (_finite(log_probabilities) / temperature).log_softmax(1)


def fit_temperature(log_probabilities: Tensor, labels: Tensor) -> float:
    """Find the T between 0.01 and 100 that minimises the negative log-likelihood of `apply_temperature`.

    The NLL is convex in 1/T, so its only minimum is found by bisection on log T. At the ends of the bracket:

    - where every prediction is right, sharper is always better: 0.01;
    - where labels get on average no higher log probability than classes drawn at random, flatter is: 100;
    - where the slope at T = 1 is below 1e-12 nats per unit of 1/T, as with uniform predictions, a single class or right
      predictions of confidence 1: 1. No T of the bracket would lower the NLL by more than 1e-10.

    NaN among the log probabilities gives NaN.
    """
    logits = _finite(log_probabilities)
    of_labels = logits.gather(1, labels[:, None])[:, 0]

    def slope(temperature: Tensor) -> Tensor:
        """Differentiate the NLL by 1/T: positive where a higher temperature is better."""
        return (((logits / temperature).softmax(1) * logits).sum(1) - of_labels).mean()

    lowest, one, highest = torch.tensor(
        [LOWEST_TEMPERATURE, 1.0, HIGHEST_TEMPERATURE], dtype=torch.float64, device=logits.device
    )
    low, high = lowest.log(), highest.log()
    for _ in range(STEPS):
        middle = (low + high) / 2
        higher = slope(middle.exp()) > 0
        low, high = torch.where(higher, middle, low), torch.where(higher, high, middle)
    temperature = ((low + high) / 2).exp()
    temperature = torch.where(slope(lowest) <= 0, lowest, temperature)
    temperature = torch.where(slope(highest) >= 0, highest, temperature)
    slope_at_one = slope(one)
    temperature = torch.where(slope_at_one.abs() < FLAT, one, temperature)
    return temperature.masked_fill(slope_at_one.isnan(), math.nan).item()


def _finite(log_probabilities: Tensor) -> Tensor:
    return log_probabilities.double().nan_to_num(nan=math.nan, neginf=LOG_TINY)
