"""Checkpoints: whole or not there, whatever moment a run dies at."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from bfl_bench.errors import RunError
from bfl_bench.method import Tensors
from bfl_bench.run import checkpoint as checkpoint_module
from bfl_bench.run.checkpoint import Checkpoint, CheckpointFolder
from bfl_bench.run.recorder import Notes
from tests.federation import CPU

NOTES = Notes(
    bytes_up=12,
    tables={"metrics.csv": {"length": 345, "columns": ["round"], "sha256": "0"}},
    personal={"3": [0.5, 1.5]},
)


def make_state(value: float) -> Tensors:
    """Several types and shapes, one of them not contiguous."""
    return {
        "params": torch.arange(6.0) * value,
        "precision": (torch.arange(6.0).view(2, 3) * value).t().double(),
        "count": torch.tensor(int(value)),
    }


def make_memory(client: int, round_: int) -> Tensors:
    return {"drift": torch.full((3,), client + round_ / 10)}


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def assert_equal(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name])


def load(path: Path) -> Checkpoint:
    """As a new process would."""
    saved = CheckpointFolder(path).load(CPU)
    assert saved is not None
    return saved


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def test_nothing_to_load(path: Path) -> None:
    assert CheckpointFolder(path).load(CPU) is None
    path.mkdir()
    assert CheckpointFolder(path).load(CPU) is None


def test_round_trip(path: Path) -> None:
    folder = CheckpointFolder(path)
    folder.save(7, make_state(2.5), {0: make_memory(0, 7), 12: make_memory(12, 7)}, NOTES)
    saved = load(path)
    assert saved.round == 7
    assert saved.notes == NOTES
    assert_equal(saved.state, make_state(2.5))
    assert saved.memories.keys() == {0, 12}
    assert_equal(saved.memories[12], make_memory(12, 7))


def test_clients_of_earlier_rounds_are_kept_and_not_rewritten(path: Path) -> None:
    folder = CheckpointFolder(path)
    folder.save(1, make_state(1.0), {0: make_memory(0, 1), 1: make_memory(1, 1)}, Notes())
    before = {name: (path / name).stat() for name in names(path)}
    folder.save(2, make_state(2.0), {1: make_memory(1, 2), 11: make_memory(11, 2)}, Notes())
    expected = {"client-0-1", "client-1-2", "client-11-2", "server-2"}
    assert names(path) == {f"{name}.safetensors" for name in expected} | {"manifest.json"}
    after = (path / "client-0-1.safetensors").stat()
    old = before["client-0-1.safetensors"]
    assert (after.st_mtime_ns, after.st_ino) == (old.st_mtime_ns, old.st_ino)
    saved = load(path)
    assert saved.round == 2
    assert_equal(saved.state, make_state(2.0))
    assert saved.memories.keys() == {0, 1, 11}
    for client, round_ in {0: 1, 1: 2, 11: 2}.items():
        assert_equal(saved.memories[client], make_memory(client, round_))


def test_a_resumed_run_goes_on_where_it_was(path: Path) -> None:
    CheckpointFolder(path).save(1, make_state(1.0), {0: make_memory(0, 1), 1: make_memory(1, 1)}, Notes())
    folder = CheckpointFolder(path)
    folder.load(CPU)
    folder.save(2, make_state(2.0), {1: make_memory(1, 2)}, Notes())
    saved = load(path)
    assert_equal(saved.memories[0], make_memory(0, 1))
    assert_equal(saved.memories[1], make_memory(1, 2))
    assert "client-1-1.safetensors" not in names(path)


def die(*_: Any, **__: Any) -> None:
    raise MemoryError("killed")


@pytest.mark.parametrize("moment", ["manifest", "second file"])
def test_a_crash_while_saving_leaves_the_checkpoint_before(
    path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    folder = CheckpointFolder(path)
    folder.save(1, make_state(1.0), {0: make_memory(0, 1), 1: make_memory(1, 1)}, NOTES)
    complete = names(path)
    with monkeypatch.context() as patch:
        if moment == "manifest":
            patch.setattr(checkpoint_module, "write_json", die)
        else:
            write_bytes = checkpoint_module.write_bytes
            written: list[Path] = []

            def write_one(file: Path, content: bytes) -> None:
                if written:
                    file.with_name(file.name + ".tmp").write_bytes(content[:9])
                    raise MemoryError("killed")
                written.append(file)
                write_bytes(file, content)

            patch.setattr(checkpoint_module, "write_bytes", write_one)
        with pytest.raises(MemoryError):
            folder.save(2, make_state(2.0), {1: make_memory(1, 2)}, Notes())
    assert names(path) > complete  # it died with files of round 2 on disk
    saved = load(path)
    assert saved.round == 1
    assert saved.notes == NOTES
    assert_equal(saved.state, make_state(1.0))
    assert_equal(saved.memories[1], make_memory(1, 1))
    assert names(path) == complete


def test_a_crash_in_the_first_round(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "write_json", die)
        with pytest.raises(MemoryError):
            CheckpointFolder(path).save(1, make_state(9.0), {0: make_memory(5, 5)}, Notes())
    folder = CheckpointFolder(path)
    assert folder.load(CPU) is None
    folder.save(1, make_state(1.0), {0: make_memory(0, 1)}, Notes())
    saved = load(path)
    assert_equal(saved.state, make_state(1.0))
    assert_equal(saved.memories[0], make_memory(0, 1))


def test_a_crash_before_tidying_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is in place, the files of the round before still lie about: the new checkpoint counts."""
    folder = CheckpointFolder(path)
    folder.save(1, make_state(1.0), {1: make_memory(1, 1)}, Notes())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die)
        with pytest.raises(MemoryError):
            folder.save(2, make_state(2.0), {1: make_memory(1, 2)}, Notes())
    assert {"server-1.safetensors", "server-2.safetensors"} <= names(path)
    saved = load(path)
    assert saved.round == 2
    assert_equal(saved.memories[1], make_memory(1, 2))
    assert names(path) == {"server-2.safetensors", "client-1-2.safetensors", "manifest.json"}


