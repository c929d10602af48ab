"""scripts/fedlpa.py: tables out of runs and published numbers, pictures of small networks."""

import csv
import math
from pathlib import Path

import pytest

from bfl_bench.build import reload
from bfl_bench.papers import fedlpa
from bfl_bench.papers.tables import HERE, read_published
from bfl_bench.records import TIMING, TIMING_COLUMNS, Table
from bfl_bench.report import flatten
from tests.composing import call_script, only_folder, resolve, write_run
from tests.conftest import BflRun

RELEASED = ["experiment=fedlpa_released", "local.epochs=10"]


def published(table: str) -> list[dict[str, str]]:
    with (HERE / "published/fedlpa.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["table"] == table]


def test_published_numbers() -> None:
    """Cells picked by hand, and the counts: 4 datasets x 9 partitions x 6 methods in the large tables."""
    counts = [len(published(table)) for table in "1 2 3 4 5 6 7 8 9 10 11 12".split()]
    assert counts == [216, 108, 27, 12, 216, 216, 216, 216, 36, 120, 10, 7]
    cells = {
        (t, c["row"], c["column"]): (c["value"], c["spread"]) for t in map(str, range(1, 13)) for c in published(t)
    }
    assert cells["5", "FMNIST, beta=0.5, E=10", "FedLPA"] == ("67.63", "0.36")
    assert cells["5", "FMNIST, beta=0.1, E=10", "FedAvg"] == ("22.57", "1.08")
    assert cells["5", "MNIST, beta=0.1, E=10", "FedLPA"] == ("78.07", "0.09")
    assert cells["1", "SVHN, #C=3, E=200", "DENSE"] == ("47.43", "0.4")
    assert cells["2", "50 clients, beta=0.3, E=200", "FedLPA"] == ("66.7", "0.23")
    assert cells["3", "FMNIST, #C=1, E=200", "lambda=0.0001"] == ("14.17", "0.02")
    assert cells["6", "MNIST, beta=1.0, E=20", "FedLPA"] == ("96.17", "0.01")
    assert cells["7", "FMNIST, beta=0.01, E=50", "FedLPA"][0] != cells["8", "FMNIST, beta=0.01, E=100", "FedLPA"][0]
    assert cells["9", "FMNIST, 5 clients, beta=1.0, E=200", "FedProx"] == ("60.37", "0.01")
    assert cells["10", "MNIST, beta=0.001, E=10", "FedLPA"] == ("24.1", "0.17")
    assert cells["11", "MNIST, #C=2, E=10", "FedOV"] == ("71.0", "0.25")


def test_table_5_names_every_solver_and_the_authors_rule(tmp_path: Path) -> None:
    out = tmp_path / "outputs"
    for seed, (gd, ea) in enumerate([(0.6, 0.5), (0.4, 0.7)]):
        row = {"round": 1, "ga": gd, "ga@ea": ea, "ga@cg": 0.55}
        write_run(out, resolve(*RELEASED, f"seed={seed}"), row)
        write_run(out, resolve(*RELEASED, "method=fedavg", f"seed={seed}"), {"round": 1, "ga": 0.5 + 0.02 * seed})
    classes = ["partition=classes", "partition.rng=numpy_legacy", "method=fedavg"]
    write_run(out, resolve(*RELEASED, *classes), {"round": 1, "ga": 0.2})
    write_run(out, resolve(*RELEASED, "partition=dirichlet", "partition.alpha=0.5"), {"round": 1, "ga": 0.9})  # not its
    text = " ".join(call_script("fedlpa", "table5", cwd=tmp_path).stdout.split())
    cell = "| FMNIST, beta=0.5, E=10 |"
    assert f"{cell} FedAvg | 51.00 +- 1.41 | 54.67 | -3.67 (!) | 2 |" in text
    assert f"{cell} FedLPA: lr 0.01, gradient descent | 50.00 +- 14.14 | 67.63 | -17.63 (!) | 2 |" in text
    assert f"{cell} FedLPA: lr 0.01, closed form (EA) | 60.00 +- 14.14 | 67.63 | -7.63 | 2 |" in text
    assert "better of EA and gradient descent on the test set | 65.00 +- 7.07 | 67.63 | -2.63 | 2 |" in text
    assert "| FMNIST, #C=2, E=10 | FedAvg | 20.00 | 23.83 | -3.83 | 1 |" in text
    assert (
        "FedLPA, FedNova, SCAFFOLD, FedProx, DENSE in FMNIST, #C=2, E=10: `bfl-run -m experiment=fedlpa_table5" in text
    )
    line = "dataset=fashion_mnist row=fedlpa/beta_0.5 local.epochs=10 method=fednova,scaffold,fedprox,dense_fedlpa`"
    assert line in text


def test_best_over_the_strength_of_fedprox(tmp_path: Path) -> None:
    for mu, ga in ((0.01, 0.5), (0.1, 0.6)):
        write_run(tmp_path / "outputs", resolve(*RELEASED, "method=fedprox", f"method.mu={mu}"), {"round": 1, "ga": ga})
    assert "two runs are one cell" in call_script("fedlpa", "table5", cwd=tmp_path).stderr
    text = " ".join(call_script("fedlpa", "table5", "--best-over", "method.mu", cwd=tmp_path).stdout.split())
    assert "Best over method.mu" in text
    assert "FedProx | 60.00 |" in text
    refused = call_script("fedlpa", "table4", "--best-over", "method.mu", cwd=tmp_path)
    assert "table4 does not take it; allowed with table1" in refused.stderr


def test_costs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "outputs", resolve(*RELEASED), {"round": 1, "ga": 0.5, "bytes_up": 7_160_000})
    Table(folder / TIMING, TIMING_COLUMNS).append([{"round": 1, "client_seconds": 70.0, "server_seconds": 5.5}])
    other = write_run(
        tmp_path / "outputs", resolve(*RELEASED, "method=fedavg"), {"round": 1, "ga": 0.5, "bytes_up": 3_580_000}
    )
    Table(other / TIMING, TIMING_COLUMNS).append([{"round": 1, "client_seconds": 50.0, "server_seconds": 0.0}])
    text = " ".join(call_script("fedlpa", "table4", cwd=tmp_path).stdout.split())
    assert "| fedlpa_released | 1 | 7.16 | 70.0 | 5.5 | 2.00 | 1.51 | 2.77 (1.12) | 65 (1.30) |" in text


