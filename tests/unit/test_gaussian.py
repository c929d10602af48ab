"""Gaussian layers against weights sampled one by one, closed forms, and counts by hand."""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import (
    GaussianEmbedding,
    GaussianLayer,
    GaussianRecurrent,
    count_layers,
    make_gaussian,
)
from bfl_bench.models.networks import lenet, lstm
from tests.federation import CPU, make_gaussian_settings

NUM_DRAWS = 20_000
# A mean of N draws misses by more than 5 standard errors one time in two million; seeds are fixed anyway.
SIGMAS = 5.0


def make_linear() -> tuple[nn.Linear, Tensor]:
    return nn.Linear(4, 3), torch.randn(4)


def make_conv() -> tuple[nn.Conv2d, Tensor]:
    """Everything a convolution can have but padding other than zeros."""
    return nn.Conv2d(4, 2, (3, 2), stride=2, padding=1, dilation=(1, 2), groups=2), torch.randn(4, 4, 5)


KINDS: dict[str, Callable[[], tuple[nn.Linear | nn.Conv2d, Tensor]]] = {"linear": make_linear, "conv": make_conv}
kinds = pytest.mark.parametrize("kind", KINDS)


def make_layer(kind: str, **settings: object) -> tuple[GaussianLayer, nn.Module, Tensor]:
    """A Gaussian layer with widely different log variances, the layer it was made from, and one input."""
    plain, x = KINDS[kind]()
    layer = GaussianLayer(copy.deepcopy(plain), make_gaussian_settings(**settings))
    with torch.no_grad():
        layer.weight_log_variance.uniform_(-4, 1)
    return layer, plain, x


