"""Clients that never train: nothing of theirs is used before the end, then they take exactly so many local steps."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bfl_bench.build import load, plan
from bfl_bench.engines.worker import TEST, UNSEEN, VALIDATION
from bfl_bench.errors import ConfigError
from bfl_bench.evaluation import detection
from bfl_bench.inference.train import make_optimizer, train
from bfl_bench.likelihood import Prediction
from bfl_bench.method import Client
from bfl_bench.records import ENTROPY, STAND_IN
from bfl_bench.rng import stream
from bfl_bench.run.checkpoint import read_state
from bfl_bench.run.unseen import limit_steps, measure
from tests.composing import SMALL, choose, experiment, resolve, run_in
from tests.federation import generator, make_clients, make_task

WORDS = [*SMALL, "method=fedavg", "partition.unseen=0.4", "partition.validation=0.2"]


def test_unseen_clients_have_no_part_in_anything_else() -> None:
    run, _, partition = load(plan(resolve(*WORDS)))
    plain, whole, _ = load(plan(resolve(*WORDS, "partition.unseen=0", "partition.test=per_client")))
    worker = run.worker
    assert len(worker.unseen) == 2  # of five
    for client in range(5):
        is_unseen = client in worker.unseen
        parts = (worker.client_indices[client], worker.sets[TEST].own[client], worker.sets[VALIDATION].own[client])
        assert all((len(part) == 0) == is_unseen for part in parts)
        assert (worker.sets[UNSEEN].of(client) is not None) == is_unseen
        assert (worker.task.sizes[client] == 0) == is_unseen
        if is_unseen:
            assert torch.equal(worker.unseen[client], plain.worker.client_indices[client])
            own = plain.worker.sets[TEST].own[client]
            mine = worker.sets[UNSEEN].split.x[worker.sets[UNSEEN].own[client]]
            assert torch.equal(mine, plain.worker.sets[TEST].split.x[own])
    assert len(worker.sets[TEST].split) + len(worker.sets[UNSEEN].split) == len(whole.test)
    assert all(client not in worker.unseen for round_ in range(1, 20) for client in run.cohort(round_))
    assert partition.sizes == plain.worker.task.sizes  # what is written down is the whole partition
    assert len({tuple(experiment(*WORDS, f"seed={seed}").worker.unseen) for seed in range(4)}) > 1


def test_so_many_steps_of_the_methods_own_training() -> None:
    """FedAvg from the final state: k minibatches by hand, over more than one epoch; accuracy over all examples."""
    run = experiment(*WORDS, "eval.unseen_steps=[0,1,7]")
    worker = run.worker
    state = worker.method.init(worker.task, stream(0, "init"))
    row = measure(worker, state)
    split = worker.sets[UNSEEN].split
    for num_steps in (0, 1, 7):
        right = 0
        for client_id, indices in worker.unseen.items():
            task = worker.task
            client = Client(client_id, worker.train, indices, None)
            vector = state["params"].clone()
            orders = stream(worker.seed, "unseen", client_id)
            batches = [
                part
                for order in [torch.randperm(len(indices), generator=orders) for _ in range(9)]
                for part in order.split(task.local.batch_size)
            ]
            for positions in batches[:num_steps]:
                task.model.load(vector)
                x, y = client.gather(positions, generator())
                gradient = task.model.backward(task.likelihood.loss(task.model(x), y))
                vector[: len(gradient)] -= task.local.lr * gradient
            task.model.load(vector)
            own = worker.sets[UNSEEN].own[client_id]
            right += int((task.model(split.x[own]).argmax(1) == split.y[own]).sum())
        assert row[f"unseen_acc@{num_steps}"] == pytest.approx(right / len(split))
    assert row["unseen_loss@7"] < row["unseen_loss@0"]


def test_steps_end_in_the_last_epoch_and_mark_its_end() -> None:
    task, client = make_task(), make_clients()[1]
    limited = limit_steps(task, 1, 12, 4)  # three minibatches an epoch
    assert (limited.local.epochs, limited.max_steps, limited.sizes) == (2, 4, task.sizes)
    ends: list[bool] = []
    trained = train(limited, task.model.initial, client, generator(), after_step=lambda _, end: ends.append(end))
    assert ends == [False, False, True, True]
    assert trained.num_steps == 4
    assert trained.metrics["train_loss"] > 0
    whole = train(replace(task, max_steps=6), task.model.initial, client, generator())
    assert torch.equal(whole.vector, train(task, task.model.initial, client, generator()).vector)
    assert make_optimizer(task.local) == make_optimizer(limited.local)


@pytest.mark.parametrize("method", ["virtual", "pvi", "pfedbayes", "fola", "bayesadmm", "scaffold", "fedcurv"])
def test_methods_adapt(method: str, tmp_path: Path) -> None:
    """With memories of clients that the server has never heard of."""
    text = run_in(tmp_path, *choose(method), "partition.unseen=0.4", "rounds=1", "eval.unseen_steps=[0,30]")
    (row,) = csv.DictReader(io.StringIO(text))
    assert abs(float(row["unseen_loss@30"]) - float(row["unseen_loss@0"])) > 0.01


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["partition.unseen=0.9", "num_clients=2"],
            "partition.unseen: got 0.9, allowed: a share that leaves some of the 2 clients",
        ),
        (["partition.unseen=0.95"], "partition.unseen: got 0.95, allowed: a number from 0 to 0.9"),
        (["partition.test=shared"], "partition.test: got 'shared', allowed: auto or per_client with partition.unseen"),
        (
            ["method=fedep"],
            "eval.unseen_steps: got 1, allowed: numbers of steps that method fedep can take (method.burn",
        ),
    ],
)
def test_what_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(plan(resolve(*WORDS, *words)))
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize("dataset", ["mnist_writers", "shakespeare"])
def test_unseen_clients_are_told_from_the_others(dataset: str, tmp_path: Path) -> None:
    """By the entropy of their examples' predictions; of sequences, at every position."""
    words = [f"data_dir={STAND_IN}", f"dataset={dataset}", "partition=natural", "num_clients=5", "method=fedavg"]
    words += ["partition.unseen=0.4", "rounds=1", "local.epochs=1", "eval.unseen_steps=[0]"]
    assert "@unseen" not in run_in(tmp_path / "plain", *words)
    (row,) = csv.DictReader(io.StringIO(run_in(tmp_path / "asked", *words, "eval.uncertainty=true")))
    worker, state = experiment(*words).worker, read_state(tmp_path / "asked", torch.device("cpu"))
    predictions = [worker.predict_global(name, worker.method, state, 1) for name in (TEST, UNSEEN)]
    inside, outside = (
        detection.entropy(one.log_probabilities).flatten() for one in predictions if isinstance(one, Prediction)
    )
    assert float(row["auroc_entropy@unseen"]) == pytest.approx(detection.auroc(inside, outside))
    with (tmp_path / "asked" / ENTROPY).open() as file:
        counts = [float(line["unseen"]) for line in csv.DictReader(file)]
    assert sum(counts) == len(outside) != len(inside)


def test_where_test_examples_are_not_touched_unseen_clients_are_not_scored(tmp_path: Path) -> None:
    header = run_in(tmp_path, *WORDS, "rounds=1", "eval.scored=validation").splitlines()[0]
    assert "mt_acc" in header
    assert "unseen" not in header
