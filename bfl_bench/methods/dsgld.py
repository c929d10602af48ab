"""DSGLD: chains of Langevin dynamics that travel from client to client and sample the posterior of all data.

Ahn, Shahbaba, Welling: "Distributed Stochastic Gradient MCMC", ICML 2014. A chain visits one client at a time and takes
some steps there. With q_k the share of its steps that it takes at client k, n examples in all and the temperature T,
theta = theta - lr (n_k / (n q_k) grad l_k + d/n theta) + sqrt(2 lr T / n) z:
in expectation over clients the drift is that of the pooled posterior with the prior N(0, 1/d). There are as many chains
as clients, in every round each at another client, by a random permutation: all work, and no two on the same chain. The
chains' states after `burn_in` rounds, one in `every`, are samples; the last of them predict, before the first sample
the chains as they are.

Deviations: the steps are derived here from their target, the posterior of all data, which tests check; they are not
confirmed by the paper, which may scale them otherwise. A chain's steps at a client are those of `local.epochs`, or
`steps` of them; q_k is counted from these. Many steps at one client leave a bias where clients differ. The server sends
all chains to every client, and that is counted: it does not know who takes part. `params` is the mean of all chains; no
client starts from it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from bfl_bench.aggregators import step_towards
from bfl_bench.checks import AtLeast
from bfl_bench.inference.langevin import Langevin, Thinning, count_steps, refuse_other_settings, spread
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Method, Needs, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class Dsgld(Method):
    needs: ClassVar[Needs] = Needs(sgd=True)

    temperature: Annotated[float, AtLeast(0)]
    prior_precision: Annotated[float, AtLeast(0)]
    steps: Annotated[int, AtLeast(1)] | None
    burn_in: Annotated[int, AtLeast(0)]
    every: Annotated[int, AtLeast(1)]
    samples: Annotated[int, AtLeast(1)]

    def check(self, task: Task) -> None:
        decay = "method.prior_precision instead"
        refuse_other_settings(task, self.name, momentum="no momentum", weight_decay=decay)

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        params = task.model.initial.clone()
        return {
            "params": params,
            "chains": params.repeat(len(task.sizes), 1),
            "visits": torch.randperm(len(task.sizes), generator=rng),
            "samples": params.new_zeros(0, len(params)),
            "round": torch.zeros((), dtype=torch.int64),
        }

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        return {name: state[name] for name in ("chains", "visits")}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        num_examples, counts = sum(task.sizes), [count_steps(task, size, self.steps) for size in task.sizes]
        share = counts[client.id] / sum(counts)
        langevin = Langevin(
            scale=len(client) / (num_examples * share),
            decay=self.prior_precision / num_examples,
            variance=2 * self.temperature / num_examples,
        )
        start = broadcast["chains"][broadcast["visits"][client.id]]
        trained = train(task, start, client, rng, optimizer=langevin, steps=self.steps)
        model = {"params": trained.vector}
        return Update(message=model, local=model, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        chains, round_ = state["chains"].clone(), state["round"] + 1
        for client_id, message in replies:
            chain = state["visits"][client_id]
            chains[chain] = step_towards(chains[chain], message["params"], task.server.lr)
        new = {
            "params": chains.double().mean(0).to(chains.dtype),
            "chains": chains,
            "visits": torch.randperm(len(task.sizes), generator=rng).to(chains.device),
            "samples": Thinning(self.burn_in, self.every, self.samples).collect(state["samples"], chains, int(round_)),
            "round": round_,
        }
        return new, {}

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        """Yield samples; a client's own chain is alone."""
        if "chains" not in model:
            yield model["params"]
            return
        yield from spread(model["samples"] if len(model["samples"]) else model["chains"], num)
