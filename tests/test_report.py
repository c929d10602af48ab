"""Tables and figures out of run folders: what is averaged, what is kept apart, what is said about the rest."""

import csv
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from bfl_bench import records, report
from bfl_bench.commands import paper
from bfl_bench.commands.cells import compose_cells
from bfl_bench.papers.ba_bfl import draw_lines, find_equal
from bfl_bench.papers.pages import Page
from bfl_bench.papers.spec import find_table, list_cells
from bfl_bench.papers.tables import read_published_rows
from bfl_bench.report import summarise
from bfl_bench.report.output import latex_of, wrapped
from tests.composing import resolve

Run = Callable[..., str]


@cache
def composed(*overrides: str) -> dict[str, Any]:
    return resolve(*overrides)


def write_run(folder: Path, *overrides: str, seed: int = 0, status: str = "done", **final: float) -> None:
    """A finished run as the program leaves it, with two rounds of 3 + 1 and 5 + 1 seconds, on the papers' split."""
    folder.mkdir(parents=True)
    default = {"partition": "partition.alpha=0.5", "dataset": "dataset=fashion_mnist"}
    split = [value for key, value in default.items() if not any(o.startswith(key) for o in overrides)]
    records.start(folder, composed(*split, *overrides) | {"seed": seed}, force=False)
    row: dict[str, records.Cell] = {"round": 2, "ga": 0.8, "ece": 0.1, "nll": 0.5, "la": 0.4, "worst10": 0.2, **final}
    records.Table(folder / records.METRICS, records.METRICS_COLUMNS).append([row])
    seconds = [{"round": i + 1, "client_seconds": s, "server_seconds": 1.0} for i, s in enumerate((3.0, 5.0))]
    records.Table(folder / records.TIMING, records.TIMING_COLUMNS).append(seconds)
    records.write_json(folder / records.SUMMARY, {"status": status, "final": row})


@pytest.fixture
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(script: str, *arguments: str) -> str:
        where = ["--runs", str(tmp_path / "runs"), "--to", str(tmp_path / "to")]
        monkeypatch.setattr(sys, "argv", ["script", arguments[0], *where, *arguments[1:]])
        paper.run_script(script)
        return capsys.readouterr().out

    return call


