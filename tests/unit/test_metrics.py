"""Metrics by hand, and ECE against torchmetrics."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bfl_bench.likelihood import (
    accuracy,
    brier_score,
    calibration_bins,
    expected_calibration_error,
    negative_log_likelihood,
)
from bfl_bench.run.recorder import worst_tenth

# Predictions 0, 1, 0, 2, 1 with confidences 0.5, 0.4, 0.7, 1.0, 0.9; the first and the last are right.
PROBABILITIES = torch.tensor(
    [[0.5, 0.3, 0.2], [0.3, 0.4, 0.3], [0.7, 0.2, 0.1], [0.0, 0.0, 1.0], [0.05, 0.9, 0.05]], dtype=torch.float64
)
LABELS = torch.tensor([0, 2, 1, 0, 1])
EXACT = 1e-12  # a handful of float64 operations on numbers near 1


def ece(probabilities: Tensor, labels: Tensor, num_bins: int) -> float:
    return expected_calibration_error(probabilities.log(), labels, num_bins)


def test_accuracy() -> None:
    assert accuracy(PROBABILITIES.log(), LABELS) == 2 / 5


def test_negative_log_likelihood() -> None:
    rows = [0, 1, 2, 4]  # the fourth gives its label no probability at all
    expected = -(math.log(0.5) + math.log(0.3) + math.log(0.2) + math.log(0.9)) / 4
    assert negative_log_likelihood(PROBABILITIES[rows].log(), LABELS[rows]) == pytest.approx(expected, abs=EXACT)
    assert negative_log_likelihood(PROBABILITIES.log(), LABELS) == math.inf


def test_brier_score() -> None:
    per_example = [
        0.5**2 + 0.3**2 + 0.2**2,
        0.3**2 + 0.4**2 + 0.7**2,
        0.7**2 + 0.8**2 + 0.1**2,
        1.0 + 1.0,
        0.05**2 + 0.1**2 + 0.05**2,
    ]
    log_probabilities = PROBABILITIES.log()
    kept = log_probabilities.clone()
    assert brier_score(log_probabilities, LABELS) == pytest.approx(sum(per_example) / 5, abs=EXACT)
    assert torch.equal(log_probabilities, kept)


def test_ece_by_hand() -> None:
    """Four bins: 0.5 lies on an edge and belongs below it, 1.0 belongs with 0.9."""
    second = (1 - 0.5) + (0 - 0.4)
    third = 0 - 0.7
    fourth = (0 - 1.0) + (1 - 0.9)
    expected = (abs(second) + abs(third) + abs(fourth)) / 5
    assert ece(PROBABILITIES, LABELS, 4) == pytest.approx(expected, abs=EXACT)
    # One bin: the gap of the means. Many bins: every example by itself.
    assert ece(PROBABILITIES, LABELS, 1) == pytest.approx(abs(2 - 3.5) / 5, abs=EXACT)
    assert ece(PROBABILITIES, LABELS, 1000) == pytest.approx((0.5 + 0.4 + 0.7 + 1.0 + 0.1) / 5, abs=EXACT)


@pytest.mark.parametrize(("confidence", "partner"), [(0.5, 0.45), (0.75, 0.7), (1.0, 0.95)])
def test_ece_upper_edges_belong_to_their_bin(confidence: float, partner: float) -> None:
    """Of two examples in one bin, one right and one wrong, the gaps cancel; in two bins they add up."""
    confidences = torch.tensor([confidence, partner], dtype=torch.float64)
    probabilities = torch.stack([confidences, 1 - confidences, torch.zeros(2)], 1)
    probabilities[:, 1:] = ((1 - confidences) / 2)[:, None]
    expected = abs((1 - confidence) + (0 - partner)) / 2
    assert ece(probabilities, torch.tensor([0, 1]), 4) == pytest.approx(expected, abs=EXACT)


def test_ece_of_float32_confidences_a_little_above_one() -> None:
    """Averaging draws in log space can exceed probability 1 by a rounding error."""
    log_probabilities = torch.tensor([[1e-7, -30.0], [-0.05, -3.0]])
    assert expected_calibration_error(log_probabilities, torch.tensor([1, 0]), 15) == pytest.approx(
        abs((0 - 1) + (1 - math.exp(-0.05))) / 2, abs=1e-6
    )


@settings(deadline=None, max_examples=60)
@given(
    num=st.integers(1, 80),
    num_classes=st.integers(2, 12),
    num_bins=st.integers(1, 25),
    scale=st.floats(0.1, 4),
    seed=st.integers(0, 2**31),
)
def test_ece_equals_torchmetrics(num: int, num_classes: int, num_bins: int, scale: float, seed: int) -> None:
    from torchmetrics.functional.classification import multiclass_calibration_error  # slow to import

    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, num_classes, generator=generator, dtype=torch.float64) * scale
    labels = torch.randint(num_classes, (num,), generator=generator)
    log_probabilities = logits.log_softmax(1)
    probabilities = log_probabilities.exp()
    confidence = probabilities.max(1).values * num_bins
    # torchmetrics closes its bins on the other side, gives 1.0 one of its own, and rounds edges to float32.
    keep = ((confidence - confidence.round()).abs() > 1e-5) & (confidence < num_bins * (1 - 1e-5))
    if not keep.any():
        return
    reference = multiclass_calibration_error(
        probabilities[keep], labels[keep], num_classes, n_bins=num_bins, norm="l1"
    ).item()
    ours = expected_calibration_error(log_probabilities[keep], labels[keep], num_bins)
    assert ours == pytest.approx(reference, abs=1e-6)  # torchmetrics sums in float32


def test_metrics_of_float32_inputs_are_computed_in_float64() -> None:
    """A float32 sum over 2^20 equal terms would lose far more than these digits."""
    log_probabilities = torch.tensor([[0.3, 0.7]]).log().repeat(2**20, 1)
    labels = torch.ones(2**20, dtype=torch.long)
    p = math.exp(log_probabilities[0, 1].item())
    q = math.exp(log_probabilities[0, 0].item())
    assert negative_log_likelihood(log_probabilities, labels) == pytest.approx(-math.log(p), abs=1e-12)
    assert brier_score(log_probabilities, labels) == pytest.approx((1 - p) ** 2 + q**2, abs=1e-12)
    assert expected_calibration_error(log_probabilities, labels, 15) == pytest.approx(1 - p, abs=1e-10)


@pytest.mark.parametrize(("num", "count"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (25, 3), (100, 10)])
def test_worst_tenth_rounds_up(num: int, count: int) -> None:
    values = [((7 * i) % num) / num for i in range(num)]  # 0, 1/n, ... in a mixed order
    if math.gcd(7, num) == 1:
        assert sorted(values) == [i / num for i in range(num)]
    kept = list(values)
    assert worst_tenth(values) == pytest.approx(sum(range(count)) / count / num, abs=EXACT)
    assert values == kept


def test_worst_tenth_takes_the_lowest() -> None:
    assert worst_tenth([0.9, 0.2, 0.8] + [0.95] * 8) == pytest.approx((0.2 + 0.8) / 2, abs=EXACT)
    assert worst_tenth([0.4]) == 0.4


def test_bins_of_the_reliability_diagram() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7], [1.0, 0.0]], dtype=torch.float64)
    bins = calibration_bins(probabilities.log(), torch.tensor([0, 0, 1, 0]), 5)
    assert [bin_.count for bin_ in bins] == [0, 0, 1, 1, 2]
    assert [bin_.confidence for bin_ in bins] == pytest.approx([0, 0, 0.6, 0.7, 0.95])
    assert [bin_.accuracy for bin_ in bins] == pytest.approx([0, 0, 0.0, 1.0, 1.0])
