"""BayesADMM: federated ADMM over Gaussians, whose clients learn with IVON.

Moellenhoff, Swaroop, Doshi-Velez, Khan: "Federated ADMM from Bayesian Duality", ICLR 2026. Sites, server and memory
are those of inference/duals.py, with steps damping rho and a share of 1 / (1 + N rho). With f_k the sum of client k's
losses and t the temperature, a client minimises over Gaussians q the expectation of f_k(w) / t + v_k'w - w'V_k w / 2,
plus rho KL(q || server's). That is IVON (inference/ivon.py) with ess = n_k / (t rho), the server's Gaussian as its
prior, and the site as a linear and a quadratic part of the objective. With rho = 1 and `server: sites`, a share of 1,
it is partitioned variational inference.

`draws_from: initial` is what the released code predicts with: draws around the server's mean with the precision that
IVON has before the first step on all data, n h0 / (t rho) + S_0, whatever was learnt.

Deviations: IVON's momentum starts anew with every local update; in the released code it goes on. In the first round its
curvature starts at h0, later at 0, where the client's Gaussian is the server's. With `rescale` the learning rate is
multiplied by the mean over parameters of IVON's precision at the start, so that it is about that of SGD.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.errors import ConfigError
from bfl_bench.evaluation.truth import Moments
from bfl_bench.inference.duals import Cavity, DualMethod, draw
from bfl_bench.inference.ivon import Ivon
from bfl_bench.inference.train import Trained, train
from bfl_bench.method import Client, Needs, Task, Tensors


@dataclass(frozen=True)
class BayesAdmm(DualMethod):
    needs: ClassVar[Needs] = Needs(sgd=True)

    draws_from: Literal["posterior", "initial"]
    server: Literal["admm", "sites"]
    rho: Annotated[float, Above(0)]
    temperature: Annotated[float, Above(0)]
    h0: Annotated[float, Above(0)]
    beta1: Annotated[float, Between(0, 0.999999)]
    beta2: Annotated[float, Between(0, 1)]
    samples: Annotated[int, AtLeast(1)]
    clip: Annotated[float, Above(0)] | None
    rescale: bool

    def check(self, task: Task) -> None:
        for key, instead in (("momentum", "method.beta1"), ("weight_decay", "method.prior_precision")):
            if value := getattr(task.local, key):
                raise ConfigError(f"local.{key}", value, f"0; method {self.name} has {instead} instead")

    def fit(
        self, task: Task, start: Tensor, cavity: Cavity, client: Client, rng: torch.Generator
    ) -> tuple[Trained, Tensor]:
        ess = len(client) / (self.temperature * self.rho)
        per_example = self.temperature / len(client)
        ivon = Ivon(
            ess=ess,
            h0=self.h0 if cavity.is_first else 0.0,
            beta1=self.beta1,
            beta2=self.beta2,
            delta=cavity.precision / ess,
            samples=self.samples,
            clip=self.clip,
            rescale=False,
            prior_mean=cavity.mean,
            linear=per_example * cavity.site_shift,
            quadratic=-per_example * cavity.site_precision,
        )
        memory = ivon.begin(task.model.gradient)
        if self.rescale:
            lr = task.local.lr * memory["precision"].mean().item()
            task = replace(task, local=replace(task.local, lr=lr))
        trained = train(task, start, client, rng, optimizer=ivon, memory=memory)
        return trained, ess * trained.memory["precision"]

    def step(self, task: Task) -> float:
        return self.rho * (1 / len(task.sizes) if self.damping is None else self.damping)

    def share(self, task: Task) -> float:
        return 1.0 if self.server == "sites" else 1 / (1 + len(task.sizes) * self.rho)

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        if self.draws_from == "initial" and "precisions" in model:
            ess = sum(task.sizes) / (self.temperature * self.rho)
            precision = torch.full_like(model["precision"], ess * self.h0 + self.prior_precision)
            return draw(model["params"], precision, num, rng)
        return super().draws(task, model, num, rng)

    def weight_moments(self, task: Task, state: Tensors) -> Moments | None:
        return None if self.draws_from == "initial" else super().weight_moments(task, state)
