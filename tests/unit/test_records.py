"""Files of a run: tables that can be cut back, JSON that is whole or absent, folders that are locked."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from bfl_bench import records
from bfl_bench.errors import RunError
from bfl_bench.identity import identity
from bfl_bench.records import Table

CONFIG: dict[str, Any] = {
    "dataset": {"name": "digits", "val": 0.1},
    "partition": {"name": "dirichlet", "alpha": 0.05, "mode": "per_class"},
    "method": {"name": "fedavg", "weights": "size"},
    "aggregator": {"name": "none"},
    "model": {"name": "mlp", "hidden": [3, 4]},
    "engine": {"name": "sequential"},
    "local": {"lr": 0.1, "clip": None},
    "checkpoint": {"every": 1},
    "seed": 3,
    "rounds": 20,
    "out": "outputs",
    "data_dir": None,
    "force": False,
    "dry_run": False,
}


def read_rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


# Tables


def test_rows_are_appended_under_one_header(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table = Table(path, ("round", "ga", "la"))
    table.append([{"round": 1, "ga": 0.5, "la": None}])
    assert table.length == path.stat().st_size
    table.append([{"ga": 0.25, "round": 2}, {"round": 3, "la": 0.1, "ga": 1.0}])
    table.append([])
    assert read_rows(path) == [
        ["round", "ga", "la"],
        ["1", "0.5", ""],
        ["2", "0.25", ""],
        ["3", "1.0", "0.1"],
    ]
    assert b"\r" not in path.read_bytes()
    assert table.length == path.stat().st_size
    rows = records.read_table(path)
    assert rows[0] == {"round": 1.0, "ga": 0.5, "la": None}
    assert rows[2] == {"round": 3.0, "ga": 1.0, "la": 0.1}


def test_nothing_appended_makes_no_file(tmp_path: Path) -> None:
    Table(tmp_path / "t.csv", ("round",)).append([])
    assert not (tmp_path / "t.csv").exists()


def test_the_first_row_brings_columns(tmp_path: Path) -> None:
    table = Table(tmp_path / "t.csv", ("round", "ga"))
    table.append([{"round": 1, "kl": 3.5, "ga": 0.5, "entropy": 2.0}])
    table.append([{"round": 2, "entropy": 1.0}])
    assert read_rows(table.path) == [
        ["round", "ga", "kl", "entropy"],
        ["1", "0.5", "3.5", "2.0"],
        ["2", "", "", "1.0"],
    ]


def test_a_later_row_brings_columns_too(tmp_path: Path) -> None:
    table = Table(tmp_path / "t.csv", ("round", "ga"))
    table.append([{"round": 1, "ga": 0.5}])
    table.append([{"round": 2, "ga": 0.25}, {"round": 3, "kl": 1.0}])
    table.append([{"round": 4, "kl": 2.0}])
    assert read_rows(table.path) == [
        ["round", "ga", "kl"], ["1", "0.5", ""], ["2", "0.25", ""], ["3", "", "1.0"], ["4", "", "2.0"]
    ]  # fmt: skip
    assert table.length == table.path.stat().st_size


def test_resuming_cuts_back_to_what_was_described(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table = Table(path, ("round", "ga"))
    table.append([{"round": 1, "ga": 0.5, "kl": 1.5}])
    whole, described = path.read_bytes(), table.describe()
    table.append([{"round": 2, "ga": 0.6}])
    with path.open("a") as file:
        file.write("3,0.7,half a li")
    again = Table(path, ("round", "ga"))
    again.resume(described)
    assert path.read_bytes() == whole
    again.append([{"round": 2, "ga": 0.75, "kl": 2.5}])  # it knows the extra column again, and writes no header
    assert read_rows(path) == [["round", "ga", "kl"], ["1", "0.5", "1.5"], ["2", "0.75", "2.5"]]
    assert again.length == path.stat().st_size


@pytest.mark.parametrize("change", [("0.5", "0.6"), ("\n", "\r\n"), ("1,0.5\n", "1,0.5\n1,0.5\n")])
def test_a_table_that_was_touched_is_named(tmp_path: Path, change: tuple[str, str]) -> None:
    """By hand, or by a program that saves it with other line ends."""
    path = tmp_path / "t.csv"
    table = Table(path, ("round", "ga"))
    table.append([{"round": 1, "ga": 0.5}])
    table.append([{"round": 2, "ga": 0.7}])
    described = table.describe()
    path.write_bytes(path.read_bytes().replace(change[0].encode(), change[1].encode(), 1))
    with pytest.raises(RunError, match=r"t\.csv was changed since.*force=true"):
        Table(path, ("round", "ga")).resume(described)


def test_resuming_takes_back_columns_that_came_later(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table = Table(path, ("round", "ga"))
    table.append([{"round": 1, "ga": 0.5}, {"round": 2, "ga": None}])
    whole, described = path.read_bytes(), table.describe()
    table.append([{"round": 3, "kl": 1.0}])
    again = Table(path, ("round", "ga"))
    again.resume(described)
    assert path.read_bytes() == whole
    path.write_text("round,loss\n1,0.5\n2,0.25\n")
    with pytest.raises(RunError, match=r"t\.csv has other columns.*force=true"):
        Table(path, ("round", "ga")).resume(described)


def test_resuming_at_nothing_removes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("left by a killed first round")
    table = Table(path, ("round",))
    table.resume(None)
    assert not path.exists()
    table.append([{"round": 1}])
    assert read_rows(path) == [["round"], ["1"]]
    Table(tmp_path / "absent.csv", ("round",)).resume({"length": 0, "columns": ["round"], "sha256": ""})


@pytest.mark.parametrize("content", [None, "round\n1\n"])
def test_resuming_a_table_that_is_too_short(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "t.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RunError, match=r"t\.csv.*force=true"):
        Table(path, ("round",)).resume({"length": 100, "columns": ["round"], "sha256": ""})
    assert content is None or path.read_text() == content


@given(st.one_of(st.floats(allow_nan=False), st.integers(-(2**53), 2**53)))
def test_numbers_read_back_exactly(value: float) -> None:
    assert float(records.format_cell(value)) == value


def test_cells() -> None:
    assert records.format_cell(None) == ""
    assert records.format_cell(0) == "0"
    assert records.format_cell(0.1 + 0.2) == "0.30000000000000004"
    assert float(records.format_cell(float("inf"))) == float("inf")


# JSON


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert records.read_json(path) is None
    content = {"x": 0.1, "nested": {"y": [1, None, "é"]}}
    records.write_json(path, content)
    assert records.read_json(path) == {"schema_version": records.SCHEMA_VERSION, **content}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def fail_half_way(path: Path, content: bytes) -> int:
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
    raise OSError(28, "No space left on device")


def fail_to_rename(path: Path, target: Path) -> Path:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(("name", "failure"), [("write_bytes", fail_half_way), ("replace", fail_to_rename)])
def test_a_failing_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, failure: Callable[..., Any]
) -> None:
    path = tmp_path / "a.json"
    records.write_json(path, {"x": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Path, name, failure)
        with pytest.raises(OSError, match=r"device|error"):
            records.write_json(path, {"x": 2})
    assert records.read_json(path) == {"schema_version": 1, "x": 1}
    records.write_json(path, {"x": 3})  # what the failure left aside is in nobody's way
    assert (records.read_json(path) or {})["x"] == 3


def test_nan_is_refused_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    records.write_json(path, {"x": 1})
    with pytest.raises(ValueError, match="JSON"):
        records.write_json(path, {"x": float("nan")})
    assert (records.read_json(path) or {})["x"] == 1


@pytest.mark.parametrize("content", [{"schema_version": 2, "x": 1}, {"x": 1}])
def test_another_schema_version(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RunError, match=r"a\.json has schema version (2|None), this program reads up to 1"):
        records.read_json(path)


# The folder of a run


def test_config_survives_yaml(tmp_path: Path) -> None:
    config = {**CONFIG, "local": {"lr": 1e-05, "huge": 1e22, "text": "1e-3", "word": "null", "yes": "yes"}}
    records.start(tmp_path, config, force=False)
    stored = yaml.safe_load((tmp_path / records.CONFIG).read_text())
    assert stored == {"schema_version": records.SCHEMA_VERSION, **config}
    assert identity(stored) == identity(config)


def fill(folder: Path) -> None:
    (folder / records.CHECKPOINT).mkdir()
    (folder / records.CHECKPOINT / "manifest.json").write_text("{}")
    (folder / records.METRICS).write_text("round\n1\n")
    (folder / records.LOCK).touch()


def test_start_keeps_what_is_there_unless_forced(tmp_path: Path) -> None:
    fill(tmp_path)
    records.start(tmp_path, CONFIG, force=False)
    everything = {records.CHECKPOINT, records.METRICS, records.LOCK, records.CONFIG}
    assert {path.name for path in tmp_path.iterdir()} == everything
    other = {**CONFIG, "seed": 9}
    records.start(tmp_path, other, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {records.LOCK, records.CONFIG}
    assert yaml.safe_load((tmp_path / records.CONFIG).read_text())["seed"] == 9


# The lock


def test_a_second_holder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    with records.locked(folder):
        assert folder.is_dir()
        with pytest.raises(RunError, match="another process"), records.locked(folder):
            pytest.fail("two hold the folder")
    with records.locked(folder):  # released
        pass
    with pytest.raises(KeyError), records.locked(folder):
        raise KeyError  # released by an error too
    with records.locked(folder), records.locked(tmp_path / "other"):  # folders do not exclude each other
        pass
    with FileLock(folder / records.LOCK), pytest.raises(RunError), records.locked(folder):
        pytest.fail("two hold the folder")


def test_another_process_is_refused_until_the_holder_is_gone(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from bfl_bench import records, errors\n"
        "try:\n"
        "    with records.locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()\n"
        "except errors.RunError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="another process"), records.locked(tmp_path):
            pytest.fail("two hold the folder")
        holder.kill()  # as the system would: nothing is tidied up
    with records.locked(tmp_path):
        pass


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    assert records.format_cell(np.float64(0.5)) == "0.5"
    assert records.format_cell(np.int64(3)) == "3"  # type: ignore[arg-type]
    assert records.format_cell(True) == "1"


def test_files_of_a_finished_run_that_were_changed_are_found(tmp_path: Path) -> None:
    table = records.Table(tmp_path / records.METRICS, ("round", "ga"))
    table.append([{"round": 1, "ga": 0.5}])
    (tmp_path / records.CHECKPOINT).mkdir()
    manifest = tmp_path / records.CHECKPOINT / records.MANIFEST
    absent = {"length": 0, "columns": [], "sha256": ""}
    notes = {"tables": {records.METRICS: table.describe(), records.RISK: absent}}
    records.write_json(manifest, {"notes": notes})
    done = {"status": "done", "final": {"round": 1, "ga": 0.5}}
    assert records.find_changed(tmp_path, done) == []
    assert records.find_changed(tmp_path, done | {"final": {"round": 1, "ga": 0.6}}) == [records.SUMMARY]
    (tmp_path / records.METRICS).write_text("round,ga\r\n1,0.5\r\n")
    assert records.find_changed(tmp_path, done) == [records.METRICS]
    assert records.find_changed(tmp_path, done | {"status": "diverged"}) == []
    (tmp_path / records.METRICS).unlink()
    assert records.find_changed(tmp_path, done) == [records.METRICS]
    manifest.write_text("{")
    assert records.find_changed(tmp_path, done) == [f"{records.CHECKPOINT}/{records.MANIFEST}"]
    manifest.unlink()
    assert records.find_changed(tmp_path, done) == []


@pytest.mark.parametrize("content", [b"\xff\xfe0,1\n", b"", b'"' + b"x" * 200_000 + b"\n"])
def test_a_table_that_is_no_text_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    described = {"length": 0 if not content else 2, "columns": ["a"], "sha256": ""}
    path.write_bytes(content or b"\n\n")
    with pytest.raises(RunError, match="has other columns than its checkpoint says"):
        records.Table(path, ("a",)).resume(described | {"length": 2})


def test_forcing_removes_first_what_says_how_far_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / records.CHECKPOINT).mkdir()
    names = (records.METRICS, records.SUMMARY, *records.CHECKPOINT_NAMES)
    for name in names:
        (tmp_path / name).write_text("{}")
    removed: list[str] = []
    unlink = Path.unlink

    def note(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", note)
    records.start(tmp_path, {"a": 1}, force=True)
    assert removed == [records.SUMMARY, records.PREVIOUS, records.MANIFEST, records.METRICS]
