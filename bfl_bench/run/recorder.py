"""What a round has measured, as rows of the run's tables; running totals; the summary of a run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bfl_bench import records
from bfl_bench.devices import peak_memory_mb
from bfl_bench.engines.worker import TEST, UNSEEN, VALIDATION, Reply
from bfl_bench.errors import PartError
from bfl_bench.likelihood import Bin, Scores
from bfl_bench.method import Tensors

Row = dict[str, records.Cell]

_COLUMNS = {
    records.METRICS: records.METRICS_COLUMNS,
    records.TIMING: records.TIMING_COLUMNS,
    records.CLIENTS: records.CLIENTS_COLUMNS,
    records.WEIGHTS: records.WEIGHTS_COLUMNS,
    records.RELIABILITY: records.RELIABILITY_COLUMNS,
    records.SHIFT: records.SHIFT_COLUMNS,
    records.OWN: records.OWN_COLUMNS,
    records.RISK: records.RISK_COLUMNS,
    records.ENTROPY: records.ENTROPY_COLUMNS,
}
_FROM_CLIENTS = ("train_loss", "train_acc", "lf")
_OWN = {*records.METRICS_COLUMNS, "ae", "s_acc", "s_loss", "mt_acc", "mt_loss", "worst10_own"} - {*_FROM_CLIENTS}
"""Columns of metrics.csv that the runner fills in: no method may report a metric of such a name."""


@dataclass(frozen=True, kw_only=True)
class Notes:
    """What a checkpoint keeps for the recorder beside the state."""

    bytes_up: int = 0  # since the start of the run
    bytes_down: int = 0
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)  # by file name, where each ends
    personal: dict[str, list[float]] = field(default_factory=dict)  # clients' scores on their own test examples


@dataclass
class Measured:
    """What a round has measured so far, filled in while its replies arrive."""

    replies: list[Reply] = field(default_factory=list)  # their messages dropped
    bytes_up: int = 0
    bytes_down: int = 0
    server_metrics: dict[str, float] = field(default_factory=dict)
    waited_seconds: float = 0.0  # the server's time spent waiting for clients
    server_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    wall_seconds: float = 0.0


class Recorder:
    """The tables of a run and what adds up over its rounds."""

    def __init__(self, folder: Path, sizes: tuple[int, ...], notes: Notes) -> None:
        self._sizes = sizes
        self._bytes_up, self._bytes_down = notes.bytes_up, notes.bytes_down
        self._tables = {name: records.Table(folder / name, columns) for name, columns in _COLUMNS.items()}
        for name, table in self._tables.items():
            table.resume(notes.tables.get(name))

    def notes(self, personal: dict[str, list[float]]) -> Notes:
        """Describe where the tables end now."""
        tables = {name: table.describe() for name, table in self._tables.items()}
        return Notes(bytes_up=self._bytes_up, bytes_down=self._bytes_down, tables=tables, personal=personal)

    @property
    def paths(self) -> list[Path]:
        """The files of the tables."""
        return [table.path for table in self._tables.values()]

    def count(self, measured: Measured) -> None:
        """Add a round's messages to the totals; every round counts, evaluated or not."""
        self._bytes_up += measured.bytes_up
        self._bytes_down += measured.bytes_down

    def metrics_row(self, round_: int, scores: Mapping[str, Scores], measured: Measured) -> Row:
        """Compose a row of metrics.csv from the global model's scores by set, and from what clients and server say."""
        local = [(reply.client_id, reply.scores.values) for reply in measured.replies if reply.scores]
        accuracies = [(client, values["accuracy"]) for client, values in local if "accuracy" in values]
        row: Row = {"round": round_, **global_values(scores[TEST])}
        row["la"] = self._mean_by_size(accuracies)
        row["worst10"] = worst_tenth([accuracy for _, accuracy in accuracies]) if accuracies else None
        names = dict.fromkeys(name for reply in measured.replies for name in reply.metrics)  # in order, each once
        for name in names:
            found = [(reply.client_id, reply.metrics[name]) for reply in measured.replies if name in reply.metrics]
            row[name] = self._mean_by_size(found)
        _check_names([*names, *measured.server_metrics])
        row |= {"bytes_up": self._bytes_up, "bytes_down": self._bytes_down, **measured.server_metrics}
        return row

    def record_metrics(self, row: Row, bins: Sequence[Bin], calibrated: Sequence[Bin]) -> None:
        """Write a row of metrics.csv and its bins of confidence; those after the temperature where there is one."""
        self._tables[records.METRICS].append([row])
        rows: list[Row] = [{"round": row["round"], "bin": i, **asdict(bin_)} for i, bin_ in enumerate(bins, start=1)]
        for line, bin_ in zip(rows, calibrated, strict=False):
            line |= {f"{name}_calibrated": value for name, value in asdict(bin_).items()}
        self._tables[records.RELIABILITY].append(rows)

    def record(self, name: str, round_: int, rows: Sequence[Row]) -> None:
        """Add rows of a round to a table."""
        self._tables[name].append([{"round": round_, **row} for row in rows])

    def record_shift(self, round_: int, rows: Sequence[Row]) -> Row:
        """Write what shifts do by severity; return the columns of metrics.csv, means over all of them."""
        self.record(records.SHIFT, round_, rows)
        names = {"shift_ga": "accuracy", "shift_nll": "nll", "shift_ece": "ece"}
        return {name: math.fsum(row[column] or 0.0 for row in rows) / len(rows) for name, column in names.items()}

    def record_weights(self, rows: Sequence[Row]) -> None:
        self._tables[records.WEIGHTS].append(rows)

    def record_clients(self, round_: int, measured: Measured) -> None:
        rows: list[Row] = []
        for reply in measured.replies:
            if reply.scores:
                values = {name: reply.scores.values.get(name) for name in ("accuracy", "nll", "ece")}
                client = reply.client_id
                rows.append({"round": round_, "client": client, "size": self._sizes[client], **values})
        self._tables[records.CLIENTS].append(rows)

    def record_times(self, round_: int, measured: Measured, device: torch.device) -> None:
        row: Row = {
            "round": round_,
            "client_seconds": sum(reply.train_seconds for reply in measured.replies),
            "server_seconds": measured.server_seconds,
            "evaluation_seconds": measured.evaluation_seconds
            + sum(reply.evaluation_seconds for reply in measured.replies),
            "wall_seconds": measured.wall_seconds,
            "peak_memory_mb": peak_memory_mb(device),
        }
        self._tables[records.TIMING].append([row])

    def _mean_by_size(self, values: Sequence[tuple[int, float]]) -> float | None:
        if not values:
            return None
        total = sum(self._sizes[client] for client, _ in values)
        return math.fsum(self._sizes[client] * value for client, value in values) / total


