"""Checkpoints: whole or not there, whatever moment a run dies at."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from bfl_bench import records
from bfl_bench.errors import RunError
from bfl_bench.method import Tensors
from bfl_bench.run import checkpoint as checkpoint_module
from bfl_bench.run.checkpoint import Checkpoint, CheckpointFolder, Memories
from bfl_bench.run.loop import run
from bfl_bench.run.recorder import Notes
from tests.composing import choose, experiment, run_in
from tests.federation import CPU
from tests.test_contract import Killer

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
    expected = {"client-0-1", "client-1-2", "client-11-2", "server-2", "server-1", "client-1-1"}
    assert names(path) == {f"{name}.safetensors" for name in expected} | {"manifest.json", "previous.json"}
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
    folder.finish()
    assert names(path) == {
        "manifest.json",
        *(f"{name}.safetensors" for name in ("server-2", "client-0-1", "client-1-2")),
    }
    assert_equal(load(path).memories[0], make_memory(0, 1))


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

            def write_one(file: Path, content: bytes, durable: bool = False) -> None:
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
    monkeypatch.setattr(checkpoint_module, "SYNC_SECONDS", 0.0)
    folder = CheckpointFolder(path)
    for round_ in (1, 2):
        folder.save(round_, make_state(round_), {1: make_memory(1, round_)}, Notes())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die)
        with pytest.raises(MemoryError):
            folder.save(3, make_state(3.0), {1: make_memory(1, 3)}, Notes())
    assert {"server-1.safetensors", "server-2.safetensors", "server-3.safetensors"} <= names(path)
    saved = load(path)
    assert saved.round == 3
    assert_equal(saved.memories[1], make_memory(1, 3))
    kept = {f"{name}.safetensors" for name in ("server-3", "client-1-3", "server-2", "client-1-2")}
    assert names(path) == kept | {"manifest.json", "previous.json"}


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
def test_a_damaged_file_is_named_and_not_believed(
    path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit, zeros, half of it, or another client's file in its place. The checkpoint before is, if it is whole."""
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
    if name == "client-0-1.safetensors":  # which both need
        with pytest.raises(RunError, match=rf"{name} is damaged .*force=true"):
            CheckpointFolder(path).load(CPU)
        return
    saved = load(path)
    assert saved.round == 1
    assert_equal(saved.state, make_state(1.0))
    assert_equal(saved.memories[1], make_memory(1, 1))
    (said,) = caplog.messages
    assert f"{name} is damaged" in said
    assert "going on after round 1, from the checkpoint before" in said
    complete = {f"{file}.safetensors" for file in ("server-1", "client-0-1", "client-1-1")} | {"manifest.json"}
    assert names(path) == complete
    assert load(path).round == 1  # it is the newest now


