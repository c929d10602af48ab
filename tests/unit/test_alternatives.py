"""What else is evaluated: other rules on the same replies (eval.also_aggregate), and the NLL with an epsilon."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bfl_bench import records
from bfl_bench.build import plan
from bfl_bench.engines.worker import Job
from bfl_bench.errors import ConfigError
from bfl_bench.identity import folder_name
from bfl_bench.likelihood import negative_log_likelihood
from bfl_bench.records import config_folder, read_table
from bfl_bench.rng import stream
from bfl_bench.run.checkpoint import CheckpointFolder
from bfl_bench.run.loop import Experiment
from tests.composing import SMALL, experiment, resolve, run_in
from tests.conftest import BflRun
from tests.federation import CPU

FVB = [*SMALL, "method=fvb_published", "model.log_variance_init=-4", "model.log_variance_init_std=1", "eval.draws=3"]
SCORES = ["ga", "ece", "nll", "brier", "std_norm", "clamped", "alarm"]


def table(text: str) -> list[dict[str, str]]:
    """Cells as they are written: equality is that of bytes."""
    return list(csv.DictReader(text.splitlines()))


def columns(text: str) -> list[str]:
    return text.splitlines()[0].split(",")


def test_columns(tmp_path: Path) -> None:
    text = run_in(tmp_path / "run", *FVB, "rounds=2", "eval.also_aggregate=[wb,eaa]")
    without = run_in(tmp_path / "without", *FVB, "rounds=2")
    assert columns(text) == columns(without) + [f"{name}@{rule}" for rule in ("wb", "eaa") for name in SCORES]
    rows = table(text)
    assert len(rows) == 2
    assert all(cell for row in rows for cell in row.values())


@pytest.mark.parametrize("rule", ["rklb", "ppa"])
def test_the_runs_own_rule_gives_the_runs_own_numbers(rule: str, tmp_path: Path) -> None:
    """Also for a random rule: it draws from the same stream."""
    text = run_in(tmp_path, *FVB, f"aggregator={rule}", f"eval.also_aggregate=[{rule},wb]", "server.lr=0.7", "rounds=2")
    for row in table(text):
        assert [row[f"{name}@{rule}"] for name in SCORES] == [row[name] for name in SCORES]
        assert row["nll@wb"] != row["nll"]
        assert row["std_norm@wb"] != row["std_norm"]


def test_the_run_itself_does_not_change(tmp_path: Path) -> None:
    """Byte for byte in every other column and file, though the alternatives evaluate in between."""
    overrides = [*FVB, "aggregator=ppa", "method.prior=previous", "participation=3"]
    without = run_in(tmp_path / "without", *overrides)
    text = run_in(tmp_path / "with", *overrides, "eval.also_aggregate=[wb,ppa,moments]")
    kept = columns(without)
    assert [{name: row[name] for name in kept} for row in table(text)] == table(without)
    assert (tmp_path / "with" / records.CLIENTS).read_bytes() == (tmp_path / "without" / records.CLIENTS).read_bytes()
    states = []
    for name in ("with", "without"):
        saved = CheckpointFolder(tmp_path / name / records.CHECKPOINT).load(CPU)
        assert saved is not None
        states.append(saved.state)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def first_replies(built: Experiment) -> tuple[dict[str, torch.Tensor], list[tuple[int, dict[str, torch.Tensor]]]]:
    worker = built.worker
    state = worker.method.init(worker.task, stream(built.seed, "init"))
    broadcast = worker.method.broadcast(worker.task, state)
    jobs = [Job(round=1, client_id=id_, memory={}, evaluate_local=False) for id_ in built.cohort(1)]
    return state, [(job.client_id, worker.run(broadcast, job).message) for job in jobs]


def test_an_alternative_is_the_rule_on_the_runs_replies(tmp_path: Path) -> None:
    """By hand for the first round: the norm of deviations under eq. 5 of BFL-P, half way from the start."""
    overrides = [*FVB, "server.lr=0.5", "rounds=1"]
    (row,) = table(run_in(tmp_path, *overrides, "eval.also_aggregate=[gaa]"))
    built = experiment(*overrides)
    task = built.worker.task
    part = task.model.layout.log_variances
    state, replies = first_replies(built)
    weights = np.array([task.sizes[id_] for id_, _ in replies]) / sum(task.sizes[id_] for id_, _ in replies)
    variances = np.exp(np.stack([message["params"][part].double().numpy() for _, message in replies]))
    half_way = (state["params"][part].double().numpy() + np.log(weights**2 @ variances)) / 2
    # The new log variances are rounded to float32.
    assert float(row["std_norm@gaa"]) == pytest.approx(math.sqrt(np.exp(half_way).sum()), rel=1e-6)
    assert float(row["std_norm"]) > 1.2 * float(row["std_norm@gaa"])


def test_alternatives_start_from_the_runs_own_model_every_round(tmp_path: Path) -> None:
    """In the second round they combine replies of clients that trained from the run's model: not a run of their own."""
    beside = table(run_in(tmp_path / "beside", *FVB, "rounds=2", "eval.also_aggregate=[wb]"))
    own = table(run_in(tmp_path / "own", *FVB, "rounds=2", "aggregator=wb"))
    names = ["ga", "ece", "nll", "brier", "std_norm"]
    assert [beside[0][f"{name}@wb"] for name in names] == [own[0][name] for name in names]
    assert beside[1]["nll@wb"] != own[1]["nll"]


