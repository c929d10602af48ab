"""A suite, read from conf/suite/NAME.yaml: settings x methods, and what each method searches.

Every method gets the same number of search points, each of the same rounds, on the same search seed. Points come from a
scrambled Sobol sequence that the suite's and the method's names seed, so a further method changes nothing for the
others. A search run scores validation examples in the place of the test set (`eval.scored=validation`): what chooses
hyperparameters has no test example in reach.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from scipy.stats import qmc

from bfl_bench.errors import ConfigError
from bfl_bench.papers.spec import Cell, check_keys
from bfl_bench.records import config_folder

KEYS = set("title values settings points halvings search_seed seeds select metrics search methods".split())
METHOD_KEYS = {"label", "values", "search"}
SELECT = ("nll", "ga")
SEARCHED = {"eval.scored": "validation", "eval.ood": [], "eval.uncertainty": False}  # of every search run

Space = Mapping[str, Any]
"""By key, what is searched: {low, high} is a range on a log scale, a list holds choices."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A method of a suite."""

    method: str  # of conf/method
    label: str
    values: Mapping[str, Any]
    search: Space


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str
    title: str
    values: Mapping[str, Any]  # of every run
    settings: Mapping[str, Mapping[str, Any]]
    methods: Mapping[str, Entry]
    search: Space  # of every method, before its own
    points: int  # search points of each method in each setting
    halvings: int  # how often the better half of the points is run again, twice as long; 0: all have the full length
    search_seed: int
    seeds: tuple[int, ...]  # of the runs that are reported; none is the search seed
    select: str  # nll or ga of the validation examples
    metrics: tuple[str, ...]  # columns of the tables, the one that ranks first


def list_suites(folder: Path | None = None) -> list[str]:
    return sorted(path.stem for path in (folder or config_folder() / "suite").glob("*.yaml"))


