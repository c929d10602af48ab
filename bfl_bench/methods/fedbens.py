"""FedBEns: several modes of the product of the clients' mixtures of Laplace approximations, which predict together.

Talpini, Savi, Neglia: "FedBEns: One-Shot Federated Learning based on Bayesian Ensemble", ICML 2025. Every client trains
M networks from the M common initial models and takes a Laplace approximation at each, with the precision n_k F / T +
I / v: F the true Fisher information of an example (`structure`), T a temperature, v the variance of the prior. Its
posterior is the mixture of these M Gaussians, all alike. The server climbs on the log density of the product of all
clients' posteriors, in which the prior is to stand once,
sum_k log (1/M sum_i N(theta; theta_ki, P_ki^-1)) - (K - 1) log N(theta; 0, v),
M times, from the median over clients of their i-th networks, with Adam. The M solutions predict together.

Deviations: `keep: best` keeps the iterate with the highest density for either structure; the authors' code does so with
Kronecker factors, where it clips gradients to norm 1, and takes the last one of 1000 steps without clipping with
diagonals. `keep: accuracy` is its choice by labelled data of the server, and `server_variance: 1` the prior that its
diagonal script divides by, although clients used 0.1. In further rounds clients start from the M solutions.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean, step_towards
from bfl_bench.checks import Above, AtLeast
from bfl_bench.inference.merging import Structure, accuracy_on_server, check_structure, measure_curvature
from bfl_bench.inference.mixtures import Component, log_product, read_curvature
from bfl_bench.inference.train import Adam, train
from bfl_bench.method import Client, Method, Needs, Replies, Task, Tensors, Update
from bfl_bench.rng import derive_seed


@dataclass(frozen=True)
class FedBens(Method):
    """State and local model are `{"params": (M, P)}`; a message has curvatures with M rows beside it."""

    members: Annotated[int, AtLeast(1)]
    structure: Structure
    temperature: Annotated[float, Above(0)]
    variance: Annotated[float, Above(0)]
    server_variance: Annotated[float, Above(0)] | None
    steps: Annotated[int, AtLeast(0)]
    lr: Annotated[float, Above(0)]
    clip: Annotated[float, Above(0)] | None
    keep: Literal["best", "last", "accuracy"]

    @property
    def needs(self) -> Needs:
        data: Literal["labelled", "none"] = "labelled" if self.keep == "accuracy" else "none"
        return Needs(num_initials=self.members, server_data=data)

    def check(self, task: Task) -> None:
        check_structure(task, self.structure, "model")

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        return {"params": task.initials.clone()}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        messages, metrics = list[Tensors](), list[dict[str, float]]()
        for member, start in enumerate(broadcast["params"]):
            stream = torch.Generator().manual_seed(derive_seed(rng.initial_seed(), "member", member))
            trained = train(task, start, client, stream)
            found = measure_curvature(task, trained.vector, client, stream, self.structure, "model")
            messages.append({"params": trained.vector} | found)
            metrics.append(trained.metrics)
        message = {name: torch.stack([each[name] for each in messages]) for name in messages[0]}
        means = {name: sum(each[name] for each in metrics) / self.members for name in metrics[0]}
        return Update(message=message, local={"params": message["params"]}, metrics=means)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        size = task.model.layout.num_trainable
        mean, clients, models = WeightedMean(), list[list[Component]](), list[Tensor]()
        for client_id, message in replies:
            mean.add(message["params"], task.weight(self.weights, client_id))
            models.append(message["params"][:, :size].double())
            rows = [{name: value[member] for name, value in message.items()} for member in range(self.members)]
            clients.append([self._read(task, row, task.sizes[client_id]) for row in rows])
        new = mean.result()  # of statistics of the network, which no Gaussian is about
        for params, start in zip(new, torch.stack(models).quantile(0.5, dim=0), strict=True):
            params[:size] = start
            self._climb(task, params, clients, rng)
        return {"params": step_towards(state["params"], new, task.server.lr)}, {}

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        yield from model["params"][:num]

    def _read(self, task: Task, message: Tensors, num_examples: int) -> Component:
        curvature, scale, shift = read_curvature(task, message), num_examples / self.temperature, 1 / self.variance
        mean = message["params"][: task.model.layout.num_trainable].double()
        found = curvature.log_determinant(scale, shift)
        return Component(mean=mean, curvature=curvature, scale=scale, shift=shift, log_determinant=found)

    def _climb(self, task: Task, params: Tensor, clients: list[list[Component]], rng: torch.Generator) -> None:
        """Move `params` (P,) uphill in place, to the iterate that is to be kept."""
        theta = params[: task.model.layout.num_trainable]  # a view
        adam, prior_precision = Adam((0.9, 0.999)), 1 / (self.server_variance or self.variance)
        memory, best, best_score = adam.begin(theta), theta.clone(), -math.inf
        gradient, clip = theta, self.clip or math.inf

        def downhill(_: Tensor | None) -> Tensor:
            return gradient.mul(-min(1.0, clip / (gradient.norm().item() + 1e-6)))

        for step in range(self.steps + 1):
            value, gradient = log_product(theta, clients, prior_precision)
            if self.keep != "last":
                score = accuracy_on_server(task, params) if self.keep == "accuracy" else value.item()
                if score > best_score:
                    best, best_score = theta.clone(), score
            if step < self.steps:
                adam.step(theta, downhill, memory, self.lr, rng)
        if self.keep != "last":
            theta.copy_(best)
