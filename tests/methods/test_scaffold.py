"""SCAFFOLD: the server's control is the mean of all clients' controls; the first round is FedAvg's."""

from typing import Any

import pytest
import torch

from bfl_bench.inference.train import effective_steps, full_gradient
from bfl_bench.method import Task, Tensors
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.scaffold import Scaffold
from tests.federation import generator, make_clients, make_task, random_start, run_round


def start_state(task: Task) -> Tensors:
    return {"params": random_start(task), "control": torch.zeros_like(task.model.gradient)}


def run_rounds(method: Scaffold, task: Task, cohorts: list[list[int]]) -> tuple[Tensors, dict[int, Tensors]]:
    clients, state = make_clients(), start_state(task)
    memories: dict[int, Tensors] = {}
    for round_, cohort in enumerate(cohorts):
        replies = []
        for id_ in cohort:
            memory = memories.get(id_) or method.init_client(task, state, id_)
            rng = generator(10 * round_ + id_)
            update = method.client_update(task, method.broadcast(task, state), memory, clients[id_], rng)
            assert update.memory is not None
            memories[id_] = update.memory
            replies.append((id_, update.message))
        state, _ = method.server_update(task, state, replies, generator())
    return state, memories


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("cohorts", [[[0, 1, 2]] * 3, [[1], [0, 2], [1, 2], [2]]])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_server_control_is_the_mean_of_all_controls(option: Any, cohorts: list[list[int]], momentum: float) -> None:
    task = make_task(momentum=momentum)
    state, memories = run_rounds(Scaffold("scaffold", "size", option), task, cohorts)
    visited = torch.stack([memory["control"] for memory in memories.values()])
    assert visited.abs().max() > 0.01
    # float32 states, updated by differences
    torch.testing.assert_close(state["control"], visited.sum(0) / 3, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("option", ["I", "II"])
def test_first_round_is_fedavg(option: Any) -> None:
    task, clients = make_task(), make_clients()
    state = start_state(task)
    scaffold = run_round(Scaffold("scaffold", "size", option), task, state, clients)
    fedavg = run_round(FedAvg("fedavg", "size"), task, {"params": state["params"]}, clients)
    # the server adds a mean of deltas instead of taking a mean: float32 rounding
    torch.testing.assert_close(scaffold["params"], fedavg["params"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_option_two_is_the_mean_gradient_of_the_steps(momentum: float) -> None:
    """One full batch per epoch and a tiny learning rate: all gradients are the same, and the control must be it."""
    task = make_task(lr=1e-4, epochs=6, batch_size=100, momentum=momentum)
    client, state = make_clients()[1], start_state(task)
    state["control"] = torch.randn(len(state["control"]), generator=generator(3)) * 0.1
    memory = {"control": torch.randn(len(state["control"]), generator=generator(4)) * 0.1}
    update = Scaffold("scaffold", "size", "II").client_update(task, state, memory, client, generator())
    assert update.memory is not None
    expected = full_gradient(task, state["params"], client, generator())
    # the gradient moves by about lr * steps; the move of 1e-4 is a difference of float32 numbers near 1
    torch.testing.assert_close(update.memory["control"], expected, rtol=0, atol=5e-3)
    assert expected.abs().max() > 0.1


def test_option_one_is_the_gradient_at_the_servers_model() -> None:
    task, client = make_task(), make_clients()[0]
    state = start_state(task)
    memory = {"control": torch.full_like(state["control"], 0.3)}
    update = Scaffold("scaffold", "size", "I").client_update(task, state, memory, client, generator())
    assert update.memory is not None
    expected = full_gradient(task, state["params"], client, generator(77))
    torch.testing.assert_close(update.memory["control"], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(update.message["control_delta"], expected - 0.3, rtol=1e-5, atol=1e-6)


def test_correction_points_to_the_servers_control() -> None:
    """One step of a full batch: y = x - lr (g - c_i + c)."""
    task = make_task(epochs=1, batch_size=100)
    client, state = make_clients()[2], start_state(task)
    state["control"] = torch.randn(len(state["control"]), generator=generator(3))
    memory = {"control": torch.randn(len(state["control"]), generator=generator(4))}
    update = Scaffold("scaffold", "size", "II").client_update(task, state, memory, client, generator())
    gradient = full_gradient(task, state["params"], client, generator())
    expected = -task.local.lr * (gradient - memory["control"] + state["control"])
    torch.testing.assert_close(update.message["delta"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.0), (7, 0.0), (1, 0.9), (5, 0.5), (40, 0.9)])
def test_effective_steps_add_up_a_constant_gradient(steps: int, momentum: float) -> None:
    velocity = position = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        position += velocity
    assert effective_steps(steps, momentum) == pytest.approx(position, rel=1e-12)  # float64 sums
