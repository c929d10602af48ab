"""FedFisher: the model that is nearest to all clients' in the metric of their Fisher information, in one round.

Jhunjhunwala, Wang, Joshi: "FedFisher: Leveraging Fisher Information for One-Shot Federated Learning", AISTATS 2024.
Clients train as in FedAvg and take the Fisher information F_k of an example at their model theta_k, diagonal or by
Kronecker factors (`structure`). The server minimises sum p_k (theta - theta_k)'F_k (theta - theta_k). With
`solver: exact` a diagonal has a closed form, which is `fisher_merging`, and Kronecker factors are solved by conjugate
gradients, as in `fedlpa`.

`solver: descent` is the authors' code: with v = sum p_k F_k (theta - theta_k), `descent_steps` steps from the average
u = 0.9 u + v;  r = 0.99 r + v^2;  theta = theta - descent_lr u / (sqrt(r) + 0.01), for Kronecker u / sqrt(r + 0.01)
and with `select_every` the iterate that is the best on labelled examples of the server, tried every so many steps.

Deviations: messages are not compressed, where the authors send no more than the model's size. The Fisher information is
that of the predicted labels, or with `fisher: data` of the data's. Kronecker factors are damped as in FedLPA (eq. 30
there), since an exact solution needs it. In further rounds clients start from the merged model.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from bfl_bench.aggregators.algebra import solve
from bfl_bench.checks import Above, AtLeast
from bfl_bench.errors import ConfigError
from bfl_bench.inference import kronecker
from bfl_bench.inference.laplace import LaplacePosterior
from bfl_bench.inference.merging import (
    Structure,
    accuracy_on_server,
    average_curvature,
    check_structure,
    make_laplace,
    measure_curvature,
    merge_layers,
    read_posteriors,
    read_replies,
    solve_exactly,
    weigh_means,
)
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Layers, Needs, Predictive, Replies, Task, Tensors, Update

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FedFisher(PointMethod):
    predictives: ClassVar[tuple[Predictive, ...]] = ("mean", "draws", "linearised")

    structure: Structure
    fisher: kronecker.Labels
    solver: Literal["exact", "descent"]
    damping: Annotated[float, AtLeast(0)]
    tolerance: Annotated[float, Above(0)]
    max_steps: Annotated[int, AtLeast(1)]
    descent_steps: Annotated[int, AtLeast(1)]
    descent_lr: Annotated[float, Above(0)]
    select_every: Annotated[int, AtLeast(1)] | None

    def __post_init__(self) -> None:
        if self.solver == "exact" and self.structure == "kronecker" and self.damping == 0:
            raise ConfigError("damping", self.damping, "a number above 0 with solver exact and structure kronecker")
        if self.solver == "exact" and self.select_every is not None:
            raise ConfigError("select_every", self.select_every, "null with solver exact, which has no iterates")

    @property
    def needs(self) -> Needs:
        return Needs(any_server_step=True, server_data="none" if self.select_every is None else "labelled")

    def check(self, task: Task) -> None:
        check_structure(task, self.structure, self.fisher)

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        trained = train(task, broadcast["params"], client, rng)
        found = measure_curvature(task, trained.vector, client, rng, self.structure, self.fisher, self.damping)
        message = {"params": trained.vector} | found
        return Update(message=message, local={"params": trained.vector}, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        messages, shares, aggregated = read_replies(task, self.weights, replies)
        curvature, metrics = average_curvature(messages, shares), dict[str, float]()
        if self.solver == "descent":
            aggregated = self._descend(task, aggregated, _make_gradient(task, messages, shares))
        elif self.structure == "diagonal":
            size = len(curvature["precision"])
            right = weigh_means(messages, shares)
            aggregated[:size] = solve(curvature["precision"], right, fallback=aggregated[:size])
        else:
            merged = merge_layers(task, messages, shares, self._solve, aggregated)
            metrics = merged.metrics
            for name, alarm in merged.alarms.items():
                log.warning("fedfisher: layer %s: %s", name, alarm)
        kept = {name: value.to(state["params"].dtype) for name, value in curvature.items()}
        return task.server.move(state, aggregated) | kept, metrics

    def laplace(self, task: Task, state: Tensors, layers: Layers) -> LaplacePosterior:
        return make_laplace(task, state, layers)

    def _solve(self, posteriors: kronecker.Posteriors) -> tuple[Tensor, int, str]:
        return solve_exactly(posteriors, self.tolerance, self.max_steps)

    def _descend(self, task: Task, start: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
        """Take the steps from `start` (P,); return the last iterate, or the most accurate of those looked at."""
        params, size = start.clone(), task.model.layout.num_trainable
        theta = params[:size]  # a view
        momentum, squares = torch.zeros_like(theta), torch.zeros_like(theta)
        best, best_accuracy = params, -1.0
        for step in range(1, self.descent_steps + 1):
            v = gradient(theta)
            momentum = 0.9 * momentum + v
            squares = 0.99 * squares + v.square()
            root = squares.sqrt() + 0.01 if self.structure == "diagonal" else (squares + 0.01).sqrt()
            theta -= self.descent_lr * momentum / root
            if self.select_every is not None and step % self.select_every == 0:
                accuracy = accuracy_on_server(task, params)
                if accuracy > best_accuracy:
                    best, best_accuracy = params.clone(), accuracy
        return best


def _make_gradient(task: Task, messages: Sequence[Tensors], shares: Tensor) -> Callable[[Tensor], Tensor]:
    """Make theta -> sum p_k F_k (theta - theta_k), on the trainable parameters (D,)."""
    if "precision" in messages[0]:
        precision, right = average_curvature(messages, shares)["precision"], weigh_means(messages, shares)
        return lambda theta: precision * theta - right
    layers = [(layer, read_posteriors(layer, messages, shares)) for layer in kronecker.find_layers(task.model)]
    sides = [posteriors.right_side() for _, posteriors in layers]

    def gradient(theta: Tensor) -> Tensor:
        result = torch.zeros_like(theta)
        for (layer, posteriors), side in zip(layers, sides, strict=True):
            layer.write(result, posteriors.apply(layer.read(theta)) - side)
        return result

    return gradient