@pytest.mark.slow
@pytest.mark.parametrize("table", ["2", "3", "5", "9", "10", "11"])
def test_commands_for_what_is_missing_make_it(table: str) -> None:
    """Without any run every cell is missing: the lines make as many runs as there are cells, and the last is a cell."""
    paper = set(read_published("fedlpa", table))
    num = 0
    for line in fedlpa.missing_cells(table, sorted(paper), set()).values():
        values = {key: value.split(",") for key, value in (part.split("=", 1) for part in line.split()[2:])}
        num += math.prod(len(value) for value in values.values())
        config = flatten(resolve(*(f"{key}={value[-1]}" for key, value in values.items())))
        column = f"lambda={config['method.damping']}" if table == "3" else fedlpa.METHODS[config["method.name"]]
        assert (fedlpa.row_of(config), column) in paper
    assert num == len(paper)


def test_figure_2_joins_a_run_with_the_one_that_it_started_from(tmp_path: Path) -> None:
    out = tmp_path / "outputs"
    setting = ["experiment=fedlpa_figure2", "dataset=mnist", "method=fedlpa"]
    once = write_run(out, resolve(*setting, "rounds=1"), {"round": 1, "ga": 0.5})
    then = [*setting[:2], "method=fedavg", "rounds=2"]
    write_run(out, resolve(*then), {"round": 1, "ga": 0.25}, {"round": 2, "ga": 0.5})
    alone = call_script("fedlpa", "figure2", cwd=tmp_path).stdout
    assert f"method=fedavg rounds=1 start_from=outputs/{once.name}" in alone
    write_run(out, resolve(*then, f"start_from={once}"), {"round": 1, "ga": 0.625}, {"round": 2, "ga": 0.75})
    text = " ".join(call_script("fedlpa", "figure2", cwd=tmp_path).stdout.split())
    assert "| FedLPA once, then FedAvg | 50.00 | 75.00 | 3 |" in text
    assert "| FedAvg | 25.00 | 50.00 | 2 |" in text
    assert "start_from" not in text


@pytest.mark.parametrize("command", ["table1", pytest.param("figure4", marks=pytest.mark.slow)])
def test_without_runs_it_says_what_to_run(command: str, tmp_path: Path) -> None:
    done = call_script("fedlpa", command, "--runs", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert "bfl-run" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_two_gaussians(tmp_path: Path) -> None:
    assert call_script("fedlpa", "figure6", cwd=tmp_path).returncode == 0
    with (tmp_path / "outputs/report/fedlpa_figure6.csv").open(newline="") as file:
        density = {row["way"]: float(row["log density"]) for row in csv.DictReader(file)}
    assert density["Kronecker"] == max(density.values())


@pytest.mark.slow
def test_the_fisher_matrix_of_a_small_network(bfl_run: BflRun, tmp_path: Path) -> None:
    data = ["dataset=synthetic", "dataset.shape=[1,15,15]", "dataset.train_samples=60", "dataset.test_samples=20"]
    network = ["model=conv3", "model.channels=2", "num_clients=1", "partition=iid", "method=fedavg", "rounds=1"]
    assert bfl_run(*data, *network).code == 0
    experiment, state = reload(only_folder(tmp_path / "outputs"))
    assert state["params"].shape == experiment.worker.task.model.vector.shape
    done = call_script("fedlpa", "figure3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "outputs/report/fedlpa_figure3.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert all(0.2 < float(row["cosine"]) <= 1 for row in rows)
    assert 0 < sum(float(row["share of the squared norm"]) for row in rows) < 1
