"""Corruptions of images: what each does, against scipy, torchvision, loops and the noise's own probabilities."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import ndimage, stats
from torch import Tensor

from bfl_bench.data.corruptions import CORRUPTIONS, corrupt
from bfl_bench.errors import ConfigError

torch.set_num_threads(1)

SEVERITIES = (1, 2, 3, 4, 5)
RANDOM = ("gaussian_noise", "shot_noise", "rotation", "translation", "occlusion")
each_corruption = pytest.mark.parametrize("name", CORRUPTIONS)
FLOAT32 = 1e-5  # a few operations on float32 numbers below 1, at coordinates known to 1e-6 pixels


def each_severity(name: str, *constants: float) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("severity", name), list(zip(SEVERITIES, constants, strict=True)))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(num: int, channels: int = 1, height: int = 28, width: int = 28) -> Tensor:
    return torch.rand(num, channels, height, width, generator=generator(9))


@each_corruption
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 8, 12)])
def test_images_stay_images(name: str, shape: tuple[int, int, int]) -> None:
    x = torch.cat([images(6, *shape), torch.zeros(1, *shape), torch.ones(1, *shape)])
    kept = x.clone()
    for severity in SEVERITIES:
        result = corrupt(x, name, severity, generator())
        assert result.shape == x.shape
        assert result.dtype == torch.float32
        assert 0 <= result.min() <= result.max() <= 1
        assert not torch.equal(result, x)
    assert torch.equal(x, kept)
    assert corrupt(x[:0], name, 3, generator()).shape == (0, *shape)


@each_corruption
def test_severity_zero_is_the_identity_and_draws_nothing(name: str) -> None:
    rng = generator(4)
    x = images(3)
    assert torch.equal(corrupt(x, name, 0, rng), x)
    assert torch.equal(rng.get_state(), generator(4).get_state())


@each_corruption
def test_a_seed_fixes_the_result_and_another_changes_it(name: str) -> None:
    x = images(16)
    state = torch.get_rng_state()
    result = corrupt(x, name, 3, generator(1))
    assert torch.equal(result, corrupt(x, name, 3, generator(1)))
    assert torch.equal(result, corrupt(x, name, 3, generator(2))) == (name not in RANDOM)
    assert torch.equal(torch.get_rng_state(), state)


@each_corruption
def test_each_image_has_its_own_draw(name: str) -> None:
    same = images(1).repeat(30, 1, 1, 1)
    result = corrupt(same, name, 3, generator())
    different = len({image.numpy().tobytes() for image in result})
    assert different == {"rotation": 2, "blur": 1, "contrast": 1, "brightness": 1}.get(name, 30)


@each_corruption
def test_severities_grow(name: str) -> None:
    """Smooth images, as real ones are: the mean distance from the original grows with each severity."""
    x = torch.nn.functional.avg_pool2d(images(200, 1, 36, 36), 9, 1)
    x = ((x - 0.5) * 6 + 0.5).clamp(0, 1)
    distances = [(corrupt(x, name, severity, generator()) - x).square().mean().item() for severity in SEVERITIES]
    assert all(a < b for a, b in itertools.pairwise([0, *distances]))


def test_unknown_corruptions_and_severities() -> None:
    with pytest.raises(ConfigError, match="corruption: got 'fog', allowed: gaussian_noise, shot_noise, blur"):
        corrupt(images(1), "fog", 1, generator())
    for severity in (-1, 6):
        with pytest.raises(ConfigError, match=f"severity: got {severity}, allowed: 0 to 5"):
            corrupt(images(1), "blur", severity, generator())


@each_severity("deviation", 0.06, 0.12, 0.18, 0.24, 0.3)
def test_gaussian_noise(severity: int, deviation: float) -> None:
    """Shares of values below some points, clipped or not, are those of the normal distribution."""
    x = torch.full((20, 3, 32, 32), 0.4)
    result = corrupt(x, "gaussian_noise", severity, generator())
    for point in (0.0, 0.3, 0.4, 0.55):
        share = stats.norm.cdf((point - 0.4) / deviation)
        error = math.sqrt(share * (1 - share) / x.numel())
        assert (result <= point).double().mean().item() == pytest.approx(share, abs=5 * error + 1e-9)
    channels = torch.corrcoef((result - x).movedim(1, 0).flatten(1)) - torch.eye(3)
    assert channels.abs().max() < 5 / math.sqrt(20 * 32 * 32)  # colours are disturbed independently


@each_severity("photons", 60, 30, 15, 8, 5)
def test_shot_noise(severity: int, photons: int) -> None:
    x = torch.full((20, 1, 32, 32), 0.3)
    result = corrupt(x, "shot_noise", severity, generator()) * photons
    for count in range(photons + 1):
        share = stats.poisson.cdf(count, 0.3 * photons) if count < photons else 1.0  # above white is white
        error = math.sqrt(share * (1 - share) / x.numel())
        assert (result < count + 0.5).double().mean().item() == pytest.approx(share, abs=5 * error + 1e-9)
    assert corrupt(torch.zeros(2, 1, 8, 8), "shot_noise", severity, generator()).max() == 0  # no light, no noise


@each_severity("deviation", 0.03, 0.04, 0.05, 0.06, 0.07)
def test_blur(severity: int, deviation: float) -> None:
    """One bright point spreads by the normal distribution, integrated over pixels; width and height by themselves."""
    height, width, top, left = 40, 25, 18, 11
    x = torch.zeros(1, 3, height, width)
    x[:, :, top, left] = 1
    result = corrupt(x, "blur", severity, generator())[0, 1].numpy()
    for row, column in ((top, left), (top + 1, left), (top - 2, left + 1), (top, left - 2)):
        weight = 1.0
        for distance, sigma in ((row - top, deviation * height), (column - left, deviation * width)):
            weight *= stats.norm.cdf((distance + 0.5) / sigma) - stats.norm.cdf((distance - 0.5) / sigma)
        assert result[row, column] == pytest.approx(weight, abs=FLOAT32)
    flat = torch.full((1, 1, 9, 9), 0.7)
    torch.testing.assert_close(corrupt(flat, "blur", severity, generator()), flat)  # borders do not darken


def test_blur_is_about_that_of_scipy() -> None:
    """Whose weights are the density at the pixels' centres: nearly the same for 2 pixels, away from the border."""
    x = images(1, 1, 40, 40)
    ours = corrupt(x, "blur", 3, generator())[0, 0]
    theirs = ndimage.gaussian_filter(x[0, 0].numpy(), math.sqrt(2.0**2 + 1 / 12))  # a pixel's width adds 1/12
    np.testing.assert_allclose(ours[10:30, 10:30], theirs[10:30, 10:30], atol=2e-3)


