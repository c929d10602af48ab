"""What is shown of a run while it runs: where it is, how long it will take, on one line."""

import io
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bfl_bench.meter import METER
from bfl_bench.run import observers
from bfl_bench.run.loop import run
from bfl_bench.run.observers import Position, ProgressBar, ProgressLines, RunInfo, clock, draw_line
from tests.unit.test_run import make_experiment


def info(finished: int = 0, rounds: int = 20) -> RunInfo:
    return RunInfo(folder=Path("run"), rounds=rounds, finished=finished)


def test_steps_are_those_of_clients_that_replied_and_those_counted_since() -> None:
    position = Position()
    position.begin(3, [10, 20, 30])
    assert (position.steps, position.share) == (0, 0)
    METER.steps += 7
    assert position.steps == 7
    METER.steps += 2  # a method that takes one step less than planned
    position.reply()
    assert position.steps == 10
    METER.steps += 5
    assert position.steps == 15
    METER.steps += 1000  # or many more
    assert position.steps == 60
    position.reply()
    assert position.steps == 30
    position.reply()
    assert position.share == 1


def test_time_left_counts_only_what_this_start_has_done() -> None:
    """After a resume at round 10 of 20, two rounds took 8 s: the other eight take 32 s."""
    resumed = info(finished=10)
    resumed.position.begin(13, [5, 5])
    assert draw_line(resumed, 8.0, "", 80) == "round 13/20 client 0/2 step 0/10 60% 00:08<00:32"
    METER.steps += 5  # half of round 13
    assert draw_line(resumed, 10.0, "", 80) == "round 13/20 client 0/2 step 5/10 62% 00:10<00:30"


def test_before_the_first_step_the_time_left_is_not_known() -> None:
    assert draw_line(info(), 3.0, "", 80) == "round 1/20 0% 00:03<?"
    assert draw_line(info(finished=3), 3.0, "", 80) == "round 4/20 15% 00:03<?"


def test_the_line_fits_and_loses_metrics_first() -> None:
    shown = info(rounds=2000)
    shown.position.begin(1999, [2000] * 50)
    for _ in range(49):
        shown.position.reply()
    metrics = "ga=0.9471 nll=0.1892 train_loss=0.1234"
    full = draw_line(shown, 36000.0, metrics, 200)
    assert full.endswith(metrics)
    line = draw_line(shown, 36000.0, metrics, 79)
    assert len(line) <= 79
    assert line == full[: len(line)]
    assert "<" in line
    for columns in range(len(draw_line(shown, 36000.0, "", 200)), len(full)):  # a number is there or not, never cut
        assert set(draw_line(shown, 36000.0, metrics, columns).split()) <= set(full.split())
    assert "ga=0.9471" in line
    assert len(draw_line(shown, 36000.0, metrics, 30)) == 30


@pytest.mark.parametrize(("seconds", "text"), [(0, "00:00"), (59.6, "01:00"), (3599, "59:59"), (3723, "1:02:03")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_loop_counts_clients_and_steps(tmp_path: Path) -> None:
    """At the end of each round all clients have replied, and the steps counted are those planned."""
    seen: list[tuple[int, int, int, int]] = []

    class Watcher(ProgressLines):
        def round(self, round_: int, row: Mapping[str, Any] | None) -> None:
            position = self._info.position
            seen.append((position.round, position.replied, position.steps, sum(position.planned)))

    experiment = make_experiment()
    before = METER.steps
    run(experiment, tmp_path, [Watcher()])
    assert METER.steps - before == experiment.count_steps()
    assert [line[0] for line in seen] == [1, 2, 3, 4, 5]
    assert all(replied == 2 and steps == planned for _, replied, steps, planned in seen)
    assert sum(line[3] for line in seen) == experiment.count_steps()


class Failing(ProgressLines):
    """Ends the run in its second round with an error that nobody foresaw."""

    def round(self, round_: int, row: Mapping[str, Any] | None) -> None:
        if round_ == 2:
            raise ZeroDivisionError


def test_the_bar_says_where_it_continues_and_ends_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "REFRESH_SECONDS", 0.01)
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(ZeroDivisionError):
        run(make_experiment(), tmp_path, [ProgressBar(), Failing()])
    deadline = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if "_watch" in thread.name]
    assert err.getvalue().startswith(f"{tmp_path.name}\n")
    err.truncate(0)
    err.seek(0)
    run(make_experiment(), tmp_path, [ProgressBar()])
    shown = err.getvalue()
    assert shown.startswith(f"{tmp_path.name}, continuing after round 2\n")
    *_, last = shown.strip().split("\r")
    assert re.match(r"round 5/5 client 2/2 step (\d+)/\1 100% \d\d:\d\d<00:00 ga=", last)
    assert all(len(line.rstrip("\n")) <= 79 for line in shown.split("\r")[1:])
    assert shown.endswith("\n")


def test_lines_say_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        run(make_experiment(), tmp_path, [Failing()])
    run(make_experiment(), tmp_path, [ProgressLines()])
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == f"{tmp_path.name}, continuing after round 2"
    assert second.startswith(f"{tmp_path.name} round 3/5 ga=")


def test_a_notebook_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(observers.show_progress(True), ProgressLines)  # pytest's stderr is no terminal
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert isinstance(observers.show_progress(True), ProgressBar)
    assert isinstance(observers.show_progress(False), ProgressLines)
