"""scripts/virtual.py: tables out of runs and published numbers, curves, and signal-to-noise ratios."""

import csv
from pathlib import Path

import pytest

from bfl_bench.papers.tables import HERE, read_published
from bfl_bench.records import Cell
from tests.composing import call_script, resolve, write_run


def row(round_: int, s: float, mt: float, **more: Cell) -> dict[str, Cell]:
    base: dict[str, Cell] = {"round": round_, "ga": s, "train_loss": 0.5 / round_, "bytes_up": 1000 * round_}
    return base | {"s_acc": s, "mt_acc": mt, "s_loss": 1 - s, "mt_loss": 1 - mt} | more


def test_published_numbers() -> None:
    with (HERE / "published/virtual.csv").open(newline="") as file:
        tables = [cell["table"] for cell in csv.DictReader(file)]
    assert {table: tables.count(table) for table in "1234"} == {"1": 24, "2": 42, "3": 20, "4": 12}
    assert read_published("virtual", "2")["FEMNIST, conv, MT", "Virtual"] == 98.2
    assert read_published("virtual", "2")["PMNIST, mlp, S", "FedAvg"] == 48.3
    assert read_published("virtual", "3")["75 % pruned, MT", "Virtual + FedAvg init"] == 78.7
    assert read_published("virtual", "3")["90 % pruned", "delta size"] == 16000
    assert read_published("virtual", "4")["FEMNIST, mlp, S", "FedProx"] == 86.6
    assert read_published("virtual", "1")["NLP", "standard deviation of sizes"] == 11000


def test_table_2_takes_the_maximum_over_rounds(tmp_path: Path) -> None:
    out = tmp_path / "outputs"
    write_run(out, resolve("experiment=virtual"), row(1, 0.5, 0.9), row(2, 0.8, 0.7))
    write_run(out, resolve("experiment=virtual", "method.beta=1e-3"), row(1, 0.85, 0.6))
    write_run(out, resolve("experiment=virtual", "method=fedavg", "dataset=vsn", "num_clients=null"), row(1, 0.4, 0.3))
    write_run(out, resolve("experiment=virtual", "method.init_from=server"), row(1, 0.99, 0.99))  # of Table III
    write_run(out, resolve("dataset=mnist"), {"round": 1, "ga": 0.1})  # no own test sets: not one of these
    write_run(out, resolve("experiment=virtual", "local.epochs=100"), row(1, 0.99, 0.99))  # of Table IV
    write_run(out, resolve("experiment=virtual_released"), row(1, 0.6, 0.61))
    text = " ".join(call_script("virtual", "table2", cwd=tmp_path).stdout.split())
    assert "| FEMNIST, mlp | MT | Virtual | 90.0 | 95.7 | -5.7 | 1 | 2 |" in text
    assert "| FEMNIST, mlp | S | Virtual | 85.0 | 90.9 | -5.9 | 1 | 2 |" in text
    assert "| FEMNIST, mlp | MT | Virtual (released) | 61.0 | 95.7 | -34.7 | 1 | 1 |" in text
    assert "| VSN, mlp | S | FedAvg | 40.0 | 89.6 | -49.6 | 1 | 1 |" in text
    assert "FedProx on NLP, lstm: `bfl-run -m experiment=virtual_table2 row=virtual/shakespeare method=fedprox`" in text


def test_table_2_is_the_mean_over_seeds_of_the_best_setting(tmp_path: Path) -> None:
    for lr, values in (("0.1", (0.5, 0.9)), ("0.01", (0.72, 0.74))):  # the best single run is not of the best setting
        for seed, s in enumerate(values):
            write_run(
                tmp_path / "outputs", resolve("experiment=virtual", f"local.lr={lr}", f"seed={seed}"), row(1, s, s)
            )
    text = " ".join(call_script("virtual", "table2", cwd=tmp_path).stdout.split())
    assert "| FEMNIST, mlp | S | Virtual | 73.0 +- 1.4 | 90.9 | -17.9 (!) | 2 | 2 | 250 rounds, E 20, lr 0.01" in text


def test_table_3_and_what_is_missing(tmp_path: Path) -> None:
    write_run(tmp_path / "outputs", resolve("experiment=virtual", "method.prune=50", "rounds=2"), row(2, 0.5, 0.9))
    text = " ".join(call_script("virtual", "table3", cwd=tmp_path).stdout.split())
    assert "| 50 % | Virtual | MT | 90.0 | 94.3 | -4.3 | 1 | 0.00 |" in text
    start = "50 % pruned, Virtual + FedAvg init: `bfl-run -m experiment=virtual_table3"
    assert f"{start} method.prune=50 method.init_from=server`" in text


def test_table_3_is_of_one_setting(tmp_path: Path) -> None:
    """Runs without pruning belong to it only if all else is alike."""
    pruned = resolve("experiment=virtual", "method.prune=50")
    write_run(tmp_path / "outputs", pruned, row(1, 0.5, 0.9))
    write_run(tmp_path / "outputs", resolve("experiment=virtual", "local.lr=0.1"), row(1, 0.99, 0.99))
    write_run(tmp_path / "outputs", resolve("experiment=virtual"), row(1, 0.6, 0.7))
    text = " ".join(call_script("virtual", "table3", cwd=tmp_path).stdout.split())
    assert "| 0 % | Virtual | S | 60.0 |" in text
    write_run(tmp_path / "outputs", resolve("experiment=virtual", "method.prune=50", "local.lr=0.1"), row(1, 0.2, 0.2))
    assert "several settings" in call_script("virtual", "table3", cwd=tmp_path).stderr


def test_table_1_reads_the_partition(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "outputs", resolve("experiment=virtual", "dataset=har"), row(1, 0.5, 0.9))
    (folder / "partition.csv").write_text("client,class,count\n0,0,4\n0,7,6\n1,2,20\n")
    text = " ".join(call_script("virtual", "table1", cwd=tmp_path).stdout.split())
    assert "| HAR | 2 | 30 | 15 | 5 | 30 | 15000 | 500 | 56 |" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["figure2", "figure3"])
def test_curves(name: str, tmp_path: Path) -> None:
    for beta in ("1e-5", "1e-3"):
        rows = [row(i + 1, 0.5 + 0.01 * i, 0.6 + 0.01 * i) for i in range(25)]
        write_run(tmp_path / "outputs", resolve("experiment=virtual", f"method.beta={beta}"), *rows)
    done = call_script("virtual", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"outputs/report/virtual_{name}.png").stat().st_size > 10_000


def test_without_runs_it_says_what_to_run(tmp_path: Path) -> None:
    for command in ("table2", "figure4"):
        done = call_script("virtual", command, "--runs", ".", cwd=tmp_path)
        assert done.returncode == 1
        assert "bfl-run -m experiment=virtual" in done.stderr
