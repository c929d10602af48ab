"""What a round has measured, and how it becomes rows of the tables and the summary of a run."""

import math
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bfl_bench import records
from bfl_bench.engines.worker import Reply
from bfl_bench.evaluation.metrics import worst_tenth
from bfl_bench.evaluation.predict import Scores
from bfl_bench.method import Tensors

Row = dict[str, records.Cell]


@dataclass
class Measured:
    """What a round has measured so far, filled in while its replies arrive."""

    replies: list[Reply] = field(default_factory=list)  # their messages dropped
    memories: dict[int, Tensors] = field(default_factory=dict)
    bytes_up: int = 0
    waited_seconds: float = 0.0  # the server's time spent waiting for clients


def metrics_row(round_: int, scores: Scores, measured: Measured, sizes: tuple[int, ...]) -> Row:
    local = [reply.scores.accuracy for reply in measured.replies if reply.scores]
    row: Row = {
        "round": round_,
        "ga": scores.accuracy,
        "la": _mean_by_size([(r.client_id, r.scores.accuracy) for r in measured.replies if r.scores], sizes),
        "ece": scores.ece,
        "nll": scores.nll,
        "brier": scores.brier,
        "worst10": worst_tenth(local) if local else None,
    }
    for name in measured.replies[0].metrics:
        row[name] = _mean_by_size([(reply.client_id, reply.metrics[name]) for reply in measured.replies], sizes)
    return row


def _mean_by_size(values: list[tuple[int, float]], sizes: tuple[int, ...]) -> float | None:
    if not values:
        return None
    return math.fsum(sizes[client] * value for client, value in values) / sum(sizes[client] for client, _ in values)


def client_rows(round_: int, measured: Measured, sizes: tuple[int, ...]) -> list[Row]:
    return [
        {
            "round": round_,
            "client": reply.client_id,
            "size": sizes[reply.client_id],
            "accuracy": reply.scores.accuracy,
            "nll": reply.scores.nll,
            "ece": reply.scores.ece,
        }
        for reply in measured.replies
        if reply.scores
    ]


def reliability_rows(round_: int, scores: Scores) -> list[Row]:
    return [{"round": round_, "bin": number + 1, **asdict(bin_)} for number, bin_ in enumerate(scores.bins)]


def write_summary(
    folder: Path, status: str, reason: str | None, rounds: int, partition_info: Mapping[str, Any]
) -> dict[str, Any]:
    """summary.json, from what metrics.csv says."""
    path = folder / records.METRICS
    rows = records.read_table(path) if path.exists() else []
    best = max(rows, key=lambda row: (row["ga"] or 0.0, -(row["round"] or 0.0)), default=None)
    summary = {
        "status": status,
        "reason": reason,
        "rounds": rounds,
        "final": rows[-1] if rows else None,
        "best": best,
        "rounds_to_ga": {
            f"{percent}%": next((row["round"] for row in rows if (row["ga"] or 0.0) * 100 >= percent), None)
            for percent in range(30, 100, 10)
        },
        "partition": dict(partition_info),
    }
    records.write_json(folder / records.SUMMARY, summary)
    return summary


def num_bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def peak_memory_mb(device: torch.device) -> float:
    """The peak of what was allocated on the GPU, where the run uses one, or of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    if sys.platform == "linux":  # where getrusage starts from the peak of the process that started this one
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
