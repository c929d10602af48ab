"""Bad surroundings: disks that fail from a point on, a folder that vanishes, a second writer, clocks, environments."""

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.campaign.crashes import SHORT, set_sync
from tests.campaign.driving import Ended, Tally, bfl_run, contents, differing, fault, only_folder
from tests.campaign.points import Points
from tests.composing import COMMAND

WORDS = (*SHORT, "method=scaffold")
FAILURES = {"full": errno.ENOSPC, "read-only": errno.EROFS, "broken": errno.EIO}
ENVIRONMENTS = (
    {"LC_ALL": "C", "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "1", "PYTHONUTF8": "0"},
    {"LC_ALL": "tr_TR.UTF-8", "TZ": "America/St_Johns", "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "2"},
)


def try_surroundings(work: Path, every: int, first: int = 0) -> Tally:
    """Run in bad surroundings, and then again in good ones: the same bytes."""
    tally = Tally("bad surroundings")
    work.mkdir()
    out, log = work / "out", work / "points"
    words = (*WORDS, f"out={out}")
    ended = bfl_run(work, *words, prepare=lambda: (set_sync(0.0), Points(out, None, log).install()))
    assert ended.code == 0, ended.err
    whole = contents(only_folder(out))
    points = log.read_text().splitlines()
    for number, (name, code) in enumerate(FAILURES.items()):
        for index in range((first + number * 7) % every, len(points), every):
            _disturb(work, words, whole, tally, f"{name} disk from {points[index]} on", _failing(out, index, code))
    for round_ in (0, 1):
        _disturb(work, words, whole, tally, f"the folder vanishes in round {round_ + 1}", _vanishing(out, 2 * round_))
    _disturb(work, words, whole, tally, "the clock is set back", _set_clock_back, code=0)
    _write_twice(work, words, whole, tally)
    for environment in ENVIRONMENTS:
        shutil.rmtree(out, ignore_errors=True)
        done = subprocess.run([COMMAND, *words], capture_output=True, text=True, env={**os.environ, **environment})
        ended = Ended(code=done.returncode, out=done.stdout, err=done.stderr)
        _add(tally, f"environment {environment}", ended, out, whole)
    return tally


def _disturb(
    work: Path,
    words: tuple[str, ...],
    whole: dict[str, bytes],
    tally: Tally,
    case: str,
    prepare: Callable[[], object],
    code: int = 1,
) -> None:
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    ended = bfl_run(work, *words, prepare=prepare)
    if found := fault(ended) or (ended.code != code and "silent"):
        tally.add(found, case, ended)
    elif code and not any(word in ended.err for word in ("cannot read or write", "cannot be read", str(out))):
        tally.add("unnamed", case, ended)
    else:
        _add(tally, case, bfl_run(work, *words), out, whole)


def _add(tally: Tally, case: str, ended: Ended, out: Path, whole: dict[str, bytes]) -> None:
    others = differing(only_folder(out), whole) if ended.code == 0 else []
    verdict = fault(ended) or ("lost" if ended.code else "silent" if others else "same bytes")
    tally.add(verdict, f"{case}; other files: {' '.join(others)}", ended)


def _failing(out: Path, index: int, code: int) -> Callable[[], object]:
    return lambda: (set_sync(0.0), Points(out, index, failure=code).install())


def _vanishing(out: Path, after: int) -> Callable[[], object]:
    """Remove the run's folder when a client begins to train, after so many others."""

    def prepare() -> None:
        from bfl_bench.methods.scaffold import Scaffold

        update, begun = Scaffold.client_update, []

        def disturbed(*arguments: Any) -> Any:
            begun.append(1)
            if len(begun) == after + 1:
                shutil.rmtree(only_folder(out))
            return update(*arguments)

        Scaffold.client_update = disturbed  # type: ignore[method-assign]

    return prepare


def _set_clock_back() -> None:
    now = [time.time()]

    def earlier() -> float:
        now[0] -= 3600.0
        return now[0]

    time.time = earlier


def _write_twice(work: Path, words: tuple[str, ...], whole: dict[str, bytes], tally: Tally) -> None:
    out = work / "out"
    folder = only_folder(out)
    (folder / "summary.json").unlink()
    with FileLock(folder / ".lock"):
        second = bfl_run(work, *words)
    told = second.code == 1 and "another process is running in" in second.err
    tally.add("told" if told else fault(second) or "silent", "a second writer", second)
    _add(tally, "after a second writer", bfl_run(work, *words), out, whole)
