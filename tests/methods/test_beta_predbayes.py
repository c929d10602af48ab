"""beta-PredBayes: which models are samples, what their predictions become, the student, and what it asks for."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bfl_bench.errors import ConfigError
from bfl_bench.inference.train import train
from bfl_bench.method import ServerData, Task, Tensors
from bfl_bench.methods.beta_predbayes import BetaPredBayes
from tests.composing import SMALL, experiment, resolve, run_in
from tests.federation import generator, make_clients, make_split, make_task, train_clients


def method(**changes: Any) -> BetaPredBayes:
    default = BetaPredBayes(
        name="beta_predbayes",
        weights="size",
        cycle_epochs=3,
        sampled_epochs=2,
        samples=3,
        friction=0.9,
        temperature=0.5,
        decay=0.001,
        beta=None,
        epochs=0,
        batch_size=8,
        lr=0.01,
    )
    return replace(default, **changes)


def make_labelled_task(**local: Any) -> Task:
    data = make_split(40, seed=9)
    return replace(make_task(**local), server_data=ServerData(data.x, data.y))


def run_once(of: BetaPredBayes, **local: Any) -> tuple[Task, Tensors, dict[str, float], list[tuple[int, Tensors]]]:
    task = make_labelled_task(**{"epochs": 6} | local)
    state = of.init(task, generator())
    replies = train_clients(of, task, state, make_clients())
    new, metrics = of.server_update(task, state, iter(replies), generator())
    return task, new, metrics, replies


def predict_each(task: Task, replies: list[tuple[int, Tensors]], x: Tensor) -> list[Tensor]:
    """Mean probabilities of each client's samples, by a loop."""
    found = []
    for _, message in replies:
        total = torch.zeros(len(x), 3, dtype=torch.float64)
        for params in message["models"]:
            task.model.load(params)
            total += task.model(x).detach().double().softmax(1)
        found.append(total / len(message["models"]))
    return found


def test_samples_are_the_ends_of_the_last_epochs_of_cycles() -> None:
    """Of six epochs in cycles of three, epochs 2, 3, 5 and 6 end in a sample; the last three are sent."""
    task, client = make_task(epochs=6), make_clients()[1]
    of = method()
    ends: list[Tensor] = []

    def watch(parameters: Tensor, epoch_ends: bool) -> None:
        if epoch_ends:
            ends.append(task.model.vector.clone())

    update = of.client_update(task, of.init(task, generator()), {}, client, generator())
    optimizers: list[Any] = []

    def spy(*arguments: Any, optimizer: Any, after_step: Any, **options: Any) -> Any:
        optimizers.append(optimizer)
        return train(*arguments, optimizer=optimizer, after_step=watch, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bfl_bench.methods.beta_predbayes.train", spy)
        of.client_update(task, of.init(task, generator()), {}, client, generator())
    assert torch.equal(update.message["models"], torch.stack([ends[2], ends[4], ends[5]]))
    (sghmc,) = optimizers  # 12 examples in batches of 4
    assert (sghmc.cycle_steps, sghmc.noisy_steps, sghmc.variance) == (9, 6, 0.5 / 12)


def test_training_shorter_than_a_cycle_gives_its_last_model() -> None:
    task, client = make_task(epochs=1), make_clients()[1]
    of = method()
    update = of.client_update(task, of.init(task, generator()), {}, client, generator())
    assert update.message["models"].shape == (1, task.model.layout.size)
    assert torch.equal(update.message["models"][0], task.model.vector)


def test_the_prediction_is_that_of_the_clients_combined() -> None:
    x = make_split(6, seed=3).x
    for beta in (0.0, 1.0, 0.3):
        task, new, metrics, replies = run_once(method(beta=beta))
        each = torch.stack(predict_each(task, replies, x))
        product, mixture = each.prod(0), each.mean(0)
        product = product / product.sum(1, keepdim=True)
        expected = product**beta * mixture ** (1 - beta)
        expected = expected / expected.sum(1, keepdim=True)
        found = method(beta=beta).predict(task, new, x, 1, 4, generator()).log_probabilities.double().exp()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)  # networks are float32
        assert metrics["beta"] == beta


