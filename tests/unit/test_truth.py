"""Distances to true posteriors against closed forms; stored posteriors; a method that is exact is at distance zero."""

import csv
import hashlib
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.linalg import sqrtm
from scipy.stats import norm
from torch.distributions import MultivariateNormal, kl_divergence

from bfl_bench.errors import ConfigError, RunError
from bfl_bench.evaluation import truth
from bfl_bench.evaluation.truth import (
    Moments,
    compare_classes,
    compare_moments,
    compare_numbers,
    gaussian_w2,
    read_truth,
)
from bfl_bench.likelihood import NumericPrediction
from bfl_bench.reading import read_arrays
from bfl_bench.rng import stream
from bfl_bench.run.checkpoint import read_state
from bfl_bench.run.predicting import Predictor
from tests.composing import call_script, experiment, run_in
from tests.federation import generator

PROBLEMS = ["breast_cancer", "cultivars", "diabetes", "linear", "pooled_digits", "sine"]


def gaussian(seed: int, size: int = 4) -> Moments:
    root = torch.randn(size, size, generator=generator(seed), dtype=torch.float64)
    mean = torch.randn(size, generator=generator(seed + 50), dtype=torch.float64)
    return Moments(mean, root @ root.T + 0.5 * torch.eye(size))


def test_kl_of_gaussians_is_that_of_torch() -> None:
    found, true = gaussian(1), gaussian(2)
    expected = kl_divergence(*(MultivariateNormal(one.mean, one.covariance) for one in (found, true))).item()
    assert compare_moments(found, true)["truth_kl"] == pytest.approx(expected, rel=1e-10)
    narrow = Moments(found.mean, found.covariance.diagonal())
    expected = kl_divergence(
        MultivariateNormal(found.mean, found.covariance.diagonal().diag()),
        MultivariateNormal(true.mean, true.covariance),
    ).item()
    assert compare_moments(narrow, true)["truth_kl"] == pytest.approx(expected, rel=1e-10)


def test_w2_of_gaussians_by_matrix_roots() -> None:
    found, true = gaussian(1), gaussian(2)
    a, b = found.covariance.numpy(), true.covariance.numpy()
    root = sqrtm(b)
    expected = np.square((found.mean - true.mean).numpy()).sum() + np.trace(a + b - 2 * sqrtm(root @ a @ root).real)
    assert gaussian_w2(found, true) == pytest.approx(math.sqrt(expected), rel=1e-8)


def test_equal_moments_are_at_distance_zero_and_a_point_at_the_spread() -> None:
    true = gaussian(3)
    row = compare_moments(true, true)
    assert row["truth_kl"] == pytest.approx(0, abs=1e-12)
    assert row["truth_w2"] == pytest.approx(0, abs=1e-6)  # a root of differences of numbers of order 10
    assert row["truth_mean"] == 0
    assert row["truth_spread"] == 0
    point = compare_moments(Moments(true.mean, torch.zeros(4)), true)
    assert point["truth_kl"] is None
    assert point["truth_spread"] is None
    assert point["truth_w2"] == pytest.approx(math.sqrt(true.covariance.trace().item()))


def test_mean_and_spread_by_hand() -> None:
    true = Moments(torch.zeros(2), torch.tensor([4.0, 1.0]))
    row = compare_moments(Moments(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 1.0])), true)
    assert row["truth_mean"] == pytest.approx(math.sqrt((1 + 9) / 2))
    assert row["truth_spread"] == pytest.approx(math.log(0.5) / 2)


def test_moments_of_draws() -> None:
    drawn = torch.randn(6, 3, generator=generator(4))
    found = Moments.of(drawn)
    np.testing.assert_allclose(found.covariance, np.cov(drawn.numpy().T, bias=True), rtol=1e-6)
    assert Moments.of(drawn[:1]).covariance.abs().sum() == 0


def test_classes_by_hand() -> None:
    ours = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8]])
    true = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.2, 0.8]])
    row = compare_classes(ours.log(), true.log())
    assert row["truth_tv"] == pytest.approx((0.2 + 0.2 + 0) / 3, abs=1e-6)
    assert row["truth_agreement"] == pytest.approx(2 / 3)
    # confidences 0.9, 0.6, 0.8 lie in three bins; the truth has 0.7, 0.4, 0.8 there
    assert row["truth_calibration"] == pytest.approx((0.2 + 0.2 + 0) / 3, abs=1e-6)


def numbers(*members: tuple[float, float]) -> NumericPrediction:
    means, variances = (torch.tensor(column)[:, None] for column in zip(*members, strict=True))
    return NumericPrediction(means, variances)


