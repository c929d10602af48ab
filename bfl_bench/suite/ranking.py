"""What a suite's rows say together: who is tied with whom, what a temperature changes, what is worth its cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from bfl_bench.evaluation import columns
from bfl_bench.report.comparison import SIGNIFICANT, Ranks, Row, holm, paired_p_value


def find_ties(ranks: Ranks) -> list[list[str]]:
    """List the longest runs of neighbouring ranks that Nemenyi's test cannot tell apart, two members or more."""
    ordered = sorted(ranks.mean_ranks, key=lambda name: (ranks.mean_ranks[name], name))
    found: list[list[str]] = []
    for start, first in enumerate(ordered):
        limit = ranks.mean_ranks[first] + ranks.critical_difference
        group = [name for name in ordered[start:] if ranks.mean_ranks[name] <= limit]
        if len(group) > 1 and not any(set(group) <= set(other) for other in found):
            found.append(group)
    return found


@dataclass(frozen=True, kw_only=True)
class Survival:
    """How the order of methods by a metric compares with their order by the same metric after a temperature."""

    setting: str
    correlation: float  # Kendall's, of the mean values
    num_pairs: int  # of methods that a paired test tells apart before
    num_kept: int  # of these, still told apart afterwards, in the same order
    num_reversed: int  # told apart afterwards in the other order


def compare_orders(rows: Sequence[Row], raw: str, calibrated: str) -> Survival | None:
    """Compare the orders in one setting; None where fewer than three rows have both metrics."""
    there = [row for row in rows if row.stats(raw) and row.stats(calibrated)]
    if len(there) < 3:
        return None
    values = {name: [row.values(name) for row in there] for name in (raw, calibrated)}
    means = {name: [math.fsum(found.values()) / len(found) for found in values[name]] for name in values}
    pairs = [(i, j) for i in range(len(there)) for j in range(i)]
    signs = {name: _tell_apart(values[name], pairs) for name in values}
    told = [pair for pair in pairs if signs[raw][pair]]
    return Survival(
        setting=there[0].setting,
        correlation=float(stats.kendalltau(means[raw], means[calibrated]).statistic),
        num_pairs=len(told),
        num_kept=sum(signs[raw][pair] == signs[calibrated][pair] for pair in told),
        num_reversed=sum(signs[raw][pair] == -signs[calibrated][pair] for pair in told),
    )


def _tell_apart(values: Sequence[dict[int, float]], pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Say of each pair which has the larger values: 1, -1, or 0 where corrected paired tests cannot tell."""
    p_values = [paired_p_value(values[i], values[j], "t") for i, j in pairs]
    corrected = iter(holm([p for p in p_values if p is not None]))
    found: dict[tuple[int, int], int] = {}
    for (i, j), p in zip(pairs, p_values, strict=True):
        significant = p is not None and next(corrected) < SIGNIFICANT
        seeds = values[i].keys() & values[j].keys()
        difference = math.fsum(values[i][seed] - values[j][seed] for seed in seeds)
        found[i, j] = (1 if difference > 0 else -1) if significant else 0
    return found


@dataclass(frozen=True, kw_only=True)
class Against:
    """A method against another in one setting: the mean difference over common seeds, and a corrected p-value."""

    setting: str
    method: str
    difference: float  # positive: better than the other
    p_value: float | None  # None: fewer than two common seeds


def compare_with(rows: Sequence[Row], metric: str, other: str) -> list[Against]:
    """Compare every method of a setting with one of them, by paired tests with Holm's correction over the methods."""
    found: list[Against] = []
    sign = 1 if columns.direction(metric) == "up" else -1
    for setting in dict.fromkeys(row.block for row in rows):
        there = {row.name: row.values(metric) for row in rows if row.block == setting and row.stats(metric)}
        if other not in there:
            continue
        rivals = [name for name in there if name != other and there[name].keys() & there[other].keys()]
        p_values = {name: paired_p_value(there[name], there[other], "t") for name in rivals}
        tested = [name for name in rivals if p_values[name] is not None]
        corrected = dict(zip(tested, holm([p for p in p_values.values() if p is not None]), strict=True))
        for name in rivals:
            seeds = there[name].keys() & there[other].keys()
            difference = math.fsum(there[name][seed] - there[other][seed] for seed in seeds) / len(seeds)
            found.append(
                Against(setting=setting, method=name, difference=sign * difference, p_value=corrected.get(name))
            )
    return found


def find_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """List the names that no other beats: lower cost, first of the pair, and better value, second, higher is better."""
    return [
        name
        for name, (cost, value) in points.items()
        if not any(
            (c <= cost and v >= value) and (c < cost or v > value) for other, (c, v) in points.items() if other != name
        )
    ]
