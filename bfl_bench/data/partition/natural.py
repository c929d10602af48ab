"""Clients are what the data says."""

from dataclasses import dataclass

import numpy as np

from bfl_bench.data.partition.partition import Ints, Partition
from bfl_bench.errors import ConfigError
from bfl_bench.rng import numpy_stream


@dataclass(frozen=True)
class Natural:
    """Writers, subjects, sensors, roles: all of them, or so many drawn from the seed."""

    name: str

    def choose(self, num_owners: int, num_clients: int | None, seed: int) -> Ints:
        """The owners that take part, in ascending order: client i is owner chosen[i]."""
        if num_clients is None:
            return np.arange(num_owners)
        if not 1 <= num_clients <= num_owners:
            raise ConfigError("num_clients", num_clients, f"at most the {num_owners} clients of the data, or null: all")
        return np.sort(numpy_stream(seed, "partition").permutation(num_owners)[:num_clients])

    def split(self, labels: Ints, num_classes: int, num_clients: int, seed: int) -> Partition:
        raise ConfigError("", self.name, "another partition; this dataset does not say whose examples are whose")


def indices_of(owners: Ints, chosen: Ints) -> list[Ints]:
    """Per chosen owner its examples, in the order of the data."""
    return [np.flatnonzero(owners == owner) for owner in chosen]


def deal_test(counts: Ints, test_labels: Ints, seed: int) -> list[Ints]:
    """Deal the test examples of each class to the clients in proportion to their training examples of it.

    `counts` (N, C) are training examples. Every test example goes to one client; those of a class that nobody holds to
    none. Shares are rounded so that they add up (largest remainders first).
    """
    rng = numpy_stream(seed, "partition", "test")
    dealt: list[list[Ints]] = [[] for _ in counts]
    for label in range(counts.shape[1]):
        examples = rng.permutation(np.flatnonzero(test_labels == label))
        if not counts[:, label].sum():
            continue
        share = len(examples) * counts[:, label] / counts[:, label].sum()
        sizes = np.floor(share).astype(np.int64)
        sizes[np.argsort(sizes - share, kind="stable")[: len(examples) - sizes.sum()]] += 1
        for client, part in enumerate(np.split(examples, np.cumsum(sizes)[:-1])):
            dealt[client].append(part)
    return [np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64) for parts in dealt]
