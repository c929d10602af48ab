"""Squared gradients against a loop over examples and batches."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bfl_bench.errors import UnsuitableError
from bfl_bench.inference.curvature import (
    check_expected_gradient,
    check_hessian,
    diagonal_fisher,
    eigenvalues,
    mean_hessian,
    mean_squared_gradient,
)
from bfl_bench.inference.train import full_gradient
from bfl_bench.method import Client
from bfl_bench.models.flat import FlatModel
from tests.federation import generator, make_clients, make_split, make_task, random_start


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 2 * 3, 3))


def squared_gradients(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(cross_entropy(module(x), y), list(module.parameters()))
    return {name: g.square() for (name, _), g in zip(module.named_parameters(), gradients, strict=True)}


@pytest.mark.parametrize("kind", ["per_sample", "batch_gradient"])
@pytest.mark.parametrize("convolution", [False, True])
def test_diagonal_fisher_equals_a_loop(kind: str, convolution: bool) -> None:
    task = make_task(convolutional() if convolution else None, batch_size=5)
    clients = make_clients(shape=(2, 3, 4)) if convolution else make_clients()
    start, client = random_start(task), clients[1]  # 12 examples: batches of 5, 5 and 2
    fisher = diagonal_fisher(task, start, client, generator(), kind)  # type: ignore[arg-type]
    module = task.model.module
    module.load_state_dict(task.model.layout.to_state_dict(start))
    # the first that the pass draws is its order
    order = torch.randperm(12, generator=generator()) if kind == "batch_gradient" else torch.arange(12)
    x, y = client.gather(order, generator())
    size = 1 if kind == "per_sample" else 5
    expected: dict[str, Tensor] = {}
    for part_x, part_y in zip(x.split(size), y.split(size), strict=True):
        for name, square in squared_gradients(module, part_x, part_y).items():
            expected[name] = expected.get(name, torch.zeros_like(square)) + len(part_y) / 12 * square
    for entry in task.model.layout.entries:
        # float32 sums of a dozen terms, in another order
        torch.testing.assert_close(entry.view(fisher), expected[entry.name], rtol=1e-4, atol=1e-7)
    assert fisher.max() > 1e-3


def test_minibatches_of_clients_stored_class_by_class_are_shuffled() -> None:
    """In the order of storage each minibatch would be of one class, and its gradient as large as an example's."""
    task = make_task(batch_size=8)
    train = make_split(240)
    by_class = train.y.argsort()
    random = by_class[torch.randperm(240, generator=generator(3))]
    start = torch.zeros(task.model.layout.size)
    sums = [
        diagonal_fisher(task, start, Client(0, train, indices, None), generator(), "batch_gradient").sum().item()
        for indices in (by_class, random)
    ]
    assert sums[0] == pytest.approx(sums[1], rel=0.5)  # two draws of 30 minibatches; in order it is four times as much


def test_chunks_change_nothing() -> None:
    task, client = make_task(), make_clients()[1]
    task.model.load(random_start(task))
    x, y = client.gather(torch.arange(12), generator())
    whole = mean_squared_gradient(task, x, y, chunk_size=100)
    torch.testing.assert_close(mean_squared_gradient(task, x, y, chunk_size=5), whole, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("convolution", [False, True])
def test_fisher_of_the_model_is_the_diagonal_of_the_generalised_gauss_newton_matrix(convolution: bool) -> None:
    """Against J'(diag(p) - p p')J, dense, with J the Jacobian of the outputs; no label enters."""
    task = make_task(convolutional() if convolution else None, batch_size=5)
    clients = make_clients(shape=(2, 3, 4)) if convolution else make_clients()
    start, client = random_start(task), clients[1]
    found = diagonal_fisher(task, start, client, generator(), "model")
    layout = task.model.layout
    x, _ = client.gather(torch.arange(12), generator())

    def outputs(vector: Tensor) -> Tensor:
        tensors = {entry.name: entry.view(vector) for entry in layout.entries}
        return torch.func.functional_call(task.model.module, tensors, (x,))

    jacobian = torch.autograd.functional.jacobian(outputs, start)  # type: ignore[no-untyped-call]
    p = outputs(start).softmax(1).detach()
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    expected = torch.einsum("ncp,ncd,ndp->p", jacobian, middle, jacobian) / 12
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)  # float32 sums
    assert not torch.allclose(found, diagonal_fisher(task, start, client, generator(), "per_sample"), rtol=0.1)


