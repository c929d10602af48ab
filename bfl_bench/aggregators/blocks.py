"""Apply a rule to what K clients sent: in float64, one block of columns after the other."""

import inspect
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bfl_bench.aggregators import rules
from bfl_bench.aggregators.rules import Gaussian, Rows

Rule = Callable[..., Gaussian]
"""(means (K, D), variances (K, D), weights (K,)) -> (mean (D,), variance (D,)); a random one takes `generator` too."""

_BY_ROWS = {rules.eaa, rules.gaa, rules.aalv, rules.moments, rules.rklb, rules.cf, rules.wb}
_ROW = 1 << 16  # columns at a time of a rule that goes over the clients one by one: half a megabyte in float64
_MATRIX = 1 << 14  # of any other: K times as many numbers in float64 are in use beside the inputs


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
    by_rows = getattr(rule, "func", rule) in _BY_ROWS
    width = _ROW if by_rows else _MATRIX
    take: Callable[..., Rows] = _Rows if by_rows else _stack
    results = []
    for start in range(0, len(means[0]), width):
        columns = slice(start, start + width)
        results.append(rule(take(means, columns), take(spreads, columns, to_variance), normalised, **options))
    if not results:
        return means[0].double(), spreads[0].double()  # no columns at all
    return torch.cat([mean for mean, _ in results]), torch.cat([variance for _, variance in results])


class _Rows:
    """Some columns of K vectors in float64, each client's in the memory of the one before, which stays in the cache."""

    def __init__(
        self, vectors: Sequence[Tensor], columns: slice, change: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._vectors, self._columns, self._change = vectors, columns, change

    def __iter__(self) -> Iterator[Tensor]:
        row = torch.empty_like(self._vectors[0][self._columns], dtype=torch.float64)
        for vector in self._vectors:
            row.copy_(vector[self._columns])
            yield row if self._change is None else self._change(row)


def _stack(vectors: Sequence[Tensor], columns: slice, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    block = torch.stack([vector[columns] for vector in vectors]).double()
    return block if change is None else change(block)
