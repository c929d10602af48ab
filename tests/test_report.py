"""Tables and figures out of run folders: what is averaged, what is kept apart, what is said about the rest."""

import csv
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bfl_bench import records, report
from bfl_bench.build import plan
from bfl_bench.identity import complete
from bfl_bench.papers import ba_bfl, bfl_p, tables
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
    def call(script: ModuleType, *arguments: str) -> str:
        where = ["--runs", str(tmp_path / "runs"), "--to", str(tmp_path / "to")]
        monkeypatch.setattr(sys, "argv", ["script", arguments[0], *where, *arguments[1:]])
        report.run_script("", script.COMMANDS)
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
    table1, table4 = bfl_p.PAPER.published("1"), bfl_p.PAPER.published("4")
    assert (len(table1), len(table4)) == (2 * 12 * 3 * 3, 5 * 3)
    assert table1["fashion_mnist", ("IID", "FED", "N/A"), "acc_percent"] == (89.62, 0.15)
    assert table1["svhn", ("IID", "FVBA", "PPA"), "ece_percent"] == (4.29, 0.11)
    assert table1["cifar10", ("IID", "FVBWA", "CF"), "nll"] == (0.83, 0.01)
    assert table1["cifar10", ("Non-IID", "FVBA", "EAA"), "acc_percent"] == (61.48, 0.33)
    assert table1["fashion_mnist", ("Non-IID", "FVBWA", "AALV"), "ece_percent"] == (6.78, 0.14)
    assert table1["svhn", ("Non-IID", "FVBWA", "CF"), "nll"] == (0.64, 0.02)
    assert table4["fashion_mnist", ("Non-IID", "FVBWA", "EAA"), "std_norm"] == (15.48, 0.41)
    assert table4["svhn", ("Non-IID", "FVBWA", "PPA"), "std_norm"] == (31.62, 0.38)
    table3, large, table5 = (bfl_p.LARGE.published(table) for table in ("3", "4_100", "5"))
    assert (len(table3), len(large), len(table5)) == (2 * 12 * 3 * 3, 5 * 3, 12 * 3)
    assert table3["svhn", ("Non-IID", "FVBA", "PPA"), "acc_percent"] == (18.28, 0.81)
    assert table3["fashion_mnist", ("Non-IID", "FVBWA", "EAA"), "acc_percent"] == (79.61, 1.06)
    assert large["cifar10", ("Non-IID", "FVBWA", "EAA"), "std_norm"] == (91.79, 1.16)
    assert table5["cifar10", ("IID", "FVBWA", "CF"), "seconds_per_round, 10 processes"] == (10.56, 0.08)
    ba_table1 = ba_bfl.PAPER.published("1")
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


def test_one_table_holds_one_partition(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "method=fvb", "aggregator=eaa", "partition.alpha=0.1")
    write_run(tmp_path / "b", "method=fvb", "aggregator=gaa", "partition.alpha=0.5")
    with pytest.raises(report.ReportError, match=r"partition.alpha=0.1.*partition.alpha=0.5.*--where"):
        tables.find_settings(bfl_p.PAPER, report.find_runs([tmp_path], {})[0])


# Tables


def test_table_sets_ours_beside_the_papers(tmp_path: Path, run_script: Run) -> None:
    for seed in range(5):
        write_run(tmp_path / "runs" / f"{seed}", "experiment=bfl_p", "aggregator=eaa", seed=seed, ga=0.88 + seed / 1000)
    text = run_script(bfl_p, "table1")
    assert "runs by the paper's equations" in text
    assert "Not the setting" not in text
    assert line_of(text, "Non-IID", "FVBWA", "EAA")[:3] == ["88.20 +- 0.07", "88.30 +- 0.32", "-0.10"]
    assert line_of(text, "Non-IID", "FVBWA", "EAA")[-1] == "5"
    assert line_of(text, "Non-IID", "FVBWA", "GAA")[:3] == ["-", "88.39 +- 0.26", "-"]
    lines = [line.split() for line in text.splitlines() if line.startswith("    bfl-run")]
    assert len(lines) == 8
    assert "aggregator=gaa,aalv,ppa,cf" in lines[-1]  # EAA has all its seeds
    row = cells(tmp_path / "to" / "bfl_p_table1_equations.csv")[
        "fashion_mnist", "Non-IID", "FVBWA", "EAA", "acc_percent"
    ]
    assert (float(row["difference"]), row["seeds"], row["paper"]) == (pytest.approx(-0.1), "5", "88.3")