def global_values(scores: Scores) -> Row:
    """Name the global model's scores as columns: accuracy is `ga`."""
    return {"ga" if name == "accuracy" else name: value for name, value in scores.values.items()}


def set_values(name: str, scores: Scores) -> Row:
    """Name the global model's scores on another set than the test set, such as `validation_ga`."""
    return {f"{name}_{column}": value for column, value in global_values(scores).items()}


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name in _OWN or "@" in name or name.startswith((f"{VALIDATION}_", f"{UNSEEN}_")):
            raise PartError(f"the method reports a metric {name!r}, which is a column of the runner's own: rename it")


def write_summary(
    folder: Path, status: str, reason: str | None, rounds: int, partition_info: Mapping[str, Any], scored: str = TEST
) -> dict[str, Any]:
    """Write summary.json, from what metrics.csv says; `scored` is the set that its columns are of."""
    path = folder / records.METRICS
    rows = records.read_table(path) if path.exists() else []
    best, best_by = _choose_best(rows, scored)
    summary = {
        "status": status,
        "reason": reason,
        "rounds": rounds,
        "final": rows[-1] if rows else None,
        "best": best,
        "best_by": best_by,
        "rounds_to_ga": {
            f"{percent}%": next((row["round"] for row in rows if (row.get("ga") or 0.0) * 100 >= percent), None)
            for percent in range(30, 100, 10)
        },
        "partition": dict(partition_info),
    }
    records.write_json(folder / records.SUMMARY, summary)
    return summary


def _choose_best(rows: Sequence[Row], scored: str) -> tuple[Row | None, dict[str, str]]:
    """Choose the best row by the NLL of the validation set, without one by accuracy on the set itself, or its NLL."""
    column = f"{VALIDATION}_nll"
    validated = [row for row in rows if row.get(column) is not None]
    if validated:
        return min(validated, key=lambda row: (row[column], row["round"])), {"set": VALIDATION, "column": column}
    if any(row.get("rmse") is not None for row in rows):
        return min(rows, key=lambda row: (row["nll"] or 0.0, row["round"] or 0)), {"set": scored, "column": "nll"}
    best = max(rows, key=lambda row: (row.get("ga") or 0.0, -(row["round"] or 0.0)), default=None)
    return best, {"set": scored, "column": "ga"}


def worst_tenth(accuracies: Sequence[float]) -> float:
    """Mean of the lowest tenth of the values, their number rounded up."""
    count = math.ceil(len(accuracies) / 10)
    return math.fsum(sorted(accuracies)[:count]) / count


def num_bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
