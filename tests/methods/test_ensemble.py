"""Ensemble: its first member is FedAvg bit for bit, the others are FedAvg from elsewhere, and all of them predict."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bfl_bench.method import Task
from bfl_bench.methods.ensemble import Ensemble
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.rng import derive_seed
from tests.composing import SMALL, experiment, run_in
from tests.federation import generator, make_clients, make_server, make_task, random_start, run_round

FEDAVG = FedAvg("fedavg", "size")


def three() -> tuple[Ensemble, Task]:
    task = make_task()
    initials = torch.stack([task.model.initial, random_start(task, 6), random_start(task, 7)])
    return Ensemble("ensemble", "size", 3), replace(task, initials=initials)


@pytest.mark.parametrize("step", [[], ["server.rule=adam", "server.lr=0.05", "server.momentum=0.9"]])
def test_one_member_is_fedavg_byte_for_byte(step: list[str], tmp_path: Path) -> None:
    options = [*SMALL, *step, "participation=0.5"]
    fedavg = run_in(tmp_path / "fedavg", *options, "method=fedavg")
    assert run_in(tmp_path / "one", *options, "method=ensemble", "method.members=1") == fedavg
    assert run_in(tmp_path / "two", *options, "method=ensemble", "method.members=2") != fedavg


def test_members_are_fedavg_each_from_its_own_start() -> None:
    ensemble, task = three()
    clients = make_clients()
    state = run_round(ensemble, task, ensemble.init(task, generator()), clients)
    assert state["params"].shape == (3, task.model.layout.size)
    for member in range(3):
        replies = []
        for client in clients:
            seed = 100 + client.id if member == 0 else derive_seed(100 + client.id, "member", member)
            update = FEDAVG.client_update(task, {"params": task.initials[member]}, {}, client, generator(seed))
            replies.append((client.id, update.message))
        alone, _ = FEDAVG.server_update(task, {"params": task.initials[member]}, iter(replies), generator())
        assert torch.equal(state["params"][member], alone["params"])


def test_the_servers_step_remembers_for_each_member() -> None:
    ensemble, task = three()
    task = replace(task, server=make_server(rule="yogi", lr=0.1, momentum=0.5))
    state = ensemble.init(task, generator())
    targets = torch.stack([random_start(task, seed) for seed in (1, 2, 3)])
    for _ in range(2):
        state, _ = ensemble.server_update(task, state, iter([(0, {"params": targets})]), generator())
    for member in range(3):
        alone = {"params": task.initials[member]} | task.server.begin(task.model.gradient)
        for _ in range(2):
            alone = task.server.move(alone, targets[member])
        assert all(torch.equal(state[name][member], alone[name]) for name in alone)


def test_the_prediction_is_the_mean_of_the_members() -> None:
    ensemble, task = three()
    state = ensemble.init(task, generator())
    x = torch.randn(9, 5, generator=generator(1))
    found = ensemble.predict(task, state, x, 10, 4, generator())
    members = [FEDAVG.predict(task, {"params": row}, x, 1, 4, generator()) for row in state["params"]]
    mean = torch.stack([member.log_probabilities.exp() for member in members]).mean(0)
    torch.testing.assert_close(found.log_probabilities.exp(), mean)
    assert len(list(ensemble.draws(task, state, 2, generator()))) == 2


def test_initial_models_differ_and_the_first_is_the_networks() -> None:
    worker = experiment(*SMALL, "method=ensemble", "method.members=3").worker
    assert torch.equal(worker.task.initials[0], experiment(*SMALL, "method=fedavg").worker.task.model.initial)
    assert len({tuple(row.tolist()) for row in worker.task.initials}) == 3


def test_metrics_of_training_are_means_over_members() -> None:
    ensemble, task = three()
    client = make_clients()[1]
    metrics = ensemble.client_update(task, {"params": task.initials}, {}, client, generator()).metrics
    seeds = [5, derive_seed(5, "member", 1), derive_seed(5, "member", 2)]
    losses = [
        FEDAVG.client_update(task, {"params": start}, {}, client, generator(seed)).metrics["train_loss"]
        for start, seed in zip(task.initials, seeds, strict=True)
    ]
    assert metrics["train_loss"] == pytest.approx(sum(losses) / 3)
