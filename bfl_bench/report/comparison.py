"""Any set of runs side by side: what differs between them, means over seeds, and which differences are more than luck.

Groups of runs that differ in the seed alone are the rows. Every key that differs between rows is shown, and is one of
three: a key of what is compared (`method` and `aggregator`, unless asked otherwise); a hyperparameter of which each
compared thing has one value of its own within a setting, such as a tuned learning rate; or a part of the setting. Rows
of the same setting form a block and are compared with one another; runs are paired by seed, because the same seed gives
the same split, initial model and cohorts.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from bfl_bench.evaluation import columns
from bfl_bench.report.runs import Config, Group, Run, Stats, group_over_seeds, summarise, without

Spread = Literal["std", "se", "bootstrap"]
Test = Literal["t", "wilcoxon"]
SPREADS = {"std": "standard deviation", "se": "standard error", "bootstrap": "95 % bootstrap interval of the mean"}
SIGNIFICANT = 0.05
MAX_SETTING_COLUMNS = 6  # of a table; what further keys of a setting are is then said below
MAX_MISSING = 20  # rows of combinations that nobody ran; where there are more, their number says it better

_PREDICTIVE = ("predictive", "also_predict", "also_aggregate", "prior_precision", "laplace_layers", "posterior")
HYPERPARAMETERS = (
    *("local", "server", "method", "aggregator", "model.dropout"),
    *(f"eval.{key}" for key in (*_PREDICTIVE, "keep_messages")),
)
"""What is chosen for a method, how it predicts and what else is measured of it among that.

All other keys say on what task and with what budget methods are compared.
"""

_FIRST = ("dataset.name", "partition.name", "partition.alpha", "num_clients", "model.name", "method.name")
_TOLD_BY_THE_NAME = ("_target_", "dataset.source", "dataset.mean", "dataset.std")


def differing_keys(configs: Sequence[Config], first: Iterable[str] = ()) -> list[str]:
    """List the keys whose values differ, those of `first` before others.

    A key that a part lacks because of what it is, as FedAvg has no mu, does not differ by that; nor does what a part's
    name stands for, such as its class.
    """
    ordered = [*first, *_FIRST, "aggregator.name", *sorted({key for config in configs for key in config})]
    return [key for key in dict.fromkeys(ordered) if _differs(key, configs)]


def _differs(key: str, configs: Sequence[Config]) -> bool:
    name = f"{key.rpartition('.')[0]}.name"
    by_name: dict[str, set[str]] = {}
    for config in configs:
        by_name.setdefault(_as_text(config.get(name)), set()).add(_as_text(config[key]) if key in config else "absent")
    if any(len(values) > 1 for values in by_name.values()):
        return True
    told = key.endswith(_TOLD_BY_THE_NAME)
    return not told and len({value for values in by_name.values() for value in values} - {"absent"}) > 1


def _as_text(value: object) -> str:
    """Write a value so that equal ones are equal texts: as JSON, most of them without its help."""
    if isinstance(value, str):
        return f'"{value}"'
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else repr(value)


def is_below(key: str, sections: Iterable[str]) -> bool:
    """Whether a key is one of these, or stands in a section of theirs."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What tells rows apart."""

    setting: tuple[str, ...]  # the fewest that tell settings apart
    along: tuple[str, ...]  # further keys of a setting, whose values those of `setting` decide
    compared: tuple[str, ...]
    own: tuple[str, ...]  # hyperparameters of which what is compared has one value of its own in each setting

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys that have a column; where a setting has very many keys, the fewest that tell it."""
        along = self.along if len(self.setting) + len(self.along) <= MAX_SETTING_COLUMNS else ()
        return (*self.setting, *along, *self.compared, *self.own)


def sort_keys(configs: Sequence[Config], keys: Sequence[str], compared: Sequence[str]) -> Keys:
    """Say of each key what it is.

    Hyperparameters are taken for each row's own, until two rows of the same setting and the same name show that one of
    them was varied: then it counts as what is compared, or as a part of the setting. One that has the same value in all
    rows of a setting belongs to the setting, too.
    """
    names = [key for key in keys if is_below(key, compared)]
    identifying = [key for key in names if not _may_be_own(key)] or names
    candidates = [key for key in keys if _may_be_own(key) and key not in identifying]
    fixed = [key for key in keys if key not in candidates]
    varied = [key for key in candidates if not _is_decided(key, configs, fixed)]
    task = [key for key in keys if key not in names and (key not in candidates or key in varied)]
    common = [key for key in candidates if key not in varied and _is_decided(key, configs, task)]
    own = tuple(key for key in candidates if key not in varied and key not in common)
    setting: list[str] = []
    for key in task:
        if not _is_decided(key, configs, setting):
            setting.append(key)
    return Keys(
        setting=tuple(setting),
        along=tuple(key for key in keys if key in common or (key in task and key not in setting)),
        compared=tuple(key for key in names if key not in own and key not in common),
        own=own,
    )


def _is_decided(key: str, configs: Sequence[Config], by: Sequence[str]) -> bool:
    """Whether configs that agree in some keys agree in this one as well."""
    return _num_different(configs, [*by, key]) == _num_different(configs, by)


def _num_different(configs: Sequence[Config], keys: Sequence[str]) -> int:
    return len({_as_text([config.get(key) for key in keys]) for config in configs})


def _may_be_own(key: str) -> bool:
    return is_below(key, HYPERPARAMETERS) and key not in ("method.name", "aggregator.name")


@dataclass(kw_only=True)
class Row:
    """One group of runs in the comparison."""

    label: dict[str, object]  # values of the keys that differ
    block: str  # what it shares with those it is compared with
    setting: str  # the same for people; empty where there is but one
    name: str  # what of it is compared
    group: Group | None  # None: a combination that others suggest and nobody ran
    best_in: set[str] = field(default_factory=set)  # metrics in which a test says that it beats the others of its block
    leads_in: set[str] = field(default_factory=set)  # metrics in which its mean is the best of its block
    _stats: dict[str, Stats | None] = field(default_factory=dict, repr=False, compare=False)  # as they are asked for

    @property
    def runs(self) -> Sequence[Run]:
        return () if self.group is None else self.group.runs

    @property
    def num_diverged(self) -> int:
        return sum(run.diverged for run in self.runs)

    @property
    def num_seeds(self) -> int:
        """Count the runs that did not diverge."""
        return len(self.runs) - self.num_diverged

    def values(self, metric: str) -> dict[int, float]:
        """By seed; a diverged run has none."""
        found = {run.config["seed"]: _value(run, metric) for run in self.runs if not run.diverged}
        return {seed: value for seed, value in found.items() if value is not None}

    def stats(self, metric: str) -> Stats | None:
        if metric not in self._stats:
            values = self.values(metric)
            self._stats[metric] = summarise(list(values.values())) if values else None
        return self._stats[metric]


def _value(run: Run, metric: str) -> float | None:
    value = run.seconds_per_round() if metric == "seconds_per_round" else run.final.get(metric)
    return None if value is None else float(value)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows, setting by setting, the best first; and what a reader has to know of them."""

    rows: Sequence[Row]
    keys: Keys
    shared: Mapping[str, object]  # values that all rows have
    num_missing: int  # combinations that nobody ran and that have no row, being too many
    verdicts: Sequence["Verdict"] = ()


