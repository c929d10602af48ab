"""Wrong training labels: exactly so many, the same ones at higher rates, never those of the test set; any dataset."""

from dataclasses import replace

import pytest
import torch

from bfl_bench.build import plan
from bfl_bench.data.label_noise import LabelNoise
from bfl_bench.engines.worker import TEST
from bfl_bench.errors import ConfigError
from tests.composing import SMALL, experiment, resolve
from tests.federation import generator

Y = torch.arange(200) % 7


def spoil(rate: float, kind: str, seed: int = 1) -> torch.Tensor:
    return LabelNoise(rate, kind).apply(Y, 7, generator(seed))  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.333, 1.0])
@pytest.mark.parametrize("kind", ["uniform", "next"])
def test_so_many_labels_are_wrong(rate: float, kind: str) -> None:
    noisy = spoil(rate, kind)
    assert (noisy != Y).sum() == round(rate * 200)
    assert noisy.min() >= 0
    assert noisy.max() < 7
    assert noisy.dtype == torch.int64
    assert torch.equal(Y, torch.arange(200) % 7)  # not in place


def test_kinds() -> None:
    assert torch.equal(spoil(1.0, "next"), (Y + 1) % 7)
    counts = torch.bincount((spoil(1.0, "uniform") - Y) % 7, minlength=7)
    assert counts[0] == 0
    assert counts[1:].min() > 200 / 6 / 2  # 33 on average, with a standard deviation of 5


def test_labels_that_are_wrong_stay_wrong_at_higher_rates() -> None:
    low, high = spoil(0.2, "uniform"), spoil(0.5, "uniform")
    wrong = low != Y
    assert torch.equal(low[wrong], high[wrong])
    assert not torch.equal(spoil(0.2, "uniform", seed=2), low)


def test_positions_of_sequences_are_labels() -> None:
    y = Y.view(40, 5)
    noisy = LabelNoise(0.3, "uniform").apply(y, 7, generator())
    assert noisy.shape == y.shape
    assert (noisy != y).sum() == 60


@pytest.mark.parametrize("further", [[], ["partition.validation=0.2"], ["dataset.server_samples=30", "method=fedbe"]])
def test_training_labels_of_a_run_are_wrong_and_test_labels_are_not(further: list[str]) -> None:
    """Split evenly, so that clients have the same examples as without noise; by the seed."""
    words = [*SMALL[:-1], "partition=iid", *further]
    clean, noisy, other = (
        experiment(*words, f"dataset.label_noise.rate={rate}", f"seed={seed}", "partition.seed=0").worker
        for rate, seed in ((0, 0), (0.25, 0), (0.25, 1))
    )
    assert torch.equal(clean.sets[TEST].split.y, noisy.sets[TEST].split.y)
    if "method=fedbe" not in further:  # which has taken 30 of 120 examples away
        assert torch.equal(clean.train.x, noisy.train.x)
        assert (clean.train.y != noisy.train.y).sum() == 30
        assert (other.train.y != noisy.train.y).any()
    for set_ in set(clean.sets) - {TEST}:
        assert (clean.sets[set_].split.y != noisy.sets[set_].split.y).any()  # validation examples are training's


def test_what_noise_is_refused() -> None:
    for word, sentence in (
        ("rate=1.5", "dataset.label_noise.rate: got 1.5, allowed: a number from 0 to 1"),
        ("kind=worse", "dataset.label_noise.kind: got 'worse', allowed: uniform, next"),
    ):
        with pytest.raises(ConfigError) as error:
            plan(resolve(*SMALL, f"dataset.label_noise.{word}"))
        assert str(error.value) == sentence


# The order of clients


def test_clients_take_turns() -> None:
    run = experiment(*SMALL, "cohort=sequential")
    assert [run.cohort(round_) for round_ in range(1, 8)] == [[0], [1], [2], [3], [4], [0], [1]]
    assert experiment(*SMALL).cohort(1) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"participation: got 0\.5, allowed: 1 with cohort=sequential"):
        plan(resolve(*SMALL, "cohort=sequential", "participation=0.5"))


def test_clients_without_examples_have_no_turn() -> None:
    run = experiment("dataset=synthetic", "num_clients=2", "cohort=sequential", "partition=disjoint")
    sizes = tuple(0 if client == 0 else size for client, size in enumerate(run.worker.task.sizes))
    without = replace(run, worker=replace(run.worker, task=replace(run.worker.task, sizes=sizes)))
    assert [without.cohort(round_) for round_ in (1, 2)] == [[1], [1]]
