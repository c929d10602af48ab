"""What every dataset loads to, whatever it is made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from bfl_bench.devices import has_room
from bfl_bench.likelihood import Categorical, Likelihood

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Turns raw inputs (n, ...) into augmented network inputs (n, ...), drawing per example from the generator."""


@dataclass(frozen=True)
class Split:
    x: Tensor  # (n, ...)
    y: Tensor  # (n,) int64, or (n, positions) where every position of a sequence has a label; numbers are (n,) floats
    target: torch.device | None = None  # where `take` brings examples, if that is not where they lie

    def __len__(self) -> int:
        return len(self.y)

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + self.y.nbytes

    def to(self, device: torch.device) -> "Split":
        """For use on this device: there as a whole, if there is room, else brought there as they are taken."""
        if has_room(device, self.nbytes):
            return Split(self.x.to(device), self.y.to(device))
        return Split(self.x, self.y, device)


@dataclass(frozen=True)
class Owners:
    """The natural clients of a dataset: writers, subjects, sensors, roles. A client's test examples are its own too."""

    names: tuple[str, ...]  # of the K clients
    train: Tensor  # (n,) int64: the client, 0 to K - 1, of each training example
    test: Tensor  # likewise of each test example


@dataclass(frozen=True)
class Strata:
    """Groups of examples that partitions deal out in the place of classes."""

    train: Tensor  # (n,) int64: the group, 0 to num - 1, of each training example
    test: Tensor  # likewise of each test example
    num: int


@dataclass(frozen=True)
class Dataset:
    """Train and test examples. `augment` maps `train.x` to network inputs; where it is None they are such already."""

    train: Split
    test: Split
    likelihood: Likelihood
    augment: Augment | None = None
    normalise: Callable[[Tensor], Tensor] | None = None  # beside `augment`: the same map without augmentation
    owners: Owners | None = None  # whose examples these are, where the data says so
    strata: Strata | None = None  # None: classes, of a sequence its first label; numbers are then one group

    @property
    def num_classes(self) -> int:
        assert isinstance(self.likelihood, Categorical)
        return self.likelihood.num_classes

    def group(self) -> Strata:
        """Return what partitions deal out."""
        if self.strata is not None:
            return self.strata
        splits = self.train, self.test
        if isinstance(self.likelihood, Categorical):
            train, test = (split.y if split.y.dim() == 1 else split.y[:, 0] for split in splits)
            return Strata(train, test, self.likelihood.num_classes)
        train, test = (torch.zeros(len(split), dtype=torch.int64) for split in splits)
        return Strata(train, test, 1)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.test.x.shape[1:])


def set_classes_aside(dataset: Dataset, classes: Sequence[int]) -> tuple[Dataset, Split]:
    """Take all examples of some classes away, and number the others anew; return the test examples taken, too."""
    train, test = (~torch.isin(split.y, torch.tensor(classes)) for split in (dataset.train, dataset.test))
    known = torch.tensor([c for c in range(dataset.num_classes) if c not in classes])
    owners = dataset.owners
    left = replace(
        dataset,
        train=Split(dataset.train.x[train], torch.searchsorted(known, dataset.train.y[train])),
        test=Split(dataset.test.x[test], torch.searchsorted(known, dataset.test.y[test])),
        likelihood=Categorical(len(known)),
        owners=owners and replace(owners, train=owners.train[train], test=owners.test[test]),
    )
    return left, Split(dataset.test.x[~test], dataset.test.y[~test])


class DatasetConfig(Protocol):
    """A dataset as configured: everything but the data."""

    name: str

    def load(self, data_dir: Path) -> Dataset: ...
