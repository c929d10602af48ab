"""FedBE: the server samples models around the clients', and distils their ensemble into one.

Chen, Chao: "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning", ICLR 2021, Algorithm 1. Clients
train as in FedAvg. From their models the server makes a distribution of models: a Gaussian with their mean and, per
coordinate, their variance, or a Dirichlet over convex combinations. Sampled models, the clients' and their mean predict
the unlabelled examples that the server holds (`dataset.server_samples`); the mean of these predictions, sharpened,
teaches the mean model, and the average of its iterates (SWA) is the next global model.

Deviations: the authors' code draws the Gaussian over deltas normalised tensor by tensor; here it is over the models as
the paper has it. Its `var_scale` of 0.1 multiplies the standard deviation, so that the variance is 0.01 of that between
the clients: `variance_scale` is the latter. As in that code, Dirichlet teachers have the same concentration for every
client, whatever `weights` say. SWA averages at constant learning rate.
"""

import itertools
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean, moments
from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.devices import bring
from bfl_bench.inference.distill import Student
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import Sgd
from bfl_bench.method import Needs, Replies, Task, Tensors
from bfl_bench.rng import derive_seed, seeded_globally


@dataclass(frozen=True)
class FedBe(PointMethod):
    needs: ClassVar[Needs] = Needs(any_server_step=True, classes=True, server_data="unlabelled")

    teachers: Literal["gaussian", "dirichlet"]
    num_teachers: Annotated[int, AtLeast(0)]
    variance_scale: Annotated[float, AtLeast(0)]
    dirichlet_alpha: Annotated[float, Above(0)]
    temperature: Annotated[float, Above(0)]
    epochs: Annotated[int, AtLeast(0)]
    batch_size: Annotated[int, AtLeast(1)]
    lr: Annotated[float, Above(0)]
    momentum: Annotated[float, Between(0, 0.999999)]
    swa_start: Annotated[int, AtLeast(0)]
    swa_every: Annotated[int, AtLeast(1)]

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        clients, weights, mean = [], [], WeightedMean()
        for client_id, message in replies:
            clients.append(message["params"])
            weights.append(task.weight(self.weights, client_id))
            mean.add(clients[-1], weights[-1])
        average = mean.result().to(state["params"].dtype)
        metrics: dict[str, float] = {}
        student = average
        if self.epochs > 0:
            sampled = self.sample_teachers(torch.stack(clients), torch.tensor(weights, device=average.device), rng)
            targets = self.make_targets(task, [average, *clients, *sampled])
            student, metrics["distillation_loss"] = self.distil(task, average, targets, rng)
        return task.server.move(state, student), metrics

    def sample_teachers(self, clients: Tensor, weights: Tensor, rng: torch.Generator) -> list[Tensor]:
        """Models (P,) drawn from the distribution of models that the clients' (K, P) span."""
        weights = weights / weights.sum()
        if self.teachers == "dirichlet":
            concentration = torch.full_like(weights, self.dirichlet_alpha, dtype=torch.float64)
            with seeded_globally(derive_seed(rng.initial_seed(), "dirichlet"), clients.device):
                shares = torch.distributions.Dirichlet(concentration).sample((self.num_teachers,))
            return list(shares.to(clients.dtype) @ clients)
        mean, variance = moments(clients, torch.zeros_like(clients), weights.to(clients.dtype))
        deviation = (self.variance_scale * variance).sqrt()
        noise = bring(torch.randn(self.num_teachers, len(mean), generator=rng), mean.device)
        return list(mean + deviation * noise)

    @torch.no_grad()
    def make_targets(self, task: Task, models: list[Tensor]) -> Tensor:
        """Return the mean prediction of the models for the server's examples, sharpened by the temperature, (n, C)."""
        task.model.module.eval()
        total: Tensor | float = 0.0
        for params in models:
            task.model.load(params)
            total = total + torch.cat([task.model(x).softmax(1) for x in torch.split(_server_x(task), 1000)])
        assert isinstance(total, Tensor)
        return ((total / len(models)).log() / self.temperature).softmax(1)

    def distil(self, task: Task, start: Tensor, targets: Tensor, rng: torch.Generator) -> tuple[Tensor, float]:
        """Train from `start` on the targets; the mean of the iterates that SWA collects, and the last epoch's loss."""
        student = Student(task, start, Sgd(self.momentum), self.lr)
        collected = WeightedMean()
        steps = itertools.count(1)

        def collect() -> None:
            step = next(steps)
            if step > self.swa_start and step % self.swa_every == 0:
                collected.add(task.model.vector.clone(), 1.0)

        loss = 0.0
        for _ in range(self.epochs):
            loss = student.train_epoch(_server_x(task), targets, self.batch_size, rng, after_step=collect)
        return task.model.vector.clone() if collected.empty else collected.result().to(start.dtype), loss


def _server_x(task: Task) -> Tensor:
    assert task.server_data is not None  # `build` sees to what a method needs
    return task.server_data.x
