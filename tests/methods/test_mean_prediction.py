"""Mean prediction: the mean of what the clients' networks say, and FedAvg where there is one client."""

from pathlib import Path

import torch

from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.mean_prediction import MeanPrediction
from tests.composing import SMALL, run_in
from tests.federation import generator, make_clients, make_task, run_round, train_clients

METHOD = MeanPrediction("mean_prediction", "size")


def test_the_prediction_is_the_mean_of_the_clients_probabilities() -> None:
    task, clients = make_task(), make_clients()
    state = METHOD.init(task, generator())
    replies = train_clients(METHOD, task, state, clients)
    new, _ = METHOD.server_update(task, state, iter(replies), generator())
    x = torch.randn(6, 5, generator=generator(3))
    expected = torch.zeros(6, 3)
    for _, message in replies:  # of unequal size, all alike
        task.model.load(message["params"])
        expected += task.model(x).detach().softmax(1) / 3
    found = METHOD.predict(task, new, x, num=1, batch_size=4, rng=generator()).log_probabilities.exp()
    torch.testing.assert_close(found, expected)


def test_further_rounds_start_as_fedavg() -> None:
    task, clients = make_task(), make_clients()
    state = METHOD.init(task, generator())
    fedavg = run_round(FedAvg("fedavg", "size"), task, {"params": state["params"]}, clients)
    new = run_round(METHOD, task, state, clients)
    assert torch.equal(new["params"], fedavg["params"])
    assert METHOD.broadcast(task, new).keys() == {"params"}


def test_with_one_client_it_is_fedavg(tmp_path: Path) -> None:
    options = [*SMALL, "num_clients=1"]
    fedavg = run_in(tmp_path / "fedavg", *options, "method=fedavg")
    assert run_in(tmp_path / "mean", *options, "method=mean_prediction") == fedavg
