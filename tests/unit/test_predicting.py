"""eval.predictive and eval.also_predict: ways to predict on the same state, the prior they choose, what is refused."""

import math
from pathlib import Path

import pytest
import torch

from bfl_bench import records
from bfl_bench.engines.worker import TEST, VALIDATION, Worker
from bfl_bench.errors import ConfigError
from bfl_bench.method import Tensors
from bfl_bench.rng import stream
from bfl_bench.run.checkpoint import read_state
from bfl_bench.run.predicting import GRID
from tests.composing import SMALL, experiment, run_in

FEW = [*SMALL, "rounds=2", "eval.every=2", "local.lr=0.3"]
ALL = "eval.also_predict=[mean,draws,linearised]"
VALIDATED = "partition.validation=0.3"
Cells = dict[str, records.Cell]


def run(folder: Path, *overrides: str) -> tuple[Cells, Worker, Tensors]:
    """The only row of metrics.csv, and what it takes to compute it again."""
    run_in(folder, *overrides)
    (row,) = records.read_table(folder / records.METRICS)
    return row, experiment(*overrides).worker, read_state(folder, torch.device("cpu"))


def nll(worker: Worker, name: str, prediction: object) -> float:
    return worker.score(prediction, worker.sets[name].split.y).values["nll"]  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [["method=fola"], ["method=fola", "method.structure=full", "model=softmax"], ["method=fedlpa"]]
)
def test_all_ways_are_measured_on_one_state(method: list[str], tmp_path: Path) -> None:
    few = [item for item in FEW if not (item.startswith("model.") and "model=softmax" in method)]
    row, worker, state = run(tmp_path / "with", *few, *method, ALL, VALIDATED)
    plain = run(tmp_path / "without", *few, *method, VALIDATED)[0]
    assert {name: row[name] for name in plain} == plain  # the run is as it was
    assert row["nll@mean"] == row["nll"]
    assert len({row[f"nll@{kind}"] for kind in ("mean", "draws", "linearised")}) == 3
    posterior = worker.method.laplace(worker.task, state, "all")
    assert posterior is not None
    sets = {name: worker.sets[name].split.x for name in (TEST, VALIDATION)}
    by_prior = {d: posterior.linearise(sets[VALIDATION], [d], 10)[0] for d in GRID}
    best = min(GRID, key=lambda d: nll(worker, VALIDATION, by_prior[d]))
    assert row["prior_precision@linearised"] == best
    assert row["validation_nll@linearised"] == pytest.approx(nll(worker, VALIDATION, by_prior[best]), rel=1e-6)
    expected = nll(worker, TEST, posterior.linearise(sets[TEST], [best], 10)[0])
    assert row["nll@linearised"] == pytest.approx(expected, rel=1e-6)
    prior = row["prior_precision@draws"]
    assert prior in GRID
    drawn = worker.mix(posterior.draw(float(prior or 0), 10, stream(worker.seed, "evaluate", 2)), sets[TEST])
    assert row["nll@draws"] == pytest.approx(nll(worker, TEST, drawn), rel=1e-6)
    assert row["precision_ratio@draws"] == row["precision_ratio@linearised"]
    assert float(row["precision_ratio@draws"] or 0) > 0
    assert "prior_precision@mean" not in row


def test_the_way_of_the_run_is_the_one_that_is_asked_for(tmp_path: Path) -> None:
    beside = run(tmp_path / "beside", *FEW, "method=fola", ALL, VALIDATED)[0]
    row = run(tmp_path / "own", *FEW, "method=fola", "eval.predictive=linearised", VALIDATED)[0]
    for name in ("ga", "nll", "ece", "brier", "validation_nll", "prior_precision", "precision_ratio"):
        assert row[name] == beside[f"{name}@linearised"], name
    assert row["nll"] != beside["nll"]
    assert row["la"] == beside["la"]  # local models have no posterior of their own here


@pytest.mark.parametrize("choice", ["auto", "evidence"])
def test_without_validation_the_evidence_chooses_the_prior(choice: str, tmp_path: Path) -> None:
    options = ["method=fola", "eval.predictive=draws", f"eval.prior_precision={choice}"]
    row, worker, state = run(tmp_path, *FEW, *options)
    posterior = worker.method.laplace(worker.task, state, "all")
    assert posterior is not None
    assert row["prior_precision"] == max(GRID, key=posterior.log_evidence)
    assert "precision_ratio" not in row


def test_evidence_is_taken_although_there_is_validation(tmp_path: Path) -> None:
    options = ["method=fola", "eval.predictive=linearised", VALIDATED]
    chosen = {
        choice: run(tmp_path / choice, *FEW, *options, f"eval.prior_precision={choice}")[0]["prior_precision"]
        for choice in ("auto", "evidence", "7")
    }
    assert chosen["7"] == 7
    assert chosen["auto"] != chosen["evidence"]


