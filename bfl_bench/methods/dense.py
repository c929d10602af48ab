"""DENSE: a generator invents images on which the clients' ensemble teaches the global model, without any data.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu: "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022, Algorithm 1.
Clients train as in FedAvg. In every epoch the server trains a fresh generator, and its noise, so that the mean of the
clients' logits names random labels (cross-entropy), fits their batch statistics (for networks with BatchNorm) and
differs from what the global model says (only where the two disagree on the class). The images go into a pool, and the
global model, the student, learns the ensemble's predictions on all of it.

Deviations: the authors' code shifts and flips images at random before the generator's loss is taken; keeps them as
pictures of 256 grey values; and draws the pool's images flipped or not, of CIFAR also shifted (`flip` is the former).
It reports the best epoch on the test set beside the last; here it is the last. Its student is a network of its own
(`student: fresh`); the paper's Algorithm 1 does not say, and the default is the broadcast model.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.devices import bring
from bfl_bench.errors import UnsuitableError
from bfl_bench.inference.distill import Student
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import Sgd
from bfl_bench.method import Needs, Replies, Task, Tensors
from bfl_bench.models.generator import ImageGenerator, batch_statistics, statistics_distance
from bfl_bench.rng import derive_seed, seeded_globally


@dataclass(frozen=True)
class Dense(PointMethod):
    epochs: Annotated[int, AtLeast(1)]
    generator_steps: Annotated[int, AtLeast(1)]
    generator_lr: Annotated[float, Above(0)]
    num_images: Annotated[int, AtLeast(2)]
    latent: Annotated[int, AtLeast(1)]
    width: Annotated[int, AtLeast(1)]
    statistics_weight: Annotated[float, AtLeast(0)]
    boundary_weight: Annotated[float, AtLeast(0)]
    temperature: Annotated[float, Above(0)]
    batch_size: Annotated[int, AtLeast(1)]
    lr: Annotated[float, Above(0)]
    momentum: Annotated[float, Between(0, 0.999999)]
    student: Literal["broadcast", "fresh"]
    flip: bool

    @property
    def needs(self) -> Needs:
        return Needs(any_server_step=True, classes=True, num_initials=2 if self.student == "fresh" else 1)

    def check(self, task: Task) -> None:
        shape = task.data.input_shape
        if len(shape) != 3 or shape[1] != shape[2] or shape[1] % 4:
            raise UnsuitableError(f"square images with a side that 4 divides (these are of shape {shape})", "dataset")

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        layout = task.model.layout
        clients: list[tuple[float, Tensors]] = []  # weight and named tensors
        for client_id, message in replies:
            tensors = {entry.name: entry.view(message["params"]) for entry in layout.entries}
            clients.append((task.weight(self.weights, client_id), tensors))
        start = task.initials[1] if self.student == "fresh" else state["params"]
        student = Student(task, start, Sgd(self.momentum), self.lr)
        images: list[Tensor] = []
        targets: list[Tensor] = []
        metrics: dict[str, float] = {}
        for epoch in range(self.epochs):
            seed = derive_seed(rng.initial_seed(), "generator", epoch)
            invented, metrics["generator_loss"] = self.invent(task, clients, seed)
            views = [invented, invented.flip(-1)] if self.flip else [invented]
            images.append(torch.stack(views, dim=1))
            with torch.no_grad():
                taught = [(ensemble(task, clients, view)[0] / self.temperature).softmax(1) for view in views]
            targets.append(torch.stack(taught, dim=1))
            x, y = torch.cat(images), torch.cat(targets)  # (pool, views, ...)
            rows = torch.arange(len(x), device=x.device)
            chosen = torch.zeros_like(rows)
            if self.flip:
                chosen = bring(torch.randint(2, (len(x),), generator=rng), x.device)
            metrics["distillation_loss"] = student.train_epoch(
                x[rows, chosen], y[rows, chosen], self.batch_size, rng, self.temperature
            )
        return task.server.move(state, task.model.vector), metrics

    def invent(self, task: Task, clients: list[tuple[float, Tensors]], seed: int) -> tuple[Tensor, float]:
        """Images that the ensemble is sure of and the student, which the model holds, is not; and their loss."""
        data, device = task.data, task.model.vector.device
        layout = task.model.layout
        student = {entry.name: entry.view(task.model.vector.clone()) for entry in layout.entries}
        with seeded_globally(seed, device):
            generator = ImageGenerator(self.latent, self.width, data.low, data.high, data.input_shape[1])
            generator.to(device, non_blocking=True)
            noise = torch.randn(self.num_images, self.latent, device=device, requires_grad=True)
            labels = torch.randint(task.num_classes, (self.num_images,), device=device)
        optimizer = torch.optim.Adam([*generator.parameters(), noise], self.generator_lr, betas=(0.5, 0.999))
        best, best_loss = noise, torch.full((), float("inf"), device=device)
        for _ in range(self.generator_steps):
            images = generator(noise)
            teacher, distance = ensemble(task, clients, images)
            opinion = functional_call(task.model.module, student, (images,))
            disagree = (task.decide(opinion) != task.decide(teacher)).to(teacher.dtype)
            divergence = F.kl_div(opinion.log_softmax(1), teacher.log_softmax(1), reduction="none", log_target=True)
            boundary = -(divergence.sum(1) * disagree).mean()
            loss = task.likelihood.loss(teacher, labels) + self.boundary_weight * boundary
            loss = loss + self.statistics_weight * distance
            better = loss.detach() < best_loss  # stays on the device: nothing waits for a step
            best = images.detach() if best is noise else torch.where(better, images.detach(), best)
            best_loss = torch.where(better, loss.detach(), best_loss)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        return best, best_loss.item()


def ensemble(task: Task, clients: list[tuple[float, Tensors]], x: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean of the clients' logits (n, C), and of the batch's distances from their statistics."""
    module = task.model.module.eval()
    logits, distance = torch.zeros((), device=x.device), torch.zeros((), device=x.device)
    total = sum(weight for weight, _ in clients)
    with batch_statistics(module) as inputs:
        for weight, tensors in clients:
            logits = logits + weight / total * functional_call(module, tensors, (x,))
            distance = distance + weight / total * statistics_distance(inputs, tensors)
    return logits, distance
