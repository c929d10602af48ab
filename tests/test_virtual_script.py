"""scripts/virtual.py: tables out of runs and published numbers, curves, and signal-to-noise ratios."""

import csv
from pathlib import Path

import pytest

from bfl_bench.commands import paper
from bfl_bench.commands.cells import compose_cells
from bfl_bench.papers.spec import find_table, list_cells
from bfl_bench.papers.tables import HERE, read_published
from bfl_bench.papers.virtual import choose_rate, smooth
from bfl_bench.records import Cell
from bfl_bench.report import Group, find_runs
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


@pytest.mark.slow
def test_table_2_takes_the_maximum_over_rounds_of_the_best_setting(tmp_path: Path) -> None:
    out = tmp_path / "outputs"
    place = {"federation": "MNIST, mlp"}
    make_cell(out, "virtual_table2", "FedProx", row(1, 0.5, 0.9), row(2, 0.8, 0.7), server__lr="0.8", **place)
    make_cell(out, "virtual_table2", "FedProx", row(1, 0.85, 0.6), server__lr="1.6", **place)
    make_cell(out, "virtual_table2", "FedAvg", row(1, 0.4, 0.3), federation="VSN, mlp")
    write_run(out, resolve("experiment=virtual", "method.init_from=server"), row(1, 0.99, 0.99))  # of Table III
    write_run(out, resolve("experiment=virtual", "local.epochs=100"), row(1, 0.99, 0.99))  # of Table IV
    text = " ".join(call_script("virtual", "table2", cwd=tmp_path).stdout.split())
    setting = "60 rounds, E 5, lr 0.1, server.lr 0.8, mu 0.01, all clients"
    assert f"| MNIST, mlp | MT | FedProx | 90.0 | 96.9 | -6.9 (?) | 1 | 2 | {setting} |" in text
    assert "| MNIST, mlp | S | FedProx | 85.0 | 97.6 | -12.6 (?) | 1 | 2 |" in text
    assert "| VSN, mlp | S | FedAvg | 40.0 | 89.6 | -49.6 (?) | 1 | 1 |" in text
    assert f"| MNIST, mlp | FedProx | {setting} | 90.0 | 80.0 | 1 |" in text  # each setting by itself
    assert f"| MNIST, mlp | FedProx | {setting.replace('0.8', '1.6')} | 60.0 | 85.0 | 1 |" in text
    assert "99.0" not in text
    assert "No run here of FEMNIST, mlp; FEMNIST, conv; PMNIST, mlp; HAR, mlp; NLP, lstm." in text
    assert "`bfl-paper run virtual_table2 scale=cpu cell=FedProx 'federation=FEMNIST, mlp,VSN, mlp," in text