def test_released_and_equations_are_two_tables(tmp_path: Path, run_script: Run) -> None:
    write_run(tmp_path / "runs" / "a", "experiment=bfl_p", "aggregator=cf", std_norm=1.5)
    write_run(tmp_path / "runs" / "b", "experiment=bfl_p_released", "aggregator=cf_released", std_norm=1.25)
    write_run(tmp_path / "runs" / "c", "experiment=bfl_p_released", "aggregator=cf", std_norm=9)  # neither
    text = run_script(bfl_p, "table4")
    equations, released = text.split("# BFL-P, table 4: runs by the released code")
    assert line_of(equations, "Non-IID", "FVBWA", "CF") == ["1.50", "1.40 +- 0.02", "+0.10", "1"]
    assert line_of(released, "Non-IID", "FVBWA", "CF") == ["1.25", "1.40 +- 0.02", "-0.15", "1"]


def test_a_setting_that_is_not_the_papers_says_so(tmp_path: Path, run_script: Run) -> None:
    changed = ["rounds=2", "method.beta=0.5", "model.bayesian_layers=2"]
    write_run(tmp_path / "runs" / "a", "experiment=ba_bfl", "aggregator=wb", *changed)
    text = run_script(ba_bfl, "table1")
    assert "no reproduction of it: rounds=2 method.beta=0.5\n" in text
    sweeps = [line for line in text.splitlines() if line.startswith("    bfl-run")]
    assert len(sweeps) == 4
    assert all(" rounds=2 " in line for line in sweeps)


@pytest.mark.parametrize(
    ("paper", "released", "row", "rule"),
    [
        (bfl_p.PAPER, False, ("IID", "FED", "N/A"), "none"),
        (bfl_p.PAPER, True, ("IID", "FVBWA", "PPA"), "ppa_released"),
        (bfl_p.PAPER, True, ("Non-IID", "FVBA", "AALV"), "aalv"),
        (ba_bfl.PAPER, False, ("Non-IID", "0", "FedAVG"), "none"),
        (ba_bfl.PAPER, True, ("Non-IID", "2", "GAA"), "gaa_normalised"),
    ],
)
def test_printed_commands_make_the_papers_rows(paper: tables.Paper, released: bool, row: tables.Row, rule: str) -> None:
    (line,) = tables.sweep_lines(paper, released, "cifar10", [row], {})
    *overrides, seeds = shlex.split(line)[2:]
    plan(composed(*overrides))  # a wrong key or combination raises
    config = report.flatten(complete(composed(*overrides)))
    assert config["aggregator.name"] == rule
    assert seeds.startswith("seed=0,1,2")
    assert tables.is_released(config) == released
    assert paper.row_of(config) == row
    assert tables.changes(paper, [report.Group(config, ())]) == {}


# Figures


@pytest.mark.slow
def test_figures_over_the_number_of_layers(tmp_path: Path, run_script: Run) -> None:
    for seed, ece in enumerate((0.10, 0.12)):
        runs = tmp_path / "runs" / f"{seed}"
        write_run(runs / "0", "method=fedavg", "model.bayesian_layers=0", seed=seed, ece=ece + 0.1)
        for layers in (1, 3):
            chosen = ["method=fvb", "aggregator=wb", f"model.bayesian_layers={layers}"]
            write_run(runs / f"{layers}", *chosen, seed=seed, ece=ece, la=0.5 + ece)
    text = run_script(ba_bfl, "figure3")
    assert line_of(text, "fashion_mnist", "ECE (%)", "0", "FedAVG") == ["21.0000", "1.0000", "2"]
    assert line_of(text, "fashion_mnist", "ECE (%)", "3", "WB") == ["11.0000", "1.0000", "2"]
    assert line_of(run_script(ba_bfl, "figure4"), "fashion_mnist", "seconds per round", "1", "WB")[0] == "5.0000"
    assert (
        line_of(run_script(ba_bfl, "figure5"), "fashion_mnist", "average local accuracy (%)", "1", "WB")[0] == "61.0000"
    )
    for name in ("figure3", "figure4", "figure5"):
        for kind, start in (("pdf", b"%PDF"), ("png", b"\x89PNG")):
            assert (tmp_path / "to" / f"ba_bfl_{name}_equations.{kind}").read_bytes().startswith(start)


