"""A federation whose posterior is a Gaussian: every example is a point, and its loss half the squared distance."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bfl_bench.data.dataset import Split
from bfl_bench.likelihood import Categorical
from bfl_bench.method import Client, Method, Task
from tests.federation import generator, make_task

SIZES = (2, 6, 4)
D = 60  # coordinates, all of which are independent problems


class Point(nn.Module):
    """A network that is a vector of parameters, whatever the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.expand(len(x), D)


class HalfSquares(Categorical):
    """Outputs and labels are points (n, D)."""

    def loss(self, outputs: Tensor, labels: Tensor, reduction: Any = "mean") -> Tensor:
        return 0.5 * (outputs - labels).square().sum(1).mean()

    def measure(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"train_acc": torch.zeros(())}


def make_point_task(lr: float) -> tuple[Task, list[Client], Tensor]:
    """Make clients that see all of their examples in every step, and give all examples (n, D)."""
    total = sum(SIZES)
    y = 2 * torch.randn(total, D, generator=generator(1)) + 1
    task = replace(make_task(Point(), sizes=SIZES, lr=lr, batch_size=10, epochs=1), likelihood=HalfSquares(D))
    split = Split(torch.zeros(total, 1), y)
    return task, [Client(k, split, part, None) for k, part in enumerate(torch.arange(total).split(SIZES))], y.double()


def run_chain(method: Method, task: Task, clients: list[Client], rounds: int, burn_in: int) -> Tensor:
    """Give the server's models of all rounds after the first, (rounds - burn_in, D)."""
    state, kept = method.init(task, generator(0)), []
    for round_ in range(rounds):
        broadcast = method.broadcast(task, state)
        replies = [
            (c.id, method.client_update(task, broadcast, {}, c, generator(1000 * round_ + c.id + 7)).message)
            for c in clients
        ]
        state, _ = method.server_update(task, state, iter(replies), generator(round_))
        if round_ >= burn_in:
            kept.append(state.get("chains", state["params"]))
    return torch.stack(kept).double()
