"""Whatever stops a run, the same command continues it and ends with the same bytes."""

import json
import random
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.composing import COMMAND, SMALL, heed_interrupts, only_folder

LONG = [*SMALL, "rounds=80", "local.epochs=4"]


def start(out: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [COMMAND, *LONG, f"out={out}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("undisturbed")
    process = start(out)
    _, err = process.communicate()
    assert process.returncode == 0, err
    return (only_folder(out) / "metrics.csv").read_bytes()


def wait_for_rounds(process: "subprocess.Popen[str]", count: int) -> None:
    assert process.stderr is not None
    for _ in range(count):
        assert process.stderr.readline()


@pytest.mark.slow
def test_kill_and_resume(undisturbed: bytes, tmp_path: Path) -> None:
    moments = random.Random(1)
    for _ in range(3):
        process = start(tmp_path)
        wait_for_rounds(process, 5)
        time.sleep(moments.uniform(0, 0.05))  # a few rounds; three times as many are left
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (only_folder(tmp_path) / "summary.json").exists()
    process = start(tmp_path)
    _, err = process.communicate()
    assert process.returncode == 0, err
    first_round = int(re.findall(r"round (\d+)/", err)[0])
    assert first_round >= 15  # it continued; it did not start over
    assert (only_folder(tmp_path) / "metrics.csv").read_bytes() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_says_so_and_resumes(undisturbed: bytes, tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path)
    wait_for_rounds(process, 4)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "interrupted; the same command continues" in err
    assert "Traceback" not in err
    assert json.loads((only_folder(tmp_path) / "summary.json").read_text())["status"] == "interrupted"
    process = start(tmp_path)
    process.communicate()
    assert (only_folder(tmp_path) / "metrics.csv").read_bytes() == undisturbed


@pytest.mark.slow
def test_full_disk_is_one_sentence_and_the_run_resumes(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: a write fails half way in the same manner."""
    overrides = [*SMALL, "rounds=90", "local.epochs=1", "num_clients=10", "partition=iid"]
    overrides.remove("partition.min_size=5")

    def go(out: Path, largest_file: int) -> "subprocess.CompletedProcess[str]":
        limits = (largest_file, resource.RLIM_INFINITY)
        return subprocess.run(
            [COMMAND, *overrides, f"out={out}"],
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
        )

    assert go(tmp_path / "whole", resource.RLIM_INFINITY).returncode == 0
    limited = go(tmp_path / "limited", 40_000)  # the figures fit; clients.csv reaches it in the last rounds
    assert limited.returncode == 1
    assert "bfl-run: cannot read or write" in limited.stderr
    assert "Traceback" not in limited.stderr
    resumed = go(tmp_path / "limited", resource.RLIM_INFINITY)
    assert resumed.returncode == 0
    assert int(re.findall(r"round (\d+)/", resumed.stderr)[0]) > 10  # earlier rounds were kept
    for name in ("metrics.csv", "clients.csv"):
        whole, limited_ = (only_folder(tmp_path / out) / name for out in ("whole", "limited"))
        assert whole.read_bytes() == limited_.read_bytes()
