"""FedLap-Cov: FedLap whose sites have a curvature, learnt by Laplace approximations.

Swaroop, Khan, Doshi-Velez: "Connecting Federated ADMM to Bayes", ICLR 2025. Sites, server and memory are those of
inference/duals.py: the server's Gaussian is the prior times the product of the sites. With f_k the sum of client k's
losses, a client minimises f_k(w) + v_k'w - w'V_k w / 2 + (w - m)'S (w - m) / 2. With H_k the diagonal of the
generalised Gauss-Newton matrix of f_k there, the precision of its Gaussian is S_k = H_k - V_k + S, and so its site's
precision is V_k = (1 - damping) V_k + damping H_k, which is never negative. With exact curvatures this is partitioned
variational inference.

Deviations: clients take `local.epochs` instead of solving their problem.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bfl_bench.evaluation.truth import Moments
from bfl_bench.inference.curvature import Fisher, check_expected_gradient, diagonal_fisher
from bfl_bench.inference.duals import Cavity, DualMethod
from bfl_bench.inference.train import Trained, train
from bfl_bench.method import Client, Task, Tensors


@dataclass(frozen=True)
class FedLapCov(DualMethod):
    fisher: Fisher
    draws_from: Literal["mean", "posterior"]

    def check(self, task: Task) -> None:
        if self.fisher == "model":
            check_expected_gradient(task)

    def fit(
        self, task: Task, start: Tensor, cavity: Cavity, client: Client, rng: torch.Generator
    ) -> tuple[Trained, Tensor]:
        strength = (cavity.precision - cavity.site_precision) / len(client)
        offset = (cavity.site_shift - cavity.precision * cavity.mean) / len(client)

        def pull(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
            gradient.add_(offset).addcmul_(strength, parameters)

        trained = train(task, start, client, rng, adjust=pull)
        curvature = len(client) * diagonal_fisher(task, trained.vector, client, rng, self.fisher)
        return trained, curvature - cavity.site_precision + cavity.precision

    def step(self, task: Task) -> float:
        return 1 / len(task.sizes) if self.damping is None else self.damping

    def share(self, task: Task) -> float:
        return 1.0

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        return iter([model["params"]]) if self.draws_from == "mean" else super().draws(task, model, num, rng)

    def weight_moments(self, task: Task, state: Tensors) -> Moments | None:
        return None if self.draws_from == "mean" else super().weight_moments(task, state)
