"""Detection metrics against scikit-learn, ties and all; scores by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy as scipy_entropy
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from bfl_bench.evaluation.detection import (
    auroc,
    average_precision,
    entropy,
    false_positive_rate_at_95,
    lack_of_confidence,
    mutual_information,
)

EXACT = 1e-12  # sums of some hundred float64 numbers below 1
METRICS = {"auroc": auroc, "aupr": average_precision, "fpr95": false_positive_rate_at_95}
each_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS.keys())

scores = st.lists(st.integers(0, 12).map(lambda i: i / 8), min_size=1, max_size=60)  # few values: many ties
quick = settings(deadline=None, max_examples=80)


def both(inside: list[float], outside: list[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([0] * len(inside) + [1] * len(outside)), np.array(inside + outside)


@quick
@given(inside=scores, outside=scores)
def test_metrics_equal_scikit_learn(inside: list[float], outside: list[float]) -> None:
    foreign, score = both(inside, outside)
    pair = torch.tensor(inside), torch.tensor(outside)
    assert auroc(*pair) == pytest.approx(roc_auc_score(foreign, score), abs=EXACT)
    assert average_precision(*pair) == pytest.approx(average_precision_score(foreign, score), abs=EXACT)
    false_alarms, found, _ = roc_curve(foreign, score, drop_intermediate=False)
    enough = (found * len(outside)).round() * 100 >= 95 * len(outside)  # counts, so that 19 of 20 are 95 %
    assert false_positive_rate_at_95(*pair) == pytest.approx(false_alarms[enough].min(), abs=EXACT)


@quick
@given(inside=scores, outside=scores)
def test_auroc_counts_pairs(inside: list[float], outside: list[float]) -> None:
    wins = sum((foreign > own) + (foreign == own) / 2 for foreign in outside for own in inside)
    value = auroc(torch.tensor(inside), torch.tensor(outside))
    assert value == pytest.approx(wins / (len(inside) * len(outside)), abs=EXACT)
    assert 0 <= value <= 1
    assert auroc(torch.tensor(outside), torch.tensor(inside)) == pytest.approx(1 - value, abs=EXACT)


def test_real_scores_of_unequal_sets() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = torch.randn(700, generator=generator)
    outside = torch.randn(300, generator=generator) + 1
    foreign, score = both(inside.tolist(), outside.tolist())
    assert auroc(inside, outside) == pytest.approx(roc_auc_score(foreign, score), abs=EXACT)
    assert auroc(inside, outside) == pytest.approx(0.76, abs=0.05)  # Phi(1 / sqrt 2), three standard errors
    assert average_precision(inside, outside) == pytest.approx(average_precision_score(foreign, score), abs=EXACT)


@each_metric
def test_order_of_examples_does_not_matter(metric) -> None:
    generator = torch.Generator().manual_seed(2)
    inside, outside = (torch.randint(9, (n,), generator=generator) / 9 for n in (80, 50))
    shuffled = (x[torch.randperm(len(x), generator=generator)] for x in (inside, outside))
    assert metric(*shuffled) == pytest.approx(metric(inside, outside), abs=EXACT)


@pytest.mark.parametrize(
    ("inside", "outside", "expected"),
    [
        ([0.1, 0.2], [0.3, 0.4], (1, 1, 0)),  # apart
        ([0.3, 0.4], [0.1, 0.2], (0, (1 / 3 + 2 / 4) / 2, 1)),  # apart, the wrong way round
        ([0.5] * 3, [0.5], (0.5, 0.25, 1)),  # all equal
        ([0.0], [math.inf], (1, 1, 0)),
    ],
)
def test_metrics_by_hand(inside: list[float], outside: list[float], expected: tuple[float, ...]) -> None:
    values = [metric(torch.tensor(inside), torch.tensor(outside)) for metric in METRICS.values()]
    assert values == pytest.approx(expected, abs=EXACT)


def test_threshold_finds_just_95_percent() -> None:
    outside = torch.arange(20.0)  # 19 of 20 score at least 1
    assert false_positive_rate_at_95(torch.tensor([0.5, 1.0, 2.0, 3.0]), outside) == 0.75
    assert false_positive_rate_at_95(torch.tensor([0.5, 0.5, 0.5, 3.0]), outside[:19]) == 1.0  # needs all 19


@each_metric
@pytest.mark.parametrize("place", [0, 1])
def test_nan_is_not_hidden(metric, place: int) -> None:
    pair = [torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0.3, 0.5, 0.6])]
    pair[place][1] = math.nan
    assert math.isnan(metric(*pair))


def test_scores_of_examples() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    log_probabilities = probabilities.log()
    assert lack_of_confidence(log_probabilities).tolist() == pytest.approx([0.5, 0, 2 / 3], abs=EXACT)
    expected = scipy_entropy(probabilities.numpy(), axis=1).tolist()
    assert entropy(log_probabilities).tolist() == pytest.approx(expected, abs=EXACT)
    assert entropy(log_probabilities)[1] == 0
    nearly_sure = torch.tensor([[-1e-20, math.log(1e-20)]], dtype=torch.float64)
    assert lack_of_confidence(nearly_sure).item() == pytest.approx(1e-20, rel=1e-6, abs=0)  # 1 - p would be 0


def test_mutual_information_of_members() -> None:
    """Members that agree have none; two that are sure of different classes have log 2."""
    members = torch.tensor(
        [[[0.9, 0.1], [1.0, 0.0], [0.7, 0.3]], [[0.9, 0.1], [0.0, 1.0], [0.2, 0.8]]], dtype=torch.float64
    )  # (S, n, C)
    mean = members.mean(0)
    expected_entropy = torch.tensor(scipy_entropy(members.numpy(), axis=2).mean(0))
    values = mutual_information(mean.log(), expected_entropy)
    divergence = [scipy_entropy(members[s, 2].numpy(), mean[2].numpy()) for s in range(2)]  # KL of member from mean
    assert values.tolist() == pytest.approx([0, math.log(2), sum(divergence) / 2], abs=EXACT)
    assert mutual_information(mean.log(), expected_entropy + 1e-9)[0] == 0  # rounding does not go below 0


def test_float32_scores_are_compared_in_float64() -> None:
    assert lack_of_confidence(torch.tensor([[0.25, 0.75]]).log()).dtype == torch.float64
    assert entropy(torch.tensor([[0.25, 0.75]]).log()).dtype == torch.float64
    assert auroc(torch.tensor([0.1]), torch.tensor([0.1], dtype=torch.float64)) == 0.0  # 0.1f is above 0.1
