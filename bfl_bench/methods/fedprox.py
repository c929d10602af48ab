"""FedProx: FedAvg whose clients are pulled back to the server's model while they train.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020,
Algorithm 2: the local objective is F_k(w) + mu/2 |w - w_t|^2.

Deviations: every client runs the same number of local epochs, as in the papers that use it as a baseline; the
inexactness gamma_k of the original is not modelled. The pull acts on trainable parameters only.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from bfl_bench.checks import AtLeast
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Task, Tensors, Update


@dataclass(frozen=True)
class FedProx(PointMethod):
    mu: Annotated[float, AtLeast(0)]

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        anchor = broadcast["params"][: task.model.layout.num_trainable]

        def pull_back(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
            gradient.add_(parameters - anchor, alpha=self.mu)

        trained = train(task, broadcast["params"], client, rng, adjust=pull_back)
        model = {"params": trained.vector}
        return Update(message=model, local=model, metrics=trained.metrics)