def analytic(layer: GaussianLayer, plain: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the outputs: they are linear in independent weights, with the plain layer's Jacobian."""

    def output(weight: Tensor) -> Tensor:
        return torch.func.functional_call(plain, {"weight": weight}, (x[None],))[0]

    jacobian = torch.autograd.functional.jacobian(output, layer.weight.detach())
    variances = layer.weight_log_variance.detach().exp()
    return output(layer.weight.detach()), (jacobian.square() * variances).flatten(x.dim()).sum(-1)


def outputs(layer: GaussianLayer, x: Tensor, num: int = NUM_DRAWS) -> Tensor:
    with torch.no_grad():
        return layer.train()(x.expand(num, *x.shape))


def outputs_of_sampled_weights(layer: GaussianLayer, plain: nn.Module, x: Tensor, num: int) -> Tensor:
    deviation = (0.5 * layer.weight_log_variance.detach()).exp()

    def output(weight: Tensor) -> Tensor:
        return torch.func.functional_call(plain, {"weight": weight}, (x[None],))[0]

    with torch.no_grad():
        weights = layer.weight + deviation * torch.randn(num, *deviation.shape)
        return torch.stack([output(weight) for weight in weights])


@kinds
def test_outputs_have_the_analytic_mean_and_variance(kind: str) -> None:
    layer, plain, x = make_layer(kind)
    mean, variance = analytic(layer, plain, x)
    drawn = outputs(layer, x).double()
    assert mean.shape == drawn.shape[1:] == plain(x[None])[0].shape
    assert variance.max() > 2 * variance.min() > 0
    assert ((drawn.mean(0) - mean).abs() < SIGMAS * (variance / NUM_DRAWS).sqrt()).all()
    # The standard error of a Gaussian sample variance is variance * sqrt(2 / N).
    assert ((drawn.var(0) - variance).abs() < SIGMAS * variance * math.sqrt(2 / NUM_DRAWS)).all()


@kinds
def test_outputs_are_distributed_as_with_sampled_weights(kind: str) -> None:
    """Each output by itself; jointly too for a linear layer, where outputs have no weight in common."""
    layer, plain, x = make_layer(kind)
    num = 1500
    drawn = outputs(layer, x, num).flatten(1)
    sampled = outputs_of_sampled_weights(layer, plain, x, num).flatten(1)
    p_values = [stats.ks_2samp(drawn[:, i].numpy(), sampled[:, i].numpy()).pvalue for i in range(drawn.shape[1])]
    assert min(p_values) > 1e-3 / len(p_values)  # Bonferroni
    if kind == "linear":
        for values in (drawn, sampled):
            correlation = torch.corrcoef(values.T) - torch.eye(3)
            assert correlation.abs().max() < SIGMAS / math.sqrt(num)


@kinds
def test_evaluation_uses_the_mean_exactly(kind: str) -> None:
    layer, plain, x = make_layer(kind)
    batch = torch.stack([x, -x, 2 * x])
    assert torch.equal(layer.eval()(batch), plain(batch))
    assert not torch.equal(layer.train()(batch), plain(batch))


@kinds
def test_every_example_has_noise_of_its_own(kind: str) -> None:
    layer, plain, x = make_layer(kind)
    drawn = (outputs(layer, x, 2 * 5000) - plain(x[None])).detach().flatten(1)
    first, second = drawn[0::2], drawn[1::2]  # neighbours in one batch
    for i in range(drawn.shape[1]):
        correlation = torch.corrcoef(torch.stack([first[:, i], second[:, i]]))[0, 1]
        assert abs(correlation) < SIGMAS / math.sqrt(5000)


def test_a_layer_without_bias() -> None:
    layer = GaussianLayer(nn.Linear(3, 2, bias=False), make_gaussian_settings(mean_init="normal"))
    assert [name for name, _ in layer.named_parameters()] == ["weight", "weight_log_variance"]
    assert layer.train()(torch.ones(5, 3)).shape == (5, 2)


@kinds
def test_gradient_of_an_expected_loss(kind: str) -> None:
    """E[sum of squared outputs] = means^2 + variances, so that its gradient in log variances is known."""
    layer, plain, x = make_layer(kind)
    jacobian = torch.autograd.functional.jacobian(
        lambda weight: torch.func.functional_call(plain, {"weight": weight}, (x[None],))[0], layer.weight.detach()
    ).flatten(0, x.dim() - 1)  # (outputs, *weight)
    part = jacobian.square() * layer.weight_log_variance.detach().exp()  # each weight's part of each variance
    mean, variance = (v.flatten() for v in analytic(layer, plain, x))
    layer.train()(x.expand(NUM_DRAWS, *x.shape)).square().sum().div(NUM_DRAWS).backward()
    gradient = layer.weight_log_variance.grad
    assert gradient is not None
    # One draw's gradient through an output m + s e is part * (e^2 + e m / s): mean part, variance part^2 (2 + m^2/s^2).
    shape = (-1,) + (1,) * layer.weight.dim()
    error = (part.square() * (2 + mean.square() / variance).view(shape)).sum(0).div(NUM_DRAWS).sqrt()
    assert (part.sum(0) > 0).any()
    assert ((gradient - part.sum(0)).abs() <= SIGMAS * error + 1e-7).all()  # the 1e-7: weights that see only padding


@kinds
@pytest.mark.parametrize("clamp", ["none", "hard", "straight_through"])
def test_gradient_with_fixed_noise(kind: str, clamp: str) -> None:
    """Against autograd through the explicit formula, with the clamp's derivative put in by hand."""
    layer, plain, x = make_layer(kind, log_variance_clamp=clamp, log_variance_range=[-2.5, 0.0])
    batch = torch.stack([x, 0.5 * x, x.flip(0)])
    log_variance = layer.weight_log_variance.detach().clone()
    inside = (log_variance >= -2.5) & (log_variance <= 0.0)
    assert 0 < inside.sum() < inside.numel()
    effective = (log_variance if clamp == "none" else log_variance.clamp(-2.5, 0.0)).requires_grad_()
    torch.manual_seed(3)
    got = layer.train()(batch)
    torch.manual_seed(3)
    with_variances = copy.deepcopy(plain)
    variance = torch.func.functional_call(
        with_variances, {"weight": effective.exp(), "bias": torch.zeros_like(plain.bias)}, (batch.square(),)
    )
    expected = plain(batch) + variance.sqrt() * torch.randn(got.shape)
    # The layer adds 1e-8 to variances of some 0.1 or more: relative 1e-7, as is float32.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    target = torch.linspace(-1, 1, got.numel()).view(got.shape)
    (got - target).pow(4).sum().backward()
    (expected - target).pow(4).sum().backward()
    assert layer.weight_log_variance.grad is not None
    assert effective.grad is not None
    passing = inside if clamp == "hard" else torch.ones_like(inside)
    scale = effective.grad.abs().max().item()
    torch.testing.assert_close(layer.weight_log_variance.grad, effective.grad * passing, rtol=1e-4, atol=1e-6 * scale)
    if clamp == "hard":
        assert (layer.weight_log_variance.grad[~inside] == 0).all()


@kinds
def test_means_and_biases_get_the_plain_gradient_of_a_linear_loss(kind: str) -> None:
    layer, plain, x = make_layer(kind)
    batch = torch.stack([x, 0.5 * x])
    layer.train()(batch).sum().backward()
    plain(batch).sum().backward()
    for name in ("weight", "bias"):
        # The same operations in the same order: only the memory format may differ.
        torch.testing.assert_close(getattr(layer, name).grad, getattr(plain, name).grad, rtol=1e-6, atol=1e-6)


@kinds
def test_initial_log_variances_below_a_hard_clamp_get_no_gradient(kind: str) -> None:
    """The released codes: log variances start at -9 and are clamped at -8 (FACTS, fact 3)."""
    gradients = {}
    for clamp in ("none", "hard", "straight_through"):
        torch.manual_seed(4)
        plain, x = KINDS[kind]()
        settings = make_gaussian_settings(log_variance_init=-9.0, log_variance_init_std=0.001, log_variance_clamp=clamp)
        layer = GaussianLayer(plain, settings)
        torch.manual_seed(5)
        layer.train()(x[None]).square().sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.any()
        assert layer.weight_log_variance.grad is not None
        gradients[clamp] = layer.weight_log_variance.grad
    assert (gradients["hard"] == 0).all()
    assert gradients["none"].abs().max() > 1e-5
    # Deviations at the floor are e^0.5 times larger, and so is what the noise adds to the loss.
    assert gradients["straight_through"].abs().max() > 1.3 * gradients["none"].abs().max()


def test_gradients_stay_finite_where_an_input_is_all_zeros() -> None:
    layer, _, _ = make_layer("linear")
    layer.train()(torch.zeros(2, 4)).square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


def test_clamped_values() -> None:
    values = torch.tensor([-20.0, -2.0, -1.5, 0.0, 1.0, 7.0])
    for clamp in ("hard", "straight_through"):
        settings = make_gaussian_settings(log_variance_clamp=clamp, log_variance_range=[-2.0, 1.0])
        # (c - v) + v is c up to one rounding of v, at most 20 * 2^-24.
        torch.testing.assert_close(
            settings.clamp(values), torch.tensor([-2.0, -2.0, -1.5, 0.0, 1.0, 1.0]), rtol=0, atol=2e-6
        )
    assert torch.equal(make_gaussian_settings(log_variance_range=[-2.0, 1.0]).clamp(values), values)


@pytest.mark.parametrize("clamp", ["none", "hard", "straight_through"])
def test_what_passes_is_what_autograd_passes(clamp: str) -> None:
    """Inside and outside: what the KL asks is what the likelihood's gradient does."""
    settings = make_gaussian_settings(log_variance_clamp=clamp, log_variance_range=[-2.0, 1.0])
    values = torch.tensor([-20.0, -2.001, -1.999, 0.0, 0.999, 1.001, 7.0], requires_grad=True)
    settings.clamp(values).sum().backward()
    passes = settings.passes_gradient(values.detach())
    assert values.grad is not None
    assert torch.equal(values.grad, torch.ones(7) if passes is None else passes.float())
    assert values.grad.tolist() == ([0, 0, 1, 1, 1, 0, 0] if clamp == "hard" else [1] * 7)


def test_what_passes_at_exactly_the_bounds() -> None:
    """As for log_variance_init -8 with deviation 0."""
    settings = make_gaussian_settings(log_variance_clamp="hard", log_variance_range=[-2.0, 1.0])
    values = torch.tensor([-2.0, 1.0], requires_grad=True)
    settings.clamp(values).sum().backward()
    passes = settings.passes_gradient(values.detach())
    assert values.grad is not None
    assert passes is not None
    assert torch.equal(values.grad, passes.float())


# make_gaussian


def make_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)
    )


