"""scripts/virtual.py: tables out of runs and published numbers, curves, and signal-to-noise ratios."""

import csv
from pathlib import Path

from bfl_bench.commands.cells import compose_cells
from bfl_bench.papers.spec import find_table, list_cells
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


def make_cell(out: Path, table: str, label: str, *rows: dict[str, Cell], **names: str) -> Path:
    """A finished run of the first cell that is called so; a dot in an axis is written as __."""
    wanted = {axis.replace("__", "."): name for axis, name in names.items()}
    cells = list_cells(find_table(table), "cpu")
    first = next(cell for cell in cells if cell.label == label and wanted.items() <= cell.names.items())
    (one,) = compose_cells([first])
    return write_run(out, one.config, *rows)


def test_table_2_takes_the_maximum_over_rounds_of_the_best_setting(tmp_path: Path) -> None:
    out = tmp_path / "outputs"
    place = {"federation": "FEMNIST, mlp"}
    make_cell(out, "virtual_table2", "Virtual", row(1, 0.5, 0.9), row(2, 0.8, 0.7), local__lr="0.03", **place)
    make_cell(out, "virtual_table2", "Virtual", row(1, 0.85, 0.6), local__lr="0.1", **place)
    make_cell(out, "virtual_table2", "FedAvg", row(1, 0.4, 0.3), federation="VSN, mlp")
    write_run(out, resolve("experiment=virtual", "method.init_from=server"), row(1, 0.99, 0.99))  # of Table III
    write_run(out, resolve("experiment=virtual", "local.epochs=100"), row(1, 0.99, 0.99))  # of Table IV
    text = " ".join(call_script("virtual", "table2", cwd=tmp_path).stdout.split())
    assert "| FEMNIST, mlp | MT | Virtual | 90.0 | 95.7 | -5.7 (?) | 1 | 2 |" in text
    assert "| FEMNIST, mlp | S | Virtual | 85.0 | 90.9 | -5.9 (?) | 1 | 2 |" in text
    assert "| VSN, mlp | S | FedAvg | 40.0 | 89.6 | -49.6 (?) | 1 | 1 |" in text
    assert "99.0" not in text
    assert "`bfl-paper run virtual_table2 scale=cpu cell=FedProx 'federation=FEMNIST, mlp,MNIST, mlp," in text


def test_table_3_and_what_is_missing(tmp_path: Path) -> None:
    make_cell(tmp_path / "outputs", "virtual_table3", "Virtual", row(60, 0.5, 0.9), method__prune="50")
    text = " ".join(call_script("virtual", "table3", cwd=tmp_path).stdout.split())
    assert "| 50 % | Virtual | MT | 90.0 | 94.3 | -4.3 (?) | 1 | 0.00 |" in text
    assert "cell=Virtual method.prune=0,75,90 seed=0`" in text


def test_table_1_reads_the_partition(tmp_path: Path) -> None:
    folder = make_cell(tmp_path / "outputs", "virtual_table1", "FedAvg", row(1, 0.5, 0.9), federation="HAR, mlp")
    (folder / "partition.csv").write_text("client,class,count\n0,0,4\n0,7,6\n1,2,20\n")
    text = " ".join(call_script("virtual", "table1", cwd=tmp_path).stdout.split())
    assert "| HAR | 2 | 30 | 15 | 5 | 30 | 15000 | 500 | 56 |" in text


def test_without_runs_it_says_what_to_run(tmp_path: Path) -> None:
    for command in ("table2", "figure4"):
        done = call_script("virtual", command, "--runs", ".", cwd=tmp_path)
        assert done.returncode == 1
        assert "bfl-paper run virtual_" in done.stderr
