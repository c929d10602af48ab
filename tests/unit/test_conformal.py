"""Conformal sets by textbook loops, and the coverage that the theory promises."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bfl_bench.evaluation.conformal import (
    Coverage,
    conformal_coverage,
    conformal_threshold,
    coverage_of_clients,
    worst_covered,
)


def predictions(num: int, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Labels that follow the predicted probabilities."""
    generator = torch.Generator().manual_seed(seed)
    log_probabilities = (2 * torch.randn(num, num_classes, generator=generator, dtype=torch.float64)).log_softmax(1)
    return log_probabilities, torch.multinomial(log_probabilities.exp(), 1, generator=generator)[:, 0]


def slow_quantile(log_probabilities: Tensor, labels: Tensor, alpha: str) -> float:
    """The k-th smallest of the scores 1 - p(label), k = ceil((n + 1)(1 - alpha)) without rounding; or infinity."""
    scores = sorted(1 - log_probabilities[i, label].exp().item() for i, label in enumerate(labels.tolist()))
    k = math.ceil((len(scores) + 1) * (1 - Fraction(alpha)))
    return scores[k - 1] if k <= len(scores) else math.inf


@settings(deadline=None, max_examples=60)
@given(
    num=st.integers(1, 120),
    alpha=st.sampled_from(["0.05", "0.1", "0.2", "0.43", "0.9"]),
    seed=st.integers(0, 2**31),
)
def test_sets_of_a_textbook(num: int, alpha: str, seed: int) -> None:
    calibration, test = predictions(num, 4, seed), predictions(50, 4, seed + 1)
    threshold = conformal_threshold(*calibration, float(alpha))
    quantile = slow_quantile(*calibration, alpha)
    assert 1 - math.exp(threshold) == pytest.approx(min(quantile, 1), abs=1e-12)
    sizes, hits = [], []
    for row, label in zip(test[0].exp().tolist(), test[1].tolist(), strict=True):
        members = [c for c in range(4) if 1 - row[c] <= quantile]
        sizes.append(len(members))
        hits.append(label in members)
    assert conformal_coverage(*test, threshold) == Coverage(50, sum(hits) / 50, sum(sizes) / 50)


def test_number_of_scores_is_not_rounded_twice() -> None:
    """100 x (1 - 0.43) is 57.00000000000001 in floating point, and means the 57th of 99 scores."""
    probabilities = torch.arange(99, 0, -1, dtype=torch.float64) / 100  # scores 0.01, ..., 0.99
    log_probabilities = torch.stack([probabilities, 1 - probabilities], 1).log()
    threshold = conformal_threshold(log_probabilities, torch.zeros(99, dtype=torch.long), 0.43)
    assert 1 - math.exp(threshold) == pytest.approx(0.57, abs=1e-12)


def test_coverage_is_the_promised_one() -> None:
    """Of exchangeable examples k / (n + 1) are covered on average: 18 of 20."""
    num, repeats = 19, 400
    coverages = []
    for seed in range(repeats):
        log_probabilities, labels = predictions(num + 300, 5, seed)
        threshold = conformal_threshold(log_probabilities[:num], labels[:num], 0.1)
        coverages.append(conformal_coverage(log_probabilities[num:], labels[num:], threshold).coverage)
    deviation = math.sqrt(0.9 * 0.1 / (num + 2))  # of the beta distribution of one repeat's coverage
    assert sum(coverages) / repeats == pytest.approx(0.9, abs=5 * deviation / math.sqrt(repeats))


@pytest.mark.parametrize(("num", "all_classes"), [(1, True), (8, True), (9, False), (10, False)])
def test_too_few_examples_give_all_classes(num: int, all_classes: bool) -> None:
    """ceil(0.9 (n + 1)) / n is above 1 for n < 9."""
    log_probabilities = torch.tensor([[0.9, 0.1, 0.0]], dtype=torch.float64).log().repeat(num, 1)
    labels = torch.zeros(num, dtype=torch.long)
    threshold = conformal_threshold(log_probabilities, labels, 0.1)
    assert (threshold == -math.inf) == all_classes
    assert conformal_coverage(log_probabilities, labels, threshold) == Coverage(num, 1.0, 3.0 if all_classes else 1.0)


