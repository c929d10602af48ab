"""FedNova: FedAvg where all clients take equally many steps, by hand where they do not."""

import pytest
import torch
from torch import nn

from bfl_bench.inference.train import effective_steps
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fednova import FedNova
from tests.federation import make_clients, make_task, random_start, run_round, train_clients


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_equal_steps_are_fedavg(momentum: float) -> None:
    sizes = (9, 12, 10)  # three batches of four each
    task, clients = make_task(sizes=sizes, momentum=momentum), make_clients(sizes)
    state = {"params": random_start(task)}
    fednova = run_round(FedNova("fednova", "size"), task, state, clients)["params"]
    fedavg = run_round(FedAvg("fedavg", "size"), task, state, clients)["params"]
    # the same mean of deltas, divided and multiplied by the number of steps: float32 rounding
    torch.testing.assert_close(fednova, fedavg, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_unequal_steps_by_hand(momentum: float) -> None:
    task, clients = make_task(momentum=momentum), make_clients()
    state = {"params": random_start(task)}
    moved = [m["params"] - state["params"] for _, m in train_clients(FedAvg("f", "size"), task, state, clients)]
    weights = torch.tensor([7.0, 12.0, 4.0]) / 23
    steps = torch.tensor([effective_steps(n, momentum) for n in (4, 6, 2)])  # two epochs of batches of four
    direction = sum(w * d / a for w, d, a in zip(weights, moved, steps, strict=True))
    expected = state["params"] + (weights * steps).sum() * direction
    fednova = run_round(FedNova("fednova", "size"), task, state, clients)["params"]
    torch.testing.assert_close(fednova, expected, rtol=1e-5, atol=1e-6)
    fedavg = run_round(FedAvg("fedavg", "size"), task, state, clients)["params"]
    assert (fednova - fedavg).abs().max() > 1e-3


def test_statistics_are_averaged_as_in_fedavg() -> None:
    task, clients = make_task(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))), make_clients((8, 12, 4))
    state = {"params": random_start(task)}
    rest = slice(task.model.layout.num_trainable, None)
    fednova = run_round(FedNova("fednova", "uniform"), task, state, clients)["params"]
    fedavg = run_round(FedAvg("fedavg", "uniform"), task, state, clients)["params"]
    torch.testing.assert_close(fednova[rest], fedavg[rest], rtol=1e-5, atol=1e-6)
    assert (fednova - fedavg).abs().max() > 1e-3
