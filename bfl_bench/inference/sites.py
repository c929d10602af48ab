"""What VIRTUAL's factors are made of: natural parameters of a flat vector, sparse ratios, private parts of networks.

`count_shared` says where the shared part of a network ends; a factor is over the shared Gaussian weights only.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bfl_bench.inference.train import Adjust, AfterStep, Gradient
from bfl_bench.inference.variational import Prior, settings_of
from bfl_bench.method import Task, Tensors
from bfl_bench.models.flat import Layout
from bfl_bench.models.lateral import GATES, count_shared


def natural(task: Task, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Precision and shift (precision x mean) of the shared Gaussian weights, in float64."""
    layout = task.model.layout
    _, num_means = count_shared(layout)
    log_variance = settings_of(task).clamp(vector[layout.log_variances][:num_means])
    precision = (-log_variance.double()).exp()
    return precision, precision * vector[layout.means][:num_means].double()


def read_private(task: Task, vector: Tensor) -> Tensor:
    """The private part of a vector: points and gates, means, log variances."""
    layout = task.model.layout
    num_points, num_means = count_shared(layout)
    means, log_variances = vector[layout.means][num_means:], vector[layout.log_variances][num_means:]
    return torch.cat([vector[layout.points][num_points:], means, log_variances])


def write_private(task: Task, vector: Tensor, private: Tensor) -> None:
    layout = task.model.layout
    num_points, num_means = count_shared(layout)
    sizes = [layout.points.stop - num_points, *[layout.means.stop - layout.means.start - num_means] * 2]
    points, means, log_variances = torch.split(private, sizes)
    vector[layout.points][num_points:] = points
    vector[layout.means][num_means:] = means
    vector[layout.log_variances][num_means:] = log_variances


def close_gates(task: Task, vector: Tensor) -> None:
    """The server's network is the shared one alone."""
    for entry in task.model.layout.entries:
        if entry.name.startswith(GATES):
            entry.view(vector).zero_()


def start_from_server(task: Task, vector: Tensor, server: Tensors, factor: Sequence[Tensor]) -> None:
    """The "FedAvg init" of VIRTUAL: factor and private network forget what the client has learnt.

    `factor`, precision and shift, is the server's share in place of the client's own factor, as a ratio; where the
    posterior would be improper with it, it stays the server's. The private network gets the shared one's parameters.
    """
    layout = task.model.layout
    num_points, num_means = count_shared(layout)
    precision, shift = server["precision"] + factor[0], server["shift"] + factor[1]
    proper = precision > 0
    mean = torch.where(proper, shift / precision, server["shift"] / server["precision"])
    precision = torch.where(proper, precision, server["precision"])
    vector[layout.means][:num_means] = mean.to(vector.dtype)
    vector[layout.log_variances][:num_means] = -precision.log().to(vector.dtype)
    for part, num in ((layout.points, num_points), (layout.means, num_means), (layout.log_variances, num_means)):
        private = vector[part][num : 2 * num]  # nothing, in a network without a private part; the gates come after
        private.copy_(vector[part][: len(private)])


def project_gates(task: Task) -> AfterStep | None:
    """Set gates that a step has made negative to zero, where they have a gradient again; None: there are no gates."""
    gates = [entry for entry in task.model.layout.entries if entry.name.startswith(GATES)]
    if not gates:
        return None
    where = slice(gates[0].start, gates[-1].stop)

    def project(parameters: Tensor, epoch_ends: bool) -> None:
        parameters[where].clamp_(min=0.0)

    return project


def damp(task: Task, vector: Tensor, server: Tensors, damping: float) -> Tensor:
    """Raise what a client has learnt of the shared network to the power of the damping: s (s_new / s)^damping."""
    layout = task.model.layout
    num_points, num_means = count_shared(layout)
    learnt = zip(natural(task, vector), (server["precision"], server["shift"]), strict=True)
    precision, shift = (old + damping * (new - old) for new, old in learnt)
    damped = vector.clone()
    damped[layout.points][:num_points].lerp_(server["params"][layout.points][:num_points], 1 - damping)
    damped[layout.means][:num_means] = (shift / precision).to(vector.dtype)
    damped[layout.log_variances][:num_means] = -precision.log().to(vector.dtype)
    return damped


