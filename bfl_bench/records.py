"""The files of a run: names, columns, schema version, and how they are written. Knows no torch.

A file is written aside and renamed, so a reader never sees half of it. The tables grow by appending; the checkpoint
notes their lengths, and resuming cuts them back to those: what a killed round left behind disappears.
"""

import contextlib
import csv
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

import yaml
from filelock import FileLock, Timeout

from bfl_bench import reading
from bfl_bench.errors import DamagedError, RunError

SCHEMA_VERSION = 1
VERSIONS = {"summary.json": 2, "manifest.json": 2, "previous.json": 2}
"""Of what a file of this name holds; any other file has SCHEMA_VERSION."""

METRICS = "metrics.csv"
TIMING = "timing.csv"
CLIENTS = "clients.csv"
WEIGHTS = "weights.csv"
RELIABILITY = "reliability.csv"
SHIFT = "shift.csv"
OWN = "own.csv"
RISK = "risk.csv"
ENTROPY = "entropy.csv"
MESSAGES = "messages"
SUMMARY = "summary.json"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
PARTITION = "partition.npz"
PARTITION_COUNTS = "partition.csv"
PARTITION_FIGURE = "partition.png"
CURVES_FIGURE = "curves.png"
UNCERTAINTY_FIGURE = "uncertainty.png"
CHECKPOINT = "checkpoint"
MANIFEST = "manifest.json"
PREVIOUS = "previous.json"
CHECKPOINT_NAMES = (f"{CHECKPOINT}/{PREVIOUS}", f"{CHECKPOINT}/{MANIFEST}")
LOCK = ".lock"

TYPES: dict[str, dict[str, tuple[type, ...]]] = {
    SUMMARY: {"status": (str,), "rounds": (int,), "final": (dict, type(None)), "best": (dict, type(None))},
    ENVIRONMENT: {
        "own_code": (dict,),
        "earlier_code": (list,),
        "earlier_cpus": (list,),
        "partition_sha256": (str,),
        "commit": (str, type(None)),
        "cpu": (dict,),
    },
    MANIFEST: {"round": (int,), "server": (str,), "clients": (dict,), "notes": (dict,), "sha256": (dict,)},
}
TYPES[PREVIOUS] = TYPES[MANIFEST]
"""Types of values in files, by the files' names."""

METRICS_COLUMNS = (
    "round",
    "ga",
    "la",
    "ece",
    "nll",
    "brier",
    "worst10",
    "train_loss",
    "train_acc",
    "bytes_up",
    "bytes_down",
)
TIMING_COLUMNS = (
    "round", "client_seconds", "server_seconds", "evaluation_seconds", "wall_seconds", "peak_memory_mb"
)  # fmt: skip
CLIENTS_COLUMNS = ("round", "client", "size", "accuracy", "nll", "ece")
WEIGHTS_COLUMNS = ("round", "weight", "ga", "nll", "ece")
RELIABILITY_COLUMNS = ("round", "bin", "count", "confidence", "accuracy")
SHIFT_COLUMNS = ("round", "severity", "accuracy", "nll", "ece")
OWN_COLUMNS = ("round", "client", "examples", "s_accuracy", "s_nll", "s_ece", "mt_accuracy", "mt_nll", "mt_ece")
RISK_COLUMNS = ("round", "coverage", "risk")
ENTROPY_COLUMNS = ("round", "entropy", "test")
PARTITION_COLUMNS = ("client", "class", "count")

STAND_IN = "stand-in"
"""The value of `data_dir` that stands for random data instead of the real files."""

Cell = int | float | None


class Place(Protocol):
    """A folder of a run or a file in it, to be read: a path, or its like in an archive."""

    @property
    def name(self) -> str: ...
    def __truediv__(self, name: str, /) -> "Place": ...
    def exists(self) -> bool: ...
    def read_text(self) -> str: ...


def config_folder() -> Path:
    return _shipped("conf")


def reference_folder() -> Path:
    """Find the archives of runs that are shipped."""
    return _shipped("reference")