def test_a_mixture_tells_how_far_its_members_disagree() -> None:
    x = make_split(6, seed=3).x
    task, new, _, replies = run_once(method(beta=0.0))
    entropy = torch.zeros(6)
    for params in torch.cat([message["models"] for _, message in replies]):
        task.model.load(params)
        entropy += torch.distributions.Categorical(logits=task.model(x).detach()).entropy() / 9
    found = method(beta=0.0).predict(task, new, x, 1, 4, generator()).expected_entropy
    torch.testing.assert_close(found, entropy)
    assert (
        method(beta=0.3).predict(task, new | {"beta": torch.tensor(0.3)}, x, 1, 4, generator()).expected_entropy is None
    )


def test_beta_is_the_best_on_the_servers_labels() -> None:
    task, new, metrics, _replies = run_once(method())
    data = task.server_data
    assert data is not None
    assert data.y is not None
    losses = {}
    for beta in torch.linspace(0, 1, 101).tolist():
        state = new | {"beta": torch.tensor(beta)}
        found = method().predict(task, state, data.x, 1, 4, generator()).log_probabilities
        losses[beta] = -found.gather(1, data.y[:, None]).mean().item()
    best = min(losses, key=losses.__getitem__)
    assert metrics["beta"] == pytest.approx(best, abs=0.01)
    assert new["beta"].item() == metrics["beta"]


def test_a_client_alone_predicts_with_its_samples() -> None:
    task, _, _, replies = run_once(method())
    x = make_split(6, seed=3).x
    local = {"models": replies[1][1]["models"][None]}
    found = method().predict(task, local, x, 1, 4, generator()).log_probabilities.double().exp()
    torch.testing.assert_close(found, predict_each(task, replies[1:2], x)[0], rtol=1e-5, atol=1e-7)


def test_the_student_comes_near_the_combination() -> None:
    """It starts from the first client's last sample, and is what the next round starts from."""
    distances = {}
    for epochs in (1, 100):
        of = method(beta=0.5, epochs=epochs)
        task, new, metrics, replies = run_once(of)
        data = task.server_data
        assert data is not None
        targets = of.predict(task, new, data.x, 1, 10, generator()).log_probabilities.exp()
        task.model.load(of.mean(task, new))
        distances[epochs] = (task.model(data.x).detach().softmax(1) - targets).abs().mean().item()
        start = replies[0][1]["models"][-1]
        moved = (new["params"] - start).abs().max()
        assert epochs > 1 or 0 < moved < 0.1  # five steps of Adam with lr 0.01
        assert metrics["distillation_loss"] > 0
        assert of.broadcast(task, new).keys() == {"params"}
    assert distances[100] < 0.5 * distances[1]


def test_without_a_student_rounds_start_from_the_average() -> None:
    task, new, metrics, replies = run_once(method())
    total = sum(task.sizes[id_] * message["models"][-1].double() for id_, message in replies)
    assert isinstance(total, Tensor)
    torch.testing.assert_close(new["params"].double(), total / sum(task.sizes), rtol=1e-6, atol=1e-7)
    assert "distillation_loss" not in metrics


def test_data_of_the_server_are_asked_for_as_needed() -> None:
    needs = {
        ("labelled", None): method(),
        ("none", 1.0): method(beta=1.0),
        ("unlabelled", 0.0): method(beta=0.0, epochs=3),
    }
    for (data, beta), of in needs.items():
        assert (of.needs.server_data, of.beta) == (data, beta)
    for name, beta in (("bcm", 1.0), ("mixture", 0.0), ("beta_predbayes", None)):
        config = resolve(f"method={name}")
        assert (config["method"]["beta"], config["dataset"]["server_samples"]) == (beta, 200)
    worker = experiment(*SMALL, "method=bcm", "dataset.server_samples=20").worker
    assert worker.task.server_data is not None
    assert worker.task.server_data.y is None


def test_the_student_and_the_combination_are_both_scored(tmp_path: Any) -> None:
    options = ["method=beta_predbayes", "dataset.server_samples=20", "method.epochs=3", "rounds=1"]
    text = run_in(tmp_path, *SMALL, *options, "eval.also_predict=[mean]")
    names, values = (line.split(",") for line in text.splitlines())
    row = dict(zip(names, values, strict=True))
    assert row["nll"] != row["nll@mean"]
    assert 0 <= float(row["beta"]) <= 1


def test_more_sampled_epochs_than_a_cycle_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampled_epochs: got 4, allowed: at most cycle_epochs, 3"):
        method(sampled_epochs=4)
