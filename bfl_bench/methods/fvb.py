"""Federated variational Bayes: clients fit mean-field Gaussian networks, any rule combines them.

Ozer, Buldu, Akgul, Unal: "How to Combine Variational Bayesian Networks in Federated Learning", 2022 (BFL-P),
Algorithms 1 and 2: with `weights: uniform` it is FVBA, with `weights: size` FVBWA. With only the last layers Gaussian
(`model.bayesian_layers`) and the rules `rklb` and `wb` it is BA-BFL (Jamoussi, Serra, Stavrou, Kountouris, 2024).

A client minimises E_q[NLL] + beta KL(q || prior) / n_k, per example. Points (biases, layers that are not Gaussian) are
averaged. The server's step moves means and log variances.

Deviations: at test time whole parameter vectors are drawn, one for all test examples, where the released codes draw the
noise of every example anew; with Gaussian linear layers the predictive distribution of an example is the same.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from bfl_bench.aggregators import Combination, Rule, WeightedMean, step_towards
from bfl_bench.checks import Above, AtLeast, Interval
from bfl_bench.inference.train import train
from bfl_bench.inference.variational import Prior, draw, settings_of
from bfl_bench.method import Client, Method, Needs, Predictive, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class Fvb(Method):
    predictives: ClassVar[tuple[Predictive, ...]] = ("draws", "mean")
    needs: ClassVar[Needs] = Needs(gaussian_layers=True)

    aggregator: Rule
    beta: Annotated[float, AtLeast(0)]
    prior_variance: Annotated[float, Above(0)]
    prior: Literal["fixed", "previous"]
    train_samples: Annotated[int, AtLeast(1)]
    alarm_variances: Annotated[list[float], Interval()]

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        return {"params": task.model.initial.clone(), "round": torch.zeros((), device=task.model.vector.device)}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        layout = task.model.layout
        if self.prior == "previous" and broadcast["round"] > 0:
            log_variance = settings_of(task).clamp(broadcast["params"][layout.log_variances])
            prior = Prior(broadcast["params"][layout.means], -log_variance)
        else:
            zero = torch.zeros_like(broadcast["params"][layout.means])
            prior = Prior(zero, torch.full_like(zero, -math.log(self.prior_variance)))
        pull = prior.pull(task, self.beta / len(client))
        trained = train(task, broadcast["params"], client, rng, adjust=pull, num_samples=self.train_samples)
        model = {"params": trained.vector}
        return Update(message=model, local=model, metrics={**trained.metrics, "kl": prior.kl(task, trained.vector)})

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        layout = task.model.layout
        points, gaussians = WeightedMean(), Combination(self.aggregator, rng, to_variance=torch.exp)
        for client_id, message in replies:
            params, weight = message["params"], task.weight(self.weights, client_id)
            points.add(params, weight)
            gaussians.add(params[layout.means], params[layout.log_variances], weight)
        aggregated = points.result()
        aggregated[layout.means], variance = gaussians.result()
        aggregated[layout.log_variances] = variance.log()
        params = step_towards(state["params"], aggregated, task.server.lr)
        return {"params": params, "round": state["round"] + 1}, self._diagnose(task, params)

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        return draw(task, model["params"], num, rng)

    def _diagnose(self, task: Task, params: Tensor) -> dict[str, float]:
        """The norm of all standard deviations, the share of log variances that a clamp holds, and an alarm.

        The alarm is -1 where the typical variance, the geometric mean, has collapsed below `alarm_variances[0]`, 1
        where it has exploded above `alarm_variances[1]`, else 0.
        """
        log_variance = params[task.model.layout.log_variances].double()
        if not len(log_variance):
            return {}
        typical = log_variance.mean().exp().item()
        lowest, highest = self.alarm_variances
        passes = settings_of(task).clamp(log_variance) == log_variance
        return {
            "std_norm": log_variance.exp().sum().sqrt().item(),
            "clamped": 1 - passes.double().mean().item(),
            "alarm": float(typical > highest) - float(typical < lowest),
        }
