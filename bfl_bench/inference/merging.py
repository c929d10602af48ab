"""Merging the clients' models by their curvature: what is sent, how the server reads it, the solution layer by layer.

A client's curvature is that of its mean loss: a diagonal (D,) on the flat vector, or Kronecker factors of every layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean
from bfl_bench.inference import kronecker
from bfl_bench.inference.curvature import check_expected_gradient, diagonal_fisher
from bfl_bench.inference.laplace import LaplacePosterior, kronecker_laplace, laplace
from bfl_bench.likelihood import Prediction, average
from bfl_bench.method import Client, Layers, Replies, Task, Tensors, Weights

Structure = Literal["diagonal", "kronecker"]

Solve = Callable[[kronecker.Posteriors], tuple[Tensor, int, str]]
"""Find a layer's matrix: also the number of steps, and a sentence where the solver did not do its work."""


def check_structure(task: Task, structure: Structure, labels: kronecker.Labels) -> None:
    """Refuse a network or a task without this curvature."""
    if structure == "kronecker":
        kronecker.find_layers(task.model)
    if labels == "model":
        check_expected_gradient(task)


def measure_curvature(
    task: Task,
    vector: Tensor,
    client: Client,
    rng: torch.Generator,
    structure: Structure,
    labels: kronecker.Labels,
    damping: float = 0.0,
) -> Tensors:
    """Compute the Fisher information of an example, over all of the client's data at `vector`, as it is sent.

    Damped are Kronecker factors alone.
    """
    if structure == "diagonal":
        kind: Literal["model", "per_sample"] = "model" if labels == "model" else "per_sample"
        return {"precision": diagonal_fisher(task, vector, client, rng, kind)}
    factors = kronecker.factors(task, vector, client, rng, "kfac", labels)
    damped = kronecker.damp(list(factors.values()), damping, "trace")
    return pack_factors(dict(zip(factors, damped, strict=True)))


def pack_factors(factors: Mapping[str, tuple[Tensor, Tensor]]) -> Tensors:
    """Take the upper triangles of A and B of every layer: all that needs to be sent."""
    return {
        f"{name}.{factor}": kronecker.upper_triangle(matrix)
        for name, pair in factors.items()
        for factor, matrix in zip("AB", pair, strict=True)
    }


def read_replies(task: Task, weights: Weights, replies: Replies) -> tuple[list[Tensors], Tensor, Tensor]:
    """Read all messages, the shares (K,) of their clients, which sum to one, and the mean of their `params` (P,)."""
    messages: list[Tensors] = []
    found: list[float] = []
    mean = WeightedMean()
    for client_id, message in replies:
        messages.append(message)
        found.append(task.weight(weights, client_id))
        mean.add(message["params"], found[-1])
    aggregated = mean.result()
    return messages, torch.tensor(found, dtype=torch.float64, device=aggregated.device) / sum(found), aggregated


def read_factor(message: Tensors, layer: kronecker.Layer, factor: Literal["A", "B"]) -> Tensor:
    """Read a symmetric matrix, in float64."""
    return kronecker.from_upper_triangle(message[f"{layer.name}.{factor}"].double())


def read_posteriors(layer: kronecker.Layer, messages: Sequence[Tensors], shares: Tensor) -> kronecker.Posteriors:
    """Read one layer's Gaussians from messages with `params` and factors; the shares (K,) sum to one."""
    a = torch.stack([read_factor(message, layer, "A") for message in messages])
    b = torch.stack([read_factor(message, layer, "B") for message in messages])
    means = torch.stack([layer.read(message["params"].double()) for message in messages])
    return kronecker.Posteriors(a, b, means, shares)


@dataclass(frozen=True)
class Merged:
    """What merging layer by layer gave beside the model."""

    factors: Tensors  # sum p A and sum p B of every layer, for a posterior
    metrics: dict[str, float]
    alarms: dict[str, str]  # by name of the layer


def merge_layers(task: Task, messages: Sequence[Tensors], shares: Tensor, solve: Solve, aggregated: Tensor) -> Merged:
    """Solve for every layer, and write the matrices into `aggregated` (P,)."""
    residual, num_steps, alarms, factors = 0.0, 0, dict[str, str](), Tensors()
    for layer in kronecker.find_layers(task.model):
        posteriors = read_posteriors(layer, messages, shares)
        matrix, steps, alarm = solve(posteriors)
        if alarm:
            alarms[layer.name] = alarm
        layer.write(aggregated, matrix)
        residual, num_steps = max(residual, posteriors.residual(matrix)), num_steps + steps
        for name, each in (("A", posteriors.a), ("B", posteriors.b)):
            factors[f"{layer.name}.{name}"] = posteriors.mean_factor(each).float()
    found = {"residual": residual, "solver_steps": num_steps, "unsolved_layers": len(alarms)}
    return Merged(factors, {name: float(value) for name, value in found.items()}, alarms)


def solve_exactly(posteriors: kronecker.Posteriors, tolerance: float, max_steps: int) -> tuple[Tensor, int, str]:
    """Take conjugate gradients to the tolerance, from the closed form."""
    start = posteriors.approximate_inverse()(posteriors.right_side())
    matrix, steps = posteriors.conjugate_gradients(start, tolerance, max_steps)
    found = posteriors.residual(matrix)
    short = steps == max_steps and found > tolerance
    stopped = f"conjugate gradients stopped after {steps} steps at a residual of {found:.1e}, not {tolerance:.1e}"
    return matrix, steps, f"{stopped}; raise method.max_steps or method.damping" if short else ""


def average_curvature(messages: Sequence[Tensors], shares: Tensor) -> Tensors:
    """Average what `measure_curvature` made, in float64; factors become matrices."""
    means: Tensors = {}
    for name in messages[0].keys() - {"params"}:
        mean = WeightedMean()
        for message, share in zip(messages, shares.tolist(), strict=True):
            mean.add(message[name], share)
        means[name] = mean.result() if name == "precision" else kronecker.from_upper_triangle(mean.result())
    return means


def weigh_means(messages: Sequence[Tensors], shares: Tensor) -> Tensor:
    """Sum p_k F_k theta_k for diagonal F_k, (D,) in float64."""
    mean = WeightedMean()
    for message, share in zip(messages, shares.tolist(), strict=True):
        precision = message["precision"].double()
        mean.add(precision * message["params"][: len(precision)], share)
    return mean.result()


def make_laplace(task: Task, state: Tensors, layers: Layers) -> LaplacePosterior:
    """Make the posterior of all clients' examples around `params`, of a diagonal `precision` or of mean factors."""
    num_examples = sum(task.sizes)
    if "precision" in state:
        return laplace(task, state["params"], num_examples * state["precision"], layers)
    names = [layer.name for layer in kronecker.find_layers(task.model)]
    factors = {name: (state[f"{name}.A"], state[f"{name}.B"]) for name in names}
    return kronecker_laplace(task, state["params"], factors, num_examples, layers)


def accuracy_on_server(task: Task, params: Tensor) -> float:
    """Compute the share of the server's labelled examples that a model (P,) classifies correctly."""
    data = task.server_data
    assert data is not None  # `build` sees to what a method needs
    assert data.y is not None
    prediction = average(task.model, [params], data.x, 1000, task.likelihood.mixture())
    assert isinstance(prediction, Prediction)  # of classes, which these methods need
    return (task.decide(prediction.log_probabilities) == data.y).double().mean().item()
