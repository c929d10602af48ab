"""Diagonal and full precisions against dense linear algebra."""

import pytest
import torch

from bfl_bench.aggregators.algebra import diagonal, multiply, project, shift, solve


def make_precision(full: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if not full:
        return torch.rand(5, generator=generator, dtype=torch.float64) + 0.1
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    return root @ root.T


@pytest.mark.parametrize("full", [False, True])
def test_algebra_equals_that_of_matrices(full: bool) -> None:
    precision, vector = make_precision(full), torch.arange(1.0, 6.0, dtype=torch.float64)
    dense = precision if full else precision.diag()
    torch.testing.assert_close(multiply(precision, vector), dense @ vector)
    torch.testing.assert_close(diagonal(precision), dense.diagonal())
    before = precision.clone()
    shifted = shift(precision, 0.7)
    torch.testing.assert_close(shifted if full else shifted.diag(), dense + 0.7 * torch.eye(5, dtype=torch.float64))
    assert torch.equal(precision, before)
    torch.testing.assert_close(solve(precision, vector, vector * 0), torch.linalg.solve(dense, vector))


@pytest.mark.parametrize("full", [False, True])
def test_where_nothing_is_known_the_fallback_stands(full: bool) -> None:
    precision = make_precision(full)
    unknown = [1, 3]
    precision[unknown] = 0
    if full:
        precision[:, unknown] = 0
    right, fallback = torch.ones(5, dtype=torch.float64), torch.arange(5.0, dtype=torch.float64)
    result = solve(precision, right, fallback)
    assert torch.equal(result[unknown], fallback[unknown])
    torch.testing.assert_close(multiply(precision, result)[[0, 2, 4]], right[[0, 2, 4]])


def test_projection_repairs_negative_eigenvalues_and_counts_them() -> None:
    rotation = torch.linalg.qr(make_precision(True)).Q
    values = torch.tensor([-2.0, -0.5, 0.3, 1.0, 4.0], dtype=torch.float64)
    projected, num_repaired = project((rotation * values) @ rotation.T)
    assert num_repaired == 2
    torch.testing.assert_close(projected, (rotation * values.clamp(min=0)) @ rotation.T)


def test_where_a_full_precision_says_nothing_the_fallback_stays() -> None:
    """In closed form: fallback + pinv(precision) (right - precision fallback)."""
    directions = torch.linalg.qr(make_precision(True)).Q[:, :3]
    precision = directions @ torch.diag(torch.tensor([0.2, 1.0, 30.0], dtype=torch.float64)) @ directions.T
    right, fallback = precision @ torch.arange(5.0, dtype=torch.float64), torch.full((5,), 7.0, dtype=torch.float64)
    expected = fallback + torch.linalg.pinv(precision) @ (right - precision @ fallback)
    # The fallback weighs 1.2e-6 of the norm, 30, beside curvatures of 0.2 and more, times distances of about 10.
    torch.testing.assert_close(solve(precision, right, fallback), expected, rtol=0, atol=2e-3)
    assert (expected - fallback).abs().max() > 1
