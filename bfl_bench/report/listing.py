"""Every run below some folders in a line, and two runs side by side. Never torch."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bfl_bench import records
from bfl_bench.errors import BflError, RunError
from bfl_bench.evaluation import columns
from bfl_bench.identity import complete, read_config
from bfl_bench.report.archive import list_archived
from bfl_bench.report.output import describe_notes, markdown
from bfl_bench.report.runs import ReportError, find_folders, flatten, locate, read_summary

_UNITS = ((86400 * 2, 86400, "days"), (3600 * 2, 3600, "hours"), (60 * 2, 60, "minutes"), (0, 1, "seconds"))


def list_runs(paths: Sequence[Path], now: float | None = None) -> str:
    """Make a table of all runs, finished or not: status, rounds, age of the newest file, size on disk."""
    now = time.time() if now is None else now
    folders, notes = find_folders(paths)
    lines = [line for folder in folders if (line := _describe(folder, now)) is not None]
    if not lines:
        raise ReportError(f"no run below {', '.join(map(str, paths))}" + "".join(f"\n- {note}" for note in notes))
    table = markdown(["run", "status", "rounds", "age", "size"], lines)
    return f"{table}\n{len(lines)} run{'s' * (len(lines) != 1)}\n{describe_notes(notes)}"


def _describe(folder: records.Place, now: float) -> list[str] | None:
    config = read_config(folder)
    if config is None:
        return None
    status, done = progress(folder)
    age = size = "-"  # in an archive
    if isinstance(folder, Path):
        files = [path.stat() for path in folder.rglob("*") if path.is_file()]
        age = describe_age(now - max(file.st_mtime for file in files))
        size = f"{sum(file.st_size for file in files) / 1e6:.2f} MB"
    return [str(folder), status, f"{done} of {config['rounds']}", age, size]


def progress(folder: records.Place) -> tuple[str, int]:
    """Say how far a run is; a table can be ahead of the last checkpoint, which is where the run would go on."""
    try:
        summary = read_summary(folder)
        manifest = records.read_json(folder / records.CHECKPOINT / records.MANIFEST)
        table = records.read_table(folder / records.METRICS) if (folder / records.METRICS).exists() else []
    except BflError:
        return "damaged", 0
    last = int(table[-1]["round"] or 0) if table else 0
    if summary is not None and summary["status"] in ("done", "diverged"):
        return summary["status"], last
    done = manifest["round"] if manifest is not None else 0
    return ("running" if isinstance(folder, Path) and is_running(folder) else "unfinished"), done


def is_running(folder: Path) -> bool:
    """Whether a process holds the folder."""
    if not (folder / records.LOCK).exists():
        return False
    try:
        with records.locked(folder):
            return False
    except RunError:
        return True


def describe_age(seconds: float) -> str:
    """Say a span of time in its largest fitting unit."""
    unit, name = next((unit, name) for least, unit, name in _UNITS if seconds >= least or least == 0)
    return f"{max(seconds, 0) / unit:.0f} {name}"


def compare_two(one: Path, other: Path) -> str:
    """Say which values differ between two runs: of the config, of the environment, of the metrics in the last round."""
    parts: list[str] = [f"A: {one}", f"B: {other}"]
    folders = [_find(path) for path in (one, other)]
    configs = [_read(folder) for folder in folders]
    finals = [(read_summary(folder) or {}).get("final") or {} for folder in folders]
    environments = [flatten(records.read_json(folder / records.ENVIRONMENT) or {}) for folder in folders]
    for title, (left, right) in {"Config": configs, "Environment": environments}.items():
        parts.append(_difference(title, ["key", "A", "B"], _pairs(left, right)))
    lines = [
        [columns.heading(name), *values, _subtract(finals[0].get(name), finals[1].get(name))]
        for name, *values in _pairs(*finals)
    ]
    parts.append(_difference("Last round", ["metric", "A", "B", "B - A"], lines))
    return "\n\n".join(["\n".join(parts[:2]), *parts[2:]])


def _find(path: Path) -> records.Place:
    """Find a run's folder on disk, or in an archive: reference/fola_table2/RUN."""
    if path.exists() or (archive := locate(path.parent)) is None or not archive.is_file():
        return path
    return next((folder for folder in list_archived(archive) if folder.name == path.name), path)


def _read(folder: records.Place) -> dict[str, Any]:
    config = read_config(folder)
    if config is None:
        raise ReportError(f"{folder} is not the folder of a run")
    return flatten(complete(config))


def _pairs(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[list[str]]:
    keys = [key for key in dict.fromkeys([*left, *right]) if key != "schema_version"]
    absent = object()
    return [
        [key, _text(left, key), _text(right, key)] for key in keys if left.get(key, absent) != right.get(key, absent)
    ]


def _text(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "-"
    value = values[key]
    return value if isinstance(value, str) else json.dumps(value)


def _subtract(one: float | None, other: float | None) -> str:
    return "-" if one is None or other is None else f"{other - one:+.4g}"


def _difference(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return f"{title}\n\n{markdown(head, lines)}" if lines else f"{title}: the same"
