"""No skew."""

from dataclasses import dataclass

import numpy as np

from bfl_bench.data.partition.partition import Ints, Partition, Rng, check_num_clients, make_generator


@dataclass(frozen=True)
class Iid:
    """A random permutation of all samples, cut into equal parts."""

    name: str
    rng: Rng

    def split(self, labels: Ints, num_classes: int, num_clients: int, seed: int) -> Partition:
        check_num_clients(num_clients, labels)
        order = make_generator(self.rng, seed).permutation(len(labels))
        return Partition.of(labels, np.array_split(order, num_clients))
