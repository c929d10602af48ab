"""How a job ended, and what is said of it: an error as one sentence and an exit code."""

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bfl_bench.errors import BflError, find_own_frame

COMPOSING = ("compose_config", "load_sweep_config", "configure_log")
"""Functions of Hydra in which nothing runs yet: what they raise is a wrong config."""

OUT_OF_MEMORY = "can't allocate memory"  # in torch's words

STATUSES = ("done", "skipped", "dry run", "diverged", "failed")  # skipped: it had finished earlier


@dataclass(frozen=True)
class Outcome:
    """How a job ended: one of STATUSES, and a sentence where there is something to say."""

    status: str
    message: str = ""
    exit_code: int = 0
    traceback: str = ""  # of an error that nobody foresaw
    objective: float = math.inf  # for a sweeper that searches, such as Optuna's: lower is better

    def __float__(self) -> float:
        return self.objective


def outcome_of(error: BaseException, words: Sequence[str] = ()) -> Outcome:
    """Say an error as one sentence with an exit code; an unforeseen one keeps its traceback.

    `words` are those of the command line, or the overrides of a point of a sweep.
    """
    if isinstance(error, BflError):
        return Outcome("failed", str(error), error.exit_code)
    frames = traceback.extract_tb(error.__traceback__)
    if type(error).__module__.startswith(("hydra.", "omegaconf.")) or any(frame.name in COMPOSING for frame in frames):
        from bfl_bench.commands.composing import explain

        return Outcome("failed", str(explain(error, words)), 2)
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        return Outcome("failed", f"cannot read or write{where}: {error.strerror or error}; earlier files are intact", 1)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and OUT_OF_MEMORY in str(error)):
        reason = " ".join(str(error).split())
        return Outcome("failed", f"out of memory: a smaller size in the config may help ({reason})", 1)
    last = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"
    sentence = f"unforeseen {type(error).__name__} in {find_own_frame(error) or last}: {error}"
    return Outcome("failed", sentence, 1, "".join(traceback.format_exception(error)))