def compare(
    runs: Iterable[Run],
    metrics: Sequence[str],
    *,
    by: Sequence[str] = (),
    compared: Sequence[str] = ("method", "aggregator"),
    test: Test = "t",
) -> Comparison:
    """Group the runs into rows, sort these, and mark the best of each setting."""
    groups = group_over_seeds(runs)
    configs = [group.config for group in groups]
    keys = sort_keys(configs, differing_keys(configs, by), compared)
    ordered = dict.fromkeys([*by, *keys.columns])
    rows = [_make_row(group, list(ordered), keys, compared) for group in groups]
    missing = _missing(rows, keys)
    listed = missing if len(missing) <= MAX_MISSING else []
    everything = sorted([*rows, *listed], key=lambda row: _place(row, keys, metrics[0]))
    shared = {key: value for key, value in configs[0].items() if all(_same(key, value, config) for config in configs)}
    verdicts = mark_best(everything, metrics, test)
    return Comparison(
        rows=everything, keys=keys, shared=shared, num_missing=len(missing) - len(listed), verdicts=verdicts
    )


def _same(key: str, value: object, config: Config) -> bool:
    return key in config and (config[key] is value or _as_text(config[key]) == _as_text(value))


def _make_row(group: Group, shown: Sequence[str], keys: Keys, compared: Sequence[str]) -> Row:
    label = {key: group.config.get(key) for key in shown}
    return Row(
        label=label,
        block=_as_text(without(group.config, [*compared, *keys.own])),
        setting=describe_values(label, keys.setting),
        name=describe_values(label, keys.compared) or str(group.config["method.name"]),
        group=group,
    )


def describe_values(label: Mapping[str, object], keys: Iterable[str], separator: str = ", ") -> str:
    """Say values in few words: names alone, others with the last part of their key; nothing for what is not there."""
    there = [key for key in keys if label[key] not in (None, "none")]
    last = Counter(key.rpartition(".")[2] for key in there)
    parts: list[str] = []
    for key in there:
        short = key.rpartition(".")[2]
        parts.append(f"{label[key]}" if short == "name" else f"{short if last[short] == 1 else key} {label[key]}")
    return separator.join(parts)