@dataclass(frozen=True)
class NaturalSgd:
    """SGD on the natural parameters of Gaussian weights, shift and precision; on points as ever.

    The gradients there follow from those of means and log variances: with m the mean and p the precision, that of the
    shift is g_mean / p, that of the precision -(m g_mean + g_log_variance) / p. A step changes the mean by about
    rate / p^2 times its gradient: weights of low precision take large steps.
    """

    layout: Layout
    rate: float
    floor: Tensor  # (D,) of the precision; a step that ends below it ends at it

    def begin(self, parameters: Tensor) -> Tensors:
        return {}

    def step(self, parameters: Tensor, gradient: Gradient, memory: Tensors, lr: float, rng: torch.Generator) -> None:
        layout, change = self.layout, gradient(None)
        mean, log_variance = parameters[layout.means], parameters[layout.log_variances]
        rate = self.rate * (2 * log_variance).exp()
        growth = 1 + rate * (mean * change[layout.means] + change[layout.log_variances])  # of the precision
        growth = torch.maximum(growth, self.floor * log_variance.exp())
        mean.sub_(rate * change[layout.means]).div_(growth)
        log_variance.sub_(growth.log())
        parameters[layout.points].add_(change[layout.points], alpha=-lr)


def hidden_weights(task: Task) -> list[slice]:
    """List where the shared Gaussian weights of each layer lie among them, without the last layer's, the outputs'."""
    layout = task.model.layout
    _, num_means = count_shared(layout)
    starts = [entry.start - layout.means.start for entry in layout.entries if layout.means.start <= entry.start]
    bounds = [start for start in starts if start < num_means]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def prune(changes: Tensor, precision: Tensor, percent: float, layers: Sequence[slice]) -> Tensors:
    """A ratio of factors (2, D), changes of precision and shift, as it is sent: of these layers without the weakest.

    Strength is |change of the shift| / sqrt(|precision|), with the precision (D,) of the factor itself: the change of
    the precision, which may be nothing but rounding, says nothing about noise. Each layer loses the same percentage.
    """
    if percent == 0:
        return {"changes": changes}
    strength = changes[1].abs() / precision.abs().sqrt().clamp(min=torch.finfo(precision.dtype).tiny)
    kept = torch.ones_like(strength, dtype=torch.bool)
    for layer in layers:
        num_left_out = round((layer.stop - layer.start) * percent / 100)
        kept[layer][strength[layer].topk(num_left_out, largest=False).indices] = False
    where = kept.nonzero().flatten()
    return {"changes": changes[:, where], "kept": where.int()}


def unprune(message: Tensors, size: int) -> Tensor:
    """(2, size) in float64, zero where nothing was sent."""
    changes = message["changes"].double()
    if "kept" not in message:
        return changes
    whole = changes.new_zeros(2, size)
    whole[:, message["kept"].long()] = changes
    return whole


def pull_as_released(prior: Prior, task: Task, scale: float) -> Adjust:
    """The gradient of the KL divergence as VIRTUAL's released code has it.

    It divides the prior's shift by the posterior's precision instead of the prior's own: the prior's mean is then m p v
    with m and p its mean and precision and v the posterior's variance.
    """
    layout, settings = task.model.layout, settings_of(task)
    precision = prior.log_precision.exp()

    def add_gradient(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
        ratio = (settings.clamp(parameters[layout.log_variances]) + prior.log_precision).exp()  # p v
        difference = parameters[layout.means] - prior.mean * ratio
        gradient[layout.means].add_(precision * difference, alpha=scale)
        gradient[layout.log_variances].add_(
            0.5 * (ratio - 1) - precision * difference * prior.mean * ratio, alpha=scale
        )

    return add_gradient
