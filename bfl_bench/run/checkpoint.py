"""The state of a run on disk after a round: tensors in safetensors files, the rest in a JSON manifest.

Every file name carries the round that wrote it, and the manifest, renamed into place last, names the files that
belong together. A run killed at any moment therefore finds a whole checkpoint: the new one or the one before. The
manifest has the digests of the files and a seal over itself, so that what was damaged or edited since is named and
never believed; the run then goes on from the checkpoint before it. Nothing in it executes on load.

The one before is the last that was forced onto the disk, which is done every few seconds, as it can take longer than a
short round: a power failure costs the rounds since then.

The clients' private states are in memory up to a bound, those that were used last, and otherwise in these files alone.
One that has to leave memory before the next checkpoint is written early. Only that checkpoint's manifest names its
file: a run that is killed before goes on from the state that the last manifest names.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save

from bfl_bench.errors import DamagedError, RunError
from bfl_bench.method import Tensors
from bfl_bench.reading import read_bytes
from bfl_bench.records import CHECKPOINT, MANIFEST, PREVIOUS, SUMMARY, read_json, sync, write_bytes, write_json
from bfl_bench.run.recorder import Notes, num_bytes

log = logging.getLogger(__name__)

SYNC_SECONDS = 10.0  # at least, between two checkpoints that are forced onto the disk
MANY_FILES = 100  # that are forced onto the disk all at once, with whatever else waits for it
LARGEST_HELD = 2**29  # bytes of private states in memory
OWN_FILES = re.compile(r"(server-\d+|client-\d+-\d+)\.safetensors(\.tmp)?|(manifest|previous)\.json(\.tmp)?")


File = tuple[str, str]
"""A file's name and the sha256 of its content."""


class Memories(Mapping[int, Tensors]):
    """The clients' private states, of which those that were used last are in memory."""

    def __init__(self, path: Path, device: torch.device, files: Mapping[int, File] | None = None) -> None:
        self._path, self._device = path, device
        self._files = dict(files or {})  # with the latest states, where these are in one
        self._held: OrderedDict[int, Tensors] = OrderedDict()  # the last used at the end
        self._num_bytes = 0
        self._unwritten: dict[int, int] = {}  # clients whose latest state is in no file, and its round
        self._early: set[int] = set()  # clients whose latest state is in a file that no checkpoint names yet

    def __getitem__(self, client: int) -> Tensors:
        if client not in self._held:
            name, digest = self._files[client]
            self._hold(client, _read(self._path / name, self._device, digest))
        self._held.move_to_end(client)
        return self._held[client]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._files.keys() | self._held.keys()))

    def __len__(self) -> int:
        return len(self._files.keys() | self._held.keys())

    def put(self, client: int, round_: int, memory: Tensors) -> None:
        """Take a client's state after a round."""
        if client in self._held:
            self._num_bytes -= num_bytes(self._held.pop(client))
        self._files.pop(client, None)
        self._early.discard(client)
        self._unwritten[client] = round_
        self._hold(client, memory)

    def _hold(self, client: int, memory: Tensors) -> None:
        self._held[client] = memory
        self._num_bytes += num_bytes(memory)
        while self._num_bytes > LARGEST_HELD and len(self._held) > 1:
            self._let_go()

    def _let_go(self) -> None:
        """Drop what was not used for longest, which has to be in a file then."""
        client, memory = self._held.popitem(last=False)
        self._num_bytes -= num_bytes(memory)
        if client in self._unwritten:
            self._path.mkdir(exist_ok=True)
            name = _name_file(client, self._unwritten.pop(client))
            self._files[client] = name, write_tensors(self._path / name, memory)
            self._early.add(client)

    def unwritten(self) -> dict[int, Tensors]:
        """List the states that a checkpoint has to write."""
        return {client: self._held[client] for client in self._unwritten}

    def early(self) -> dict[int, File]:
        """List the files that were written since the last checkpoint."""
        return {client: self._files[client] for client in self._early}

    def settle(self, files: Mapping[int, File]) -> None:
        """Note where a checkpoint has all states."""
        self._files = dict(files)
        self._unwritten, self._early = {}, set()


