"""Clients that the data names, their own test examples, and the metrics on these."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bfl_bench.build import load, plan
from bfl_bench.data.dataset import Dataset, Owners
from bfl_bench.data.partition import Natural, deal_test
from bfl_bench.engines.worker import TEST
from bfl_bench.errors import ConfigError
from bfl_bench.likelihood import Categorical
from bfl_bench.run.loop import Experiment
from tests.composing import SMALL, experiment, resolve, run_in
from tests.federation import generator, make_split, predict

SIZES = [9, 14, 6, 11]  # training examples of the four owners
TEST_SIZES = [4, 3, 0, 5]


@dataclass(frozen=True)
class Owned:
    """Examples that lie in no order of their owners; the third owner has no test example."""

    name: str

    def load(self, data_dir: Path) -> Dataset:
        owners = [torch.repeat_interleave(torch.arange(4), torch.tensor(sizes)) for sizes in (SIZES, TEST_SIZES)]
        train, test = (owner[torch.randperm(len(owner), generator=generator(i))] for i, owner in enumerate(owners))
        names = ("ann", "bob", "cid", "dot")
        return Dataset(make_split(40), make_split(12, seed=8), Categorical(3), owners=Owners(names, train, test))


def owned(*overrides: str) -> Experiment:
    small = [o for o in SMALL if not o.startswith(("dataset", "partition", "num_clients"))]
    config = resolve(*small, "partition=natural", "num_clients=null", *overrides)
    config["dataset"] = {"_target_": f"{__name__}.Owned", "name": "owned"}
    return load(plan(config))[0]


def rows(text: str) -> list[dict[str, Any]]:
    return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(text.splitlines())]


def test_clients_are_the_owners_of_the_data() -> None:
    worker = owned().worker
    owners = Owned("owned").load(Path()).owners
    assert owners is not None
    assert worker.task.sizes == tuple(SIZES)
    assert worker.sets[TEST].own is not None
    for client, (train, test) in enumerate(zip(worker.client_indices, worker.sets[TEST].own, strict=True)):
        assert torch.equal(train, (owners.train == client).nonzero()[:, 0])
        assert torch.equal(test, (owners.test == client).nonzero()[:, 0])


def test_a_number_of_clients_is_a_seeded_choice_with_its_own_test_set() -> None:
    natural = Natural("natural")
    choices = {tuple(natural.choose(4, 2, seed)) for seed in range(30)}
    assert len(choices) > 3
    assert all(a < b for a, b in choices)
    assert list(natural.choose(4, None, 0)) == [0, 1, 2, 3]
    worker = owned("num_clients=2", "seed=3").worker
    chosen = natural.choose(4, 2, 3)
    assert worker.task.sizes == tuple(SIZES[i] for i in chosen)
    assert worker.sets[TEST].own is not None
    assert [len(own) for own in worker.sets[TEST].own] == [TEST_SIZES[i] for i in chosen]
    num = len(worker.sets[TEST].split)
    assert sorted(torch.cat(worker.sets[TEST].own).tolist()) == list(range(num))  # nobody else's examples
    with pytest.raises(ConfigError, match="num_clients: got 5, allowed: at most the 4 clients of the data"):
        owned("num_clients=5")


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match="num_clients: got null, allowed: a number with partition dirichlet"):
        plan(resolve("num_clients=null"))
    with pytest.raises(ConfigError, match="does not say whose examples"):
        experiment(*[o for o in SMALL if not o.startswith("partition")], "partition=natural")
    with pytest.raises(ConfigError, match=r"partition.test: got 'mine', allowed: auto, shared, per_client"):
        plan(resolve("partition.test=mine"))


def test_the_test_set_is_dealt_by_the_training_proportions() -> None:
    counts = np.array([[30, 0, 5], [10, 8, 0], [0, 2, 0]])
    labels = np.array([0] * 20 + [1] * 10 + [2] * 7)
    dealt = deal_test(counts, labels, seed=0)
    assert sorted(np.concatenate(dealt)) == list(range(37))
    assert [np.bincount(labels[own], minlength=3).tolist() for own in dealt] == [[15, 0, 7], [5, 8, 0], [0, 2, 0]]
    assert not np.array_equal(dealt[0], deal_test(counts, labels, seed=1)[0])
    nobody = deal_test(np.array([[3, 0], [1, 0]]), np.array([0, 0, 1, 1, 1]), seed=0)
    assert sorted(np.concatenate(nobody)) == [0, 1]


def test_columns_only_where_clients_have_their_own_test_examples(tmp_path: Path) -> None:
    shared = rows(run_in(tmp_path / "shared", *SMALL, "rounds=1"))[0]
    assert "mt_acc" not in shared
    dealt = rows(run_in(tmp_path / "dealt", *SMALL, "rounds=1", "partition.test=per_client"))[0]
    assert {"s_acc", "s_loss", "mt_acc", "mt_loss", "worst10_own"} <= dealt.keys()
    assert (dealt["s_acc"], dealt["s_loss"]) == (dealt["ga"], dealt["nll"])
    text = run_in(tmp_path / "natural", experiment_=owned("partition.test=shared", "rounds=1"))
    assert "mt_acc" not in rows(text)[0]


def test_mt_is_every_clients_last_model_on_its_own_examples(tmp_path: Path) -> None:
    """Replayed by hand: the initial model before a client's first turn, its last local model afterwards."""
    run_ = owned("method=fedavg", "participation=0.5", "rounds=4", "eval.keep_messages=[1,2,3,4]")
    worker = run_.worker
    assert worker.sets[TEST].own is not None
    models = dict.fromkeys(range(4), worker.task.model.initial)
    for row in rows(run_in(tmp_path, experiment_=run_)):
        round_ = int(row["round"])
        for client in run_.cohort(round_):
            models[client] = load_file(tmp_path / f"messages/round-{round_}-client-{client}.safetensors")["params"]
        correct, loss, accuracies = 0.0, 0.0, []
        for client, own in enumerate(worker.sets[TEST].own):
            if len(own):
                y = worker.sets[TEST].split.y[own]
                logp = predict(worker.task.model, iter([models[client]]), worker.sets[TEST].split.x[own], 100).double()
                right = (logp.argmax(1) == y).double()
                correct, loss = correct + right.sum().item(), loss - logp.gather(1, y[:, None]).sum().item()
                accuracies.append(right.mean().item())
        assert row["mt_acc"] == pytest.approx(correct / 12)
        assert row["mt_loss"] == pytest.approx(loss / 12, rel=1e-5)
        assert row["worst10_own"] == pytest.approx(min(accuracies))


def test_resuming_keeps_the_scores_of_clients(tmp_path: Path) -> None:
    overrides = ("participation=0.5", "method=fedavg")
    whole = run_in(tmp_path / "whole", experiment_=owned(*overrides, "rounds=4"))
    run_in(tmp_path / "parts", experiment_=owned(*overrides, "rounds=2"))
    assert run_in(tmp_path / "parts", experiment_=owned(*overrides, "rounds=4")) == whole
