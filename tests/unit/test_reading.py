"""Files that anybody may have written: reading them ends in plain values, or in a sentence with the file's name."""

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bfl_bench import reading, records
from bfl_bench.errors import DamagedError
from bfl_bench.identity import load_config, read_config
from tests.composing import SMALL, only_folder
from tests.conftest import BflRun

BOMB = "a: &a [x,x]\n" + "\n".join(f"{b}: &{b} [*{a},*{a}]" for a, b in zip("abcdefghij", "bcdefghijk", strict=True))


def refuses(path: Path, reason: str, kind: str = "yaml") -> None:
    with pytest.raises(DamagedError, match=rf"^{path} .*{reason}"):
        getattr(reading, f"read_{kind}")(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe\x00", "it is no text"),
        (b"a: [1", "is damaged: while parsing"),
        (b"", "it holds no keys"),
        (b"- 1", "it holds no keys"),
        (b"seed: 3\n---\nseed: 4", "expected a single document"),
        (BOMB.encode(), r"it has an alias, \*a"),
        (b"a: !!python/object/apply:os.system [touch made]", "it has a tag"),
        (b"a: !x 3", "it has a tag"),
        (b"a: !!binary aGk=", "it has a tag"),
        (b"a: 2026-01-01", "a value is datetime"),
        (b"1: a", "a key is 1"),
        (b"a: " + b"[" * 41 + b"]" * 41, "nested more than 40"),
        (b"a: " + b"[" * 100_000, "nested more than 40"),
        (b"a: '" + b"x" * 2**20 + b"'", "bytes, at most 1,048,576"),
        (b"a: " + b"9" * 5000, "is damaged: Exceeds the limit"),
    ],
)
def test_yaml_that_is_no_config(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    refuses(path, reason)
    assert read_config(tmp_path) is None
    with pytest.raises(DamagedError):
        load_config(tmp_path)
    assert not Path("made").exists()


def test_plain_yaml_is_read_as_it_is(tmp_path: Path) -> None:
    values: dict[str, Any] = {"a": [1, 2.5, None, True, "x", {"b": []}], "c": {"d": {}}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(values))
    assert reading.read_yaml(tmp_path / "x.yaml") == values


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"a": 1', "is damaged: Expecting"),
        (b"[1]", "it holds no JSON object"),
        (b"null", "it holds no JSON object"),
        (b"\x80", "it is no text"),
        (b'{"a":' * 100_000, "is damaged: maximum recursion depth"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is damaged: Exceeds the limit"),
    ],
)
def test_json_that_is_no_object(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(content)
    refuses(path, reason, "json")
    with pytest.raises(DamagedError, match=r"summary\.json is damaged"):
        records.read_json(path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("summary.json", {"status": 3}),
        ("summary.json", {"final": [1]}),
        ("summary.json", {"final": {"ga": "high"}}),
        ("summary.json", {"best": {"ga": True}}),
        ("environment.json", {"own_code": []}),
        ("environment.json", {"earlier_code": {}}),
        ("manifest.json", {"round": "3"}),
        ("manifest.json", {"clients": []}),
    ],
)
def test_values_of_other_types_are_damage(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / name
    good = {"status": "done", "rounds": 2, "final": {"ga": 0.5, "la": None}, "best": None, "round": 3, "own_code": {}}
    records.write_json(path, good)
    assert records.read_json(path)
    records.write_json(path, good | changes)
    with pytest.raises(DamagedError, match=rf"{name} is damaged"):
        records.read_json(path)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe, folder, absent = tmp_path / "pipe", tmp_path / "folder", tmp_path / "absent"
    os.mkfifo(pipe)
    folder.mkdir()
    for kind in ("yaml", "json", "table", "arrays"):
        refuses(pipe, "it is no regular file", kind)
        refuses(folder, "it is no regular file|Is a directory", kind)
        with pytest.raises(FileNotFoundError):
            getattr(reading, f"read_{kind}")(absent)
    (tmp_path / "file.json").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path / "file.json")
    assert reading.read_json(tmp_path / "link.json") == {}
    assert records.read_json(absent) is None


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(reading.LARGEST + 1)  # takes no room on the disk
    refuses(path, "bytes, at most", "json")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "it is empty"),
        ("round,ga\n1,0.5,3\n", "line 2 has 3 cells for 2 columns"),
        ("round,ga\n1,0.5\n2\n", "line 3 has 1 cells for 2 columns"),
        ("round,ga\n1,high\n", "could not convert"),
        ("round,ga\n²,1\n", "invalid literal"),
        ("round,ga\n1," + "x" * 200_000 + "\n", "field larger"),
    ],
)
def test_tables_that_are_none(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(content)
    with pytest.raises(DamagedError, match=rf"metrics\.csv is damaged: .*{reason}"):
        records.read_table(path)


def test_a_table_saved_by_a_spreadsheet_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"round,ga\r\n1,0.5\r\n2,\r\n")
    assert records.read_table(path) == [{"round": 1, "ga": 0.5}, {"round": 2, "ga": None}]