def show(table: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What bfl-paper prints of a table on two cores, with single spaces."""
    assert paper.main(["show", table, "scale=cpu", "--runs", str(runs), "--to", str(runs / "report")]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_with_several_seeds_a_difference_is_marked_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [cell for cell in list_cells(find_table("virtual_table2"), "cpu") if cell.label == "Virtual"]
    here = [cell for cell in cells if cell.names["federation"] == "HAR, mlp"]
    assert [cell.seed for cell in here] == [0, 1, 2]
    for one, s in zip(compose_cells(here), (0.93, 0.94, 0.95), strict=True):
        write_run(tmp_path, one.config, row(1, s, s))
    text = show("virtual_table2", tmp_path, capsys)
    assert "| HAR, mlp | MT | Virtual | 94.0 +- 1.0 | 99.1 | -5.1 (!) | 3 | 1 |" in text
    assert "| HAR, mlp | S | Virtual | 94.0 +- 1.0 | 94.3 | -0.3 | 3 | 1 |" in text
    assert "Every setting" not in text


def test_curves_have_one_learning_rate_per_dataset(tmp_path: Path) -> None:
    """The best on average: FedAvg alone would take 0.03, and only VIRTUAL has been tried with 0.01."""
    tried = {("fedavg", 0.03): 0.8, ("fedavg", 0.1): 0.7, ("virtual", 0.03): 0.2, ("virtual", 0.1): 0.6}
    for (method, rate), mt in (tried | {("virtual", 0.01): 0.9}).items():
        write_run(tmp_path, resolve("experiment=virtual", f"method={method}", f"local.lr={rate}"), row(1, 0.5, mt))
    runs, _ = find_runs([tmp_path], {})
    groups = [Group(run.config, (run,)) for run in runs]
    by_method = {name: [g for g in groups if g.config["method.name"] == name] for name in ("fedavg", "virtual")}
    assert [len(of) for of in by_method.values()] == [2, 3]
    assert choose_rate(by_method) == 0.1
    assert choose_rate({"fedavg": by_method["fedavg"]}) == 0.03


def test_curves_say_their_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rate, mt in (("0.8", 0.6), ("1.6", 0.7)):
        last = row(1, 0.5, mt, train_acc=mt)
        make_cell(tmp_path, "virtual_table2", "FedAvg", last, federation="MNIST, mlp", server__lr=rate)
    text = show("virtual_figure5", tmp_path, capsys)
    assert (
        "| MNIST, mlp | FedAvg | train_acc | 60 rounds, E 5, lr 0.1, server.lr 1.6, all clients | 0 | 0.7000 |" in text
    )
    assert "server.lr 0.8, all clients" not in text


def test_a_moving_average_lies_at_the_middle_of_its_rounds() -> None:
    rounds, values = smooth([2, 4, 6, 8], [1.0, 3.0, 5.0, 11.0], 3)
    assert (rounds.tolist(), values.tolist()) == (pytest.approx([4, 6]), pytest.approx([3, 19 / 3]))
    assert [x.tolist() for x in smooth([1, 2], [3.0, 5.0], 20)] == [[1.5], [4.0]]


def test_table_3_and_what_is_missing(tmp_path: Path) -> None:
    make_cell(tmp_path / "outputs", "virtual_table3", "Virtual", row(60, 0.5, 0.9), method__prune="50")
    text = " ".join(call_script("virtual", "table3", cwd=tmp_path).stdout.split())
    assert "| 50 % | Virtual | MT | 90.0 | 94.3 | -4.3 (?) | 1 | 0.00 |" in text
    assert "cell=Virtual method.prune=0,50,75,90 seed=0,1,2`" in text


def test_without_pruning_table_3_is_table_2() -> None:
    for scale in ("paper", "cpu"):
        chosen = [
            [
                c
                for c in list_cells(find_table(table), scale)
                if c.label == "Virtual" and wanted.items() <= c.names.items()
            ]
            for table, wanted in (
                ("virtual_table3", {"method.prune": "0"}),
                ("virtual_table2", {"federation": "FEMNIST, mlp"}),
            )
        ]
        unpruned, all_tried = ({one.name for one in compose_cells(cells)} for cells in chosen)
        assert unpruned <= all_tried


def test_table_1_reads_the_partition(tmp_path: Path) -> None:
    folder = make_cell(tmp_path / "outputs", "virtual_table1", "FedAvg", row(1, 0.5, 0.9), dataset="HAR")
    (folder / "partition.csv").write_text("client,class,count\n0,0,4\n0,7,6\n1,2,20\n")
    text = " ".join(call_script("virtual", "table1", cwd=tmp_path).stdout.split())
    assert "| HAR | 2 | 30 | 15 | 5 | 30 | 15000 | 500 | 56 |" in text


def test_table_1_runs_once_per_dataset_and_counts_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = list_cells(find_table("virtual_table1"))
    assert [(cell.names["dataset"], cell.values["rounds"]) for cell in cells] == [
        (name, 1) for name in ("FEMNIST", "MNIST", "PMNIST", "VSN", "HAR", "NLP")
    ]
    folder = make_cell(tmp_path, "virtual_table1", "FedAvg", row(1, 0.5, 0.9), dataset="NLP")
    (folder / "partition.csv").write_text("client,class,count\n0,0,10\n1,2,20\n")
    text = show("virtual_table1", tmp_path, capsys)
    assert "| NLP | 2 | 2400 | 1200 | 400 | 100 |" in text  # sequences of 80 characters


@pytest.mark.slow
def test_without_runs_it_says_what_to_run(tmp_path: Path) -> None:
    for command in ("table3", "figure4"):
        done = call_script("virtual", command, "--runs", ".", cwd=tmp_path)
        assert done.returncode == 1
        assert "bfl-paper run virtual_" in done.stderr
