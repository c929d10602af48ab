"""What all tests share: one thread, as in a run, and a global generator that is the same before every test."""

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bfl_bench.commands import run as cli

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed_torch() -> None:
    """Networks take their initial parameters from the global generator."""
    torch.manual_seed(20250101)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


BflRun = Callable[..., Result]


@pytest.fixture
def bfl_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[BflRun]:
    """Call the command's main function in this process, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # so that main's own setting is undone after the test
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def call(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["bfl-run", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Result(code, *capfd.readouterr())

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)
    root.handlers[:] = handlers  # Hydra's write to streams that are gone after the test
    root.setLevel(level)