def gaussian_names(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if isinstance(child, GaussianLayer)]


@pytest.mark.parametrize(
    ("num_layers", "names"),
    [
        (None, ["4", "6"]),
        (0, []),
        (1, ["6"]),
        (2, ["4", "6"]),
        (3, ["2", "4", "6"]),
        (4, ["0", "2", "4", "6"]),
    ],
)
def test_the_last_layers_become_gaussian(num_layers: int | None, names: list[str]) -> None:
    network = make_network()
    state = copy.deepcopy(network.state_dict())
    result = make_gaussian(network, num_layers, make_gaussian_settings())
    assert gaussian_names(result) == names
    after = result.state_dict()
    assert set(after) - set(state) == {f"{name}.weight_log_variance" for name in names}
    assert all(torch.equal(after[name], state[name]) for name in state)
    x = torch.randn(2, 1, 5, 5)
    plain = make_network()
    plain.load_state_dict(state)
    assert torch.equal(result.eval()(x), plain(x))


def test_count_layers() -> None:
    assert count_layers(make_network()) == 4
    assert count_layers(lenet((1, 28, 28), 10)) == 5
    assert count_layers(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.BatchNorm1d(2), nn.Linear(2, 2))) == 2


def make_nested() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(18, 5), nn.Tanh()), nn.Linear(5, 4)),
        nn.Linear(4, 3),
    )


