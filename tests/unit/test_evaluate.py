"""Predictions averaged over draws, against numpy."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bfl_bench import likelihood as metrics
from bfl_bench.data.dataset import Split
from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import make_gaussian
from bfl_bench.models.networks import lenet
from tests.federation import (
    CPU,
    NUM_CLASSES,
    NUM_FEATURES,
    generator,
    make_gaussian_settings,
    make_module,
    make_split,
    predict,
    score,
)

ROUNDING = 1e-5  # float32 logits near 1 from sums of a few terms, then their logarithms


def make_draws(model: FlatModel, num: int) -> list[Tensor]:
    """Far apart, so that averaging probabilities, log-probabilities, logits or parameters all differ."""
    return [torch.randn(model.layout.size, generator=generator(60 + i)) * (1 + i) for i in range(num)]


def softmax_by_numpy(model: FlatModel, draw: Tensor, x: Tensor) -> np.ndarray:
    w1, b1, w2, b2 = (t.double().numpy() for t in model.layout.to_state_dict(draw).values())
    logits = np.tanh(x.double().numpy() @ w1.T + b1) @ w2.T + b2
    exponentials = np.exp(logits)
    return np.asarray(exponentials / exponentials.sum(1, keepdims=True))


@pytest.mark.parametrize("num", [1, 2, 5])
def test_draws_average_in_probability_space(num: int) -> None:
    model, data = FlatModel(make_module(), CPU), make_split(23)
    draws = make_draws(model, num)
    probabilities = [softmax_by_numpy(model, draw, data.x) for draw in draws]
    expected = np.log(np.mean(probabilities, axis=0))
    result = predict(model, iter(draws), data.x, 10)
    assert result.shape == (23, NUM_CLASSES)
    np.testing.assert_allclose(result.numpy(), expected, rtol=ROUNDING, atol=ROUNDING)
    if num > 1:
        assert np.abs(np.mean(np.log(probabilities), axis=0) - expected).max() > 0.1
    assert torch.equal(model.vector, draws[-1])


@pytest.mark.parametrize("batch_size", [1, 7, 22, 24, 1000])
def test_batch_size_does_not_matter(batch_size: int) -> None:
    model, data = FlatModel(make_module(), CPU), make_split(23)
    draws = make_draws(model, 3)
    result = predict(model, iter(draws), data.x, batch_size)
    # Matrix products of other sizes may sum in another order.
    torch.testing.assert_close(result, predict(model, iter(draws), data.x, 23), rtol=ROUNDING, atol=ROUNDING)


def test_dropout_is_off_and_statistics_stand_still() -> None:
    module = nn.Sequential(
        nn.Linear(NUM_FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, NUM_CLASSES)
    )
    model, data = FlatModel(module, CPU), make_split(23)
    draw = torch.rand(model.layout.size, generator=generator()) + 0.1
    model.module.train()
    result = predict(model, iter([draw]), data.x, 10)
    assert torch.equal(model.vector, draw)
    w1, b1, weight, bias, w2, b2, mean, variance = (t.double() for t in model.layout.to_state_dict(draw).values())
    hidden = (data.x.double() @ w1.T + b1 - mean) / (variance + 1e-5).sqrt() * weight + bias
    expected = (hidden.tanh() @ w2.T + b2).log_softmax(1)
    torch.testing.assert_close(result.double(), expected, rtol=ROUNDING, atol=ROUNDING)


def test_extreme_logits_stay_finite() -> None:
    """Probabilities below the smallest float32 still have a logarithm."""
    model, x = FlatModel(nn.Linear(1, 2), CPU), torch.ones(1, 1)
    draws = [torch.tensor([200.0, -200.0, 0.0, 0.0]), torch.tensor([300.0, -300.0, 0.0, 0.0])]
    result = predict(model, iter(draws), x, 10)
    expected = np.logaddexp(-400.0, -600.0) - np.log(2)
    np.testing.assert_allclose(result.numpy(), [[0.0, expected]], rtol=1e-6, atol=1e-6)  # float32


def test_no_draws() -> None:
    model = FlatModel(make_module(), CPU)
    with pytest.raises(ValueError, match="at least one draw"):
        predict(model, iter([]), make_split(5).x, 10)


def test_draws_are_taken_one_at_a_time() -> None:
    """A draw may live in storage that the next one overwrites."""
    model, data = FlatModel(make_module(), CPU), make_split(23)
    draws = make_draws(model, 3)

    def reusing() -> Iterator[Tensor]:
        storage = torch.empty(model.layout.size)
        for draw in draws:
            yield storage.copy_(draw)

    assert torch.equal(predict(model, reusing(), data.x, 10), predict(model, iter(draws), data.x, 10))


def test_scores_are_those_of_the_averaged_prediction() -> None:
    """Labels that are right where the confidence is high and wrong where it is low: bins of the ECE matter."""
    model, x = FlatModel(make_module(), CPU), make_split(40).x
    draws = make_draws(model, 3)
    mean = np.mean([softmax_by_numpy(model, draw, x) for draw in draws], axis=0)
    confident = mean.max(1) > np.median(mean.max(1))
    labels = np.where(confident, mean.argmax(1), mean.argmin(1))
    data = Split(x, torch.from_numpy(labels))
    one_hot = np.eye(NUM_CLASSES)[labels]
    scores = score(predict(model, iter(draws), data.x, 10), data.y, ece_bins=2)
    assert scores.values["accuracy"] == 0.5
    assert scores.values["nll"] == pytest.approx(-np.log(mean[np.arange(40), labels]).mean(), rel=ROUNDING)
    assert scores.values["brier"] == pytest.approx(((mean - one_hot) ** 2).sum(1).mean(), rel=ROUNDING)
    ece = [metrics.expected_calibration_error(torch.from_numpy(np.log(mean)), data.y, bins) for bins in (2, 15)]
    assert scores.values["ece"] == pytest.approx(ece[0], rel=ROUNDING)
    assert abs(ece[0] - ece[1]) > 1e-3


def test_training_works_after_an_evaluation() -> None:
    """Evaluation runs in inference mode; the parameters must still be usable for gradients."""
    model, data = FlatModel(make_module(), CPU), make_split(23)
    predict(model, iter(make_draws(model, 1)), data.x, 10)
    assert model.backward(nn.functional.cross_entropy(model(data.x), data.y)).any()
    model.trainable.add_(model.gradient, alpha=-0.1)
    model.assert_views()


def test_every_position_of_a_sequence_counts() -> None:
    log_probabilities = torch.randn(4, 3, 5, generator=generator()).log_softmax(1)
    labels = torch.randint(3, (4, 5), generator=generator())
    flat = torch.stack([log_probabilities[i, :, t] for i in range(4) for t in range(5)])
    assert score(log_probabilities, labels, 7) == score(flat, labels.flatten(), 7)


def test_outputs_beyond_the_classes_are_conditioned_away() -> None:
    model, data = FlatModel(make_module(), CPU), make_split(23)
    draws = make_draws(model, 2)
    whole = predict(model, iter(draws), data.x, 10).exp()
    cut = predict(model, iter(draws), data.x, 10, num_classes=2).exp()
    torch.testing.assert_close(cut, whole[:, :2] / whole[:, :2].sum(1, keepdim=True), rtol=ROUNDING, atol=ROUNDING)


class Counting(nn.Module):
    """Passes its input on, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_layers_before_the_gaussian_ones_run_once_for_all_draws() -> None:
    """And the prediction is the same to the last bit; a draw with other parameters there runs them again."""
    counter = Counting()
    layers = [counter, nn.Linear(NUM_FEATURES, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Linear(4, 3)]
    model, data = FlatModel(make_gaussian(nn.Sequential(*layers), 2, make_gaussian_settings()), CPU), make_split(23)
    start = model.initial.clone()
    draws = [start.clone() for _ in range(4)]
    for number, draw in enumerate(draws):
        draw[model.layout.means] += 0.3 * torch.randn(len(draw[model.layout.means]), generator=generator(number))
    found = predict(model, iter(draws), data.x, 10)
    assert counter.calls == 3  # batches
    whole = torch.stack([predict(model, iter([draw]), data.x, 10) for draw in draws])
    torch.testing.assert_close(found, whole.logsumexp(0) - np.log(4), rtol=1e-5, atol=1e-6)
    counter.calls = 0
    for change in (0, model.layout.size - 1):  # a point of the first layer, a statistic of the normalisation
        other = draws[1].clone()
        other[change] += 0.5
        counter.calls = 0
        pair = predict(model, iter([draws[0], other]), data.x, 10)
        assert counter.calls == 6
        expected = torch.stack([predict(model, iter([draw]), data.x, 10) for draw in (draws[0], other)])
        torch.testing.assert_close(pair, expected.logsumexp(0) - np.log(2), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(predict(model, iter([draws[0], draws[1]]), data.x, 10), pair)


@pytest.mark.parametrize("batch_size", [7, 100])
def test_the_prefix_changes_no_bit(batch_size: int) -> None:
    torch.manual_seed(1)
    model = FlatModel(make_gaussian(lenet((1, 28, 28), 10), None, make_gaussian_settings()), CPU)
    assert model.prefix is not None
    x = torch.rand(30, 1, 28, 28)
    with torch.inference_mode():
        model.module.eval()
        parts = torch.split(x, batch_size)
        for part in parts:
            assert torch.equal(model.suffix(model.prefix(part)), model(part))
