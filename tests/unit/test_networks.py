"""The papers' networks: sizes counted by hand, the order of pooling and ReLU, and what they refuse."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bfl_bench.errors import UnsuitableError
from bfl_bench.models.networks import cnn, lenet, mlp, softmax
from bfl_bench.models.pooling import MaxPool

GREY, COLOUR = (1, 28, 28), (3, 32, 32)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_lenet_sizes() -> None:
    assert count(lenet(GREY, 10)) == 44_426
    assert count(lenet(COLOUR, 10)) == 62_006


def test_cnn_size() -> None:
    by_hand = (3 * 32 * 25 + 32) + (32 * 64 * 25 + 64) + (1600 * 512 + 512) + (512 * 10 + 10)
    network = cnn(COLOUR, 10)
    assert count(network) == by_hand
    shapes = [tuple(p.shape) for name, p in network.named_parameters() if name.endswith("weight")]
    assert shapes == [(32, 3, 5, 5), (64, 32, 5, 5), (512, 1600), (10, 512)]


def test_mlp_and_softmax_sizes() -> None:
    assert count(mlp(GREY, 10, [100])) == 784 * 100 + 100 + 100 * 10 + 10
    assert count(mlp((1, 8, 8), 7, [20, 30])) == 64 * 20 + 20 + 20 * 30 + 30 + 30 * 7 + 7
    assert count(softmax(GREY, 10)) == 7850
    assert count(mlp((5,), 3, [])) == 18


@pytest.mark.parametrize("shape", [GREY, COLOUR, (2, 16, 21)])
def test_outputs(shape: tuple[int, ...]) -> None:
    x = torch.randn(3, *shape)
    for network in (lenet(shape, 7), cnn(shape, 7), mlp(shape, 7, [4]), softmax(shape, 7)):
        logits = network(x)
        assert logits.shape == (3, 7)
        assert isinstance(list(network)[-1], nn.Linear)  # type: ignore[arg-type] # logits, not probabilities
        assert not torch.allclose(logits[0], logits[1])


@pytest.mark.parametrize("make", [lenet, cnn])
def test_relu_after_pooling_is_relu_before_pooling(make: Callable[..., Any]) -> None:
    """In the papers' order, with the same parameters: bit for bit, since both are maxima."""
    network = make(COLOUR, 10)
    layers = list(network)
    assert [type(layer) for layer in layers[:3]] == [nn.Conv2d, MaxPool, nn.ReLU]
    reordered = nn.Sequential(layers[0], nn.ReLU(), nn.MaxPool2d(2), layers[3], nn.ReLU(), nn.MaxPool2d(2), *layers[6:])
    x = torch.randn(4, *COLOUR)
    before, after = nn.Sequential(*reordered[:6])(x), nn.Sequential(*layers[:6])(x)
    assert torch.equal(before, after)
    assert 0 < (after == 0).float().mean() < 1
    assert torch.equal(network(x), reordered(x))


def test_mlp_has_relu_between_its_layers() -> None:
    network = mlp((2, 3), 4, [5, 6])
    kinds = [type(layer) for layer in network]  # type: ignore[arg-type]
    assert kinds == [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]


def test_cnn_starts_with_xavier_weights_and_zero_biases() -> None:
    for name, parameter in cnn(COLOUR, 10).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        else:
            receptive = math.prod(parameter.shape[2:])
            bound = math.sqrt(6 / (receptive * (parameter.shape[0] + parameter.shape[1])))
            assert 0.98 * bound < parameter.abs().max().item() <= bound * (1 + 1e-6)  # float32
            # Uniform: standard deviation bound/sqrt(3), within 5 % for the 2400 weights of the smallest layer.
            assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize("make", [lenet, cnn])
@pytest.mark.parametrize("shape", [(1, 15, 28), (1, 28, 15), (1, 8, 8), (64,), (28, 28)])
def test_too_small_inputs(make: Callable[..., Any], shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsuitableError) as caught:
        make(shape, 10)
    message = str(caught.value)
    assert make.__name__ in message
    assert str(shape) in message
    assert "at least 16" in message


def test_the_smallest_inputs() -> None:
    assert lenet((1, 16, 16), 10)(torch.randn(2, 1, 16, 16)).shape == (2, 10)


@pytest.mark.parametrize("make", [lenet, cnn, lambda *a, **k: mlp(*a, hidden=[5, 4], **k)])
def test_dropout_follows_every_hidden_dense_layer_and_changes_nothing_else(make: Callable[..., Any]) -> None:
    torch.manual_seed(3)
    plain = make(COLOUR, 10)
    torch.manual_seed(3)
    dropping = make(COLOUR, 10, dropout=0.3)
    layers = list(dropping)
    hidden = [i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear)][:-1]
    assert [layers[i + 2].p for i in hidden] == [0.3] * len(hidden)
    assert sum(isinstance(layer, nn.Dropout) for layer in layers) == len(hidden) > 0
    assert not any(isinstance(layer, nn.Dropout) for layer in plain)
    x = torch.randn(2, *COLOUR)
    assert torch.equal(plain(x), dropping.eval()(x))
    assert not torch.equal(plain(x), dropping.train()(x))
