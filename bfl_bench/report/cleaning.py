"""Runs that are of no use any more, and how they are removed. Never torch."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bfl_bench import records
from bfl_bench.errors import RunError
from bfl_bench.identity import STAND_IN_PREFIX, folder_name, read_config
from bfl_bench.report.listing import describe_age, progress
from bfl_bench.report.output import markdown
from bfl_bench.report.runs import find_folders

KINDS = ("unfinished", "stale")
DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class Useless:
    """A run's folder, and why nobody misses it."""

    folder: Path
    why: str
    done: int  # rounds
    age: float  # seconds since its newest file was written
    size: int  # bytes


def find_useless(
    paths: Sequence[Path], kinds: Sequence[str], older_than: float = 0.0, now: float | None = None
) -> list[Useless]:
    """Find runs of these kinds below the paths that were not touched for so many days; archives stay out."""
    now = time.time() if now is None else now
    found: list[Useless] = []
    for folder in find_folders(paths, links=False)[0]:  # what is elsewhere is not ours to remove
        if not isinstance(folder, Path) or folder.is_symlink():
            continue
        config = read_config(folder)
        status, done = progress(folder)
        why = "damaged" if config is None and (folder / records.SUMMARY).exists() else status
        stale = config is not None and folder.name not in _names(folder_name(config))
        wanted = ("unfinished" in kinds and why in ("unfinished", "damaged")) or ("stale" in kinds and stale)
        if config is None and why != "damaged":  # not the folder of a run
            continue
        files = [path.lstat() for path in folder.rglob("*") if not path.is_dir()]
        age = now - max(file.st_mtime for file in files)
        if wanted and status != "running" and age >= older_than * DAY:
            size = sum(file.st_size for file in files)
            found.append(Useless(folder=folder, why="stale" if stale else why, done=done, age=age, size=size))
    return found


def _names(name: str) -> tuple[str, str]:
    """Names of stand-in runs did not always say that they are such."""
    return name, name.removeprefix(STAND_IN_PREFIX)


def _is_over(folder: Path) -> bool:
    return (records.read_json(folder / records.SUMMARY) or {}).get("status") in ("done", "diverged")


def describe_useless(found: Sequence[Useless]) -> str:
    lines = [
        [str(one.folder), one.why, str(one.done), describe_age(one.age), f"{one.size / 1e6:.2f} MB"] for one in found
    ]
    return markdown(["run", "why", "rounds", "age", "size"], lines)


def remove_runs(found: Sequence[Useless]) -> list[str]:
    """Remove the folders; return a sentence on each that was kept, because somebody works there, say."""
    kept: list[str] = []
    for one in found:
        others = [path for path in one.folder.rglob(records.CONFIG) if path.parent != one.folder]
        if others:
            kept.append(f"{one.folder} has another run below it, {others[0].parent}; kept")
            continue
        try:
            with records.locked(one.folder):
                if one.why == "unfinished" and (one.folder / records.SUMMARY).exists() and _is_over(one.folder):
                    kept.append(f"{one.folder} has finished meanwhile; kept")
                    continue
                shutil.rmtree(one.folder)
        except (OSError, RunError) as error:
            kept.append(f"{one.folder}: {error}; kept")
    return kept
