"""The columns of eval.posterior against NumPy and torch.distributions; Gaussian methods have them, others refuse."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from bfl_bench import records
from bfl_bench.build import plan
from bfl_bench.errors import ConfigError
from bfl_bench.evaluation.posterior import Posterior, describe_posterior
from tests.composing import choose, experiment, resolve, run_in

ALL = ["log_variance_moved", "log_variance_spread", "snr10", "snr50", "snr90", "posterior_kl"]


def test_columns_by_hand() -> None:
    draw = torch.Generator().manual_seed(0)
    mean, log_variance, initial = (torch.randn(101, generator=draw) for _ in range(3))
    found = describe_posterior(
        Posterior(
            mean=mean,
            log_variance=log_variance,
            initial_log_variance=initial,
            prior_variance=0.3,
            clamped=log_variance > 1,
        )
    )
    change = (log_variance - initial).double().numpy()
    ratios = (mean.abs() / (log_variance / 2).exp()).double().numpy()
    assert list(found) == [*ALL, "clamped"]
    assert found["log_variance_moved"] == pytest.approx(np.abs(change).mean())
    assert found["log_variance_spread"] == pytest.approx(change.std())
    for name, share in (("snr10", 10), ("snr50", 50), ("snr90", 90)):
        assert found[name] == pytest.approx(np.percentile(ratios, share), rel=1e-6)  # of 101 numbers it is one of them
    divergence = kl_divergence(Normal(mean, (log_variance / 2).exp()), Normal(0.0, 0.3**0.5)).sum().item()
    assert found["posterior_kl"] == pytest.approx(divergence, rel=1e-5)
    assert found["clamped"] == pytest.approx((log_variance > 1).double().mean().item())


def test_what_is_not_there_has_no_column() -> None:
    zeros = torch.zeros(3)
    assert list(describe_posterior(Posterior(mean=zeros, log_variance=zeros))) == ["snr10", "snr50", "snr90"]
    assert describe_posterior(Posterior(mean=zeros[:0], log_variance=zeros[:0])) == {}


def test_where_all_move_alike_nothing_is_learnt() -> None:
    zeros, initial = torch.zeros(5), torch.arange(5.0)
    found = describe_posterior(Posterior(mean=zeros, log_variance=initial - 0.17, initial_log_variance=initial))
    assert found["log_variance_moved"] == pytest.approx(0.17)
    assert found["log_variance_spread"] == pytest.approx(0, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("fvb", {*ALL, "clamped"}),
        ("virtual", {*ALL, "clamped"}),
        ("fedivon", set(ALL)),
        ("swag", {"snr10", "snr50", "snr90"}),
    ],
)
def test_methods_with_gaussians_have_them(method: str, expected: set[str], tmp_path: Path) -> None:
    """Beside the same columns as without, which do not change."""
    overrides = [*choose(method), "rounds=2", "eval.draws=2"]
    rows = []
    for value in ("false", "true"):
        run_in(tmp_path / value, *overrides, f"eval.posterior={value}")
        with (tmp_path / value / records.METRICS).open(newline="") as file:
            rows.append(list(csv.DictReader(file))[-1])
    without, with_ = rows
    assert set(with_) - set(without) == expected - set(without)
    assert {name: with_[name] for name in without} == without
    assert expected <= set(with_)
    assert float(with_["snr10"]) < float(with_["snr50"]) < float(with_["snr90"])
    if "log_variance_moved" in expected:
        assert float(with_["log_variance_moved"]) > 1e-4
    if method == "fvb":
        assert float(with_["posterior_kl"]) > 1


def test_before_the_first_round_nothing_has_moved() -> None:
    for method in ("fvb", "virtual", "fedivon"):
        worker = experiment(*choose(method)).worker
        state = worker.method.init(worker.task, torch.Generator())
        posterior = worker.method.posterior(worker.task, state)
        assert posterior is not None
        # VIRTUAL's state is kept as precisions, FedIvon's as a precision per example: logarithms are rounded once more.
        assert describe_posterior(posterior)["log_variance_moved"] < 1e-6
    worker = experiment(*choose("swag")).worker
    assert worker.method.posterior(worker.task, worker.method.init(worker.task, torch.Generator())) is None


def test_rules_on_the_same_replies_have_them_too(tmp_path: Path) -> None:
    run_in(tmp_path, *choose("fvb"), "rounds=1", "eval.posterior=true", "eval.also_aggregate=[eaa]")
    (row,) = records.read_table(tmp_path / records.METRICS)
    assert row["snr50@eaa"] is not None
    assert row["snr50@eaa"] != row["snr50"]


def test_a_point_has_no_gaussian_to_describe() -> None:
    with pytest.raises(ConfigError, match=r"eval\.posterior: got true, allowed: false; the state of method fedavg"):
        plan(resolve("method=fedavg", "eval.posterior=true"))
