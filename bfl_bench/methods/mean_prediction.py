"""Mean prediction: one round of FedAvg's clients, whose networks all stay and predict together.

The plain ensemble of one-shot federated learning (Guha, Talwalkar, Smith: "One-Shot Federated Learning", 2019): the
mean of all clients' predictive distributions, nothing learnt by the server. It is what DENSE distils, but for the mean
being of logits there, and what FedOV adds open-set clients to; a control for both.

Deviations: all clients predict, where the paper also selects some. In further rounds the clients start from the average
of their models, as in FedAvg.
"""

from dataclasses import dataclass

import torch

from bfl_bench.inference.point import VotingMethod
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Task, Tensors, Update


@dataclass(frozen=True)
class MeanPrediction(VotingMethod):
    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        trained = train(task, broadcast["params"], client, rng)
        local = {"models": trained.vector[None]}
        return Update(message={"params": trained.vector}, local=local, metrics=trained.metrics)
