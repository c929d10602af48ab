"""FEMNIST of LEAF: handwritten characters, a client per writer, split into train and test by LEAF."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from bfl_bench.checks import Above, AtLeast
from bfl_bench.data.augment import check_normalisation, normalise
from bfl_bench.data.dataset import Dataset
from bfl_bench.data.natural.owning import assemble, choose
from bfl_bench.data.sources import load_content
from bfl_bench.data.sources.federations import Parts


@dataclass(frozen=True)
class Femnist:
    """Black on white. Writers without a training image of the wanted labels are left out."""

    name: str
    digits_only: bool
    num_writers: Annotated[int, AtLeast(1)] | None
    mean: list[float]
    std: list[Annotated[float, Above(0)]]
    split_seed: Annotated[int, AtLeast(0)]

    def __post_init__(self) -> None:
        check_normalisation(self.mean, self.std, channels=1)

    def load(self, data_dir: Path) -> Dataset:
        parts: Parts = load_content("femnist", data_dir)
        num_classes = 10 if self.digits_only else 62  # LEAF numbers the digits from 0, then the letters
        x, y, owner = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        in_test = np.arange(len(y)) >= len(parts.train.y)
        writers = np.unique(owner[(y < num_classes) & ~in_test]).tolist()
        chosen = choose(writers, self.num_writers, "num_writers", self.split_seed, "femnist")
        kept = (y < num_classes) & np.isin(owner, chosen)
        images = normalise(torch.from_numpy(x[kept]).unsqueeze(1), 255, self.mean, self.std)
        return assemble(images, torch.from_numpy(y[kept]), owner[kept], in_test[kept], num_classes)
