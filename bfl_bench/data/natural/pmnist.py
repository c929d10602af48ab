"""MNIST split at random over clients, each of which sees the pixels in an order of its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from bfl_bench.checks import Above, AtLeast
from bfl_bench.data.augment import check_normalisation, normalise
from bfl_bench.data.dataset import Dataset, Owners, Split
from bfl_bench.data.sources import load_arrays
from bfl_bench.errors import ConfigError
from bfl_bench.likelihood import Categorical
from bfl_bench.rng import numpy_stream


@dataclass(frozen=True)
class PermutedMnist:
    """Every client has as many training and test images as every other; what cannot be shared equally is unused."""

    name: str
    num_owners: Annotated[int, AtLeast(1)]
    permute: bool
    mean: list[float]
    std: list[Annotated[float, Above(0)]]
    split_seed: Annotated[int, AtLeast(0)]

    def __post_init__(self) -> None:
        check_normalisation(self.mean, self.std, channels=1)

    def load(self, data_dir: Path) -> Dataset:
        arrays = load_arrays("mnist", data_dir)
        if self.num_owners > (most := min(len(arrays.train_y), len(arrays.test_y))):
            raise ConfigError("num_owners", self.num_owners, f"at most {most}: each has at least one test image")
        train, train_owner = self._share(arrays.train_x, arrays.train_y, "train")
        test, test_owner = self._share(arrays.test_x, arrays.test_y, "test")
        names = tuple(f"client {number}" for number in range(self.num_owners))
        return Dataset(train, test, Categorical(10), owners=Owners(names, train_owner, test_owner))

    def _share(self, images: np.ndarray, labels: np.ndarray, part: str) -> tuple[Split, Tensor]:
        """One client's images after the other's, and whose they are."""
        share = len(labels) // self.num_owners
        order = numpy_stream(self.split_seed, "pmnist", "split", part).permutation(len(labels))
        rows = torch.from_numpy(order[: share * self.num_owners])
        x = normalise(torch.tensor(images)[rows], 255, self.mean, self.std)
        if self.permute:
            for number, block in enumerate(x.view(self.num_owners, share, -1)):
                block.copy_(block[:, self._pixels(number, block.shape[1])])
        owner = torch.arange(self.num_owners).repeat_interleave(share)
        return Split(x, torch.tensor(labels)[rows]), owner

    def _pixels(self, number: int, size: int) -> Tensor:
        """A client's order of the pixels, the same for training and testing."""
        return torch.from_numpy(numpy_stream(self.split_seed, "pmnist", "pixels", number).permutation(size))
