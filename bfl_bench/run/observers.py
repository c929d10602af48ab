"""Who watches a run: a progress bar, a log of lines; the config group `observer` takes others, trackers say."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bfl_bench.records import Cell

if TYPE_CHECKING:
    from tqdm import tqdm


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What an observer learns at the start. config.yaml in the folder has the rest."""

    folder: Path
    rounds: int
    finished: int  # rounds that an earlier start of this run has finished


class Observer(Protocol):
    def begin(self, info: RunInfo) -> None: ...

    def round(self, round_: int, row: Mapping[str, Cell] | None) -> None:
        """Take note of a finished round: its row of metrics.csv, or None where it was not evaluated."""
        ...

    def end(self, summary: Mapping[str, Any]) -> None:
        """Take note of what summary.json says; also after an interruption."""
        ...


class ProgressBar:
    """A bar on the terminal."""

    _bar: "tqdm[Any]"

    def begin(self, info: RunInfo) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=info.rounds, initial=info.finished, desc=info.folder.name, unit="round", dynamic_ncols=True
        )

    def round(self, round_: int, row: Mapping[str, Cell] | None) -> None:
        if row is not None:
            self._bar.set_postfix_str(in_short(row), refresh=False)
        self._bar.update(round_ - self._bar.n)

    def end(self, summary: Mapping[str, Any]) -> None:
        self._bar.close()


class ProgressLines:
    """One line per evaluated round on stderr, so that logs stay readable."""

    _info: RunInfo

    def begin(self, info: RunInfo) -> None:
        self._info = info

    def round(self, round_: int, row: Mapping[str, Cell] | None) -> None:
        if row is not None:
            title = f"{self._info.folder.name} round {round_}/{self._info.rounds}"
            print(f"{title} {in_short(row)}", file=sys.stderr, flush=True)

    def end(self, summary: Mapping[str, Any]) -> None:
        return


def show_progress(bar: bool) -> Observer:
    """Choose a bar on a terminal; elsewhere, or without `bar`, lines."""
    return ProgressBar() if bar and sys.stderr.isatty() else ProgressLines()


def in_short(row: Mapping[str, Cell]) -> str:
    return " ".join(
        f"{name}={row[name]:.4f}" for name in ("ga", "rmse", "nll", "train_loss") if row.get(name) is not None
    )
