"""Trackers: what they wrote reads back as metrics.csv, also of a run that was interrupted; none is imported unasked."""

import importlib.util
import json
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bfl_bench import records
from bfl_bench.run.observers import ProgressLines
from tests.composing import SMALL, only_folder
from tests.conftest import BflRun

NAMES = ("tensorboard", "mlflow", "wandb")
SHOWN = ("ga", "nll", "bytes_up")


@pytest.mark.parametrize("name", NAMES)
def test_one_that_is_not_installed_is_a_sentence(
    name: str, bfl_run: BflRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else find(module))
    result = bfl_run(*SMALL, "method=fedavg", f"observer={name}")
    assert result.code == 2
    allowed = f"a tracker that is installed: pip install 'bfl-bench[{name}]'"
    assert result.err == f"bfl-run: observer: got '{name}', allowed: {allowed}\n"
    assert not (tmp_path / "outputs").exists()


def test_no_tracker_is_imported_unasked() -> None:
    code = (
        "import sys, bfl_bench.build, bfl_bench.run.loop, bfl_bench.run.trackers\n"
        f"print([name for name in {NAMES!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


class _Killing(ProgressLines):
    """Ends a run in its third round as a kill would: no observer is told."""

    def round(self, round_: int, row: Mapping[str, Any] | None) -> None:
        if round_ == 3:
            raise OSError("killed")


@pytest.fixture
def tracked(bfl_run: BflRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run with a tracker, killed in its third round, which is played again; return the folder and its metrics."""
    from bfl_bench.run import observers

    def run(name: str) -> tuple[Path, dict[str, list[float]]]:
        words = [*SMALL, "method=fedavg", "rounds=4", "checkpoint.every=2", f"observer={name}"]
        with monkeypatch.context() as patch:
            patch.setattr(observers, "show_progress", lambda bar: _Killing())
            assert bfl_run(*words).code == 1
        result = bfl_run(*words)
        assert result.code == 0, result.err
        assert "continuing after round 2" in result.err
        folder = only_folder(tmp_path / "outputs") if name != "mlflow" else next((tmp_path / "outputs").glob("synth*"))
        rows = records.read_table(folder / records.METRICS)
        assert [row["round"] for row in rows] == [1, 2, 3, 4]
        return folder, {column: [float(row[column] or 0) for row in rows] for column in SHOWN}

    return run


@pytest.mark.trackers
@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
def test_event_files_of_tensorboard(tracked: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, expected = tracked("tensorboard")
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for column in SHOWN:
        found = events.Scalars(column)
        assert [event.step for event in found] == [1, 2, 3, 4]
        assert [event.value for event in found] == pytest.approx(expected[column], rel=1e-6)  # float32
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    method.name: fedavg\n" in text


@pytest.mark.trackers
@pytest.mark.filterwarnings("ignore")
def test_database_of_mlflow(tracked: Any, tmp_path: Path) -> None:
    folder, expected = tracked("mlflow")
    with sqlite3.connect(tmp_path / "outputs" / "mlflow.db") as database:
        runs = database.execute("select run_uuid, name, status from runs").fetchall()
        (number,) = [run for run, name, status in runs if (name, status) == (folder.name, "FINISHED")]
        assert len(runs) == 1  # the continued run goes on in the same one
        for column in SHOWN:
            query = "select step, value from metrics where run_uuid = ? and key = ?"
            found = dict(database.execute(query, (number, column)).fetchall())
            assert [found[step] for step in (1, 2, 3, 4)] == expected[column]
        parameters = dict(database.execute("select key, value from params where run_uuid = ?", (number,)).fetchall())
    assert parameters["method.name"] == "fedavg"
    assert parameters["local.lr"] == "0.05"


@pytest.mark.trackers
@pytest.mark.filterwarnings("ignore")
def test_offline_files_of_weights_and_biases(tracked: Any) -> None:
    from wandb.proto import wandb_internal_pb2

    folder, expected = tracked("wandb")
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert files
    found: dict[str, dict[int, float]] = {column: {} for column in SHOWN}
    ids: set[str] = set()
    for file in files:
        for content in read_log(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            for column in SHOWN:
                if column in items:
                    found[column][int(json.loads(items["_step"]))] = json.loads(items[column])
    assert ids == {folder.name}
    for column in SHOWN:
        assert [found[column][step] for step in (1, 2, 3, 4)] == pytest.approx(expected[column])


def read_log(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, after seven bytes of its own: blocks of 32 KiB, in them
    pieces of records with checksum, length and kind (1 whole, 2 first, 3 middle, 4 last)."""
    place, record = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""