def _place(row: Row, keys: Keys, metric: str) -> list[tuple[int, float, str]]:
    """Where a row stands: settings by their values, within them the best mean first, what has none last."""
    found = row.stats(metric)
    sign = -1 if columns.direction(metric) == "up" else 1
    level = (1, 0.0, "") if found is None or math.isnan(found.mean) else (0, sign * found.mean, "")
    ranked = [] if columns.direction(metric) is None else [level]
    return [*(_in_order(row.label[key]) for key in keys.setting), (0, 0.0, row.block), *ranked, (0, 0.0, row.name)]


def _in_order(value: object) -> tuple[int, float, str]:
    """Numbers by their size, before texts."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, float(value), ""
    return 1, 0.0, str(value)


def _missing(rows: Sequence[Row], keys: Keys) -> list[Row]:
    """What is compared in one block and absent from another that compares at least two."""
    sizes = Counter(row.block for row in rows)
    blocks = {row.block: row for row in rows if sizes[row.block] > 1}
    things = {row.name: row for row in rows}
    there = {(row.block, row.name) for row in rows}
    found: list[Row] = []
    for block, one in blocks.items():
        for name, other in things.items():
            if (block, name) not in there:
                sources = dict.fromkeys([*keys.setting, *keys.along], one) | dict.fromkeys(keys.compared, other)
                label = {key: sources[key].label[key] if key in sources else None for key in one.label}
                found.append(Row(label=label, block=block, setting=one.setting, name=name, group=None))
    return found


def paired_p_value(ours: dict[int, float], theirs: dict[int, float], test: Test) -> float | None:
    """Two-sided, over the seeds that both have; None where there are fewer than two."""
    seeds = sorted(ours.keys() & theirs.keys())
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    if len(seeds) < 2:
        return None
    if not any(differences):
        return 1.0
    if test == "wilcoxon":
        from scipy.stats import wilcoxon  # not above: it takes longer to import than a table to make

        return float(wilcoxon(differences).pvalue)
    found = summarise(differences)
    if found.std == 0:
        return 0.0  # the same difference for every seed
    from scipy.special import stdtr

    # Not scipy's own test, which warns where differences are nearly the same.
    return float(2 * stdtr(len(seeds) - 1, -abs(found.mean) / found.standard_error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: each p-value times the number of those not smaller, made monotone."""
    order = np.argsort(p_values)
    corrected, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = running
    return corrected


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was tested in one block for one metric: the best of the rows that have several seeds against the others."""

    metric: str
    setting: str
    num_rows: int  # that have the metric
    num_tests: int
    num_seeds: tuple[int, ...]  # that the two rows of each test share
    untested: tuple[str, ...]  # names of rows that have one seed only
    reason: str  # why there is no test; empty where there is one


def mark_best(rows: Sequence[Row], metrics: Iterable[str], test: Test) -> list[Verdict]:
    """Mark in each block the row with the best mean, and the row that beats every other by a corrected paired test.

    A row with a single seed takes no part in tests, and leaves those of the others as they are. A metric that has no
    better direction has no best row.
    """
    verdicts: list[Verdict] = []
    for metric in metrics:
        if (direction := columns.direction(metric)) is None:
            continue
        sign = 1 if direction == "up" else -1
        for members in _by_block(rows).values():
            there = {
                id(row): (row, sign * found.mean)
                for row in members
                if (found := row.stats(metric)) and not math.isnan(found.mean)
            }
            if len(there) < 2:
                continue
            best_mean = max(mean for _, mean in there.values())
            for row, mean in there.values():
                if mean == best_mean:
                    row.leads_in.add(metric)
            verdicts.append(_test_best([row for row, _ in there.values()], metric, sign, test))
    return verdicts


def _by_block(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.block, []).append(row)
    return found


def _test_best(there: Sequence[Row], metric: str, sign: int, test: Test) -> Verdict:
    values = {id(row): row.values(metric) for row in there}
    several = [row for row in there if len(values[id(row)]) > 1]
    untested = tuple(row.name for row in there if len(values[id(row)]) == 1)
    numbers: tuple[int, ...] = ()
    reason = "one seed per row" if not several else "only one row has more than one seed" if len(several) == 1 else ""
    if not reason:
        best = max(several, key=lambda row: sign * summarise(list(values[id(row)].values())).mean)
        others = [row for row in several if row is not best]
        numbers = tuple(len(values[id(best)].keys() & values[id(row)].keys()) for row in others)
        needed = _seeds_needed(len(others)) if test == "wilcoxon" else 2
        if min(numbers) < 2:
            reason = "rows share fewer than two seeds"
        elif min(numbers) < needed:
            reason = f"a Wilcoxon test over fewer than {needed} seeds cannot tell, with Holm over {len(others)}"
        else:
            p_values = [paired_p_value(values[id(best)], values[id(row)], test) for row in others]
            if max(holm([p for p in p_values if p is not None])) < SIGNIFICANT:
                best.best_in.add(metric)
    return Verdict(
        metric=metric,
        setting=there[0].setting,
        num_rows=len(there),
        num_tests=0 if reason else len(numbers),
        num_seeds=() if reason else numbers,
        untested=() if reason else untested,
        reason=reason,
    )


def _seeds_needed(num_tests: int) -> int:
    """The fewest seeds with which Wilcoxon's smallest p-value, 2 / 2^n, times the number of tests is significant."""
    return next(n for n in range(2, 1000) if num_tests * 2.0 ** (1 - n) < SIGNIFICANT)


