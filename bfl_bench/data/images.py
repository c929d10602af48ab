"""The image datasets that are read from files: MNIST and those of its format, CIFAR-10, CIFAR-100 and SVHN."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor

from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.data.augment import (
    auto_augment,
    check_normalisation,
    cutout,
    normalise,
    random_crop,
    random_flip,
)
from bfl_bench.data.dataset import Dataset, Split
from bfl_bench.data.sources import Arrays, load_arrays, load_emnist
from bfl_bench.data.sources.characters import Choice
from bfl_bench.errors import ConfigError
from bfl_bench.likelihood import Categorical

# Channels and side of the square images: lets a wrong config fail before anything is read.
GREY, COLOUR = (1, 28), (3, 32)
SHAPES = {"mnist": GREY, "fashion_mnist": GREY, "kmnist": GREY, "emnist": GREY}
SHAPES |= {"cifar10": COLOUR, "cifar100": COLOUR, "svhn": COLOUR}


@dataclass(frozen=True)
class Images:
    """Classes of images, as many as the files have; augmentation, where switched on, in the order of FOLA's Table I."""

    name: str
    source: Literal["mnist", "fashion_mnist", "kmnist", "cifar10", "cifar100", "svhn"]
    mean: list[float]
    std: list[Annotated[float, Above(0)]]
    crop_padding: Annotated[int, AtLeast(0)]
    crop_fill: Annotated[int, Between(0, 255)] | Literal["reflect"]
    flip: bool
    autoaugment: bool
    cutout: Annotated[int, AtLeast(0)]

    def __post_init__(self) -> None:
        channels, side = SHAPES[self.source]
        check_normalisation(self.mean, self.std, channels)
        if self.crop_padding >= side:
            raise ConfigError("crop_padding", self.crop_padding, f"0 to {side - 1} for {side}x{side} images")
        if self.cutout > side:
            raise ConfigError("cutout", self.cutout, f"0 to {side} for {side}x{side} images")
        if self.autoaugment and channels != 3:
            raise ConfigError("autoaugment", True, f"false for {self.source}: its images are grey")

    def load(self, data_dir: Path) -> Dataset:
        return self._assemble(load_arrays(self.source, data_dir))

    def _assemble(self, arrays: Arrays) -> Dataset:
        augmented = self.crop_padding > 0 or self.flip or self.autoaugment or self.cutout > 0
        train_x = torch.tensor(arrays.train_x)
        return Dataset(
            Split(train_x if augmented else self.normalise(train_x), torch.tensor(arrays.train_y)),
            Split(self.normalise(torch.tensor(arrays.test_x)), torch.tensor(arrays.test_y)),
            likelihood=Categorical(1 + int(arrays.train_y.max())),
            augment=self.augment if augmented else None,
            normalise=self.normalise if augmented else None,
        )

    def augment(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Raw uint8 training images (n, c, h, w) to augmented network inputs."""
        if self.crop_padding > 0:
            x = random_crop(x, self.crop_padding, self.crop_fill, generator)
        if self.flip:
            x = random_flip(x, generator)
        if self.autoaugment:
            x = auto_augment(x, generator)
        if self.cutout > 0:
            x = cutout(x, self.cutout, generator)
        return self.normalise(x)

    def normalise(self, x: Tensor) -> Tensor:
        return normalise(x, 255, self.mean, self.std)


@dataclass(frozen=True)
class Emnist(Images):
    """A choice of EMNIST's images; the classes are numbered from 0."""

    source: Literal["emnist"]  # type: ignore[assignment] # Images have other sources
    split: Choice

    def load(self, data_dir: Path) -> Dataset:
        return self._assemble(load_emnist(self.split, data_dir))
