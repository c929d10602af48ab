"""RegMean: the least squares of the pooled data from clients' own, a diagonal where asked, and averages elsewhere."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bfl_bench.inference import kronecker
from bfl_bench.method import Client, Task, Tensors
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.regmean import RegMean
from bfl_bench.run.recorder import num_bytes
from tests.federation import generator, make_clients, make_task, random_start, run_round, train_clients

SIZES = (9, 14, 8)  # each more than the 6 unknowns of a regression
METHOD = RegMean("regmean", "size", 1.0, 1e-12)


def with_ones(client: Client) -> Tensor:
    x, _ = client.gather(torch.arange(len(client)), generator())
    return torch.cat([x, torch.ones(len(x), 1)], dim=1).double()


def regressions() -> tuple[Task, list[tuple[int, Tensors]], Tensor, Tensor]:
    """Clients that solved a linear regression each; all inputs with ones, and all outputs."""
    task, clients = make_task(nn.Linear(5, 3), sizes=SIZES), make_clients(SIZES)
    (layer,) = kronecker.find_layers(task.model)
    replies, inputs, outputs = [], [with_ones(client) for client in clients], []
    for client, x in zip(clients, inputs, strict=True):
        y = torch.randn(len(x), 3, generator=generator(client.id), dtype=torch.float64)
        outputs.append(y)
        params = torch.zeros(task.model.layout.size)
        layer.write(params, torch.linalg.lstsq(x, y).solution.T.float())
        moments = kronecker.input_moments(task, params, client, generator())
        message = {f"{name}.A": kronecker.upper_triangle(moment) for name, moment in moments.items()}
        replies.append((client.id, message | {"params": params}))
    return task, replies, torch.cat(inputs), torch.cat(outputs)


def merge(method: RegMean, task: Task, replies: list[tuple[int, Tensors]]) -> Tensor:
    new, _ = method.server_update(task, {"params": random_start(task)}, iter(replies), generator())
    (layer,) = kronecker.find_layers(task.model)
    return layer.read(new["params"].double())


def test_regressions_of_clients_give_that_of_the_pooled_data() -> None:
    task, replies, x, y = regressions()
    pooled = torch.linalg.lstsq(x, y).solution.T
    found = merge(METHOD, task, replies)
    torch.testing.assert_close(found, pooled, rtol=1e-4, atol=1e-5)  # moments and models travel in float32
    for changed in (
        replace(METHOD, weights="uniform"),
        replace(METHOD, off_diagonal=0.9),
        replace(METHOD, damping=1.0),
    ):
        assert not torch.allclose(merge(changed, task, replies), pooled, atol=1e-3)


def test_without_off_diagonals_inputs_weigh_by_their_squares() -> None:
    task, replies, *_ = regressions()
    (layer,) = kronecker.find_layers(task.model)
    right, total = torch.zeros(3, 6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    for client in make_clients(SIZES):
        squares = with_ones(client).square().sum(0)
        right += layer.read(replies[client.id][1]["params"].double()) * squares
        total += squares
    torch.testing.assert_close(
        merge(replace(METHOD, off_diagonal=0.0), task, replies), right / total, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("off_diagonal", [0.0, 0.9, 1.0])
def test_an_input_that_is_always_zero_gets_the_average(off_diagonal: float) -> None:
    task, replies, *_ = regressions()
    dark = []
    for id_, message in replies:
        moment = kronecker.from_upper_triangle(message[".A"])
        moment[2], moment[:, 2] = 0.0, 0.0
        dark.append((id_, message | {".A": kronecker.upper_triangle(moment)}))
    (layer,) = kronecker.find_layers(task.model)
    average = sum(SIZES[id_] * layer.read(message["params"].double()) for id_, message in dark) / sum(SIZES)
    assert isinstance(average, Tensor)
    found = merge(replace(METHOD, off_diagonal=off_diagonal, damping=1e-6), task, dark)
    torch.testing.assert_close(found[:, 2], average[:, 2], rtol=1e-5, atol=1e-6)


def test_one_client_is_itself_and_equal_inputs_give_fedavg() -> None:
    method = RegMean("regmean", "size", 0.9, 1e-6)
    task, clients = make_task(), make_clients()
    state = {"params": task.model.initial}
    fedavg = FedAvg("fedavg", "size")
    alone = run_round(fedavg, task, state, clients[1:2])["params"]
    torch.testing.assert_close(run_round(method, task, state, clients[1:2])["params"], alone, rtol=1e-4, atol=1e-5)
    replies = train_clients(method, task, state, clients)
    moments = {name: value for name, value in replies[0][1].items() if name != "params"}
    new, _ = method.server_update(task, state, iter([(id_, m | moments) for id_, m in replies]), generator())
    average = run_round(fedavg, task, state, clients)["params"]
    torch.testing.assert_close(new["params"], average, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(run_round(method, task, state, clients)["params"], average, atol=1e-3)


def test_a_message_is_the_model_and_a_triangle_for_each_layer() -> None:
    task, clients = make_task(), make_clients()
    ((_, message),) = train_clients(METHOD, task, {"params": task.model.initial}, clients[:1])
    assert num_bytes(message) == 4 * (task.model.layout.size + 6 * 7 // 2 + 7 * 8 // 2)