def test_orphans_are_removed_at_load(path: Path) -> None:
    CheckpointFolder(path).save(3, make_state(1.0), {4: make_memory(4, 3)}, Notes())
    complete = names(path)
    for orphan in ("server-4.safetensors", "client-4-4.safetensors", "client-9-4.safetensors", "manifest.json.tmp"):
        (path / orphan).write_bytes(b"left by a killed round")
    load(path)
    assert names(path) == complete


def test_nothing_is_pickled(path: Path) -> None:
    CheckpointFolder(path).save(1, make_state(1.0), {0: make_memory(0, 1)}, NOTES)
    for file in path.iterdir():
        if file.suffix == ".json":
            assert json.loads(file.read_text())["round"] == 1
        else:
            assert file.suffix == ".safetensors"
            with safe_open(file, "pt") as tensors:
                assert tensors.keys()


def test_notes_of_another_version_end_in_a_sentence_or_get_defaults(path: Path) -> None:
    CheckpointFolder(path).save(1, make_state(1.0), {}, NOTES)
    manifest = path / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["notes"]["personal"]
    manifest.write_text(json.dumps(content | {"seal": checkpoint_module._seal(content)}))
    assert load(path).notes == Notes(bytes_up=12, tables=NOTES.tables)
    content["notes"]["mood"] = "good"
    manifest.write_text(json.dumps(content | {"seal": checkpoint_module._seal(content)}))
    with pytest.raises(RunError, match=r"manifest\.json holds mood.*force=true"):
        CheckpointFolder(path).load(CPU)


def test_another_schema_version(path: Path) -> None:
    CheckpointFolder(path).save(1, make_state(1.0), {}, Notes())
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema_version": 99}))
    with pytest.raises(RunError, match="schema version 99"):
        CheckpointFolder(path).load(CPU)
    assert (path / "server-1.safetensors").exists()


def test_one_tensor_under_two_names(path: Path) -> None:
    vector = torch.arange(6.0)
    CheckpointFolder(path).save(1, {"a": vector, "b": vector, "c": vector.view(2, 3).T}, {}, Notes())
    loaded = CheckpointFolder(path).load(torch.device("cpu"))
    assert loaded is not None
    assert torch.equal(loaded.state["b"], vector)
    assert torch.equal(loaded.state["c"], vector.view(2, 3).T)


def test_a_damaged_file_is_named(path: Path) -> None:
    CheckpointFolder(path).save(1, {"a": torch.ones(3)}, {}, Notes())
    (path / "server-1.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(RunError, match=r"server-1\.safetensors is damaged"):
        CheckpointFolder(path).load(CPU)


@pytest.mark.parametrize("name", ["server-2.safetensors", "client-0-1.safetensors", "client-1-2.safetensors"])
@pytest.mark.parametrize("damage", ["bit", "zeros", "cut", "other"])
def test_a_damaged_file_is_named_and_not_believed(path: Path, name: str, damage: str) -> None:
    """One bit, zeros, half of it, or another client's file in its place."""
    folder = CheckpointFolder(path)
    folder.save(1, make_state(1.0), {0: make_memory(0, 1), 1: make_memory(1, 1)}, Notes())
    folder.save(2, make_state(2.0), {1: make_memory(1, 2), 7: make_memory(7, 2)}, Notes())
    load(path)
    content = bytearray((path / name).read_bytes())
    if damage == "bit":
        content[-2] ^= 1
    elif damage == "zeros":
        content[-4:] = bytes(4)
        content[-8:-4] = bytes(4)
    elif damage == "cut":
        del content[len(content) // 2 :]
    else:
        content = bytearray((path / "client-7-2.safetensors").read_bytes())
    (path / name).write_bytes(content)
    with pytest.raises(RunError, match=rf"{name} is damaged .*force=true"):
        CheckpointFolder(path).load(CPU)


@pytest.mark.parametrize("key", ["round", "server", "clients", "notes", "sha256"])
def test_an_edited_manifest_is_named_and_not_believed(path: Path, key: str) -> None:
    folder = CheckpointFolder(path)
    folder.save(1, make_state(1.0), {0: make_memory(0, 1), 1: make_memory(1, 1)}, NOTES)
    manifest = path / "manifest.json"
    content = json.loads(manifest.read_text())
    changed: dict[str, Any] = {"round": 0, "server": "client-0-1.safetensors", "clients": {}, "notes": {}, "sha256": {}}
    manifest.write_text(json.dumps(content | {key: changed[key]}))
    with pytest.raises(RunError, match=r"manifest\.json is damaged or was edited.*force=true"):
        CheckpointFolder(path).load(CPU)
    manifest.write_text(json.dumps({name: value for name, value in content.items() if name != "seal"}))
    with pytest.raises(RunError, match="damaged or was edited"):
        CheckpointFolder(path).load(CPU)