def test_only_evaluated_rounds(tmp_path: Path) -> None:
    rows = table(run_in(tmp_path, *FVB, "rounds=3", "eval.every=2", "eval.also_aggregate=[wb]"))
    assert [row["round"] for row in rows] == ["2", "3"]
    assert all(row["ga@wb"] for row in rows)


def test_rules_come_with_their_configs() -> None:
    """So that a folder's config says everything, and a changed rule makes another run."""
    config = resolve("method=fvb", "eval.also_aggregate=[eaa_released,wb]")
    rules = config["eval"]["also_aggregate"]
    assert list(rules) == ["eaa_released", "wb"]
    assert rules["eaa_released"]["running_clamp"] == [-8.0, 8.0]
    assert config["aggregator"]["name"] == "rklb"
    assert folder_name(config) != folder_name(resolve("method=fvb"))
    planned = plan(config)
    assert {name: method.aggregator.func.__name__ for name, method in planned.alternatives.items()} == {
        "eaa_released": "eaa",
        "wb": "wb",
    }  # fmt: skip
    assert planned.alternatives["eaa_released"].aggregator.keywords == {"running_clamp": [-8.0, 8.0]}
    assert planned.method.aggregator.func.__name__ == "rklb"


RULES = sorted(path.stem for path in (config_folder() / "aggregator").glob("[!_]*.yaml") if path.stem != "none")


@pytest.mark.slow
def test_every_rule_at_once(tmp_path: Path) -> None:
    (row,) = table(run_in(tmp_path, *FVB, "rounds=1", f"eval.also_aggregate=[{','.join(RULES)}]"))
    for name in RULES:
        assert 0 <= float(row[f"ga@{name}"]) <= 1
        assert math.isfinite(float(row[f"nll@{name}"]))
    assert len({row[f"std_norm@{name}"] for name in ("aalv", "cf", "eaa", "gaa", "moments", "rklb", "wb")}) == 7


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["method=fedavg", "eval.also_aggregate=[wb]"],
            "eval.also_aggregate: got ['wb'], allowed: an empty list; method fedavg takes no",
        ),
        (["method=fvb", "eval.also_aggregate=wb"], "eval.also_aggregate: got 'wb', allowed: a list of names"),
        (["method=fvb", "eval.also_aggregate=[1]"], "eval.also_aggregate: got [1], allowed: a list of names"),
        (["method=fvb", "eval.also_aggregate=null"], "eval.also_aggregate: got null, allowed: a list of names"),
        (["method=fvb", "aggregator=none"], "aggregator: got 'none', allowed: a rule; method fvb needs one"),
        (["method=fedavg", "aggregator=wb"], "aggregator: got 'wb', allowed: none; method fedavg takes no aggregator"),
        (
            ["method=fedavg", "model.bayesian_layers=2"],
            "model.bayesian_layers: got 2, allowed: auto, auto_all or 0; method fedavg has no Gaussian",
        ),
        (
            ["method=fvb", "model.bayesian_layers=some"],
            "model.bayesian_layers: got 'some', allowed: auto, auto_all, all or a whole",
        ),
        (["method=fvb", "model.log_variance_clamp=soft"], "model.log_variance_clamp: got 'soft', allowed: none, hard"),
        (["method=fvb", "method.prior_variance=0"], "method.prior_variance: got 0, allowed: a number above 0"),
        (["method=fvb", "method.train_samples=0"], "method.train_samples: got 0"),
        (["eval.nll_epsilon=-1"], "eval.nll_epsilon: got -1"),
    ],
)
def test_what_is_wrong_is_named(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(resolve(*overrides))
    assert str(error.value).startswith(sentence)


def test_more_gaussian_layers_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"model.bayesian_layers: got 3, allowed: at most the 2 layers"):
        experiment(*FVB, "model.bayesian_layers=3")


