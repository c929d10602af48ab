"""Any set of runs side by side: what differs between them, means over seeds, and which differences are more than luck.

Groups of runs that differ in the seed alone are the rows. Groups that differ only in what is compared (`method` and
`aggregator`, unless asked otherwise) form a block; within a block runs are paired by seed, because the same seed gives
the same split, initial model and cohorts.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy import stats

from bfl_bench.evaluation import columns
from bfl_bench.report.runs import Config, Group, Run, Stats, group_over_seeds, summarise, without

Spread = Literal["std", "se", "bootstrap"]
SPREADS = {"std": "standard deviation", "se": "standard error", "bootstrap": "95 % bootstrap interval of the mean"}
SIGNIFICANT = 0.05
_FIRST = ("dataset.name", "partition.name", "partition.alpha", "num_clients", "model.name", "method.name")


def distinguishing_keys(configs: Sequence[Config], first: Iterable[str] = ()) -> list[str]:
    """The fewest keys, tried in a fixed order, whose values tell the configs apart."""
    ordered = [*first, *_FIRST, "aggregator.name", *sorted({key for config in configs for key in config})]
    kept: list[str] = []
    classes = [list(configs)]
    for key in dict.fromkeys(ordered):
        finer = [
            list(members)
            for group in classes
            for _, members in itertools.groupby(sorted(group, key=_text_of(key)), key=_text_of(key))
        ]
        if len(finer) > len(classes) or key in first:
            kept.append(key)
            classes = finer
    return kept


def _text_of(key: str) -> Callable[[Config], str]:
    return lambda config: json.dumps(config.get(key), sort_keys=True)


@dataclass
class Row:
    """One group of runs in the comparison."""

    label: dict[str, object]  # values of the distinguishing keys
    block: str  # what it shares with those it is compared with
    group: Group | None  # None: a combination that others suggest and nobody ran
    num_diverged: int = 0
    best_in: set[str] = field(default_factory=set)  # metrics in which it beats all others of its block

    def values(self, metric: str) -> dict[int, float]:
        """By seed; a diverged run has none."""
        runs: Sequence[Run] = [] if self.group is None else [run for run in self.group.runs if not run.diverged]
        found = {run.config["seed"]: _value(run, metric) for run in runs}
        return {seed: value for seed, value in found.items() if value is not None}

    def stats(self, metric: str) -> Stats | None:
        values = self.values(metric)
        return summarise(list(values.values())) if values else None


def _value(run: Run, metric: str) -> float | None:
    value = run.seconds_per_round() if metric == "seconds_per_round" else run.final.get(metric)
    return None if value is None else float(value)


def make_rows(
    runs: Iterable[Run], by: Sequence[str] = (), compared: Sequence[str] = ("method", "aggregator")
) -> list[Row]:
    groups = group_over_seeds(runs)
    keys = distinguishing_keys([group.config for group in groups], by)
    rows: list[Row] = []
    for group in groups:
        label = {key: group.config.get(key) for key in keys}
        shared = json.dumps(without(group.config, compared), sort_keys=True)
        rows.append(Row(label, shared, group, sum(run.diverged for run in group.runs)))
    return sorted(rows + _missing(rows, compared), key=lambda row: [str(value) for value in row.label.values()])


def _missing(rows: Sequence[Row], compared: Sequence[str]) -> list[Row]:
    """What is compared in one block and absent from another that compares at least two."""

    def is_compared(key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in compared)

    def part(label: dict[str, object], chosen: bool) -> str:
        return json.dumps({key: value for key, value in label.items() if is_compared(key) == chosen}, sort_keys=True)

    sizes = Counter(row.block for row in rows)
    blocks = {row.block: part(row.label, False) for row in rows if sizes[row.block] > 1}
    things = {part(row.label, True) for row in rows}
    there = {(row.block, part(row.label, True)) for row in rows}
    absent = [(block, thing) for block in blocks for thing in sorted(things) if (block, thing) not in there]
    order = list(rows[0].label) if rows else []
    found: list[Row] = []
    for block, thing in absent:
        values = json.loads(blocks[block]) | json.loads(thing)
        found.append(Row({key: values.get(key) for key in order}, block, None))
    return found


def paired_p_value(ours: dict[int, float], theirs: dict[int, float], test: Literal["t", "wilcoxon"]) -> float | None:
    """Two-sided, over the seeds that both have; None where there are fewer than two, or nothing differs."""
    seeds = sorted(ours.keys() & theirs.keys())
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    if len(seeds) < 2 or not any(differences):
        return None
    if test == "wilcoxon":
        return float(stats.wilcoxon(differences).pvalue)
    if np.ptp(differences) == 0:
        return 0.0  # the same difference for every seed
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: each p-value times the number of those not smaller, made monotone."""
    order = np.argsort(p_values)
    corrected, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = running
    return corrected