def test_label_of_probability_zero_gives_all_classes() -> None:
    log_probabilities = torch.tensor([[1.0, 0.0]]).log().repeat(10, 1)
    threshold = conformal_threshold(log_probabilities, torch.ones(10, dtype=torch.long), 0.1)
    assert conformal_coverage(log_probabilities, torch.ones(10, dtype=torch.long), threshold) == Coverage(10, 1.0, 2.0)


def test_scores_that_round_to_one_are_told_apart() -> None:
    """1 - 1e-20 and 1 - 1e-30 are the same number, their log probabilities are not."""
    log_probabilities = torch.tensor([[0.0, -46.0, -69.0]], dtype=torch.float64).repeat(20, 1)
    threshold = conformal_threshold(log_probabilities, torch.ones(20, dtype=torch.long), 0.1)
    assert conformal_coverage(log_probabilities, torch.full((20,), 2), threshold) == Coverage(20, 0.0, 2.0)


def test_ties_on_the_threshold_are_covered() -> None:
    log_probabilities = torch.tensor([[0.6, 0.4]]).log().repeat(20, 1)
    labels = torch.tensor([0] * 19 + [1])
    threshold = conformal_threshold(log_probabilities, labels, 0.1)  # the 19th of 20 scores is 0.4 still
    assert conformal_coverage(log_probabilities, labels, threshold) == Coverage(20, 0.95, 1.0)


def test_clients_by_themselves() -> None:
    log_probabilities, labels = predictions(200, 4, seed=7)
    clients = torch.randint(4, (200,), generator=torch.Generator().manual_seed(0)) + 1
    clients[clients == 3] = 5  # clients 0 and 3 have no examples
    threshold = math.log(0.2)
    coverages = coverage_of_clients(log_probabilities, labels, threshold, clients, 6)
    for client, ours in enumerate(coverages):
        here = clients == client
        if here.any():
            assert ours == conformal_coverage(log_probabilities[here], labels[here], threshold)
        else:
            assert ours.count == 0
            assert math.isnan(ours.coverage)
            assert math.isnan(ours.set_size)
    overall = conformal_coverage(log_probabilities, labels, threshold)
    assert sum(c.count for c in coverages) == overall.count == 200
    assert sum(c.count * c.coverage for c in coverages if c.count) / 200 == pytest.approx(overall.coverage, abs=1e-12)
    assert sum(c.count * c.set_size for c in coverages if c.count) / 200 == pytest.approx(overall.set_size, abs=1e-12)
    assert coverages[worst_covered(coverages)].coverage == min(c.coverage for c in coverages if c.count)


def test_worst_client() -> None:
    nobody = Coverage(0, math.nan, math.nan)
    assert worst_covered([nobody, Coverage(3, 0.9, 2.0), Coverage(4, 0.5, 1.0), nobody, Coverage(2, 0.5, 3.0)]) == 2


def test_order_of_examples_does_not_matter() -> None:
    log_probabilities, labels = predictions(60, 4, seed=1)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    threshold = conformal_threshold(log_probabilities, labels, 0.1)
    assert conformal_threshold(log_probabilities[order], labels[order], 0.1) == threshold
    assert conformal_coverage(log_probabilities[order], labels[order], threshold) == conformal_coverage(
        log_probabilities, labels, threshold
    )


def test_nan_is_not_hidden() -> None:
    log_probabilities, labels = predictions(60, 4, seed=1)
    log_probabilities[5] = math.nan
    assert math.isnan(conformal_threshold(log_probabilities, labels, 0.1))
