"""What a run looks at beside its own course: a sweep of weights, kept messages, other runs' states and posteriors."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bfl_bench import records
from bfl_bench.aggregators.algebra import Gaussian, MeanCosine
from bfl_bench.build import load, plan
from bfl_bench.errors import ConfigError
from bfl_bench.inference.curvature import mean_hessian
from bfl_bench.inference.train import train
from bfl_bench.method import Client
from tests.composing import SMALL, experiment, resolve, run_in
from tests.federation import generator

TWO = [*SMALL, "num_clients=2", "rounds=2"]


def table(path: Path) -> list[dict[str, Any]]:
    with path.open() as file:
        return [{key: float(cell) for key, cell in row.items() if cell} for row in csv.DictReader(file)]


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    manifest = json.loads((folder / "checkpoint/manifest.json").read_text())
    return load_file(folder / "checkpoint" / manifest["server"])


def test_distance_is_minus_the_log_density() -> None:
    root = torch.randn(4, 4, generator=generator(), dtype=torch.float64)
    precision, mean = root @ root.T + torch.eye(4), torch.randn(4, generator=generator(1), dtype=torch.float64)
    vector = mean + torch.randn(4, generator=generator(2), dtype=torch.float64)
    for matrix in (precision, precision.diagonal().diag()):
        density = torch.distributions.MultivariateNormal(mean, precision_matrix=matrix)
        expected = density.log_prob(mean) - density.log_prob(vector)
        given = matrix if matrix is precision else matrix.diagonal()
        assert Gaussian(mean, given).distance(vector) == pytest.approx(expected.item())


def test_mean_cosine_of_all_pairs() -> None:
    matrices = [torch.randn(3, 3, generator=generator(i), dtype=torch.float64) for i in range(4)]
    cosine = MeanCosine()
    for matrix in matrices:
        cosine.add(matrix)
    shifted = [(matrix - matrix.min()).flatten() for matrix in matrices]
    pairs = [torch.cosine_similarity(a, b, dim=0).item() for i, a in enumerate(shifted) for b in shifted[:i]]
    assert cosine.result() == pytest.approx(sum(pairs) / 6)


def test_mean_cosine_of_millions_of_entries() -> None:
    precision = torch.rand(3_000_000, generator=generator()) * 1e-3 + 0.05
    precision[0] = 0
    cosine = MeanCosine()
    for _ in range(2):
        cosine.add(precision)
    assert cosine.result() == pytest.approx(1.0, abs=1e-5)


def test_mean_cosine_needs_two_and_survives_flat_ones() -> None:
    cosine = MeanCosine()
    cosine.add(torch.ones(5))
    assert cosine.result() is None
    cosine.add(torch.arange(5.0))
    assert cosine.result() == pytest.approx(-1.0 + 0.5)  # the flat one has no direction: length 0 instead of 1


def test_cosine_of_full_hessians_is_near_one_by_construction() -> None:
    """Two clients without a class in common: their Hessians differ, but for the constant that the paper adds."""
    words = ["dataset=digits", "model=softmax", "partition=disjoint", "num_clients=2", "method=fedavg"]
    worker = experiment(*words).worker
    cosine, hessians = MeanCosine(), []
    for id_ in (0, 1):
        client = Client(id_, worker.train, worker.client_indices[id_], None)
        vector = train(worker.task, worker.task.model.initial, client, generator()).vector
        hessian, _ = mean_hessian(worker.task, vector, client, generator())
        cosine.add(hessian)
        hessians.append(hessian.flatten())
    assert (cosine.result() or 0) > 0.9
    assert torch.cosine_similarity(hessians[0], hessians[1], dim=0) < 0.3


@pytest.mark.parametrize("method", ["fola", "fedavg"])
def test_weights_sweep_from_one_client_to_the_other(method: str, tmp_path: Path) -> None:
    """The ends are the clients' own models, the run's own weight gives the run's own model, nothing else changes."""
    overrides = [*TWO, f"method={method}", "partition=iid", "dataset.train_samples=120"]
    overrides = [o for o in overrides if not o.startswith("partition.min")]
    swept = [*overrides, "eval.weight_rounds=[2]", "eval.weight_points=3"]
    assert run_in(tmp_path / "swept", *swept) == run_in(tmp_path / "plain", *overrides)
    assert not (tmp_path / "plain/weights.csv").exists()
    rows = table(tmp_path / "swept/weights.csv")
    assert [(row["round"], row["weight"]) for row in rows] == [(2, 0), (2, 0.5), (2, 1)]
    last = table(tmp_path / "swept/metrics.csv")[-1]
    assert (rows[1]["ga"], rows[1]["nll"]) == pytest.approx((last["ga"], last["nll"]), rel=1e-5)  # 60 and 60 examples
    clients = {row["client"]: row for row in table(tmp_path / "swept/clients.csv") if row["round"] == 2}
    for row, client in ((rows[2], 0), (rows[0], 1)):  # weight is the first client's
        assert row["nll"] == pytest.approx(clients[client]["nll"], rel=1e-4)