@each_severity("factor", 0.75, 0.5, 0.4, 0.3, 0.15)
def test_contrast(severity: int, factor: float) -> None:
    x = images(4, 3)
    result = corrupt(x, "contrast", severity, generator())
    for before, after in zip(x.numpy().astype(np.float64), result.numpy(), strict=True):
        np.testing.assert_allclose(after, before.mean() + factor * (before - before.mean()), atol=FLOAT32)


@each_severity("added", 0.05, 0.1, 0.15, 0.2, 0.3)
def test_brightness(severity: int, added: float) -> None:
    x = images(4, 3)
    expected = np.minimum(x.numpy() + added, 1)
    np.testing.assert_allclose(corrupt(x, "brightness", severity, generator()).numpy(), expected, atol=FLOAT32)


def paste(x: Tensor) -> Tensor:
    """Into the middle of a larger black image: so that scipy interpolates with black at the borders too."""
    height, width = x.shape
    canvas = torch.zeros(3 * height, 3 * width)
    canvas[height : 2 * height, width : 2 * width] = x
    return canvas


@each_severity("degrees", 10, 20, 30, 40, 50)
@pytest.mark.parametrize("shape", [(28, 28), (8, 8), (20, 14)])
def test_rotation(severity: int, degrees: int, shape: tuple[int, int]) -> None:
    """To the left or to the right, each about half of the time; scipy rotates each channel alike."""
    x = images(1, 3, *shape).repeat(60, 1, 1, 1)
    result = corrupt(x, "rotation", severity, generator()).numpy()
    height, width = shape
    rotated = [
        np.stack([ndimage.rotate(paste(c).numpy(), sign * degrees, reshape=False, order=1) for c in x[0]])
        for sign in (1, -1)
    ]
    lefts, rights = (
        [np.allclose(image, r[:, height : 2 * height, width : 2 * width], atol=FLOAT32) for image in result]
        for r in rotated
    )
    assert all(left != right for left, right in zip(lefts, rights, strict=True))
    assert 15 <= sum(lefts) <= 45  # four standard deviations of 60 coins


