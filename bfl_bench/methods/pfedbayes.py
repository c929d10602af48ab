"""pFedBayes: a personal Gaussian network for every client, pulled to the client's copy of the global one, and back.

Zhang, Li, Li, Guo, Shao: "Personalized Federated Learning via Variational Bayesian Inference", ICML 2022. A client has
its personal posterior q, which it keeps, and a copy w of the server's Gaussian. It takes `personal_steps` steps on q
for E_q[NLL] + zeta KL(q || w) / n, then one on w for zeta KL(q || w) / n, and so on; w travels to the server, which
averages means and log variances (`server.lr`: the paper's beta). The personal network is a client's own model (MT), the
server's the global one. With zeta = 0 clients learn alone, and the global model stays where it is.

Deviations: log variances are learnt, not the arguments of a softplus. Every step takes the next minibatch; an odd rest
of steps at the end of a local update is followed by a step on w, too. Points, such as biases, are pulled like means of
Gaussians whose variances stay at exp(model.log_variance_init). Both take the steps of `local.optimizer`; those of SGD
hardly move variances. A client's personal network starts as the global one at its first local update.

Method `pfedbayes_released` is an implementation that calls itself unofficial: draws have a thousandth of their standard
deviation (`model.noise`), the KL divergence is divided by 20 beside the log-likelihood of a minibatch of 100, and the
moments of Adam go on from one local update to the next. Its five personal steps are on one and the same minibatch.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from bfl_bench.checks import AtLeast
from bfl_bench.evaluation.posterior import Posterior
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import make_optimizer, train
from bfl_bench.inference.variational import GaussianLayersMethod, describe, settings_of
from bfl_bench.method import Client, Needs, Predictive, Task, Tensors, Update


@dataclass(frozen=True)
class PFedBayes(GaussianLayersMethod, PointMethod):
    predictives: ClassVar[tuple[Predictive, ...]] = ("draws", "mean")
    needs: ClassVar[Needs] = Needs(gaussian_layers=True, own_test=True)

    zeta: Annotated[float, AtLeast(0)]
    personal_steps: Annotated[int, AtLeast(1)]
    examples: Literal["own"] | Annotated[int, AtLeast(1)]
    keep_moments: bool

    def init_client(self, task: Task, state: Tensors, client_id: int) -> Tensors:
        memory = {"personal": state["params"].clone()}
        if self.keep_moments:
            for whose in ("own", "shared"):
                begun = make_optimizer(task.local).begin(task.model.gradient)
                memory |= {f"{whose} {name}": value for name, value in begun.items()}
        return memory

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        layout, settings, optimizer = task.model.layout, settings_of(task), make_optimizer(task.local)
        size, first = layout.num_trainable, layout.log_variances.start  # points and means, then log variances
        scale = self.zeta / (len(client) if self.examples == "own" else self.examples)
        shared = broadcast["params"].clone()
        fixed = torch.full_like(shared[layout.points], settings.log_variance_init)
        moments = {
            whose: {name.removeprefix(f"{whose} "): value.clone() for name, value in memory.items() if whose in name}
            or optimizer.begin(shared[:size])
            for whose in ("own", "shared")
        }
        steps = 0

        def compare(own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Return the differences of points and means, their precisions in w, and the ratios of the variances."""
            log_variance = settings.clamp(shared[layout.log_variances])
            precision = torch.cat([fixed, log_variance]).neg_().exp_()
            return own[:first] - shared[:first], precision, (settings.clamp(own[first:size]) - log_variance).exp_()

        def pull(own: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
            difference, precision, ratio = compare(own)
            gradient[:first].addcmul_(difference, precision, value=scale)
            gradient[first:].add_(ratio - 1, alpha=0.5 * scale)

        def follow() -> None:
            """Take a step on w."""
            difference, precision, ratio = compare(task.model.vector)
            squares = (difference.square() * precision)[layout.means]
            gradient = scale * torch.cat([-difference * precision, 0.5 * (1 - ratio - squares)])
            optimizer.step(shared[:size], lambda _: gradient, moments["shared"], task.local.lr, rng)

        def count(own: Tensor, epoch_ends: bool) -> None:
            nonlocal steps
            steps += 1
            if steps % self.personal_steps == 0:
                follow()

        trained = train(
            task,
            memory["personal"],
            client,
            rng,
            optimizer=optimizer,
            memory=moments["own"],
            adjust=pull,
            after_step=count,
        )
        if steps % self.personal_steps:
            follow()
        shared[size:] = trained.vector[size:]
        difference, precision, ratio = compare(trained.vector)
        kl = 0.5 * float((difference.square() * precision).sum() + (ratio - 1 - ratio.log()).sum())
        kept = {"personal": trained.vector}
        if self.keep_moments:
            kept |= {f"{whose} {name}": value for whose, found in moments.items() for name, value in found.items()}
        local = {"params": trained.vector}
        return Update(message={"params": shared}, local=local, memory=kept, metrics=trained.metrics | {"kl": kl})

    def posterior(self, task: Task, state: Tensors) -> Posterior:
        return describe(task, state["params"], None)