@pytest.mark.parametrize(
    ("num_layers", "names"), [(None, ["1.1.0", "1.2", "2"]), (0, []), (4, ["0.0", "1.1.0", "1.2", "2"])]
)
def test_nested_modules(num_layers: int | None, names: list[str]) -> None:
    nested = make_gaussian(make_nested(), num_layers, make_gaussian_settings())
    assert gaussian_names(nested) == names
    assert nested.train()(torch.randn(2, 1, 5, 5)).shape == (2, 3)


@pytest.mark.parametrize(("num_layers", "names"), [(1, ["2"]), (2, ["1.2", "2"]), (3, ["1.1.0", "1.2", "2"])])
def test_the_last_layers_of_nested_modules(num_layers: int, names: list[str]) -> None:
    """In the order of `modules()`, which is the order a sequential network runs in."""
    assert gaussian_names(make_gaussian(make_nested(), num_layers, make_gaussian_settings())) == names


@pytest.mark.parametrize(
    ("shape", "num_layers", "gaussian", "points"),
    [
        # FACTS 2.1; the points are the convolutions and all biases: 6, 16, 120, 84, 10.
        ((1, 28, 28), None, 41_640, 25 * 6 + 25 * 6 * 16 + 236),
        ((3, 32, 32), None, 58_920, 75 * 6 + 25 * 6 * 16 + 236),
        ((3, 32, 32), 3, 58_920, 75 * 6 + 25 * 6 * 16 + 236),
        ((1, 28, 28), 2, 120 * 84 + 840, 256 * 120 + 25 * 6 + 25 * 6 * 16 + 236),
        ((1, 28, 28), 1, 840, 256 * 120 + 120 * 84 + 25 * 6 + 25 * 6 * 16 + 236),
        ((1, 28, 28), 5, 41_640 + 25 * 6 + 25 * 6 * 16, 236),
    ],
)
def test_numbers_of_weights_of_lenet(
    shape: tuple[int, ...], num_layers: int | None, gaussian: int, points: int
) -> None:
    layout = FlatModel(make_gaussian(lenet(shape, 10), num_layers, make_gaussian_settings()), CPU).layout
    assert layout.points == slice(0, points)
    assert layout.means == slice(points, points + gaussian)
    assert layout.log_variances == slice(points + gaussian, points + 2 * gaussian)
    assert layout.num_trainable == layout.size == points + 2 * gaussian