def test_partition_figure_is_the_first_runs(tmp_path: Path, run_script: Run) -> None:
    for seed in (1, 0):
        chosen = ["method=fvb", "aggregator=wb", "model.bayesian_layers=1"]
        write_run(tmp_path / "runs" / f"{9 - seed}", *chosen, seed=seed)
        counts = records.Table(
            tmp_path / "runs" / f"{9 - seed}" / records.PARTITION_COUNTS, ["client", "class", "count"]
        )
        counts.append([{"client": 0, "class": 1, "count": 7 + seed}, {"client": 2, "class": 0, "count": 30}])
    text = run_script(ba_bfl, "figure2")
    assert "fashion_mnist, Dirichlet 0.5, seed 0" in text
    assert line_of(text, "0") == ["0", "0", "30"]
    assert line_of(text, "1") == ["7", "0", "0"]
    assert (tmp_path / "to" / "ba_bfl_figure2.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_other_papers_are_no_rows(tmp_path: Path, run_script: Run) -> None:
    """One round, as in FedLPA, or another alpha, as in FOLA, beside a run of the paper's."""
    ours = ["method=fvb", "aggregator=wb", "model.bayesian_layers=1"]
    write_run(tmp_path / "runs" / "its", *ours, ece=0.1)
    write_run(tmp_path / "runs" / "fedlpa", "method=fedavg", "partition=niid_bench", "partition.alpha=0.1", "rounds=1")
    write_run(tmp_path / "runs" / "fola", "method=fedavg", "partition.alpha=0.01")
    write_run(tmp_path / "runs" / "several", "method=fedavg", "dataset=mnist")  # FedLPA's Fig. 2
    text = run_script(ba_bfl, "figure3")
    assert line_of(text, "fashion_mnist", "ECE (%)", "1", "WB")[0] == "10.0000"
    assert "FedAVG" not in text
    text = run_script(bfl_p, "table1", "--dataset", "fashion_mnist")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "| FEDAVG" in line]
    assert rows
    assert all(row[4] == "-" for row in rows)  # the accuracy


def test_toy_figure_needs_no_runs(tmp_path: Path, run_script: Run) -> None:
    text = run_script(ba_bfl, "figure1")
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


def test_a_table_says_what_the_scale_changed() -> None:
    config = {"rounds": 5, "local.epochs": 1, "dataset.autoaugment": False, "dataset.flip": True}
    config |= {"dataset.crop_padding": 4, "dataset.cutout": 16}
    text = tables.describe_scale("fola_table2", [config])
    assert "rounds 5 (paper: 100); dataset.autoaugment false (paper: true)." in text
    assert "epochs" not in text  # each row of the table has its own
    assert tables.describe_scale("fola_table2", [config | {"rounds": 100, "dataset.autoaugment": True}]) == ""


def test_rows_of_a_scale_may_change_the_setting_too() -> None:
    config = {"rounds": 250, "local.epochs": 20, "server.lr": 0.8, "dataset.name": "femnist", "dataset.mean": [1]}
    for experiment in ("virtual_table2", "virtual_figure3"):  # the second takes all from the first
        text = tables.describe_scale(experiment, [config, {"dataset.name": "har", "rounds": 60}])
        assert "rounds 60 (paper: 250 or 23 or 30); dataset.mean [1] (paper: [0])." in text
    assert "rounds" not in tables.describe_scale("virtual_table2", [{"dataset.name": "har", "rounds": 30}])
