"""FOLA: the pooled ridge mean on linear-Gaussian data, FedAvg with equal precisions, and no dead switch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bfl_bench.aggregators import eaa, rklb
from bfl_bench.errors import ConfigError
from bfl_bench.inference.curvature import diagonal_fisher, mean_hessian
from bfl_bench.inference.train import minibatches
from bfl_bench.method import Task, Tensors
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fola import Fola
from tests.federation import generator, make_clients, make_task, random_start, run_round, train_clients


def method(**changes: Any) -> Fola:
    default = Fola(
        name="fola",
        aggregator=None,
        weights="size",
        prior_loss=True,
        prior_weight=3.0,
        prior_gradient=True,
        structure="diagonal",
        fisher="batch_gradient",
        evaluation="online",
        average_steps=True,
        round_scaling=True,
        gamma=0.02,
        eps=1e-3,
    )
    return replace(default, **changes)


def later_state(task: Task, round_: int = 2) -> Tensors:
    """A server's state after some rounds."""
    precision = torch.rand(len(task.model.gradient), generator=generator(8)) * 0.5 + 0.01
    return {"params": random_start(task), "precision": precision, "round": torch.tensor(float(round_))}


def test_first_aggregation_is_the_pooled_ridge_mean() -> None:
    """Exact curvature of a linear model with orthogonal columns: eq. 12 gives ridge regression on all data.

    The precision is 1/n of the pooled one, because the Fisher is an average over examples.
    """
    size, gamma = 6, 0.05
    task = make_task(torch.nn.Linear(size - 1, 1), sizes=(20, 33, 11))
    assert len(task.model.gradient) == size
    draw = generator(1)
    designs, replies = [], []
    for num in task.sizes:
        basis = torch.linalg.qr(torch.randn(num, size, generator=draw, dtype=torch.float64)).Q
        designs.append(basis * (torch.rand(size, generator=draw, dtype=torch.float64) * 5 + 1))
    targets = [torch.randn(len(x), generator=draw, dtype=torch.float64) + x.sum(1) for x in designs]
    for id_, (x, y) in enumerate(zip(designs, targets, strict=True)):
        curvature = (x.T @ x).diagonal() / len(x)
        replies.append((id_, {"params": torch.linalg.lstsq(x, y[:, None]).solution[:, 0], "precision": curvature}))
    state = method(gamma=gamma).init(task, generator())
    new, _ = method(gamma=gamma, eps=0.0).server_update(task, state, replies, generator())
    x, y = torch.cat(designs), torch.cat(targets)
    pooled = x.T @ x + len(x) * gamma * torch.eye(size, dtype=torch.float64)
    # the state is float32
    torch.testing.assert_close(new["params"].double(), torch.linalg.solve(pooled, x.T @ y), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(new["precision"].double(), pooled.diagonal() / len(x), rtol=1e-5, atol=1e-6)


def test_equal_precisions_without_gamma_and_eps_are_fedavg() -> None:
    task, clients = make_task(), make_clients()
    fola = method(gamma=0.0, eps=0.0, prior_weight=0.0)
    state = fola.init(task, generator())
    state["params"] = random_start(task)
    replies = train_clients(fola, task, state, clients)
    same = torch.rand(len(state["precision"]), generator=generator()) + 0.1
    aggregated, _ = fola.server_update(task, state, [(i, m | {"precision": same}) for i, m in replies], generator())
    fedavg = run_round(FedAvg("fedavg", "size"), task, {"params": state["params"]}, clients)["params"]
    torch.testing.assert_close(aggregated["params"], fedavg, rtol=1e-6, atol=1e-7)  # products and quotients in float64
    different, _ = fola.server_update(task, state, replies, generator())
    assert not torch.allclose(different["params"], fedavg, atol=1e-3)


def test_where_nothing_is_known_the_mean_is_the_average() -> None:
    task, clients = make_task(), make_clients()
    fola = method(gamma=0.0, eps=0.0)
    state = fola.init(task, generator())
    replies = train_clients(fola, task, state, clients)
    dead = [(i, m | {"precision": m["precision"] * (torch.arange(len(m["precision"])) > 3)}) for i, m in replies]
    new, metrics = fola.server_update(task, state, dead, generator())
    mean = sum(task.sizes[i] * m["params"] for i, m in dead) / sum(task.sizes)
    assert isinstance(mean, Tensor)
    torch.testing.assert_close(new["params"][:4], mean[:4])
    assert metrics["precision_zero"] == pytest.approx(4 / len(new["precision"]))


@pytest.mark.parametrize("round_scaling", [True, False])
def test_local_training_equals_autograd_of_the_objective(round_scaling: bool) -> None:
    """Loss + lambda/2 (w - mu)^T diag(P) (w - mu), and the squares of the loss's own gradients on the way."""
    task, client = make_task(epochs=3), make_clients()[0]
    state = later_state(task)
    fola = method(round_scaling=round_scaling)
    message = fola.client_update(task, state, {}, client, generator()).message
    weights, fisher = state["params"].clone(), torch.zeros_like(state["precision"])
    strength = 3.0 if round_scaling else 3.0 / 3
    for x, y, *_ in minibatches(client, task.local, generator()):
        task.model.load(weights)
        gradient = task.model.backward(cross_entropy(task.model(x), y)).clone()
        fisher += len(y) / 7 / 3 * gradient**2
        leaf = weights.clone().requires_grad_()
        prior = 0.5 * strength * (state["precision"] * (leaf - state["params"]) ** 2).sum()
        weights = weights - task.local.lr * (gradient + torch.autograd.grad(prior, leaf)[0])
    precision = fisher / 3 + 2 / 3 * state["precision"] if round_scaling else fisher + state["precision"]
    torch.testing.assert_close(message["params"], weights, rtol=1e-4, atol=1e-5)  # float32 steps
    torch.testing.assert_close(message["precision"], precision, rtol=1e-4, atol=1e-6)


def test_offline_precision_is_that_of_the_trained_model() -> None:
    task, client = make_task(), make_clients()[1]
    update = method(evaluation="offline").client_update(task, later_state(task), {}, client, generator())
    expected = diagonal_fisher(task, update.message["params"], client, generator(), "batch_gradient")
    torch.testing.assert_close(update.message["precision"], expected)
    online = method().client_update(task, method().init(task, generator()), {}, client, generator())
    offline = method(evaluation="offline").client_update(
        task, method().init(task, generator()), None, client, generator()
    )
    assert not torch.allclose(online.message["precision"], offline.message["precision"])  # eq. 22 is not eq. 21


@pytest.mark.parametrize("round_scaling", [True, False])
@pytest.mark.parametrize("evaluation", ["online", "offline"])
def test_gamma_stays_in_the_servers_precision_once(round_scaling: bool, evaluation: Any) -> None:
    """With and without gamma, the trajectories of the Fishers alike: the precisions differ by gamma, in every round."""
    task, clients = make_task(), make_clients()
    common = {"round_scaling": round_scaling, "evaluation": evaluation, "prior_weight": 0.0}
    with_gamma, without = method(gamma=0.3, **common), method(gamma=0.0, **common)
    states = [with_gamma.init(task, generator()), without.init(task, generator())]
    for _ in range(4):
        replies = train_clients(without, task, states[1], clients)
        shifted = []
        for id_, message in replies:
            carried = states[0]["precision"] - states[1]["precision"]
            round_ = states[0]["round"].item() + 1
            share = 0.0 if evaluation == "offline" or round_ == 1 else ((round_ - 1) / round_ if round_scaling else 1.0)
            shifted.append((id_, message | {"precision": message["precision"] + share * carried}))
        states = [
            with_gamma.server_update(task, states[0], shifted, generator())[0],
            without.server_update(task, states[1], replies, generator())[0],
        ]
        difference = states[0]["precision"] - states[1]["precision"]
        torch.testing.assert_close(difference, torch.full_like(difference, 0.3), rtol=1e-4, atol=1e-5)


CHANGES: list[dict[str, Any]] = [
    {"prior_loss": False},
    {"prior_weight": 1.0},
    {"prior_gradient": False},
    {"fisher": "per_sample"},
    {"evaluation": "offline"},
    {"average_steps": False},
    {"round_scaling": False},
    {"gamma": 0.5},
    {"eps": 0.1},
    {"weights": "uniform"},
    {"aggregator": eaa},
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_option_changes_the_result(change: dict[str, Any]) -> None:
    task, clients = make_task(), make_clients()
    state = later_state(task)
    usual = run_round(method(), task, state, clients)
    changed = run_round(method(**change), task, state, clients)
    assert max((usual[key] - changed[key]).abs().max().item() for key in ("params", "precision")) > 1e-4


def test_prior_loss_without_gradient_is_only_recorded() -> None:
    task, client = make_task(), make_clients()[0]
    state = later_state(task)
    dead = method(prior_gradient=False).client_update(task, state, {}, client, generator())
    off = method(prior_loss=False).client_update(task, state, {}, client, generator())
    assert torch.equal(dead.message["params"], off.message["params"])
    moved = dead.message["params"] - state["params"]
    expected = 0.5 * 3.0 * (state["precision"] * moved.square()).sum().item()
    assert dead.metrics["prior_loss"] == pytest.approx(expected, rel=1e-5)  # float32
    assert "prior_loss" not in off.metrics


def test_rules_get_variances_and_need_gamma() -> None:
    with pytest.raises(ConfigError, match="gamma: got 0"):
        method(aggregator=rklb, gamma=0.0)
    task, clients = make_task(), make_clients()
    state = later_state(task)
    ruled = run_round(method(aggregator=rklb, gamma=0.02), task, state, clients)
    replies = train_clients(method(), task, state, clients)
    weights = torch.tensor(task.sizes) / sum(task.sizes)
    precisions = torch.stack([m["precision"] + 0.02 for _, m in replies])
    means = torch.stack([m["params"] for _, m in replies])
    precision = weights @ precisions
    torch.testing.assert_close(ruled["params"], weights @ (precisions * means) / precision, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ruled["precision"], precision, rtol=1e-4, atol=1e-5)


def test_prior_of_the_first_round_lies_at_zero() -> None:
    """One full-batch step: w - lr (g + lambda gamma w), whatever the model starts from."""
    task = make_task(epochs=1, batch_size=100)
    client, state = make_clients()[0], method(gamma=0.2).init(task, generator())
    state["params"] = random_start(task)
    update = method(gamma=0.2).client_update(task, state, {}, client, generator())
    task.model.load(state["params"])
    x, y = client.gather(torch.arange(len(client)), generator())
    gradient = task.model.backward(cross_entropy(task.model(x), y)) + 3.0 * 0.2 * state["params"]
    torch.testing.assert_close(update.message["params"], state["params"] - task.local.lr * gradient)


def test_full_precisions_give_the_pooled_ridge_mean_for_any_design() -> None:
    size, gamma = 6, 0.05
    task = make_task(torch.nn.Linear(size - 1, 1), sizes=(20, 33, 11))
    draw = generator(1)
    designs = [torch.randn(num, size, generator=draw, dtype=torch.float64) for num in task.sizes]
    targets = [torch.randn(len(x), generator=draw, dtype=torch.float64) + x.sum(1) for x in designs]
    replies = [
        (id_, {"params": torch.linalg.lstsq(x, y[:, None]).solution[:, 0], "precision": x.T @ x / len(x)})
        for id_, (x, y) in enumerate(zip(designs, targets, strict=True))
    ]
    fola = method(structure="full", gamma=gamma, eps=0.0)
    state = fola.init(task, generator())
    assert torch.equal(state["precision"], gamma * torch.eye(size))
    new, _ = fola.server_update(task, state, replies, generator())
    x, y = torch.cat(designs), torch.cat(targets)
    pooled = x.T @ x + len(x) * gamma * torch.eye(size, dtype=torch.float64)
    # the state is float32
    torch.testing.assert_close(new["params"].double(), torch.linalg.solve(pooled, x.T @ y), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(new["precision"].double(), pooled / len(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("structure", ["full", "eigenvalue"])
def test_full_and_eigenvalue_are_alike_online_and_offline_in_the_first_round_only(structure: Any) -> None:
    task, clients = make_task(), make_clients()
    states = {}
    for evaluation in ("online", "offline"):
        fola = method(structure=structure, evaluation=evaluation)
        first = run_round(fola, task, fola.init(task, generator()), clients)
        states[evaluation] = first, run_round(fola, task, first, clients)
    for key in ("params", "precision"):
        assert torch.equal(states["online"][0][key], states["offline"][0][key])
    assert not torch.allclose(states["online"][1]["precision"], states["offline"][1]["precision"], atol=1e-4)


def test_structures_are_the_hessian_and_its_eigenvalues() -> None:
    task, client = make_task(), make_clients()[1]
    messages = {}
    for structure in ("full", "eigenvalue"):
        fola = method(structure=structure)
        state = fola.init(task, generator())
        messages[structure] = fola.client_update(task, state, {}, client, generator()).message
    assert torch.equal(messages["full"]["params"], messages["eigenvalue"]["params"])
    hessian, _ = mean_hessian(task, messages["full"]["params"], client, generator())
    torch.testing.assert_close(messages["full"]["precision"], hessian)
    values = torch.linalg.eigvalsh(hessian).clamp(min=0)
    torch.testing.assert_close(messages["eigenvalue"]["precision"], values)
    assert (values.diff() >= 0).all()


def test_a_full_prior_pulls_along_its_correlations() -> None:
    """One full-batch step against autograd of the loss + lambda/2 (w - mu)^T P (w - mu)."""
    task = make_task(epochs=2, batch_size=100)
    client, size = make_clients()[0], len(task.model.gradient)
    root = torch.randn(size, size, generator=generator(2)) * 0.1
    state = {"params": random_start(task), "precision": root @ root.T, "round": torch.tensor(1.0)}
    update = method(structure="full").client_update(task, state, {}, client, generator())
    weights = state["params"].clone()
    x, y = client.gather(torch.arange(len(client)), generator())
    for _ in range(2):
        task.model.load(weights)
        gradient = task.model.backward(cross_entropy(task.model(x), y))
        weights = weights - task.local.lr * (gradient + 3.0 * state["precision"] @ (weights - state["params"]))
    torch.testing.assert_close(update.message["params"], weights, rtol=1e-4, atol=1e-5)


def test_rules_cannot_combine_full_precisions() -> None:
    with pytest.raises(ConfigError, match="structure: got 'full'"):
        method(structure="full", aggregator=rklb)
