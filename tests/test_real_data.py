"""Checks on the real files, below BFL_DATA_DIR; run with `pytest -m real_data`."""

import os
from pathlib import Path

import numpy as np
import pytest

from bfl_bench.data.sources import load_arrays
from tests.composing import experiment, run_in

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