def test_an_unknown_rule_is_one_sentence(bfl_run: BflRun) -> None:
    result = bfl_run(*FVB, "eval.also_aggregate=[nosuch]")
    assert result.code == 2
    assert "got 'nosuch', allowed: aalv, alpha, cf" in result.err
    assert "Traceback" not in result.err


# The NLL with an epsilon


def test_negative_log_likelihood_with_an_epsilon() -> None:
    probabilities = torch.tensor([[0.5, 0.5], [0.9, 0.1], [1.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 1])
    expected = -(math.log(0.5 + 1e-8) + math.log(0.1 + 1e-8) + math.log(1e-8)) / 3
    # Three float64 logarithms.
    assert negative_log_likelihood(probabilities.log(), labels, 1e-8) == pytest.approx(expected, abs=1e-12)
    expected = -(math.log(0.75) + math.log(0.35) + math.log(0.25)) / 3
    assert negative_log_likelihood(probabilities.log(), labels, 0.25) == pytest.approx(expected, abs=1e-12)
    assert negative_log_likelihood(probabilities.log(), labels, 0.0) == math.inf
    assert negative_log_likelihood(probabilities[:2].log(), labels[:2]) == pytest.approx(-math.log(0.05) / 2, abs=1e-12)


def test_an_epsilon_below_float32_counts() -> None:
    """1 + 1e-8 is 1 in float32; the sum is taken in float64."""
    log_probabilities = torch.zeros(4, 1)
    result = negative_log_likelihood(log_probabilities, torch.zeros(4, dtype=torch.long), 1e-8)
    assert result == pytest.approx(-1e-8, rel=1e-6)


def test_the_epsilon_reaches_the_runs_nll_and_nothing_else(tmp_path: Path) -> None:
    """Of the global and of local models, and of the alternatives."""
    overrides = [*FVB, "rounds=1", "eval.also_aggregate=[wb]"]
    plain, shifted = (
        table(run_in(tmp_path / epsilon, *overrides, f"eval.nll_epsilon={epsilon}"))[0] for epsilon in ("0.0", "0.5")
    )
    assert {name for name in plain if plain[name] != shifted[name]} == {"nll", "nll@wb"}
    assert float(shifted["nll"]) < float(plain["nll"])
    clients = [records.read_table(tmp_path / epsilon / records.CLIENTS) for epsilon in ("0.0", "0.5")]
    for before, after in zip(*clients, strict=True):
        assert {name for name in before if before[name] != after[name]} == {"nll"}


def test_bins_reach_the_runs_ece(tmp_path: Path) -> None:
    few, many = (table(run_in(tmp_path / bins, *FVB, "rounds=1", f"eval.ece_bins={bins}"))[0] for bins in ("15", "100"))
    assert {name for name in few if few[name] != many[name]} == {"ece"}


def test_a_rule_that_fails_leaves_empty_cells_and_the_run_alone(tmp_path: Path) -> None:
    def broken(means: Tensor, variances: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return means[0] * torch.nan, variances[0]

    plain = experiment(*FVB, "rounds=2")
    method: Any = plain.worker.method
    beside = replace(plain, alternatives={"broken": replace(method, aggregator=broken)})
    expected = table(run_in(tmp_path / "plain", experiment_=plain))
    rows = table(run_in(tmp_path / "beside", experiment_=beside))
    assert rows[1]["ga@broken"] == rows[1]["nll@broken"] == ""
    assert [row["ga"] for row in rows] == [row["ga"] for row in expected]


def test_server_seconds_do_not_count_the_clients(tmp_path: Path) -> None:
    run_in(tmp_path, *FVB, "rounds=2", "eval.also_aggregate=[wb]")
    seconds = [row["server_seconds"] for row in read_table(tmp_path / "timing.csv")]
    assert all(second > 0 for second in seconds)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["none", "nosuch"])
def test_wrong_names_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"eval.also_aggregate: got '{name}', allowed: aalv, alpha"):
        resolve("method=fvb", f"eval.also_aggregate=[{name}]")
