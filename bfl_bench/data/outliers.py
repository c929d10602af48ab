"""Images that belong to no class, made out of those that do: destroyed, and moved towards the known classes.

After FedOV (Diao, Li, He, ICLR 2023): data destruction, and its adversarial enhancement.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bfl_bench.devices import bring

Operation = Callable[[Tensor, Tensor, torch.Generator], Tensor]


def destroy(x: Tensor, low: Tensor, rng: torch.Generator) -> Tensor:
    """One operation per image (n, c, h, w), drawn at random: a small crop, a blur, a hole, or parts in wrong places.

    What `_cut` and `_rotate` draw is the same for all images of a batch that get them. `low` fills the holes.
    """
    operations: list[Operation] = [_crop, _blur, _erase, _cut, _rotate, _cut, _rotate]  # the last two twice as often
    chosen = torch.randint(len(operations), (len(x),), generator=rng)  # on the CPU, where its values can be asked
    destroyed = x.clone()
    for number, operation in enumerate(operations):
        here = bring((chosen == number).nonzero()[:, 0], x.device)
        if len(here):
            destroyed[here] = operation(x[here], low, rng)
    return destroyed


def _uniform(num: int, low: float, high: float, rng: torch.Generator, like: Tensor) -> Tensor:
    return bring(low + (high - low) * torch.rand(num, generator=rng), like.device).to(like.dtype)


def _whole(low: int, high: int, rng: torch.Generator) -> int:
    """A whole number from `low` to `high`, both included."""
    return int(torch.randint(low, high + 1, (), generator=rng))


def _crop(x: Tensor, low: Tensor, rng: torch.Generator) -> Tensor:
    """A part of a tenth to a third of the area, of any place and nearly square, enlarged to the whole."""
    area, stretch = _uniform(len(x), 0.1, 0.33, rng, x), _uniform(len(x), -0.29, 0.29, rng, x).exp()
    width, height = (area * stretch).sqrt(), (area / stretch).sqrt()
    shift_x, shift_y = ((1 - side) * _uniform(len(x), -1, 1, rng, x) for side in (width, height))
    zero = torch.zeros_like(area)
    theta = torch.stack([width, zero, shift_x, zero, height, shift_y], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def _blur(x: Tensor, low: Tensor, rng: torch.Generator) -> Tensor:
    """The mean over a window of 3 to 9 by 1 to 5 pixels."""
    sizes = [2 * _whole(1, 4, rng) + 1, 2 * _whole(0, 2, rng) + 1]
    if _whole(0, 1, rng):
        sizes.reverse()
    rows, columns = sizes
    padded = F.pad(x, (columns // 2, columns // 2, rows // 2, rows // 2), mode="replicate")
    return F.avg_pool2d(padded, (rows, columns), stride=1)


def _erase(x: Tensor, low: Tensor, rng: torch.Generator) -> Tensor:
    """A rectangle of a third to a half of the area becomes empty."""
    num, _, height, width = x.shape
    area, stretch = _uniform(num, 0.33, 0.5, rng, x), _uniform(num, -0.6, 0.6, rng, x).exp()
    tall, wide = (area * stretch).sqrt() * height, (area / stretch).sqrt() * width
    top, left = (height - tall) * _uniform(num, 0, 1, rng, x), (width - wide) * _uniform(num, 0, 1, rng, x)
    rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    inside_rows = (rows >= top[:, None]) & (rows < (top + tall)[:, None])
    inside_columns = (columns >= left[:, None]) & (columns < (left + wide)[:, None])
    hole = inside_rows[:, None, :, None] & inside_columns[:, None, None, :]
    return torch.where(hole, low.to(x), x)


def _cut(x: Tensor, low: Tensor, rng: torch.Generator) -> Tensor:
    """A strip of half the image overwrites another, or the two halves change places; in either direction."""
    axis = 2 + _whole(0, 1, rng)
    half = x.shape[axis] // 2
    if _whole(0, 2, rng) == 0:
        return x.roll(half, dims=axis)
    near, far = _whole(0, half // 4, rng), _whole(half - half // 4, half, rng)
    source, target = (near, far) if _whole(0, 1, rng) else (far, near)
    result = x.clone()
    result.narrow(axis, target, half).copy_(x.narrow(axis, source, half))
    return result


def _rotate(x: Tensor, low: Tensor, rng: torch.Generator) -> Tensor:
    """In a band of half the height, the left and the right half each turn by 90, 180 or 270 degrees."""
    height, width = x.shape[2:]
    side = min(height, width) // 2
    top, turns = _whole(0, height - side, rng), _whole(1, 3, rng)
    result = x.clone()
    for left in (0, width - side):
        part = x[:, :, top : top + side, left : left + side]
        result[:, :, top : top + side, left : left + side] = part.rot90(turns, dims=(2, 3))
    return result


def push(
    x: Tensor, low: Tensor, high: Tensor, loss_of: Callable[[Tensor], Tensor], num_steps: int, step: float
) -> Tensor:
    """Move images along the sign of the gradient of their loss, by a share of the range per step, within the range."""
    moved = x.detach()
    for _ in range(num_steps):
        moved.requires_grad_(True)
        (gradient,) = torch.autograd.grad(loss_of(moved), moved)
        moved = torch.clamp(moved.detach() + step * (high - low) * gradient.sign(), low, high)
    return moved
