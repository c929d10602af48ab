"""Who watches a run: a progress bar, a log of lines; the config group `observer` takes others, trackers say."""

import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bfl_bench.meter import METER
from bfl_bench.records import Cell

REFRESH_SECONDS = 1.0


@dataclass
class Position:
    """Where a run is within its round; the loop keeps it up to date, who watches reads it when it likes."""

    round: int = 0  # that is played, or was played last
    planned: Sequence[int] = ()  # local steps of each client of its cohort, in the order of their replies
    replied: int = 0  # clients of these
    over: bool = False  # the run has ended
    _before: int = 0  # steps of this process when the last client replied

    def begin(self, round_: int, planned: Sequence[int]) -> None:
        """Take note of a round that begins."""
        self.round, self.planned, self.replied, self._before = round_, planned, 0, METER.steps

    def reply(self) -> None:
        """Take note of a client that has replied."""
        self.replied, self._before = self.replied + 1, METER.steps

    @property
    def steps(self) -> int:
        """Local steps of the round so far: those of clients that have replied, and what this process counts since."""
        finished, rest = self.planned[: self.replied], sum(self.planned[self.replied :])
        return sum(finished) + min(METER.steps - self._before, rest)

    @property
    def share(self) -> float:
        """The share of the round's local steps that is done."""
        return self.steps / max(sum(self.planned), 1)


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What an observer learns at the start. config.yaml in the folder has the rest."""

    folder: Path
    rounds: int
    finished: int  # rounds that an earlier start of this run has finished
    position: Position = field(default_factory=Position)  # where it is, at any time


class Observer(Protocol):
    def begin(self, info: RunInfo) -> None: ...

    def round(self, round_: int, row: Mapping[str, Cell] | None) -> None:
        """Take note of a finished round: its row of metrics.csv, or None where it was not evaluated."""
        ...

    def end(self, summary: Mapping[str, Any]) -> None:
        """Take note of what summary.json says; also after an interruption."""
        ...


class ProgressBar:
    """A line on the terminal, or in a notebook, that is drawn anew each second and after each round."""

    _info: RunInfo
    _started: float
    _thread: threading.Thread
    _metrics: str

    def begin(self, info: RunInfo) -> None:
        self._info, self._started, self._metrics = info, time.monotonic(), ""
        print(_title(info), file=sys.stderr, flush=True)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def round(self, round_: int, row: Mapping[str, Cell] | None) -> None:
        self._metrics = self._metrics if row is None else in_short(row)

    def end(self, summary: Mapping[str, Any]) -> None:
        self._info.position.over = True
        self._thread.join()
        self._draw()
        print(file=sys.stderr, flush=True)

    def _watch(self) -> None:
        """Draw until the run is over, in a thread of its own, so that nobody who computes has to."""
        position = self._info.position
        while not position.over:
            self._draw()
            wake = time.monotonic() + REFRESH_SECONDS
            while not position.over and time.monotonic() < wake:
                time.sleep(0.05)

    def _draw(self) -> None:
        columns = shutil.get_terminal_size((80, 24)).columns - 1
        line = draw_line(self._info, time.monotonic() - self._started, self._metrics, columns)
        sys.stderr.write(f"\r{line:<{columns}}")
        sys.stderr.flush()


def draw_line(info: RunInfo, elapsed: float, metrics: str, columns: int) -> str:
    """Say where the run is and how long it will take, on one line; what does not fit is left out from the end."""
    position = info.position
    done = max(position.round - 1 + position.share, info.finished)
    left = elapsed / (done - info.finished) * (info.rounds - done) if done > info.finished else None
    where = [f"round {min(max(position.round, info.finished + 1), info.rounds)}/{info.rounds}"]
    if position.planned:
        where.append(f"client {position.replied}/{len(position.planned)}")
        where.append(f"step {position.steps}/{sum(position.planned)}")
    times = f"{100 * done / info.rounds:.0f}% {clock(elapsed)}<{'?' if left is None else clock(left)}"
    text = " ".join([*where, times])
    for word in metrics.split():
        if len(text) + 1 + len(word) <= columns:
            text += f" {word}"
    return text[:columns]


def clock(seconds: float) -> str:
    """Write a span of time as 01:23 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _title(info: RunInfo) -> str:
    return info.folder.name + (f", continuing after round {info.finished}" if info.finished else "")


class ProgressLines:
    """One line per evaluated round on stderr, so that logs stay readable."""

    _info: RunInfo

    def begin(self, info: RunInfo) -> None:
        self._info = info
        if info.finished:
            print(_title(info), file=sys.stderr, flush=True)

    def round(self, round_: int, row: Mapping[str, Cell] | None) -> None:
        if row is not None:
            title = f"{self._info.folder.name} round {round_}/{self._info.rounds}"
            print(f"{title} {in_short(row)}", file=sys.stderr, flush=True)

    def end(self, summary: Mapping[str, Any]) -> None:
        return


def show_progress(bar: bool) -> Observer:
    """Choose a bar on a terminal and in a notebook; elsewhere, or without `bar`, lines."""
    return ProgressBar() if bar and (sys.stderr.isatty() or "ipykernel" in sys.modules) else ProgressLines()


def in_short(row: Mapping[str, Cell]) -> str:
    return " ".join(
        f"{name}={row[name]:.4f}" for name in ("ga", "rmse", "nll", "train_loss") if row.get(name) is not None
    )
