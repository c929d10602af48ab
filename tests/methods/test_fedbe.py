"""FedBE: FedAvg without distillation; teachers with the right moments; a student that follows the ensemble."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bfl_bench.method import ServerData, Task
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fedbe import FedBe
from tests.composing import SMALL, experiment, resolve
from tests.federation import generator, make_clients, make_split, make_task, random_start, run_round


def method(**changes: Any) -> FedBe:
    default = FedBe(
        name="fedbe",
        weights="size",
        teachers="gaussian",
        num_teachers=3,
        variance_scale=0.5,
        dirichlet_alpha=2.0,
        temperature=0.5,
        epochs=4,
        batch_size=8,
        lr=0.1,
        momentum=0.5,
        swa_start=2,
        swa_every=3,
    )
    return replace(default, **changes)


def task_with_server_data() -> Task:
    return replace(make_task(), server_data=ServerData(make_split(30, seed=9).x, None))


CLIENTS = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.tensor([7.0, 12.0, 4.0])


def test_without_distillation_it_is_fedavg() -> None:
    task, clients = task_with_server_data(), make_clients()
    state = {"params": random_start(task)}
    fedavg = run_round(FedAvg("fedavg", "size"), task, state, clients)["params"]
    assert torch.equal(run_round(method(epochs=0, num_teachers=0), task, state, clients)["params"], fedavg)
    assert not torch.allclose(run_round(method(), task, state, clients)["params"], fedavg, atol=1e-3)


def test_gaussian_teachers_have_the_moments_of_the_clients() -> None:
    num = 4000
    drawn = torch.stack(method(num_teachers=num).sample_teachers(CLIENTS, WEIGHTS, generator()))
    weights = WEIGHTS / 23
    mean = weights @ CLIENTS
    variance = 0.5 * weights @ (CLIENTS - mean) ** 2
    # four standard errors of a mean and of a variance over 4000 draws
    assert ((drawn.mean(0) - mean).abs() < 4.5 * (variance / num).sqrt()).all()
    assert ((drawn.var(0) / variance - 1).abs() < 4.5 * (2 / num) ** 0.5).all()


def test_the_default_scales_the_deviation_by_a_tenth() -> None:
    """As the authors' code does: a hundredth of the variance."""
    assert resolve("method=fedbe")["method"]["variance_scale"] == pytest.approx(0.1**2)


def test_dirichlet_teachers_are_convex_combinations_around_the_plain_mean() -> None:
    """The authors' code has the same concentration for every client, however many examples it holds."""
    num = 4000
    drawn = torch.stack(method(teachers="dirichlet", num_teachers=num).sample_teachers(CLIENTS, WEIGHTS, generator()))
    shares = torch.linalg.lstsq(CLIENTS.T.double(), drawn.T.double()).solution  # (3, num)
    assert (shares > -1e-5).all()
    assert torch.allclose(shares.sum(0), torch.ones(num, dtype=torch.float64), atol=1e-5)
    expected = torch.full((3,), 1 / 3, dtype=torch.float64)
    spread = (expected * (1 - expected) / (3 * 2.0 + 1) / num).sqrt()  # of the mean of Dirichlet draws, each with 2
    assert ((shares.mean(1) - expected).abs() < 4.5 * spread).all()
    # a Dirichlet of 2, 2, 2: standard error of a variance over 4000 draws, of nearly normal numbers
    variance = expected * (1 - expected) / (3 * 2.0 + 1)
    assert ((shares.var(1) / variance - 1).abs() < 4.5 * (2 / num) ** 0.5).all()


def test_targets_are_the_sharpened_mean_prediction() -> None:
    task = task_with_server_data()
    models = [random_start(task, seed) for seed in (1, 2)]
    targets = method().make_targets(task, models)
    assert task.server_data is not None
    total = torch.zeros(30, 3)
    for params in models:
        task.model.load(params)
        with torch.no_grad():
            total += task.model(task.server_data.x).softmax(1) / 2
    expected = total**2 / (total**2).sum(1, keepdim=True)  # a temperature of one half squares
    torch.testing.assert_close(targets, expected)


def distance(task: Task, params: Tensor, targets: Tensor) -> float:
    assert task.server_data is not None
    task.model.load(params)
    with torch.no_grad():
        return (targets * (targets.log() - task.model(task.server_data.x).log_softmax(1))).sum(1).mean().item()


def test_the_student_follows_the_ensemble() -> None:
    task = task_with_server_data()
    targets = method().make_targets(task, [random_start(task, seed) for seed in (1, 2, 3)])
    start = random_start(task, 4)
    student, loss = method(epochs=30).distil(task, start, targets, generator())
    assert distance(task, student, targets) < 0.3 * distance(task, start, targets)
    assert loss > 0


def test_swa_averages_the_iterates_it_collects() -> None:
    """Steps of one batch each: the result is the mean of the models after steps 3, 6 and 9."""
    task = task_with_server_data()
    targets = method().make_targets(task, [random_start(task, 1)])
    start = random_start(task, 4)

    def after(steps: int) -> Tensor:
        plain = method(batch_size=30, epochs=steps, swa_start=1000)  # nothing collected: the last iterate
        return plain.distil(task, start, targets, generator())[0]

    student, _ = method(batch_size=30, epochs=10).distil(task, start, targets, generator())
    torch.testing.assert_close(student, (after(3) + after(6) + after(9)) / 3, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(student, after(10), atol=1e-3)


def test_server_examples_are_taken_from_the_clients() -> None:
    plain = experiment(*SMALL).worker
    held_out = experiment(*SMALL, "method=fedbe", "dataset.server_samples=20").worker
    assert sum(held_out.task.sizes) == sum(plain.task.sizes) - 20
    assert held_out.task.server_data is not None
    everything = {tuple(row) for row in plain.train.x.flatten(1).tolist()}
    server = {tuple(row) for row in held_out.task.server_data.x.flatten(1).tolist()}
    clients = {tuple(row) for row in held_out.train.x.flatten(1).tolist()}
    assert len(server) == 20
    assert server | clients == everything
    assert not server & clients
    assert held_out.task.server_data.y is None  # labels are withheld
    assert experiment(*SMALL, "method=fedavg", "dataset.server_samples=20").worker.task.server_data is None


@pytest.mark.parametrize("change", [{"teachers": "dirichlet"}, {"num_teachers": 0}, {"temperature": 1.0}])
def test_options_change_the_result(change: dict[str, Any]) -> None:
    task, clients = task_with_server_data(), make_clients()
    state = {"params": random_start(task)}
    usual = run_round(method(), task, state, clients)["params"]
    assert not torch.allclose(run_round(method(**change), task, state, clients)["params"], usual, atol=1e-4)
