"""A request to stop is heard, even where a library swallows the exception."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bfl_bench import records
from bfl_bench.commands import run as cli
from bfl_bench.report import figures
from tests.composing import SMALL, only_folder
from tests.conftest import BflRun

WORDS = [*SMALL, "method=fedavg", "rounds=2"]
SAID = "bfl-run: interrupted; the same command continues"


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def swallow(number: int) -> None:
    """Ask this process to stop as a library would hear it that catches everything."""
    with contextlib.suppress(BaseException):
        os.kill(os.getpid(), number)


@pytest.mark.slow
def test_while_a_figure_is_drawn(number: int, bfl_run: BflRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = figures.draw_partition

    def draw_slowly(*arguments: Any) -> None:
        swallow(number)
        draw(*arguments)

    monkeypatch.setattr(figures, "draw_partition", draw_slowly)
    result = bfl_run("-m", *WORDS, "seed=0,1,2")
    assert result.code == 130
    assert SAID in result.err
    assert "Traceback" not in result.err
    assert len(list((tmp_path / "outputs").iterdir())) == 1  # the other points were not begun


@pytest.mark.slow
def test_during_a_round(number: int, bfl_run: BflRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bfl_bench.methods.fedavg import FedAvg

    update = FedAvg.client_update

    def disturbed(*arguments: Any) -> Any:
        swallow(number)
        return update(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "client_update", disturbed)
        result = bfl_run(*WORDS)
    assert result.code == 130
    assert SAID in result.err
    folder = only_folder(tmp_path / "outputs")
    assert json.loads((folder / records.SUMMARY).read_text())["status"] == "interrupted"
    assert bfl_run(*WORDS).code == 0


@pytest.mark.parametrize("where", ["expand_table", "check_package", "_run_hydra"])
def test_before_anything_runs(number: int, where: str, bfl_run: BflRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, where, lambda *_: os.kill(os.getpid(), number))
    result = bfl_run(*WORDS)
    assert result.code == 130
    assert result.err == f"\n{SAID}\n"


def test_an_import_that_fails_because_of_it(number: int, bfl_run: BflRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        swallow(number)
        raise ImportError("partially initialised")

    monkeypatch.setattr(cli, "resolve", fail)
    result = bfl_run(*WORDS)
    assert result.code == 130
    assert result.err == f"\n{SAID}\n"


def test_where_another_handler_of_sigterm_ends_the_process(bfl_run: BflRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray's does, which `hydra/launcher=ray` puts into the place of ours."""
    import hydra

    def stop(*_: object) -> None:
        raise SystemExit(signal.SIGTERM)

    monkeypatch.setattr(hydra, "main", lambda **_: lambda job: stop)
    result = bfl_run(*WORDS)
    assert result.code == 130
    assert result.err == f"\n{SAID}\n"
