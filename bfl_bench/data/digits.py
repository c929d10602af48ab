"""scikit-learn's handwritten digits: 1,797 real images inside that package, so no network is needed."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray

from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.data.augment import check_normalisation, normalise
from bfl_bench.data.dataset import Dataset, Split
from bfl_bench.likelihood import Categorical
from bfl_bench.rng import numpy_stream


@dataclass(frozen=True)
class Digits:
    """Grey 8x8 digits. The split has its own seed: runs of all seeds are tested on the same images."""

    name: str
    mean: list[float]
    std: list[Annotated[float, Above(0)]]
    test_fraction: Annotated[float, Between(0.01, 0.99)]
    split_seed: Annotated[int, AtLeast(0)]

    def __post_init__(self) -> None:
        check_normalisation(self.mean, self.std, channels=1)

    def load(self, data_dir: Path) -> Dataset:
        pixels, labels = read()
        x = normalise(torch.tensor(pixels).view(-1, 1, 8, 8), 16, self.mean, self.std)
        y = torch.tensor(labels, dtype=torch.int64)
        in_test = torch.from_numpy(self._in_test(labels))
        return Dataset(Split(x[~in_test], y[~in_test]), Split(x[in_test], y[in_test]), Categorical(10))

    def _in_test(self, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The same fraction of each class. Not by scikit-learn, whose split may change between versions."""
        rng = numpy_stream(self.split_seed, "digits", "split")
        in_test = np.zeros(len(labels), dtype=bool)
        for label in range(10):
            rows = rng.permutation(np.flatnonzero(labels == label))
            in_test[rows[: round(self.test_fraction * len(rows))]] = True
        return in_test


def read() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Pixels (1797, 64) from 0 to 16 and labels (1797,). Not by scikit-learn, which takes a second to import."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)
