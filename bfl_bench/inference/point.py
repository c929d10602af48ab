"""What the methods that learn one parameter vector have in common: FedAvg's client, server and way of predicting."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Method, Needs, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class PointMethod(Method):
    """A method whose state, broadcast, message and local model are all `{"params": (P,)}`, unless it says otherwise.

    The state also has what the server's step remembers, which clients do not need.
    """

    @property
    def needs(self) -> Needs:
        return Needs(any_server_step=True)

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        return {"params": task.model.initial.clone()} | task.server.begin(task.model.gradient)

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        return {"params": state["params"]}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        trained = train(task, broadcast["params"], client, rng)
        model = {"params": trained.vector}
        return Update(message=model, local=model, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        mean = WeightedMean()
        for client_id, message in replies:
            mean.add(message["params"], task.weight(self.weights, client_id))
        return task.server.move(state, mean.result()), {}


@dataclass(frozen=True)
class VotingMethod(PointMethod):
    """A method whose global model is all clients' networks: their predictions are averaged, all clients alike.

    The state has the networks as `models` (K, P) beside `params`, their average, from which further rounds start.
    """

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        return super().init(task, rng) | {"models": task.model.initial[None].clone()}

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        models, mean = [], WeightedMean()
        for client_id, message in replies:
            models.append(message["params"])
            mean.add(message["params"], task.weight(self.weights, client_id))
        return task.server.move(state, mean.result()) | {"models": torch.stack(models)}, {}

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        yield from model["models"]
