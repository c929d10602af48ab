"""FedPA: clients estimate their posteriors from samples, and send the step to the mode of the product.

Al-Shedivat, Gillenwater, Xing, Rostamizadeh: "Federated Learning via Posterior Averaging: A New Perspective and
Practical Algorithms", ICLR 2021. The first rounds are FedAvg. Afterwards a client goes on with SGD in each local
update: the first epochs mix, each later one gives a sample, the mean of its iterates. With x_1, ..., x_l the samples,
x their mean and theta the server's model, the client's covariance is Sigma = r I + (1 - r) S, S the unbiased
covariance of the samples and r = 1 / (1 + (l - 1) rho), and it sends Delta = Sigma^-1 (theta - x): the sum over
clients is zero at the mean of the product of Gaussians. The mean of Delta is the gradient of the server's step
(`server.*`).

Delta takes one l x l system: with C the matrix of rows x_j - x and d = theta - x,
Delta = (1 + (l - 1) rho) (d - rho C' (I + rho C C')^-1 C d)

Deviations: a client sends theta - Delta, as it would send its model to FedAvg. A Delta that is not finite ends the run
as diverged; the authors' code leaves such clients out.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean
from bfl_bench.checks import AtLeast
from bfl_bench.errors import ConfigError
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class FedPa(PointMethod):
    burn_in_rounds: Annotated[int, AtLeast(0)]
    burn_in_epochs: Annotated[int, AtLeast(0)]
    rho: Annotated[float, AtLeast(0)]

    def check(self, task: Task) -> None:
        if self.burn_in_epochs >= task.local.epochs:
            allowed = f"less than local.epochs={task.local.epochs}: each later epoch gives a sample"
            raise ConfigError("method.burn_in_epochs", self.burn_in_epochs, allowed)

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        return super().init(task, rng) | {"round": task.model.gradient.new_zeros(())}

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        return {"params": state["params"], "round": state["round"]}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        if broadcast["round"] < self.burn_in_rounds:
            return super().client_update(task, broadcast, memory, client, rng)
        size = task.model.layout.num_trainable
        samples: list[Tensor] = []
        epoch, iterates = 0, WeightedMean()

        def collect(parameters: Tensor, epoch_ends: bool) -> None:
            nonlocal epoch, iterates
            if epoch >= self.burn_in_epochs:
                iterates.add(parameters.clone(), 1.0)
                if epoch_ends:
                    samples.append(iterates.result())
                    iterates = WeightedMean()
            epoch += epoch_ends

        trained = train(task, broadcast["params"], client, rng, after_step=collect)
        start, rows = broadcast["params"][:size].double(), torch.stack(samples)
        sent, local = trained.vector.clone(), trained.vector
        sent[:size] = (start - posterior_step(start, rows, self.rho)).to(sent.dtype)
        local[:size] = rows.mean(0).to(local.dtype)
        return Update(message={"params": sent}, local={"params": local}, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        new, metrics = super().server_update(task, state, replies, rng)
        return new | {"round": state["round"] + 1}, metrics


def posterior_step(start: Tensor, samples: Tensor, rho: float) -> Tensor:
    """Sigma^-1 (start - mean of the samples), (D,), with the shrinkage covariance Sigma of samples (l, D)."""
    mean = samples.mean(0)
    rows, distance = samples - mean, start - mean
    inner = torch.eye(len(rows), dtype=rows.dtype, device=rows.device) + rho * rows @ rows.T
    solved: Tensor = torch.linalg.solve(inner, rows @ distance)
    return (distance - rho * solved @ rows) * (1 + (len(rows) - 1) * rho)
