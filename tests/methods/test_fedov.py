"""FedOV: the vote, what clients learn of the unknown, and no dead switch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bfl_bench.data.outliers import destroy
from bfl_bench.errors import UnsuitableError
from bfl_bench.method import DataInfo, Task
from bfl_bench.methods.fedov import FedOv
from tests.composing import SMALL, run_in
from tests.federation import generator, make_clients, make_task, predict, score, train_clients

SHAPE = (1, 8, 8)


def method(**changes: Any) -> FedOv:
    return replace(FedOv("fedov", "size", second=True, adversarial_steps=2, adversarial_step=0.05), **changes)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 4))  # 3 classes and the unknown


def task_for(**local: Any) -> Task:
    low, high = torch.full((1, 1, 1), -4.0), torch.full((1, 1, 1), 4.0)
    return replace(make_task(network(), **local), data=DataInfo(SHAPE, low, high))


def test_who_does_not_know_abstains() -> None:
    """Two clients that are unsure and wrong, but mostly say "unknown", lose against one that is sure."""
    module = nn.Linear(4, 4, bias=False)
    task = make_task(module)
    logits = [torch.tensor(row) for row in ([0.0, 2.0, 0.0, 9.0], [0.0, 2.0, 0.0, 9.0], [4.0, 0.0, 0.0, 0.0])]
    models = torch.stack([torch.diag(row).flatten() for row in logits])
    draws = method().draws(task, {"models": models}, 1, generator())
    scores = score(predict(task.model, draws, torch.ones(1, 4), 1, num_classes=3), torch.tensor([0]), 15)
    assert scores.values["accuracy"] == 1.0
    votes = torch.stack([row.softmax(0) for row in logits]).mean(0)[:3]
    assert scores.values["nll"] == pytest.approx(-(votes[0] / votes.sum()).log().item(), rel=1e-5)


def test_the_global_model_is_all_local_models() -> None:
    task, clients = task_for(), make_clients(shape=SHAPE)
    state = method().init(task, generator())
    replies = train_clients(method(), task, state, clients)
    new, _ = method().server_update(task, state, iter(replies), generator())
    draws = list(method().draws(task, new, 1, generator()))
    assert len(draws) == 3
    assert all(torch.equal(draw, message["params"]) for draw, (_, message) in zip(draws, replies, strict=True))
    mean = sum(task.sizes[client] * message["params"].double() for client, message in replies) / sum(task.sizes)
    assert isinstance(mean, Tensor)
    torch.testing.assert_close(new["params"], mean.float())


def test_a_client_learns_what_is_unknown() -> None:
    """Of its own images it names the class, of destroyed ones it says more often that they are none."""
    task = task_for(epochs=60, lr=0.2)
    (client,) = make_clients((30,), shape=SHAPE)
    state = method().init(task, generator())
    ((_, message),) = train_clients(method(), task, state, [client])
    task.model.load(message["params"])
    x, y = client.gather(torch.arange(30), generator())
    low = torch.full((1, 1, 1), -4.0)
    with torch.no_grad():
        known, destroyed = task.model(x), task.model(destroy(x, low, generator()))
    assert (known.argmax(1) == y).double().mean() > 0.8
    assert (destroyed.argmax(1) == 3).double().mean() > (known.argmax(1) == 3).double().mean() + 0.3


def test_second_adds_the_gradient_of_the_best_wrong_answer() -> None:
    """One step on all data: what `second` changes is the gradient of -log p(unknown | not the true class)."""
    task = task_for(epochs=1, batch_size=30, lr=0.2)
    (client,) = make_clients((30,), shape=SHAPE)
    x, y = client.gather(torch.arange(30), generator())

    def step(second: bool) -> Tensor:
        fedov = method(second=second, adversarial_steps=0)
        ((_, message),) = train_clients(fedov, task, fedov.init(task, generator()), [client])
        return message["params"]

    task.model.load(task.model.initial)
    probabilities = task.model(x).softmax(1)
    wrong = 1 - probabilities.gather(1, y[:, None])[:, 0]
    gradient = task.model.backward(-(probabilities[:, 3] / wrong).log().mean()).clone()
    torch.testing.assert_close(step(True) - step(False), -0.2 * gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("changes", [{"second": False}, {"adversarial_steps": 0}, {"adversarial_step": 0.3}])
def test_every_option_changes_the_local_model(changes: dict[str, Any]) -> None:
    task, clients = task_for(), make_clients(shape=SHAPE)
    state = method().init(task, generator())
    (_, first), *_ = train_clients(method(), task, state, clients)
    (_, second), *_ = train_clients(method(**changes), task, state, clients)
    assert not torch.allclose(first["params"], second["params"], atol=1e-6)


def test_a_run_has_one_more_output_and_metrics_over_the_classes(tmp_path: Path) -> None:
    text = run_in(tmp_path, *SMALL, "method=fedov", "rounds=1")
    nll = float(text.splitlines()[1].split(",")[4])
    assert 0 < nll < 5
    assert 0 < float(text.splitlines()[1].split(",")[1]) <= 1


def test_inputs_that_are_no_images_are_refused() -> None:
    task = replace(make_task(), data=DataInfo((5,), torch.zeros(1), torch.ones(1)))
    with pytest.raises(UnsuitableError, match="images, which fedov destroys"):
        method().check(task)