def test_means_and_log_variances_correspond_entry_by_entry() -> None:
    """Every weight and its log variance get the same number of their own, seen from the module."""
    network = make_gaussian(make_network(), 3, make_gaussian_settings())
    model = FlatModel(network, CPU)
    layout, first = model.layout, 0
    with torch.no_grad():
        for child in network:
            if isinstance(child, GaussianLayer):
                numbers = torch.arange(first, first + child.weight.numel()).float().view(child.weight.shape)
                child.weight.copy_(numbers)
                child.weight_log_variance.copy_(-numbers)
                first += child.weight.numel()
    means, log_variances = model.vector[layout.means], model.vector[layout.log_variances]
    assert len(means) == first == 2 * 3 * 4 + 12 * 4 + 4 * 3
    assert torch.equal(means, -log_variances)
    assert sorted(means.tolist()) == list(range(first))
    # The convolution lies channels-last: (out, height, width, in).
    expected = np.arange(24).reshape(3, 2, 2, 2).transpose(0, 2, 3, 1).ravel()
    assert means[:24].tolist() == expected.tolist()
    # And gradients lie where their parameters do.
    model.vector[layout.means] = torch.randn(first)
    model.vector[layout.log_variances] = -4.0
    x = torch.randn(6, 1, 5, 5)
    gradient = model.backward(model(x).square().sum())
    conv = network[2]
    assert conv.weight_log_variance.grad is not None
    assert torch.equal(gradient[layout.log_variances][:24], conv.weight_log_variance.grad.permute(0, 2, 3, 1).ravel())
    assert torch.equal(gradient[layout.means][:24], conv.weight.grad.permute(0, 2, 3, 1).ravel())
    assert gradient[layout.log_variances].any()


# Initial values


@pytest.mark.parametrize(
    ("layer", "fan_in"), [(nn.Linear(300, 200), 300), (nn.Conv2d(8, 100, 5, groups=2), 4 * 25)], ids=["linear", "conv"]
)
def test_normal_means(layer: nn.Linear | nn.Conv2d, fan_in: int) -> None:
    gaussian = GaussianLayer(copy.deepcopy(layer), make_gaussian_settings(mean_init="normal"))
    weights = gaussian.weight.detach().flatten().double().numpy() * math.sqrt(fan_in)
    # Five standard errors of a sample mean and a sample deviation of N(0, 1).
    assert abs(weights.mean()) < SIGMAS / math.sqrt(len(weights))
    assert abs(weights.std() - 1) < SIGMAS / math.sqrt(2 * len(weights))
    assert stats.kstest(weights, "norm").pvalue > 1e-3
    assert gaussian.bias is not None
    assert (gaussian.bias == 0).all()


def test_means_of_the_network_are_kept() -> None:
    plain, _ = make_linear()
    gaussian = GaussianLayer(copy.deepcopy(plain), make_gaussian_settings())
    assert torch.equal(gaussian.weight, plain.weight)
    assert torch.equal(gaussian.bias, plain.bias)


def test_initial_log_variances() -> None:
    settings = make_gaussian_settings(log_variance_init=-9.0, log_variance_init_std=0.001)
    values = GaussianLayer(nn.Linear(300, 200), settings).weight_log_variance.detach().flatten().double().numpy()
    scaled = (values + 9) / 0.001
    # float32 near 9 has a spacing of 1e-6, a thousandth of the deviation; the rest is the standard error.
    assert abs(scaled.mean()) < SIGMAS / math.sqrt(len(scaled)) + 1e-3
    assert abs(scaled.std() - 1) < SIGMAS / math.sqrt(2 * len(scaled)) + 1e-3
    assert stats.kstest(scaled, "norm").pvalue > 1e-3
    exactly = GaussianLayer(nn.Linear(3, 2), make_gaussian_settings(log_variance_init_std=0.0))
    assert (exactly.weight_log_variance == -3.0).all()


def test_a_network_of_one_layer() -> None:
    assert gaussian_names(make_gaussian(nn.Linear(3, 2), 1, make_gaussian_settings())) == [""]


def test_padding_mode_is_kept() -> None:
    convolution = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    x = torch.randn(4, 2, 5, 5)
    expected = convolution(x)
    layer = make_gaussian(nn.Sequential(convolution), 1, make_gaussian_settings()).eval()
    assert torch.equal(layer(x), expected)


def test_sampled_weights_are_shared_by_the_examples_of_a_minibatch() -> None:
    """One draw per minibatch: equal inputs get equal outputs; over draws, mean and variance are the analytic ones."""
    layer, plain, x = make_layer("linear", sampling="weights")
    with torch.no_grad():
        together = layer.train()(x.expand(5, -1))
        assert torch.equal(together, together[:1].expand_as(together))
        draws = torch.stack([layer(x[None])[0] for _ in range(5000)])
    mean, variance = analytic(layer, plain, x)
    assert ((draws.mean(0) - mean).abs() < SIGMAS * (variance / 5000).sqrt()).all()
    torch.testing.assert_close(draws.var(0), variance, rtol=SIGMAS * math.sqrt(2 / 5000), atol=0.0)


def make_text_network(**settings: object) -> nn.Module:
    torch.manual_seed(0)
    return make_gaussian(lstm((7,), 5, embedding=3, units=4, layers=2), None, make_gaussian_settings(**settings))


def test_an_lstm_with_an_embedding_becomes_gaussian() -> None:
    torch.manual_seed(0)
    plain = lstm((7,), 5, embedding=3, units=4, layers=2).eval()
    assert count_layers(plain) == 3
    gaussian = make_text_network(log_variance_init=-40.0, log_variance_init_std=0.0)
    x = torch.randint(5, (2, 7))
    expected = plain(x)
    assert expected.shape == (2, 5, 7)
    torch.testing.assert_close(gaussian.eval()(x), expected)
    torch.testing.assert_close(gaussian.train()(x), expected, rtol=0.0, atol=1e-3)  # a noise of 1e-4 always stays
    layout = FlatModel(gaussian, CPU).layout
    weights = 5 * 3 + 16 * 3 + 16 * 4 + 2 * 16 * 4 + 4 * 5
    assert layout.means.stop - layout.means.start == weights
    assert layout.log_variances.stop - layout.log_variances.start == weights
    assert layout.points.stop == 4 * 16 + 5  # biases


def test_a_gaussian_embedding_has_the_moments_of_its_rows() -> None:
    layer = GaussianEmbedding(nn.Embedding(6, 3), make_gaussian_settings())
    with torch.no_grad():
        layer.weight_log_variance.uniform_(-3, 0)
        draws = layer.train()(torch.full((NUM_DRAWS,), 4))
    variance = layer.weight_log_variance[4].exp().detach()
    assert ((draws.mean(0) - layer.weight[4]).abs() < SIGMAS * (variance / NUM_DRAWS).sqrt()).all()
    torch.testing.assert_close(draws.var(0), variance, rtol=SIGMAS * math.sqrt(2 / NUM_DRAWS), atol=0.0)


def test_an_lstm_draws_all_its_weights_anew() -> None:
    gaussian = make_text_network(log_variance_init=-2.0).train()
    x = torch.randint(5, (1, 7)).expand(2, 7)
    recurrent = gaussian[1]
    assert isinstance(recurrent, GaussianRecurrent)
    embedded = torch.randn(1, 7, 3).expand(2, 7, 3)
    with torch.no_grad():
        first, second = recurrent(embedded), recurrent(embedded)
    assert torch.equal(first[0], first[1])  # one draw per minibatch
    assert not torch.allclose(first, second)
    gaussian(x).sum().backward()
    for name, parameter in gaussian.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
