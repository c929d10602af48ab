"""Barycenters of local posteriors and the global one: the ends are these two, equal ones stay, by hand in between."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bfl_bench.build import load, plan
from bfl_bench.errors import ConfigError
from bfl_bench.evaluation import columns
from bfl_bench.method import Tensors
from bfl_bench.rng import stream
from bfl_bench.run.personal import RULES, _barycenter
from tests.composing import choose, experiment, resolve, run_in

METHODS = ["fvb", "pvi", "pfedbayes", "fedivon", "bayesadmm", "fedlap_cov", "fedep", "fola"]
OWN = ["partition.test=per_client", "eval.personalise=[0,0.5,1]"]


def last_row(text: str) -> dict[str, str]:
    return list(csv.DictReader(io.StringIO(text)))[-1]


@pytest.mark.parametrize("method", [m if m == "fvb" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_the_ends_are_the_global_and_the_local_models(method: str, tmp_path: Path) -> None:
    """Predicting with means, the global model is the same for all clients."""
    row = last_row(run_in(tmp_path, *choose(method), "rounds=2", *OWN, "eval.predictive=auto"))
    for name in ("la", "mt_acc", "mt_loss", "worst10_own"):
        assert float(row[f"{name}@wb(1)"]) == pytest.approx(float(row[name]), abs=1e-5), name
        assert columns.find(f"{name}@wb(0.5)") is not None
    way = [] if method in ("fedep", "fola") else ["eval.predictive=mean"]  # these two predict so anyway
    if method not in ("bayesadmm", "fedlap_cov"):  # these two have no other way than draws
        row = last_row(run_in(tmp_path / "mean", *choose(method), "rounds=2", *OWN, *way))
        assert float(row["mt_acc@wb(0)"]) == pytest.approx(float(row["s_acc"]), abs=1e-9)
        assert float(row["la@wb(0)"]) == pytest.approx(float(row["ga"]), abs=1e-9)
        assert row["mt_loss@wb(0.5)"] not in (row["mt_loss@wb(0)"], row["mt_loss@wb(1)"])


def pair_of(method: str, rule: str) -> tuple[Any, Tensors, Tensors]:
    worker = experiment(*choose(method), "eval.personalise=[0.5]", f"eval.personalise_rule={rule}").worker
    state = worker.method.init(worker.task, stream(0, "init"))
    gaussian = worker.method.gaussian(worker.task, state)
    assert gaussian is not None
    noise = torch.randn(2, len(gaussian[0]), generator=torch.Generator().manual_seed(1)) * 0.3
    model = {
        name: tensor for name, tensor in state.items() if name in ("params", "precision", "example_precision", "ess")
    }
    model["params"] = model["params"] + 1.0
    local = worker.method.with_gaussian(worker.task, model, noise[0], gaussian[1].double() * noise[1].exp())
    return worker, state, local


@pytest.mark.parametrize("method", [m if m == "fvb" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
@pytest.mark.parametrize("rule", ["wb", "rklb"])
def test_by_hand(method: str, rule: str) -> None:
    worker, state, local = pair_of(method, rule)
    (m1, v1), (m0, v0) = (worker.method.gaussian(worker.task, model) for model in (local, state))
    found = _barycenter(worker, state, local, 0.25)
    assert found is not None
    mean, variance = worker.method.gaussian(worker.task, found)
    if rule == "wb":
        expected = 0.25 * m1 + 0.75 * m0, (0.25 * v1.sqrt() + 0.75 * v0.sqrt()) ** 2
    else:
        precision = 0.25 / v1 + 0.75 / v0
        expected = (0.25 * m1 / v1 + 0.75 * m0 / v0) / precision, 1 / precision
    torch.testing.assert_close(mean.double(), expected[0].double(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(variance.double(), expected[1].double(), rtol=1e-4, atol=0.0)
    if method == "fvb":  # what is no Gaussian
        points = worker.task.model.layout.points
        torch.testing.assert_close(found["params"][points], state["params"][points] + 0.25)


@pytest.mark.parametrize("rule", RULES)
def test_equal_posteriors_stay(rule: str) -> None:
    worker, state, _ = pair_of("fvb", rule)
    found = _barycenter(worker, state, {"params": state["params"]}, 0.3)
    assert found is not None
    torch.testing.assert_close(found["params"], state["params"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["method=fedavg"], "the models of method fedavg are no Gaussians"),
        (["method=virtual"], "method virtual has private networks or a full covariance"),
        (["method=fola", "method.structure=full"], "method fola has private networks or a full covariance"),
    ],
)
def test_models_that_are_no_gaussians_are_refused(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(plan(resolve(*choose("fola"), *words, "eval.personalise=[0.5]")))
    assert str(error.value) == f"eval.personalise: got [0.5], allowed: []; {reason}"


def test_nothing_is_sent_where_local_models_are_not_evaluated(tmp_path: Path) -> None:
    row = last_row(run_in(tmp_path, *choose("fvb"), "rounds=2", *OWN, "eval.local_every=0"))
    assert float(row["mt_acc@wb(0.5)"]) > 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "metrics.csv").read_text())))
    assert rows[0]["mt_acc@wb(0.5)"] == ""
    assert replace(experiment(*choose("fvb")).worker.settings).personalise == []
