"""SCAFFOLD: control variates correct the drift of local training.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020, Algorithm 1. A client steps along g - c_i + c. Option I sets c_i to the gradient of its whole data at the server's
model, option II to the mean gradient of its own steps. The server's control is the mean of the controls of all N
clients, whoever takes part: those not yet visited have control zero.

Deviations: `weights` are those of the models' mean alone; the control is the uniform mean over clients, as in the
paper, whose loss is uniform over clients, too. With `weights: size` the two are means over different weights: the
correction points to the mean gradient of clients, not of examples. With momentum the correction is part of the gradient
that the momentum accumulates, and option II divides the client's move by its effective number of steps, so that c_i is
a mean gradient all the same; without momentum that is the paper's K.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import effective_steps, full_gradient, train
from bfl_bench.method import Client, Needs, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class Scaffold(PointMethod):
    option: Literal["I", "II"]

    @property
    def needs(self) -> Needs:
        return Needs(any_server_step=True, sgd=self.option == "II")

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        return super().init(task, rng) | {"control": torch.zeros_like(task.model.gradient)}

    def init_client(self, task: Task, state: Tensors, client_id: int) -> Tensors:
        return {"control": torch.zeros_like(state["control"])}

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        return {"params": state["params"], "control": state["control"]}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        start, control = broadcast["params"], memory["control"]
        correction = broadcast["control"] - control

        def correct(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
            gradient.add_(correction)

        trained = train(task, start, client, rng, adjust=correct)
        delta = trained.vector - start
        if self.option == "I":
            new_control = full_gradient(task, start, client, rng)
        else:
            steps = effective_steps(trained.num_steps, task.local.momentum)
            new_control = -delta[: len(control)] / (steps * task.local.lr) - correction
        return Update(
            message={"delta": delta, "control_delta": new_control - control},
            local={"params": trained.vector},
            memory={"control": new_control},
            metrics=trained.metrics,
        )

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        deltas = WeightedMean()
        control_delta = torch.zeros_like(state["control"], dtype=torch.float64)
        for client_id, message in replies:
            deltas.add(message["delta"], task.weight(self.weights, client_id))
            control_delta += message["control_delta"]
        control = (state["control"] + control_delta / len(task.sizes)).to(state["control"].dtype)
        return task.server.move(state, state["params"] + deltas.result()) | {"control": control}, {}
