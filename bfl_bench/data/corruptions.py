"""Corruptions of test images, as shifts of the distribution that a model was trained on; in five severities.

Images are floating-point (n, c, h, w) in [0, 1], before any normalisation, grey or in colour, and stay so. Constants of
severities 1 to 5 stand at each function; lengths are shares of the image's side, so that they mean the same for 8 x 8
and 32 x 32 pixels. Each image has its own draws. All of them come from the given CPU generator, so that a seed
means the same on every device. `corrupt` is what to call: it also clips the values.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bfl_bench.devices import bring
from bfl_bench.errors import ConfigError


@dataclass(frozen=True)
class Pixels:
    """How images in [0, 1] became network inputs: (x - mean) / std, channel by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def corrupt(self, x: Tensor, corruption: str, severity: int, generator: torch.Generator) -> Tensor:
        """Corrupt network inputs (n, c, h, w) as the images that they were made of, and make such of these again."""
        mean, std = (torch.tensor(values).to(x).view(-1, 1, 1) for values in (self.mean, self.std))
        images = (x * std + mean).clamp(0, 1)  # which rounding may have left
        return (corrupt(images, corruption, severity, generator) - mean) / std


def corrupt(x: Tensor, corruption: str, severity: int, generator: torch.Generator) -> Tensor:
    """Corrupt a batch by one of `CORRUPTIONS`; severity 0 returns it as it is and draws nothing."""
    if corruption not in CORRUPTIONS:
        raise ConfigError("corruption", corruption, ", ".join(CORRUPTIONS))
    if severity not in range(6):
        raise ConfigError("severity", severity, "0 to 5")
    if severity == 0 or len(x) == 0:
        return x
    return CORRUPTIONS[corruption](x, severity, generator).clamp(0, 1)


def gaussian_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Add independent Gaussian noise to every value."""
    deviation = (0.06, 0.12, 0.18, 0.24, 0.3)[severity - 1]
    return x + deviation * bring(torch.randn(x.shape, generator=generator, dtype=x.dtype), x.device)


def shot_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Replace every value by a Poisson count of photons, of which white has this many on average."""
    photons = (60, 30, 15, 8, 5)[severity - 1]
    return (torch.poisson(x.cpu() * photons, generator) / photons).to(x.device)


def blur(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Average with Gaussian weights of this standard deviation in sides; at the border over the pixels that exist."""
    deviation = (0.03, 0.04, 0.05, 0.06, 0.07)[severity - 1]
    rows, columns = (_smoothing(side, deviation * side).to(x) for side in x.shape[2:])
    return rows @ x @ columns.T


def contrast(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Shrink each image's differences from its mean by this factor."""
    factor = (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1]
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + factor * (x - mean)


def brightness(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Add this to every value."""
    return x + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]


def rotation(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Rotate about the centre by this angle in degrees, to the left or to the right; uncovered pixels are black."""
    angle = math.radians((10, 20, 30, 40, 50)[severity - 1])
    angles = angle * (2 * torch.randint(2, (len(x),), generator=generator) - 1)
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros(len(x))
    height, width = x.shape[2:]
    maps = [cos, -sin * height / width, zero, sin * width / height, cos, zero]
    return _resample(x, torch.stack(maps, 1).view(-1, 2, 3))


def translation(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Move by this share of the side in any direction; uncovered pixels are black."""
    distance = (0.04, 0.08, 0.12, 0.16, 0.2)[severity - 1]
    direction = 2 * math.pi * torch.rand(len(x), generator=generator)
    maps = torch.eye(2, 3).repeat(len(x), 1, 1)
    maps[:, :, 2] = -2 * distance * torch.stack([direction.cos(), direction.sin()], 1)  # the image is 2 wide
    return _resample(x, maps)


def occlusion(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Cover a square of this side, in sides of the image, with grey; uniformly placed inside, edges smooth."""
    length = (0.15, 0.225, 0.3, 0.375, 0.45)[severity - 1]
    starts = (1 - length) * torch.rand(2, len(x), 1, generator=generator)
    rows, columns = (_overlap(start, length, side).to(x) for start, side in zip(starts, x.shape[2:], strict=True))
    return torch.lerp(x, torch.full_like(x[:1], 0.5), rows[:, None, :, None] * columns[:, None, None, :])


CORRUPTIONS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    function.__name__: function
    for function in (gaussian_noise, shot_noise, blur, contrast, brightness, rotation, translation, occlusion)
}


def _smoothing(side: int, deviation: float) -> Tensor:
    """Compute the weight (side, side) of every pixel (column) in the average that replaces each (row).

    A pixel weighs the integral of the Gaussian over its width: its height at the centre says too little where the
    deviation is below one pixel.
    """
    positions = torch.arange(side, dtype=torch.float64)
    edges = torch.arange(side + 1, dtype=torch.float64) - 0.5
    weights = torch.erf((edges - positions[:, None]) / (deviation * math.sqrt(2))).diff(dim=1)
    return weights / weights.sum(1, keepdim=True)


def _overlap(start: Tensor, length: float, side: int) -> Tensor:
    """Compute the share (n, side) of every pixel that intervals from `start` (n, 1) cover, in sides of the image."""
    left = torch.arange(side)
    return (torch.minimum((start + length) * side, left + 1) - torch.maximum(start * side, left)).clamp(min=0)


def _resample(x: Tensor, maps: Tensor) -> Tensor:
    """Show at each place of the result the place of the image that the map (n, 2, 3) leads to; bilinear.

    Coordinates are right and down from the centre, both from -1 to 1.
    """
    grid = F.affine_grid(maps.to(x), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)
