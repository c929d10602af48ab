"""FedLPA: what is sent, what the server makes of it, and no dead switch. The algebra: tests/unit/test_kronecker.py."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bfl_bench.errors import UnsuitableError
from bfl_bench.inference import kronecker
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fedlpa import FedLpa
from bfl_bench.models.networks import lenet
from bfl_bench.run.recorder import num_bytes
from tests.composing import SMALL, resolve, run_in
from tests.federation import generator, make_clients, make_task, run_round, train_clients

SHAPE = (1, 5, 5)


def method(**changes: Any) -> FedLpa:
    default = FedLpa(
        name="fedlpa",
        weights="size",
        solver="cg",
        damping=0.01,
        damping_norm="trace",
        factor_split="kfac",
        tolerance=1e-10,
        max_steps=500,
        descent_steps=20,
        descent_lr=0.5,
        also_solve=[],
    )
    return replace(default, **changes)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))


def aggregate(**changes: Any) -> torch.Tensor:
    task = make_task(network())
    return run_round(method(**changes), task, {"params": task.model.initial}, make_clients(shape=SHAPE))["params"]


def test_one_client_is_itself() -> None:
    task, clients = make_task(network()), make_clients(shape=SHAPE)[1:2]
    state = {"params": task.model.initial}
    alone = run_round(FedAvg("fedavg", "size"), task, state, clients)["params"]
    for solver in ("cg", "gd", "ea"):
        torch.testing.assert_close(run_round(method(solver=solver), task, state, clients)["params"], alone)


def test_equal_factors_give_fedavg() -> None:
    task, clients = make_task(network()), make_clients(shape=SHAPE)
    state = {"params": task.model.initial}
    replies = train_clients(method(), task, state, clients)
    shared = {name: tensor for name, tensor in replies[0][1].items() if name != "params"}
    replies = [(client, message | shared) for client, message in replies]
    average = run_round(FedAvg("fedavg", "size"), task, state, clients)["params"]
    for solver in ("cg", "ea"):
        new, _ = method(solver=solver).server_update(task, state, iter(replies), generator())
        torch.testing.assert_close(new["params"], average, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(run_round(method(), task, state, clients)["params"], average, atol=1e-3)


def test_the_server_solves_equation_13_for_every_layer() -> None:
    """Against the dense product of the damped Gaussians, weights as sizes."""
    task, clients = make_task(network()), make_clients(shape=SHAPE)
    state = {"params": task.model.initial}
    replies = train_clients(method(), task, state, clients)
    new, metrics = method().server_update(task, state, iter(replies), generator())
    assert metrics["residual"] <= 1e-9
    assert metrics["solver_steps"] > 2
    for layer in kronecker.find_layers(task.model):
        precision, right = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for client, message in replies:
            a, b = (kronecker.from_upper_triangle(message[f"{layer.name}.{f}"].double()) for f in "AB")
            block = task.sizes[client] * torch.kron(b, a)  # vec row by row
            precision, right = precision + block, right + block @ layer.read(message["params"].double()).flatten()
        expected = torch.linalg.solve(precision, right)
        torch.testing.assert_close(layer.read(new["params"]).double().flatten(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "uniform"},
        {"solver": "ea"},
        {"solver": "gd"},
        {"damping": 0.1},
        {"damping_norm": "one"},
        {"damping_norm": "frobenius"},
        {"tolerance": 0.1},
        {"max_steps": 1},
    ],
)
def test_every_option_changes_the_result(changes: dict[str, Any]) -> None:
    assert not torch.allclose(aggregate(**changes), aggregate(), atol=1e-6)


@pytest.mark.parametrize("changes", [{"descent_steps": 200}, {"descent_lr": 0.1}])
def test_options_of_the_descent_change_its_result(changes: dict[str, Any]) -> None:
    assert not torch.allclose(aggregate(solver="gd", **changes), aggregate(solver="gd"), atol=1e-6)


def test_the_split_of_the_scale_matters_only_where_pi_is_one() -> None:
    torch.testing.assert_close(aggregate(factor_split="released"), aggregate(), rtol=1e-4, atol=1e-5)
    one = {"damping_norm": "one"}
    assert not torch.allclose(aggregate(factor_split="released", **one), aggregate(**one), atol=1e-4)


def test_bytes_are_those_of_the_papers_formula() -> None:
    """The paper's CNN on CIFAR-10 has 62 006 parameters; ten clients with triangles of A and B send 7.16 MB."""
    task = make_task(lenet((3, 32, 32), 10), sizes=(6,), epochs=1)
    (client,) = make_clients((6,), shape=(3, 32, 32))
    ((_, message),) = train_clients(method(), task, {"params": task.model.initial}, [client])
    sizes = [(76, 6), (151, 16), (401, 120), (121, 84), (85, 10)]
    triangles = sum(n * (n + 1) // 2 for pair in sizes for n in pair)
    assert (len(message["params"]), triangles) == (62_006, 117_081)
    assert num_bytes(message) == 4 * (62_006 + 117_081)


def test_also_solve_fills_columns_and_leaves_the_run_alone(tmp_path: Path) -> None:
    overrides = [*SMALL, "method=fedlpa", "method.descent_steps=5"]
    plain = run_in(tmp_path / "plain", *overrides).splitlines()
    text = run_in(tmp_path / "also", *overrides, "method.also_solve=[ea,gd,cg]")
    rows = list(csv.DictReader(text.splitlines()))
    columns = len(plain[0].split(","))
    assert [",".join(line.split(",")[:columns]) for line in text.splitlines()] == plain
    for row in rows:
        assert row["ga@cg"] == row["ga"]
        assert row["nll@cg"] == row["nll"]
        assert len({row["nll@ea"], row["nll@gd"], row["nll@cg"]}) == 3
        assert float(row["residual@cg"]) < float(row["residual@gd"]) < float(row["residual@ea"])


def test_a_network_with_another_layer_is_refused_before_training() -> None:
    task = make_task(nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)))
    with pytest.raises(UnsuitableError, match="1 is LayerNorm"):
        method().check(task)


def test_weights_are_uniform_by_the_text_and_sizes_as_released() -> None:
    """Eqs. 11-14 have no weights."""
    assert resolve("method=fedlpa")["method"]["weights"] == "uniform"
    assert resolve("method=fedlpa_released")["method"]["weights"] == "size"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_steps": 2}, "conjugate gradients stopped after 2 steps at a residual of"),
        (
            {"solver": "gd", "descent_lr": 1e6, "descent_steps": 1},
            "1 steps of gradient descent went from a residual of",
        ),
    ],
)
def test_a_solver_that_stops_short_is_an_alarm(
    changes: dict[str, Any], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    task, clients = make_task(network()), make_clients(shape=SHAPE)
    state = {"params": task.model.initial}
    replies = train_clients(method(), task, state, clients)
    for fine in (method(), method(solver="gd"), method(solver="ea")):
        _, metrics = fine.server_update(task, state, iter(replies), generator())
        assert metrics["unsolved_layers"] == 0
    assert caplog.text == ""
    _, metrics = method(**changes).server_update(task, state, iter(replies), generator())
    assert metrics["unsolved_layers"] == 2
    for layer in kronecker.find_layers(task.model):
        assert f"fedlpa: layer {layer.name}: {sentence}" in caplog.text
