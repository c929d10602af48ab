"""FOLA: online Laplace approximations on the clients, a product of Gaussians on the server.

Liu, Zheng, Chen, Qi, Huang, Shao: "A Bayesian Federated Learning Framework with Online Laplace Approximation", IEEE
TPAMI 2023, Algorithm 1. What the box calls Sigma is a precision here, as its use shows. The server keeps a mean and a
precision; a client trains from the mean, pulled to it with strength `prior_weight` times the precision (eqs.
15-16), adds up squared gradients on its way (eq. 22), and returns its mean and precision (eq. 24), which the server
multiplies (eq. 12). For small networks (Sec. IV-E) the precision can also be the full Hessian, or its eigenvalues in
ascending order on a diagonal, "e-full" in the paper; both are taken at the end of local training.

Algorithm 1 prints a sum of squared minibatch gradients over all steps, eq. 22 the mean over epochs of single examples',
the released code sums |b|/n g_b^2: `fisher`, `batch_weight` and `average_steps` give all of these. Taken here is the
mean over epochs of squared minibatch gradients. It is smaller than the printed sum by the number of steps, and so is
the prior loss: at lambda = 1 it does next to nothing, so lambda is to be chosen (the released scripts have 100 to 10
000).

Deviations: eq. 24 would scale the gamma of the initial prior N(0, 1/gamma) down to gamma / r, eq. 25 keeps it whole, as
it is here: what a client learns in a round has the curvature F_n + gamma I (eq. 20), in its loss, as a weight decay,
and in what it sends, (F_n + gamma I) / r + (r - 1) / r Sigma_S^-1. The product of these holds gamma once, in mean and
precision, and the server adds nothing: on a quadratic problem that is solved exactly, with lambda = r - 1 in round r,
it is the posterior of the pooled data in every round. lambda does not multiply gamma. Where all precisions and `eps`
are zero, as at a pixel that is black in all images, the mean is the plain average.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

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
from bfl_bench.inference.duals import PrecisionMethod
from bfl_bench.inference.laplace import LaplacePosterior, laplace
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Layers, Predictive, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class Fola(PrecisionMethod):
    predictives: ClassVar[tuple[Predictive, ...]] = ("mean", "draws", "linearised")

    aggregator: Rule | None  # None: the product of Gaussians, on precisions
    prior_loss: bool
    prior_weight: Annotated[float, AtLeast(0)]
    prior_gradient: bool
    structure: Literal["diagonal", "full", "eigenvalue"]
    fisher: Fisher
    evaluation: Literal["online", "offline"]
    average_steps: bool
    batch_weight: Literal["share", "one"]
    round_scaling: bool
    server_mean: Literal["product", "average"]
    gamma: Annotated[float, AtLeast(0)]
    eps: Annotated[float, AtLeast(0)]

    def __post_init__(self) -> None:
        if self.aggregator is not None and self.gamma == 0:
            raise ConfigError("gamma", self.gamma, "a number above 0 with this aggregator, which needs variances")
        if self.aggregator is not None and self.structure == "full":
            raise ConfigError("structure", self.structure, "diagonal or eigenvalue with an aggregator other than none")
        if self.aggregator is not None and self.server_mean == "average":
            raise ConfigError(
                "server_mean", self.server_mean, "product with an aggregator, which has a mean of its own"
            )

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
        strength = self.prior_weight if self.round_scaling else self.prior_weight / round_
        online = self.evaluation == "online"
        carried = online and round_ > 1  # the server's precision, which holds gamma, goes on in the client's
        decay = 0.0 if carried and not self.round_scaling else self.gamma
        pulled = self.prior_loss and self.prior_gradient and strength > 0 and round_ > 1
        on_the_way = online and self.structure == "diagonal"
        passes = task.local.epochs if self.average_steps else 1
        fisher = torch.zeros_like(task.model.gradient)

        def accumulate_and_pull(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
            share = len(y) / (len(client) * passes) if self.batch_weight == "share" else 1 / passes
            if on_the_way and self.fisher == "batch_gradient":
                fisher.addcmul_(gradient, gradient, value=share)
            elif on_the_way:
                fisher.add_(squared_gradient(task, x, y, self.fisher), alpha=share)
            if pulled:
                gradient.add_(multiply(prior_precision, parameters - prior_mean), alpha=strength)
            if decay:
                gradient.add_(parameters, alpha=decay)

        trained = train(task, broadcast["params"], client, rng, adjust=accumulate_and_pull)
        precision, num_repaired = (fisher, 0) if on_the_way else self._curvature_at(trained.vector, task, client, rng)
        if decay:
            precision = shift(precision, decay)
        if carried:
            scale = round_ if self.round_scaling else 1.0
            precision = precision / scale + ((round_ - 1) / round_ if self.round_scaling else 1.0) * prior_precision
        metrics = {**trained.metrics, "repaired": float(num_repaired)}
        if self.prior_loss:
            last = trained.vector[: len(prior_precision)]
            moved = (last - prior_mean) if round_ > 1 else torch.zeros_like(last)
            pull = strength * (moved @ multiply(prior_precision, moved)).item()
            metrics["prior_loss"] = 0.5 * (pull + decay * last.square().sum().item())
        message = {"params": trained.vector, "precision": precision}
        return Update(message=message, local=message, metrics=metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        size = len(state["precision"])
        points, precisions, products, cosine = WeightedMean(), WeightedMean(), WeightedMean(), MeanCosine()
        gaussians = self.aggregator and Combination(self.aggregator, rng, torch.reciprocal)
        for client_id, message in replies:
            weight = task.weight(self.weights, client_id)
            points.add(message["params"], weight)
            cosine.add(message["precision"])
            if gaussians is not None:
                gaussians.add(message["params"][:size], message["precision"], weight)
            else:
                precision = message["precision"].double()
                precisions.add(precision, weight)
                if self.server_mean == "product":
                    products.add(multiply(precision, message["params"][:size].double()), weight)
        aggregated = points.result()
        if gaussians is not None:
            aggregated[:size], variance = gaussians.result()
            precision = 1 / variance
        else:
            precision = precisions.result()
            if self.server_mean == "product":
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

    def laplace(self, task: Task, state: Tensors, layers: Layers) -> LaplacePosterior:
        return laplace(task, state["params"], sum(task.sizes) * state["precision"], layers)

    def _curvature_at(self, vector: Tensor, task: Task, client: Client, rng: torch.Generator) -> tuple[Tensor, int]:
        """The curvature of the client's loss at `vector`, in this method's structure, and how much was repaired."""
        if self.structure == "diagonal":
            return diagonal_fisher(task, vector, client, rng, self.fisher), 0
        hessian, num_repaired = mean_hessian(task, vector, client, rng)
        return hessian if self.structure == "full" else eigenvalues(hessian), num_repaired
