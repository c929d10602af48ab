"""FedCurv: clients are held where the other clients' losses are curved.

Shoham, Avidor, Keren, Israel, Benditkis, Mor-Yosef, Zeitak: "Overcoming Forgetting in Federated Learning on Non-IID
Data", NeurIPS workshop 2019. A client minimises its loss + lambda sum_{j != i} (w - w_j)^T diag(F_j) (w - w_j), where
F_j is the diagonal Fisher of client j after its last local update. The server keeps the sums of F_j and F_j w_j over
all clients that took part so far, from which a client subtracts its own.

Deviations: the diagonal Fisher is the empirical one, at the labels of the data. A client sends by how much its F_j and
F_j w_j changed, so that the sums are right at any participation. In the code that FOLA's authors released for their
comparison the penalty has no gradient (`penalty_gradient: false`), which leaves FedAvg: with a gradient, FOLA's lambdas
of 100 and more are beyond what plain SGD can follow at its learning rate.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean
from bfl_bench.checks import AtLeast
from bfl_bench.inference.curvature import Fisher, check_expected_gradient, diagonal_fisher
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class FedCurv(PointMethod):
    penalty_weight: Annotated[float, AtLeast(0)]
    fisher: Fisher
    penalty_gradient: bool

    def check(self, task: Task) -> None:
        if self.fisher == "model":
            check_expected_gradient(task)

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        zeros = torch.zeros_like(task.model.gradient)
        return super().init(task, rng) | {"fishers": zeros, "fisher_params": zeros.clone()}

    def init_client(self, task: Task, state: Tensors, client_id: int) -> Tensors:
        return {"fisher": torch.zeros_like(state["fishers"]), "fisher_params": torch.zeros_like(state["fishers"])}

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        return {name: state[name] for name in ("params", "fishers", "fisher_params")}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        others = broadcast["fishers"] - memory["fisher"]
        others_params = broadcast["fisher_params"] - memory["fisher_params"]

        def hold(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
            if self.penalty_gradient:
                gradient.add_(others * parameters - others_params, alpha=2 * self.penalty_weight)

        trained = train(task, broadcast["params"], client, rng, adjust=hold)
        fisher = diagonal_fisher(task, trained.vector, client, rng, self.fisher)
        fisher_params = fisher * trained.vector[: len(fisher)]
        return Update(
            message={
                "params": trained.vector,
                "fisher_delta": fisher - memory["fisher"],
                "fisher_params_delta": fisher_params - memory["fisher_params"],
            },
            local={"params": trained.vector},
            memory={"fisher": fisher, "fisher_params": fisher_params},
            metrics=trained.metrics,
        )

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        mean = WeightedMean()
        fishers, fisher_params = state["fishers"].double(), state["fisher_params"].double()
        for client_id, message in replies:
            mean.add(message["params"], task.weight(self.weights, client_id))
            fishers += message["fisher_delta"]
            fisher_params += message["fisher_params_delta"]
        new = {
            "fishers": fishers.to(state["fishers"].dtype),
            "fisher_params": fisher_params.to(state["fishers"].dtype),
        }
        return task.server.move(state, mean.result()) | new, {}