def _shipped(name: str) -> Path:
    """Find a folder that lies inside the package in a wheel, and beside it in a checkout."""
    package = Path(__file__).parent
    return next(path for path in (package / name, package.parent / name) if path.is_dir())


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, durable: bool = False) -> None:
    aside = path.with_name(path.name + ".tmp")
    aside.write_bytes(content)
    if durable:
        sync(aside)
    aside.replace(path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.exists():
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def write_json(path: Path, content: Mapping[str, Any], durable: bool = False) -> None:
    """Write a JSON file; a `durable` one is on the disk before it gets its name."""
    version = VERSIONS.get(path.name, SCHEMA_VERSION)
    text = json.dumps({"schema_version": version, **content}, indent=2, allow_nan=False) + "\n"
    write_bytes(path, text.encode(), durable)


def read_json(path: Place) -> dict[str, Any] | None:
    """The content, or None where the file does not exist; a damaged one raises a `DamagedError` that names it."""
    try:
        content = reading.read_json(path)
    except FileNotFoundError:
        return None
    newest = VERSIONS.get(path.name, SCHEMA_VERSION)
    if content.get("schema_version") not in range(1, newest + 1):
        raise RunError(
            f"{path} has schema version {content.get('schema_version')}, this program reads up to {newest}; "
            "use the version of bfl-bench that wrote it, or another `out` folder"
        )
    for key, kinds in TYPES.get(path.name, {}).items():
        if key in content and not isinstance(content[key], kinds):
            raise DamagedError(f"{path} is damaged: {key} is {content[key]!r:.40}")
    if path.name == SUMMARY and not _is_summary(content):
        raise DamagedError(f"{path} is damaged: it lacks a status, or a metric is no number")
    return content


def _is_summary(content: Mapping[str, Any]) -> bool:
    rows = [content.get(key) or {} for key in ("final", "best")]
    values = [value for row in rows for value in row.values()]
    return "status" in content and all(value is None or type(value) in (int, float) for value in values)


class Table:
    """A CSV file that grows by rows, and by columns where a row brings a new one: empty in the rows before."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = tuple(columns)
        self.length = 0  # bytes
        self._digest = hashlib.sha256()  # of the content so far

    def describe(self) -> dict[str, Any]:
        """Say where the table ends, for a checkpoint."""
        return {"length": self.length, "columns": list(self.columns), "sha256": self._digest.hexdigest()}

    def resume(self, described: Mapping[str, Any] | None) -> None:
        """Continue a table as it was described when the checkpoint was written; None: it begins."""
        if described is None or described["length"] == 0:
            self.path.unlink(missing_ok=True)
            return
        if not self.path.exists() or self.path.stat().st_size < described["length"]:
            raise RunError(f"{self.path} is shorter than its checkpoint says; start over with force=true")
        self.columns, self.length = tuple(described["columns"]), described["length"]
        content = reading.read_bytes(self.path)
        columns = _read_columns(content)
        if columns[: len(self.columns)] != self.columns:
            raise RunError(f"{self.path} has other columns than its checkpoint says; start over with force=true")
        if columns != self.columns:  # it has grown by columns since then
            content = self._format(self.columns, read_table(self.path)).encode()
        self._digest = hashlib.sha256(content[: self.length])
        if self._digest.hexdigest() != described["sha256"]:
            raise RunError(f"{self.path} was changed since its checkpoint was written; start over with force=true")
        if columns != self.columns:
            write_bytes(self.path, content[: self.length])
        else:
            os.truncate(self.path, self.length)

    def append(self, rows: Sequence[Mapping[str, Cell]]) -> None:
        if not rows:
            return
        known = dict.fromkeys(self.columns)
        new = dict.fromkeys(name for row in rows for name in row if name not in known)
        self.columns += tuple(new)
        if self.length == 0 or new:
            earlier = read_table(self.path) if self.length else []
            content = self._format(self.columns, [*earlier, *rows]).encode()
            write_bytes(self.path, content)
            self._digest = hashlib.sha256(content)
        else:
            content = self._format(self.columns, rows, header=False).encode()
            with self.path.open("ab") as file:
                file.write(content)
            self._digest.update(content)
        self.length = self.path.stat().st_size

    @staticmethod
    def _format(columns: Sequence[str], rows: Iterable[Mapping[str, Cell]], header: bool = True) -> str:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        if header:
            writer.writerow(columns)
        writer.writerows([format_cell(row.get(name)) for name in columns] for row in rows)
        return text.getvalue()


def _read_columns(content: bytes) -> tuple[str, ...]:
    """Read the first line of a table; nothing where it is none."""
    try:
        return tuple(next(csv.reader([content.partition(b"\n")[0].decode()]), ()))
    except (UnicodeDecodeError, csv.Error):
        return ()


def format_cell(value: Cell) -> str:
    """The shortest text that reads back as the same number; nothing for what was not measured."""
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, Integral) else repr(float(value))


def parse_cell(text: str) -> Cell:
    if not text:
        return None
    if "." in text:  # most
        return float(text)
    return int(text) if text.lstrip("-").isdigit() else float(text)


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    lines = [",".join(columns), *(",".join(map(format_cell, row)) for row in rows)]
    write_text(path, "".join(f"{line}\n" for line in lines))


def read_table(path: Place) -> list[dict[str, Cell]]:
    """Read the rows of a table; a damaged one raises a `DamagedError` that names it."""
    columns, rows = reading.read_table(path)
    try:
        return [dict(zip(columns, map(parse_cell, row), strict=True)) for row in rows]
    except ValueError as error:
        raise DamagedError(f"{path} is damaged: {error}") from None


def _read_last(path: Path) -> dict[str, Cell]:
    """Read the last row of a table alone."""
    columns, rows = reading.read_table(path)
    try:
        return dict(zip(columns, map(parse_cell, rows[-1]), strict=True))
    except ValueError as error:
        raise DamagedError(f"{path} is damaged: {error}") from None


def start(folder: Path, config: Mapping[str, Any], force: bool) -> None:
    """Write the config of a run that begins, or continues; with `force`, remove an earlier run first."""
    if force:
        # What says that the run is done, or how far it is, goes first: a kill on the way leaves a run that begins anew.
        for name in (SUMMARY, *(() if (folder / CHECKPOINT).is_symlink() else CHECKPOINT_NAMES)):
            with contextlib.suppress(OSError):  # no file: it goes with the rest
                (folder / name).unlink()
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
    text = yaml.dump({"schema_version": SCHEMA_VERSION, **config}, Dumper=_PlainDumper, sort_keys=False)
    if not (folder / CONFIG).is_file() or (folder / CONFIG).read_bytes() != text.encode():  # not at every start
        write_text(folder / CONFIG, text)


def find_changed(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """Name the files of a run that is done which are not what its last checkpoint noted, or say other numbers."""
    name = f"{CHECKPOINT}/{MANIFEST}"
    try:
        notes = (read_json(folder / name) or {}).get("notes", {})
    except RunError:
        return [name]
    described = notes.get("tables", {}) if summary["status"] == "done" else {}
    found = [table for table, said in described.items() if not _is_as_described(folder / table, said)]
    if METRICS in described and METRICS not in found and _read_last(folder / METRICS) != summary.get("final"):
        found.append(SUMMARY)
    return found


def _is_as_described(path: Path, said: Mapping[str, Any]) -> bool:
    try:
        content = reading.read_bytes(path)
    except FileNotFoundError:
        return not said.get("length")
    except DamagedError:
        return False
    digest = said.get("sha256")  # which earlier versions did not note
    return digest is None or hashlib.sha256(content).hexdigest() == digest


class _PlainDumper(yaml.SafeDumper):
    """Writes a list that stands in two places twice: a reader takes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and hold it for this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunError(f"another process is running in {folder}; wait for it, or stop it") from None
    try:
        yield
    finally:
        lock.release()