def density(prediction: NumericPrediction, at: float) -> float:
    pairs = zip(prediction.means[:, 0].tolist(), prediction.variances[:, 0].tolist(), strict=True)
    return sum(norm.pdf(at, mean, math.sqrt(variance)) for mean, variance in pairs) / len(prediction.means)


@pytest.mark.parametrize(
    "ours", [[(0.3, 1.5)], [(-1.0, 0.5), (1.2, 0.8), (0.1, 2.0)], [(40.0, 1.0)]], ids=["one", "three", "far"]
)
def test_total_variation_of_numbers_by_integration(ours: list[tuple[float, float]]) -> None:
    found, true = numbers(*ours), numbers((0.0, 1.0), (1.0, 0.5))
    expected = quad(lambda x: abs(density(found, x) - density(true, x)), -10, 50, limit=500)[0] / 2
    row = compare_numbers(found, true, 3.0)
    assert row["truth_tv"] == pytest.approx(expected, abs=2e-4)  # bins of 1/16 standard deviation


def test_spread_and_calibration_of_numbers() -> None:
    true, wide = numbers((0.0, 1.0)), numbers((0.0, 4.0))
    row = compare_numbers(wide, true, 3.0)
    assert row["truth_std"] == pytest.approx(3.0)  # twice the deviation 1, in units of 3
    levels = np.arange(1, 20) / 20
    expected = np.abs(norm.cdf(2 * norm.ppf(levels)) - levels).mean()
    assert row["truth_calibration"] == pytest.approx(expected, abs=1e-6)
    same = compare_numbers(true, true, 1.0)
    assert [same[name] for name in ("truth_tv", "truth_std")] == [0, 0]
    assert same["truth_calibration"] == pytest.approx(0, abs=1e-8)


# Stored posteriors


def test_there_is_a_posterior_of_every_problem() -> None:
    assert truth.list_truths() == PROBLEMS
    for name in PROBLEMS:
        found = read_truth(name)
        assert found.about["problem"] == name
        if found.about["by"] == "NUTS":
            assert found.about["rhat"] < 1.01
            assert found.about["ess"] > 1000
        assert (truth.POSTERIORS / f"{name}.npz").stat().st_size < 150_000
        assert torch.linalg.eigvalsh(found.moments.matrix).min() > 0


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_data_of_a_problem_come_out_again(name: str) -> None:
    assert experiment(f"experiment=truth_{name}", "method=fedavg").worker.truth is not None


def test_moments_and_predictions_of_stored_posteriors_agree() -> None:
    """The stored draws are few: their mean has an error of a tenth of the spread."""
    for name in PROBLEMS:
        found = read_truth(name)
        spread = found.moments.matrix.diagonal().sqrt()
        error = ((found.draws.double().mean(0) - found.moments.mean) / spread).abs().max().item()
        assert error < 0.45  # of up to 90 parameters
    digits = read_truth("pooled_digits")
    worker = experiment("experiment=truth_pooled_digits", "method=fedavg").worker
    prediction = worker.mix(iter(digits.draws), worker.sets["test"].split.x)
    assert compare_classes(prediction.log_probabilities, digits.prediction.log_probabilities)["truth_tv"] < 0.01


def test_the_exact_posterior_of_diabetes_is_that_of_least_squares_with_a_ridge() -> None:
    worker = experiment("experiment=truth_diabetes", "method=fedavg").worker
    x = np.concatenate([worker.train.x.double(), np.ones((len(worker.train), 1))], axis=1)
    rows = np.concatenate([x / math.sqrt(0.5), np.eye(11)])
    right = np.concatenate([worker.train.y.double() / math.sqrt(0.5), np.zeros(11)])
    found = read_truth("diabetes").moments
    np.testing.assert_allclose(found.mean, np.linalg.lstsq(rows, right, rcond=None)[0], atol=1e-6)
    np.testing.assert_allclose(found.matrix.numpy() @ rows.T @ rows, np.eye(11), atol=1e-8)


def test_the_command_makes_an_exact_posterior_again(tmp_path: Path) -> None:
    result = call_script("truth", "linear", "--to", str(tmp_path), cwd=Path.cwd())
    assert result.returncode == 0, result.stderr
    made, stored = (read_arrays(folder / "linear.npz") for folder in (tmp_path, truth.POSTERIORS))
    assert made.keys() == stored.keys()
    assert json.loads(str(made["about"])) == json.loads(str(stored["about"]))
    for name in ("mean", "covariance", "means", "variances"):
        np.testing.assert_allclose(made[name], stored[name], rtol=1e-6, atol=1e-9)
    digest = hashlib.sha256((tmp_path / "linear.npz").read_bytes()).hexdigest()
    assert json.loads((tmp_path / truth.DIGESTS).read_text()) == {"linear": digest}


