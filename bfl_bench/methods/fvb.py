"""Federated variational Bayes: clients fit mean-field Gaussian networks, any rule combines them.

Ozer, Buldu, Akgul, Unal: "How to Combine Variational Bayesian Networks in Federated Learning", 2022 (BFL-P),
Algorithms 1 and 2: with `weights: uniform` it is FVBA, with `weights: size` FVBWA. With only the last layers Gaussian
(`model.bayesian_layers`) and the rules `rklb` and `wb` it is BA-BFL (Jamoussi, Serra, Stavrou, Kountouris, 2024).

A client minimises E_q[NLL] + beta KL(q || prior) / n, per example. Points (biases, layers that are not Gaussian) are
averaged. The server's step moves means and log variances.

In the papers n is n_k, the client's own number of examples, and log variances take the means' steps: they hardly move
(docs/results.md, "Posteriors asleep and awake"). That is `examples: own` and `variance_rate: null`, as method
`fvb_published` has it. Here log variances take natural-gradient steps (inference/variational.py), and with `examples:
all` n is that of all clients. The latter follows from the conjugate case, in which a client's precision is
n h_k / beta + 1 / prior_variance, h_k being the curvature of an example's loss: under `rklb` with weights n_k / n the
server's is sum_k n_k h_k / beta + 1 / prior_variance, which is that of all data and one prior, and its mean is theirs,
too. With n_k in the place of n, `rklb`, `eaa`, `wb` and `aalv` give posteriors as wide as a client's, and only `gaa`,
which divides variances by about the number of clients, one as narrow as that of all data, with as many priors.

Deviations: at test time whole parameter vectors are drawn, one for all test examples, where the released codes draw the
noise of every example anew; with Gaussian linear layers the predictive distribution of an example is the same.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from bfl_bench.aggregators import Combination, Rule, WeightedMean, step_towards
from bfl_bench.checks import Above, AtLeast, Interval
from bfl_bench.errors import ConfigError
from bfl_bench.evaluation.posterior import Posterior
from bfl_bench.inference.train import train
from bfl_bench.inference.variational import GaussianLayersMethod, Prior, choose_optimizer, describe, settings_of
from bfl_bench.method import Client, Needs, Predictive, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class Fvb(GaussianLayersMethod):
    predictives: ClassVar[tuple[Predictive, ...]] = ("draws", "mean")
    needs: ClassVar[Needs] = Needs(gaussian_layers=True)

    aggregator: Rule
    beta: Annotated[float, AtLeast(0)]
    prior_variance: Annotated[float, Above(0)]
    prior: Literal["fixed", "previous"]
    train_samples: Annotated[int, AtLeast(1)]
    alarm_variances: Annotated[list[float], Interval()]
    examples: Literal["own", "all"] = "own"
    variance_rate: Annotated[float, Above(0)] | None = None
    warm_up: Annotated[int, AtLeast(0)] = 0

    def check(self, task: Task) -> None:
        if self.variance_rate is not None and self.beta == 0:
            raise ConfigError("method.variance_rate", self.variance_rate, "null with method.beta=0")

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
        scale = self._beta(broadcast["round"]) / (len(client) if self.examples == "own" else sum(task.sizes))
        trained = train(
            task,
            broadcast["params"],
            client,
            rng,
            optimizer=choose_optimizer(task, self.variance_rate, scale),
            adjust=prior.pull(task, scale),
            num_samples=self.train_samples,
        )
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

    def posterior(self, task: Task, state: Tensors) -> Posterior:
        return describe(task, state["params"], self.prior_variance)

    def _beta(self, finished_rounds: Tensor) -> float:
        """Let beta rise over the rounds of the warm-up."""
        return self.beta * min(1.0, (finished_rounds.item() + 1) / self.warm_up) if self.warm_up else self.beta

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
