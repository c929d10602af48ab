"""The fitted temperature against closed forms and against scipy's minimiser, and at the ends of its bracket."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor

from bfl_bench.evaluation.temperature import apply_temperature, fit_temperature
from bfl_bench.likelihood import negative_log_likelihood

FITTED = 1e-7  # relative; 30 bisections leave 1e-8


def predictions(num: int, num_classes: int, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """Log probabilities whose labels follow them at another temperature: the right one is about `scale`."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, num_classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return (logits * scale).log_softmax(1), labels


def slow_nll(log_probabilities: Tensor, labels: Tensor, temperature: float) -> float:
    total = 0.0
    for row, label in zip(log_probabilities.numpy(), labels.tolist(), strict=True):
        scaled = row / temperature
        total += np.logaddexp.reduce(scaled) - scaled[label]
    return total / len(labels)


def same_odds(odds: float, right: int, num: int) -> tuple[Tensor, Tensor]:
    """Two classes, every prediction as confident as the other, the first `right` of them right."""
    log_probabilities = torch.tensor([[math.log(odds), 0.0]], dtype=torch.float64).log_softmax(1).repeat(num, 1)
    return log_probabilities, (torch.arange(num) >= right).long()


@pytest.mark.parametrize("scale", [0.2, 0.9, 1.0, 4.0])
def test_temperature_minimises_the_nll(scale: float) -> None:
    log_probabilities, labels = predictions(60, 4, scale, seed=3)
    reference = minimize_scalar(
        lambda log_t: slow_nll(log_probabilities, labels, math.exp(log_t)),
        bounds=(math.log(0.01), math.log(100)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    # Values of a function place its minimum to the square root of their own precision.
    assert fit_temperature(log_probabilities, labels) == pytest.approx(math.exp(reference.x), rel=1e-6)


def test_temperature_of_a_scaled_model_is_about_the_scale() -> None:
    """Which also says the direction: overconfident logits need T > 1."""
    for scale in (0.25, 3.0):
        assert fit_temperature(*predictions(20_000, 5, scale, seed=1)) == pytest.approx(scale, rel=0.05)


@settings(deadline=None, max_examples=60)
@given(odds=st.floats(1.5, 1e6), right=st.integers(51, 99))
def test_temperature_of_equal_confidences(odds: float, right: int) -> None:
    """One confidence for all: the best is the accuracy, so log odds / T = log(right / wrong)."""
    exact = math.log(odds) / math.log(right / (100 - right))
    fitted = fit_temperature(*same_odds(odds, right, 100))
    assert fitted == pytest.approx(min(max(exact, 0.01), 100), rel=FITTED)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), factor=st.floats(0.2, 5), num=st.integers(30, 80))
def test_temperatures_multiply(seed: int, factor: float, num: int) -> None:
    log_probabilities, labels = predictions(num, 3, 1.0, seed)
    temperature = fit_temperature(log_probabilities, labels)
    if 0.1 < temperature < 10:  # away from the ends, before and after
        again = fit_temperature(apply_temperature(log_probabilities, factor), labels)
        assert again == pytest.approx(temperature / factor, rel=FITTED)


def test_order_of_examples_does_not_matter() -> None:
    log_probabilities, labels = predictions(50, 4, 2.0, seed=5)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert fit_temperature(log_probabilities[order], labels[order]) == pytest.approx(
        fit_temperature(log_probabilities, labels), rel=FITTED
    )


def test_apply_temperature() -> None:
    log_probabilities = torch.tensor([[0.2, 0.8], [0.5, 0.5]]).log()
    scaled = apply_temperature(log_probabilities, 0.5).exp()
    assert scaled.dtype == torch.float64
    expected = torch.tensor([[0.04 / 0.68, 0.64 / 0.68], [0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=0)  # the input is float32
    torch.testing.assert_close(apply_temperature(log_probabilities, 1.0), log_probabilities.double(), rtol=0, atol=1e-7)
    flat = apply_temperature(torch.tensor([[0.0, -math.inf]]), 100.0)
    assert 0.999 < flat[0, 0].exp().item() < 0.9999  # 2e-308 to the power of 1/100
    very_low = torch.tensor([[0.0, -2000.0]], dtype=torch.float64)  # finite: kept as it is
    assert torch.equal(apply_temperature(very_low, 1.0), very_low)


def test_perfect_predictions_end_at_the_lower_end() -> None:
    assert fit_temperature(*same_odds(3.0, 100, 100)) == 0.01
    assert fit_temperature(*same_odds(1e9, 1, 1)) == 0.01  # a single example
    log_probabilities, _ = predictions(1001, 7, 5.0, seed=2)  # confidences of all kinds
    assert fit_temperature(log_probabilities, log_probabilities.argmax(1)) == 0.01


def test_wrong_predictions_end_at_the_upper_end() -> None:
    assert fit_temperature(*same_odds(3.0, 0, 100)) == 100
    assert fit_temperature(*same_odds(3.0, 50, 100)) == 100  # no better than a guess


def test_where_nothing_can_be_gained_it_is_one() -> None:
    labels = torch.tensor([0, 1, 2])
    assert fit_temperature(torch.full((3, 3), 1 / 3).log(), labels) == 1  # uniform
    assert fit_temperature(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long)) == 1  # one class
    assert fit_temperature(torch.eye(3).log(), labels) == 1  # right, with confidence 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_labels_of_probability_zero(dtype: torch.dtype) -> None:
    """Confidence 1 and sometimes wrong: as far up as the bracket goes, and the NLL becomes finite."""
    log_probabilities = torch.tensor([[1.0, 0.0]], dtype=dtype).log().repeat(10, 1)
    labels = torch.tensor([1] + [0] * 9)
    temperature = fit_temperature(log_probabilities, labels)
    assert temperature == 100
    assert negative_log_likelihood(log_probabilities, labels) == math.inf
    assert negative_log_likelihood(apply_temperature(log_probabilities, temperature), labels) < 1


def test_a_model_of_mixed_extremes() -> None:
    """Right examples of confidence 1 change nothing, so the others decide."""
    log_probabilities, labels = same_odds(9.0, 70, 100)
    certain = torch.tensor([[0.0, -math.inf]], dtype=torch.float64).repeat(50, 1)
    both = torch.cat([log_probabilities, certain]), torch.cat([labels, torch.zeros(50, dtype=torch.long)])
    assert fit_temperature(*both) == pytest.approx(math.log(9) / math.log(7 / 3), rel=FITTED)


def test_nan_is_not_hidden() -> None:
    log_probabilities, labels = same_odds(3.0, 70, 100)
    log_probabilities[4, 0] = math.nan
    assert math.isnan(fit_temperature(log_probabilities, labels))
