"""Metrics against values that torch-uncertainty 0.13.0 gave for the same predictions.

The values are recorded: importing that package takes Lightning and timm. It sums in float32, hence the tolerance.
"""

import pytest
import torch
from torch import Tensor

from bfl_bench.evaluation import calibration, detection, selective

NUM = 60
CLOSE = {"rel": 0, "abs": 1e-6}


@pytest.fixture
def log_probabilities() -> Tensor:
    rows = torch.arange(NUM, dtype=torch.float64)[:, None]
    columns = torch.arange(4, dtype=torch.float64)
    return (3 * torch.sin(1.7 * rows + 2.3 * columns * columns + 0.1 * rows * columns)).log_softmax(1)


@pytest.fixture
def labels(log_probabilities: Tensor) -> Tensor:
    """Two thirds of them are what is predicted."""
    numbers = torch.arange(NUM)
    return torch.where(numbers % 3 == 0, numbers % 4, log_probabilities.argmax(1))


def test_area_under_risk_coverage(log_probabilities: Tensor, labels: Tensor) -> None:
    """AURC, which is there by the trapezoid rule from coverage 1/n to 1; here the textbook's mean over coverages."""
    ours, curve = (
        selective.area_under_risk_coverage(log_probabilities, labels),
        selective.risk_coverage_curve(log_probabilities, labels),
    )
    ends = (curve[0] + curve[-1]).item() / 2
    assert (NUM * ours - ends) / (NUM - 1) == pytest.approx(0.24862037906275652, **CLOSE)


@pytest.mark.parametrize(
    ("num_bins", "recorded"),
    [(5, 0.25499966740608215), (10, 0.25499963760375977), (15, 0.2689054310321808), (20, 0.27631402015686035)],
)
def test_adaptive_calibration_error(log_probabilities: Tensor, labels: Tensor, num_bins: int, recorded: float) -> None:
    """MulticlassAdaptiveCalibrationError, with numbers of bins that divide 60: it deals out remainders otherwise."""
    found = calibration.adaptive_calibration_error(log_probabilities, labels, num_bins)
    assert found == pytest.approx(recorded, **CLOSE)


def test_false_positives_where_95_percent_are_found(log_probabilities: Tensor) -> None:
    """FPRx with recall_level 0.95 by entropy."""
    scores, foreign = detection.entropy(log_probabilities), torch.arange(NUM) % 5 < 2
    found = detection.false_positive_rate_at_95(scores[~foreign], scores[foreign])
    assert found == pytest.approx(0.9722222089767456, **CLOSE)


def test_mutual_information_of_three_members(log_probabilities: Tensor) -> None:
    members = [log_probabilities, log_probabilities.roll(1, 0), log_probabilities.roll(2, 1)]
    mean = torch.stack([member.exp() for member in members]).mean(0).log()
    expected = torch.stack([detection.entropy(member) for member in members]).mean(0)
    found = detection.mutual_information(mean, expected).mean().item()
    assert found == pytest.approx(0.4964999854564667, **CLOSE)