def find_suite(name: str) -> Suite:
    path = Path(name) if name.endswith(".yaml") else config_folder() / "suite" / f"{name}.yaml"
    if not path.is_file():
        close = get_close_matches(name, list_suites(), 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError("suite", name, f"{', '.join(list_suites())}, or a file *.yaml{hint}")
    return read_suite(path)


def read_suite(path: Path) -> Suite:
    """Read a suite's file; a misspelt key or a search of another size than the others' is refused."""
    content = yaml.safe_load(path.read_text())
    check_keys(path.name, content, KEYS)
    seeds = content["seeds"]
    suite = Suite(
        name=path.stem,
        title=content["title"],
        values=content.get("values", {}),
        settings=content["settings"],
        methods={name: _read_entry(path, name, entry or {}) for name, entry in content["methods"].items()},
        search=content.get("search", {}),
        points=content["points"],
        halvings=content.get("halvings", 0),
        search_seed=content["search_seed"],
        seeds=tuple(range(seeds) if isinstance(seeds, int) else seeds),
        select=content.get("select", "nll"),
        metrics=tuple(content["metrics"]),
    )
    if suite.search_seed in suite.seeds:
        raise ConfigError(f"{path.name}: search_seed", suite.search_seed, "a seed that no reported run has")
    if suite.halvings and not 2**suite.halvings <= suite.points:
        raise ConfigError(f"{path.name}: halvings", suite.halvings, f"so few that one of {suite.points} points is left")
    if suite.select not in SELECT:
        raise ConfigError(f"{path.name}: select", suite.select, ", ".join(SELECT))
    return suite


def _read_entry(path: Path, name: str, entry: Mapping[str, Any]) -> Entry:
    check_keys(f"{path.name}: methods.{name}", entry, METHOD_KEYS)
    return make_entry(name, entry.get("label", name), entry.get("values", {}), entry.get("search", {}))


def make_entry(name: str, label: str, values: Mapping[str, Any], search: Space) -> Entry:
    """Make an entry; a suite may have several of one method, told apart by what follows a colon: fvb:eaa."""
    for key, space in search.items():
        _check_space(f"methods.{name}.search.{key}", space)
    return Entry(method=name.partition(":")[0], label=label, values=values, search=search)


def _check_space(place: str, space: Any) -> None:
    if isinstance(space, dict) and space.keys() == {"low", "high"} and 0 < space["low"] < space["high"]:
        return
    if not (isinstance(space, list) and space):
        raise ConfigError(place, space, "{low: .., high: ..}, both above 0, or a list of choices")


def with_method(suite: Suite, name: str, entry: Entry) -> Suite:
    """Add a method, which all of the suite's settings, budget and seeds are for as well."""
    return replace(suite, methods={**suite.methods, name: entry})


def choose(suite: Suite, settings: Sequence[str], methods: Sequence[str]) -> Suite:
    """Keep some settings and methods; none named: all."""
    for key, wanted, there in (("setting", settings, suite.settings), ("method", methods, suite.methods)):
        for name in wanted:
            if name not in there:
                raise ConfigError(key, name, ", ".join(there))
    return replace(
        suite,
        settings={name: value for name, value in suite.settings.items() if not settings or name in settings},
        methods={name: entry for name, entry in suite.methods.items() if not methods or name in methods},
    )


def search_points(suite: Suite, method: str) -> list[dict[str, Any]]:
    """List the values that a method's search tries: as many points as every other method's."""
    space = {**suite.search, **suite.methods[method].search}
    space = {key: choices for key, choices in space.items() if key not in suite.methods[method].values}
    name = f"{suite.name}/{method}/{suite.search_seed}"
    sampler = qmc.Sobol(max(1, len(space)), rng=int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    drawn = sampler.random_base2(math.ceil(math.log2(suite.points)))[: suite.points]
    return [{key: _pick(space[key], u) for key, u in zip(sorted(space), point, strict=False)} for point in drawn]


def _pick(space: Any, u: float) -> Any:
    if isinstance(space, list):
        return space[min(int(u * len(space)), len(space) - 1)]
    return float(f"{space['low'] * (space['high'] / space['low']) ** u:.3g}")


Kept = Mapping[tuple[str, str], Iterable[int]]
"""By setting and method, the points that are left of a search."""


def search_cells(suite: Suite, rung: int = 0, kept: Kept | None = None) -> list[Cell]:
    """List the runs of the search, setting by setting; they see validation examples only.

    With halvings, rung 0 has all points with few rounds, and each later one those that are left with twice as many.
    """
    cells: list[Cell] = []
    for setting in suite.settings:
        for method in suite.methods:
            shorter = _shorten(suite, setting, rung)
            for number, values in enumerate(search_points(suite, method)):
                if kept is None or number in kept.get((setting, method), ()):
                    values = {**values, **SEARCHED, **shorter, "seed": suite.search_seed}
                    cells.append(_cell(suite, setting, method, values, point=str(number), rung=str(rung)))
    return cells


def _shorten(suite: Suite, setting: str, rung: int) -> dict[str, int]:
    """Return the rounds of a rung, where they are fewer than the setting's."""
    if rung == suite.halvings:
        return {}
    rounds = {**suite.values, **suite.settings[setting]}.get("rounds")
    if rounds is None:
        raise ConfigError(f"settings.{setting}.rounds", None, "a number, of which halvings take a part")
    return {"rounds": max(1, rounds // 2 ** (suite.halvings - rung))}


def report_cells(suite: Suite, chosen: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Cell]:
    """List the runs that are reported: the chosen values of each method in each setting, with every seed."""
    cells: list[Cell] = []
    for setting in suite.settings:
        for method in suite.methods:
            if method not in chosen.get(setting, {}):
                continue
            for seed in suite.seeds:
                cells.append(_cell(suite, setting, method, {**chosen[setting][method], "seed": seed}))
    return cells


def _cell(suite: Suite, setting: str, method: str, values: Mapping[str, Any], **names: str) -> Cell:
    entry = suite.methods[method]
    merged = {"method": entry.method, **suite.values, **suite.settings[setting], **entry.values, **values}
    return Cell(names={"cell": method, "setting": setting, "method": method, **names}, values=merged)
