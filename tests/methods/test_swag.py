"""SWAG: FedAvg that remembers; covariances against numpy's of the models it passed through."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bfl_bench.errors import ConfigError, UnsuitableError
from bfl_bench.inference.train import train
from bfl_bench.method import Task, Tensors
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.swag import Swag
from tests.composing import SMALL, experiment, run_in
from tests.federation import NUM_CLASSES, SIZES, generator, make_clients, make_task, random_start, train_clients

MANY = 20_000


def method(**changes: Any) -> Swag:
    values: dict[str, Any] = {"iterates": "server", "start_round": 1, "every": 1, "rank": 20, "scale": 1.0}
    return Swag(name="swag", weights="size", floor=1e-30, **values | changes)


def pass_through(swag: Swag, task: Task, models: list[Tensor]) -> Tensors:
    """The state after rounds in which the server's models were these."""
    state = swag.init(task, generator())
    for model in models:
        state, _ = swag.server_update(task, state, iter([(0, {"params": model})]), generator())
    return state


def make_models(task: Task, num: int) -> list[Tensor]:
    return [random_start(task, seed) for seed in range(num)]


def test_clients_and_server_are_fedavg(tmp_path: Path) -> None:
    """Until the first model is taken in nothing else differs, and training never does."""
    fedavg = run_in(tmp_path / "fedavg", *SMALL, "method=fedavg")
    assert run_in(tmp_path / "late", *SMALL, "method=swag", "method.start_round=9") == fedavg
    early = run_in(tmp_path / "early", *SMALL, "method=swag", "method.start_round=2")
    assert early != fedavg
    losses, expected = ([row.split(",")[7:10] for row in text.splitlines()] for text in (early, fedavg))
    assert expected[0] == ["train_loss", "train_acc", "bytes_up"]
    assert losses == expected


def test_moments_are_those_of_the_models_that_were_taken_in() -> None:
    task = make_task()
    models = make_models(task, 9)
    state = pass_through(method(start_round=3, every=2), task, models)
    taken = np.stack([model.double().numpy() for model in models])[[2, 4, 6, 8]]
    assert state["collected"] == 4
    np.testing.assert_allclose(state["mean"].numpy(), taken.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(state["square"].numpy(), (taken**2).mean(0), rtol=1e-12, atol=1e-12)
    # A row is the distance from the mean of the models up to that one.
    expected = [taken[i] - taken[: i + 1].mean(0) for i in range(4)]
    np.testing.assert_allclose(state["deviations"].numpy(), np.stack(expected), rtol=1e-5, atol=1e-6)


def test_the_oldest_rows_go() -> None:
    task = make_task()
    models = make_models(task, 5)
    few, many = (pass_through(method(rank=rank), task, models)["deviations"] for rank in (3, 20))
    assert torch.equal(few, many[2:])
    assert len(many) == 5


def test_covariance_of_draws() -> None:
    """Half of the diagonal plus the low-rank part, A'A / (rows - 1), of the stored rows."""
    task, swag = make_task(nn.Linear(2, 2)), method(scale=0.5, rank=3)
    state = pass_through(swag, task, make_models(task, 6))
    draws = torch.stack(list(swag.draws(task, state, MANY, generator()))).double().numpy()
    rows = state["deviations"].double().numpy()
    assert rows.shape == (3, 6)
    diagonal = (state["square"] - state["mean"].square()).numpy()
    expected = 0.5 * (np.diag(diagonal) + rows.T @ rows / 2)
    spread = np.sqrt(np.diag(expected))
    # 5 standard errors, which are at most sqrt(2 / MANY) of the product of two standard deviations.
    assert (np.abs(np.cov(draws.T) - expected) <= 0.05 * np.outer(spread, spread)).all()
    np.testing.assert_allclose(draws.mean(0), state["mean"].numpy(), atol=5 * spread.max() / MANY**0.5)


def test_constant_models_have_the_floor_as_variance() -> None:
    task, model = make_task(), random_start(make_task())
    swag = replace(method(), floor=0.04)
    state = pass_through(swag, task, [model] * 4)
    draws = torch.stack(list(swag.draws(task, state, 3000, generator())))
    torch.testing.assert_close(draws.std(0), torch.full_like(model, 0.2), rtol=0.1, atol=0.0)
    (first, *_) = method().draws(task, state, 2, generator())
    torch.testing.assert_close(first, model)


def test_clients_train_from_the_servers_model_not_from_the_mean() -> None:
    task, swag = make_task(), method()
    state = pass_through(swag, task, make_models(task, 3))
    assert swag.broadcast(task, state).keys() == {"params"}
    fedavg = train_clients(FedAvg("fedavg", "size"), task, {"params": state["params"]}, make_clients())
    for (_, ours), (_, theirs) in zip(train_clients(swag, task, state, make_clients()), fedavg, strict=True):
        assert torch.equal(ours["params"], theirs["params"])


def test_a_clients_moments_are_those_of_its_last_epoch() -> None:
    task, client, swag = make_task(epochs=2), make_clients()[1], method(iterates="clients")
    seen: list[Tensor] = []
    start = random_start(task)
    train(task, start, client, generator(), after_step=lambda parameters, _: seen.append(parameters.clone()))
    last = np.stack([model.double().numpy() for model in seen[3:]])
    assert len(last) == 3
    message = swag.client_update(task, {"params": start}, {}, client, generator()).message
    np.testing.assert_allclose(message["params"].numpy(), last.mean(0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(message["variance"].numpy(), last.var(0), rtol=1e-5, atol=1e-12)


def test_the_server_combines_clients_to_the_moments_of_their_mixture() -> None:
    task, swag = make_task(), method(iterates="clients")
    state = swag.init(task, generator()) | {"params": random_start(task)}
    replies = train_clients(swag, task, state, make_clients())
    new, _ = swag.server_update(task, state, iter(replies), generator())
    p = np.array(SIZES, dtype=float)[:, None] / sum(SIZES)
    means, variances = (np.stack([m[name].double().numpy() for _, m in replies]) for name in ("params", "variance"))
    mean = (p * means).sum(0)
    variance = (p * (variances + means**2)).sum(0) - mean**2
    np.testing.assert_allclose(new["params"].numpy(), mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(new["variance"].numpy(), variance, rtol=1e-6, atol=1e-12)
    draws = torch.stack(list(swag.draws(task, new, 3000, generator()))).numpy()
    np.testing.assert_allclose(draws.std(0), np.sqrt(variance), rtol=0.1)


def test_one_step_of_a_client_has_no_variance() -> None:
    """A single model: FedAvg's, and the floor."""
    task, client, swag = make_task(epochs=1, batch_size=100), make_clients()[1], method(iterates="clients")
    start = {"params": random_start(task)}
    message = swag.client_update(task, start, {}, client, generator()).message
    fedavg = FedAvg("fedavg", "size").client_update(task, start, {}, client, generator()).message
    assert torch.equal(message["params"], fedavg["params"])
    assert torch.equal(message["variance"], torch.full_like(message["variance"], 1e-30))


def test_batch_norm_is_refused() -> None:
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, NUM_CLASSES))
    with pytest.raises(UnsuitableError, match="without BatchNorm"):
        method().check(make_task(module))
    experiment(*SMALL, "method=swag")
    with pytest.raises(ConfigError, match=r"method\.rank: got 1"):
        experiment(*SMALL, "method=swag", "method.rank=1")


def test_clients_iterates_run(tmp_path: Path) -> None:
    assert len(run_in(tmp_path, *SMALL, "method=swag", "method.iterates=clients").splitlines()) == 4
