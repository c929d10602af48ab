"""scripts/fedlpa.py: tables out of runs and published numbers, pictures of small networks."""

import csv
import json
from pathlib import Path

import pytest

from bfl_bench.commands.cells import compose_cells
from bfl_bench.papers.spec import find_table, list_cells
from bfl_bench.papers.tables import HERE
from bfl_bench.records import SUMMARY, TIMING, TIMING_COLUMNS, Cell, Table
from tests.composing import call_script, write_run
from tests.conftest import BflRun


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


def write_cell(out: Path, table: str, label: str, row: dict[str, Cell], **names: str) -> Path:
    """A finished run of the first cell that is called so."""
    cells = (
        cell for cell in list_cells(find_table(table)) if cell.label == label and names.items() <= cell.names.items()
    )
    (one,) = compose_cells([next(cells)])
    return write_run(out, one.config, row)


def test_table_5_names_every_solver_and_the_authors_rule(tmp_path: Path) -> None:
    place = {"dataset": "FMNIST", "split": "beta=0.5"}
    out = tmp_path / "outputs"
    write_cell(out, "fedlpa_table5", "FedLPA", {"round": 1, "ga": 0.6, "ga@ea": 0.65, "ga@cg": 0.55}, **place)
    write_cell(out, "fedlpa_table5", "FedAvg", {"round": 1, "ga": 0.5}, **place)
    write_cell(out, "fedlpa_table5", "FedAvg", {"round": 1, "ga": 0.2}, dataset="FMNIST", split="#C=2")
    text = " ".join(call_script("fedlpa", "table5", cwd=tmp_path).stdout.split())
    cell = "| FMNIST, beta=0.5, E=10 |"
    assert f"{cell} FedAvg | 50.00 | 54.67 | -4.67 (?) | 1 |" in text
    assert f"{cell} FedLPA: lr 0.01, gradient descent | 60.00 | 67.63 | -7.63 (?) | 1 |" in text
    assert f"{cell} FedLPA: lr 0.01, closed form (EA) | 65.00 | 67.63 | -2.63 (?) | 1 |" in text
    assert "better of EA and gradient descent on the test set | 65.00 | 67.63 | -2.63 (?) | 1 |" in text
    assert "| FMNIST, #C=2, E=10 | FedAvg | 20.00 | 23.83 | -3.83 (?) | 1 |" in text
    assert "`bfl-paper run fedlpa_table5 cell=DENSE dataset=FMNIST,CIFAR-10,MNIST,SVHN 'split=beta=0.01," in text


def test_a_repaired_split_stands_in_the_table(tmp_path: Path) -> None:
    folder = write_cell(tmp_path / "outputs", "fedlpa_table5", "FedAvg", {"round": 1, "ga": 0.5}, dataset="FMNIST")
    summary = json.loads((folder / SUMMARY).read_text()) | {"partition": {"path": "repaired", "moved": 7}}
    (folder / SUMMARY).write_text(json.dumps(summary))
    done = call_script("fedlpa", "table5", cwd=tmp_path)
    assert f"| The splits of 1 of 1 runs were repaired, as no draw sufficed ({folder.name}: 7 examples" in done.stdout
    assert "repaired" in (tmp_path / "outputs/report/fedlpa_table5.tex").read_text()


def test_figure_2_shows_every_round_of_every_seed(tmp_path: Path) -> None:
    """A run that goes on from another is drawn behind it; rounds are means over the seeds."""
    cells = list_cells(find_table("fedlpa_figure2"), "cpu")
    first = {"FedAvg": 0.4, "FedLPA, CG, once": 0.6, "FedLPA, CG, once, then FedAvg": 0.3}
    for one in compose_cells([cell for cell in cells if cell.label in first and cell.seed < 2]):
        rows: list[dict[str, Cell]] = [
            {"round": r, "ga": first[one.cell.label] + 0.1 * r + 0.02 * one.cell.seed}
            for r in range(one.config["rounds"])
        ]
        write_run(tmp_path / "outputs", one.config, *rows)
    text = " ".join(call_script("fedlpa", "figure2", cwd=tmp_path).stdout.split())
    assert "| FedAvg | 2 | 41.00 +- 1.41 | 51.00 +- 1.41 | 61.00 +- 1.41 | 71.00 +- 1.41 | 81.00 +- 1.41 |" in text
    assert "| FedLPA, CG, once, then FedAvg | 2 | 61.00 +- 1.41 | 31.00 +- 1.41 | 41.00 +- 1.41 |" in text
    assert "| FedLPA, CG, once |" not in text


def test_costs(tmp_path: Path) -> None:
    for label, sent, client, server in (("FedLPA", 7_160_000, 70.0, 5.5), ("FedAvg", 3_580_000, 50.0, 0.0)):
        row: dict[str, Cell] = {"round": 1, "ga": 0.5, "bytes_up": sent}
        folder = write_cell(tmp_path / "outputs", "fedlpa_table4", label, row)
        times: dict[str, Cell] = {"round": 1, "client_seconds": client, "server_seconds": server}
        Table(folder / TIMING, TIMING_COLUMNS).append([times])
    text = " ".join(call_script("fedlpa", "table4", cwd=tmp_path).stdout.split())
    assert "| FedLPA | 1 | 7.16 | 70.0 | 5.5 | 2.00 | 1.51 | 2.77 (1.12) | 65 (1.30) |" in text


@pytest.mark.slow
def test_the_fisher_matrix_of_a_network(bfl_run: BflRun, tmp_path: Path) -> None:
    assert bfl_run("experiment=fedlpa_figure3", "scale=smoke").code == 0
    done = call_script("fedlpa", "figure3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "outputs/report/fedlpa_figure3_smoke.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert 0 < sum(float(row["share of the squared norm"]) for row in rows) < 1


@pytest.mark.parametrize(
    "command", ["table11", *(pytest.param(name, marks=pytest.mark.slow) for name in ("table1", "figure4"))]
)
def test_without_runs_it_says_what_to_run(command: str, tmp_path: Path) -> None:
    done = call_script("fedlpa", command, "--runs", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert "bfl-paper run fedlpa_" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_two_gaussians(tmp_path: Path) -> None:
    assert call_script("fedlpa", "figure6", cwd=tmp_path).returncode == 0
    with (tmp_path / "outputs/report/fedlpa_figure6.csv").open(newline="") as file:
        density = {row["way"]: float(row["log density"]) for row in csv.DictReader(file)}
    assert density["Kronecker"] == max(density.values())
