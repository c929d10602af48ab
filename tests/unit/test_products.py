"""Product, mixture and what lies between, by hand and by search."""

import math

import pytest
import torch

from bfl_bench.inference.products import combine, fit_beta, product_and_mixture
from tests.federation import generator

TWO = torch.tensor([[[0.9, 0.1]], [[0.6, 0.4]]], dtype=torch.float64).log()  # of two clients, one example


def test_two_clients_by_hand() -> None:
    product, mixture = product_and_mixture(TWO)
    assert product.exp()[0].tolist() == pytest.approx([0.54 / 0.58, 0.04 / 0.58])
    assert mixture.exp()[0].tolist() == pytest.approx([0.75, 0.25])
    assert combine(product, mixture, 1.0).exp()[0].tolist() == pytest.approx([0.54 / 0.58, 0.04 / 0.58])
    assert combine(product, mixture, 0.0).exp()[0].tolist() == pytest.approx([0.75, 0.25])
    odds = (0.54 / 0.04) ** 0.3 * (0.75 / 0.25) ** 0.7
    assert combine(product, mixture, 0.3).exp()[0].tolist() == pytest.approx([odds / (1 + odds), 1 / (1 + odds)])


def test_one_client_is_itself_for_any_beta() -> None:
    product, mixture = product_and_mixture(TWO[:1])
    for beta in (0.0, 0.4, 1.0):
        torch.testing.assert_close(combine(product, mixture, beta), TWO[0])


def test_equal_clients_are_a_power_and_themselves() -> None:
    clients = torch.randn(1, 5, 3, generator=generator(), dtype=torch.float64).log_softmax(2).expand(4, 5, 3)
    product, mixture = product_and_mixture(clients)
    power = clients[0].exp() ** 4
    torch.testing.assert_close(product.exp(), power / power.sum(1, keepdim=True))
    torch.testing.assert_close(mixture, clients[0])


@pytest.mark.parametrize(("sharpness", "where"), [(0.2, "one"), (0.45, "between"), (8.0, "zero")])
def test_beta_is_that_of_a_grid(sharpness: float, where: str) -> None:
    """Clients that are too timid want the product, and clients that are too sure of themselves the mixture."""
    num = 400
    outputs = torch.randn(num, 3, generator=generator(1), dtype=torch.float64)
    labels = torch.multinomial(outputs.softmax(1), 1, generator=generator(2))[:, 0]
    noisy = outputs + 0.8 * torch.randn(3, num, 3, generator=generator(3), dtype=torch.float64)
    both = product_and_mixture((sharpness * noisy).log_softmax(2))
    grid = torch.linspace(0, 1, 2001).tolist()
    losses = [-combine(*both, beta).gather(1, labels[:, None]).mean().item() for beta in grid]
    best = grid[losses.index(min(losses))]
    assert {"zero": best == 0, "one": best == 1, "between": 0.1 < best < 0.9}[where]
    assert fit_beta(*both, labels) == pytest.approx(best, abs=1 / 2000)


def test_sequences_have_a_beta_too() -> None:
    """Positions count as examples: classes are the second axis, whatever follows."""
    clients = torch.randn(2, 6, 3, generator=generator(1), dtype=torch.float64)
    flat = combine(*product_and_mixture(clients.log_softmax(2)), 0.3)
    long = clients.view(2, 2, 3, 3).movedim(3, 2)  # (K, n, C, positions)
    found = combine(*product_and_mixture(long.log_softmax(2)), 0.3)
    torch.testing.assert_close(found.movedim(1, 2).reshape(6, 3), flat)
    assert math.isfinite(found.sum())
