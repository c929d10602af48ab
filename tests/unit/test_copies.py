"""Copies of a network in one pass against the network itself, one copy after the other."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from bfl_bench.errors import UnsuitableError
from bfl_bench.evaluation.gaussian_noise import GaussianNoise
from bfl_bench.likelihood import Categorical, Likelihood
from bfl_bench.models.copies import copy_network, view_copies
from bfl_bench.models.flat import Entry, FlatModel, Objective
from bfl_bench.models.gaussian import GaussianSettings, make_gaussian
from bfl_bench.models.lateral import Lateral
from bfl_bench.models.networks import AppendOne
from bfl_bench.rng import seeded_globally
from tests.federation import CPU

SETTINGS = GaussianSettings("auto", "network", -4.0, 1.0, "hard", [-4.5, -3.0], noise=0.5)


def chain(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def gaussian(sampling: str, clamp: str) -> nn.Module:
    settings = GaussianSettings("auto", "network", -4.0, 1.0, clamp, [-4.5, -3.0], sampling, 0.5)  # type: ignore[arg-type]
    return make_gaussian(chain(6, 5, 4, 3), 2, settings)


NETWORKS = {
    "mlp": lambda: chain(6, 5, 4, 3),
    "one layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3, bias=False)),
    "nested": lambda: nn.Sequential(nn.Flatten(), nn.Sequential(nn.Tanh(), nn.Linear(6, 4)), chain(4, 5, 3), nn.ELU()),
    "augmented": lambda: nn.Sequential(
        nn.Flatten(), AppendOne(), nn.Linear(7, 4, bias=False), nn.ReLU(), nn.Linear(4, 3)
    ),
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.4), nn.Linear(5, 3)),
    "dropout first": lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.4), chain(6, 3)),
    "frozen": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4).requires_grad_(False), nn.Linear(4, 3)),
    **{
        f"gaussian, {sampling}, {clamp}": lambda sampling=sampling, clamp=clamp: gaussian(sampling, clamp)
        for sampling in ("outputs", "weights")
        for clamp in ("none", "hard", "straight_through")
    },
    "coupled": lambda: Lateral(chain(6, 5, 4, 3), chain(6, 5, 4, 3)),
    "coupled by units": lambda: make_gaussian(
        Lateral(chain(6, 5, 3), chain(6, 5, 3), gate_per_unit=True), None, SETTINGS
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_losses_outputs_and_gradients_are_those_of_each_copy(name: str) -> None:
    """Three copies with minibatches of unequal size, the noise of each from a seed of its own."""
    torch.manual_seed(0)
    model = FlatModel(NETWORKS[name](), CPU)
    copies, likelihood = copy_network(model, (1, 2, 3)), Categorical(3)
    size, sizes = model.layout.num_trainable, (4, 2, 3)
    rows = model.initial + 0.3 * torch.randn(3, model.layout.size)
    rows[:, model.layout.log_variances].sub_(0.2)
    x, y = torch.randn(3, 4, 1, 2, 3), torch.randint(3, (3, 4))
    drawn, found = [], torch.zeros(3, size)
    for copy, num in enumerate(sizes):
        with seeded_globally(copy, CPU):
            drawn.append(copies.draw(num, x))
    noise = []
    for layer in zip(*drawn, strict=True):
        noise.append(torch.zeros(3, *max(part.shape for part in layer)))
        for place, part in zip(noise[-1], layer, strict=True):
            place[: len(part)] = part
    shares = torch.tensor([[1 / num] * num + [0.0] * (4 - num) for num in sizes])

    def keep(entry: Entry, gradient: Tensor) -> None:
        if entry.stop <= size:
            view_copies(entry, found).copy_(gradient)

    losses, outputs = copies.differentiate(rows, x, noise, lambda o: likelihood.slopes(o, y), shares, keep)
    model.module.train()
    for copy, num in enumerate(sizes):
        model.load(rows[copy])
        with seeded_globally(copy, CPU):
            loss, expected = model.differentiate(x[copy, :num], y[copy, :num], Objective(likelihood.loss))
        torch.testing.assert_close(outputs[copy, :num], expected.detach(), rtol=1e-5, atol=1e-6)  # float32 sums
        torch.testing.assert_close(losses[copy], loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[copy], model.gradient, rtol=1e-4, atol=1e-6)
        assert model.gradient.any()


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 3)), "1 is BatchNorm1d"),
        (nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(12, 3)), "0 is Conv2d"),
        (nn.Sequential(nn.Linear(3, 3), nn.Flatten(), nn.Linear(6, 3)), "0 is Linear"),  # of every row of an image
        (nn.Sequential(nn.Flatten(), *[nn.Linear(6, 6)] * 2), "2 is Linear"),
        (nn.Sequential(nn.Flatten(), nn.Softmax(dim=1)), "1 is Softmax"),
        (nn.Bilinear(2, 3, 1), "the network is Bilinear"),
    ],
)
def test_another_layer_is_named(module: nn.Module, named: str) -> None:
    with pytest.raises(UnsuitableError, match=named):
        copy_network(FlatModel(module, CPU), (1, 2, 3))


@pytest.mark.parametrize("likelihood", [Categorical(4), GaussianNoise(0.7), GaussianNoise(None)])
def test_slopes_are_autograds(likelihood: Likelihood) -> None:
    outputs = torch.randn(5, likelihood.num_outputs, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(4, (5, 3)) if isinstance(likelihood, Categorical) else torch.randn(5, 3).double()
    losses, slopes = likelihood.slopes(outputs.detach(), labels)
    whole = likelihood.loss(outputs, labels, "sum")
    (expected,) = torch.autograd.grad(whole, outputs)
    torch.testing.assert_close(losses.sum(), whole.detach())
    torch.testing.assert_close(slopes, expected)
    assert losses.shape == labels.shape
    for row in range(5):
        one = likelihood.loss(outputs[row : row + 1].detach(), labels[row : row + 1], "sum")
        torch.testing.assert_close(losses[row].sum(), one)
