"""Diagonal and full precisions against dense linear algebra."""

import pytest
import torch

from bfl_bench.errors import ConfigError
from bfl_bench.inference.precision import diagonal, multiply, project, shift, solve


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


def test_a_singular_full_precision_is_named() -> None:
    with pytest.raises(ConfigError, match="the full precision is singular"):
        solve(torch.ones(2, 2), torch.ones(2), torch.ones(2))
