"""Label skew by the number of classes that a client sees (#C = k)."""

import random
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from bfl_bench.checks import AtLeast
from bfl_bench.data.partition.partition import (
    Ints,
    Partition,
    Rng,
    check_num_clients,
    class_pools,
    cut_pools,
    make_generator,
)
from bfl_bench.errors import ConfigError

Owns = NDArray[np.bool_]
"""(C, N): whether a client holds samples of a class."""


@dataclass(frozen=True)
class Classes:
    """Each client owns `classes_per_client` classes; the owners of a class share it equally."""

    name: str
    classes_per_client: Annotated[int, AtLeast(1)]
    rng: Rng

    def split(self, labels: Ints, num_classes: int, num_clients: int, seed: int) -> Partition:
        check_num_clients(num_clients, labels)
        if self.classes_per_client > num_classes:
            allowed = f"at most the {num_classes} classes of the data"
            raise ConfigError("classes_per_client", self.classes_per_client, allowed)
        generator = make_generator(self.rng, seed)
        if isinstance(generator, np.random.Generator):
            owns = self._choose_evenly(num_classes, num_clients, generator)
        else:
            owns = self._choose_as_niid_bench(num_classes, num_clients, random.Random(seed))

        pools = class_pools(labels, num_classes)
        counts = np.zeros((num_classes, num_clients), dtype=np.int64)
        for k, pool in enumerate(pools):
            generator.shuffle(pool)
            if owns[k].any():
                counts[k, owns[k]] = [len(share) for share in np.array_split(pool, owns[k].sum())]
        clients = cut_pools(pools, counts)
        if self.rng == "default":  # NIID-Bench leaves them class after class
            for client in clients:
                generator.shuffle(client)
        return Partition.of(labels, clients, unowned_classes=int((~owns.any(axis=1)).sum()))

    def _choose_evenly(self, num_classes: int, num_clients: int, generator: np.random.Generator) -> Owns:
        """Each client takes the classes with the fewest owners so far, ties at random.

        So the numbers of owners differ by one at most, and no class is left over where that can be helped.
        """
        owns = np.zeros((num_classes, num_clients), dtype=bool)
        for client in range(num_clients):
            fewest_owners_first = np.lexsort((generator.random(num_classes), owns.sum(axis=1)))
            owns[fewest_owners_first[: self.classes_per_client], client] = True
        return owns

    def _choose_as_niid_bench(self, num_classes: int, num_clients: int, generator: random.Random) -> Owns:
        """Client i takes class i % C, then draws classes until it has enough different ones."""
        owns = np.zeros((num_classes, num_clients), dtype=bool)
        for client in range(num_clients):
            owns[client % num_classes, client] = True
            while owns[:, client].sum() < self.classes_per_client:
                owns[generator.randint(0, num_classes - 1), client] = True
        return owns
