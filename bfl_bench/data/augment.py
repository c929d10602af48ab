"""Random changes to training images, batched, each image with its own draws.

Images go in and come out as uint8 (n, c, h, w) on any device. All draws come from the given CPU generator, so
that a seed means the same on every device; PyTorch's global random state is left as it was.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from bfl_bench.devices import bring
from bfl_bench.errors import ConfigError

Fill = int | Literal["reflect"]


def random_crop(x: Tensor, padding: int, fill: Fill, generator: torch.Generator) -> Tensor:
    """Pad each side, then cut out the original size at a uniformly drawn place."""
    n, _, height, width = x.shape
    padded = _reflect(x, padding) if fill == "reflect" else pad(x, [padding] * 4, value=fill)
    top, left = bring(torch.randint(2 * padding + 1, (2, n), generator=generator), x.device)
    every_crop = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view (n, c, top, left, h, w)
    return every_crop[torch.arange(n, device=x.device), :, top, left]


def _reflect(x: Tensor, padding: int) -> Tensor:
    """As `pad` with mode="reflect", which knows no uint8 on CUDA."""
    for axis in (2, 3):
        before = x.narrow(axis, 1, padding).flip(axis)
        after = x.narrow(axis, x.shape[axis] - 1 - padding, padding).flip(axis)
        x = torch.cat([before, x, after], axis)
    return x


def random_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability 1/2."""
    n = len(x)
    mirrored = torch.randint(2, (n,), generator=generator)
    pick = torch.arange(n) + n * mirrored  # selecting whole images is several times faster than torch.where
    return torch.cat([x, x.flip(3)]).index_select(0, bring(pick, x.device))


def auto_augment(x: Tensor, generator: torch.Generator) -> Tensor:
    """AutoAugment with the policy learnt for CIFAR-10, uncovered pixels grey (128).

    The `CIFAR10Policy` that FOLA's code uses fills with the same grey. torchvision draws from the global CPU
    generator, which is therefore seeded for each image from the given one and restored afterwards;
    `torch.manual_seed` would not do, as it seeds the other devices too.
    """
    from torchvision.transforms import AutoAugment, AutoAugmentPolicy

    policy = AutoAugment(AutoAugmentPolicy.CIFAR10, fill=[128.0] * x.shape[1])
    seeds = torch.randint(2**63 - 1, (len(x),), generator=generator).tolist()
    images = x.cpu().clone()
    with torch.random.fork_rng(devices=[]):
        for image, seed in zip(images, seeds, strict=True):
            torch.default_generator.manual_seed(seed)
            image.copy_(policy(image))
    return bring(images, x.device)


def cutout(x: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Blacken one square of side `length`, its centre uniform over the image, cut off at the borders.

    DeVries & Taylor set zeros between scaling to [0, 1] and normalising; black in uint8 is the same zero.
    """
    n, _, height, width = x.shape
    spans = (_span(torch.randint(side, (n, 1), generator=generator), length, side) for side in (height, width))
    rows, columns = (bring(span, x.device) for span in spans)
    return x * ~(rows[:, None, :, None] & columns[:, None, None, :])


def _span(centre: Tensor, length: int, side: int) -> Tensor:
    """Which of the `side` positions lie in the interval of this length around each centre (n, 1)."""
    start = centre - length // 2
    position = torch.arange(side)
    return (position >= start) & (position < start + length)


def normalise(x: Tensor, white: int, mean: list[float], std: list[float]) -> Tensor:
    """Pixels from 0 to `white` as float32 (x / white - mean) / std, both per channel or one for all."""
    shift, scale = (torch.tensor(v, dtype=torch.float32, device=x.device).view(-1, 1, 1) for v in (mean, std))
    return x.to(torch.float32, copy=True).div_(white).sub_(shift).div_(scale)


def check_normalisation(mean: list[float], std: list[float], channels: int) -> None:
    lengths = (1,) if channels == 1 else (1, channels)
    for key, values in (("mean", mean), ("std", std)):
        if len(values) not in lengths:
            raise ConfigError(key, values, " or ".join(f"a list of {length}" for length in lengths))
    if len(mean) != len(std):
        raise ConfigError("std", std, f"a list as long as mean, which has {len(mean)}")
