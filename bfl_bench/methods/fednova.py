"""FedNova: clients that take more steps do not weigh more.

Wang, Liu, Liang, Joshi, Poor: "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, Algorithm 1. A client sends its move divided by its effective number of steps a_i, which knows momentum;
the server takes the weighted mean of these, times the mean number of effective steps. With equal steps it is FedAvg.

Deviations: frozen parameters and statistics of the network are averaged as in FedAvg.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from bfl_bench.aggregators import WeightedMean
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import effective_steps, train
from bfl_bench.method import Client, Needs, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class FedNova(PointMethod):
    needs: ClassVar[Needs] = Needs(any_server_step=True, sgd=True)

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        trained = train(task, broadcast["params"], client, rng)
        steps = effective_steps(trained.num_steps, task.local.momentum)
        delta = trained.vector - broadcast["params"]
        delta[: task.model.layout.num_trainable] /= steps
        message = {"delta": delta, "steps": torch.tensor(steps, dtype=torch.float64)}
        return Update(message=message, local={"params": trained.vector}, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        deltas, steps = WeightedMean(), WeightedMean()
        for client_id, message in replies:
            weight = task.weight(self.weights, client_id)
            deltas.add(message["delta"], weight)
            steps.add(message["steps"], weight)
        delta = deltas.result()
        delta[: task.model.layout.num_trainable] *= steps.result().item()
        return task.server.move(state, state["params"] + delta), {}