def test_the_last_layer_alone(tmp_path: Path) -> None:
    options = ["method=fedlpa", "rounds=1", "eval.prior_precision=1", ALL]
    every, last = (
        run(tmp_path / layers, *FEW, *options, f"eval.laplace_layers={layers}")[0] for layers in ("all", "last")
    )
    assert last["nll@mean"] == every["nll@mean"]
    for kind in ("draws", "linearised"):
        assert last[f"nll@{kind}"] != every[f"nll@{kind}"]
    assert last["nll@linearised"] != last["nll@mean"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fvb", "fedivon", "swag"])
def test_the_mean_of_a_posterior_that_is_drawn_from(method: str, tmp_path: Path) -> None:
    options = [*FEW, f"method={method}", *(["method.start_round=1"] if method == "swag" else [])]
    row, worker, state = run(tmp_path / "drawn", *options, "eval.also_predict=[mean,draws]")
    assert row["nll@draws"] == row["nll"] != row["nll@mean"]
    task = worker.task
    task.model.load(worker.method.mean(task, state))
    task.model.module.eval()
    with torch.no_grad():
        outputs = task.model(worker.sets[TEST].split.x)
    loss = task.likelihood.loss(outputs, worker.sets[TEST].split.y).item()
    assert row["nll@mean"] == pytest.approx(loss, rel=1e-5)
    own = run(tmp_path / "mean", *options, "eval.predictive=mean")[0]
    assert own["nll"] == row["nll@mean"]
    assert math.isfinite(own["la"] or math.nan)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["method=fedavg", "eval.predictive=draws"],
            "eval.predictive: got 'draws', allowed: auto, mean; method fedavg",
        ),
        (["method=ensemble", "eval.also_predict=[mean]"], "eval.also_predict: got 'mean', allowed: draws; method ens"),
        (["method=fvb", "eval.also_predict=[linearised]"], "eval.also_predict: got 'linearised', allowed: draws, mean"),
        (["method=fola", "eval.draws=30"], "eval.draws: got 30, allowed: 10, the default; method fola draws nothing"),
        (["method=fedavg", "eval.local_draws=3"], "eval.local_draws: got 3, allowed: 10, the default; method fedavg"),
        (
            ["method=fola", "eval.prior_precision=2"],
            "eval.prior_precision: got 2, allowed: auto unless eval.predictive or eval.also_predict have draws",
        ),
        (["method=fvb", "eval.laplace_layers=last"], "eval.laplace_layers: got 'last', allowed: all unless eval"),
        (["method=fola", "eval.predictive=mean", "eval.draws=5"], "eval.draws: got 5, allowed: 10"),
        (["method=fola", "eval.predictive=linear"], "eval.predictive: got 'linear', allowed: auto or mean, draws, lin"),
    ],
)
def test_what_has_no_effect_is_refused(options: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        experiment(*SMALL, *options)
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize(
    "options",
    [
        ["method=fola", "eval.predictive=draws", "eval.draws=30"],
        ["method=fola", ALL, "eval.draws=3", "eval.laplace_layers=last", "eval.prior_precision=evidence"],
        [
            "method=fedavg",
            "eval.draws=1",
            "eval.local_draws=1",
        ],  # as experiment=virtual_released has it for all methods
        ["method=ensemble", "eval.draws=3"],
        ["method=mcdropout", "eval.draws=3", "eval.local_draws=2"],
    ],
)
def test_what_has_an_effect_is_allowed(options: list[str]) -> None:
    experiment(*SMALL, *options)


def test_networks_that_cannot_be_linearised_are_refused() -> None:
    options = ["method=fola", "eval.predictive=linearised", "data_dir=stand-in", "dataset=shakespeare"]
    with pytest.raises(ConfigError, match=r"model: got 'lstm', allowed: a network whose parameters are all in plain"):
        experiment(*options, "num_clients=3", "partition=natural")


def test_local_models_are_tested_on_a_part_that_the_seed_draws(tmp_path: Path) -> None:
    whole = records.read_table(_clients(tmp_path / "whole", "eval.local_share=1"))
    part, again = (records.read_table(_clients(tmp_path / name, "eval.local_share=0.5")) for name in ("part", "again"))
    assert part == again
    assert [row["accuracy"] for row in part] != [row["accuracy"] for row in whole]
    for row in part:
        assert (float(row["accuracy"] or 0) * 20) == pytest.approx(round(float(row["accuracy"] or 0) * 20))  # of 40


def _clients(folder: Path, *options: str) -> Path:
    run_in(folder, *FEW, "method=fedavg", "eval.local_every=2", *options)
    return folder / records.CLIENTS
