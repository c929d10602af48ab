"""Gaussian classes of any size and shape, for quick experiments and tests with a known difficulty."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from bfl_bench.checks import AtLeast
from bfl_bench.data.dataset import Dataset, Split
from bfl_bench.errors import ConfigError
from bfl_bench.likelihood import Categorical
from bfl_bench.rng import stream


@dataclass(frozen=True)
class Synthetic:
    """Class c is N(mean_c, I) with mean_c ~ N(0, separation^2 / (2 dim) I).

    Two class means are then `separation` apart (root mean square), in units of the noise, in any dimension;
    the best classifier of two classes errs with probability about Phi(-separation / 2).
    """

    name: str
    train_samples: Annotated[int, AtLeast(1)]
    test_samples: Annotated[int, AtLeast(1)]
    num_classes: Annotated[int, AtLeast(2)]
    shape: list[Annotated[int, AtLeast(1)]]
    separation: Annotated[float, AtLeast(0)]
    data_seed: Annotated[int, AtLeast(0)]

    def __post_init__(self) -> None:
        if not self.shape:
            raise ConfigError("shape", self.shape, "a list of at least one size, such as [20] or [3, 32, 32]")
        for key in ("train_samples", "test_samples"):
            if getattr(self, key) < self.num_classes:
                raise ConfigError(key, getattr(self, key), f"at least num_classes ({self.num_classes})")

    def load(self, data_dir: Path) -> Dataset:
        return Dataset(
            self._split("train", self.train_samples),
            self._split("test", self.test_samples),
            likelihood=Categorical(self.num_classes),
        )

    def _split(self, part: str, samples: int) -> Split:
        """Each part has its own stream: the size of one does not change the other."""
        generator = stream(self.data_seed, "synthetic", "means")
        means = torch.randn(self.num_classes, *self.shape, generator=generator)
        means *= self.separation / math.sqrt(2 * math.prod(self.shape))
        generator = stream(self.data_seed, "synthetic", part)
        y = torch.randperm(samples, generator=generator) % self.num_classes  # sizes differ by at most one
        return Split(means[y] + torch.randn(samples, *self.shape, generator=generator), y)
