"""FedBEns: the density of products of mixtures against dense Gaussians, where its climb starts and what it keeps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from bfl_bench.inference import kronecker
from bfl_bench.inference.merging import Structure
from bfl_bench.inference.mixtures import Component, KroneckerCurvature, log_product, read_curvature
from bfl_bench.method import ServerData, Task, Tensors
from bfl_bench.methods.ensemble import Ensemble
from bfl_bench.methods.fedbens import FedBens
from tests.composing import resolve
from tests.federation import generator, make_clients, make_split, make_task, random_start, train_clients


def method(**changes: Any) -> FedBens:
    default = FedBens(
        name="fedbens",
        weights="size",
        members=2,
        structure="diagonal",
        temperature=0.5,
        variance=0.25,
        server_variance=None,
        steps=20,
        lr=0.02,
        clip=None,
        keep="best",
    )
    return replace(default, **changes)


def make_ensemble_task(members: int = 2) -> Task:
    """A network of 18 parameters, small enough for dense matrices."""
    torch.manual_seed(0)
    task = make_task(nn.Linear(5, 3))
    starts = [task.model.initial, *(random_start(task, 6 + member) for member in range(1, members))]
    data = make_split(30, seed=9)
    return replace(task, initials=torch.stack(starts), server_data=ServerData(data.x, data.y))


def train_all(of: FedBens, task: Task) -> tuple[Tensors, list[tuple[int, Tensors]]]:
    state = of.init(task, generator())
    return state, train_clients(of, task, state, make_clients())


def dense_precision(task: Task, message: Tensors, num_examples: int) -> Tensor:
    """Compute n F / T + I / v with the numbers of `method`."""
    if "precision" in message:
        fisher = message["precision"].double().diag()
    else:
        (layer,) = kronecker.find_layers(task.model)
        a, b = (kronecker.from_upper_triangle(message[f"{layer.name}.{f}"].double()) for f in "AB")
        block = torch.kron(b, a)  # rows of M with the bias at the end of each
        order = layer.read(torch.arange(18.0)).flatten().long()
        fisher = torch.zeros_like(block)
        fisher[order[:, None], order] = block
    return num_examples / 0.5 * fisher + torch.eye(18, dtype=torch.float64) / 0.25


def read(
    of: FedBens, task: Task, replies: list[tuple[int, Tensors]]
) -> tuple[list[list[Component]], list[list[MultivariateNormal]]]:
    """Read the clients' mixtures, by the method and as dense Gaussians."""
    ours, dense = [], []
    for id_, message in replies:
        rows = [{name: value[member] for name, value in message.items()} for member in range(of.members)]
        ours.append([of._read(task, row, task.sizes[id_]) for row in rows])
        dense.append(
            [
                MultivariateNormal(row["params"].double(), precision_matrix=dense_precision(task, row, task.sizes[id_]))
                for row in rows
            ]
        )
    return ours, dense


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_the_density_is_that_of_dense_gaussians(structure: Structure) -> None:
    of, task = method(structure=structure), make_ensemble_task()
    _, replies = train_all(of, task)
    ours, dense = read(of, task, replies)
    prior = MultivariateNormal(torch.zeros(18).double(), covariance_matrix=0.3 * torch.eye(18).double())

    def expected(theta: Tensor) -> Tensor:
        clients = [torch.stack([g.log_prob(theta) for g in mixture]).logsumexp(0) for mixture in dense]
        return torch.stack(clients).sum() - 2 * prior.log_prob(theta)

    between = replies[0][1]["params"].double().mean(0)  # both components of the first client count there
    differences = []
    for theta in (between, random_start(task, 3).double()):
        theta.requires_grad_()
        value, gradient = log_product(theta.detach(), ours, 1 / 0.3)
        (slope,) = torch.autograd.grad(expected(theta), theta)
        # factors are float32: what rounding makes of a zero eigenvalue counts in the dense determinant alone
        torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=1e-6)
        differences.append(value - expected(theta).detach())
    torch.testing.assert_close(differences[0], differences[1], rtol=1e-6, atol=1e-6)  # a constant


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_with_one_member_the_top_is_the_product_of_gaussians_with_one_prior(structure: Structure) -> None:
    """FedFisher's objective, with a prior that every client has and that is to count once."""
    of, task = method(structure=structure, members=1), make_ensemble_task(1)
    _, replies = train_all(of, task)
    ours, dense = read(of, task, replies)
    precision = -2 / 0.25 * torch.eye(18, dtype=torch.float64)
    right = torch.zeros(18, dtype=torch.float64)
    for ((gaussian,),) in zip(dense, strict=True):
        precision = precision + gaussian.precision_matrix
        right = right + gaussian.precision_matrix @ gaussian.mean
    top = torch.linalg.solve(precision, right)
    assert log_product(top, ours, 1 / 0.25)[1].norm() < 1e-9 * right.norm()


