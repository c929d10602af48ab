"""DENSE: what the generator is taught, what the student learns from it, and no dead switch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bfl_bench.errors import UnsuitableError
from bfl_bench.inference.distill import Student
from bfl_bench.method import DataInfo, Task, Tensors
from bfl_bench.methods.dense import Dense, ensemble
from bfl_bench.models.generator import ImageGenerator, batch_statistics, statistics_distance
from tests.federation import generator, make_clients, make_task, random_start, train_clients

SHAPE = (1, 8, 8)


def method(**changes: Any) -> Dense:
    default = Dense(
        name="dense",
        weights="uniform",
        epochs=2,
        generator_steps=4,
        generator_lr=0.01,
        num_images=12,
        latent=5,
        width=3,
        statistics_weight=1.0,
        boundary_weight=0.5,
        temperature=1.0,
        batch_size=8,
        lr=0.1,
        momentum=0.5,
        student="broadcast",
        flip=False,
    )
    return replace(default, **changes)


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.BatchNorm2d(2)] if norm else []
    return nn.Sequential(nn.Conv2d(1, 2, 3), *middle, nn.Tanh(), nn.Flatten(), nn.Linear(72, 3))


def task_for(module: nn.Module) -> Task:
    low, high = torch.full((1, 1, 1), -0.5), torch.full((1, 1, 1), 2.0)
    return replace(make_task(module), data=DataInfo(SHAPE, low, high))


def named(task: Task, vectors: list[Tensor], weights: tuple[float, ...]) -> list[tuple[float, Tensors]]:
    tensors = [{entry.name: entry.view(vector) for entry in task.model.layout.entries} for vector in vectors]
    return list(zip(weights, tensors, strict=True))


def test_ensemble_is_the_weighted_mean_of_logits() -> None:
    task = task_for(network())
    vectors = [random_start(task, seed) for seed in (1, 2)]
    x = torch.randn(4, *SHAPE, generator=generator())
    expected = torch.zeros(4, 3)
    for weight, vector in zip((0.25, 0.75), vectors, strict=True):
        task.model.load(vector)
        expected += weight * task.model(x).detach()
    logits, distance = ensemble(task, named(task, vectors, (1.0, 3.0)), x)
    torch.testing.assert_close(logits, expected)
    assert distance == 0  # no BatchNorm, no statistics


def test_images_lie_in_the_range_and_the_ensemble_names_their_labels() -> None:
    """Generator and noise descend: the loss after many steps is below that after one."""
    task = task_for(network())
    task.model.load(random_start(task, 3))
    clients = named(task, [random_start(task, seed) for seed in (1, 2)], (1.0, 1.0))
    plain = method(boundary_weight=0.0)
    first, start = replace(plain, generator_steps=1).invent(task, clients, seed=7)
    images, loss = replace(plain, generator_steps=60).invent(task, clients, seed=7)
    assert images.shape == (12, *SHAPE)
    assert images.min() >= -0.5
    assert images.max() <= 2.0
    assert loss < 0.7 * start
    assert not torch.equal(first, images)


def test_the_boundary_term_draws_images_to_where_the_student_disagrees() -> None:
    task = task_for(network())
    task.model.load(random_start(task, 3))
    clients = named(task, [random_start(task, seed) for seed in (1, 2)], (1.0, 1.0))

    def disagreement(weight: float) -> float:
        images, _ = method(boundary_weight=weight, generator_steps=60).invent(task, clients, seed=7)
        with torch.no_grad():
            teacher = ensemble(task, clients, images)[0].log_softmax(1)
            student = task.model(images).log_softmax(1)
        return (teacher.exp() * (teacher - student)).sum(1).mean().item()

    assert disagreement(5.0) > 1.2 * disagreement(0.0)


def test_the_student_comes_to_agree_with_the_ensemble() -> None:
    task = task_for(network())
    clients = make_clients(shape=SHAPE)
    state = {"params": random_start(task, 3)}
    dense = method(epochs=15, generator_steps=3, lr=0.2)
    replies = train_clients(dense, task, state, clients)
    new, metrics = dense.server_update(task, state, iter(replies), generator())
    teachers = named(task, [message["params"] for _, message in replies], (1.0, 1.0, 1.0))
    images, _ = dense.invent(task, teachers, seed=99)  # images that nobody has learnt from
    with torch.no_grad():
        teacher = ensemble(task, teachers, images)[0].log_softmax(1)

        def distance(params: Tensor) -> float:
            task.model.load(params)
            return (teacher.exp() * (teacher - task.model(images).log_softmax(1))).sum(1).mean().item()

        assert distance(new["params"]) < 0.3 * distance(state["params"])
    assert set(metrics) == {"generator_loss", "distillation_loss"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "size"},
        {"epochs": 3},
        {"generator_steps": 5},
        {"generator_lr": 0.05},
        {"num_images": 13},
        {"latent": 6},
        {"width": 4},
        {"boundary_weight": 5.0},
        {"temperature": 4.0},
        {"batch_size": 5},
        {"lr": 0.2},
        {"momentum": 0.9},
        {"statistics_weight": 9.0},
        {"student": "fresh"},
        {"flip": True},
    ],
)
def test_every_option_changes_the_result(changes: dict[str, Any]) -> None:
    task = task_for(network(norm=True))
    task = replace(task, initials=torch.stack([task.model.initial, random_start(task, 4)]))
    clients = make_clients(shape=SHAPE)
    state = {"params": random_start(task, 3)}
    replies = train_clients(method(), task, state, clients)
    results = [m.server_update(task, state, iter(replies), generator())[0] for m in (method(), method(**changes))]
    assert not torch.allclose(results[0]["params"], results[1]["params"], atol=1e-6)


def test_distance_from_batch_statistics() -> None:
    module = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1)).eval()
    tensors = {"0.running_mean": torch.tensor([1.0, 2.0]), "0.running_var": torch.tensor([0.5, 1.0])}
    x = torch.randn(3, 2, 4, 4, generator=generator())
    with batch_statistics(module) as inputs:
        module(x)
    values = x.transpose(0, 1).flatten(1)
    mean = (values.mean(1) - tensors["0.running_mean"]).norm()
    variance = (values.var(1, correction=0) - tensors["0.running_var"]).norm()
    torch.testing.assert_close(statistics_distance(inputs, tensors), mean + variance)
    module(x * 2)
    assert inputs["0"] is not None
    assert torch.equal(inputs["0"], x)  # nobody listens any more


def test_generator_makes_images_of_the_side_asked_for() -> None:
    for channels, side in ((1, 28), (3, 32)):
        low, high = torch.zeros(channels, 1, 1), torch.ones(channels, 1, 1)
        assert ImageGenerator(4, 2, low, high, side)(torch.randn(2, 4)).shape == (2, channels, side, side)


@pytest.mark.parametrize("shape", [(5,), (1, 8, 6), (1, 6, 6)])
def test_inputs_that_are_no_square_images_are_refused(shape: tuple[int, ...]) -> None:
    task = make_task()
    task = replace(task, data=DataInfo(shape, torch.zeros(1), torch.ones(1)))
    with pytest.raises(UnsuitableError, match="square images"):
        method().check(task)


def test_a_fresh_student_starts_from_the_second_initial_model() -> None:
    """With a learning rate of next to nothing, it stays where it started."""
    task = task_for(network())
    task = replace(task, initials=torch.stack([task.model.initial, random_start(task, 4)]))
    state = {"params": random_start(task, 3)}
    for student, start in (("fresh", task.initials[1]), ("broadcast", state["params"])):
        dense = method(student=student, lr=1e-12)
        assert dense.needs.num_initials == (2 if student == "fresh" else 1)
        replies = train_clients(dense, task, state, make_clients(shape=SHAPE))
        new, _ = dense.server_update(task, state, iter(replies), generator())
        torch.testing.assert_close(new["params"], start)


def test_a_mirrored_image_is_taught_as_the_ensemble_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image that the student gets is one of the pool or its mirror image, with the target of just that."""
    task = task_for(network())
    seen: list[tuple[Tensor, Tensor]] = []

    def record(self: Student, x: Tensor, targets: Tensor, *others: object) -> float:
        seen.append((x, targets))
        return 0.0

    monkeypatch.setattr(Student, "train_epoch", record)
    state = {"params": random_start(task, 3)}
    dense = method(flip=True, temperature=2.0)
    replies = train_clients(dense, task, state, make_clients(shape=SHAPE))
    dense.server_update(task, state, iter(replies), generator())
    teachers = named(task, [message["params"] for _, message in replies], (1.0, 1.0, 1.0))
    (first, _), (second, targets) = seen
    assert (len(first), len(second)) == (12, 24)
    with torch.no_grad():
        torch.testing.assert_close(targets, (ensemble(task, teachers, second)[0] / 2).softmax(1))
    same, mirrored = ((first == other[:12]).flatten(1).all(1) for other in (second, second.flip(-1)))
    assert (same | mirrored).all()
    assert not same.all()
    assert not mirrored.all()
