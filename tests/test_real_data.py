"""Checks on the real files, below BFL_DATA_DIR; run with `pytest -m real_data`."""

import os
from pathlib import Path

import numpy as np
import pytest

from bfl_bench.build import plan
from bfl_bench.data.dataset import Dataset
from bfl_bench.data.natural.plays import read_roles
from bfl_bench.data.sources import load_arrays, load_content
from tests.composing import experiment, resolve, run_in

pytestmark = pytest.mark.real_data


def data_dir() -> str:
    return os.environ["BFL_DATA_DIR"]


def test_the_split_of_fedlpa_appendix_g2(tmp_path: Path) -> None:
    """MNIST, beta 0.05, 10 clients, seed 0: the class counts the paper prints for its clients 1, 8 and 10."""
    overrides = ["dataset=mnist", "partition.alpha=0.05", "partition.balance=true", "partition.rng=numpy_legacy"]
    worker = experiment(*overrides, f"data_dir={data_dir()}").worker
    counts = [np.bincount(worker.train.y[indices].numpy(), minlength=10).tolist() for indices in worker.client_indices]
    assert counts[0] == [0, 0, 0, 0, 2, 12, 2847, 0, 0, 16]
    assert counts[7] == [4914] + [0] * 9
    assert counts[9] == [70, 417, 1, 2175, 1, 1, 0, 1, 450, 1]


@pytest.mark.parametrize(("dataset", "floor"), [("mnist", 0.9), ("fashion_mnist", 0.75)])
def test_one_round_learns(tmp_path: Path, dataset: str, floor: float) -> None:
    """Two IID clients, one epoch of a small network: well above chance, well within what one epoch reaches."""
    text = run_in(
        tmp_path,
        *[f"dataset={dataset}", "model=mlp", "model.hidden=[50]", "num_clients=2", "partition=iid", "rounds=1"],
        *["local.epochs=1", "local.lr=0.1", f"data_dir={data_dir()}"],
    )
    assert float(text.splitlines()[1].split(",")[1]) > floor


def test_cifar10_is_itself() -> None:
    arrays = load_arrays("cifar10", Path(data_dir()))
    assert arrays.train_x.shape == (50000, 3, 32, 32)
    assert np.bincount(arrays.train_y).tolist() == [5000] * 10
    assert arrays.test_y[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]


def load_natural(name: str, **changes: object) -> tuple[Dataset, list[tuple[int, int]]]:
    """A natural federation, and how many training and test examples each client has."""
    overrides = [f"dataset.{key}={'null' if value is None else value}" for key, value in changes.items()]
    data = plan(resolve(f"dataset={name}", *overrides)).dataset.load(Path(data_dir()))
    assert data.owners is not None
    clients = len(data.owners.names)
    train, test = (part.bincount(minlength=clients).tolist() for part in (data.owners.train, data.owners.test))
    assert min(train) > 0
    return data, list(zip(train, test, strict=True))


def test_permuted_mnist_has_100_equal_clients() -> None:
    data, sizes = load_natural("pmnist")
    assert sizes == [(600, 100)] * 100
    assert (data.train.x.min(), data.train.x.max()) == (0, 1)


def test_writers_of_mnist() -> None:
    writers = load_content("qmnist", Path(data_dir()))
    counts = np.unique(writers.train, return_counts=True)[1]
    assert (len(counts), counts.min(), counts.max(), np.median(counts)) == (539, 19, 131, 116)
    assert len(np.unique(writers.test)) == 297
    assert not set(writers.train.tolist()) & set(writers.test.tolist())
    data, sizes = load_natural("mnist_writers")
    assert sorted(map(sum, sizes)) == sorted(counts.tolist())
    assert len(data.train) + len(data.test) == 60_000
    assert len(load_natural("mnist_writers", include_test=True)[1]) == 836


def test_femnist_part() -> None:
    data, sizes = load_natural("femnist")
    assert (len(sizes), len(data.train), len(data.test)) == (104, 10_596, 1_180)
    assert data.train.x.flatten(1).mode(1).values.mean() > 0.99  # the background is white
    data, sizes = load_natural("femnist", digits_only=False)
    assert (len(sizes), len(data.train), len(data.test)) == (105, 14_708, 1_685)
    totals = sorted(map(sum, sizes))
    assert (totals[0], totals[-1], totals[52]) == (5, 184, 169)


@pytest.mark.parametrize(("features", "shape"), [("precomputed", (561,)), ("raw", (6, 128))])
def test_activities_of_30_subjects(features: str, shape: tuple[int, ...]) -> None:
    data, sizes = load_natural("har", features=features)
    assert data.input_shape == shape
    assert len(sizes) == 30
    assert sum(map(sum, sizes)) == 10_929
    test_subjects = [2, 4, 9, 10, 12, 13, 18, 20, 24]  # of UCI's own split
    assert sum(sum(sizes[subject - 1]) for subject in test_subjects) == 3_162
    counts = data.train.y.bincount() + data.test.y.bincount(minlength=12)
    assert counts.tolist() == [1722, 1544, 1407, 1801, 1979, 1958, 70, 33, 107, 85, 139, 84]


def test_vehicle_sensors_part() -> None:
    data, sizes = load_natural("vsn")
    counts = "59 8 20 156 17 13 43 25 71 388 21 13 534 84 147 36 7 13 15 130 20 30 10"
    assert list(map(sum, sizes)) == [int(count) for count in counts.split()]
    assert (data.train.y.bincount() + data.test.y.bincount()).tolist() == [837, 1_023]


def test_roles_of_shakespeare() -> None:
    """The largest roles and their characters, as counted when the parser's output was compared with the texts."""
    texts = load_content("shakespeare", Path(data_dir()))
    assert len(texts) == 37
    for play, role, characters in [
        ("hamlet", "HAM", 64_705),
        ("othello", "IAGO", 44_584),
        ("romeo_and_juliet", "ROMEO", 24_851),
        ("midsummer_nights_dream", "THESEUS", 9_485),
        ("richard_iii", "GLOSTER", 28_638),
    ]:
        sizes = {name: len(speech) for name, speech in read_roles(texts[play]).items()}
        assert max(sizes, key=lambda name: sizes[name]) == role
        assert sizes[role] == characters
    assert len(read_roles(texts["othello"])["OTHELLO"]) == 33_379
    for play, text in texts.items():
        said = sum(map(len, read_roles(text).values()))
        assert 0.83 < said / len(text) < 0.93, play
    data, counts = load_natural("shakespeare", num_roles=None)
    assert len(counts) == 691
    assert min(map(sum, counts)) == 10
    assert data.train.x.min() > 0  # no unknown character
    assert len(load_natural("shakespeare")[1]) == 100
