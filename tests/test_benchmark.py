"""benchmarks/benchmark.py: the programs that it compares do the same work."""

import ast
import math
from dataclasses import replace
from pathlib import Path

import aggregation
import benchmark
import pytest
import stacked
import torch
import workloads
from peers.work import Workload, client_data, make_data, make_network

from bfl_bench import aggregators
from bfl_bench.method import Client
from bfl_bench.rng import stream

TINY = Workload("mlp", num_clients=4, cohort=2, samples=50, epochs=2, batch_size=16, rounds=5, lr=0.1, hidden=8, side=8)
BAYESIAN = replace(TINY, bayesian=True)
LENET = replace(TINY, network="lenet", side=28)


@pytest.mark.parametrize("work", [TINY, BAYESIAN, LENET, replace(LENET, bayesian=True)])
def test_networks_are_the_same_function_from_the_same_start(work: Workload) -> None:
    data = workloads.load_data(work)
    ours = workloads.make_experiment(work, data).worker.task.model.module
    plain = make_network(work)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b), name
    outputs = []
    for network in (ours.train(), plain.train()):
        torch.manual_seed(1)  # the same noise
        outputs.append(network(data.x))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("work", [TINY, LENET])
def test_stacked_clients_end_where_single_ones_do(work: Workload) -> None:
    network, batches = make_network(work), stacked.minibatches(replace(work, num_clients=work.cohort))
    together = stacked.stacked(work, network, batches)
    for client, parameters in enumerate(stacked.one_by_one(work, network, batches)):
        for name, parameter in parameters.items():
            torch.testing.assert_close(together[name][client], parameter, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("work", [TINY, BAYESIAN], ids=["point", "bayesian"])
def test_a_bare_client_with_our_minibatches_ends_with_our_model(
    work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = workloads.load_data(work)
    worker, local = workloads.make_experiment(work, data).worker, make_network(work)
    client = Client(1, data, worker.client_indices[1], None)
    rng = stream(7)
    orders = iter([torch.randperm(len(client), generator=rng) for _ in range(work.epochs)])
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)  # no noise in Gaussian layers
    state = worker.method.init(worker.task, stream(0))
    update = worker.method.client_update(
        worker.task, worker.method.broadcast(worker.task, state), None, client, stream(7)
    )
    ours = worker.task.model.layout.to_state_dict(update.message["params"])
    monkeypatch.setattr(torch, "randperm", lambda num: next(orders))
    assert workloads.train_bare(local, work, data, client.indices) == 8
    for name, parameter in local.state_dict().items():
        torch.testing.assert_close(ours[name], parameter)


@pytest.mark.parametrize("work", [TINY, BAYESIAN], ids=["point", "bayesian"])
def test_whole_runs_take_the_same_steps_and_learn_as_much(work: Workload) -> None:
    work = replace(work, cohort=4, signal=1.0, lr=0.3, hidden=16)
    data = workloads.load_data(work)
    ours, bare = workloads.run_in_turns(work, data)
    assert ours.steps == bare.steps == work.steps == 5 * 4 * 2 * 4
    assert len(ours.rounds) == len(bare.rounds) == 5
    assert min(ours.accuracy, bare.accuracy) > 0.8
    assert abs(ours.accuracy - bare.accuracy) < 0.1
    for alone, together in ((workloads.run_ours(work, data), ours), (workloads.run_bare(work, data), bare)):
        assert alone.steps == together.steps
        assert abs(alone.accuracy - together.accuracy) < 0.1


def test_peers_have_our_data_and_nothing_else_of_ours() -> None:
    worker = workloads.make_experiment(TINY, workloads.load_data(TINY)).worker
    for (x, y), indices in zip(client_data(TINY), worker.client_indices, strict=True):
        assert torch.equal(x, worker.train.x[indices])
        assert torch.equal(y, worker.train.y[indices])
    assert torch.equal(make_data(TINY)[0], worker.train.x)
    assert not torch.equal(make_data(replace(TINY, seed=1))[0], worker.train.x)
    for path in (Path(benchmark.__file__).parent / "peers").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith("bfl_bench")], path


def test_every_rule_is_measured() -> None:
    helpers = {"Combination", "Rule", "WeightedMean", "combine", "step_towards", "rklb_full", "wb_full"}
    assert set(aggregation.RULES) - {"mean", "fvb_eaa"} == set(aggregators.__all__) - helpers
    for rule in [*aggregation.RULES, *aggregation.PARTS]:
        cost = aggregation.measure(rule, clients=3, columns=20, repeats=1)
        assert all(map(math.isfinite, cost.ratios)), rule


def test_targets_are_judged_by_the_median() -> None:
    assert benchmark.judge("A", "ours / bare", [0.8, 0.9, 1.2]) == ["0.90", "0.80", "1.20", "<= 0.90", "yes"]
    assert benchmark.judge("B", "flower / ours", [7.0, 9.0, 7.5])[-1] == "no"
    assert benchmark.judge("A", "flower / ours", [1.0])[-2:] == ["", ""]


def test_small_workloads_are_small() -> None:
    for work in workloads.WORKLOADS.values():
        per_round = [w.steps / w.rounds for w in (benchmark.shrink(work), work)]
        assert per_round[0] < per_round[1] / 8
