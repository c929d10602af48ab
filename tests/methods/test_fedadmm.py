"""FedDyn and FedLap: federated ADMM on quadratics, the optimum of all data, and duals at any participation."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bfl_bench.errors import ConfigError
from bfl_bench.methods.fedadmm import FedAdmm
from bfl_bench.methods.fedavg import FedAvg
from tests.composing import SMALL, experiment, resolve
from tests.federation import generator, make_clients, make_task, random_start, run_round
from tests.quadratics import SIZES, Course, make_quadratic_task, make_quadratics

EYE = torch.eye(4, dtype=torch.float64)
N, TOTAL = len(SIZES), sum(SIZES)


def feddyn(**changes: Any) -> FedAdmm:
    return replace(FedAdmm("feddyn", "uniform", "admm", 0.2, 0.0, 1.0, "exact"), **changes)


def fedlap(**changes: Any) -> FedAdmm:
    return replace(FedAdmm("fedlap", "uniform", "sites", None, 3.0, 0.25, "exact"), **changes)


@pytest.fixture
def solved_exactly(monkeypatch: pytest.MonkeyPatch) -> Any:
    problem = make_quadratics(diagonal=False)
    monkeypatch.setattr("bfl_bench.methods.fedadmm.train", problem.exact_train())
    return problem


@pytest.mark.parametrize(("prior", "gamma"), [(0.0, 1.0), (2.5, 1.0), (2.5, 0.6)])
def test_feddyn_is_federated_admm(solved_exactly: Any, prior: float, gamma: float) -> None:
    """The consensus problem of all f_k and the prior, as textbooks write it: w_k, multipliers v_k, then the server."""
    course = Course(feddyn(prior_precision=prior, damping=gamma), make_quadratic_task())
    rho = 0.2 * TOTAL / N
    server, multipliers = course.state["params"], torch.zeros(N, 4, dtype=torch.float64)
    for _ in range(6):
        models = torch.stack(
            [
                torch.linalg.solve(curvature + rho * EYE, curvature @ optimum - v + rho * server)
                for curvature, optimum, v in zip(*vars(solved_exactly).values(), multipliers, strict=True)
            ]
        )
        multipliers = multipliers + gamma * rho * (models - server)
        # The minimum over w of prior / 2 |w|^2 - sum v_k'w + rho / 2 sum |w_k - w|^2.
        server = (rho * models.sum(0) + multipliers.sum(0)) / (prior + N * rho)
        torch.testing.assert_close(course.play()["params"], server, rtol=1e-12, atol=1e-12)
    assert (server - models.mean(0)).abs().max() > 1e-3


def test_fedlap_is_its_table(solved_exactly: Any) -> None:
    """f_k + d v_k'w + d/2 |w - w_g|^2, v_k += rho (w_k - w_g), w_g = sum v_k; the first w_g is the prior's mean."""
    course = Course(fedlap(), make_quadratic_task())
    server, sites = torch.zeros(4, dtype=torch.float64), torch.zeros(N, 4, dtype=torch.float64)
    for _ in range(5):
        models = torch.stack(
            [
                torch.linalg.solve(curvature + 3 * EYE, curvature @ optimum - 3 * v + 3 * server)
                for curvature, optimum, v in zip(*vars(solved_exactly).values(), sites, strict=True)
            ]
        )
        sites = sites + 0.25 * (models - server)
        server = sites.sum(0)
        torch.testing.assert_close(course.play()["params"], server, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", [feddyn(), feddyn(prior_precision=2.0), fedlap(), fedlap(damping=None)])
def test_it_converges_to_the_optimum_of_all_data(solved_exactly: Any, method: FedAdmm) -> None:
    course = Course(method, make_quadratic_task())
    for _ in range(400):
        course.play()
    expected, _ = solved_exactly.posterior(method.prior_precision)
    torch.testing.assert_close(course.state["params"], expected, rtol=1e-6, atol=1e-6)
    sizes = torch.tensor(SIZES)[:, None] / TOTAL
    assert (expected - (sizes * solved_exactly.optima).sum(0)).abs().max() > 0.05


def test_partial_participation_converges_too(solved_exactly: Any) -> None:
    """Cohorts of two of four: the sum of the duals is over all clients, and the fixed point is the same."""
    course = Course(feddyn(prior_precision=2.0, alpha=0.5), make_quadratic_task())
    for round_ in range(1500):
        course.play(((0, 1), (2, 3), (1, 2), (0, 3))[round_ % 4])
    expected, _ = solved_exactly.posterior(2.0)
    torch.testing.assert_close(course.state["params"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", [feddyn(), fedlap(), fedlap(damping=None), fedlap(form="released")])
def test_the_sum_of_duals_is_over_all_clients(method: FedAdmm) -> None:
    task = make_task(sizes=SIZES)
    course = Course(method, task)
    course.state = method.init(task, generator())
    for cohort in [(1,), (0, 2), (1, 2), (2,)]:
        course.play(cohort)
    duals = torch.stack([memory["dual"] for memory in course.memories.values()]).double()
    torch.testing.assert_close(course.state["duals"], duals.sum(0), rtol=1e-4, atol=1e-6)  # duals are float32
    assert duals.abs().max() > 0.01


@pytest.mark.parametrize("method", [feddyn(), fedlap(), feddyn(form="released"), fedlap(form="released")])
def test_a_step_is_along_the_gradient_of_the_objective(method: FedAdmm) -> None:
    """One full-batch step against autograd of the mean loss with dual and pull."""
    task, client, start = make_task(epochs=1, batch_size=100), make_clients()[1], random_start(make_task())
    dual = torch.randn(len(start), generator=generator(2))
    broadcast = {"params": start, "round": torch.tensor(3.0)}
    found = method.client_update(task, broadcast, {"dual": dual}, client, generator()).message["params"]
    task.model.load(start)
    x, y = client.gather(torch.arange(len(client)), generator())
    gradient = task.model.backward(cross_entropy(task.model(x), y)).clone()
    strength = {"admm": 0.2 * 23 / (3 * 12), "sites": 3.0 / 12}[method.server]
    if method.form == "released" and method.server == "admm":
        strength = 0.2 * 4 / 23
    # At its centre the pull has no gradient, squared or not.
    expected = start - task.local.lr * (gradient + strength * dual)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    first = {"params": start, "round": torch.tensor(0.0)}
    found = method.client_update(task, first, {"dual": dual}, client, generator()).message["params"]
    weights = start.clone().requires_grad_()
    from_start = method.server == "admm" and method.form == "exact"
    distance = weights - (start if from_start else 0)
    penalty = distance.norm() / 2 if method.form == "released" else distance.square().sum() / 2
    (pull,) = torch.autograd.grad(penalty, weights)
    expected = expected - task.local.lr * strength * pull
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert from_start or (strength * pull).abs().max() > 1e-3


def test_the_first_step_of_feddyns_server_is_twice_that_of_fedavg() -> None:
    """With a pull that is too weak to be felt: it is not FedAvg in the limit."""
    task, clients = make_task(), make_clients()
    method = feddyn(alpha=1e-6)
    state = method.init(task, generator()) | {"params": random_start(task)}
    found = run_round(method, task, state, clients)["params"] - state["params"]
    fedavg = run_round(FedAvg("fedavg", "uniform"), task, {"params": state["params"]}, clients)["params"]
    torch.testing.assert_close(found, 2 * (fedavg - state["params"]), rtol=1e-3, atol=1e-4)


def test_released_feddyn_has_a_history_from_the_second_round_on() -> None:
    task, clients = make_task(), make_clients()
    method = feddyn(form="released")
    course = Course(method, task)
    course.clients = clients
    course.state = method.init(task, generator())
    history = torch.zeros(len(course.state["params"]), dtype=torch.float64)
    for round_ in range(3):
        before, messages = course.state["params"].double(), []
        memories = dict(course.memories)
        for client in clients:
            memory = memories.get(client.id) or method.init_client(task, course.state, client.id)
            broadcast = method.broadcast(task, course.state)
            messages.append(method.client_update(task, broadcast, memory, client, generator(client.id)).message)
        models = torch.stack([message["params"] for message in messages]).double()
        if round_ > 0:
            history += (models - before).mean(0) * 4 / 23
        torch.testing.assert_close(
            course.play()["params"].double(), models.mean(0) + history, rtol=1e-5, atol=1e-6
        )  # the state is float32
    assert history.abs().max() > 1e-3


def test_combinations_that_mean_nothing_are_refused() -> None:
    for changes, key in (
        ("method=feddyn method.alpha=null", "method.alpha"),
        ("method=fedlap method.alpha=0.1", "method.alpha"),
        ("method=fedlap method.prior_precision=0", "method.prior_precision"),
    ):
        with pytest.raises(ConfigError, match=rf"^{key}: got"):
            experiment(*SMALL, *changes.split())


def test_presets() -> None:
    for name in ("feddyn", "fedlap"):
        paper, released = (resolve(f"method={option}")["method"] for option in (name, f"{name}_released"))
        assert {key for key in paper if paper[key] != released[key]} == {"name", "form"}
    assert resolve("method=fedlap")["method"]["damping"] is None


def test_memory_is_one_vector(tmp_path: Any) -> None:
    task = make_task()
    state = feddyn().init(task, generator())
    (dual,) = feddyn().init_client(task, state, 0).values()
    assert isinstance(dual, Tensor)
    assert dual.shape == task.model.gradient.shape