def bootstrap_interval(values: Sequence[float], num: int = 10_000) -> tuple[float, float]:
    """Percentiles of resampled means, with a fixed seed."""
    draws = np.random.default_rng(0).choice(np.asarray(values), (num, len(values))).mean(axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


def text_of(row: Row, metric: str, spread: Spread, percent: bool = False) -> str:
    """Say a cell's mean and spread; with `percent`, shares as percentages."""
    found = row.stats(metric)
    if found is None:
        return "-"
    factor, digits = (100, 2) if percent and is_share(metric) else (1, 4)
    mean = f"{factor * found.mean:.{digits}f}"
    if found.num == 1:
        return mean
    if spread == "bootstrap":
        low, high = bootstrap_interval(list(row.values(metric).values()))
        return f"{mean} [{factor * low:.{digits}f}, {factor * high:.{digits}f}]"
    return f"{mean} +- {factor * (found.std if spread == 'std' else found.standard_error):.{digits}f}"


def is_share(metric: str) -> bool:
    column = columns.find(metric)
    return column is not None and column.unit == "share"


@dataclass(frozen=True)
class Ranks:
    """Friedman's test over blocks, and the difference of mean ranks that Nemenyi's test asks for."""

    mean_ranks: dict[str, float]
    p_value: float
    critical_difference: float
    num_blocks: int


def rank(rows: Sequence[Row], metric: str) -> Ranks | None:
    """Of what is compared, over the blocks in which all of it was run; None below three of each.

    Rank 1 is the best; a metric that has no better direction has no ranks.
    """
    if (direction := columns.direction(metric)) is None:
        return None
    everything = sorted({row.name for row in rows})
    sign = -1 if direction == "up" else 1
    table: list[list[float]] = []
    for _, members in sorted(_by_block(rows).items()):
        means = {row.name: found.mean for row in members if (found := row.stats(metric))}
        if set(means) == set(everything):
            table.append([sign * means[name] for name in everything])
    if len(table) < 3 or len(everything) < 3:
        return None
    ranks, p_value = friedman(table)
    num = len(everything)
    difference = studentized_range(num) / math.sqrt(2) * math.sqrt(num * (num + 1) / (6 * len(table)))
    return Ranks(dict(zip(everything, map(float, ranks), strict=True)), p_value, difference, len(table))


def friedman(table: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """Rank what the columns stand for within each row, ties in the middle; the mean ranks, and Friedman's p-value."""
    from scipy.special import chdtrc

    values = np.asarray(table)
    smaller = (values[:, :, None] > values[:, None, :]).sum(axis=2)
    equal = (values[:, :, None] == values[:, None, :]).sum(axis=2)  # itself among them
    ranks = smaller + (equal + 1) / 2
    num = values.shape[1]
    centred = ranks - (num + 1) / 2
    statistic = (num - 1) * (centred.sum(axis=0) ** 2).sum() / ((centred**2).sum() or 1.0)
    return ranks.mean(axis=0).tolist(), float(chdtrc(num - 1, statistic))


def studentized_range(num: int) -> float:
    """Find what the range of so many standard normal numbers exceeds with a chance of `SIGNIFICANT`."""
    from scipy.special import ndtr

    lowest = np.linspace(-9.0, 9.0, 1801)
    density = np.exp(-(lowest**2) / 2) / math.sqrt(2 * math.pi) * 0.01
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        inside = num * (density * (ndtr(lowest + middle) - ndtr(lowest)) ** (num - 1)).sum()
        low, high = (middle, high) if inside < 1 - SIGNIFICANT else (low, middle)
    return low
