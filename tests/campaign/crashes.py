"""Crash points: a run is killed before, and in the middle of, everything that it does to a file, and then continued."""

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaign.driving import Tally, bfl_run, contents, differing, fault, only_folder
from tests.campaign.points import Points
from tests.composing import SMALL


@dataclass(frozen=True)
class Scenario:
    name: str
    words: tuple[str, ...]
    sync_seconds: float  # between checkpoints that are forced onto the disk: 0 takes the way of the second checkpoint
    again: str = ""  # the run was there before: "killed" half way, or "finished", to be run again with force=true


SHORT = (*SMALL, "rounds=2", "num_clients=2", "local.epochs=1")
SCENARIOS = (
    Scenario("a run", (*SHORT, "method=fedavg"), 1e9),
    Scenario("private states", (*SHORT, "method=scaffold", "eval.uncertainty=true", "partition.validation=0.2"), 0.0),
    Scenario("a run that is continued", (*SHORT, "method=scaffold"), 0.0, again="killed"),
    Scenario("a run that is forced", (*SHORT, "method=fedavg"), 1e9, again="finished"),
)


def try_crashes(work: Path, every: int, first: int = 0) -> Tally:
    """Kill runs at every `every`-th point, beginning with the `first`, and continue them."""
    tally = Tally("crash points")
    for scenario in SCENARIOS:
        _try_scenario(scenario, work / scenario.name.replace(" ", "_"), every, first, tally)
    return tally


def _try_scenario(scenario: Scenario, work: Path, every: int, first: int, tally: Tally) -> None:
    work.mkdir(parents=True)
    out, log = work / "out", work / "points"
    words = (*scenario.words, f"out={out}")

    def start(kill: int | None, log_: Path | None, *more: str) -> Any:
        def prepare() -> None:
            set_sync(scenario.sync_seconds)
            Points(out, kill, log_).install()

        return bfl_run(work, *words, *more, prepare=prepare)

    ended = start(None, log)
    assert ended.code == 0, ended.err
    whole = contents(only_folder(out))
    kept, more = work / "before", ()
    if scenario.again:
        if scenario.again == "killed":
            points = log.read_text().splitlines()
            middle = next(i for i, point in enumerate(points) if "manifest.json" in point and "rename" in point) + 3
            shutil.rmtree(out)
            assert start(middle, None).code == -signal.SIGKILL
        else:
            more = ("force=true",)
        shutil.copytree(out, kept)
        log.unlink()
        assert start(None, log, *more).code == 0
    points = log.read_text().splitlines()
    for index in range(first % every, len(points), every):
        shutil.rmtree(out)
        if kept.exists():
            shutil.copytree(kept, out)
        case = f"{scenario.name}, killed at {points[index]} ({index} of {len(points)})"
        killed = start(index, None, *more)
        if killed.code != -signal.SIGKILL:
            tally.add("not reached", case, killed)
            continue
        ended = bfl_run(work, *words, prepare=lambda: set_sync(scenario.sync_seconds))
        others = differing(only_folder(out), whole) if ended.code == 0 else []
        verdict = fault(ended) or ("lost" if ended.code else "silent" if others else "same bytes")
        tally.add(verdict, f"{case}; other files: {' '.join(others)}", ended)
    shutil.rmtree(work)


def set_sync(seconds: float) -> None:
    """Set how often checkpoints are forced onto the disk."""
    from bfl_bench.run import checkpoint

    checkpoint.SYNC_SECONDS = seconds
