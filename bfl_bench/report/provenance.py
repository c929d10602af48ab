"""How runs came about: the commit of bfl-bench, the digests of a user's own modules, and splits that were repaired."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bfl_bench import records
from bfl_bench.errors import RunError
from bfl_bench.report.comparison import Row
from bfl_bench.report.runs import Run

UNKNOWN = "unknown code"


def read_code(folder: records.Place) -> str:
    """Say in a few words with which code a run was made, all of it where the run was continued with another."""
    try:
        environment = records.read_json(folder / records.ENVIRONMENT)
    except RunError:
        return UNKNOWN
    if environment is None:
        return UNKNOWN
    return " and ".join(map(_describe, [*environment.get("earlier_code", []), environment]))


def _describe(code: Mapping[str, Any]) -> str:
    commit, _, dirty = (code.get("commit") or "").partition("-")
    ours = f"commit {commit[:8]}{'-' if dirty else ''}{dirty}" if commit else f"bfl-bench {code.get('bfl_bench', '?')}"
    own = [f"{module} {digest[:8]}" for module, digest in sorted((code.get("own_code") or {}).items())]
    return ", ".join([ours, *own])


def codes_of(row: Row) -> dict[str, list[int]]:
    """List the codes of the runs in a row's means, with their seeds."""
    found: dict[str, list[int]] = {}
    for run in row.runs:
        if not run.diverged:
            found.setdefault(read_code(run.folder), []).append(run.config["seed"])
    return found


def describe_mixtures(rows: Sequence[Row]) -> list[str]:
    """Write a sentence on each row that averages over runs of different code, and one on rows that differ in it."""
    sentences: list[str] = []
    codes = {id(row): codes_of(row) for row in rows}
    for row in rows:
        if len(found := codes[id(row)]) > 1:
            parts = "; ".join(f"seed{'s' * (len(s) > 1)} {', '.join(map(str, s))}: {code}" for code, s in found.items())
            where = f" at {row.setting}" if row.setting else ""
            sentences.append(f"{row.name}{where} averages over runs of different code: {parts}.")
    everything = {code: None for found in codes.values() for code in found}
    if len(everything) > 1:
        listed = "; ".join(list(everything)[:5]) + ("; ..." if len(everything) > 5 else "")
        sentences.append(f"The rows were made with {len(everything)} different versions of the code: {listed}.")
    return sentences


def describe_repairs(runs: Iterable[Run]) -> list[str]:
    """Write a sentence on runs whose split no draw gave: examples were moved until every client had enough."""
    infos = {run.folder.name: (records.read_json(run.folder / records.SUMMARY) or {}).get("partition") for run in runs}
    moved = {name: info.get("moved", "?") for name, info in infos.items() if info and info.get("path") == "repaired"}
    if not moved:
        return []
    listed = "; ".join(f"{name}: {num} examples moved" for name, num in list(moved.items())[:5])
    more = "; ..." if len(moved) > 5 else ""
    return [f"The splits of {len(moved)} of {len(infos)} runs were repaired, as no draw sufficed ({listed}{more})."]
