"""Clients in lockstep: an engine that was tried and is not one of this program's (docs/scaling.md says why).

    pip install greenlet && python benchmarks/lockstep.py

Every client's local update is a coroutine that asks for a gradient and waits; the minibatches of all that wait, of
equal shape, go through one batched network. Beside it stands `train`, one client after the other. The gradient is that
of `torch.func.vmap`, or for layers of an MLP written by hand. Processor time, in turns, medians.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from workloads import CPU, make_task

from bfl_bench.data.dataset import Split
from bfl_bench.engines.process_setup import set_up_process
from bfl_bench.inference.train import Tally, minibatches, train
from bfl_bench.method import Client, Task
from bfl_bench.models.flat import FlatModel
from bfl_bench.rng import stream

CLIENTS, BATCHES, REPEATS = 100, 10, 7
NETWORKS = [(64, 32, 32, 10), (64, 100, 100, 10), (561, 100, 6), (784, 10), (784, 100, 100, 10)]

Gradients = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(vectors (C, P), x (C, n, d), y (C, n)) -> gradients (C, P), losses (C,), outputs (C, n, classes)."""


def make_module(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def by_vmap(task: Task) -> Gradients:
    entries, module = task.model.layout.entries, task.model.module

    def loss(vector: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs = functional_call(module, {entry.name: entry.view(vector) for entry in entries}, (x,))
        return task.likelihood.loss(outputs, y), outputs

    function = vmap(grad_and_value(loss, has_aux=True))

    def gradients(vectors: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found, (losses, outputs) = function(vectors, x, y)
        return found, losses, outputs

    return gradients


def by_hand(widths: tuple[int, ...], vectors: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for linear layers with ReLU between them and cross-entropy behind."""
    (num_clients, n), values, start = y.shape, [x], 0
    places, weights = [], []
    for inputs, outputs in pairwise(widths):
        weight = slice(start, start + inputs * outputs)
        bias = slice(weight.stop, weight.stop + outputs)
        weights.append(vectors[:, weight].view(num_clients, outputs, inputs))
        values.append(torch.baddbmm(vectors[:, None, bias], values[-1], weights[-1].mT))
        places.append((weight, bias))
        start = bias.stop
        if start < vectors.shape[1]:
            values[-1].relu_()
    log_probabilities = values[-1].log_softmax(2)
    losses = -log_probabilities.gather(2, y[:, :, None]).mean((1, 2))
    slopes = log_probabilities.exp().scatter_add_(2, y[:, :, None], -torch.ones(num_clients, n, 1)).div_(n)
    found = torch.empty_like(vectors)
    for layer in reversed(range(len(weights))):
        weight, bias = places[layer]
        torch.sum(slopes, 1, out=found[:, bias])
        found[:, weight].view_as(weights[layer]).copy_(slopes.mT @ values[layer])
        if layer:
            slopes = (slopes @ weights[layer]).mul_(values[layer] > 0)
    return found, losses, values[-1]


def in_lockstep(task: Task, clients: list[Client], gradients: Gradients) -> list[Tensor]:
    hub, vectors = getcurrent(), task.model.initial.repeat(len(clients), 1)
    asked: list[tuple[int, Tensor, Tensor]] = []

    def update(client: Client) -> None:
        tally = Tally(task.likelihood, CPU)
        for batch in minibatches(client, task.local, stream(0, client.id)):
            loss, outputs = hub.switch((client.id, batch.x, batch.y))
            if batch.in_last_epoch:
                tally.add(loss, outputs, batch.y)
        tally.result()

    turns = [greenlet(update) for _ in clients]

    def advance(number: int, *given: object) -> None:
        answer = turns[number].switch(*given)
        if not turns[number].dead:
            asked.append(answer)

    for client in clients:
        advance(client.id, client)
    while asked:  # the clients are of one size here, so that all are asked for together
        numbers, xs, ys = zip(*asked, strict=True)
        asked.clear()
        found, losses, outputs = gradients(vectors, torch.stack(xs), torch.stack(ys))
        vectors.add_(found, alpha=-task.local.lr)
        for number, loss, output in zip(numbers, losses.unbind(), outputs.unbind(), strict=True):
            advance(number, (loss, output))
    return list(vectors)


def one_by_one(task: Task, clients: list[Client]) -> list[Tensor]:
    return [train(task, task.model.initial, client, stream(0, client.id)).vector for client in clients]


def main() -> None:
    set_up_process(threads=1)
    print("| network | parameters | lockstep by vmap / one by one | by hand / one by one | largest difference |")
    print("|---|---|---|---|---|")
    for widths in NETWORKS:
        torch.manual_seed(0)
        size = 32 * BATCHES
        task = make_task(FlatModel(make_module(widths), CPU), (size,) * CLIENTS, epochs=1, batch_size=32, lr=0.05)
        train_set = Split(torch.randn(size * CLIENTS, widths[0]), torch.randint(widths[-1], (size * CLIENTS,)))
        clients = [
            Client(id_, train_set, indices, None)
            for id_, indices in enumerate(torch.split(torch.arange(size * CLIENTS), size))
        ]
        ways = [
            partial(one_by_one, task, clients),
            partial(in_lockstep, task, clients, by_vmap(task)),
            partial(in_lockstep, task, clients, partial(by_hand, widths)),
        ]
        results = [way() for way in ways]
        ratios: list[list[float]] = [[], []]
        for _ in range(REPEATS):
            seconds = []
            for way in ways:
                begun = time.process_time()
                way()
                seconds.append(time.process_time() - begun)
            for ratio, second in zip(ratios, seconds[1:], strict=True):
                ratio.append(second / seconds[0])
        apart = max(
            ((one - other).norm() / one.norm()).item()
            for other_way in results[1:]
            for one, other in zip(results[0], other_way, strict=True)
        )
        medians = " | ".join(f"{statistics.median(ratio):.2f} ({min(ratio):.2f})" for ratio in ratios)
        print(f"| MLP {'-'.join(map(str, widths))} | {task.model.layout.size} | {medians} | {apart:.0e} |", flush=True)


if __name__ == "__main__":
    main()
