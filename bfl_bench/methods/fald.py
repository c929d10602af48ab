"""FA-LD: federated averaging with Langevin noise, whose server models are draws from the posterior of all data.

Deng, Zhang, Ma, Song, Lin: "On Convergence of Federated Averaging Langevin Dynamics", UAI 2024. With p_k the clients'
shares, n examples in all and the temperature T, every client takes steps
theta = theta - lr (grad l_k + d/n theta) + sqrt(2 lr T / n) (sqrt((1 - c^2) / p_k) z_k + c z)
with noise z_k of its own and noise z that all clients have in common, c being `correlation`; the server averages. A
client's own noise is the larger the smaller the client, so that the average has the variance 2 lr T / n. With T = 0 it
is FedAvg. The server's models after `burn_in` rounds, one in `every`, are samples of the posterior with the prior
N(0, 1/d); the last of them predict.

Deviations: the steps are derived here from their target, the posterior of all data, which tests check; they are not
confirmed by the paper, which may scale them otherwise. A client's number of steps is that of `local.epochs` and grows
with its examples, as in FedAvg; `steps` makes it the same for all. Where only some clients take part in a round, shares
are those among all clients, and the average has more noise; a bias remains then, in the paper too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean, step_towards
from bfl_bench.checks import AtLeast, Between
from bfl_bench.inference.langevin import Langevin, Thinning, refuse_other_settings, spread
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Method, Needs, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class Fald(Method):
    needs: ClassVar[Needs] = Needs(sgd=True)

    temperature: Annotated[float, AtLeast(0)]
    correlation: Annotated[float, Between(0, 1)]
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
            "samples": params.new_zeros(0, len(params)),
            "round": torch.zeros((), dtype=torch.int64),
            "seed": torch.randint(2**62, (), generator=rng),
        }

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        return {name: state[name] for name in ("params", "seed")}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        total = sum(task.weight(self.weights, other) for other in range(len(task.sizes)))
        share = task.weight(self.weights, client.id) / total
        variance = 2 * self.temperature / sum(task.sizes)
        langevin = Langevin(
            scale=1.0,
            decay=self.prior_precision / sum(task.sizes),
            variance=variance * (1 - self.correlation**2) / share,
            common_variance=variance * self.correlation**2,
            common=torch.Generator().manual_seed(int(broadcast["seed"])) if self.correlation else None,
        )
        trained = train(task, broadcast["params"], client, rng, optimizer=langevin, steps=self.steps)
        model = {"params": trained.vector}
        return Update(message=model, local=model, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        mean = WeightedMean()
        for client_id, message in replies:
            mean.add(message["params"], task.weight(self.weights, client_id))
        params, round_ = step_towards(state["params"], mean.result(), task.server.lr), state["round"] + 1
        thinning = Thinning(self.burn_in, self.every, self.samples)
        new = {
            "params": params,
            "samples": thinning.collect(state["samples"], params[None], int(round_)),
            "round": round_,
            "seed": torch.randint(2**62, (), generator=rng),
        }
        return new, {}

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        """Yield samples; a local model, and the server's before the first sample, is alone."""
        samples = model.get("samples", model["params"][:0])
        yield from spread(samples, num) if len(samples) else [model["params"]]