def mark_best(rows: Sequence[Row], metrics: Iterable[str], test: Literal["t", "wilcoxon"]) -> None:
    """In each block: the row with the best mean, where it beats every other by a corrected paired test.

    A metric that has no better direction has no best row.
    """
    for metric in metrics:
        if (direction := columns.direction(metric)) is None:
            continue
        sign = 1 if direction == "up" else -1
        for block in {row.block for row in rows}:
            there = [(row, found) for row in rows if row.block == block and (found := row.stats(metric))]
            if len(there) < 2:
                continue
            best = max(there, key=lambda pair: sign * pair[1].mean)[0]
            p_values = [
                paired_p_value(best.values(metric), row.values(metric), test) for row, _ in there if row is not best
            ]
            known = [p for p in p_values if p is not None]
            if len(known) == len(p_values) and max(holm(known)) < SIGNIFICANT:
                best.best_in.add(metric)


def bootstrap_interval(values: Sequence[float], num: int = 10_000) -> tuple[float, float]:
    """Percentiles of resampled means, with a fixed seed."""
    draws = np.random.default_rng(0).choice(np.asarray(values), (num, len(values))).mean(axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


def text_of(row: Row, metric: str, spread: Spread) -> str:
    found = row.stats(metric)
    if found is None:
        return "-"
    if found.num == 1:
        return f"{found.mean:.4f}"
    if spread == "bootstrap":
        low, high = bootstrap_interval(list(row.values(metric).values()))
        return f"{found.mean:.4f} [{low:.4f}, {high:.4f}]"
    return f"{found.mean:.4f} +- {found.std if spread == 'std' else found.standard_error:.4f}"


@dataclass(frozen=True)
class Ranks:
    """Friedman's test over blocks, and the difference of mean ranks that Nemenyi's test asks for."""

    mean_ranks: dict[str, float]
    p_value: float
    critical_difference: float
    num_blocks: int


def rank(rows: Sequence[Row], metric: str, compared: Sequence[str] = ("method", "aggregator")) -> Ranks | None:
    """Of what is compared, over the blocks in which all of it was run; None below three of each.

    Rank 1 is the best; a metric that has no better direction has no ranks.
    """
    if (direction := columns.direction(metric)) is None:
        return None
    names = {id(row): name_of(row, compared) for row in rows}
    everything = sorted(set(names.values()))
    sign = -1 if direction == "up" else 1
    table: list[list[float]] = []
    for block in sorted({row.block for row in rows}):
        means = {names[id(r)]: found.mean for r in rows if r.block == block and (found := r.stats(metric))}
        if set(means) == set(everything):
            table.append([sign * means[name] for name in everything])
    if len(table) < 3 or len(everything) < 3:
        return None
    ranks = stats.rankdata(np.asarray(table), axis=1).mean(axis=0)
    p_value = float(stats.friedmanchisquare(*np.asarray(table).T).pvalue)
    num = len(everything)
    studentized = float(stats.studentized_range.ppf(1 - SIGNIFICANT, num, np.inf)) / math.sqrt(2)
    difference = studentized * math.sqrt(num * (num + 1) / (6 * len(table)))
    return Ranks(dict(zip(everything, map(float, ranks), strict=True)), p_value, difference, len(table))


def name_of(row: Row, compared: Sequence[str]) -> str:
    """What of the row is compared."""
    values = [f"{value}" for key, value in row.label.items() if key.split(".")[0] in compared and value is not None]
    return " ".join(values)
