"""Deep ensemble: several runs of FedAvg side by side, from initial models of their own, that predict together.

Lakshminarayanan, Pritzel, Blundell: "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles",
NeurIPS 2017, with FedAvg in the place of SGD, as Linsner, Adilova, Daeubener, Kamp, Fischer: "Approaches to Uncertainty
Quantification in Federated Deep Learning", 2021, propose it as a baseline. All members see the same clients in the same
rounds, each with minibatches in an order of its own. The first is `fedavg`, bit for bit.

Deviations: no adversarial examples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch

from bfl_bench.aggregators import WeightedMean
from bfl_bench.checks import AtLeast
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Method, Needs, Replies, Task, Tensors, Update
from bfl_bench.rng import derive_seed


@dataclass(frozen=True)
class Ensemble(Method):
    """State, message and local model are `{"params": (M, P)}`; what the server's step remembers has M rows, too."""

    members: Annotated[int, AtLeast(1)]

    @property
    def needs(self) -> Needs:
        return Needs(num_initials=self.members, any_server_step=True)

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        remembered = task.server.begin(task.model.gradient)
        rows = {name: torch.stack([value] * self.members) for name, value in remembered.items()}
        return {"params": task.initials.clone()} | rows

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        return {"params": state["params"]}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        streams = [rng]  # the first member's is that of a client of FedAvg
        for member in range(1, self.members):
            streams.append(torch.Generator().manual_seed(derive_seed(rng.initial_seed(), "member", member)))
        trained = [
            train(task, start, client, stream) for start, stream in zip(broadcast["params"], streams, strict=True)
        ]
        model = {"params": torch.stack([one.vector for one in trained])}
        names = trained[0].metrics
        means = {name: sum(one.metrics[name] for one in trained) / self.members for name in names}
        return Update(message=model, local=model, metrics=means)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        mean = WeightedMean()
        for client_id, message in replies:
            mean.add(message["params"], task.weight(self.weights, client_id))
        moved = [
            task.server.move({name: rows[member] for name, rows in state.items()}, aggregated)
            for member, aggregated in enumerate(mean.result())
        ]
        return {name: torch.stack([one[name] for one in moved]) for name in state}, {}

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[torch.Tensor]:
        yield from model["params"][:num]
