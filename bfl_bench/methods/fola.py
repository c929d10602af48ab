"""FOLA: online Laplace approximations on the clients, a product of Gaussians on the server.

Liu, Zheng, Chen, Qi, Huang, Shao: "A Bayesian Federated Learning Framework with Online Laplace Approximation", IEEE
TPAMI 2023, Algorithm 1. What the box calls Sigma is a precision here, as its use shows. The server keeps a mean and a
precision; a client trains from the mean, pulled to it with strength `prior_weight` times the precision (eqs.
15-16), adds up squared gradients on its way (eq. 22), and returns its mean and precision (eq. 24), which the server
multiplies (eq. 12). For small networks (Sec. IV-E) the precision can also be the full Hessian, or its eigenvalues in
ascending order on a diagonal, "e-full" in the paper; both are taken at the end of local training.

Deviations: eq. 25 adds gamma to the server's precision, eq. 24 would scale it away; here so much of gamma enters at
each aggregation that the server's precision always holds it once. In the first round the prior is N(0, 1/gamma). Where
all precisions and `eps` are zero, as at a pixel that is black in all images, the mean is the plain average.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from bfl_bench.aggregators import Combination, Rule, WeightedMean, step_towards
from bfl_bench.aggregators.algebra import MeanCosine, diagonal, multiply, shift, solve
from bfl_bench.checks import AtLeast
from bfl_bench.errors import ConfigError
from bfl_bench.inference.curvature import (
    Fisher,
    check_expected_gradient,
    check_hessian,
    diagonal_fisher,
    eigenvalues,
    mean_hessian,
    squared_gradient,
)
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Method, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class Fola(Method):
    aggregator: Rule | None  # None: the product of Gaussians, on precisions
    prior_loss: bool
    prior_weight: Annotated[float, AtLeast(0)]
    prior_gradient: bool
    structure: Literal["diagonal", "full", "eigenvalue"]
    fisher: Fisher
    evaluation: Literal["online", "offline"]
    average_steps: bool
    round_scaling: bool
    gamma: Annotated[float, AtLeast(0)]
    eps: Annotated[float, AtLeast(0)]

    def __post_init__(self) -> None:
        if self.aggregator is not None and self.gamma == 0:
            raise ConfigError("gamma", self.gamma, "a number above 0 with this aggregator, which needs variances")
        if self.aggregator is not None and self.structure == "full":
            raise ConfigError("structure", self.structure, "diagonal or eigenvalue with an aggregator other than none")

    def check(self, task: Task) -> None:
        if self.structure != "diagonal":
            check_hessian(task)
        elif self.fisher == "model":
            check_expected_gradient(task)

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        precision = torch.full_like(task.model.gradient, self.gamma)
        if self.structure == "full":
            precision = precision.diag()
        return {"params": task.model.initial.clone(), "precision": precision, "round": precision.new_zeros(())}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        round_ = broadcast["round"].item() + 1
        prior_precision = broadcast["precision"]
        prior_mean = broadcast["params"][: len(prior_precision)]
        if round_ == 1:
            prior_mean = torch.zeros_like(prior_mean)
        strength = self.prior_weight if self.round_scaling else self.prior_weight / round_
        pulled = self.prior_loss and self.prior_gradient and strength > 0
        online = self.evaluation == "online"
        on_the_way = online and self.structure == "diagonal"
        passes = task.local.epochs if self.average_steps else 1
        fisher = torch.zeros_like(task.model.gradient)

        def accumulate_and_pull(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
            share = len(y) / (len(client) * passes)
            if on_the_way and self.fisher == "batch_gradient":
                fisher.addcmul_(gradient, gradient, value=share)
            elif on_the_way:
                fisher.add_(squared_gradient(task, x, y, self.fisher), alpha=share)
            if pulled:
                gradient.add_(multiply(prior_precision, parameters - prior_mean), alpha=strength)

        trained = train(task, broadcast["params"], client, rng, adjust=accumulate_and_pull)
        precision, num_repaired = (fisher, 0) if on_the_way else self._curvature_at(trained.vector, task, client, rng)
        if online and round_ > 1:  # in the first round the prior's precision is gamma, which is the server's to add
            scale = round_ if self.round_scaling else 1.0
            precision = precision / scale + ((round_ - 1) / round_ if self.round_scaling else 1.0) * prior_precision
        metrics = {**trained.metrics, "repaired": float(num_repaired)}
        if self.prior_loss:
            moved = trained.vector[: len(prior_precision)] - prior_mean
            metrics["prior_loss"] = 0.5 * strength * (moved @ multiply(prior_precision, moved)).item()
        message = {"params": trained.vector, "precision": precision}
        return Update(message=message, local={"params": trained.vector}, metrics=metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        size = len(state["precision"])
        round_ = state["round"].item() + 1
        points, precisions, products, cosine = WeightedMean(), WeightedMean(), WeightedMean(), MeanCosine()
        gaussians = self.aggregator and Combination(self.aggregator, rng, lambda sent: 1 / (sent + self.gamma))
        for client_id, message in replies:
            weight = task.weight(self.weights, client_id)
            points.add(message["params"], weight)
            cosine.add(message["precision"])
            if gaussians is not None:
                gaussians.add(message["params"][:size], message["precision"], weight)
            else:
                precision = message["precision"].double()
                precisions.add(precision, weight)
                products.add(multiply(precision, message["params"][:size].double()), weight)
        aggregated = points.result()
        if gaussians is not None:
            aggregated[:size], variance = gaussians.result()
            precision = 1 / variance
        else:
            precision = shift(precisions.result(), self.gamma * self._share_of_gamma(round_))
            aggregated[:size] = solve(shift(precision, self.eps), products.result(), fallback=aggregated[:size])
        new = {
            "params": step_towards(state["params"], aggregated, task.server.lr),
            "precision": precision.to(state["precision"].dtype),
            "round": state["round"] + 1,
        }
        metrics = {"precision_zero": (diagonal(precision) == 0).double().mean().item()}
        if (similarity := cosine.result()) is not None:
            metrics["precision_cosine"] = similarity
        return new, metrics

    def _curvature_at(self, vector: Tensor, task: Task, client: Client, rng: torch.Generator) -> tuple[Tensor, int]:
        """The curvature of the client's loss at `vector`, in this method's structure, and how much was repaired."""
        if self.structure == "diagonal":
            return diagonal_fisher(task, vector, client, rng, self.fisher), 0
        hessian, num_repaired = mean_hessian(task, vector, client, rng)
        return hessian if self.structure == "full" else eigenvalues(hessian), num_repaired

    def _share_of_gamma(self, round_: float) -> float:
        """How much of gamma the clients' precisions lack; they carry on what the server's held in the last round."""
        if round_ == 1 or self.evaluation == "offline":
            return 1.0
        return 1 / round_ if self.round_scaling else 0.0
