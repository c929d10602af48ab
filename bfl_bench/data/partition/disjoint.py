"""The strongest label skew: no class is at two clients."""

from dataclasses import dataclass

import numpy as np

from bfl_bench.data.partition.partition import Ints, Partition, check_num_clients
from bfl_bench.errors import ConfigError
from bfl_bench.rng import numpy_stream


@dataclass(frozen=True)
class Disjoint:
    """Runs of classes, e.g. 0-4 and 5-9 for two clients; a client's samples keep the order of the data."""

    name: str
    shuffle_classes: bool

    def split(self, labels: Ints, num_classes: int, num_clients: int, seed: int) -> Partition:
        check_num_clients(num_clients, labels)
        if num_clients > num_classes:
            raise ConfigError("num_clients", num_clients, f"at most the {num_classes} classes of the data")
        classes = np.arange(num_classes)
        if self.shuffle_classes:
            numpy_stream(seed, "partition").shuffle(classes)
        runs = np.array_split(classes, num_clients)
        return Partition.of(labels, [np.flatnonzero(np.isin(labels, run)) for run in runs])
