"""FedAvg against PyTorch's SGD and means computed by hand."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bfl_bench.inference.train import minibatches
from bfl_bench.method import Client, Tensors
from bfl_bench.methods.fedavg import FedAvg
from tests.federation import (
    NUM_CLASSES,
    SIZES,
    generator,
    make_clients,
    make_task,
    make_worker,
    random_start,
    run_round,
    train_clients,
)

BY_SIZE = FedAvg("fedavg", "size")
UNIFORM = FedAvg("fedavg", "uniform")


def params(replies: list[tuple[int, Tensors]]) -> np.ndarray:
    return np.stack([message["params"].double().numpy() for _, message in replies])


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.8, "weight_decay": 0.05, "clip": 0.5}])
def test_one_client_is_plain_sgd(settings: dict[str, Any]) -> None:
    """Three rounds of one client: three times SGD from where it stopped, its momentum starting anew."""
    task, (client,) = make_task(sizes=(11,), **settings), make_clients((11,))
    state = {"params": random_start(task)}
    module = copy.deepcopy(task.model.module)
    module.load_state_dict(task.model.layout.to_state_dict(state["params"]))
    for round_ in range(3):
        rng = generator(round_)
        reply = BY_SIZE.client_update(task, BY_SIZE.broadcast(task, state), {}, client, rng)
        state, _ = BY_SIZE.server_update(task, state, iter([(0, reply.message)]), generator())
        optimizer = torch.optim.SGD(
            module.parameters(), lr=0.2, momentum=task.local.momentum, weight_decay=task.local.weight_decay
        )
        for x, y, *_ in minibatches(client, task.local, generator(round_)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            if task.local.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), task.local.clip)
            optimizer.step()
        assert torch.equal(state["params"], reply.message["params"])  # the mean of one is that one, bit for bit
    result = torch.cat([p.detach().flatten() for p in module.parameters()])
    # float32 rounding over 18 steps: the vector in one operation, PyTorch tensor by tensor.
    torch.testing.assert_close(state["params"], result, rtol=1e-5, atol=2e-6)


def test_clients_with_the_same_data_and_full_batches_are_one() -> None:
    task = make_task(sizes=(9, 9, 9), batch_size=9, epochs=3)
    (client,) = make_clients((9,))
    clients = [Client(id_, client.train, client.indices, None) for id_ in range(3)]
    state = {"params": random_start(task)}
    several = run_round(BY_SIZE, task, state, clients)["params"]
    one = run_round(BY_SIZE, task, state, clients[:1])["params"]
    # Each client sums its batch in an order of its own: float32 rounding of three steps.
    torch.testing.assert_close(several, one, rtol=1e-5, atol=1e-6)
    assert (one - state["params"]).abs().max() > 0.01


def test_weights_by_size_and_uniform() -> None:
    task, clients = make_task(), make_clients()
    state = {"params": random_start(task)}
    replies = train_clients(BY_SIZE, task, state, clients)
    vectors = params(replies)
    n = np.array(SIZES, dtype=float)
    expected = {"size": (n[:, None] * vectors).sum(0) / n.sum(), "uniform": vectors.sum(0) / 3}
    for method in (BY_SIZE, UNIFORM):
        new, metrics = method.server_update(task, state, iter(replies), generator())
        assert new.keys() == {"params"}
        assert metrics == {}
        assert new["params"].dtype == torch.float32
        # One rounding to float32 at the end.
        np.testing.assert_allclose(new["params"].numpy(), expected[method.weights], rtol=1e-7, atol=1e-9)
    assert np.abs(expected["size"] - expected["uniform"]).max() > 1e-3


def test_partial_cohort_weighs_by_the_sizes_of_its_own_clients() -> None:
    task, clients = make_task(), make_clients()
    state = {"params": random_start(task)}
    replies = train_clients(BY_SIZE, task, state, [clients[0], clients[2]])
    vectors = params(replies)
    new, _ = BY_SIZE.server_update(task, state, iter(replies), generator())
    np.testing.assert_allclose(new["params"].numpy(), (7 * vectors[0] + 4 * vectors[1]) / 11, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("server_lr", [0.5, 1.0, 1.3])
def test_server_step(server_lr: float) -> None:
    task, clients = make_task(server_lr=server_lr), make_clients()
    state = {"params": random_start(task)}
    kept = state["params"].clone()
    replies = train_clients(BY_SIZE, task, state, clients)
    mean = np.average(params(replies), axis=0, weights=SIZES)
    old = kept.double().numpy()
    new, _ = BY_SIZE.server_update(task, state, iter(replies), generator())
    np.testing.assert_allclose(new["params"].numpy(), old + server_lr * (mean - old), rtol=1e-7, atol=1e-9)
    assert torch.equal(state["params"], kept)


def test_statistics_of_normalisation_are_averaged_too() -> None:
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, NUM_CLASSES))
    sizes = (8, 12, 4)  # batches of 4: none of a single example, which BatchNorm refuses
    task, clients = make_task(module, sizes=sizes), make_clients(sizes)
    state = {"params": random_start(task)}
    replies = train_clients(BY_SIZE, task, state, clients)
    new, _ = BY_SIZE.server_update(task, state, iter(replies), generator())
    statistics = slice(task.model.layout.num_trainable, None)
    expected = np.average(params(replies), axis=0, weights=sizes)[statistics]
    assert len(expected) == 12
    np.testing.assert_allclose(new["params"][statistics].numpy(), expected, rtol=1e-7, atol=1e-9)
    assert (new["params"] - state["params"])[statistics].abs().min() > 1e-4


def test_init_is_the_network_and_draws_are_the_state() -> None:
    task = make_task()
    fresh = task.model.vector.clone()
    task.model.load(random_start(task))  # whatever was loaded since does not matter
    state = BY_SIZE.init(task, generator())
    assert torch.equal(state["params"], fresh)
    task.model.vector.zero_()
    assert state["params"].any()
    assert BY_SIZE.init_client(task, state, 1) == {}
    (draw,) = BY_SIZE.draws(task, state, 10, generator())
    assert torch.equal(draw, state["params"])


def test_update_carries_the_trained_model_and_its_metrics() -> None:
    task, clients = make_task(), make_clients()
    state = {"params": random_start(task)}
    update = BY_SIZE.client_update(task, BY_SIZE.broadcast(task, state), {}, clients[0], generator())
    assert torch.equal(update.message["params"], update.local["params"])
    assert update.memory == {}
    assert update.metrics.keys() == {"train_loss", "train_acc"}
    assert update.metrics["train_loss"] > 0


def test_rounds_learn() -> None:
    """A plain sanity check: the training loss falls over twenty rounds."""
    worker = make_worker(BY_SIZE, sizes=(30, 50, 20))
    clients = make_clients((30, 50, 20))
    state = BY_SIZE.init(worker.task, generator())

    def loss() -> float:
        worker.task.model.load(state["params"])
        with torch.no_grad():
            return nn.functional.cross_entropy(worker.task.model(worker.train.x), worker.train.y).item()

    before = loss()
    for _ in range(20):
        state = run_round(BY_SIZE, worker.task, state, clients)
    assert loss() < 0.7 * before
