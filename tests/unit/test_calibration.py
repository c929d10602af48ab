"""Signed, largest, adaptive and classwise calibration errors and the parts of the Brier score, against slow oracles."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bfl_bench.evaluation.calibration import (
    adaptive_calibration_error,
    brier_decomposition,
    classwise_calibration_error,
    maximum_calibration_error,
    signed_calibration_error,
)
from bfl_bench.likelihood import Bin, accuracy, brier_score, calibration_bins, calibration_error

EXACT = 1e-12  # sums of some hundred float64 numbers below 1

cases = given(
    num=st.integers(1, 80),
    num_classes=st.integers(2, 7),
    num_bins=st.integers(1, 20),
    scale=st.floats(0.1, 4),
    rounded=st.booleans(),
    seed=st.integers(0, 2**31),
)
quick = settings(deadline=None, max_examples=60)


def predictions(num: int, num_classes: int, scale: float, rounded: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Random log probabilities (n, C) and labels; rounded ones have ties, zeros, ones and values on edges of bins."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, num_classes, generator=generator, dtype=torch.float64) * scale
    probabilities = logits.softmax(1)
    if rounded:
        probabilities = (probabilities * 4).round() / 4
        probabilities[:, 0] += 1 - probabilities.sum(1)
        probabilities = probabilities.clamp(min=0)
    return probabilities.log(), torch.randint(num_classes, (num,), generator=generator)


def bin_of(probability: float, num_bins: int) -> int:
    """The number, from 0, of the bin (m, m+1] / M: the first whose upper edge is not exceeded."""
    return next(m for m in range(num_bins) if m == num_bins - 1 or probability * num_bins <= m + 1)


@quick
@cases
def test_over_and_under_make_the_ece(num, num_classes, num_bins, scale, rounded, seed) -> None:
    log_probabilities, labels = predictions(num, num_classes, scale, rounded, seed)
    bins = calibration_bins(log_probabilities, labels, num_bins)
    error = signed_calibration_error(bins)
    assert error.over >= 0
    assert error.under >= 0
    assert error.over + error.under == pytest.approx(calibration_error(bins), abs=EXACT)
    confidence = log_probabilities.exp().max(1).values.mean().item()
    assert error.signed == pytest.approx(confidence - accuracy(log_probabilities, labels), abs=EXACT)


def test_signed_error_by_hand() -> None:
    bins = [Bin(0, 0.0, 0.0), Bin(2, 0.5, 1.0), Bin(6, 0.75, 0.5), Bin(2, 1.0, 1.0)]
    error = signed_calibration_error(bins)
    assert error.over == pytest.approx(0.6 * 0.25, abs=EXACT)
    assert error.under == pytest.approx(0.2 * 0.5, abs=EXACT)
    assert error.signed == pytest.approx(0.05, abs=EXACT)


@quick
@cases
def test_mce_equals_torchmetrics(num, num_classes, num_bins, scale, rounded, seed) -> None:
    """At most 100 examples: each bin that is not empty has at least 1 % of them, as torchmetrics wants it."""
    from torchmetrics.functional.classification import multiclass_calibration_error  # slow to import

    log_probabilities, labels = predictions(num, num_classes, scale, False, seed)
    confidence = log_probabilities.exp().max(1).values * num_bins
    # torchmetrics closes its bins on the other side and rounds edges to float32.
    keep = ((confidence - confidence.round()).abs() > 1e-5) & (confidence < num_bins * (1 - 1e-5))
    if not keep.any():
        return
    log_probabilities, labels = log_probabilities[keep], labels[keep]
    reference = multiclass_calibration_error(log_probabilities.exp(), labels, num_classes, n_bins=num_bins, norm="max")
    ours = maximum_calibration_error(calibration_bins(log_probabilities, labels, num_bins))
    assert ours == pytest.approx(reference.item(), abs=1e-6)  # torchmetrics sums in float32


def test_mce_leaves_out_bins_below_one_percent() -> None:
    rare, common = Bin(9, 0.9, 0.0), Bin(991, 0.6, 0.5)
    assert maximum_calibration_error([rare, common]) == pytest.approx(0.1, abs=EXACT)
    assert maximum_calibration_error([Bin(10, 0.9, 0.0), Bin(990, 0.6, 0.5)]) == 0.9
    assert maximum_calibration_error([Bin(0, 0.0, 0.0), Bin(1, 1.0, 0.0)]) == 1
    assert math.isnan(maximum_calibration_error([Bin(1, 0.5, 0.0)] * 101))
    assert maximum_calibration_error([Bin(1, 0.5, 0.0)] * 100) == 0.5


def slow_adaptive(confidence: list[float], right: list[float], num_bins: int) -> float:
    """Cut the examples, sorted before, into bins; the m-th starts at ceil(m n / M)."""
    n = len(confidence)
    cuts = [-(-m * n // num_bins) for m in range(num_bins + 1)]
    assert max(b - a for a, b in itertools.pairwise(cuts)) - min(b - a for a, b in itertools.pairwise(cuts)) <= 1
    return sum(abs(sum(confidence[a:b]) - sum(right[a:b])) for a, b in itertools.pairwise(cuts)) / n


@quick
@cases
def test_adaptive_ece_without_ties(num, num_classes, num_bins, scale, rounded, seed) -> None:
    log_probabilities, labels = predictions(num, num_classes, scale, False, seed)
    rows = sorted(
        (max(row), float(row.index(max(row)) == label))
        for row, label in zip(log_probabilities.exp().tolist(), labels.tolist(), strict=True)
    )
    expected = slow_adaptive([row[0] for row in rows], [row[1] for row in rows], num_bins)
    assert adaptive_calibration_error(log_probabilities, labels, num_bins) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("num_bins", [1, 2, 3, 4, 5, 6, 9])
def test_adaptive_ece_with_ties(num_bins: int) -> None:
    """Each place's accuracy is its mean over all orders of examples that are sorted by confidence."""
    confidence = [0.6, 0.8, 0.8, 0.8, 1.0, 1.0]
    right = [1, 0, 1, 1, 1, 0]
    orders = [
        order for order in itertools.permutations(range(6)) if [confidence[i] for i in order] == sorted(confidence)
    ]
    assert len(orders) == 6 * 2
    mean_right = np.mean([[right[i] for i in order] for order in orders], axis=0).tolist()
    expected = slow_adaptive(confidence, mean_right, num_bins)
    probabilities = torch.tensor([confidence, [1 - c for c in confidence]], dtype=torch.float64).T
    labels = 1 - torch.tensor(right)
    for order in [range(6), [3, 5, 0, 4, 2, 1], [4, 1, 5, 2, 0, 3]]:
        shuffled = probabilities[list(order)].log(), labels[list(order)]
        assert adaptive_calibration_error(*shuffled, num_bins) == pytest.approx(expected, abs=EXACT)


