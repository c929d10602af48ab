"""The results of a suite as data: one row per reported run, in a CSV file that is committed.

Every row says what it is (setting, method, seed, the values chosen), what came out (all columns of the last round),
what it cost, and how to make it again (the run's name, the commit, the machine). Columns of time are of that machine;
all others are the same whenever the run is made again with the same versions on the same kind of CPU.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bfl_bench import records
from bfl_bench.report.comparison import Row
from bfl_bench.report.runs import Group, Run
from bfl_bench.suite.spec import Suite
from bfl_bench.suite.tables import merge_rows, read_rows

SCHEMA_VERSION = 1
RESULTS = "results.csv"
KEYS = ("setting", "method", "seed")
TIMES = ("client_seconds", "server_seconds")
ABOUT = ("schema_version", "suite", "label", "values", "status", "run", "commit", "cpu", "points", *KEYS)
"""Columns that are no measurements."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A row of the file."""

    setting: str
    method: str
    label: str
    seed: int
    values: Mapping[str, Any]
    status: str  # done or diverged
    points: int  # of the search that chose the values
    run: str
    commit: str
    cpu: str
    measured: Mapping[str, float]


def read_result(
    folder: Path, suite: Suite, setting: str, method: str, seed: int, choice: Mapping[str, Any]
) -> dict[str, object] | None:
    """Describe a reported run as a row; None where it is not finished."""
    summary = records.read_json(folder / records.SUMMARY)
    if summary is None or summary["status"] not in ("done", "diverged"):
        return None
    environment = records.read_json(folder / records.ENVIRONMENT) or {}
    final = {key: value for key, value in (summary["final"] or {}).items() if key != "round" and value is not None}
    times = records.read_table(folder / records.TIMING)
    return {
        "schema_version": SCHEMA_VERSION,
        "suite": suite.name,
        "setting": setting,
        "method": method,
        "label": suite.methods[method].label,
        "seed": seed,
        "values": json.dumps(choice["values"], sort_keys=True),
        "points": choice["points"],
        "status": summary["status"],
        "run": folder.name,
        "commit": environment.get("commit") or "",
        "cpu": " ".join((environment.get("cpu") or {}).values()),
        **(final if summary["status"] == "done" else {}),
        **{name: math.fsum(row[name] or 0 for row in times) for name in TIMES},
    }


def write_results(folder: Path, rows: Sequence[Mapping[str, object]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    merge_rows(folder / RESULTS, rows, KEYS)


def read_results(folders: Sequence[Path]) -> list[Result]:
    """Read the results of several folders; a row of a later one stands in the place of an earlier one's."""
    found: dict[tuple[str, ...], Result] = {}
    for folder in folders:
        for row in read_rows(folder / RESULTS):
            measured = {name: float(cell) for name, cell in row.items() if cell and name not in ABOUT}
            found[tuple(row[key] for key in KEYS)] = Result(
                setting=row["setting"],
                method=row["method"],
                label=row["label"],
                seed=int(row["seed"]),
                values=json.loads(row["values"]),
                status=row["status"],
                points=int(row["points"]),
                run=row["run"],
                commit=row["commit"],
                cpu=row["cpu"],
                measured=measured,
            )
    return list(found.values())


def as_rows(results: Sequence[Result]) -> list[Row]:
    """Turn results into rows of a comparison: settings are the blocks, methods what is compared."""
    rows: list[Row] = []
    for setting, method in dict.fromkeys((result.setting, result.method) for result in results):
        members = [result for result in results if (result.setting, result.method) == (setting, method)]
        runs = tuple(
            Run(Path(result.run), {"seed": result.seed}, result.measured, result.status == "diverged")
            for result in sorted(members, key=lambda result: result.seed)
        )
        label: dict[str, object] = {"setting": setting, "method": members[0].label}
        group = Group({"method.name": method}, runs)
        rows.append(Row(label=label, block=setting, setting=setting, name=members[0].label, group=group))
    return rows
