"""What every partition is, and the steps that several of them share."""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from bfl_bench.errors import ConfigError
from bfl_bench.records import SCHEMA_VERSION, write_bytes
from bfl_bench.rng import numpy_stream

Ints = NDArray[np.int64]

Rng = Literal["default", "numpy_legacy"]
"""`numpy_legacy` draws what NIID-Bench draws after `np.random.seed(seed)` and `random.seed(seed)`, index by
index, so that the splits of papers built on its code (BFL-P, BA-BFL, FedLPA) can be had again."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Which samples each client holds. `Partition.of` makes one; compare two by `digest()`."""

    indices: tuple[Ints, ...]  # sample indices per client, disjoint; an empty array is an empty client
    info: dict[str, int | str]  # how it was made, and the data that it belongs to
    validation: tuple[Ints, ...] | None = None  # per client, examples that it holds but does not train on

    @classmethod
    def of(cls, labels: Ints, clients: Sequence[Ints], **info: int | str) -> "Partition":
        indices = tuple(np.asarray(client, dtype=np.int64) for client in clients)
        info["empty_clients"] = sum(len(client) == 0 for client in indices)
        info["unused_samples"] = len(labels) - sum(len(client) for client in indices)
        info["num_samples"] = len(labels)
        info["labels_digest"] = labels_digest(labels)
        return cls(indices, info)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(client) for client in self.indices)

    def label_counts(self, labels: Ints, num_classes: int) -> Ints:
        """(N, C): how many samples of each class each client holds."""
        return np.stack([np.bincount(labels[client], minlength=num_classes) for client in self.indices])

    def digest(self) -> str:
        parts = (self.indices,) if self.validation is None else (self.indices, self.validation)
        digest = hashlib.sha256()
        for indices, offsets in map(_flatten, parts):
            digest.update(offsets.astype("<i8").tobytes() + indices.astype("<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write what the `file` partition reads."""
        indices, offsets = _flatten(self.indices)
        arrays: dict[str, Any] = {
            "schema_version": np.array(SCHEMA_VERSION),
            "indices": indices,
            "offsets": offsets,
            "num_samples": np.array(self.info["num_samples"]),
            "labels_digest": np.array(self.info["labels_digest"]),
        }
        if self.validation is not None:
            arrays["validation_indices"], arrays["validation_offsets"] = _flatten(self.validation)
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        write_bytes(path, content.getvalue())


def hold_out(partition: Partition, share: float, seed: int) -> Partition:
    """Take a share of each client's examples out of training, for validation.

    A client with at least two examples gives at least one and keeps at least one; a smaller one gives none.
    """
    if share == 0:
        return partition
    rng = numpy_stream(seed, "partition", "validation")
    kept: list[Ints] = []
    held: list[Ints] = []
    for client in partition.indices:
        num = min(max(1, round(share * len(client))), len(client) - 1) if len(client) > 1 else 0
        chosen = np.zeros(len(client), dtype=bool)
        chosen[rng.permutation(len(client))[:num]] = True
        kept.append(client[~chosen])
        held.append(client[chosen])
    return replace(partition, indices=tuple(kept), validation=tuple(held))


def _flatten(clients: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Put all indices in a row, and say where each client begins and the last one ends."""
    return np.concatenate(clients), np.cumsum((0, *map(len, clients)), dtype=np.int64)


class PartitionConfig(Protocol):
    """A partition as configured: everything but the labels, the number of clients and the seed."""

    @property
    def name(self) -> str: ...

    def split(self, labels: Ints, num_classes: int, num_clients: int, seed: int) -> Partition: ...


def labels_digest(labels: Ints) -> str:
    return hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()


def check_num_clients(num_clients: int, labels: Ints) -> None:
    if not 1 <= num_clients <= len(labels):
        allowed = f"at least 1 and at most the {len(labels)} training samples"
        raise ConfigError("num_clients", num_clients, allowed)


def make_generator(rng: Rng, seed: int) -> np.random.Generator | np.random.RandomState:
    if rng == "default":
        return numpy_stream(seed, "partition")
    if not 0 <= seed < 2**32:
        raise ConfigError("seed", seed, "from 0 to 4294967295 with rng=numpy_legacy")
    return np.random.RandomState(seed)


def class_pools(labels: Ints, num_classes: int) -> list[Ints]:
    """Per class the indices of its samples, in the order of the data."""
    return [np.flatnonzero(labels == k) for k in range(num_classes)]


def cut_pools(pools: list[Ints], counts: Ints) -> list[Ints]:
    """Per client its samples, class after class: the next `counts[k, client]` indices of pool k."""
    pieces = [np.split(pool, np.cumsum(row))[:-1] for pool, row in zip(pools, counts, strict=True)]
    return [np.concatenate(client) for client in zip(*pieces, strict=True)]
