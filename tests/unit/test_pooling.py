"""Max-pooling against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

from bfl_bench.models.pooling import MaxPool

SHAPES = [(3, 6, 8, 10), (2, 1, 7, 9), (2, 15, 2, 3), (2, 16, 6, 6)]  # odd sides lose their last row or column


def images(shape: tuple[int, ...], layout: torch.memory_format) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=layout)


def native(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_torchs(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    x = images(shape, layout).requires_grad_()
    found, expected = MaxPool()(x), native(x)
    assert torch.equal(found, expected)
    slope = torch.randn_like(expected)
    gradients = [torch.autograd.grad(output, x, slope)[0] for output in (found, expected)]
    assert torch.equal(*gradients)
    assert gradients[0].count_nonzero() == slope.numel()


def test_it_keeps_images_channels_last() -> None:
    pooled = MaxPool()(images((3, 6, 8, 10), torch.channels_last))
    assert pooled.is_contiguous(memory_format=torch.channels_last)


def test_one_of_several_maxima_gets_the_whole_gradient() -> None:
    x = torch.tensor([[[[1.0, 3.0], [3.0, 2.0]], [[5.0, 5.0], [5.0, 5.0]]]], requires_grad=True)
    (gradient,) = torch.autograd.grad(MaxPool()(x), x, torch.tensor([[[[7.0]], [[11.0]]]]))
    assert gradient.sum((2, 3)).tolist() == [[7.0, 11.0]]
    assert sorted(gradient.flatten().tolist()) == [0.0] * 6 + [7.0, 11.0]
    assert not gradient[x < x.amax((2, 3), keepdim=True)].any()


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_what_is_not_a_number_is_not_lost(place: tuple[int, int]) -> None:
    x = torch.zeros(1, 1, 2, 2)
    x[0, 0, place[0], place[1]] = torch.nan
    assert MaxPool()(x).isnan().all()


# torch itself calls what it warns of, when derivatives are first computed in forward mode
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_derivatives_of_torch_func_are_torchs() -> None:
    x = images((4, 2, 4, 4), torch.channels_last).double()
    weights = torch.linspace(-1, 2, 8, dtype=torch.float64).view(2, 2, 2)

    def loss(image: Tensor, pool: object) -> Tensor:
        assert callable(pool)
        value: Tensor = (weights * pool(image[None])[0] ** 3).sum()
        return value

    for function in (
        lambda pool: vmap(grad(lambda image: loss(image, pool)))(x),
        lambda pool: hessian(lambda image: loss(image, pool))(x[0]),
        lambda pool: jvp(lambda image: loss(image, pool), (x[0],), (x[1],))[1],
    ):
        found, expected = function(MaxPool()), function(native)
        assert expected.any()
        torch.testing.assert_close(found, expected)
