"""FOLA: the pooled posterior on quadratic problems, FedAvg with equal precisions, and no dead switch."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bfl_bench.aggregators import eaa, rklb
from bfl_bench.data.dataset import Split
from bfl_bench.errors import ConfigError
from bfl_bench.inference.curvature import diagonal_fisher, mean_hessian
from bfl_bench.inference.train import minibatches
from bfl_bench.method import Client, Task, Tensors
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
        batch_weight="share",
        round_scaling=True,
        gamma=0.02,
        eps=1e-3,
        server_mean="product",
    )
    return replace(default, **changes)


def later_state(task: Task, round_: int = 2) -> Tensors:
    """A server's state after some rounds."""
    precision = torch.rand(len(task.model.gradient), generator=generator(8)) * 0.5 + 0.01
    return {"params": random_start(task), "precision": precision, "round": torch.tensor(float(round_))}


# Quadratic problems: linear regression, solved exactly by many full-batch steps. The oracle is the posterior of all
# data with the prior N(0, 1/gamma), per example: precision sum_n X_n^T X_n / n + gamma I.

GAMMA = 0.3


class Squares:
    """Half the squared error: its Hessian is X^T X / n everywhere."""

    num_outputs = 1

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return 0.5 * (outputs - labels).square().mean()

    def measure(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {}


def make_regression(orthogonal: bool) -> tuple[Task, list[Client], Tensor, Tensor]:
    """A task, clients of unequal sizes and curvatures, and X^T X / n and X^T y / n of all their data."""
    size, sizes, draw = 4, (20, 33, 11), generator(1)
    designs: list[Tensor] = []
    for num in sizes:
        x = torch.randn(num, size, generator=draw, dtype=torch.float64)
        if orthogonal:
            x = torch.linalg.qr(x).Q * num**0.5 * (torch.rand(size, generator=draw, dtype=torch.float64) + 0.3)
        designs.append(x)
    x = torch.cat(designs)
    y = x.sum(1) + torch.arange(3.0).repeat_interleave(torch.tensor(sizes)) + torch.randn(len(x), generator=draw)
    train = Split(x.float(), y.float()[:, None])
    indices = torch.arange(len(x)).split(list(sizes))
    task = make_task(torch.nn.Linear(size, 1, bias=False), sizes, epochs=300, batch_size=100, lr=0.25)
    task = replace(task, likelihood=cast(Any, Squares()))
    clients = [Client(id_, train, part, None) for id_, part in enumerate(indices)]
    return task, clients, x.T @ x / len(x), x.T @ y / len(x)


def exact_curvature(task: Task, x: Tensor, y: Tensor) -> Tensor:
    return x.square().mean(0)


@pytest.mark.parametrize(
    "options",
    [
        {"structure": "full"},
        {"structure": "diagonal", "fisher": "per_sample"},
        {"structure": "diagonal", "fisher": "per_sample", "aggregator": rklb},
        {"structure": "full", "evaluation": "offline", "prior_loss": False},
        {"structure": "full", "round_scaling": False},
    ],
)
def test_what_clients_send_makes_the_posterior_of_all_data(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every round, with the prior at the strength that eq. 24 gives it, r - 1 times the likelihood's.

    With plain sums the data count once for every round.
    """
    monkeypatch.setattr("bfl_bench.inference.curvature.mean_squared_gradient", exact_curvature)
    task, clients, curvature, shift = make_regression(orthogonal=options["structure"] == "diagonal")
    scaled = options.get("round_scaling", True)
    state = method(gamma=GAMMA, **options).init(task, generator())
    state["params"] = random_start(task)
    for round_ in (1, 2, 3):
        # in the first round there is no pull but gamma's, whatever lambda is
        weight = 50.0 if round_ == 1 else round_ - 1.0 if scaled else float(round_)
        fola = method(gamma=GAMMA, eps=0.0, prior_weight=weight, **options)
        state, _ = fola.server_update(task, state, train_clients(fola, task, state, clients), generator())
        times = 1 if scaled else round_
        precision = times * curvature + GAMMA * torch.eye(4, dtype=torch.float64)
        mean = torch.linalg.solve(precision, times * shift)
        # float32 steps to a gradient of about 1e-6
        torch.testing.assert_close(state["params"].double(), mean, rtol=1e-4, atol=1e-4)
        expected = precision if options["structure"] == "full" else precision.diagonal()
        torch.testing.assert_close(state["precision"].double(), expected, rtol=1e-5, atol=1e-5)


def clients_with_a_dead_input() -> list[Client]:
    clients = make_clients()
    x = clients[0].train.x.clone()
    x[:, 0] = 0
    return [replace(client, train=Split(x, client.train.y)) for client in clients]


@pytest.mark.parametrize("rule", [None, rklb, eaa])
@pytest.mark.parametrize("evaluation", ["online", "offline"])
@pytest.mark.parametrize("round_scaling", [True, False])
def test_gamma_is_counted_once(rule: Any, evaluation: Any, round_scaling: bool) -> None:
    """Where the data say nothing, the precision is gamma after any number of rounds, and the mean only decays."""
    task, clients = make_task(), clients_with_a_dead_input()
    fola = method(gamma=0.01, eps=0.0, aggregator=rule, evaluation=evaluation, round_scaling=round_scaling)
    state = fola.init(task, generator())
    state["params"] = start = random_start(task)
    dead = torch.arange(0, 30, 5)  # the first of five inputs of six hidden units
    for _ in range(20):
        state = run_round(fola, task, state, clients)
    assert (state["precision"] > 0.0099).all()
    torch.testing.assert_close(state["precision"][dead], torch.full((6,), 0.01), rtol=1e-4, atol=0)
    most = max(2 * -(-len(client) // 4) for client in clients)  # steps of the largest client in a round
    decays = 20 if round_scaling or evaluation == "offline" else 1
    lowest = (1 - task.local.lr * 0.01) ** (most * decays)
    ratio = state["params"][dead] / start[dead]
    assert (ratio < 1).all()
    assert (ratio > lowest - 1e-4).all()


def test_rklb_on_the_same_replies_is_the_product() -> None:
    task, clients = make_task(), make_clients()
    product, ruled = method(eps=0.0), method(eps=0.0, aggregator=rklb)
    state = later_state(task)
    replies = train_clients(product, task, state, clients)
    one, other = (fola.server_update(task, state, replies, generator())[0] for fola in (product, ruled))
    for key in ("params", "precision"):
        torch.testing.assert_close(one[key], other[key], rtol=1e-5, atol=1e-7)  # sums in another order


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
    """Loss + lambda/2 (w - mu)^T diag(P) (w - mu) + gamma/2 |w|^2, and the squares of the loss's own gradients.

    With plain sums gamma is a part of P already.
    """
    task, client = make_task(epochs=3), make_clients()[0]
    state = later_state(task)
    fola = method(round_scaling=round_scaling)
    message = fola.client_update(task, state, {}, client, generator()).message
    weights, fisher = state["params"].clone(), torch.zeros_like(state["precision"])
    strength, gamma = (3.0, 0.02) if round_scaling else (3.0 / 3, 0.0)
    for x, y, *_ in minibatches(client, task.local, generator()):
        task.model.load(weights)
        gradient = task.model.backward(cross_entropy(task.model(x), y)).clone()
        fisher += len(y) / 7 / 3 * gradient**2
        leaf = weights.clone().requires_grad_()
        prior = 0.5 * strength * (state["precision"] * (leaf - state["params"]) ** 2).sum()
        prior = prior + 0.5 * gamma * leaf.square().sum()
        weights = weights - task.local.lr * (gradient + torch.autograd.grad(prior, leaf)[0])
    carried = 2 / 3 * state["precision"] if round_scaling else state["precision"]
    precision = (fisher + gamma) / 3 + carried if round_scaling else fisher + carried
    torch.testing.assert_close(message["params"], weights, rtol=1e-4, atol=1e-5)  # float32 steps
    torch.testing.assert_close(message["precision"], precision, rtol=1e-4, atol=1e-6)


def test_algorithm_1_as_printed_sums_squared_gradients_over_all_steps() -> None:
    task, client = make_task(epochs=3), make_clients()[0]
    fola = method(gamma=0.0, batch_weight="one", average_steps=False)
    state = fola.init(task, generator())
    state["params"] = weights = random_start(task)
    message = fola.client_update(task, state, {}, client, generator()).message
    total = torch.zeros_like(state["precision"])
    for x, y, *_ in minibatches(client, task.local, generator()):  # of 4 and 3 examples
        task.model.load(weights)
        gradient = task.model.backward(cross_entropy(task.model(x), y)).clone()
        total += gradient**2
        weights = weights - task.local.lr * gradient
    torch.testing.assert_close(message["precision"], total, rtol=1e-4, atol=1e-6)  # float32 steps


def test_offline_precision_is_that_of_the_trained_model() -> None:
    task, client = make_task(), make_clients()[1]
    fola = method(evaluation="offline", fisher="per_sample")
    update = fola.client_update(task, later_state(task), {}, client, generator())
    expected = diagonal_fisher(task, update.message["params"], client, generator(), "per_sample") + 0.02
    torch.testing.assert_close(update.message["precision"], expected)
    online = method().client_update(task, method().init(task, generator()), {}, client, generator())
    offline = method(evaluation="offline").client_update(
        task, method().init(task, generator()), None, client, generator()
    )
    assert not torch.allclose(online.message["precision"], offline.message["precision"])  # eq. 22 is not eq. 21


def test_a_plain_average_beside_the_precision_of_the_product() -> None:
    """Fig. 9 b: the clients' training is the same, and so is what the server makes of their precisions."""
    task, clients = make_task(), make_clients()
    state = later_state(task)
    average, product = (run_round(method(server_mean=mean), task, state, clients) for mean in ("average", "product"))
    replies = train_clients(method(), task, state, clients)
    mean = sum(task.sizes[i] * m["params"] for i, m in replies) / sum(task.sizes)
    assert isinstance(mean, Tensor)
    torch.testing.assert_close(average["params"], mean)
    assert torch.equal(average["precision"], product["precision"])
    with pytest.raises(ConfigError, match="server_mean: got 'average'"):
        method(server_mean="average", aggregator=rklb)


CHANGES: list[dict[str, Any]] = [
    {"prior_loss": False},
    {"prior_weight": 1.0},
    {"prior_gradient": False},
    {"fisher": "per_sample"},
    {"evaluation": "offline"},
    {"average_steps": False},
    {"batch_weight": "one"},
    {"server_mean": "average"},
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
    expected += 0.5 * 0.02 * dead.message["params"].square().sum().item()
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
    precisions = torch.stack([m["precision"] for _, m in replies])
    means = torch.stack([m["params"] for _, m in replies])
    precision = weights @ precisions
    torch.testing.assert_close(ruled["params"], weights @ (precisions * means) / precision, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ruled["precision"], precision, rtol=1e-4, atol=1e-5)


def test_prior_of_the_first_round_lies_at_zero() -> None:
    """One full-batch step: w - lr (g + gamma w), whatever the model starts from, and whatever lambda is."""
    task = make_task(epochs=1, batch_size=100)
    client, state = make_clients()[0], method(gamma=0.2).init(task, generator())
    state["params"] = random_start(task)
    update = method(gamma=0.2).client_update(task, state, {}, client, generator())
    task.model.load(state["params"])
    x, y = client.gather(torch.arange(len(client)), generator())
    gradient = task.model.backward(cross_entropy(task.model(x), y)) + 0.2 * state["params"]
    torch.testing.assert_close(update.message["params"], state["params"] - task.local.lr * gradient)


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
        fola = method(structure=structure, gamma=0.0)
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
    update = method(structure="full", gamma=0.0).client_update(task, state, {}, client, generator())
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
