"""What the natural federations share: choose clients, split each one's examples, put a dataset together."""

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bfl_bench.data.dataset import Dataset, Owners, Split
from bfl_bench.errors import ConfigError
from bfl_bench.likelihood import Categorical
from bfl_bench.rng import numpy_stream

log = logging.getLogger(__name__)


def count_test(size: int, fraction: float) -> int:
    """How many of a client's examples are for testing: some, if there are two, but never all."""
    return min(max(1, round(fraction * size)), size - 1)


def draw_test(owner: NDArray[np.str_], fraction: float, split_seed: int, dataset: str) -> NDArray[np.bool_]:
    """Which examples are for testing: a fraction of each client's, whoever the other clients are."""
    in_test = np.zeros(len(owner), dtype=bool)
    for name in np.unique(owner).tolist():
        rows = np.flatnonzero(owner == name)
        rng = numpy_stream(split_seed, dataset, "split", name)
        in_test[rng.permutation(rows)[: count_test(len(rows), fraction)]] = True
    return in_test


def choose(names: list[str], number: int | None, key: str, split_seed: int, dataset: str) -> list[str]:
    """A random choice of clients in the order of `names`; all of them where `number` is None."""
    if number is None:
        return names
    if number > len(names):
        raise ConfigError(key, number, f"at most {len(names)}, which is what the files hold, or null for all")
    chosen = numpy_stream(split_seed, dataset, "choice").choice(len(names), number, replace=False)
    return [names[position] for position in sorted(chosen.tolist())]


def assemble(x: Tensor, y: Tensor, owner: NDArray[np.str_], in_test: NDArray[np.bool_], num_classes: int) -> Dataset:
    """The clients in the order of their names, the examples in the order given."""
    names, numbers = np.unique(owner, return_inverse=True)
    train, test = (torch.from_numpy(np.flatnonzero(rows)) for rows in (~in_test, in_test))
    index = torch.from_numpy(numbers.astype(np.int64))
    log.info("%d clients with %d training and %d test examples", len(names), len(train), len(test))
    return Dataset(
        Split(x[train], y[train]),
        Split(x[test], y[test]),
        Categorical(num_classes),
        owners=Owners(tuple(names.tolist()), index[train], index[test]),
    )
