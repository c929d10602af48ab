"""The flat vector: views both ways, PyTorch's own values outside, autograd's own gradients."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from bfl_bench.models.flat import FlatModel
from tests.federation import CPU


def make_convolutional() -> nn.Module:
    """No two sides of a weight are equal, so that a wrong order of dimensions cannot go unnoticed."""
    return nn.Sequential(
        nn.Conv2d(2, 4, kernel_size=(3, 5)),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 3, kernel_size=(2, 1)),
        nn.Flatten(),
        nn.LazyLinear(5),
    )


def make_flat() -> tuple[FlatModel, nn.Module]:
    """A flat model and an untouched copy of its network, its statistics not at their defaults."""
    module = make_convolutional()
    module(torch.randn(8, 2, 7, 8))  # gives the lazy layer its shape, and moves the running statistics
    original = copy.deepcopy(module)
    return FlatModel(module, CPU), original


def test_writing_the_vector_changes_the_module_and_back() -> None:
    model, _ = make_flat()
    x = torch.randn(3, 2, 7, 8)
    model.module.eval()
    before = model(x)
    model.vector.mul_(1.5)
    assert not torch.allclose(model(x), before)
    for entry in model.layout.entries:
        tensor = model.module.state_dict()[entry.name]
        with torch.no_grad():
            tensor.fill_(entry.start + 0.5)
        assert (model.vector[entry.start : entry.stop] == entry.start + 0.5).all()
    assert model.layout.size == sum(entry.shape.numel() for entry in model.layout.entries) == len(model.vector)


def test_load_copies() -> None:
    model, _ = make_flat()
    source = torch.randn_like(model.vector)
    kept = source.clone()
    model.load(source)
    assert torch.equal(model.vector, kept)
    model.vector.zero_()
    assert torch.equal(source, kept)
    model.assert_views()


def test_construction_keeps_the_values() -> None:
    model, original = make_flat()
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.module.state_dict()[name], tensor)


def test_convolution_weights_lie_channels_last() -> None:
    model, original = make_flat()
    first, *_ = model.layout.entries
    weight = original[0].weight.detach().numpy()  # type: ignore[union-attr, operator]
    expected = np.transpose(weight, (0, 2, 3, 1)).ravel()  # (out, height, width, in)
    assert np.array_equal(model.vector[first.start : first.stop].numpy(), expected)
    assert not np.array_equal(expected, weight.ravel())
    assert model.module[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index, union-attr, operator]


def test_state_dict_round_trip() -> None:
    model, original = make_flat()
    tensors = model.layout.to_state_dict(model.vector)
    expected = {name: t for name, t in original.state_dict().items() if t.is_floating_point()}
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.shape == expected[name].shape
        assert torch.equal(tensor, expected[name])
        assert tensor.is_contiguous()
        assert tensor.data_ptr() != model.module.state_dict()[name].data_ptr()
    assert torch.equal(model.layout.from_state_dict(tensors), model.vector)
    fresh = copy.deepcopy(original)
    nn.init.zeros_(fresh[0].weight)  # type: ignore[index, arg-type]
    fresh.load_state_dict(tensors)  # PyTorch itself takes them, and misses none
    assert torch.equal(fresh[0].weight, original[0].weight)  # type: ignore[index, arg-type]


def test_gradient_equals_autograd_tensor_by_tensor() -> None:
    model, original = make_flat()
    x, y = torch.randn(6, 2, 7, 8), torch.tensor([0, 1, 2, 3, 4, 0])
    gradient = model.backward(nn.functional.cross_entropy(model(x), y))
    assert gradient.shape == (model.layout.num_trainable,)
    named = dict(original.named_parameters())
    loss = nn.functional.cross_entropy(original(x), y)
    expected = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    entries = {entry.name: entry for entry in model.layout.entries}
    for name, tensor in expected.items():
        # The other memory format sums in another order: float32 rounding of sums of some hundred terms near 1.
        torch.testing.assert_close(entries[name].view(gradient), tensor, rtol=1e-4, atol=1e-6)
    assert max(tensor.abs().max() for tensor in expected.values()) > 0.01


def test_descending_is_a_step_against_the_gradient() -> None:
    model, _ = make_flat()
    x, y = torch.randn(6, 2, 7, 8), torch.tensor([0, 1, 2, 3, 4, 0])
    model.module.eval()  # no statistics move
    model.load(model.initial)
    gradient = model.backward(nn.functional.cross_entropy(model(x), y)).clone()
    model.descend(nn.functional.cross_entropy(model(x), y), lr=0.3)
    model.descend(0 * nn.functional.cross_entropy(model(x), y), lr=0.3)  # gradients start anew
    expected = model.initial.clone()
    expected[: len(gradient)].add_(gradient, alpha=-0.3)
    assert torch.equal(model.vector, expected)
    model.assert_views()


def test_gradients_do_not_accumulate() -> None:
    model, _ = make_flat()
    x, y = torch.randn(6, 2, 7, 8), torch.tensor([0, 1, 2, 3, 4, 0])
    model.module.eval()
    first = model.backward(nn.functional.cross_entropy(model(x), y))
    kept = first.clone()
    model.gradient.add_(3)  # whatever somebody left there
    second = model.backward(nn.functional.cross_entropy(model(x), y))
    assert torch.equal(second, kept)
    assert second.data_ptr() == first.data_ptr() == model.gradient.data_ptr()
    model.backward(model(x).sum() * 0)
    assert not model.gradient.any()


def test_statistics_travel_behind_the_parameters() -> None:
    model, original = make_flat()
    names = [entry.name for entry in model.layout.entries]
    assert names[-2:] == ["1.running_mean", "1.running_var"]
    assert "1.num_batches_tracked" not in names  # a counter, not a number to average
    assert model.layout.num_trainable == sum(p.numel() for p in original.parameters())
    assert model.layout.size == model.layout.num_trainable + 8
    assert len(model.trainable) == len(model.gradient) == model.layout.num_trainable
    assert model.trainable.data_ptr() == model.vector.data_ptr()


def test_statistics_update_in_the_vector_and_take_no_gradient() -> None:
    model, original = make_flat()
    x = torch.randn(6, 2, 7, 8) * 3 + 1
    before = model.vector.clone()
    model.module.train()
    model.backward(model(x).sum())
    original.train()
    original(x)
    statistics = model.vector[model.layout.num_trainable :]
    expected = torch.cat([original[1].running_mean, original[1].running_var])  # type: ignore[index, list-item]
    # Two memory formats of the convolution before it: float32 rounding of values near 1.
    torch.testing.assert_close(statistics, expected, rtol=1e-5, atol=1e-5)
    assert (statistics - before[model.layout.num_trainable :]).abs().min() > 1e-4
    assert torch.equal(model.trainable, before[: model.layout.num_trainable])
    model.assert_views()


def test_every_network_dtype_becomes_float32() -> None:
    model = FlatModel(make_convolutional()[0].double(), CPU)  # type: ignore[index, operator]
    assert model.vector.dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in model.module.parameters())


@pytest.mark.parametrize("what", ["cast", "replaced", "statistics"])
def test_a_detached_module_is_noticed(what: str) -> None:
    model, _ = make_flat()
    model.assert_views()
    if what == "cast":
        model.module.double()
    elif what == "replaced":
        model.module[5].bias = nn.Parameter(torch.zeros(5))  # type: ignore[index, union-attr]
    else:
        model.module[1].running_var = torch.ones(4)  # type: ignore[index, union-attr]
    with pytest.raises(AssertionError, match="no longer a view"):
        model.assert_views()


def test_frozen_parameters_travel_but_take_no_gradient() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].weight.requires_grad_(False)
    frozen = module[0].weight.detach().clone()
    model = FlatModel(module, CPU)
    assert model.layout.num_trainable == 4 + 4 * 2 + 2
    assert model.layout.size == model.layout.num_trainable + 3 * 4
    assert torch.equal(model.layout.to_state_dict(model.vector)["0.weight"], frozen)
    assert len(model.backward(model(torch.ones(5, 3)).square().sum())) == model.layout.num_trainable


def test_loading_resets_the_counters_of_batches() -> None:
    """BatchNorm without momentum averages over the batches it has counted: the count must not leak between clients."""
    model = FlatModel(nn.BatchNorm1d(2, momentum=None), CPU)
    start = model.vector.clone()
    results = []
    for _ in range(2):
        model.load(start)
        for offset in (1.0, 3.0):
            model(torch.tensor([[0.0, 1.0], [2.0, 5.0]]) + offset)
        results.append(model.vector.clone())
    assert torch.equal(*results)
    assert not torch.equal(results[0], start)