def test_messages_are_kept(tmp_path: Path) -> None:
    run_in(tmp_path / "run", *TWO, "method=fedavg", "eval.keep_messages=[2]")
    names = sorted(path.name for path in (tmp_path / "run/messages").iterdir())
    assert names == ["round-2-client-0.safetensors", "round-2-client-1.safetensors"]
    kept = [load_file(tmp_path / "run/messages" / name)["params"].double() for name in names]
    sizes = experiment(*TWO).worker.task.sizes
    mean = (sizes[0] * kept[0] + sizes[1] * kept[1]) / sum(sizes)
    torch.testing.assert_close(state_of(tmp_path / "run")["params"], mean.float(), rtol=1e-6, atol=1e-7)


def test_a_run_starts_where_another_ended(tmp_path: Path) -> None:
    """FOLA goes on with mean, precision and round; FedAvg takes the model alone."""
    first = finished(tmp_path / "first", *TWO, "method=fola")
    start = state_of(first)
    assert start["round"] == 2
    later = experiment(*TWO, "method=fola", f"start_from={first}")
    run_in(tmp_path / "later", experiment_=later)
    assert state_of(tmp_path / "later")["round"] == 4
    onward = experiment(*TWO, "method=fedavg", "rounds=1", "server.lr=1e-9", f"start_from={first}")
    run_in(tmp_path / "onward", experiment_=onward)
    after = state_of(tmp_path / "onward")
    assert set(after) == {"params"}
    torch.testing.assert_close(after["params"], start["params"])


def test_aggregation_error_and_forgetting_under_a_known_posterior(tmp_path: Path) -> None:
    first = finished(tmp_path / "first", *TWO, "method=fola")
    known = state_of(first)
    options = ["rounds=1", "eval.keep_messages=[1]", f"reference_posterior={first}"]
    run_in(tmp_path / "run", *TWO, "method=fedavg", *options)

    def distance(params: torch.Tensor) -> float:
        return 0.5 * ((params - known["params"]) ** 2 * known["precision"]).double().sum().item()

    (row,) = table(tmp_path / "run/metrics.csv")
    assert row["ae"] == pytest.approx(distance(state_of(tmp_path / "run")["params"]), rel=1e-4)
    messages = [load_file(path)["params"] for path in sorted((tmp_path / "run/messages").iterdir())]
    sizes = experiment(*TWO).worker.task.sizes
    expected = sum(size * distance(params) for size, params in zip(sizes, messages, strict=True)) / sum(sizes)
    assert row["lf"] == pytest.approx(expected, rel=1e-4)
    assert row["lf"] != pytest.approx(row["ae"])


def finished(folder: Path, *overrides: str) -> Path:
    run_in(folder, *overrides)
    records.start(folder, resolve(*overrides), force=False)
    return folder


@pytest.mark.slow
def test_what_a_run_cannot_build_on_is_named(tmp_path: Path) -> None:
    first = finished(tmp_path / "first", *TWO, "method=fedavg")
    with pytest.raises(ConfigError, match=r"start_from: got .* the folder of a run, with its config.yaml"):
        plan(resolve(*TWO, f"start_from={tmp_path}"))
    (tmp_path / "begun").mkdir()
    records.start(tmp_path / "begun", resolve(*TWO), force=False)
    with pytest.raises(ConfigError, match=r"reference_posterior: got .*/begun', allowed: .* finished run"):
        load(plan(resolve(*TWO, f"reference_posterior={tmp_path / 'begun'}")))
    with pytest.raises(ConfigError, match=r"start_from: got .* whose network has \d+ parameters"):
        load(plan(resolve(*TWO, "model.hidden=[9]", f"start_from={first}")))
    diagonal = finished(tmp_path / "diagonal", *TWO, "method=fola")
    shapes = (
        r"start_from: got .*/diagonal', allowed: a run whose precision has shape \((\d+), \1\), .* \(there: \(\1,\)\)"
    )
    with pytest.raises(ConfigError, match=shapes):
        load(plan(resolve(*TWO, "method=fola", "method.structure=full", f"start_from={diagonal}")))
    with pytest.raises(ConfigError, match=r"reference_posterior: got .* a run of fola"):
        load(plan(resolve(*TWO, f"reference_posterior={first}")))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (SMALL, "unless there are two clients"),
        ([*TWO, "participation=0.5"], "unless there are two clients"),
        ([*TWO, "method.weights=uniform"], "unless method.weights=size"),
    ],
)
def test_a_sweep_of_weights_needs_two_clients_weighted_by_size(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan(resolve(*overrides, "eval.weight_rounds=[1]"))
