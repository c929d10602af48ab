"""Label skew by Dirichlet proportions, as in most papers."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from bfl_bench.checks import Above, AtLeast
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
from bfl_bench.rng import numpy_stream


@dataclass(frozen=True)
class Dirichlet:
    """Proportions ~ Dir(alpha), per class over the clients or per client over the classes."""

    name: str
    alpha: Annotated[float, Above(0)]
    mode: Literal["per_class", "per_client"]
    min_size: Annotated[int, AtLeast(0)]
    balance: bool
    rng: Rng
    max_tries: Annotated[int, AtLeast(1)]

    def split(self, labels: Ints, num_classes: int, num_clients: int, seed: int) -> Partition:
        check_num_clients(num_clients, labels)
        if self.mode == "per_class":
            return self._split_per_class(labels, num_classes, num_clients, seed)
        if self.rng != "default":
            raise ConfigError("rng", self.rng, "default, as no released code draws mode=per_client")
        return self._split_per_client(labels, num_classes, num_clients, seed)

    def _split_per_class(self, labels: Ints, num_classes: int, num_clients: int, seed: int) -> Partition:
        largest_min_size = len(labels) // num_clients
        if self.min_size > largest_min_size:
            allowed = f"at most {largest_min_size}, as {num_clients} clients share {len(labels)} samples"
            raise ConfigError("min_size", self.min_size, allowed)
        generator = make_generator(self.rng, seed)
        pools = class_pools(labels, num_classes)
        class_sizes = [len(pool) for pool in pools]
        cap = len(labels) / num_clients if self.balance else np.inf
        alphas = np.full(num_clients, self.alpha)

        tries, fewest_missing = 0, np.inf
        while fewest_missing > 0 and tries < self.max_tries:
            tries += 1
            if self.rng == "numpy_legacy":  # NIID-Bench shuffles each class anew, just before it draws for it
                shuffled, rows = [pool.copy() for pool in pools], []
                for pool in shuffled:
                    generator.shuffle(pool)
                    rows.append(generator.dirichlet(alphas))
                proportions = np.stack(rows)
            else:  # counts alone make a try cheap; the indices are shuffled once, below
                shuffled, proportions = pools, generator.dirichlet(alphas, size=num_classes)
            counts, failed = _deal(proportions, class_sizes, cap, to_last=self.rng == "numpy_legacy")
            missing = np.maximum(self.min_size - counts.sum(axis=0), 0).sum()
            if failed:
                missing += len(labels)  # worse than any other, so kept only where there is no other
            if missing < fewest_missing:
                fewest_missing, best_counts, best_pools = missing, counts, shuffled

        moved = _fill_up(best_counts, self.min_size)
        if self.rng == "default":
            for pool in best_pools:
                generator.shuffle(pool)
        clients = cut_pools(best_pools, best_counts)
        for client in clients:
            generator.shuffle(client)
        path = "sampled" if fewest_missing == 0 else "repaired"
        return Partition.of(labels, clients, path=path, tries=tries, moved=moved)

    def _split_per_client(self, labels: Ints, num_classes: int, num_clients: int, seed: int) -> Partition:
        generator = numpy_stream(seed, "partition")
        pools = class_pools(labels, num_classes)
        left = np.array([len(pool) for pool in pools])
        counts = np.zeros((num_classes, num_clients), dtype=np.int64)
        for client in range(num_clients):
            wanted = generator.dirichlet(np.full(num_classes, self.alpha / num_classes))
            missing = len(labels) // num_clients
            while missing > 0:  # each pass completes the client or empties a class
                weights = wanted * (left > 0)
                if weights.sum() == 0:  # every class that the client wants has run out
                    weights = (left > 0).astype(np.float64)
                taken = np.minimum(generator.multinomial(missing, weights / weights.sum()), left)
                counts[:, client] += taken
                left -= taken
                missing -= int(taken.sum())
        for pool in pools:
            generator.shuffle(pool)
        clients = cut_pools(pools, counts)
        for indices in clients:
            generator.shuffle(indices)
        return Partition.of(labels, clients, path="sampled")


def _deal(proportions: NDArray[np.float64], class_sizes: list[int], cap: float, to_last: bool) -> tuple[Ints, bool]:
    """Deal by (C, N) proportions, class after class, and say whether it failed; return counts (C, N).

    A client that holds `cap` samples gets no more. Where all clients below the cap have proportion 0, or the
    proportions are no numbers, it has failed, and those below the cap share the class evenly. With `to_last` the last
    client gets the class instead, and nothing has failed: so NIID-Bench does it, by cutting at a NaN. Cuts are rounded
    down, so the last client may get one sample of a class in spite of the cap, as in NIID-Bench.
    """
    counts = np.zeros(proportions.shape, dtype=np.int64)
    held, failed = np.zeros(proportions.shape[1], dtype=np.int64), False
    for k, class_size in enumerate(class_sizes):
        if class_size == 0:
            continue
        below_cap = held < cap
        weights = np.where(below_cap, proportions[k], 0)
        total = weights.sum()
        if not 0 < total < np.inf:  # nan and inf are what the legacy Dirichlet gives at a tiny alpha
            if to_last:
                weights, total = np.eye(1, len(weights), len(weights) - 1)[0], 1.0
            else:
                weights, total, failed = below_cap, below_cap.sum(), True
        cuts = (np.cumsum(weights / total) * class_size).astype(np.int64)
        cuts[-1] = class_size
        counts[k] = cuts
        counts[k, 1:] -= cuts[:-1]
        held += counts[k]
    return counts, failed


def _fill_up(counts: Ints, min_size: int) -> int:
    """Fill clients up to `min_size` from the largest client's commonest class; the number of samples moved.

    While one client holds less than `min_size` the largest holds more, as there are enough samples for all.
    """
    held, moved = counts.sum(axis=0), 0
    for client in np.flatnonzero(held < min_size):
        while held[client] < min_size:
            donor = held.argmax()
            k = counts[:, donor].argmax()
            counts[k, donor] -= 1
            counts[k, client] += 1
            held[donor] -= 1
            held[client] += 1
            moved += 1
    return moved
