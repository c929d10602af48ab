"""Regression: the Gaussian likelihood against torch and closed forms, expected gradients, tables and their strata."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

from bfl_bench.build import load, plan
from bfl_bench.data.sources import SOURCES
from bfl_bench.data.sources.tables import Table, reader
from bfl_bench.errors import ConfigError, DataError
from bfl_bench.evaluation.gaussian_noise import SMALLEST, GaussianNoise
from bfl_bench.inference.curvature import expected_squared_gradient, mean_hessian
from bfl_bench.likelihood import NumericPrediction
from bfl_bench.method import Client
from bfl_bench.rng import stream
from tests.composing import experiment, resolve, run_in
from tests.federation import generator

NUMBERS = ["dataset=diabetes", "local.lr=0.02", "num_clients=3", "rounds=2"]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(7))


def test_loss_is_that_of_torch() -> None:
    outputs, labels = draw(6, 1), draw(6)
    expected = nn.GaussianNLLLoss(full=True, reduction="sum")(outputs[:, 0], labels, torch.full((6,), 0.3))
    likelihood = GaussianNoise(0.3)
    assert likelihood.loss(outputs, labels, "sum").item() == pytest.approx(expected.item(), rel=1e-6)
    assert likelihood.loss(outputs, labels).item() == pytest.approx(expected.item() / 6, rel=1e-6)


def test_learnt_variance_is_the_second_output() -> None:
    outputs, labels = draw(6, 2), draw(6)
    variance = nn.functional.softplus(outputs[:, 1]) + SMALLEST
    expected = nn.GaussianNLLLoss(full=True)(outputs[:, 0], labels, variance)
    likelihood = GaussianNoise(None)
    assert likelihood.num_outputs == 2
    assert likelihood.loss(outputs, labels).item() == pytest.approx(expected.item(), rel=1e-6)


def test_scores_are_in_the_labels_own_unit() -> None:
    prediction = NumericPrediction(draw(1, 40), torch.full((1, 40), 0.25))
    labels = draw(2, 40)[1]
    scores = GaussianNoise(0.25, unit=10.0).score(prediction, labels, 15).values
    errors = 10 * (prediction.means[0] - labels).double().numpy()
    assert scores["rmse"] == pytest.approx(math.sqrt(np.mean(errors**2)))
    assert scores["nll"] == pytest.approx(-norm.logpdf(errors, scale=5).mean())
    assert scores["covered90"] == np.mean(np.abs(errors) < 5 * norm.ppf(0.95))
    assert scores["width50"] == pytest.approx(2 * 5 * norm.ppf(0.75))


def test_a_mixture_keeps_its_members_and_a_linearised_prediction_adds_variances() -> None:
    likelihood = GaussianNoise(None)
    mixture = likelihood.mixture()
    with pytest.raises(ValueError, match="at least one draw"):
        mixture.result()
    members = [draw(5, 2), draw(5, 2) + 1]
    for member in members:
        mixture.add(member)
    found = mixture.result()
    assert torch.equal(found.means, torch.stack([member[:, 0] for member in members]))
    assert torch.equal(found[torch.tensor([3, 0])].variances, found.variances[:, [3, 0]])
    flat = GaussianNoise(0.5).linearise(members[0][:, :1], torch.full((5, 1), 0.25))
    assert torch.equal(flat.means[0], members[0][:, 0])
    assert flat.variances[0].tolist() == [0.75] * 5


@pytest.mark.parametrize("noise", ["0.5", "learnt"])
def test_expected_squared_gradients_are_means_over_many_labels(noise: str) -> None:
    worker = experiment(*NUMBERS, "model.hidden=[4]", f"dataset.noise={noise}", "method=fedavg").worker
    task, x = worker.task, worker.train.x[:6]
    task.model.load(task.model.initial)
    task.model.module.eval()
    found = expected_squared_gradient(task, x)
    likelihood = task.likelihood
    assert isinstance(likelihood, GaussianNoise)
    with torch.no_grad():
        mean, variance = likelihood.split(task.model(x))
    nodes, weights = np.polynomial.hermite_e.hermegauss(9)  # another rule, of many more points
    expected = torch.zeros_like(found)
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        for i in range(len(x)):
            label = mean[i : i + 1] + variance[i : i + 1].sqrt() * node
            gradient = task.model.backward(likelihood.loss(task.model(x[i : i + 1]), label))
            expected += weight / len(x) * gradient.square()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)  # sums of float32 numbers


def test_hessian_of_a_linear_model_is_the_gram_matrix() -> None:
    worker = experiment("dataset=linear", "num_clients=3", "method=fedavg").worker
    client = Client(1, worker.train, worker.client_indices[1], None)
    found, repaired = mean_hessian(worker.task, worker.task.model.initial, client, stream(0, "x"))
    x = worker.train.x[client.indices].double().numpy()
    ones = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    np.testing.assert_allclose(found.numpy(), ones.T @ ones / len(x) / 0.2, rtol=1e-4, atol=1e-4)
    assert repaired == 0


@pytest.mark.parametrize(
    "method", ["fedavg", "fola", "fvb", "virtual", "fedivon", "ensemble", "fedlap_cov", "mcdropout", "fedlpa"]
)
def test_methods_run_on_numbers(method: str, tmp_path: Path) -> None:
    header, *rows = run_in(tmp_path, *NUMBERS, f"method={method}").splitlines()
    row = dict(zip(header.split(","), rows[-1].split(","), strict=True))
    assert not row["ga"]
    assert 30 < float(row["rmse"]) < 90  # the labels' spread is 77
    assert float(row["nll"]) < 6.5


@pytest.mark.parametrize("method", ["fedov", "dense", "fedbe"])
def test_methods_of_classes_refuse_numbers(method: str) -> None:
    with pytest.raises(ConfigError, match=f"a dataset of classes; method {method} needs them"):
        experiment(*NUMBERS, f"method={method}")


@pytest.mark.parametrize("words", ["eval.uncertainty=true", "eval.nll_epsilon=0.1", "eval.ood=[digits]"])
def test_what_is_about_classes_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="the labels of diabetes are numbers"):
        experiment(*NUMBERS, words)


def test_predictives_of_fola_on_numbers(tmp_path: Path) -> None:
    text = run_in(tmp_path, *NUMBERS, "method=fola", "eval.also_predict=[draws,linearised]", "eval.predictive=mean")
    header, *rows = text.splitlines()
    row = dict(zip(header.split(","), (float(cell or "nan") for cell in rows[-1].split(",")), strict=True))
    assert row["rmse@linearised"] == pytest.approx(row["rmse"], rel=1e-6)  # the same mean
    assert row["width90@linearised"] > row["width90"]
    assert row["width90@draws"] > row["width90"]


# Tables


def test_features_and_labels_are_standardised_by_training_examples_and_strata_are_equally_large() -> None:
    dataset = load(plan(resolve("dataset=diabetes", "method=fedavg")))[1]
    train, strata = dataset.train, dataset.group()
    assert (len(train), len(dataset.test)) == (354, 88)
    np.testing.assert_allclose(train.x.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(train.x.std(0, correction=0), 1, rtol=1e-5)
    assert train.y.std(correction=0).item() == pytest.approx(1, rel=1e-5)
    sizes = np.bincount(strata.train, minlength=strata.num)
    assert strata.num == len(sizes) == 10
    assert sizes.max() - sizes.min() <= 6  # several labels are equal
    means = [train.y[strata.train == group].mean().item() for group in range(10)]
    assert means == sorted(means)


def test_partitions_by_label_by_feature_and_iid() -> None:
    def spread(*words: str) -> tuple[float, float]:
        """How far the clients' means of label and feature 2 lie apart."""
        worker = experiment("dataset=diabetes", "num_clients=5", "method=fedavg", *words).worker
        parts = [(worker.train.y[i].mean(), worker.train.x[i, 2].mean()) for i in worker.client_indices]
        labels, features = (np.array([float(one) for one in column]) for column in zip(*parts, strict=True))
        return float(np.ptp(labels)), float(np.ptp(features))

    assert spread("partition=disjoint")[0] > 2.5
    by_feature = spread("partition=disjoint", "dataset.strata_by=2")
    assert by_feature[1] > 2.5
    assert by_feature[0] < spread("partition=disjoint")[0]
    assert max(spread("partition=iid")) < 0.8


