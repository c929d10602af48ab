"""FedAvg: every client trains the server's model on its own data, the server averages the results.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, Algorithm 1. With `weights: uniform` it is the FED baseline of BFL-P.

Deviations: none.
"""

from dataclasses import dataclass

import torch

from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import train_sgd
from bfl_bench.method import Client, Task, Tensors, Update


@dataclass(frozen=True)
class FedAvg(PointMethod):
    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors | None, client: Client, rng: torch.Generator
    ) -> Update:
        trained = train_sgd(task, broadcast["params"], client, rng)
        model = {"params": trained.vector}
        return Update(message=model, local=model, metrics=trained.metrics)