def cells(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {tuple(row[key] for key in ("dataset", "partition", "model", "aggregator", "metric")): row for row in rows}


def line_of(text: str, *row: str) -> list[str]:
    """The numbers of a Markdown table's row."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    (match,) = [line[len(row) :] for line in found if line[: len(row)] == list(row)]
    return match


# What the papers print


def test_published_cells_are_those_of_the_papers() -> None:
    table1, table4 = (read_published_rows("bfl_p", table) for table in "14")
    assert (len(table1), len(table4)) == (2 * 12 * 3 * 3, 5 * 3)
    assert table1["fashion_mnist", ("IID", "FED", "N/A"), "acc_percent"] == (89.62, 0.15)
    assert table1["svhn", ("IID", "FVBA", "PPA"), "ece_percent"] == (4.29, 0.11)
    assert table1["cifar10", ("IID", "FVBWA", "CF"), "nll"] == (0.83, 0.01)
    assert table1["cifar10", ("Non-IID", "FVBA", "EAA"), "acc_percent"] == (61.48, 0.33)
    assert table1["fashion_mnist", ("Non-IID", "FVBWA", "AALV"), "ece_percent"] == (6.78, 0.14)
    assert table1["svhn", ("Non-IID", "FVBWA", "CF"), "nll"] == (0.64, 0.02)
    assert table4["fashion_mnist", ("Non-IID", "FVBWA", "EAA"), "std_norm"] == (15.48, 0.41)
    assert table4["svhn", ("Non-IID", "FVBWA", "PPA"), "std_norm"] == (31.62, 0.38)
    table3, large, table5 = (read_published_rows("bfl_p", table) for table in ("3", "4_100", "5"))
    assert (len(table3), len(large), len(table5)) == (2 * 12 * 3 * 3, 5 * 3, 12 * 3)
    assert table3["svhn", ("Non-IID", "FVBA", "PPA"), "acc_percent"] == (18.28, 0.81)
    assert table3["fashion_mnist", ("Non-IID", "FVBWA", "EAA"), "acc_percent"] == (79.61, 1.06)
    assert large["cifar10", ("Non-IID", "FVBWA", "EAA"), "std_norm"] == (91.79, 1.16)
    assert table5["cifar10", ("IID", "FVBWA", "CF"), "seconds_per_round, 10 processes"] == (10.56, 0.08)
    ba_table1 = read_published_rows("ba_bfl", "1")
    assert len(ba_table1) == (1 + 3 * 5) * 3 * 3
    assert ba_table1["cifar10", ("Non-IID", "0", "FedAVG"), "ece_percent"] == (12.17, 2.21)
    assert ba_table1["fashion_mnist", ("Non-IID", "1", "WB"), "acc_percent"] == (88.34, 0.30)
    assert ba_table1["svhn", ("Non-IID", "2", "GAA"), "nll"] == (0.77, 0.04)
    assert ba_table1["svhn", ("Non-IID", "3", "RKLB"), "acc_percent"] == (86.53, 1.03)


# Finding and grouping


def test_seeds_are_averaged_whatever_the_folders_are_called(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.1, 0.2, 0.6)):
        write_run(tmp_path / f"svhn_iid_{seed}", "method=fvb", seed=seed, ga=accuracy)
    runs, notes = report.find_runs([tmp_path], {"dataset.name": "fashion_mnist"})
    (group,) = report.group_over_seeds(runs)
    stats = group.stats("ga", 100)
    assert notes == []
    assert stats is not None
    assert stats == pytest.approx((3, 30, 700**0.5, (1400 / 3) ** 0.5, (700 / 3) ** 0.5))
    assert group.stats("std_norm") is None
    assert report.find_runs([tmp_path], {"dataset.name": "svhn"})[0] == []


def test_configs_that_differ_in_more_than_the_seed_are_not_averaged(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "method=fvb")
    write_run(tmp_path / "b", "method=fvb", "local.lr=0.02", seed=1)
    assert len(report.group_over_seeds(report.find_runs([tmp_path], {})[0])) == 2


def test_runs_left_out_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "good", "method=fvb")
    write_run(tmp_path / "same", "method=fvb")
    write_run(tmp_path / "wild", "method=fvb", seed=1, status="diverged")
    write_run(tmp_path / "half", "method=fvb", seed=2)
    (tmp_path / "half" / records.SUMMARY).unlink()
    runs, notes = report.find_runs([tmp_path, tmp_path / "good", tmp_path / "none"], {})
    assert [run.folder.name for run in runs] == ["good"]
    assert [note.replace(str(tmp_path), "").split(";")[0] for note in notes] == [
        "/none: no such folder",
        "/half: not finished",
        "/same: the same config as /good",
        "/wild: diverged",
    ]


# Figures and tables of BFL-P and BA-BFL


def write_cells(to: Path, table: str, label: str, **final: float) -> None:
    """Finished runs of a cell, one per seed; the accuracy grows with it by 0.1 %."""
    cells_ = [cell for cell in list_cells(find_table(table)) if cell.label == label and cell.names["dataset"] == "svhn"]
    for one in compose_cells([cell for cell in cells_ if cell.names.get("partition") != "IID"]):
        folder = to / one.name
        folder.mkdir(parents=True)
        records.start(folder, one.config, force=False)
        row = {"round": 2, "ga": 0.8 + one.cell.seed / 1000, "ece": 0.1, "nll": 0.5, "la": 0.4, "worst10": 0.2} | final
        records.write_json(folder / records.SUMMARY, {"status": "done", "final": row})


def test_table_sets_ours_beside_the_papers(tmp_path: Path, run_script: Run) -> None:
    write_cells(tmp_path / "runs", "bfl_p_table1", "FVBA / PPA")
    text = run_script("bfl_p", "table1")
    assert "| scale" not in text
    line = line_of(text, "Non-IID", "FVBA", "PPA")
    assert line[0] == "80.20 +- 0.07"  # standard error of 80.0, 80.1, ..., 80.4
    assert line[-1] == "5"
    (row,) = [row for key, row in cells(tmp_path / "to/bfl_p_table1.csv").items() if key[-1] == "acc_percent"]
    published = read_published_rows("bfl_p", "1")["svhn", ("Non-IID", "FVBA", "PPA"), "acc_percent"][0]
    assert (float(row["paper"]), row["seeds"]) == (published, "5")
    assert float(row["difference"]) == pytest.approx(80.2 - published)
    assert (
        "- FVBWA / CF (dataset fashion_mnist, cifar10, svhn; partition Non-IID, IID; seed 0, 1, 2, 3, 4): `bfl" in text
    )


@pytest.mark.slow
def test_figure_over_the_number_of_layers(tmp_path: Path, run_script: Run) -> None:
    write_cells(tmp_path / "runs", "ba_bfl_table1", "0 / FedAVG", ece=0.3)
    write_cells(tmp_path / "runs", "ba_bfl_table1", "3 / WB", ece=0.2, la=0.61)
    text = run_script("ba_bfl", "figure3")
    assert line_of(text, "svhn", "ECE (%)", "0", "FedAVG") == ["30.0000", "0.0000", "3"]
    assert line_of(text, "svhn", "ECE (%)", "3", "WB")[0] == "20.0000"
    assert line_of(run_script("ba_bfl", "figure5"), "svhn", "average local accuracy (%)", "3", "WB")[0] == "61.0000"
    for kind, start in (("pdf", b"%PDF"), ("png", b"\x89PNG")):
        assert (tmp_path / "to" / f"ba_bfl_figure3.{kind}").read_bytes().startswith(start)


def test_equal_results_are_drawn_as_equal() -> None:
    """One line for rules that the table cannot tell apart, and no spread of one seed."""
    equal = {("FedAVG", 0): summarise([5.0]), ("EAA", 1): summarise([1.00001]), ("WB", 1): summarise([1.00002])}
    stats = equal | {("AALV", 1): summarise([1.0, 1.0]), ("RKLB", 1): summarise([2.0]), ("RKLB", 3): summarise([1.0])}
    assert find_equal(stats) == [("AALV",), ("EAA", "WB"), ("RKLB",)]
    axes = Figure().subplots()
    draw_lines(axes, stats)
    _, labels = axes.get_legend_handles_labels()
    assert labels == ["AALV", "EAA, WB", "RKLB", "FedAvg"]


def test_rounds_are_whole_along_an_axis(tmp_path: Path) -> None:
    table = find_table("fola_figure5")
    page = Page(table=table, scale="paper", entries=(), missing=(), notes=(), shortened="", to=tmp_path)
    figure = Figure()
    left, right = figure.subplots(1, 2)
    for axes, label in ((left, "round"), (right, "learning rate")):
        axes.plot([1, 2, 3], [0, 1, 2])
        axes.set(xlabel=label)
    page.save_figure(figure)
    ticks = [[float(tick).is_integer() for tick in axes.get_xticks()] for axes in (left, right)]
    assert (all(ticks[0]), all(ticks[1])) == (True, False)


def test_toy_figure_needs_no_runs(tmp_path: Path, run_script: Run) -> None:
    text = run_script("ba_bfl", "figure1")
    assert line_of(text, "RKLB")[:2] == ["1.6000", "0.4000"]  # precisions 1 and 4, weights 1/2: (0 + 4) / 2.5, 1 / 2.5
    assert line_of(text, "WB")[:2] == ["1.0000", "0.5625"]
    assert (tmp_path / "to" / "ba_bfl_figure1.pdf").exists()


def test_reading_runs_needs_no_torch() -> None:
    code = "import sys, bfl_bench.report; sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Choices, marks, LaTeX


def test_best_over_chooses_by_the_mean_and_within_the_other_keys(tmp_path: Path) -> None:
    for lr, values in (("0.1", (0.2, 0.8)), ("0.01", (0.6, 0.6))):  # the best single run is not the best mean
        for seed, ga in enumerate(values):
            write_run(tmp_path / f"{lr}-{seed}", "method=fvb", f"local.lr={lr}", seed=seed, ga=ga)
    write_run(tmp_path / "other", "method=fvb", "local.lr=0.1", "rounds=7", seed=0, ga=0.1)
    groups = report.group_over_seeds(report.find_runs([tmp_path], {})[0])
    assert len(report.best_over(groups, [])) == 3
    chosen = {group.config["rounds"]: group.config["local.lr"] for group in report.best_over(groups, ["local.lr"])}
    assert len(chosen) == 2
    assert chosen.pop(7) == 0.1
    assert set(chosen.values()) == {0.01}


def test_a_difference_is_marked_beyond_both_spreads_only() -> None:
    assert report.is_beyond(-3.1, 1.0, 2.0)
    assert not report.is_beyond(2.9, 1.0, 2.0)
    assert report.is_beyond(1.1, 1.0)
    assert not report.is_beyond(99.0, float("nan"), 0.1)  # one seed of ours: nobody knows
    assert not report.is_beyond(None, 1.0)


def test_tables_in_markdown_become_tables_in_latex() -> None:
    text = "# A & B, 10 %\n\nWords.\n\n" + report.markdown(
        ["a_b ↑", "GA (%) ↓"], [["#C=2", "**1.00 +- 0.10**"], ["x\\y", "-"]]
    )
    assert latex_of(text + "\nMore | words.\n") == (
        "% A & B, 10 %\n\\begin{tabular}{ll}\n\\toprule\na\\_b $\\uparrow$ & GA (\\%) $\\downarrow$ \\\\\n\\midrule\n"
        "\\#C=2 & \\textbf{1.00 $\\pm$ 0.10} \\\\\nx\\textbackslash{}y & - \\\\\n\\bottomrule\n\\end{tabular}\n"
    )


def test_long_headings_take_several_lines_on_a_terminal() -> None:
    head = ["method.name", "expected calibration error ↓", "negative log-likelihood ↓", "n"]
    assert wrapped(head, [["fola", "0.1000 +- 0.02 *", "1.0", "3"], ["fedavg", "-", "2.0", "12"]]) == (
        "|             | expected         |                  |    |\n"
        "|             | calibration      | negative         |    |\n"
        "| method.name | error ↓          | log-likelihood ↓ | n  |\n"
        "| ----------- | ---------------- | ---------------- | -- |\n"
        "| fola        | 0.1000 +- 0.02 * | 1.0              | 3  |\n"
        "| fedavg      | -                | 2.0              | 12 |\n"
    )
