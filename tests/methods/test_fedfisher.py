"""FedFisher: Fisher merging and FedLPA where it is these, the authors' descent, and the choice on labelled data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bfl_bench.errors import ConfigError
from bfl_bench.inference import kronecker
from bfl_bench.inference.merging import Structure
from bfl_bench.method import ServerData, Task, Tensors
from bfl_bench.methods.fedfisher import FedFisher
from bfl_bench.methods.fedlpa import FedLpa
from bfl_bench.methods.fisher_merging import FisherMerging
from tests.composing import SMALL, resolve, run_in
from tests.federation import generator, make_clients, make_split, make_task, run_round, train_clients

SHAPE = (1, 5, 5)


def method(**changes: Any) -> FedFisher:
    default = FedFisher(
        name="fedfisher",
        weights="size",
        structure="kronecker",
        fisher="model",
        solver="exact",
        damping=0.01,
        tolerance=1e-10,
        max_steps=500,
        descent_steps=30,
        descent_lr=0.01,
        select_every=None,
    )
    return replace(default, **changes)


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))


def make_replies(of: FedFisher) -> tuple[Task, Tensors, list[tuple[int, Tensors]]]:
    task = make_task(make_network())
    data = make_split(30, SHAPE, seed=9)
    task = replace(task, server_data=ServerData(data.x, data.y))
    state = {"params": task.model.initial}
    return task, state, train_clients(of, task, state, make_clients(shape=SHAPE))


def test_the_exact_diagonal_solution_is_fisher_merging() -> None:
    task, clients = make_task(), make_clients()
    state = {"params": task.model.initial}
    expected = run_round(FisherMerging("fisher_merging", "size", "model", False, 0.0), task, state, clients)
    found = run_round(method(structure="diagonal"), task, state, clients)
    assert torch.equal(found["params"], expected["params"])
    assert torch.equal(found["precision"], expected["precision"])


def test_for_the_labels_of_the_data_the_exact_solution_is_fedlpas() -> None:
    task, clients = make_task(make_network()), make_clients(shape=SHAPE)
    state = {"params": task.model.initial}
    fedlpa = FedLpa("fedlpa", "size", "cg", 0.01, "trace", "kfac", 1e-10, 500, 1, 1.0, [])
    expected = run_round(fedlpa, task, state, clients)["params"]
    assert torch.equal(run_round(method(fisher="data"), task, state, clients)["params"], expected)
    assert not torch.allclose(run_round(method(), task, state, clients)["params"], expected, atol=1e-3)


def dense_gradient(task: Task, replies: list[tuple[int, Tensors]], params: Tensor) -> dict[str, Tensor]:
    """Sum n_k (B_k x A_k) vec(M - M_k) / n for every layer, by dense matrices."""
    found = {}
    for layer in kronecker.find_layers(task.model):
        total = torch.zeros((), dtype=torch.float64)
        for id_, message in replies:
            a, b = (kronecker.from_upper_triangle(message[f"{layer.name}.{f}"].double()) for f in "AB")
            distance = layer.read(params.double() - message["params"].double()).flatten()
            total = total + task.sizes[id_] / sum(task.sizes) * torch.kron(b, a) @ distance
        found[layer.name] = total
    return found


def test_the_exact_solution_has_no_gradient() -> None:
    task, state, replies = make_replies(method())
    new, metrics = method().server_update(task, state, iter(replies), generator())
    start = dense_gradient(task, replies, state["params"])
    for name, left in dense_gradient(task, replies, new["params"]).items():
        assert left.norm() < 1e-5 * start[name].norm()  # the model is float32
    assert metrics["residual"] < 1e-9


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_the_descent_is_the_authors_loop(structure: Structure) -> None:
    descending = method(structure=structure, solver="descent", damping=0.0, descent_steps=7)
    task, state, replies = make_replies(descending)
    new, _ = descending.server_update(task, state, iter(replies), generator())
    total = sum(task.sizes)
    theta = sum(task.sizes[id_] / total * message["params"].double() for id_, message in replies)
    assert isinstance(theta, Tensor)
    u = r = torch.zeros_like(theta)
    for _ in range(7):
        v = torch.zeros_like(theta)
        if structure == "diagonal":
            for id_, message in replies:
                v += task.sizes[id_] / total * message["precision"] * (theta - message["params"])
        else:
            by_layer = dense_gradient(task, replies, theta)
            for layer in kronecker.find_layers(task.model):
                layer.write(v, by_layer[layer.name].view_as(layer.read(theta)))
        u, r = 0.9 * u + v, 0.99 * r + v**2
        theta = theta - 0.01 * u / (r.sqrt() + 0.01 if structure == "diagonal" else (r + 0.01).sqrt())
    torch.testing.assert_close(new["params"].double(), theta, rtol=1e-6, atol=1e-7)


def test_of_the_iterates_the_most_accurate_is_kept() -> None:
    descending = method(structure="diagonal", solver="descent", descent_lr=0.3, descent_steps=12)
    task, state, replies = make_replies(descending)
    data = task.server_data
    assert data is not None
    iterates, accuracies = [], []
    for steps in (3, 6, 9, 12):
        changed = replace(descending, descent_steps=steps)
        iterates.append(changed.server_update(task, state, iter(replies), generator())[0]["params"])
        task.model.load(iterates[-1])
        accuracies.append((task.model(data.x).argmax(1) == data.y).double().mean().item())
    best = accuracies.index(max(accuracies))
    assert best < 3  # or the last would do
    chosen, _ = replace(descending, select_every=3).server_update(task, state, iter(replies), generator())
    assert torch.equal(chosen["params"], iterates[best])


def test_labels_are_asked_for_where_they_choose() -> None:
    assert method().needs.server_data == "none"
    assert method(solver="descent", select_every=3).needs.server_data == "labelled"
    released = resolve("method=fedfisher_released")
    assert released["dataset"]["server_samples"] == 500
    assert (released["method"]["descent_steps"], released["method"]["select_every"]) == (2000, 100)


@pytest.mark.parametrize(("key", "changes"), [("damping", {"damping": 0.0}), ("select_every", {"select_every": 5})])
def test_what_an_exact_solution_cannot_have_is_refused(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: got"):
        method(**changes)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_its_posterior_predicts(structure: Structure, tmp_path: Path) -> None:
    options = ["method=fedfisher", f"method.structure={structure}", "rounds=1", "eval.also_predict=[draws,linearised]"]
    names, values = (line.split(",") for line in run_in(tmp_path, *SMALL, *options).splitlines())
    row = dict(zip(names, values, strict=True))
    assert len({row["nll"], row["nll@draws"], row["nll@linearised"]}) == 3
