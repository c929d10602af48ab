"""Hyperparameters chosen by what the search runs scored on validation examples, and frozen in a file.

What is read of a search run is its summary, whose scores are of validation examples, because that is the only set such
a run has. A run of another kind is refused.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bfl_bench import records
from bfl_bench.errors import RunError
from bfl_bench.papers.spec import Cell
from bfl_bench.suite.spec import Suite
from bfl_bench.suite.tables import merge_rows

SCHEMA_VERSION = 1
CHOSEN, SEARCH = "chosen.yaml", "search.csv"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A point of a search that was run."""

    setting: str
    method: str
    point: int
    rung: int  # of a search that halves; its last one has the full number of rounds
    values: Mapping[str, Any]
    nll: float  # of the validation examples; infinite where the run diverged
    ga: float  # 0 where labels are numbers
    run: str  # the name of its folder


def read_trial(folder: Path, cell: Cell, values: Mapping[str, Any]) -> Trial | None:
    """Read a finished run of a search's cell; None where it is not finished."""
    summary = records.read_json(folder / records.SUMMARY)
    if summary is None or summary["status"] not in ("done", "diverged"):
        return None
    scored = summary.get("best_by", {})
    if scored.get("set") != "validation" or scored.get("column") not in (
        "ga",
        "nll",
    ):  # else of the test set, or of both
        raise RunError(f"{folder} is not a run of a search: its scores are not of validation examples alone")
    final = summary["final"] if summary["status"] == "done" else None
    return Trial(
        setting=cell.names["setting"],
        method=cell.names["method"],
        point=int(cell.names["point"]),
        rung=int(cell.names["rung"]),
        values=values,
        nll=final["nll"] if final else math.inf,
        ga=(final.get("ga") or 0.0) if final else 0.0,
        run=folder.name,
    )


def sort_trials(trials: Iterable[Trial], select: str) -> list[Trial]:
    """Sort by the lowest NLL, ties by accuracy, or with `ga` the other way round; what diverged is left out."""
    finite = (trial for trial in trials if math.isfinite(trial.nll))
    if select == "ga":
        return sorted(finite, key=lambda trial: (-trial.ga, trial.nll, trial.point))
    return sorted(finite, key=lambda trial: (trial.nll, -trial.ga, trial.point))


def keep_better_half(trials: Iterable[Trial], select: str, left: int) -> dict[tuple[str, str], list[int]]:
    """Keep at most so many points of every search, by setting and method, which the next rung runs for longer."""
    searches: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        searches.setdefault((trial.setting, trial.method), []).append(trial)
    return {key: [trial.point for trial in sort_trials(found, select)[:left]] for key, found in searches.items()}


def freeze(suite: Suite, trials: Iterable[Trial], folder: Path) -> dict[str, list[str]]:
    """Write the choice of every complete search, beside choices made earlier; list by setting what is incomplete."""
    chosen, trials = read_choices(folder, suite.name), list(trials)
    incomplete: dict[str, list[str]] = {}
    for setting in suite.settings:
        for method in suite.methods:
            found = [trial for trial in trials if (trial.setting, trial.method) == (setting, method)]
            if len(found) < suite.points:
                if method not in chosen.get(setting, {}):
                    incomplete.setdefault(setting, []).append(method)
                continue
            longest = [trial for trial in found if trial.rung == suite.halvings]
            best = next(iter(sort_trials(longest, suite.select)), None)
            chosen.setdefault(setting, {})[method] = {
                "values": dict(best.values) if best else None,
                "nll": best.nll if best else None,
                "ga": best.ga if best else None,
                "points": suite.points,
                "diverged": sum(not math.isfinite(trial.nll) for trial in found),
                "run": best.run if best else None,
            }
    folder.mkdir(parents=True, exist_ok=True)
    content = {"schema_version": SCHEMA_VERSION, "suite": suite.name, "select": suite.select, "chosen": chosen}
    records.write_text(folder / CHOSEN, yaml.safe_dump(content, sort_keys=True))
    rows = [
        {
            "setting": trial.setting,
            "method": trial.method,
            "point": trial.point,
            "rung": trial.rung,
            "values": json.dumps(trial.values, sort_keys=True),
            "nll": trial.nll if math.isfinite(trial.nll) else "",
            "ga": trial.ga if math.isfinite(trial.nll) else "",
            "run": trial.run,
        }
        for trial in sorted(trials, key=lambda trial: trial.rung)  # the longest run of a point stands in the file
    ]
    merge_rows(folder / SEARCH, rows, ("setting", "method", "point"))
    return incomplete


def read_choices(folder: Path, suite: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Read what was chosen, by setting and method; nothing where there is no file yet."""
    path = folder / CHOSEN
    if not path.exists():
        return {}
    content = yaml.safe_load(path.read_text())
    if content.get("schema_version") != SCHEMA_VERSION or content.get("suite") != suite:
        raise RunError(f"{path} is not a file of chosen values of suite {suite}, schema version {SCHEMA_VERSION}")
    found: dict[str, dict[str, dict[str, Any]]] = content["chosen"]
    return found


def values_of(choices: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Keep the values alone; a method whose every point diverged has none."""
    return {
        setting: {method: dict(one["values"]) for method, one in methods.items() if one["values"] is not None}
        for setting, methods in choices.items()
    }
