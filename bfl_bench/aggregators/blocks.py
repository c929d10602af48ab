"""Apply a rule to what K clients sent: in float64, one block of columns after the other."""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bfl_bench.aggregators.rules import Gaussian

Rule = Callable[..., Gaussian]
"""(means (K, D), variances (K, D), weights (K,)) -> (mean (D,), variance (D,)); a random one takes `generator` too."""

_BLOCK = 1 << 14  # columns: K times as many numbers in float64 are in use at a time, beside the inputs


def combine(
    rule: Rule,
    means: Sequence[Tensor],
    spreads: Sequence[Tensor],
    weights: Sequence[float],
    rng: torch.Generator,
    to_variance: Callable[[Tensor], Tensor] | None = None,
) -> Gaussian:
    """Mean and variance, (D,) each in float64, from K vectors each; weights are normalised here.

    `to_variance` makes variances of what the clients sent, log variances say, block by block too; None: they are such.
    Columns are independent under every rule, so that blocks change nothing but the draws of a random rule and, within
    its tolerance, where an iterative one stops.
    """
    normalised = torch.tensor(weights, dtype=torch.float64, device=means[0].device)
    normalised /= normalised.sum()
    options = {"generator": rng} if "generator" in inspect.signature(rule).parameters else {}
    results = [
        rule(_stack(means, start), _stack(spreads, start, to_variance), normalised, **options)
        for start in range(0, len(means[0]), _BLOCK)
    ]
    if not results:
        return means[0].double(), spreads[0].double()  # no columns at all
    return torch.cat([mean for mean, _ in results]), torch.cat([variance for _, variance in results])


def _stack(vectors: Sequence[Tensor], start: int, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    block = torch.stack([vector[start : start + _BLOCK] for vector in vectors]).double()
    return block if change is None else change(block)
