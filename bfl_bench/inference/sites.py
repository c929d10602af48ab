"""What VIRTUAL's factors are made of: natural parameters of a flat vector, sparse ratios, private parts of networks.

`count_shared` says where the shared part of a network ends; a factor is over the shared Gaussian weights only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bfl_bench.inference.train import Adjust
from bfl_bench.inference.variational import Prior, settings_of
from bfl_bench.method import Task, Tensors
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


def prune(changes: Tensor, percent: float) -> Tensors:
    """A ratio of factors (2, D), changes of precision and shift, as it is sent: in float32, the weakest part left out.

    Strength is the signal-to-noise ratio of the ratio as a Gaussian, |shift| / sqrt(|precision|).
    """
    changes = changes.float()
    if percent == 0:
        return {"changes": changes}
    strength = changes[1].abs() / changes[0].abs().sqrt().clamp(min=torch.finfo(changes.dtype).tiny)
    num_kept = changes.shape[1] - round(changes.shape[1] * percent / 100)
    kept = strength.topk(num_kept).indices.sort().values
    return {"changes": changes[:, kept], "kept": kept.int()}


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
