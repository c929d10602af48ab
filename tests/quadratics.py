"""Federations whose losses are quadratics, so that local problems have exact solutions.

Client k's loss, summed over its n_k examples, is (w - m_k)'A_k(w - m_k) / 2. `exact_train` stands in for training.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bfl_bench.inference.train import Trained
from bfl_bench.method import Client, Method, Task, Tensors
from tests.federation import generator, make_clients, make_task

SIZES = (7, 12, 4, 9)
D = 4


@dataclass(frozen=True)
class Quadratics:
    curvatures: Tensor  # (N, D, D)
    optima: Tensor  # (N, D)

    def posterior(self, prior_precision: float) -> tuple[Tensor, Tensor]:
        """Mean and precision of all data and the prior N(0, 1 / prior_precision)."""
        precision = self.curvatures.sum(0) + prior_precision * torch.eye(D, dtype=torch.float64)
        right = (self.curvatures @ self.optima[:, :, None]).sum(0)[:, 0]
        return torch.linalg.solve(precision, right), precision

    def exact_train(self) -> Callable[..., Trained]:
        """Solve for the zero of the gradient with what `adjust` adds to it, or with what IVON's vectors do."""

        def train(
            task: Task,
            start: Tensor,
            client: Client,
            rng: torch.Generator,
            adjust: Any = None,
            optimizer: Any = None,
            memory: Tensors | None = None,
            after_step: Any = None,
        ) -> Trained:
            matrix = self.curvatures[client.id] / len(client)
            right = matrix @ self.optima[client.id]
            memory = {}
            if adjust is not None:  # it is affine: its value at 0, and how that changes along each coordinate
                rows = [torch.zeros(D, dtype=torch.float64), *torch.eye(D, dtype=torch.float64)]
                added = [torch.zeros(D, dtype=torch.float64) for _ in rows]
                for row, gradient in zip(rows, added, strict=True):
                    adjust(row, gradient, torch.empty(0), torch.empty(0))
                right = right - added[0]
                matrix = matrix + torch.stack([gradient - added[0] for gradient in added[1:]], dim=1)
            if optimizer is not None:
                matrix = matrix + torch.diag(optimizer.quadratic + optimizer.delta)
                right = right - optimizer.linear + optimizer.delta * optimizer.prior_mean
                memory = {"precision": matrix.diagonal()}
            found = torch.linalg.solve(matrix, right)
            for _ in range(task.local.epochs if after_step else 0):
                after_step(found, True)
            return Trained(found.clone(), 1, {"train_loss": 0.0, "train_acc": 0.0}, memory)

        return train

    def exact_fisher(self) -> Callable[..., Tensor]:
        """Give the diagonal of the curvature of the mean loss."""
        return lambda task, vector, client, rng, kind: self.curvatures[client.id].diagonal() / len(client)


def make_quadratics(diagonal: bool, seed: int = 1) -> Quadratics:
    rng = generator(seed)
    roots = torch.randn(len(SIZES), D, D, generator=rng, dtype=torch.float64)
    curvatures = roots @ roots.mT + 0.5 * torch.eye(D, dtype=torch.float64)
    if diagonal:
        curvatures = torch.diag_embed(curvatures.diagonal(dim1=1, dim2=2))
    return Quadratics(curvatures, torch.randn(len(SIZES), D, generator=rng, dtype=torch.float64))


def make_quadratic_task(server_lr: float = 1.0) -> Task:
    """A network of D parameters, which nobody evaluates."""
    return make_task(nn.Linear(1, 2), sizes=SIZES, server_lr=server_lr)


def in_float64(tensors: Tensors) -> Tensors:
    return {name: value.double() for name, value in tensors.items()}


class Course:
    """Rounds of a method with given cohorts, in float64."""

    def __init__(self, method: Method, task: Task) -> None:
        self.method, self.task = method, task
        self.clients = make_clients(task.sizes)
        self.state = in_float64(method.init(task, generator()))
        self.memories: dict[int, Tensors] = {}
        self.metrics: dict[str, float] = {}

    def play(self, cohort: tuple[int, ...] | None = None) -> Tensors:
        broadcast = self.method.broadcast(self.task, self.state)
        replies = []
        for id_ in range(len(self.clients)) if cohort is None else cohort:
            memory = self.memories.get(id_) or self.method.init_client(self.task, self.state, id_)
            update = self.method.client_update(self.task, broadcast, memory, self.clients[id_], generator(id_))
            self.memories[id_] = update.memory
            replies.append((id_, update.message))
        self.state, self.metrics = self.method.server_update(self.task, self.state, iter(replies), generator())
        return self.state


def with_local(task: Task, **changes: Any) -> Task:
    return replace(task, local=replace(task.local, **changes))
