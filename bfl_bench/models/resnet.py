"""Residual networks for images of CIFAR's size, with a norm that knows no other client's and no other example's data.

He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016: a 3x3 convolution that keeps the size,
stages of blocks of two 3x3 convolutions, each stage but the first with half the side and twice the channels, the mean
over positions, one linear layer. Statistics of minibatches mean little where clients hold few classes (Hsieh et al.,
ICML 2020), so that BatchNorm is not among the norms.
"""

import itertools
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bfl_bench.checks import AtLeast
from bfl_bench.errors import ConfigError, UnsuitableError
from bfl_bench.models.networks import Rate, Shape

Norm = Literal["group", "frozen_batch"]
"""GroupNorm (Wu and He 2018), or BatchNorm whose statistics stay what they are at the start."""


def resnet(
    input_shape: Shape,
    num_classes: int,
    blocks: list[Annotated[int, AtLeast(1)]],
    width: Annotated[int, AtLeast(1)],
    norm: Norm,
    groups: Annotated[int, AtLeast(1)],
    dropout: Rate,
) -> nn.Module:
    """Stages of so many blocks, the first of `width` channels; 2 x blocks + 2 layers without those of shortcuts."""
    if len(input_shape) != 3:
        raise UnsuitableError(f"one for inputs of shape {input_shape}; resnet needs images")
    if not blocks:
        raise ConfigError("blocks", blocks, "a list of at least one number: blocks per stage")
    if norm == "group" and width % groups:
        raise ConfigError("groups", groups, f"a divisor of model.width, {width}")
    widths = [width * 2**stage for stage, num in enumerate(blocks) for _ in range(num)]
    starts = {sum(blocks[:stage]) for stage in range(1, len(blocks))}  # blocks that halve the side
    layers: list[nn.Module] = [_convolve(input_shape[0], width, 3), _make_norm(norm, width, groups), nn.ReLU()]
    for number, (inputs, outputs) in enumerate(itertools.pairwise([width, *widths])):
        layers.append(Block(inputs, outputs, 2 if number in starts else 1, norm, groups))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))


class Block(nn.Module):
    """The shortcut, by a 1x1 convolution where the shape changes, plus two convolutions; ReLU after the sum."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm, groups: int) -> None:
        super().__init__()
        # The shortcut comes first: counted from the end, layers are those of the branch, then the shortcut.
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            convolution = _convolve(inputs, outputs, 1, stride)
            self.shortcut = nn.Sequential(convolution, _make_norm(norm, outputs, groups))
        self.branch = nn.Sequential(
            _convolve(inputs, outputs, 3, stride),
            _make_norm(norm, outputs, groups),
            nn.ReLU(),
            _convolve(outputs, outputs, 3),
            _make_norm(norm, outputs, groups, scale=0.0 if norm == "frozen_batch" else 1.0),
        )

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.shortcut(x) + self.branch(x)
        return F.relu(total)


class FrozenBatchNorm(nn.Module):
    """BatchNorm as it evaluates, in training too; scale and shift are learnt.

    The statistics are 0 and 1 where nothing was trained before; a run of `start_from` brings its own along. Nothing
    normalises then, so that the last scale of a block starts at zero, and the block as its shortcut.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=False)


def _make_norm(kind: Norm, channels: int, groups: int, scale: float = 1.0) -> nn.Module:
    norm = nn.GroupNorm(groups, channels) if kind == "group" else FrozenBatchNorm(channels)
    nn.init.constant_(norm.weight, scale)
    return norm


def _convolve(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution
