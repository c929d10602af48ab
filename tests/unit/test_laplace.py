"""Laplace approximations that predict, against dense matrices written out."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from bfl_bench.errors import UnsuitableError
from bfl_bench.inference.curvature import diagonal_fisher
from bfl_bench.inference.kronecker import find_layers
from bfl_bench.inference.laplace import LaplacePosterior, check_laplace, kronecker_laplace, laplace
from bfl_bench.method import Layers, Task
from tests.federation import NUM_CLASSES, NUM_FEATURES, make_clients, make_task

PRIOR = 3.0
NUM_EXAMPLES = 260  # more than are taken at once


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, NUM_FEATURES, 1)),
        nn.Conv2d(1, 4, (3, 1), padding=(1, 0)),
        nn.Tanh(),
        nn.Conv2d(4, 2, (2, 1), bias=False),
        nn.Flatten(),
        nn.Linear(8, NUM_CLASSES),
    )


def linear() -> nn.Module:
    return nn.Linear(NUM_FEATURES, NUM_CLASSES)


NETWORKS: dict[str, Callable[[], nn.Module] | None] = {"layers": None, "convolutions": convolutional, "linear": linear}


def make(network: str) -> tuple[Task, Tensor, torch.Generator]:
    torch.manual_seed(1)
    module = NETWORKS[network]
    task = make_task(module() if module else None)
    rng = torch.Generator().manual_seed(2)
    return task, 0.7 * torch.randn(len(task.model.vector), generator=rng), rng


def jacobian_by_hand(task: Task, params: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (n, C) and their derivatives (n, C, P) by automatic differentiation of the whole network."""

    def outputs(vector: Tensor) -> Tensor:
        named = {entry.name: entry.view(vector) for entry in task.model.layout.entries}
        return functional_call(task.model.module, named, (x,))

    return outputs(params), jacrev(outputs)(params)


def dense_prediction(task: Task, params: Tensor, covariance: Tensor, x: Tensor) -> Tensor:
    """softmax(f / sqrt(1 + pi/8 diag(J S J'))), in float64."""
    f, jacobian = (tensor.detach().double() for tensor in jacobian_by_hand(task, params, x))
    variances = torch.einsum("ncp,pq,ncq->nc", jacobian, covariance.double(), jacobian)
    return (f / (1 + math.pi / 8 * variances).sqrt()).log_softmax(1)


def random_matrix(size: int, rng: torch.Generator) -> Tensor:
    root = torch.randn(size, size, generator=rng)
    return root @ root.T / size


def kronecker(task: Task, params: Tensor, rng: torch.Generator, layers: Layers) -> tuple[LaplacePosterior, Tensor]:
    """The posterior, and its precision of the data as one matrix over all parameters, zero in other layers."""
    factors, index = {}, torch.arange(len(params))
    dense = torch.zeros(len(params), len(params))
    found = find_layers(task.model)
    for layer in found:
        out, inputs = layer.read(params).shape
        factors[layer.name] = (random_matrix(inputs, rng), random_matrix(out, rng))
        places = layer.read(index).flatten()  # M row by row, for which the matrix is B kron A
        if layers == "all" or layer is found[-1]:
            dense[places[:, None], places] = 20 * torch.kron(factors[layer.name][1], factors[layer.name][0])
    return kronecker_laplace(task, params, factors, 20.0, layers), dense


def posterior_and_precision(
    structure: str, task: Task, params: Tensor, rng: torch.Generator, layers: Layers
) -> tuple[LaplacePosterior, Tensor]:
    if structure == "kronecker":
        return kronecker(task, params, rng, layers)
    matrix = 20 * random_matrix(len(params), rng)
    precision = matrix if structure == "full" else matrix.diagonal().clone()
    return laplace(task, params, precision, layers), matrix if structure == "full" else precision.diag()


def covariance_of(precision: Tensor, task: Task, layers: Layers) -> Tensor:
    """The inverse of precision + d I on the layers concerned, zero elsewhere."""
    chosen = find_layers(task.model) if layers == "all" else find_layers(task.model)[-1:]
    places = torch.cat([layer.read(torch.arange(len(precision))).flatten() for layer in chosen])
    block = precision[places[:, None], places].double()
    covariance = torch.zeros(precision.shape, dtype=torch.float64)
    covariance[places[:, None], places] = torch.linalg.inv(block + PRIOR * torch.eye(len(block)))
    return covariance


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("structure", ["diagonal", "full", "kronecker"])
@pytest.mark.parametrize("layers", ["all", "last"])
def test_linearised_predictions_are_those_of_dense_matrices(network: str, structure: str, layers: Layers) -> None:
    task, params, rng = make(network)
    posterior, precision = posterior_and_precision(structure, task, params, rng, layers)
    x = torch.randn(NUM_EXAMPLES, NUM_FEATURES, generator=rng)
    expected = dense_prediction(task, params, covariance_of(precision, task, layers), x)
    far, near = posterior.linearise(x, [1e9, PRIOR], batch_size=1000)
    torch.testing.assert_close(near.log_probabilities.double(), expected, rtol=1e-4, atol=1e-4)  # float32
    assert near.expected_entropy is None
    mean = jacobian_by_hand(task, params, x)[0].log_softmax(1)
    torch.testing.assert_close(far.log_probabilities, mean, rtol=1e-4, atol=1e-4)  # a prior that leaves nothing
    assert (near.log_probabilities - mean).abs().max() > 0.01


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("structure", ["diagonal", "full", "kronecker"])
@pytest.mark.parametrize("layers", ["all", "last"])
def test_draws_have_the_mean_and_covariance_of_dense_matrices(network: str, structure: str, layers: Layers) -> None:
    """By what the unit matrix becomes: with z for noise, a draw is mean + S z, where S S' is the covariance."""
    task, params, rng = make(network)
    posterior, precision = posterior_and_precision(structure, task, params, rng, layers)
    root = torch.zeros(len(params), 0)
    for block in posterior.blocks:
        size = block.eigenvalues.numel()
        scale = (block.eigenvalues + PRIOR).rsqrt()
        part = torch.zeros(len(params), size)
        for number in range(size):
            noise = torch.zeros(size)
            noise[number] = 1
            part[block.positions, number] = block.rotate(noise.view_as(scale) * scale)
        root = torch.cat([root, part], dim=1)
    expected = covariance_of(precision, task, layers)
    torch.testing.assert_close((root @ root.T).double(), expected, rtol=1e-4, atol=1e-5)
    first, second = posterior.draw(PRIOR, 2, torch.Generator().manual_seed(5))
    noise = torch.Generator().manual_seed(5)
    for drawn in (first, second):
        numbers = [torch.randn(block.eigenvalues.shape, generator=noise).flatten() for block in posterior.blocks]
        torch.testing.assert_close(drawn, params + root @ torch.cat(numbers), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("structure", ["diagonal", "full", "kronecker"])
def test_evidence_is_the_integral_over_a_gaussian(structure: str) -> None:
    """log N(mean; 0, 1/d) + log of the Gaussian integral, up to what does not depend on d."""
    task, params, rng = make("layers")
    posterior, precision = posterior_and_precision(structure, task, params, rng, "all")

    def by_hand(d: float) -> float:
        matrix = precision.double() + d * torch.eye(len(params), dtype=torch.float64)
        prior = 0.5 * len(params) * math.log(d) - 0.5 * d * params.double().square().sum()
        return float(prior - 0.5 * torch.linalg.slogdet(matrix).logabsdet)

    for d in (0.1, 30.0):
        ours = posterior.log_evidence(d) - posterior.log_evidence(1.0)
        assert ours == pytest.approx(by_hand(d) - by_hand(1.0), rel=1e-4)


def test_the_evidence_of_a_linear_model_finds_the_prior_that_weights_were_drawn_from() -> None:
    """Weights are from N(0, 1/d), seen with precision h: as N(0, 1/d + 1/h), the posterior's mean h / (h + d) of it."""
    task = make_task(nn.Linear(400, 5, bias=False))
    rng = torch.Generator().manual_seed(0)
    h, d = 50.0, 4.0
    mean = torch.randn(2000, generator=rng) * math.sqrt(1 / d + 1 / h) * h / (h + d)  # the posterior's
    posterior = laplace(task, mean, torch.full((2000,), h), "all")
    grid = [d * 10 ** (step / 20) for step in range(-20, 21)]
    # The maximum is MacKay's fixed point d = sum h / (h + d) / |mean|^2, which holds at the true d.
    assert max(grid, key=posterior.log_evidence) == pytest.approx(d, rel=0.2)


def test_precision_is_compared_with_the_fisher_information() -> None:
    task, params, rng = make("layers")
    client = make_clients()[1]
    own = diagonal_fisher(task, params, client, rng, "per_sample")
    x, y = client.gather(torch.arange(len(client)), rng)
    posterior = laplace(task, params, 0.25 * sum(task.sizes) * own, "all")
    assert posterior.compare_with_fisher(x, y) == pytest.approx(0.25, rel=1e-5)


def test_a_diagonal_over_other_layers_draws_but_is_not_linearised() -> None:
    module = nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.LayerNorm(4), nn.Linear(4, NUM_CLASSES))
    task = make_task(module)
    params = task.model.initial
    (drawn,) = laplace(task, params, torch.ones(len(params)), "all").draw(1.0, 1, torch.Generator().manual_seed(0))
    assert (drawn != params).all()
    with pytest.raises(UnsuitableError, match="plain Linear and Conv2d"):
        check_laplace(task)
    with pytest.raises(UnsuitableError, match="plain Linear and Conv2d"):
        laplace(task, params, torch.ones(len(params)), "last")