@dataclass(frozen=True)
class Checkpoint:
    round: int
    state: Tensors
    memories: Memories
    notes: Notes


class CheckpointFolder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._newest: dict[str, Any] = {}  # its manifest
        self._kept: dict[str, Any] = {}  # manifest of the checkpoint before, which is on the disk for sure
        self._unsynced: set[str] = set()  # files of the newest that may still be on their way to the disk
        self._synced = -SYNC_SECONDS  # when

    def save(
        self,
        round_: int,
        state: Tensors,
        changed: Mapping[int, Tensors],
        notes: Notes,
        tables: Sequence[Path] = (),
        early: Mapping[int, File] | None = None,
    ) -> dict[int, File]:
        """Write the server's state and the private states that changed since the last call, but those written early.

        Return the files of all private states.
        """
        self._path.mkdir(exist_ok=True)
        early = early or {}
        server = f"server-{round_}.safetensors"
        own = {str(client): _name_file(client, round_) for client in changed}
        clients = self._newest.get("clients", {}) | {str(client): name for client, (name, _) in early.items()} | own
        written = dict(early.values()) | {server: write_tensors(self._path / server, state)}
        for client, memory in changed.items():
            written[own[str(client)]] = write_tensors(self._path / own[str(client)], memory)
        known = self._newest.get("sha256", {}) | written
        content = {
            "round": round_,
            "server": server,
            "clients": clients,
            "notes": asdict(notes),
            "sha256": {name: known[name] for name in (server, *clients.values())},
        }
        if self._newest and not self._unsynced:
            write_json(self._path / PREVIOUS, self._newest)
            self._kept = self._newest
        self._unsynced |= {*written, MANIFEST}
        durable = time.monotonic() - self._synced >= SYNC_SECONDS
        if durable:
            paths = [*tables, *(self._path / name for name in content["sha256"] if name in self._unsynced)]
            if len(paths) > MANY_FILES and sys.platform == "linux":  # which waits, as others need not
                os.sync()
            else:
                for path in paths:
                    sync(path)
        self._newest = content | {"seal": _seal(content)}
        write_json(self._path / MANIFEST, self._newest, durable)
        if durable:
            sync(self._path)
            self._unsynced, self._synced = set(), time.monotonic()
        self._tidy()
        return _list_files(self._newest)

    def finish(self) -> None:
        """Drop the checkpoint before the last one: a finished run goes on from none."""
        self._kept = {}
        self._tidy()

    def drop(self) -> None:
        """Remove all checkpoints: files of ours, and the folder where nothing else is in it."""
        if self._path.is_symlink() or not self._path.is_dir():
            return
        for path in self._path.iterdir():
            if OWN_FILES.fullmatch(path.name):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._path.rmdir()

    def load(self, device: torch.device) -> Checkpoint | None:
        """The newest whole checkpoint; None where there is none. Files that belong to none are removed."""
        if self._path.is_symlink():
            raise RunError(f"{self._path} is a symbolic link, in which nothing is written; start over with force=true")
        damages: list[DamagedError] = []
        for name in (MANIFEST, PREVIOUS):
            try:
                manifest = self._read_manifest(name)
                found = manifest and self._open(name, manifest, device)
            except DamagedError as error:
                damages.append(error)
                continue
            if not found:
                continue
            self._newest = manifest
            if name == PREVIOUS:  # from now on it is the newest
                why = damages[0] if damages else f"{self._path / MANIFEST} is missing"
                log.warning("%s; going on after round %d, from the checkpoint before", why, found.round)
                write_json(self._path / MANIFEST, manifest)
            else:
                with contextlib.suppress(DamagedError):
                    self._kept = self._read_manifest(PREVIOUS)
            self._tidy()
            return found
        if damages:
            raise RunError(f"{damages[0]}; start over with force=true")
        shutil.rmtree(self._path, ignore_errors=True)
        return None

    def _read_manifest(self, name: str) -> dict[str, Any]:
        """Read a manifest that is as it was sealed; an empty one where there is none."""
        manifest = read_json(self._path / name) or {}
        if manifest and manifest.get("seal") != _seal(manifest):
            raise DamagedError(f"{self._path / name} is damaged or was edited")
        return {key: value for key, value in manifest.items() if key != "schema_version"}

    def _open(self, name: str, manifest: Mapping[str, Any], device: torch.device) -> Checkpoint:
        def read(file: str) -> Tensors:
            return _read(self._path / file, device, manifest["sha256"][file])

        state, memories = read(manifest["server"]), Memories(self._path, device, _list_files(manifest))
        for client in memories:
            memories[client]  # which has to be what it was
        return Checkpoint(
            round=manifest["round"],
            state=state,
            memories=memories,
            notes=_read_notes(manifest["notes"], self._path / name),
        )

    def _tidy(self) -> None:
        """Remove files of ours that no checkpoint needs."""
        needed = {MANIFEST, *self._newest["sha256"], *self._kept.get("sha256", ()), *([PREVIOUS] if self._kept else ())}
        for path in self._path.iterdir():
            if path.name not in needed and OWN_FILES.fullmatch(path.name):
                path.unlink(missing_ok=True)


