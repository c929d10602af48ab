"""MNIST by the people who wrote the digits, as QMNIST's labels name them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.data.augment import check_normalisation, normalise
from bfl_bench.data.dataset import Dataset
from bfl_bench.data.natural.owning import assemble, draw_test
from bfl_bench.data.sources import load_arrays, load_content
from bfl_bench.data.sources.federations import Writers, name_numbers


@dataclass(frozen=True)
class MnistWriters:
    """MNIST's training and test images are by different people, so a writer's test images are its own others."""

    name: str
    include_test: bool
    mean: list[float]
    std: list[Annotated[float, Above(0)]]
    test_fraction: Annotated[float, Between(0.01, 0.99)]
    split_seed: Annotated[int, AtLeast(0)]

    def __post_init__(self) -> None:
        check_normalisation(self.mean, self.std, channels=1)

    def load(self, data_dir: Path) -> Dataset:
        arrays = load_arrays("mnist", data_dir)
        writers: Writers = load_content("qmnist", data_dir)
        x, y, writer = arrays.train_x, arrays.train_y, writers.train
        if self.include_test:
            x, y = np.concatenate([x, arrays.test_x]), np.concatenate([y, arrays.test_y])
            writer = np.concatenate([writer, writers.test])
        owner = name_numbers("writer", writer)
        in_test = draw_test(owner, self.test_fraction, self.split_seed, "mnist_writers")
        return assemble(normalise(torch.tensor(x), 255, self.mean, self.std), torch.tensor(y), owner, in_test, 10)
