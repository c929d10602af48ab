"""The papers' networks. Each is a function (input_shape, num_classes, options) -> torch module.

ReLU follows max-pooling rather than preceding it: the same function (both are monotone), on a quarter of the values.
"""

import itertools
import math
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from bfl_bench.checks import AtLeast, Between
from bfl_bench.errors import UnsuitableError
from bfl_bench.models.pooling import MaxPool

Shape = tuple[int, ...]
Rate = Annotated[float, Between(0, 0.99)]
"""The share of the units of hidden fully connected layers that dropout sets to zero."""


def mlp(
    input_shape: Shape,
    num_classes: int,
    hidden: list[Annotated[int, AtLeast(1)]],
    bias: bool = True,
    dropout: Rate = 0.0,
) -> nn.Module:
    """Fully connected layers of the given widths with ReLU between them."""
    return nn.Sequential(nn.Flatten(), *_dense(math.prod(input_shape), hidden, num_classes, bias, dropout))


def _dense(inputs: int, hidden: list[int], outputs: int, bias: bool = True, dropout: float = 0.0) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise([inputs, *hidden]):
        layers += [nn.Linear(width, following, bias), nn.ReLU()]
        if dropout:  # a layer that does nothing would change the names of those behind it
            layers.append(nn.Dropout(dropout))
    return [*layers, nn.Linear([inputs, *hidden][-1], outputs, bias)]


def softmax(input_shape: Shape, num_classes: int) -> nn.Module:
    """Multinomial logistic regression: one linear layer."""
    return mlp(input_shape, num_classes, hidden=[])


def augmented(input_shape: Shape, num_classes: int, hidden: list[Annotated[int, AtLeast(1)]]) -> nn.Module:
    """Layers without biases on inputs with a one appended, with ReLU between them: every parameter is a weight."""
    layers = _dense(1 + math.prod(input_shape), hidden, num_classes, bias=False)
    return nn.Sequential(nn.Flatten(), AppendOne(), *layers)


class AppendOne(nn.Module):
    """Appends a one to vectors (n, d)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 1), value=1.0)


def lenet(input_shape: Shape, num_classes: int, dropout: Rate = 0.0) -> nn.Module:
    """The LeNet of BFL-P, BA-BFL and FedLPA: convolutions with 6 and 16 filters, then 120-84-classes."""
    channels, flattened = _convolved("lenet", input_shape, 16)
    return nn.Sequential(
        *_block(channels, 6),
        *_block(6, 16),
        nn.Flatten(),
        *_dense(flattened, [120, 84], num_classes, dropout=dropout),
    )


def conv3(input_shape: Shape, num_classes: int, channels: Annotated[int, AtLeast(1)]) -> nn.Module:
    """Three small convolutions and one linear layer, as in FedLPA's picture of a Fisher matrix."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 15:
        raise UnsuitableError(f"one for inputs of shape {input_shape}; conv3 needs images with sides of at least 15")
    inputs, height, width = input_shape
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Conv2d(inputs, channels, kernel_size=3, stride=2), nn.ReLU()]
        inputs, height, width = channels, (height - 1) // 2, (width - 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, num_classes))


def cnn(input_shape: Shape, num_classes: int, dropout: Rate = 0.0) -> nn.Module:
    """FOLA's CIFAR-10 network: convolutions with 32 and 64 filters, then 512-classes; Xavier weights, zero biases."""
    channels, flattened = _convolved("cnn", input_shape, 64)
    network = nn.Sequential(
        *_block(channels, 32),
        *_block(32, 64),
        nn.Flatten(),
        *_dense(flattened, [512], num_classes, dropout=dropout),
    )
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network


def conv(
    input_shape: Shape, num_classes: int, hidden: list[Annotated[int, AtLeast(1)]], bias: bool = True
) -> nn.Module:
    """VIRTUAL's: 5x5 convolutions with 32 and 64 filters that keep the size, pooling after each, then an MLP."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise UnsuitableError(f"one for inputs of shape {input_shape}; conv needs images with sides of at least 4")
    channels, height, width = input_shape
    features = 64 * (height // 2 // 2) * (width // 2 // 2)
    blocks = [*_block(channels, 32, padding=2, bias=bias), *_block(32, 64, padding=2, bias=bias)]
    return nn.Sequential(*blocks, nn.Flatten(), *_dense(features, hidden, num_classes, bias))


class Recurrent(nn.Module):
    """An LSTM over sequences (n, positions, features) that gives its outputs alone."""

    def __init__(self, inputs: int, units: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, units, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(x)[0]
        return outputs


class ClassesSecond(nn.Module):
    """(n, positions, classes) to (n, classes, positions), as losses and metrics have it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def lstm(
    input_shape: Shape,
    num_classes: int,
    embedding: Annotated[int, AtLeast(1)],
    units: Annotated[int, AtLeast(1)],
    layers: Annotated[int, AtLeast(1)],
) -> nn.Module:
    """Tokens (n, positions) to a prediction at every position: embedding, LSTM layers, one linear layer."""
    if len(input_shape) != 1:
        raise UnsuitableError(f"one for inputs of shape {input_shape}; lstm needs sequences")
    return nn.Sequential(
        nn.Embedding(num_classes, embedding),
        Recurrent(embedding, units, layers),
        nn.Linear(units, num_classes),
        ClassesSecond(),
    )


def _block(in_channels: int, out_channels: int, padding: int = 0, bias: bool = True) -> list[nn.Module]:
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size=5, padding=padding, bias=bias)
    return [convolution, MaxPool(), nn.ReLU()]


def _convolved(name: str, input_shape: Shape, out_channels: int) -> tuple[int, int]:
    """Channels of the input, and features after two blocks of 5x5 convolution and 2x2 pooling."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 16:
        raise UnsuitableError(f"one for inputs of shape {input_shape}; {name} needs images with sides of at least 16")
    channels, height, width = input_shape
    height, width = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return channels, out_channels * height * width
