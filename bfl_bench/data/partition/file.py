"""The partition of an earlier run."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bfl_bench.data.partition.partition import Ints, Partition, labels_digest
from bfl_bench.errors import ConfigError, RunError
from bfl_bench.reading import read_arrays


@dataclass(frozen=True)
class File:
    """The clients that `Partition.save` wrote, for the very data that they were made for."""

    name: str
    path: str

    def split(self, labels: Ints, num_classes: int, num_clients: int, seed: int) -> Partition:
        try:
            saved = read_arrays(Path(self.path).expanduser())
            indices, offsets = saved["indices"], saved["offsets"]
            held_out = None
            if "validation_indices" in saved:
                held_out = saved["validation_indices"], saved["validation_offsets"]
            saved_samples, saved_digest = int(saved["num_samples"]), str(saved["labels_digest"])
        except FileNotFoundError:
            raise self._refusal("there is no such file") from None
        except (RunError, ValueError, TypeError, LookupError) as error:
            raise self._refusal(f"this file cannot be read as one ({error})") from None
        if saved_samples != len(labels):
            raise self._refusal(f"this one is for other data: {saved_samples} samples, here {len(labels)}")
        if saved_digest != labels_digest(labels):
            raise self._refusal("this one is for other data: the labels or their order differ")
        if not _is_partition(indices, offsets, saved_samples):
            raise self._refusal("the indices in this file are damaged")
        if held_out is not None:
            both = np.concatenate([indices, held_out[0]])
            if not _is_partition(*held_out, saved_samples) or len(held_out[1]) != len(offsets) or not _is_unique(both):
                raise self._refusal("the indices in this file are damaged")
        if num_clients != len(offsets) - 1:
            raise ConfigError("num_clients", num_clients, f"{len(offsets) - 1}, as in {self.path}")
        partition = Partition.of(labels, np.split(indices, offsets[1:-1]), path="loaded")
        if held_out is None:
            return partition
        info = partition.info | {"unused_samples": int(partition.info["unused_samples"]) - len(held_out[0])}
        return replace(partition, info=info, validation=tuple(np.split(held_out[0], held_out[1][1:-1])))

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError("path", self.path, f"a partition.npz that a run on this data saved; {reason}")


def _is_partition(indices: Ints, offsets: Ints, num_samples: int) -> bool:
    """Whether the offsets tile the indices and no sample is used twice."""
    return bool(
        indices.dtype == offsets.dtype == np.int64
        and indices.ndim == offsets.ndim == 1
        and len(offsets) >= 2
        and (offsets[0], offsets[-1]) == (0, len(indices))
        and (offsets[1:] >= offsets[:-1]).all()
        and ((indices >= 0) & (indices < num_samples)).all()
        and _is_unique(indices)
    )


def _is_unique(indices: Ints) -> bool:
    return len(np.unique(indices)) == len(indices)
