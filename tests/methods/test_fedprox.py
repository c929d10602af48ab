"""FedProx: FedAvg at mu 0, autograd's gradient of the proximal objective otherwise."""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bfl_bench.inference.train import minibatches
from bfl_bench.method import Client, Task
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fedprox import FedProx
from tests.federation import NUM_CLASSES, generator, make_clients, make_task, random_start, run_round

ALL = {"momentum": 0.7, "weight_decay": 0.05, "clip": 0.5}


def prox(mu: float) -> FedProx:
    return FedProx("fedprox", "size", mu)


def trained(method: FedAvg | FedProx, task: Task, start: Tensor, client: Client) -> Tensor:
    return method.client_update(task, {"params": start}, {}, client, generator()).message["params"]


def flatten(module: nn.Module) -> Tensor:
    return torch.cat([p.flatten() for p in module.parameters()])


@pytest.mark.parametrize("settings", [{}, ALL])
def test_mu_zero_is_fedavg_bit_for_bit(settings: dict[str, Any]) -> None:
    task, clients = make_task(**settings), make_clients()
    state = {"params": random_start(task)}
    fedavg = run_round(FedAvg("fedavg", "size"), task, state, clients)["params"]
    assert torch.equal(run_round(prox(0.0), task, state, clients)["params"], fedavg)
    assert not torch.allclose(run_round(prox(0.5), task, state, clients)["params"], fedavg)


@pytest.mark.parametrize("settings", [{}, ALL])
def test_equals_sgd_on_the_proximal_objective(settings: dict[str, Any]) -> None:
    """The whole local training against autograd of CE + mu/2 |w - w0|^2, weight decay towards zero on top."""
    mu = 0.8
    task, client = make_task(epochs=3, batch_size=3, **settings), make_clients()[0]
    start = random_start(task)
    module = copy.deepcopy(task.model.module)
    module.load_state_dict(task.model.layout.to_state_dict(start))
    local = task.local
    optimizer = torch.optim.SGD(
        module.parameters(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay
    )
    for x, y, *_ in minibatches(client, local, generator()):
        optimizer.zero_grad()
        distance = (flatten(module) - start).square().sum()
        (nn.functional.cross_entropy(module(x), y) + mu / 2 * distance).backward()
        if local.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), local.clip)
        optimizer.step()
    # float32 rounding over 9 steps.
    torch.testing.assert_close(trained(prox(mu), task, start, client), flatten(module), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("mu", [0.1, 2.0])
def test_the_gradient_of_one_step_away_from_the_anchor(mu: float) -> None:
    """After three full-batch steps the fourth is -lr times the gradient in float64 of the whole objective."""
    client = make_clients()[1]
    lr = 0.3
    tasks = [make_task(epochs=epochs, batch_size=100, lr=lr) for epochs in (3, 4)]
    anchor = random_start(tasks[0])
    third, fourth = (trained(prox(mu), task, anchor, client) for task in tasks)
    assert (third - anchor).norm() > 0.05

    module = copy.deepcopy(tasks[0].model.module)
    module.load_state_dict(tasks[0].model.layout.to_state_dict(third))
    module.double()
    x, y = client.train.x[client.indices].double(), client.train.y[client.indices]
    loss = nn.functional.cross_entropy(module(x), y) + mu / 2 * (flatten(module) - anchor).square().sum()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
    # Parameters near 1 in float32 carry 1e-7; divided by lr, and the gradient's own rounding, 2e-6.
    torch.testing.assert_close((third - fourth).double() / lr, gradient, rtol=0, atol=2e-6)
    assert (mu * (third - anchor)).abs().max() > 1e-2


def test_larger_mu_stays_closer_to_the_anchor() -> None:
    task, client = make_task(epochs=10, lr=0.05), make_clients()[1]
    start = random_start(task)
    distances = [(trained(prox(mu), task, start, client) - start).norm().item() for mu in (0, 0.1, 1, 10)]
    assert all(far > 1.05 * near for far, near in itertools.pairwise(distances))
    assert distances[-1] > 0


def test_first_step_feels_no_pull() -> None:
    """At the anchor the pull is zero, however strong: also where the start is far from zero."""
    task, client = make_task(epochs=1, batch_size=100), make_clients()[1]
    start = random_start(task)
    fedavg = trained(FedAvg("fedavg", "size"), task, start, client)
    # g + mu w - mu w in float32: the rounding of mu w, 1e-7 times 5.
    torch.testing.assert_close(trained(prox(5.0), task, start, client), fedavg, rtol=0, atol=2e-6)


def test_statistics_are_not_pulled() -> None:
    """After one full batch the statistics have seen only the first forward pass: as in FedAvg, whatever mu."""
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, NUM_CLASSES))
    task, client = make_task(module, epochs=2, batch_size=100), make_clients()[1]
    start = random_start(task)
    one = replace(task, local=replace(task.local, epochs=1))
    fedavg = trained(FedAvg("fedavg", "size"), one, start, client)
    pulled = trained(prox(4.0), one, start, client)
    statistics = slice(task.model.layout.num_trainable, None)
    assert torch.equal(pulled[statistics], fedavg[statistics])
    assert (pulled - start)[statistics].abs().min() > 1e-4
    assert not torch.allclose(trained(prox(4.0), task, start, client), trained(prox(0.0), task, start, client))


def test_message_local_model_and_broadcast() -> None:
    task, client = make_task(), make_clients()[0]
    start = random_start(task)
    kept = start.clone()
    update = prox(0.3).client_update(task, {"params": start}, {}, client, generator())
    assert torch.equal(start, kept)
    assert torch.equal(update.message["params"], update.local["params"])
    assert update.memory == {}
    assert update.metrics.keys() == {"train_loss", "train_acc"}