def test_fisher_of_the_model_needs_one_label_for_an_example() -> None:
    task = make_task(nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (3, 2))))
    with pytest.raises(UnsuitableError, match="one class for an example"):
        check_expected_gradient(task)
    check_expected_gradient(make_task())


def test_full_gradient_is_that_of_the_whole_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bfl_bench.inference.train._GATHERED_EXAMPLES", 5)
    task, client = make_task(), make_clients()[1]
    start = random_start(task)
    gradient = full_gradient(task, start, client, generator())
    task.model.load(start)
    x, y = client.gather(torch.arange(12), generator())
    expected = task.model.backward(cross_entropy(task.model(x), y))
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["softmax", "mlp", "convolution"])
def test_hessian_equals_autograds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"softmax": nn.Sequential(nn.Flatten(), nn.Linear(24, 3)), "convolution": convolutional()}
    task = make_task(modules.get(kind) or nn.Sequential(nn.Flatten(), nn.Linear(24, 4), nn.Tanh(), nn.Linear(4, 3)))
    client, start = make_clients((70, 5), shape=(2, 3, 4))[0], random_start(task)
    if kind == "softmax":  # the closed form, and no other
        monkeypatch.setattr("bfl_bench.inference.curvature.LARGEST_DENSE", 0)
    ours, num_repaired = mean_hessian(task, start, client, generator())
    x, y = client.gather(torch.arange(70), generator())
    layout = task.model.layout

    def loss(vector: Tensor) -> Tensor:
        tensors = {entry.name: entry.view(vector) for entry in layout.entries}
        return cross_entropy(torch.func.functional_call(task.model.module, tensors, (x,)), y)

    expected = torch.autograd.functional.hessian(loss, start)  # type: ignore[no-untyped-call]
    values, vectors = torch.linalg.eigh(expected)
    assert num_repaired == (0 if kind == "softmax" else pytest.approx((values < 0).sum().item(), abs=3))  # near zero
    expected = (vectors * values.clamp(min=0)) @ vectors.T
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=2e-5)  # float32 sums over 70 examples
    assert expected.abs().max() > 0.05


def test_a_large_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bfl_bench.inference.curvature.LARGEST_DENSE", 10)
    task = make_task()
    with pytest.raises(UnsuitableError, match="at most 10 parameters, or of one linear layer"):
        check_hessian(task)
    check_hessian(make_task(nn.Linear(5, 3)))


def test_eigenvalues_that_rounding_made_are_zero() -> None:
    """A matrix of rank 3 in 200 dimensions: 197 eigenvalues are rounding errors of either sign."""
    roots = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    hessian = roots @ roots.T
    assert (torch.linalg.eigvalsh(hessian)[:197] != 0).all()
    values = eigenvalues(hessian)
    assert (values[:197] == 0).all()
    torch.testing.assert_close(values[197:], torch.linalg.eigvalsh(roots.T @ roots), rtol=1e-4, atol=0)


class Twice(nn.Module):
    """A layer that is used twice: its gradient is a sum of two, which the squares of the parts do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(torch.tanh(self.shared(x.flatten(1)))))


@pytest.mark.parametrize("kind", ["convolutions", "no bias", "twice", "normalised"])
def test_squares_of_single_gradients_whatever_the_layers(kind: str) -> None:
    torch.manual_seed(0)
    side = [1, 6] if kind in ("twice", "no bias") else [2, 9]
    modules: dict[str, nn.Module] = {
        "convolutions": nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(3, 4, 2, dilation=2),
            nn.Flatten(),
            nn.Linear(36, 3),
        ),
        "no bias": nn.Sequential(nn.Flatten(), nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)),
        "twice": Twice(),
        "normalised": nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(147, 3)),
    }
    model = FlatModel(modules[kind], torch.device("cpu"))
    x = torch.randn(7, 1, *side) if side[0] == 1 else torch.randn(7, side[0], side[1], side[1])
    y = torch.randint(0, 3, (7,))
    expected = torch.zeros_like(model.gradient)
    for i in range(7):
        expected += model.backward(cross_entropy(model(x[i : i + 1]), y[i : i + 1])).square() / 7
    torch.testing.assert_close(
        mean_squared_gradient(make_task(modules[kind]), x, y, chunk_size=3), expected, rtol=1e-4, atol=1e-8
    )
