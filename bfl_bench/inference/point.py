"""What the methods that learn one parameter vector have in common: FedAvg's server and its way of predicting."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean, step_towards
from bfl_bench.method import Task, Tensors, Weights


@dataclass(frozen=True)
class PointMethod:
    """State, broadcast, message and local model are all `{"params": (P,)}`; a method adds its `client_update`."""

    name: str
    weights: Weights

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        return {"params": task.model.initial.clone()}

    def init_client(self, task: Task, state: Tensors, client_id: int) -> Tensors | None:
        return None

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        return {"params": state["params"]}

    def server_update(
        self, task: Task, state: Tensors, replies: Iterable[tuple[int, Tensors]], rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        mean = WeightedMean()
        for client_id, message in replies:
            mean.add(message["params"], task.weight(self.weights, client_id))
        return {"params": step_towards(state["params"], mean.result(), task.server_lr)}, {}

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        yield model["params"]
