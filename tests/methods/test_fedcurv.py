"""FedCurv: the penalty is over the other clients, and the sums are over all clients at any participation."""

from dataclasses import replace

import torch
from torch.nn.functional import cross_entropy

from bfl_bench.inference.curvature import diagonal_fisher
from bfl_bench.method import Tensors
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fedcurv import FedCurv
from tests.federation import generator, make_clients, make_task, random_start, run_round


def method(weight: float = 0.7) -> FedCurv:
    return FedCurv("fedcurv", "size", weight, "per_sample", True)


def test_weight_zero_and_the_first_round_are_fedavg() -> None:
    task, clients = make_task(), make_clients()
    state = method().init(task, generator())
    state["params"] = random_start(task)
    fedavg = run_round(FedAvg("fedavg", "size"), task, {"params": state["params"]}, clients)["params"]
    assert torch.equal(run_round(method(), task, state, clients)["params"], fedavg)
    state["fishers"] = torch.rand_like(state["fishers"])
    assert torch.equal(run_round(method(0.0), task, state, clients)["params"], fedavg)
    assert not torch.allclose(run_round(method(), task, state, clients)["params"], fedavg)


def test_a_penalty_without_gradient_is_fedavg_in_every_round() -> None:
    """FOLA's released code, at a strength with which the live penalty ends in huge numbers."""
    task, clients = make_task(), make_clients()
    state = method().init(task, generator())
    state["params"] = random_start(task)
    dead, live = replace(method(1e4), penalty_gradient=False), method(1e4)
    ours = {"dead": dict(state), "live": dict(state)}
    fedavg: Tensors = {"params": state["params"]}
    for _ in range(3):
        ours["dead"] = run_round(dead, task, ours["dead"], clients)
        ours["live"] = run_round(live, task, ours["live"], clients)
        fedavg = run_round(FedAvg("fedavg", "size"), task, fedavg, clients)
        assert torch.equal(ours["dead"]["params"], fedavg["params"])
    assert not ours["live"]["params"].abs().max() < 1e3


def test_penalty_is_over_the_other_clients() -> None:
    """One full-batch step against autograd of the loss + lambda sum_{j != i} (w - w_j)^T F_j (w - w_j)."""
    task = make_task(epochs=1, batch_size=100)
    client, start = make_clients()[1], random_start(task)
    params = torch.randn(3, len(start), generator=generator(1))
    fishers = torch.rand(3, len(start), generator=generator(2))
    broadcast = {"params": start, "fishers": fishers.sum(0), "fisher_params": (fishers * params).sum(0)}
    memory = {"fisher": fishers[1], "fisher_params": fishers[1] * params[1]}
    update = method().client_update(task, broadcast, memory, client, generator())
    weights = start.clone().requires_grad_()
    penalty = sum((fishers[j] * (weights - params[j]) ** 2).sum() for j in (0, 2))
    assert isinstance(penalty, torch.Tensor)
    (penalty_gradient,) = torch.autograd.grad(0.7 * penalty, weights)
    task.model.load(start)
    x, y = client.gather(torch.arange(len(client)), generator())
    gradient = task.model.backward(cross_entropy(task.model(x), y)) + penalty_gradient
    torch.testing.assert_close(update.message["params"], start - task.local.lr * gradient, rtol=1e-4, atol=1e-5)


def test_sums_are_over_all_clients_at_any_participation() -> None:
    task, clients = make_task(), make_clients()
    state = method().init(task, generator())
    memories: dict[int, Tensors] = {}
    for round_, cohort in enumerate([[1], [0, 2], [1, 2], [2]]):
        replies = []
        for id_ in cohort:
            memory = memories.get(id_) or method().init_client(task, state, id_)
            update = method().client_update(task, state, memory, clients[id_], generator(10 * round_ + id_))
            assert update.memory is not None
            memories[id_] = update.memory
            replies.append((id_, update.message))
        state, _ = method().server_update(task, state, replies, generator())
    for ours, theirs in (("fishers", "fisher"), ("fisher_params", "fisher_params")):
        total = torch.stack([memory[theirs] for memory in memories.values()]).sum(0)
        torch.testing.assert_close(state[ours], total, rtol=1e-4, atol=1e-6)  # float32, updated by differences
        assert total.abs().max() > 0.01


def test_fisher_is_taken_at_the_end_of_local_training() -> None:
    task, client = make_task(), make_clients()[1]
    state = method().init(task, generator())
    memory = method().init_client(task, state, 1)
    update = method().client_update(task, state, memory, client, generator())
    assert update.memory is not None
    expected = diagonal_fisher(task, update.local["params"], client, generator(), "per_sample")
    torch.testing.assert_close(update.memory["fisher"], expected)
    torch.testing.assert_close(update.memory["fisher_params"], expected * update.local["params"])
