"""Squared gradients against a loop over examples and batches."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bfl_bench.curvature import diagonal_fisher, mean_squared_gradient
from bfl_bench.local import full_gradient
from tests.federation import generator, make_clients, make_task, random_start


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
    x, y = client.gather(torch.arange(12), generator())
    size = 1 if kind == "per_sample" else 5
    expected: dict[str, Tensor] = {}
    for part_x, part_y in zip(x.split(size), y.split(size), strict=True):
        for name, square in squared_gradients(module, part_x, part_y).items():
            expected[name] = expected.get(name, torch.zeros_like(square)) + len(part_y) / 12 * square
    for entry in task.model.layout.entries:
        # float32 sums of a dozen terms, in another order
        torch.testing.assert_close(entry.view(fisher), expected[entry.name], rtol=1e-4, atol=1e-7)
    assert fisher.max() > 1e-3


def test_chunks_change_nothing() -> None:
    task, client = make_task(), make_clients()[1]
    task.model.load(random_start(task))
    x, y = client.gather(torch.arange(12), generator())
    whole = mean_squared_gradient(task.model, x, y, chunk_size=100)
    torch.testing.assert_close(mean_squared_gradient(task.model, x, y, chunk_size=5), whole, rtol=1e-5, atol=1e-8)


def test_full_gradient_is_that_of_the_whole_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bfl_bench.local._GATHERED_EXAMPLES", 5)
    task, client = make_task(), make_clients()[1]
    start = random_start(task)
    gradient = full_gradient(task, start, client, generator())
    task.model.load(start)
    x, y = client.gather(torch.arange(12), generator())
    expected = task.model.backward(cross_entropy(task.model(x), y))
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
