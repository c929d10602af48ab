"""The campaign against bfl-bench: kills, damaged files, bad words, bad parts; with counts.

python -m tests.campaign                  a sample of each, about two minutes
python -m tests.campaign --size 20        twenty times as many
python -m tests.campaign --stage crashes --size 1000
timeout -s INT 1h python -m tests.campaign --size 100      stops, and says how far it came
"""

import argparse
import os
import signal
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from tests.campaign.driving import Tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign")
    parser.add_argument("--stage", choices=STAGES, action="append", help="several are possible; all unless given")
    parser.add_argument("--size", type=int, default=1, help="how many times the cases of a sample")
    parser.add_argument("--seed", type=int, default=0, help="which cases are in the sample")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        warm_up(work / "warm")
        for stage in arguments.stage or STAGES:
            stopped = False
            try:
                STAGES[stage](work / stage, arguments.size, arguments.seed)
            except KeyboardInterrupt:
                stopped = True
            tally = Tally.latest
            print(f"{tally}{' (stopped)' if stopped else ''}", flush=True)
            failed = failed or bool(tally and tally.failures)
            if stopped:
                return 130
    return int(failed)


def warm_up(work: Path) -> None:
    """Import here what children would import one by one."""
    from bfl_bench.commands.run import main as run
    from tests.composing import SMALL

    work.mkdir()
    sys.argv = ["bfl-run", *SMALL, "rounds=1", f"out={work}", "eval.uncertainty=true"]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        run()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _crashes(work: Path, size: int, seed: int) -> object:
    from tests.campaign.crashes import try_crashes

    return try_crashes(work, max(1, 30 // size), seed)


def _damages(work: Path, size: int, seed: int) -> object:
    from tests.campaign.damages import try_damages

    return try_damages(work, max(1, 40 // size), seed)


def _inputs(work: Path, size: int, seed: int) -> object:
    from tests.campaign.inputs import try_inputs

    return try_inputs(work, max(1, size // 10), min(1.0, size / 10), seed)


def _parts(work: Path, size: int, seed: int) -> object:
    from tests.campaign.parts import try_parts

    return try_parts(work, max(1, 10 // size), seed)


def _surroundings(work: Path, size: int, seed: int) -> object:
    from tests.campaign.surroundings import try_surroundings

    return try_surroundings(work, max(1, 40 // size), seed)


STAGES = {
    "crashes": _crashes,
    "surroundings": _surroundings,
    "damages": _damages,
    "inputs": _inputs,
    "parts": _parts,
}

if __name__ == "__main__":
    sys.exit(main())
