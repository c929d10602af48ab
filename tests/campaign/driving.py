"""Commands in processes of their own that cost no import: a child is forked from a process that has imported all."""

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

HANG_SECONDS = 60.0  # times the load per processor; a small run takes half of one
MEMORY = 6 * 2**30  # bytes of addresses that a child may add: what asks for more is told so

FAILURES = ("traceback", "hang", "silent", "unnamed", "written", "lost")
"""Verdicts that must not be: a traceback, no end, other numbers without a word, a sentence that does not say what is
wrong, files written although the config was refused, a run that the same command does not continue."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended; a negative code is the signal that killed it, None says that it did not end by itself."""

    code: int | None
    out: str
    err: str


@dataclass
class Tally:
    """Verdicts of a stage of the campaign."""

    stage: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    latest: ClassVar["Tally | None"] = None

    def __post_init__(self) -> None:
        Tally.latest = self

    def add(self, verdict: str, case: str, ended: Ended) -> None:
        self.counts[verdict] += 1
        if verdict in FAILURES:
            said = " | ".join(ended.err.strip().splitlines()[-2:])
            self.failures.append(f"{verdict}: {case} -> {ended.code} {said:.300}")
            print(f"  {self.failures[-1]}", flush=True)

    def __str__(self) -> str:
        total = sum(self.counts.values())
        others = [name for name in self.counts if name not in FAILURES]
        shown = [f"{self.counts[name]} {name}" for name in (*sorted(others), *FAILURES)]
        return f"{self.stage}: {total} cases: " + ", ".join(shown)


def fork(work: Callable[[], int | None], cwd: Path, seconds: float = HANG_SECONDS) -> Ended:
    """Do some work in a child and wait for it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _be_child(work, cwd, out.fileno(), err.fileno())
        code = _wait(child, seconds)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(code=code, out=texts[0], err=texts[1])


def _be_child(work: Callable[[], int | None], cwd: Path, out: int, err: int) -> None:
    code = 70
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(cwd)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        code = work() or 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    pause = 0.002
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def bfl_run(cwd: Path, *words: str, prepare: Callable[[], object] | None = None) -> Ended:
    """Call `bfl-run` in a child, after some preparation there."""
    from bfl_bench.commands.run import main

    return fork(lambda: _call("bfl-run", words, main, prepare), cwd)


def bfl_report(cwd: Path, *words: str) -> Ended:
    from bfl_bench.commands.report import main

    return fork(lambda: _call("bfl-report", words, main, None), cwd)


def _call(
    name: str, words: Sequence[str], main: Callable[[], int | None], prepare: Callable[[], object] | None
) -> int | None:
    sys.argv = [name, *words]
    if prepare is not None:
        prepare()
    return main()


def is_clean(ended: Ended) -> bool:
    """Tell whether a child ended by itself, without a traceback."""
    return ended.code in (0, 1, 2) and "Traceback" not in ended.err and "unforeseen" not in ended.err


def fault(ended: Ended) -> str | None:
    """Name what no command may do, whatever it was given."""
    if ended.code is None:
        return "hang"
    return None if is_clean(ended) else "traceback"


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a run as the same command always writes them: times and what depends on them are left out."""
    changing = ("timing.csv", "environment.json", ".lock")
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: _lasting(path) for name, path in found.items() if path.name not in changing}


def _lasting(path: Path) -> bytes:
    if path.name == "config.yaml":
        return path.read_bytes().replace(b"force: true", b"force: false")
    if path.name != "manifest.json":
        return path.read_bytes()
    try:
        content = json.loads(path.read_text())
        del content["notes"]["tables"]["timing.csv"]
        content.pop("seal", None)
    except (ValueError, KeyError, TypeError):  # damaged
        return path.read_bytes()
    return json.dumps(content).encode()


def differing(folder: Path, whole: dict[str, bytes]) -> list[str]:
    """Name the files that are not as in the undisturbed run."""
    here = contents(folder)
    return sorted(name for name in here.keys() | whole.keys() if here.get(name) != whole.get(name))


def only_folder(out: Path) -> Path:
    (folder,) = [path for path in out.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return folder