@each_severity("distance", 0.04, 0.08, 0.12, 0.16, 0.2)
@pytest.mark.parametrize("shape", [(28, 28), (8, 8), (20, 14)])
def test_translation(severity: int, distance: float, shape: tuple[int, int]) -> None:
    """A bright point's centre of mass moves by the distance, in all directions, and scipy moves images alike."""
    height, width = shape
    middle = torch.zeros(1, 1, height, width)
    middle[0, 0, height // 2, width // 2] = 1
    points = corrupt(middle.repeat(400, 1, 1, 1), "translation", severity, generator())[:, 0]
    rows = (points.sum(2) * torch.arange(height)).sum(1) - height // 2
    columns = (points.sum(1) * torch.arange(width)).sum(1) - width // 2
    lengths = torch.hypot(rows / height, columns / width)
    torch.testing.assert_close(lengths, torch.full((400,), distance), rtol=0, atol=1e-4)
    eighths = torch.histc(torch.atan2(rows / height, columns / width), 8, -math.pi, math.pi)
    assert eighths.min() > 20  # of 50 expected: more than four standard deviations
    x = images(1, 3, height, width)
    moved = corrupt(x.repeat(5, 1, 1, 1), "translation", severity, generator())
    first = corrupt(middle.repeat(5, 1, 1, 1), "translation", severity, generator())[:, 0]  # the same draws
    for point, image in zip(first, moved, strict=True):
        down = (point.sum(1) * torch.arange(height)).sum().item() - height // 2
        right = (point.sum(0) * torch.arange(width)).sum().item() - width // 2
        for before, after in zip(x[0], image, strict=True):
            reference = ndimage.shift(before.numpy(), (down, right), order=1, mode="grid-constant")
            np.testing.assert_allclose(after, reference, atol=1e-4)


@each_severity("length", 0.15, 0.225, 0.3, 0.375, 0.45)
@pytest.mark.parametrize("shape", [(28, 28), (8, 8), (20, 14)])
def test_occlusion(severity: int, length: float, shape: tuple[int, int]) -> None:
    """White and black images show how much of each pixel is grey: a rectangle, wholly inside, anywhere."""
    height, width = shape
    white = corrupt(torch.ones(300, 3, height, width), "occlusion", severity, generator())
    black = corrupt(torch.zeros(300, 3, height, width), "occlusion", severity, generator())
    torch.testing.assert_close(1 - white, black)  # a mixture of the image and 0.5
    covered = 2 * black
    assert torch.equal(covered[:, 0], covered[:, 1])
    assert torch.equal(covered[:, 0], covered[:, 2])
    covered = covered[:, 0]
    areas = covered.sum((1, 2)) / (height * width)
    torch.testing.assert_close(areas, torch.full((300,), length**2), rtol=0, atol=FLOAT32)
    centres = []
    for axis, side in ((2, height), (1, width)):
        profile = covered.sum(axis) / covered.sum(axis).amax(1, keepdim=True)  # (n, side): shares along the axis
        touched = (profile > FLOAT32).sum(1)
        assert touched.max() <= math.ceil(length * side) + 1
        assert (profile > 1 - FLOAT32).sum(1).min() >= max(math.floor(length * side) - 1, 1)
        centres.append((profile * (torch.arange(side) + 0.5)).sum(1) / profile.sum(1) / side)
        uniform = stats.uniform(length / 2, 1 - length)
        assert stats.kstest(centres[-1].numpy(), uniform.cdf).pvalue > 1e-4
    assert torch.corrcoef(torch.stack(centres))[0, 1].abs() < 5 / math.sqrt(300)
