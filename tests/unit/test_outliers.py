"""Destroyed images: each operation does what it says, and the adversarial move goes where it should."""

import pytest
import torch
from torch import Tensor

from bfl_bench.data import outliers
from tests.federation import generator

LOW, HIGH = torch.full((1, 1, 1), -1.0), torch.full((1, 1, 1), 3.0)


def images(num: int = 40, side: int = 12) -> Tensor:
    return torch.rand(num, 1, side, side, generator=generator()) * 4 - 1


@pytest.mark.parametrize("side", [4, 8, 28, 32])
def test_every_image_is_destroyed_and_stays_in_the_range(side: int) -> None:
    x = images(60, side)
    result = outliers.destroy(x, LOW, generator(1))
    assert result.shape == x.shape
    assert (result != x).flatten(1).any(1).all()
    assert result.min() >= -1 - 1e-5
    assert result.max() <= 3 + 1e-5
    assert torch.equal(result, outliers.destroy(x, LOW, generator(1)))
    assert not torch.equal(result, outliers.destroy(x, LOW, generator(2)))


def test_a_hole_covers_a_third_to_a_half() -> None:
    x = images(50, 32).clamp(min=0.0)
    share = (outliers._erase(x, LOW, generator()) == -1).flatten(1).double().mean(1)
    assert share.min() > 0.27  # edges fall between pixels
    assert share.max() < 0.56
    assert share.std() > 0.01


def test_a_crop_shows_a_part_enlarged() -> None:
    """A ramp stays a ramp, with a slope smaller by the side of the part."""
    ramp = torch.linspace(-1, 3, 32).expand(40, 1, 32, 32)
    result = outliers._crop(ramp, LOW, generator())
    slope = (result[:, 0, 16, 20] - result[:, 0, 16, 12]) / (ramp[:, 0, 16, 20] - ramp[:, 0, 16, 12])
    assert slope.min() > 0.1**0.5 * 0.7
    assert slope.max() < 0.33**0.5 * 1.4
    assert slope.std() > 0.03


def test_a_blur_keeps_the_mean_of_a_constant_and_lowers_the_variance() -> None:
    x = images(20, 16)
    assert (outliers._blur(x, LOW, generator()).var() < 0.6 * x.var()).item()
    assert torch.allclose(outliers._blur(torch.ones(2, 1, 16, 16), LOW, generator()), torch.ones(()))


def test_cut_and_rotate_move_whole_parts() -> None:
    x = torch.arange(144.0).view(1, 1, 12, 12)
    for seed in range(12):
        cut = outliers._cut(x, LOW, generator(seed))
        assert set(cut.flatten().tolist()) <= set(x.flatten().tolist())
        turned = outliers._rotate(x, LOW, generator(seed))
        assert sorted(turned.flatten().tolist()) == x.flatten().tolist()  # nothing is lost
        assert (turned != x).sum() >= 50  # of the 72 pixels of the band, a centre may stay


def test_push_climbs_the_loss_within_the_range() -> None:
    target = torch.full((1, 1, 1, 1), 0.7)

    def loss_of(x: Tensor) -> Tensor:
        return (x - target).square().sum()

    x = images(5)
    moved = outliers.push(x, LOW, HIGH, loss_of, num_steps=3, step=0.05)
    expected = torch.clamp(x + 3 * 0.05 * 4 * (x - target).sign(), -1, 3)
    torch.testing.assert_close(moved, expected)
    assert not moved.requires_grad
    assert torch.equal(outliers.push(x, LOW, HIGH, loss_of, num_steps=0, step=0.05), x)