@quick
@cases
def test_classwise_ece_of_a_textbook(num, num_classes, num_bins, scale, rounded, seed) -> None:
    log_probabilities, labels = predictions(num, num_classes, scale, rounded, seed)
    probabilities = log_probabilities.exp().tolist()
    total = 0.0
    for c in range(num_classes):
        for m in range(num_bins):
            here = [i for i in range(num) if bin_of(probabilities[i][c], num_bins) == m]
            if here:
                confidence = sum(probabilities[i][c] for i in here) / len(here)
                share = sum(labels[i].item() == c for i in here) / len(here)
                total += len(here) / num * abs(confidence - share)
    ours = classwise_calibration_error(log_probabilities, labels, num_bins)
    assert ours == pytest.approx(total / num_classes, abs=EXACT)


def test_classwise_ece_equals_torchmetrics_class_by_class() -> None:
    from torchmetrics.functional.classification import binary_calibration_error

    log_probabilities, labels = predictions(500, 4, 1.5, False, seed=2)
    reference = [binary_calibration_error(log_probabilities[:, c].exp(), labels == c, n_bins=10) for c in range(4)]
    ours = classwise_calibration_error(log_probabilities, labels, 10)
    assert ours == pytest.approx(sum(reference).item() / 4, abs=1e-6)  # torchmetrics sums in float32


