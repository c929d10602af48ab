"""FedADMM, FedDyn and FedLap: a dual variable for each client makes local optima agree with that of all data.

FedDyn: Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: "Federated Learning Based on Dynamic Regularization", ICLR
2021. FedLap: Swaroop, Khan, Doshi-Velez: "Connecting Federated ADMM to Bayes", ICLR 2025. They are one algorithm. With
f_k the sum of client k's losses, w_g the server's model and d the precision of the prior N(0, 1/d), a client finds the
w_k that minimises f_k(w) + rho (u_k'w + |w - w_g|^2 / 2), and moves its dual: u_k = u_k + damping (w_k - w_g). The
server takes w_g = (1 - d a) mean w_k + a rho sum u_k, the mean over the cohort, the sum over all N clients. The
variants:
admm     rho = alpha n / N and a = 1 / (d + N rho); with d = 0 it is FedDyn, whose pull beside a client's mean loss
         is alpha n / (N n_k)
sites    rho = d and a = 1 / d, so that w_g = sum u_k: FedLap, where d u_k'w - d |w|^2 / 2 is a site of client k

Deviations: clients take `local.epochs` instead of solving their problem. In the first round of `sites` the pull is to
zero, the mean of the prior, where the sum of the duals is; training starts at the network's initial parameters. A
client sends w_k alone: the server knows by how much its dual moves, and the sum of duals is right at any
participation.

`form: released` is what the code of FedLap's authors does for both: the penalty is |w - w_g| / 2 instead of its square,
the first pull is to zero, and of FedDyn alpha n / (N n_k) is alpha n_l / n with l the last of all clients; the server's
sum of duals is multiplied by n_l / (n N), and lacks the first round.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean
from bfl_bench.checks import Above, AtLeast
from bfl_bench.errors import ConfigError
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class FedAdmm(PointMethod):
    server: Literal["admm", "sites"]
    alpha: Annotated[float, Above(0)] | None
    prior_precision: Annotated[float, AtLeast(0)]
    damping: Annotated[float, Above(0)] | None
    form: Literal["exact", "released"]

    def __post_init__(self) -> None:
        if self.server == "admm" and self.alpha is None:
            raise ConfigError("alpha", None, "a number above 0 with method.server=admm")
        if self.server == "sites" and self.alpha is not None:
            raise ConfigError(
                "alpha", self.alpha, "null with method.server=sites, where prior_precision takes its place"
            )
        if self.server == "sites" and self.prior_precision == 0:
            raise ConfigError("prior_precision", 0, "a number above 0 with method.server=sites")

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        duals = torch.zeros_like(task.model.gradient, dtype=torch.float64)
        return super().init(task, rng) | {"duals": duals, "round": duals.new_zeros(())}

    def init_client(self, task: Task, state: Tensors, client_id: int) -> Tensors:
        return {"dual": torch.zeros_like(state["duals"], dtype=state["params"].dtype)}

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        return {"params": state["params"], "round": state["round"]}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        anchor, dual = self._anchor(task, broadcast), memory["dual"]
        strength = self._strength(task, client.id)
        offset = dual - anchor

        def pull(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
            if self.form == "exact":
                gradient.add_(parameters + offset, alpha=strength)
            else:
                distance = parameters - anchor
                gradient.add_(dual + distance / (2 * distance.norm().clamp(min=1e-30)), alpha=strength)

        trained = train(task, broadcast["params"], client, rng, adjust=pull)
        model = {"params": trained.vector}
        moved = dual + self._damping(task) * (trained.vector[: len(dual)] - anchor)
        return Update(message=model, local=model, memory={"dual": moved}, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        anchor, duals = self._anchor(task, state).double(), state["duals"].clone()
        mean, size = WeightedMean(), len(duals)
        counted = not (self.form == "released" and self.server == "admm" and state["round"] == 0)
        for client_id, message in replies:
            mean.add(message["params"], task.weight(self.weights, client_id))
            if counted:
                duals.add_(message["params"][:size] - anchor, alpha=self._damping(task))
        aggregated = mean.result()
        share, factor = self._server(task)
        aggregated[:size] = share * aggregated[:size] + factor * duals
        return task.server.move(state, aggregated) | {"duals": duals, "round": state["round"] + 1}, {}

    def _anchor(self, task: Task, server: Tensors) -> Tensor:
        """What clients are pulled to, and their duals count from, (D,)."""
        params = server["params"][: task.model.layout.num_trainable]
        from_zero = self.server == "sites" or self.form == "released"
        return torch.zeros_like(params) if from_zero and server["round"] == 0 else params

    def _strength(self, task: Task, client_id: int) -> float:
        """rho / n_k: of the pull beside the mean loss."""
        if self.form == "released" and self.alpha is not None:
            return self.alpha * task.sizes[-1] / sum(task.sizes)
        return self._rho(task) / task.sizes[client_id]

    def _rho(self, task: Task) -> float:
        return self.prior_precision if self.alpha is None else self.alpha * sum(task.sizes) / len(task.sizes)

    def _damping(self, task: Task) -> float:
        return 1 / len(task.sizes) if self.damping is None else self.damping

    def _server(self, task: Task) -> tuple[float, float]:
        """What the mean and the sum of duals are multiplied by: 1 - d a and a rho."""
        if self.server == "sites":
            return 0.0, 1.0
        if self.form == "released":
            return 1.0, task.sizes[-1] / (sum(task.sizes) * len(task.sizes))
        rho = self._rho(task)
        a = 1 / (self.prior_precision + len(task.sizes) * rho)
        return 1 - self.prior_precision * a, a * rho
