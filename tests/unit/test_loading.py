"""What the data tell a task, and the seed that splits have of their own."""

import numpy as np
import pytest
import torch

from bfl_bench.build import load, plan
from bfl_bench.errors import ConfigError
from tests.composing import SMALL, resolve


def test_the_range_of_the_inputs_is_that_of_the_training_data() -> None:
    """Of each channel; the test data, with a range of their own, do not count."""
    experiment, dataset, _ = load(plan(resolve(*SMALL, "dataset.shape=[2,4,4]")))
    data = experiment.worker.task.data
    for channel in range(2):
        x = dataset.train.x[:, channel].numpy()
        assert (data.low[channel].item(), data.high[channel].item()) == (x.min(), x.max())
    assert data.low.shape == data.high.shape == (2, 1, 1)
    assert not torch.equal(data.low, dataset.test.x.amin((0, 2, 3)).view(2, 1, 1))


def test_the_range_of_augmented_inputs_is_that_of_the_images_as_the_network_gets_them() -> None:
    """Training images are bytes there; a mean and a deviation make numbers of them."""
    words = ["dataset=cifar10_cropped", "data_dir=stand-in", "dataset.mean=[0.1,0.2,0.3]", "dataset.std=[0.5,1,2]"]
    experiment, dataset, _ = load(plan(resolve(*words, "method=fedavg")))
    data = experiment.worker.task.data
    assert dataset.train.x.dtype == torch.uint8
    bytes_ = dataset.train.x.numpy().astype(np.float64)
    for channel, (mean, std) in enumerate(((0.1, 0.5), (0.2, 1.0), (0.3, 2.0))):
        expected = [(bound / 255 - mean) / std for bound in (bytes_[:, channel].min(), bytes_[:, channel].max())]
        assert [data.low[channel].item(), data.high[channel].item()] == pytest.approx(expected, rel=1e-6)


def test_runs_of_several_seeds_can_share_a_split() -> None:
    """It is the split of the run whose seed that is; the initial models are not."""
    own, shared, other = (
        load(plan(resolve(*SMALL, "partition.validation=0.2", *words)))
        for words in (["seed=3"], ["seed=5", "partition.seed=3"], ["seed=5"])
    )
    assert own[2].digest() == shared[2].digest() != other[2].digest()
    initials = [experiment.worker.task.model.initial for experiment, *_ in (own, shared, other)]
    assert torch.equal(initials[1], initials[2])
    assert not torch.equal(initials[0], initials[1])


def test_a_wrong_seed_of_the_split_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^partition\.seed: got -1, allowed: "):
        plan(resolve(*SMALL, "partition.seed=-1"))
    with pytest.raises(ConfigError, match=r"^partition\.seed: got 4294967296, allowed: from 0 to 4294967295"):
        load(plan(resolve(*SMALL, "partition.seed=4294967296", "partition.rng=numpy_legacy")))