def _name_file(client: int, round_: int) -> str:
    return f"client-{client}-{round_}.safetensors"


def _list_files(manifest: Mapping[str, Any]) -> dict[int, File]:
    """List the files of the private states of a checkpoint."""
    digests = manifest["sha256"]
    return {int(client): (name, digests[name]) for client, name in manifest["clients"].items()}


def _seal(manifest: Mapping[str, Any]) -> str:
    """Compute the sha256 of a manifest without its seal and version."""
    content = {key: value for key, value in manifest.items() if key not in ("seal", "schema_version")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_notes(saved: dict[str, Any], path: Path) -> Notes:
    """Read notes of this version, or of an earlier one that had fewer of them."""
    if unknown := set(saved) - {field.name for field in fields(Notes)}:
        raise RunError(f"{path} holds {', '.join(sorted(unknown))}, which this version does not know; use force=true")
    return Notes(**saved)


def check_kinds(where: Path, saved: Tensors, made: Tensors) -> None:
    """Refuse a state that lacks what the method would make, or has it in another type; models keep their shape."""
    for name, tensor in made.items():
        found = saved.get(name)
        shaped = name != "params" or found is None or found.shape == tensor.shape
        if found is None or found.dtype != tensor.dtype or not shaped:
            has = "nothing" if found is None else f"{found.dtype} {tuple(found.shape)}"
            expected = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise RunError(f"{where}: {name} is {has}, expected {expected}; start over with force=true")


def read_state(folder: Path, device: torch.device) -> Tensors:
    """The server's state at the end of a finished run; the folder stays as it is."""
    summary = read_json(folder / SUMMARY)
    manifest = read_json(folder / CHECKPOINT / MANIFEST)
    if summary is None or summary["status"] != "done" or manifest is None:
        raise RunError(f"{folder} is not the folder of a finished run with its checkpoint")
    digests = manifest.get("sha256", {})  # runs of earlier versions have none
    return _read(folder / CHECKPOINT / manifest["server"], device, digests.get(manifest["server"]))


def write_tensors(path: Path, tensors: Tensors) -> str:
    """Write a file of tensors; return the sha256 of its content."""
    # Clones, because safetensors refuses two names for one tensor, and views that are not contiguous.
    copies = {key: tensor.cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
    content = save(copies)
    write_bytes(path, content)
    return hashlib.sha256(content).hexdigest()


def _read(path: Path, device: torch.device, digest: str | None) -> Tensors:
    try:
        content = read_bytes(path)
        if digest is not None and hashlib.sha256(content).hexdigest() != digest:
            raise DamagedError(f"{path} is damaged (its checksum is another)")
        return {name: tensor.to(device) for name, tensor in load_bytes(content).items()}
    except (SafetensorError, FileNotFoundError) as error:
        raise DamagedError(f"{path} is damaged ({error})") from None
