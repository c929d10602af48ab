"""Apply a rule to what K clients sent: in float64, a block of columns at a time, where possible a few clients too."""

import inspect
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bfl_bench.aggregators import rules
from bfl_bench.aggregators.rules import Gaussian, Rows

Rule = Callable[..., Gaussian]
"""(means (K, D), variances (K, D), weights (K,)) -> (mean (D,), variance (D,)); a random one takes `generator` too."""

_Client = tuple[Tensor, Tensor, float]
"""Mean, spread and weight."""

_BY_ROWS = {rules.eaa, rules.gaa, rules.aalv, rules.moments, rules.rklb, rules.cf, rules.wb}
_ASSOCIATIVE = {rules.eaa, rules.gaa, rules.aalv, rules.moments, rules.rklb, rules.wb}
_TOGETHER = 32  # clients of an associative rule that are combined in one go
_ROW = 1 << 18  # columns at a time of a rule that goes over the clients one by one: two megabytes in float64
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


class Combination:
    """What `combine` gives, from clients that come one by one.

    Under an associative rule clients that have been combined stand as one, with the sum of their weights: no more than
    `_TOGETHER` are held, however many come. Any other rule gets them all at the end.
    """

    def __init__(self, rule: Rule, rng: torch.Generator, to_variance: Callable[[Tensor], Tensor] | None = None) -> None:
        self._rule, self._rng, self._to_variance = rule, rng, to_variance
        self._waiting: list[_Client] = []
        self._combined: _Client | None = None
        options = getattr(rule, "keywords", {})  # every one of the released codes' makes the order or the number matter
        self._associative = getattr(rule, "func", rule) in _ASSOCIATIVE and not any(options.values())

    def add(self, mean: Tensor, spread: Tensor, weight: float) -> None:
        """The vectors must stay as they are until the result."""
        self._waiting.append((mean, spread, weight))
        if self._associative and len(self._waiting) == _TOGETHER:
            self._combine_waiting()

    def result(self) -> Gaussian:
        if self._waiting:
            self._combine_waiting()
        if self._combined is None:
            raise ValueError("no clients to combine")
        return self._combined[:2]

    def _combine_waiting(self) -> None:
        new = self._as_one(self._waiting, self._to_variance)
        self._combined = new if self._combined is None else self._as_one([self._combined, new], None)
        self._waiting = []

    def _as_one(self, clients: list[_Client], to_variance: Callable[[Tensor], Tensor] | None) -> _Client:
        means, spreads, weights = zip(*clients, strict=True)
        return (*combine(self._rule, means, spreads, weights, self._rng, to_variance), sum(weights))


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