def test_one_client_stays_at_its_modes() -> None:
    of, task = method(), make_ensemble_task()
    state, replies = train_all(of, task)
    new, _ = of.server_update(task, state, iter(replies[1:2]), generator())
    torch.testing.assert_close(new["params"], replies[1][1]["params"], rtol=1e-4, atol=1e-4)


def test_the_climb_starts_at_the_median_and_goes_up() -> None:
    task = make_ensemble_task()
    state, replies = train_all(method(), task)
    median = torch.stack([message["params"] for _, message in replies]).median(0).values  # of three clients
    start, _ = method(steps=0).server_update(task, state, iter(replies), generator())
    torch.testing.assert_close(start["params"], median)
    ours, _ = read(method(), task, replies)
    values = {}
    for steps in (0, 5, 20):
        new, _ = method(steps=steps).server_update(task, state, iter(replies), generator())
        values[steps] = log_product(new["params"][1].double(), ours, 1 / 0.25)[0].item()
    assert values[0] < values[5] < values[20]


def test_what_is_kept() -> None:
    """With a learning rate that throws the climb off, the last iterate is worse than the best."""
    task = make_ensemble_task()
    state, replies = train_all(method(), task)
    ours, _ = read(method(), task, replies)
    found = {}
    for keep in ("best", "last", "accuracy"):
        new, _ = method(keep=keep, lr=3.0, steps=4).server_update(task, state, iter(replies), generator())
        found[keep] = new["params"]
    density = {keep: log_product(params[0].double(), ours, 1 / 0.25)[0] for keep, params in found.items()}
    assert density["best"] > density["last"]
    data = task.server_data
    assert data is not None
    right = {}
    for keep, params in found.items():
        task.model.load(params[0])
        right[keep] = (task.model(data.x).argmax(1) == data.y).sum().item()
    assert right["accuracy"] > right["last"]
    assert (method().needs.server_data, method(keep="accuracy").needs.server_data) == ("none", "labelled")


@pytest.mark.parametrize("changes", [{"clip": 1e-4}, {"server_variance": 1.0}, {"temperature": 0.1}, {"variance": 1.0}])
def test_every_option_changes_the_result(changes: dict[str, Any]) -> None:
    task = make_ensemble_task()
    state, replies = train_all(method(), task)
    plain, changed = (
        of.server_update(task, state, iter(replies), generator())[0] for of in (method(), method(**changes))
    )
    assert not torch.allclose(plain["params"], changed["params"], atol=1e-5)


def test_members_predict_together() -> None:
    task = make_ensemble_task()
    state = method().init(task, generator())
    x = make_split(6, seed=3).x
    ensemble = Ensemble("ensemble", "size", 2).predict(task, state, x, 10, 4, generator())
    found = method().predict(task, state, x, 10, 4, generator())
    assert torch.equal(found.log_probabilities, ensemble.log_probabilities)


def test_the_released_script_divides_by_another_prior() -> None:
    released = resolve("method=fedbens_released")["method"]
    assert (released["variance"], released["server_variance"], released["keep"]) == (0.1, 1.0, "accuracy")


def test_a_kronecker_curvature_is_read_for_every_layer() -> None:
    torch.manual_seed(0)
    task = replace(make_task(), initials=make_task().model.initial[None])
    of = method(members=1, structure="kronecker")
    _, replies = train_all(of, task)
    curvature = read_curvature(task, {name: value[0] for name, value in replies[0][1].items()})
    assert isinstance(curvature, KroneckerCurvature)
    assert len(curvature.blocks) == 2
    size = task.model.layout.num_trainable
    dense = torch.stack([curvature.apply(row) for row in torch.eye(size, dtype=torch.float64)])
    expected = torch.logdet(3.0 * dense + 0.7 * torch.eye(size, dtype=torch.float64)).item()
    assert curvature.log_determinant(3.0, 0.7) == pytest.approx(expected)
