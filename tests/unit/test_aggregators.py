"""The weighted mean and the server's step."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bfl_bench.aggregators import WeightedMean, algebra, step_towards
from tests.federation import generator

VECTORS = torch.randn(4, 50, generator=generator()) * torch.tensor([1.0, 100.0, 1e-3, 5.0])[:, None] + 2
WEIGHTS = (7.0, 1.0, 250.0, 33.0)


def mean_of(vectors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    mean = WeightedMean()
    for vector, weight in zip(vectors, weights, strict=True):
        mean.add(vector, weight)
    return mean.result()


def test_equals_numpy() -> None:
    kept = VECTORS.clone()
    result = mean_of(list(VECTORS), list(WEIGHTS))
    expected = np.average(VECTORS.numpy().astype(np.float64), axis=0, weights=WEIGHTS)
    assert result.dtype == torch.float64
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-13, atol=1e-13)  # sums of four in float64
    assert torch.equal(VECTORS, kept)


@pytest.mark.parametrize("num", [1, 7, 8, 9, 20])
def test_the_sum_is_that_of_one_after_the_other(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    """Bit for bit, however many are added together and whatever the length of a piece."""
    monkeypatch.setattr(algebra, "_PIECE", 4)
    generator = torch.Generator().manual_seed(num)
    vectors = [torch.randn(10, generator=generator) for _ in range(num)]
    mean, total = WeightedMean(), torch.zeros(10, dtype=torch.float64)
    for k, vector in enumerate(vectors):
        mean.add(vector, 1.0 + k)
        total.add_(vector.double(), alpha=1.0 + k)
    assert torch.equal(mean.result(), total / sum(range(1, num + 1)))


def test_a_matrix_and_a_number() -> None:
    for shape in ((2, 3), (), (0,)):
        mean = WeightedMean()
        for value in (1.0, 4.0):
            mean.add(torch.full(shape, value), 1.0)
        assert torch.equal(mean.result(), torch.full(shape, 2.5, dtype=torch.float64))


def test_asking_twice_and_adding_more() -> None:
    mean = WeightedMean()
    mean.add(VECTORS[0], 2.0)
    mean.add(VECTORS[1], 3.0)
    assert torch.equal(mean.result(), mean.result())
    mean.add(VECTORS[2], 5.0)
    expected = np.average(VECTORS[:3].numpy().astype(np.float64), axis=0, weights=[2, 3, 5])
    np.testing.assert_allclose(mean.result().numpy(), expected, rtol=1e-13, atol=1e-13)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5),
    st.one_of(st.integers(1, 10**7), st.floats(1e-3, 1e7)),
)
def test_one_client_comes_back_exactly(values: list[float], weight: float) -> None:
    vector = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(mean_of([vector], [float(weight)]).float(), vector)


def test_order_does_not_matter() -> None:
    results = [
        mean_of([VECTORS[i] for i in order], [WEIGHTS[i] for i in order]) for order in itertools.permutations(range(4))
    ]
    scale = VECTORS.abs().max().item()
    for result in results[1:]:
        # Summation order changes the last bits of a float64: 1e-15 relative to the largest term.
        torch.testing.assert_close(result, results[0], rtol=1e-15, atol=1e-15 * scale)


def test_no_vectors() -> None:
    with pytest.raises(ValueError, match="no vectors"):
        WeightedMean().result()


@pytest.mark.parametrize(("old", "new"), [(1.0, 1e-20), (1e20, 1.0), (-3e38, 3e38), (0.1, 0.3), (1e-45, 7.0)])
def test_a_full_step_is_exactly_the_aggregated_model(old: float, new: float) -> None:
    """old + (new - old) would lose `new` where it is much the smaller."""
    start, aggregated = torch.tensor([old, 2.0]), torch.tensor([new, -5.0])
    result = step_towards(start, aggregated.double(), 1.0)
    assert result.dtype == torch.float32
    assert torch.equal(result, aggregated)
    assert start[0] == torch.tensor(old)


@pytest.mark.parametrize("server_lr", [0.3, 0.5, 0.7, 1.5])
def test_partial_and_longer_steps(server_lr: float) -> None:
    old, new = VECTORS[0], VECTORS[1].double()
    kept = old.clone()
    expected = old.numpy().astype(np.float64) * (1 - server_lr) + new.numpy() * server_lr
    result = step_towards(old, new, server_lr)
    assert result.dtype == torch.float32
    # The result is rounded to float32 once: half a unit in the last of 24 bits, plus float64 cancellation.
    np.testing.assert_allclose(result.numpy(), expected, rtol=2.0**-24 * 1.01, atol=1e-12)
    assert torch.equal(old, kept)