def test_a_damaged_posterior_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(truth.POSTERIORS, tmp_path / "posteriors")
    monkeypatch.setattr(truth, "POSTERIORS", tmp_path / "posteriors")
    digests = tmp_path / "posteriors" / truth.DIGESTS
    read_truth("linear")
    digests.write_text(json.dumps(json.loads(digests.read_text()) | {"linear": "0" * 64}))
    with pytest.raises(RunError, match=r"make it again with scripts/truth.py linear"):
        read_truth("linear")


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("dataset.noise=0.3", "noise"),
        ("model.hidden=[3]", "network"),
        ("dataset.split_seed=1", "examples"),
        ("partition.validation=0.1", "examples"),
        ("eval.truth=diabetes", "noise"),
    ],
)
def test_another_problem_is_refused(word: str, what: str) -> None:
    name = "diabetes" if word.startswith("eval") else "linear"
    with pytest.raises(
        ConfigError, match=f"eval.truth: got '{name}', allowed: null, or the {what} of experiment=truth"
    ):
        experiment("experiment=truth_linear", "method=fedavg", word)


def test_an_unknown_problem_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval.truth: got 'linea', allowed: null, breast_cancer"):
        experiment("eval.truth=linea")


# Methods


def last_row(text: str) -> dict[str, float]:
    return {name: float(cell) for name, cell in list(csv.DictReader(io.StringIO(text)))[-1].items() if cell}


def test_an_exact_method_is_at_distance_zero(tmp_path: Path) -> None:
    """FOLA with the full Hessian on a conjugate model, whose clients solve their problems: exact after a round."""
    words = ["method.structure=full", "method.gamma=0.005", "eval.predictive=linearised", "eval.prior_precision=1e-9"]
    exact = ["local.batch_size=1000", "local.epochs=3000", "local.lr=0.02", "rounds=1"]
    row = last_row(run_in(tmp_path, "experiment=truth_linear", "method=fola", *words, *exact))
    assert row["truth_kl"] < 1e-4
    assert row["truth_mean"] < 0.01
    assert abs(row["truth_spread"]) < 1e-4
    assert row["truth_tv"] < 5e-4
    assert row["truth_calibration"] < 5e-4


def test_mean_field_on_a_conjugate_model_comes_near_its_closed_form(tmp_path: Path) -> None:
    """The best mean-field Gaussian has the diagonal of the precision: sites with Laplace approximations find it."""
    words = ["method.draws_from=posterior", "method.damping=0.3", "local.batch_size=1000", "local.epochs=40"]
    words += ["local.lr=0.02", "rounds=40", "eval.every=40"]
    row = last_row(run_in(tmp_path, "experiment=truth_linear", "method=fedlap_cov", *words))
    true = read_truth("linear").moments
    best = Moments(true.mean, 1 / torch.linalg.inv(true.matrix).diagonal())
    expected = compare_moments(best, true)
    assert row["truth_kl"] == pytest.approx(expected["truth_kl"], rel=0.01)  # what 40 rounds leave of the mean's error
    assert row["truth_spread"] == pytest.approx(expected["truth_spread"], rel=1e-3)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fvb", []),
        ("virtual", ["method.private=none"]),
        ("fedivon", []),
        ("bayesadmm", []),
        ("fedlap_cov", ["method.draws_from=posterior"]),
        ("fedep", ["method.draws_from=posterior", "method.burn_in_rounds=1"]),
        ("swag", ["method.start_round=1"]),
        ("fola", ["eval.predictive=draws"]),
        ("fedlpa", ["eval.predictive=draws"]),
    ],
)
def test_moments_of_methods_are_those_of_their_draws(method: str, words: list[str], tmp_path: Path) -> None:
    made = experiment("experiment=truth_linear", f"method={method}", *words, "rounds=3", "local.lr=0.005")
    run_in(tmp_path, experiment_=made)
    worker, state = made.worker, read_state(tmp_path, torch.device("cpu"))
    predictor = Predictor.of(worker, worker.method, state, 3)
    found, rng = predictor.moments(), stream(1, "draws")
    if method in ("fola", "fedlpa"):
        laplace = worker.method.laplace(worker.task, state, "all")
        drawn = laplace.draw(predictor.columns["prior_precision"], 4000, rng)
    else:
        drawn = worker.method.draws(worker.task, state, 4000, rng)
    draws = torch.stack(list(drawn))[:, :6].double()
    assert (found.matrix.diagonal() > 0).all()
    spread = found.matrix.diagonal().sqrt()
    # 4,000 draws: five standard errors of mean and variance
    assert ((draws.mean(0) - found.mean.double()).abs() < 5 * spread / math.sqrt(4000)).all()
    ratio = Moments.of(draws).matrix.diagonal() / found.matrix.diagonal()
    assert ((ratio - 1).abs() < 5 * math.sqrt(2 / 4000)).all()
