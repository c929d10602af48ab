"""Finished runs, read from their folders and grouped. Never torch.

Runs are matched by the values of their configs, never by the names of folders. Runs that differ in the seed alone are a
group, and only within a group is anything averaged.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bfl_bench import records
from bfl_bench.errors import BflError, RunError
from bfl_bench.identity import STAND_IN_PREFIX, complete, folder_name, is_stand_in, meaning, read_config
from bfl_bench.report.archive import SUFFIX, ArchiveError, list_archived

Config = dict[str, Any]
"""Flat: `local.lr` -> 0.01. Only what decides a result, as `identity.complete` has it."""


class ReportError(BflError):
    """The runs cannot be put into one table; the sentence says why, and what to do."""


@dataclass(frozen=True)
class Run:
    folder: records.Place
    config: Config
    final: Mapping[str, records.Cell]
    diverged: bool = False

    def path(self, line: str) -> Path:
        """Give the folder on disk, for models and messages, which archives lack; `line` is the command for them."""
        if not isinstance(self.folder, Path):
            raise ReportError(f"{self.folder} is without models and messages; to make them:\n\n    {line}\n")
        return self.folder

    def seconds_per_round(self) -> float:
        """Training of all clients, added up, and aggregation; mean over the rounds."""
        rows = records.read_table(self.folder / records.TIMING)
        return statistics.fmean((row["client_seconds"] or 0) + (row["server_seconds"] or 0) for row in rows)

    def curve(self, name: str) -> list[tuple[float, float]]:
        """A column of metrics.csv with the rounds, without those that lack it."""
        rows = records.read_table(self.folder / records.METRICS)
        return [(row["round"] or 0, value) for row in rows if (value := row.get(name)) is not None]

    def column(self, name: str) -> list[float]:
        return [value for _, value in self.curve(name)]


class Stats(NamedTuple):
    """Over seeds; `std` and `standard_error` with n - 1. A single seed has no spread: NaN."""

    num: int
    mean: float
    std: float
    population_std: float
    standard_error: float

    def describe(self, digits: int = 2) -> str:
        """Mean +- standard deviation; of one run the value."""
        return f"{self.mean:.{digits}f}" + (f" +- {self.std:.{digits}f}" if self.num > 1 else "")

    def compare(self, paper: float | None, digits: int = 2) -> list[str]:
        """Ours, the number of a paper that prints no spread, the difference, marked where it is beyond our spread."""
        if paper is None:
            return [self.describe(digits), "-", "-"]
        difference = self.mean - paper
        return [self.describe(digits), f"{paper:.{digits}f}", f"{difference:+.{digits}f}{mark(difference, self.std)}"]


def summarise(values: Sequence[float]) -> Stats:
    num, mean = len(values), statistics.fmean(values)
    std = statistics.stdev(values) if num > 1 else math.nan
    return Stats(num, mean, std, std * math.sqrt((num - 1) / num), std / math.sqrt(num))


@dataclass(frozen=True)
class Group:
    """Runs whose configs differ in the seed alone; `config` has none."""

    config: Config
    runs: tuple[Run, ...]

    def stats(self, metric: str, factor: float = 1) -> Stats | None:
        """Of a column of metrics.csv in the last round, or `seconds_per_round`; None where a run lacks it."""
        timed = metric == "seconds_per_round"
        values = [run.seconds_per_round() if timed else run.final.get(metric) for run in self.runs]
        present = [factor * value for value in values if value is not None]
        return summarise(present) if len(present) == len(values) else None


def flatten(config: Mapping[str, Any], prefix: str = "") -> Config:
    flat: Config = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flat


def on_stand_in(config: Config) -> bool:
    """Whether a run of this config works on random data in the place of real ones."""
    return is_stand_in(config.get("data_dir"), config.get("dataset._target_"))


def locate(path: Path) -> Path | None:
    """Find what a user names: a folder, an archive, that without its ending, or below `reference` what is shipped."""
    places = [path]
    if path.parts[:1] == ("reference",):
        places.append(records.reference_folder().joinpath(*path.parts[1:]))
    candidates = [found for place in places for found in (place, Path(f"{place}{SUFFIX}"))]
    return next((found for found in candidates if found.exists()), None)


def find_folders(paths: Sequence[Path], links: bool = True) -> tuple[list[records.Place], list[str]]:
    """List the folders of runs below the paths and in archives there, each once, and a sentence on what is not one.

    What lies behind links is found too, unless not `links`.
    """
    found: dict[str, records.Place] = {}
    notes: list[str] = []
    for path in paths:
        if (place := locate(path)) is None:
            notes.append(f"{path}: no such folder")
            continue
        folders, archives = _walk(place, links)
        for folder in folders:
            found.setdefault(os.path.realpath(folder), folder)
        for archive in [place] if place.is_file() else archives:
            try:
                called = path if place.is_file() else path / archive.relative_to(place)
                found |= {f"{archive.resolve()}/{folder.name}": folder for folder in list_archived(archive, called)}
            except ArchiveError as error:
                notes.append(f"{error}; left out")
    return list(found.values()), notes


def _walk(place: Path, links: bool) -> tuple[list[Path], list[Path]]:
    """List the folders with a config and the archives below a place, those that links lead to last, each once."""
    folders: list[Path] = []
    archives: list[Path] = []
    seen: set[str] = set()
    waiting = [str(place)]
    while waiting:
        behind: list[str] = []
        for top in waiting:
            for folder, below, files in os.walk(top):
                if (real := os.path.realpath(folder)) in seen:
                    below.clear()
                    continue
                seen.add(real)
                below.sort()
                if records.CONFIG in files or records.CONFIG in below:
                    folders.append(Path(folder))
                archives += [Path(folder, name) for name in sorted(files) if name.endswith(SUFFIX)]
                behind += [str(path) for name in below if (path := Path(folder, name)).is_symlink()]
        waiting = behind if links else []
    return folders, archives


def read_summary(folder: records.Place) -> dict[str, Any] | None:
    """Read the summary of a run, None where there is none yet; a damaged one raises RunError."""
    summary = records.read_json(folder / records.SUMMARY)
    if summary is None:
        return None
    final = summary.get("final", "nothing")
    numbers = final is None or (
        isinstance(final, dict) and all(isinstance(value, int | float | None) for value in final.values())
    )
    if not isinstance(summary.get("status"), str) or not numbers:
        raise RunError(f"{folder / records.SUMMARY} is damaged: it has no status, or no numbers of the last round")
    return summary


def find_runs(
    paths: Sequence[Path],
    where: Config,
    keep: Callable[[Config], object] = bool,
    diverged: bool = False,
    each_folder: bool = False,
) -> tuple[list[Run], list[str]]:
    """The finished runs below the paths that hold the values and are to be kept, and a sentence on each left out.

    A diverged run is finished too, but its last numbers say little: it is among the runs only with `diverged`. The same
    run in two folders, which may differ in the engine, counts once unless `each_folder`.
    """
    runs: dict[str, Run] = {}
    folders, notes = find_folders(paths)
    num_damaged = 0
    for folder in folders:
        content = read_config(folder)
        if content is None:
            if (folder / records.SUMMARY).exists():  # else it is not a run's
                notes.append(f"{folder / records.CONFIG} is damaged; left out")
                num_damaged += 1
            continue
        config = flatten(complete(content))
        if any(config.get(key) != value for key, value in meaning(where).items()) or not keep(config):
            continue
        try:
            summary = read_summary(folder)
        except RunError as error:
            notes.append(f"{error}; left out")
            num_damaged += 1
            continue
        identity = str(folder) if each_folder else json.dumps(config, sort_keys=True)
        accepted = ("done", "diverged") if diverged else ("done",)
        if summary is None or summary["status"] not in accepted:
            notes.append(f"{folder}: {summary['status'] if summary else 'not finished'}; not in the means")
        elif identity in runs and not isinstance(folder, Path) and not isinstance(runs[identity].folder, Path):
            pass  # tables share runs, and so do their archives
        elif identity in runs:
            notes.append(f"{folder}: the same config as {runs[identity].folder}; counted once")
        else:
            if isinstance(folder, Path) and (changed := records.find_changed(folder, summary)):
                notes.append(f"{folder}: changed since the run ended: {', '.join(changed)}")
            runs[identity] = Run(folder, config, summary["final"] or {}, summary["status"] == "diverged")
    if num_damaged > 1:
        notes.append(f"{num_damaged} damaged runs in all")
    return list(runs.values()), notes


def by_name(runs: Iterable[Run]) -> dict[str, Run]:
    """Index the runs by the names that other runs' configs have for them; older configs have the folder's name."""
    named: dict[str, Run] = {}
    for run in runs:
        content = read_config(run.folder)
        assert content is not None  # or it would not have been found
        for name in (run.folder.name, folder_name(content)):
            named |= {name: run, name.removeprefix(STAND_IN_PREFIX): run}
    return named


def group_over_seeds(runs: Iterable[Run]) -> list[Group]:
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.config["seed"]):
        groups.setdefault(json.dumps(without(run.config, ["seed"]), sort_keys=True), []).append(run)
    return [Group(without(members[0].config, ["seed"]), tuple(members)) for members in groups.values()]


def best_over(groups: Iterable[Group], keys: Sequence[str]) -> list[Group]:
    """Of the groups that differ in these keys alone, the one with the largest mean of `ga` in the last round."""
    if not keys:
        return list(groups)
    rivals: dict[str, list[Group]] = {}
    for group in groups:
        rivals.setdefault(json.dumps(without(group.config, keys), sort_keys=True), []).append(group)

    def mean(group: Group) -> float:
        found = group.stats("ga")
        return -math.inf if found is None else found.mean

    return [max(members, key=mean) for members in rivals.values()]


def describe_choice(keys: Sequence[str]) -> str:
    return (
        f"Best over {', '.join(keys)}: the largest mean global accuracy over seeds, on the test set.\n" if keys else ""
    )


def is_beyond(difference: float | None, ours: float | None, theirs: float | None = None) -> bool:
    """Whether a difference exceeds our spread and the paper's, where it has one, together; of one seed nobody knows."""
    if difference is None or ours is None or math.isnan(ours):
        return False
    return abs(difference) > ours + (theirs or 0.0)


def mark(difference: float | None, ours: float | None, theirs: float | None = None) -> str:
    """Mark a difference beyond the spread (!), and one of which nobody can say it, for want of a second seed (?)."""
    if difference is None or ours is None:
        return ""
    if math.isnan(ours):
        return " (?)"
    return " (!)" if is_beyond(difference, ours, theirs) else ""


def without(config: Config, keys: Sequence[str]) -> Config:
    below = tuple(f"{key}." for key in keys)
    return {key: value for key, value in config.items() if key not in keys and not key.startswith(below)}
