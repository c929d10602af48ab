"""The state of a run on disk after a round: tensors in safetensors files, the rest in a JSON manifest.

Every file name carries the round that wrote it, and the manifest, renamed into place last, names the files that
belong together. A run killed at any moment therefore finds a whole checkpoint: the new one or the one before. The
manifest has the digests of the files and a seal over itself, so that what was damaged or edited since is named and
never believed. Nothing in it executes on load.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save

from bfl_bench.errors import RunError
from bfl_bench.method import Tensors
from bfl_bench.records import CHECKPOINT, MANIFEST, SUMMARY, read_json, write_bytes, write_json
from bfl_bench.run.recorder import Notes


@dataclass(frozen=True)
class Checkpoint:
    round: int
    state: Tensors
    memories: dict[int, Tensors]
    notes: Notes


class CheckpointFolder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._clients: dict[int, str] = {}  # client id -> file of its newest private state
        self._digests: dict[str, str] = {}  # file -> sha256

    def save(self, round_: int, state: Tensors, changed: Mapping[int, Tensors], notes: Notes) -> None:
        """Write the server's state and the private states that changed since the last call."""
        self._path.mkdir(exist_ok=True)
        server = f"server-{round_}.safetensors"
        clients = self._clients | {client: f"client-{client}-{round_}.safetensors" for client in changed}
        digests = self._digests | {server: write_tensors(self._path / server, state)}
        for client, memory in changed.items():
            digests[clients[client]] = write_tensors(self._path / clients[client], memory)
        digests = {name: digests[name] for name in (server, *clients.values())}
        content = {
            "round": round_,
            "server": server,
            "clients": {str(k): v for k, v in clients.items()},
            "notes": asdict(notes),
            "sha256": digests,
        }
        write_json(self._path / MANIFEST, content | {"seal": _seal(content)})
        outdated = {self._clients[client] for client in changed if client in self._clients}
        for path in [*self._path.glob("server-*.safetensors"), *(self._path / name for name in outdated)]:
            if path.name != server and path.name not in clients.values():
                path.unlink(missing_ok=True)
        self._clients, self._digests = clients, digests

    def load(self, device: torch.device) -> Checkpoint | None:
        """The newest whole checkpoint; None where there is none. Files that belong to none are removed."""
        manifest = read_json(self._path / MANIFEST)
        if manifest is None:
            shutil.rmtree(self._path, ignore_errors=True)
            return None
        if manifest.get("seal") != _seal(manifest):
            raise RunError(f"{self._path / MANIFEST} is damaged or was edited; start over with force=true")
        self._clients = {int(client): name for client, name in manifest["clients"].items()}
        self._digests = manifest["sha256"]
        kept = {manifest["server"], *self._clients.values(), MANIFEST}
        for path in self._path.iterdir():
            if path.name not in kept:
                path.unlink()
        return Checkpoint(
            round=manifest["round"],
            state=self._read(manifest["server"], device),
            memories={client: self._read(name, device) for client, name in self._clients.items()},
            notes=_read_notes(manifest["notes"], self._path / MANIFEST),
        )

    def _read(self, name: str, device: torch.device) -> Tensors:
        return _read(self._path / name, device, self._digests[name])


def _seal(manifest: Mapping[str, Any]) -> str:
    """Compute the sha256 of a manifest without its seal and version."""
    content = {key: value for key, value in manifest.items() if key not in ("seal", "schema_version")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_notes(saved: dict[str, Any], path: Path) -> Notes:
    """Read notes of this version, or of an earlier one that had fewer of them."""
    if unknown := set(saved) - {field.name for field in fields(Notes)}:
        raise RunError(f"{path} holds {', '.join(sorted(unknown))}, which this version does not know; use force=true")
    return Notes(**saved)


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
    copies = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
    content = save(copies)
    write_bytes(path, content)
    return hashlib.sha256(content).hexdigest()


def _read(path: Path, device: torch.device, digest: str | None) -> Tensors:
    try:
        content = path.read_bytes()
        if digest is not None and hashlib.sha256(content).hexdigest() != digest:
            raise RunError(f"{path} is damaged (its checksum is another); start over with force=true")
        return {name: tensor.to(device) for name, tensor in load_bytes(content).items()}
    except (SafetensorError, FileNotFoundError) as error:
        raise RunError(f"{path} is damaged ({error}); start over with force=true") from None
