"""Risk over coverage by textbook loops, and ties by averaging over every order."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bfl_bench.evaluation.selective import (
    accuracy_at_coverage,
    area_under_risk_coverage,
    excess_area_under_risk_coverage,
    risk_coverage_curve,
)

EXACT = 1e-12  # sums of some hundred float64 numbers below 1


def two_classes(confidence: list[float], right: list[int]) -> tuple[Tensor, Tensor]:
    """Predictions of class 0 with these confidences (above 1/2)."""
    first = torch.tensor(confidence, dtype=torch.float64)
    return torch.stack([first, 1 - first], 1).log(), 1 - torch.tensor(right)


def slow_risks(right_in_order: list[int]) -> list[float]:
    return [1 - sum(right_in_order[:k]) / k for k in range(1, len(right_in_order) + 1)]


def mean_risks(confidence: list[float], right: list[int]) -> list[float]:
    """The risks for every order of the examples that is sorted by confidence, averaged."""
    n = len(right)
    falling = sorted(confidence, reverse=True)
    orders = [o for o in itertools.permutations(range(n)) if [confidence[i] for i in o] == falling]
    curves = [slow_risks([right[i] for i in order]) for order in orders]
    return [sum(curve[k] for curve in curves) / len(curves) for k in range(n)]


examples = st.lists(st.tuples(st.sampled_from([0.6, 0.7, 0.9, 1.0]), st.integers(0, 1)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(rows=examples)
def test_ties_are_averaged_over_every_order(rows: list[tuple[float, int]]) -> None:
    confidence, right = [row[0] for row in rows], [row[1] for row in rows]
    risks = mean_risks(confidence, right)
    best = slow_risks(sorted(right, reverse=True))
    log_probabilities, labels = two_classes(confidence, right)
    n = len(rows)
    assert risk_coverage_curve(log_probabilities, labels).tolist() == pytest.approx(risks, abs=EXACT)
    assert area_under_risk_coverage(log_probabilities, labels) == pytest.approx(sum(risks) / n, abs=EXACT)
    excess = excess_area_under_risk_coverage(log_probabilities, labels)
    assert excess == pytest.approx((sum(risks) - sum(best)) / n, abs=EXACT)
    assert excess >= -EXACT
    for coverage, kept in ((0.8, -(-8 * n // 10)), (0.9, -(-9 * n // 10)), (1.0, n)):
        ours = accuracy_at_coverage(log_probabilities, labels, coverage)
        assert ours == pytest.approx(1 - risks[kept - 1], abs=EXACT)


def test_many_classes_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probabilities = torch.randn(300, 6, generator=generator, dtype=torch.float64).log_softmax(1)
    labels = torch.randint(6, (300,), generator=generator)
    pairs = zip(log_probabilities.tolist(), labels.tolist(), strict=True)
    rows = sorted(((max(row), row.index(max(row)) == label) for row, label in pairs), reverse=True)
    risks = slow_risks([right for _, right in rows])
    best = slow_risks(sorted((right for _, right in rows), reverse=True))
    aurc = area_under_risk_coverage(log_probabilities, labels)
    assert aurc == pytest.approx(sum(risks) / 300, abs=EXACT)
    excess = excess_area_under_risk_coverage(log_probabilities, labels)
    assert excess == pytest.approx(sum(risks) / 300 - sum(best) / 300, abs=EXACT)
    # The best order's area tends to r + (1 - r) log(1 - r); the sum differs from the integral by less than 1 / n.
    risk = risks[-1]
    assert aurc - excess == pytest.approx(risk + (1 - risk) * math.log(1 - risk), abs=1 / 300)


def test_order_of_examples_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(1)
    confidence = (0.5 + torch.randint(1, 6, (100,), generator=generator) / 10).tolist()  # many ties
    right = torch.randint(2, (100,), generator=generator).tolist()
    log_probabilities, labels = two_classes(confidence, right)
    order = torch.randperm(100, generator=generator)
    for function in (area_under_risk_coverage, excess_area_under_risk_coverage):
        assert function(log_probabilities[order], labels[order]) == pytest.approx(
            function(log_probabilities, labels), abs=EXACT
        )


def test_constant_confidence_gives_the_error_rate() -> None:
    log_probabilities, labels = two_classes([1.0] * 8, [1, 1, 1, 0, 1, 0, 1, 1])
    assert area_under_risk_coverage(log_probabilities, labels) == pytest.approx(0.25, abs=EXACT)
    assert accuracy_at_coverage(log_probabilities, labels, 0.8) == pytest.approx(0.75, abs=EXACT)


@pytest.mark.parametrize(("right", "aurc"), [([1] * 5, 0.0), ([0] * 5, 1.0)])
def test_all_right_and_all_wrong(right: list[int], aurc: float) -> None:
    log_probabilities, labels = two_classes([0.6, 0.7, 0.8, 0.9, 1.0], right)
    assert area_under_risk_coverage(log_probabilities, labels) == aurc
    assert excess_area_under_risk_coverage(log_probabilities, labels) == 0


def test_best_order_has_no_excess_and_the_worst_has() -> None:
    right = [1, 1, 1, 0, 0]
    falling = [1.0, 0.9, 0.8, 0.7, 0.6]
    assert excess_area_under_risk_coverage(*two_classes(falling, right)) == pytest.approx(0, abs=EXACT)
    worst = excess_area_under_risk_coverage(*two_classes(falling[::-1], right))
    assert worst == pytest.approx((1 + 1 + 2 / 3 + 2 / 4 - 1 / 4) / 5, abs=EXACT)


def test_number_of_kept_examples_is_not_rounded_twice() -> None:
    """0.07 x 100 is 7.000000000000001 in floating point, and means 7."""
    confidence = [1 - i / 1000 for i in range(100)]
    log_probabilities, labels = two_classes(confidence, [1] * 7 + [0] * 93)
    assert accuracy_at_coverage(log_probabilities, labels, 0.07) == 1
    assert accuracy_at_coverage(log_probabilities, labels, 0.071) == pytest.approx(7 / 8, abs=EXACT)
    assert accuracy_at_coverage(log_probabilities, labels, 0.001) == 1


def test_nan_is_not_hidden() -> None:
    log_probabilities, labels = two_classes([0.6 + i / 100 for i in range(40)], [1] * 40)
    log_probabilities[1] = math.nan  # not even where it would be left out as the least confident
    assert math.isnan(area_under_risk_coverage(log_probabilities, labels))
    assert math.isnan(accuracy_at_coverage(log_probabilities, labels, 0.8))
