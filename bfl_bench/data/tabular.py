"""Tables: a row of features per example, and a class or a number to predict.

Features, and labels that are numbers, are standardised by the mean and the standard deviation of the training examples;
scores are in the labels' own unit. Partitions deal out strata in the place of classes: equally many training examples
each, by the label or by a feature, so that `dirichlet`, `classes` and `disjoint` skew labels or features, and `iid`
neither.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.data import digits
from bfl_bench.data.dataset import Dataset, Split, Strata
from bfl_bench.data.sources import load_content
from bfl_bench.errors import ConfigError
from bfl_bench.evaluation.gaussian_noise import GaussianNoise
from bfl_bench.likelihood import Categorical
from bfl_bench.rng import numpy_stream

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a table becomes a dataset."""

    name: str
    noise: Literal["learnt"] | Annotated[float, Above(0)] | None
    features: Annotated[int, AtLeast(1)] | None
    strata: Annotated[int, AtLeast(1)]
    strata_by: Literal["label"] | Annotated[int, AtLeast(0)]
    test_fraction: Annotated[float, Between(0.01, 0.99)]
    split_seed: Annotated[int, AtLeast(0)]


@dataclass(frozen=True, kw_only=True)
class Tabular(Settings):
    """A table from files, as `bfl-data` knows them."""

    source: Literal["abalone", "auto_mpg", "wine", "bike", "kin8nm"]

    def load(self, data_dir: Path) -> Dataset:
        table = load_content(self.source, data_dir)
        return _make(self, table.x, table.y)


@dataclass(frozen=True, kw_only=True)
class Embedded(Settings):
    """A table inside scikit-learn, or one drawn from a fixed seed: no files."""

    source: Literal["diabetes", "breast_cancer", "cultivars", "pooled_digits", "linear", "sine"]

    def load(self, data_dir: Path) -> Dataset:
        return _make(self, *READERS[self.source]())


def _make(settings: Settings, x: Floats, y: NDArray[Any]) -> Dataset:
    """Split, standardise, and group by strata; labels that are whole numbers are classes."""
    x = x[:, : settings.features]
    if isinstance(settings.strata_by, int) and settings.strata_by >= x.shape[1]:
        raise ConfigError("strata_by", settings.strata_by, f"label, or a feature from 0 to {x.shape[1] - 1}")
    is_number = y.dtype.kind == "f"
    if is_number == (settings.noise is None):
        allowed = "learnt, or a number above 0: a variance" if is_number else "null: its labels are classes"
        raise ConfigError("noise", settings.noise, allowed)
    order = numpy_stream(settings.split_seed, "tabular", "split").permutation(len(y))
    num_test = round(settings.test_fraction * len(y))
    test, train = np.sort(order[:num_test]), np.sort(order[num_test:])
    by = y if settings.strata_by == "label" else x[:, settings.strata_by]
    x = _standardise(x, train)[0]
    likelihood: GaussianNoise | Categorical
    if is_number:
        y, unit = _standardise(y, train)
        likelihood = GaussianNoise(None if settings.noise == "learnt" else float(settings.noise or 0), float(unit))
        targets = torch.tensor(y, dtype=torch.float32)
    else:
        likelihood, targets = Categorical(1 + int(y.max())), torch.tensor(y, dtype=torch.int64)
    groups, num = (y, 1 + int(y.max())) if not is_number and settings.strata_by == "label" else (None, settings.strata)
    if groups is None:
        edges = np.quantile(by[train], np.arange(1, settings.strata) / settings.strata)
        groups = np.searchsorted(edges, by, side="right")
    inputs, strata = torch.tensor(x, dtype=torch.float32), torch.tensor(groups, dtype=torch.int64)
    return Dataset(
        Split(inputs[train], targets[train]),
        Split(inputs[test], targets[test]),
        likelihood,
        strata=Strata(strata[train], strata[test], num),
    )


def _standardise(values: Floats, train: NDArray[np.int64]) -> tuple[Floats, Any]:
    """Subtract the training mean and divide by the standard deviation, which is returned; by 1 where there is none."""
    spread = values[train].std(0)
    spread = np.where(spread > 0, spread, 1.0)
    return (values - values[train].mean(0)) / spread, spread


def _read_sklearn(name: str, **options: Any) -> Floats:
    """Read a table of numbers inside scikit-learn. Not by scikit-learn, which takes a second to import."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.submodule_search_locations is not None
    table: Floats = np.loadtxt(Path(package.submodule_search_locations[0]) / "datasets" / "data" / name, **options)
    return table


def _diabetes() -> tuple[Floats, NDArray[Any]]:
    return _read_sklearn("diabetes_data_raw.csv.gz"), _read_sklearn("diabetes_target.csv.gz")


def _breast_cancer() -> tuple[Floats, NDArray[Any]]:
    table = _read_sklearn("breast_cancer.csv", delimiter=",", skiprows=1)
    return table[:, :-1], table[:, -1].astype(np.int64)


def _cultivars() -> tuple[Floats, NDArray[Any]]:
    """Take wines of the first two of three cultivars."""
    table = _read_sklearn("wine_data.csv", delimiter=",", skiprows=1)
    table = table[table[:, -1] < 2]
    return table[:, :-1], table[:, -1].astype(np.int64)


def _pooled_digits() -> tuple[Floats, NDArray[Any]]:
    """Average the digits' pixels over 8 fields of 4 x 2."""
    pixels, labels = digits.read()
    return pixels.reshape(-1, 2, 4, 4, 2).mean((2, 4)).reshape(-1, 8), labels


def _linear() -> tuple[Floats, NDArray[Any]]:
    """Draw 250 labels that are linear in 5 features of unequal correlation, with noise of half their spread."""
    rng = numpy_stream(0, "tabular", "linear")
    x = rng.standard_normal((250, 5)) @ (np.eye(5) + 0.5 * np.tri(5, k=-1))
    return x, x @ np.array([1.0, -0.5, 0.5, 0.0, 0.25]) + 0.6 * rng.standard_normal(250)


def _sine() -> tuple[Floats, NDArray[Any]]:
    """Draw 150 points of a sine with a gap in its middle, with noise."""
    rng = numpy_stream(0, "tabular", "sine")
    x = rng.uniform(0.25, 1.0, (150, 1)) * np.where(rng.random((150, 1)) < 0.5, -1.0, 1.0)
    return x, np.sin(4 * x[:, 0]) + 0.2 * rng.standard_normal(150)


READERS: dict[str, Callable[[], tuple[Floats, NDArray[Any]]]] = {
    "diabetes": _diabetes,
    "breast_cancer": _breast_cancer,
    "cultivars": _cultivars,
    "pooled_digits": _pooled_digits,
    "linear": _linear,
    "sine": _sine,
}