@quick
@cases
def test_parts_of_the_brier_score(num, num_classes, num_bins, scale, rounded, seed) -> None:
    """Each part by a textbook loop, and their sum is the Brier score."""
    log_probabilities, labels = predictions(num, num_classes, scale, rounded, seed)
    probabilities = log_probabilities.exp().tolist()
    reliability = resolution = uncertainty = 0.0
    for c in range(num_classes):
        observed = [float(label == c) for label in labels.tolist()]
        base = sum(observed) / num
        uncertainty += base * (1 - base)
        for m in range(num_bins):
            here = [i for i in range(num) if bin_of(probabilities[i][c], num_bins) == m]
            if here:
                forecast = sum(probabilities[i][c] for i in here) / len(here)
                share = sum(observed[i] for i in here) / len(here)
                reliability += len(here) / num * (forecast - share) ** 2
                resolution += len(here) / num * (share - base) ** 2
    parts = brier_decomposition(log_probabilities, labels, num_bins)
    assert parts.reliability == pytest.approx(reliability, abs=EXACT)
    assert parts.resolution == pytest.approx(resolution, abs=EXACT)
    assert parts.uncertainty == pytest.approx(uncertainty, abs=EXACT)
    total = parts.reliability - parts.resolution + parts.uncertainty + parts.within
    assert total == pytest.approx(brier_score(log_probabilities, labels), abs=EXACT)


def test_parts_of_the_brier_score_sum_to_that_of_scikit_learn() -> None:
    from sklearn.metrics import brier_score_loss

    log_probabilities, labels = predictions(200, 3, 1.0, False, seed=4)
    parts = brier_decomposition(log_probabilities, labels, 10)
    reference = sum(brier_score_loss((labels == c).numpy(), log_probabilities[:, c].exp().numpy()) for c in range(3))
    total = parts.reliability - parts.resolution + parts.uncertainty + parts.within
    assert total == pytest.approx(reference, abs=EXACT)


def test_parts_of_the_brier_score_at_the_extremes() -> None:
    labels = torch.tensor([0, 1, 1, 2])
    perfect = brier_decomposition(torch.eye(3)[labels].log(), labels, 5)
    uncertainty = 2 * 0.25 * 0.75 + 0.5 * 0.5
    assert (perfect.reliability, perfect.within) == (0, 0)
    assert perfect.resolution == pytest.approx(uncertainty, abs=EXACT)
    assert perfect.uncertainty == pytest.approx(uncertainty, abs=EXACT)
    # The same forecast for all: nothing resolved, nothing inside the bins.
    constant = brier_decomposition(torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log().repeat(4, 1), labels, 5)
    assert constant.resolution == pytest.approx(0, abs=EXACT)
    assert constant.within == pytest.approx(0, abs=EXACT)
    assert constant.reliability == pytest.approx(0.25**2 + 0.2**2 + 0.05**2, abs=EXACT)


def test_order_of_examples_does_not_matter() -> None:
    log_probabilities, labels = predictions(70, 4, 2.0, True, seed=8)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    for function in (adaptive_calibration_error, classwise_calibration_error):
        assert function(log_probabilities[order], labels[order], 7) == pytest.approx(
            function(log_probabilities, labels, 7), abs=EXACT
        )
    parts, again = (
        brier_decomposition(*pair, 7)
        for pair in ((log_probabilities, labels), (log_probabilities[order], labels[order]))
    )
    assert vars(parts) == pytest.approx(vars(again), abs=EXACT)


def test_one_example_of_confidence_one() -> None:
    log_probabilities = torch.tensor([[0.0, -math.inf]])
    for label, error in ((0, 0.0), (1, 1.0)):
        labels = torch.tensor([label])
        assert adaptive_calibration_error(log_probabilities, labels, 15) == error
        assert classwise_calibration_error(log_probabilities, labels, 15) == error
        assert signed_calibration_error(calibration_bins(log_probabilities, labels, 15)).over == error
        assert brier_decomposition(log_probabilities, labels, 15).reliability == 2 * error


def test_one_class_only() -> None:
    log_probabilities, labels = torch.zeros(5, 1), torch.zeros(5, dtype=torch.long)
    assert adaptive_calibration_error(log_probabilities, labels, 3) == 0
    assert classwise_calibration_error(log_probabilities, labels, 3) == 0
    parts = brier_decomposition(log_probabilities, labels, 3)
    assert vars(parts) == {"reliability": 0, "resolution": 0, "uncertainty": 0, "within": 0}


def test_float32_confidences_a_little_above_one_stay_in_the_last_bin() -> None:
    log_probabilities = torch.tensor([[1e-7, -30.0], [-0.05, -3.0]])
    labels = torch.tensor([1, 0])
    expected = abs((0 - 1) + (1 - math.exp(-0.05))) + abs((1 - 0) + (0 - math.exp(-3)))
    # 20 bins: exp(-0.05) = 0.9512 is in the last, exp(-3) = 0.0498 and exp(-30) in the first
    assert classwise_calibration_error(log_probabilities, labels, 20) == pytest.approx(expected / 4, abs=1e-6)