@pytest.mark.parametrize("damage", ["cut", "edited", "list", "gone"])
def test_a_damaged_manifest_is_replaced_by_the_one_before(
    damage: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointFolder(path)
    folder.save(1, make_state(1.0), {}, NOTES)
    folder.save(2, make_state(2.0), {}, Notes())
    manifest = path / "manifest.json"
    text = manifest.read_text()
    changed = {"cut": text[:50], "edited": text.replace('"round": 2', '"round": 7'), "list": "[]"}
    manifest.unlink() if damage == "gone" else manifest.write_text(changed[damage])
    saved = load(path)
    assert (saved.round, saved.notes) == (1, NOTES)
    assert "manifest.json is " in caplog.text


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its files, those of clients that did not take part in the round included; but not in every round."""
    events: list[tuple[str, str]] = []
    replace = Path.replace
    for module in (checkpoint_module, records):
        monkeypatch.setattr(module, "sync", lambda file: events.append(("sync", file.name)))
    monkeypatch.setattr(Path, "replace", lambda self, to: (events.append(("name", to.name)), replace(self, to))[1])
    table = path.parent / "metrics.csv"
    folder = CheckpointFolder(path)
    folder.save(1, make_state(1.0), {0: make_memory(0, 1)}, Notes(), [table])
    before = events[: events.index(("name", "manifest.json"))]
    synced = {"metrics.csv", "server-1.safetensors", "client-0-1.safetensors", "manifest.json.tmp"}
    assert {name for kind, name in before if kind == "sync"} == synced
    assert events[-1] == ("sync", "checkpoint")
    events.clear()
    folder.save(2, make_state(2.0), {0: make_memory(0, 2)}, Notes(), [table])
    assert {kind for kind, _ in events} == {"name"}
    monkeypatch.setattr(checkpoint_module, "SYNC_SECONDS", 0.0)
    events.clear()
    folder.save(3, make_state(3.0), {1: make_memory(1, 3)}, Notes(), [table])
    before = events[: events.index(("name", "manifest.json"))]
    synced = {"metrics.csv", "manifest.json.tmp"} | {
        f"{n}.safetensors" for n in ("server-3", "client-0-2", "client-1-3")
    }
    assert {name for kind, name in before if kind == "sync"} == synced
    assert json.loads((path / "previous.json").read_text())["round"] == 1  # which was on the disk all the time


def test_a_folder_that_is_a_link_is_left_alone(path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious.txt").touch()
    path.symlink_to(elsewhere)
    with pytest.raises(RunError, match="is a symbolic link"):
        CheckpointFolder(path).load(CPU)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "checkpoint").symlink_to(elsewhere)
    records.start(run_folder, {"a": 1}, force=True)
    assert not (run_folder / "checkpoint").exists()
    assert (elsewhere / "precious.txt").exists()


def test_foreign_files_in_the_folder_stay(path: Path) -> None:
    CheckpointFolder(path).save(1, make_state(1.0), {}, Notes())
    (path / "notes.txt").touch()
    load(path)
    assert "notes.txt" in names(path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"params": torch.zeros(3, dtype=torch.float64)}, r"params is torch.float64 \(3,\), expected torch.float32"),
        ({"params": torch.zeros(4)}, r"params is torch.float32 \(4,\), expected torch.float32 \(3,\)"),
        ({"count": None}, r"count is nothing, expected torch.int64 \(\)"),
    ],
)
def test_what_a_method_would_not_make_is_refused(changes: dict[str, Any], sentence: str, path: Path) -> None:
    made = {"params": torch.zeros(3), "count": torch.tensor(0), "grown": torch.zeros(0)}
    saved = {name: value for name, value in (made | {"grown": torch.ones(5)} | changes).items() if value is not None}
    checkpoint_module.check_kinds(path, made | {"grown": torch.ones(5), "more": torch.ones(1)}, made)
    with pytest.raises(RunError, match=sentence):
        checkpoint_module.check_kinds(path, saved, made)


@pytest.mark.parametrize("method", ["scaffold", "fola"])
def test_a_run_goes_on_from_the_checkpoint_before_to_the_same_bytes(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint_module, "SYNC_SECONDS", 0.0)
    overrides = [*choose(method), "rounds=4", "participation=0.5"]
    whole = run_in(tmp_path / "whole", *overrides)
    folder = tmp_path / "parts"
    folder.mkdir()
    with pytest.raises(MemoryError):
        run(experiment(*overrides), folder, [Killer(3, folder)])
    server = folder / "checkpoint" / "server-3.safetensors"
    content = bytearray(server.read_bytes())
    content[-2] ^= 1
    server.write_bytes(content)
    assert run_in(folder, *overrides) == whole
    assert "going on after round 2" in caplog.text
    for name in (records.CLIENTS, records.RELIABILITY):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((folder / "checkpoint").glob("previous*"))


def test_private_states_beyond_the_bound_are_in_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "LARGEST_HELD", 24)  # two states of three numbers
    folder, memories = CheckpointFolder(path), Memories(path, CPU)
    for client in (7, 3, 5, 1):
        memories.put(client, 1, make_memory(client, 1))
    assert memories.unwritten().keys() == {5, 1}
    assert {client: name for client, (name, _) in memories.early().items()} == {
        7: "client-7-1.safetensors",
        3: "client-3-1.safetensors",
    }
    assert list(memories) == [1, 3, 5, 7]
    assert 4 not in memories
    assert_equal(memories[5], make_memory(5, 1))  # now it was used later than 1, which is not in a file
    assert_equal(memories[7], make_memory(7, 1))
    assert memories.early().keys() == {7, 3, 1}
    memories.put(3, 2, make_memory(3, 2))  # its early file is of no use any more
    assert CheckpointFolder(path).load(CPU) is None  # nothing names what was written early
    for client in (7, 3, 5, 1):
        memories.put(client, 2, make_memory(client, 2))
    files = folder.save(2, make_state(2.0), memories.unwritten(), Notes(), early=memories.early())
    memories.settle(files)
    assert (memories.unwritten(), memories.early()) == ({}, {})
    assert names(path) == {f"client-{client}-2.safetensors" for client in (7, 3, 5, 1)} | {
        "server-2.safetensors",
        "manifest.json",
    }
    for client in (7, 3, 5, 1):
        assert_equal(memories[client], make_memory(client, 2))
        assert_equal(load(path).memories[client], make_memory(client, 2))
    assert memories.early() == {}  # what only has been read is not written again
    (path / "client-7-2.safetensors").write_bytes(b"something else")
    with pytest.raises(RunError, match=r"client-7-2\.safetensors is damaged"):
        memories[7]


@pytest.mark.parametrize("method", ["scaffold", "virtual"])
def test_a_run_with_states_in_files_is_the_same_run(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between two checkpoints too, when newer states than the checkpoint's are in files already."""
    overrides = [*choose(method), "rounds=5", "participation=0.6", "checkpoint.every=2"]
    whole = run_in(tmp_path / "whole", *overrides)
    expected = load(tmp_path / "whole" / "checkpoint").memories
    monkeypatch.setattr(checkpoint_module, "LARGEST_HELD", 1)
    folder = tmp_path / "parts"
    folder.mkdir()
    with pytest.raises(MemoryError):
        run(experiment(*overrides), folder, [Killer(3, folder)])
    assert json.loads((folder / "checkpoint" / "manifest.json").read_text())["round"] == 2
    assert list((folder / "checkpoint").glob("client-*-3.safetensors"))  # written early
    assert run_in(folder, *overrides) == whole
    found = load(folder / "checkpoint").memories
    assert found.keys() == expected.keys()
    for client, memory in found.items():
        assert_equal(memory, expected[client])


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