def test_wrong_settings_of_tables() -> None:
    with pytest.raises(ConfigError, match=r"dataset.strata_by: got 10, allowed: label, or a feature from 0 to 9"):
        experiment("dataset=diabetes", "dataset.strata_by=10")
    with pytest.raises(ConfigError, match=r"dataset.noise: got null, allowed: learnt, or a number above 0"):
        experiment("dataset=diabetes", "dataset.noise=null")
    with pytest.raises(ConfigError, match=r"dataset.noise: got 1.0, allowed: null: its labels are classes"):
        experiment("dataset=cultivars", "dataset.noise=1.0")


def test_a_table_is_read_and_checked(tmp_path: Path) -> None:
    read = reader("t.csv", 2, ["kind", "size", "name", "y"], "y", categories={"kind": ["a", "b"]}, left_out=["name"])
    file = tmp_path / "t.csv"
    file.write_text("kind,size,name,y\nb,2.5,one,3\na,1,two,4\n")
    table: Table = read(tmp_path)
    assert table.x.tolist() == [[0, 1, 2.5], [1, 0, 1]]
    assert table.y.tolist() == [3, 4]
    for text, problem in {
        "kind,size,name,z\nb,2.5,one,3\na,1,two,4\n": "its first line is not kind,size,name,y",
        "kind,size,name,y\nb,2.5,one,3\n": "it has 1 rows, expected 2 of 4 columns",
        "kind,size,name,y\nc,2.5,one,3\na,1,two,4\n": "its kind is 'c', expected one of",
        "kind,size,name,y\nb,x,one,3\na,1,two,4\n": "cannot be read as a table of numbers",
        "kind,size,name,y\nb,nan,one,3\na,1,two,4\n": "cells that are no numbers",
    }.items():
        file.write_text(text)
        with pytest.raises(Exception, match=problem):
            read(tmp_path)


def test_a_file_that_is_to_be_put_in_place_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"kin8nm.csv is missing; put kin8nm.csv into .* by hand \(https://www.openml"):
        experiment("dataset=kin8nm", f"data_dir={tmp_path}")
    columns = ",".join([*(f"theta{i}" for i in range(1, 9)), "y"])
    rng = np.random.default_rng(0)
    rows = "\n".join(",".join(f"{cell:.4f}" for cell in row) for row in rng.normal(size=(8192, 9)))
    (tmp_path / "kin8nm").mkdir()
    (tmp_path / "kin8nm/kin8nm.csv").write_text(f"{columns}\n{rows}\n")
    assert len(SOURCES["kin8nm"].read(tmp_path).y) == 8192
    worker = experiment("dataset=kin8nm", f"data_dir={tmp_path}", "method=fedavg").worker
    assert worker.train.x.shape == (6554, 8)
    assert worker.task.likelihood.num_outputs == 2