def test_arrays_are_read(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6).reshape(2, 3), "b": np.array("text"), "c": np.array(3), "d": np.zeros((0, 4))}
    arrays["f"] = np.asfortranarray(arrays["a"] * 1.5)
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    read = reading.read_arrays(tmp_path / "x.npz")
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        assert np.array_equal(read[name], array)


def npz_announcing(shape: tuple[int, ...], dtype: str, content: bytes) -> bytes:
    npy, archive = io.BytesIO(), io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(npy, header)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("indices.npy", npy.getvalue() + content)
    return archive.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (npz_announcing((10**12,), "<i8", bytes(80)), "announced, and 80 bytes are there"),
        (npz_announcing((3,), "<i8", bytes(16)), "announced, and 16 bytes"),
        (npz_announcing((3,), "|O", bytes(24)), "allow_pickle=False"),
        (b"PK\x05\x06", "is damaged"),
        (b"no zip", "is damaged"),
    ],
)
def test_arrays_that_are_none(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "partition.npz"
    path.write_bytes(content)
    refuses(path, reason, "arrays")


def test_an_archive_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(200_000))
    monkeypatch.setattr(reading, "LARGEST", 10**6)
    refuses(tmp_path / "x.npz", "unpacked it has more than", "arrays")


def test_configs_are_written_without_aliases(tmp_path: Path) -> None:
    shared = [1, 2]
    records.start(tmp_path, {"a": shared, "b": {"c": shared}}, force=False)
    assert reading.read_yaml(tmp_path / "config.yaml") == {"schema_version": 1, "a": [1, 2], "b": {"c": [1, 2]}}


def test_a_config_is_not_rewritten_by_every_start(tmp_path: Path) -> None:
    records.start(tmp_path, {"a": 1}, force=False)
    before = (tmp_path / "config.yaml").stat()
    records.start(tmp_path, {"a": 1}, force=False)
    after = (tmp_path / "config.yaml").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    records.start(tmp_path, {"a": 2}, force=False)
    assert reading.read_yaml(tmp_path / "config.yaml")["a"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("config.yaml", "cut"),
        ("config.yaml", "bomb"),
        ("config.yaml", "pipe"),
        ("summary.json", "deep"),
        ("summary.json", "folder"),
    ],
)
def test_a_damaged_run_folder_is_one_sentence(name: str, damage: str, bfl_run: BflRun, tmp_path: Path) -> None:
    words = [*SMALL, "method=fedavg", "rounds=1"]
    assert bfl_run(*words).code == 0
    path = only_folder(tmp_path / "outputs") / name
    text = path.read_text()
    path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    elif damage == "folder":
        path.mkdir()
    else:
        path.write_text({"cut": text[: len(text) // 2] + "\n{", "bomb": BOMB, "deep": '{"a":' * 5000}[damage])
    result = bfl_run(*words)
    assert result.code == 1
    assert "Traceback" not in result.err
    assert result.err.startswith(f"bfl-run: outputs/{path.parent.name}/{name} ")
    assert result.err.endswith("; use another `out`, or force=true\n")
    assert bfl_run(*words, "force=true").code == 0


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb:\n- 1\n- {c: 2}\n\n# said\nc:\n  d: [1,\n    2]\n  e: |\n    f: 1\na: 2\n",
        "a: 1\n'b': 2\n? c\n: 3\n",
        "a: 1\r\nb:\r\n  c: 2\r\n",
        "a: 'x\n\n  b: 1'\nc: 2\n",
        "# first\na: 1\n",
        "{a: 1,\nb: 2}\n",
        "---\na: 1\n",
    ],
)
def test_a_file_read_by_sections_is_as_in_one_piece(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(text.encode())
    expected = yaml.safe_load(text)
    for _ in range(2):
        found = reading.read_yaml(tmp_path / "config.yaml")
        assert found == expected
        assert list(found) == list(expected)


@pytest.mark.parametrize(
    "text",
    [" a: 1\nb: 2\n", "a: 1\n...\nb: 2\n", "a: 1\n---\nb: 2\n", "a: x\nb\n", "a: &x 1\nb: *x\n", "a: 'x\nb: 1\n", ""],
)
def test_what_is_no_mapping_in_one_piece_is_none_in_sections(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(DamagedError, match=r"config\.yaml is damaged"):
        reading.read_yaml(tmp_path / "config.yaml")
