"""Sequences go through the same loop, metrics and engine as images."""

import csv
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bfl_bench.build import load, plan
from bfl_bench.data.dataset import Dataset, Owners, Split
from bfl_bench.errors import ConfigError
from bfl_bench.inference.kronecker import find_layers
from bfl_bench.likelihood import Categorical
from bfl_bench.run.loop import Experiment
from tests.composing import NEEDS, resolve, run_in
from tests.federation import generator


@dataclass(frozen=True)
class Counting:
    """Every next token is the last one plus a step that is the client's own: a network can learn it."""

    name: str

    def load(self, data_dir: Path) -> Dataset:
        owners = [torch.arange(num) % 3 for num in (60, 18)]
        splits = []
        for seed, owner in enumerate(owners):
            start = torch.randint(7, (len(owner), 1), generator=generator(seed))
            tokens = (start + (1 + owner[:, None]) * torch.arange(7)) % 7
            splits.append(Split(tokens[:, :-1], tokens[:, 1:]))
        return Dataset(
            splits[0], splits[1], Categorical(7), owners=Owners(("one", "two", "three"), owners[0], owners[1])
        )


def text(method: str, *overrides: str) -> Experiment:
    needs = [need for need in NEEDS.get(method, []) if not need.startswith("dataset")]
    network = ["model=lstm", "model.embedding=4", "model.units=12", "model.layers=1"]
    common = [
        "partition=natural",
        "num_clients=null",
        "rounds=2",
        "local.epochs=4",
        "local.lr=0.5",
        "local.batch_size=10",
    ]
    config = resolve(f"method={method}", *network, *common, *needs, *overrides)
    config["dataset"] = {"_target_": f"{__name__}.Counting", "name": "counting"}
    return load(plan(config))[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fola", "fedcurv", "scaffold", "fednova", "fvb", "virtual"])
def test_methods_run_on_text(method: str, tmp_path: Path) -> None:
    options = ["method.fisher=batch_gradient"] if method == "fedcurv" else []  # torch warns that per_sample is slow
    rows = list(csv.DictReader(run_in(tmp_path, experiment_=text(method, *options)).splitlines()))
    assert len(rows) == 2
    for row in rows:
        assert all(float(row[name]) == float(row[name]) for name in ("ga", "la", "nll", "ece", "mt_acc", "s_acc"))


def test_each_client_learns_its_own_sequences(tmp_path: Path) -> None:
    """And the metrics count positions: a client that knows its step is right nearly everywhere on its own examples."""
    run_ = text("fedavg", "rounds=1", "local.epochs=60")
    (row,) = csv.DictReader(run_in(tmp_path, experiment_=run_).splitlines())
    assert float(row["mt_acc"]) > 0.9
    assert float(row["la"]) < 0.7  # on the others' too
    assert float(row["train_acc"]) > 0.9


def test_fedlpa_names_the_layer_that_it_cannot_take() -> None:
    with pytest.raises(ConfigError, match="Embedding"):
        find_layers(text("fedlpa").worker.task.model)
