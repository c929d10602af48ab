"""scripts/fola.py on written runs: what it reads, what it says is missing, what it draws."""

import csv
import json
import shlex
import subprocess
from pathlib import Path

import pytest

from bfl_bench.commands.cells import compose_cells
from bfl_bench.papers.spec import find_table, list_cells
from bfl_bench.papers.tables import read_published
from tests.composing import call_script, write_run
from tests.conftest import BflRun


def fola(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return call_script("fola", *arguments, cwd=cwd)


def cells(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def make_runs(out: Path, table: str) -> None:
    """All runs of a table at scale cpu; accuracies grow with the round and the seed."""
    for one in compose_cells(list_cells(find_table(table), "cpu")):
        rows = [{"round": r, "ga": 0.1 * r + 0.02 * one.cell.seed, "la": 0.05 * r} for r in (1, 2)]
        write_run(out, one.config, *rows)


@pytest.mark.slow
def test_first_round_is_paired_by_seed(tmp_path: Path) -> None:
    accuracies = {"Ours": (0.5, 0.7, 0.3, 0.9), "FedAvg": (0.4, 0.4, 0.4)}  # the last seed has no partner
    chosen = {"num_clients": "10", "local.lr": "0.1", "local.epochs": "5"}
    for cell in list_cells(find_table("fola_figure3"), "cpu"):
        if chosen.items() <= cell.names.items() and cell.seed < len(accuracies[cell.label]):
            (one,) = compose_cells([cell])
            write_run(tmp_path / "outputs", one.config, {"round": 1, "ga": accuracies[cell.label][cell.seed]})
    out = fola("figure3", cwd=tmp_path).stdout
    assert "50.00 +- 20.00 | 40.00 +- 0.00 | 10.00 +- 20.00 | 2 of 3" in " ".join(out.split())
    (row,) = cells(tmp_path / "outputs/report/fola_figure3_cpu.csv")
    assert (float(row["FOLA mean"]), row["FOLA n"]) == (pytest.approx(50), "3")


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, 4, 5, 6, "6c", 7, 8, 9])
def test_figures_of_searches_and_learning_curves(number: int | str, tmp_path: Path) -> None:
    make_runs(tmp_path / "outputs", f"fola_figure{number}")
    done = fola(f"figure{number}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs/report"
    assert (folder / f"fola_figure{number}_cpu.png").stat().st_size > 10_000
    assert (folder / f"fola_figure{number}_cpu.tex").read_text().startswith("% FOLA")
    rows = cells(folder / f"fola_figure{number}_cpu.csv")
    if number == 9:
        variants = {"FOLA": "100", "online, no prior": "-", "offline, no prior": "-", "prior, plain average": "100"}
        assert [(row["variant"], row["lambda"]) for row in rows] == list(variants.items())
        assert float(rows[0]["last GA (%) mean"]) == pytest.approx(20)
    if number == 6:
        found = {(row["method"], row["lambda"]) for row in rows}
        curv, fola_ = {("FedCurv", x) for x in ("1", "100")}, {("FOLA", x) for x in ("0", "100", "1000")}
        assert found == curv | fola_ | {("FedAvg", "-")}


def test_digits_show_the_rule_on_the_same_replies(tmp_path: Path) -> None:
    for one in compose_cells([cell for cell in list_cells(find_table("fola_digits")) if cell.seed == 0]):
        folder = write_run(tmp_path / "outputs", one.config, {"round": 10, "ga": 0.5, "la": 0.25, "train_loss": 0.125})
        if one.cell.label.startswith("gamma"):
            summary = json.loads((folder / "summary.json").read_text())
            summary["final"] |= {"ga@rklb": 0.75, "prior_loss": 0.001}
            (folder / "summary.json").write_text(json.dumps(summary))
    done = fola("digits", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = " ".join(done.stdout.split())
    assert "| gamma 1e-4 | 1 | 0.0001 | 50.00 | 25.00 | 75.00 | 1.0e-03 | 0.125 | 1 |" in out
    assert "| FedCurv, released code | 100 (without gradient) | - | 50.00 | 25.00 | - | - | 0.125 | 1 |" in out


def test_published_numbers() -> None:
    table, text = read_published("fola", "2"), read_published("fola", "text of Sec. IV-C")
    assert (len(table), len(text)) == (26, 2)
    assert table["Ours", "GA (%)"] == 48.57
    assert table["Ours", "rounds to 30 %"] == 4
    assert table["FedNova", "LA (%)"] == 10.0
    assert table["SCAFFOLD", "GA (%)"] == 20.3
    assert table["FedBE", "E"] == 20
    assert (table["FedCurv", "GA (%)"], text["FedCurv", "GA (%)"]) == (41.31, 42.16)


@pytest.mark.parametrize("command", ["figure12", pytest.param("figure10", marks=pytest.mark.slow)])
def test_without_runs_it_says_what_to_run(command: str, tmp_path: Path) -> None:
    done = fola(command, "--runs", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert "bfl-paper run fola_" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_figures_10_and_11_of_small_runs(bfl_run: BflRun, tmp_path: Path) -> None:
    """From the sweep to the picture, on random stand-in data; a sweep of weights in both rounds."""
    assert bfl_run("-m", "experiment=fola_laplace", "scale=smoke").code == 0
    for name in ("figure10", "figure11"):
        done = fola(name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / f"outputs/report/fola_{name}_smoke.png").stat().st_size > 10_000
    methods = ["FedAvg", "diagonal, online", "diagonal, offline"]
    rows = cells(tmp_path / "outputs/report/fola_figure10_smoke.csv")
    assert [(row["round"], row["method"]) for row in rows] == [(r, method) for r in "12" for method in methods]
    assert all(float(row["mean GA"]) <= float(row["best GA"]) <= 100 for row in rows)
    rows = cells(tmp_path / "outputs/report/fola_figure11_smoke.csv")
    assert [row["method"] for row in rows] == methods
    assert [row["last cosine"] != "" for row in rows] == [False, True, True]
    next((tmp_path / "outputs").glob("*fedavg*/config.yaml")).unlink()  # one run less
    assert "- FedAvg (seed 0): `bfl-paper run fola_laplace scale=smoke" in fola("laplace", cwd=tmp_path).stdout


@pytest.mark.slow
def test_figure_12_of_small_runs(bfl_run: BflRun, tmp_path: Path) -> None:
    """The known posterior, what is measured against it, and a client that forgets it; each step named where missing."""
    assert "bfl-paper run fola_figure12" in fola("figure12", cwd=tmp_path).stderr
    assert bfl_run("-m", "experiment=fola_figure12", "scale=smoke", "cell=known").code == 0
    missing = fola("figure12", cwd=tmp_path).stdout
    for step in ("AE diagonal", "LF FedAvg"):
        line = next(line for line in missing.splitlines() if line.startswith(f"- {step}"))
        command = shlex.split(line.partition("`bfl-paper run ")[2].rstrip("`"))
        assert bfl_run("-m", f"experiment={command[0]}", *command[1:]).code == 0
    done = fola("figure12", cwd=tmp_path)
    assert "No run of" not in done.stdout
    rows = cells(tmp_path / "outputs/report/fola_figure12_smoke.csv")
    assert [(row["kind"], row["method"]) for row in rows] == [("AE", "diagonal"), ("LF", "FedAvg")]
    assert all(float(row["distance"]) > 0 for row in rows)
    assert (tmp_path / "outputs/report/fola_figure12_smoke.png").stat().st_size > 10_000
