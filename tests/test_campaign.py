"""The campaign sees what it is there to see; `python -m tests.campaign` runs it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bfl_bench.errors import ConfigError
from tests.campaign.driving import Ended, Tally, fault
from tests.campaign.inputs import Key, draw_words, find_keys, judge
from tests.campaign.parts import cases

ROOT = Path(__file__).parent.parent
KILLED = """
import os, sys
from pathlib import Path
from tests.campaign.points import Points
folder = Path(sys.argv[1])
points = Points(folder, int(sys.argv[2]) if sys.argv[2] else None, failure=int(sys.argv[3]) if sys.argv[3] else None)
points.install()
(folder / "a").write_bytes(b"0123456789")
(folder / "a").rename(folder / "b")
(folder / "b").unlink()
print(points.seen)
"""


def ended(code: int | None, err: str = "") -> Ended:
    return Ended(code=code, out="", err=err)


def test_what_no_command_may_do() -> None:
    assert fault(ended(None)) == "hang"
    assert fault(ended(-signal.SIGSEGV)) == "traceback"
    assert fault(ended(1, "Traceback (most recent call last):\n")) == "traceback"
    assert fault(ended(1, "bfl-run: unforeseen KeyError in loop.py, line 3: 'a'")) == "traceback"
    assert fault(ended(2, "bfl-run: seed: got -1, allowed: a whole number of at least 0")) is None


def test_failures_are_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally("stage")
    tally.add("told", "a case", ended(1))
    tally.add("silent", "another", ended(0, "said"))
    assert "silent: another -> 0 said" in capsys.readouterr().out
    assert str(tally).startswith("stage: 2 cases: 1 told, 0 traceback, 0 hang, 1 silent")
    assert len(tally.failures) == 1


@pytest.mark.parametrize(
    ("point", "failure", "left"),
    [
        ("0", "", {}),
        ("1", "", {"a": b"01234"}),  # in the middle of the write
        ("2", "", {"a": b"0123456789"}),
        ("3", "", {"b": b"0123456789"}),
        ("1", "28", {"a": b"01234"}),
        ("3", "30", {"b": b"0123456789"}),
    ],
)
def test_points_are_where_files_change(point: str, failure: str, left: dict[str, bytes], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, point, failure], capture_output=True, cwd=ROOT)
    assert done.returncode == (1 if failure else -signal.SIGKILL), done.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == left


def test_every_key_of_the_config_is_found() -> None:
    found = {key.key for key in find_keys()}
    assert {"seed", "local.lr", "server.momentum", "eval.ood", "model.hidden", "partition.alpha"} <= found
    assert {"method.gamma", "method.weights", "aggregator.running_clamp", "engine.workers"} <= found
    assert len(found) > 120


def test_words_are_drawn_from_an_annotation() -> None:
    (rounds,) = (key for key in find_keys() if key.key == "rounds")
    drawn = draw_words(rounds.annotation, 30, seed=0)
    assert len(set(drawn)) == 30
    assert drawn == draw_words(rounds.annotation, 30, seed=0)
    assert drawn != draw_words(rounds.annotation, 30, seed=1)


def test_what_does_not_fit_has_to_be_refused_by_name(tmp_path: Path) -> None:
    key = Key("local.epochs", int, ())
    refusal = f"bfl-run: {ConfigError('local.epochs', 'a', 'a whole number')}"
    assert judge(ended(2, refusal), key, "a", tmp_path) == "refused"
    assert judge(ended(2, "bfl-run: no"), key, "a", tmp_path) == "unnamed"
    assert judge(ended(0), key, "a", tmp_path) == "silent"
    assert judge(ended(0), key, "3", tmp_path) == "taken"
    (tmp_path / "outputs" / "run").mkdir(parents=True)
    assert judge(ended(2, refusal), key, "a", tmp_path) == "written"


def test_every_function_of_a_method_misbehaves_somewhere() -> None:
    places = {case.where for case in cases() if case.part == "method"}
    assert {"init", "init_client", "broadcast", "message", "local", "memory", "metrics", "state", "draws"} <= places
    assert {case.part for case in cases()} == {"method", "aggregator", "model", "dataset", "partition", "observer"}
    assert sum(case.allowed for case in cases()) < len(list(cases())) / 5


def test_a_child_cannot_hang_for_ever(tmp_path: Path) -> None:
    command = "from tests.campaign.driving import fork; from pathlib import Path; import time; "
    command += "print(fork(lambda: time.sleep(60), Path.cwd(), seconds=0.2).code, fork(lambda: 3, Path.cwd()).code)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.stdout.split() == ["None", "3"], done.stderr
