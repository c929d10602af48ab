"""scripts/fola.py on small runs of the digits: what it reads, what it says is missing, what it draws."""

import csv
import subprocess
from pathlib import Path

import pytest

from bfl_bench.papers.tables import read_published
from tests.composing import call_script, resolve, write_run
from tests.conftest import BflRun

DIGITS = ["dataset=digits", "local.batch_size=32", "local.lr=0.05"]


def fola(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return call_script("fola", *arguments, cwd=cwd)


def cells(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_figures_10_and_11(bfl_run: BflRun, tmp_path: Path) -> None:
    small = [*DIGITS, "rounds=2", "eval.weight_rounds=[1,2]", "eval.weight_points=3"]
    assert bfl_run("-m", "experiment=fola_laplace", *small).code == 0
    for name in ("figure10", "figure11"):
        done = fola(name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / f"outputs/report/fola_{name}.png").stat().st_size > 10_000
    rows = cells(tmp_path / "outputs/report/fola_figure10.csv")
    assert len(rows) == 2 * 7  # rounds times methods
    assert "eval.keep_messages=[1]" in fola("figure10", cwd=tmp_path).stdout  # for the picture of the precision
    rows = cells(tmp_path / "outputs/report/fola_figure11.csv")
    assert [row["method"] for row in rows][:3] == ["FedAvg", "full, online", "full, offline"]
    full = next((tmp_path / "outputs").glob("*fola*/config.yaml"))
    full.unlink()  # one run less
    assert "To make them: `bfl-run -m experiment=fola_laplace`" in fola("figure11", cwd=tmp_path).stdout


@pytest.mark.slow
def test_figure_12_leads_from_step_to_step(bfl_run: BflRun, tmp_path: Path) -> None:
    """Every line that it prints makes what it says is missing."""
    assert "bfl-run -m experiment=fola_figure12" in fola("figure12", cwd=tmp_path).stderr
    small = [*DIGITS, "experiment=fola_figure12", "partition.alpha=1"]
    assert bfl_run(*small, "row=fola_figure12/full", "rounds=15").code == 0
    for step in ("AE", "LF"):
        out = fola("figure12", cwd=tmp_path).stdout
        line = next(line for line in out.splitlines() if f"no {step} at alpha 1" in line)
        command = line.partition("`bfl-run ")[2].rstrip("`").split()
        assert bfl_run(*command, *DIGITS).code == 0
    out = fola("figure12", cwd=tmp_path).stdout
    assert "no AE" not in out
    assert "no LF" not in out
    rows = cells(tmp_path / "outputs/report/fola_figure12.csv")
    assert [row["kind"] for row in rows] == ["AE"] * 9 + ["LF"] * 10
    distances = [float(row["distance"]) for row in rows if row["kind"] == "LF" and row["method"] == "FedAvg"]
    assert distances[-1] > distances[0]  # more epochs, more forgetting


@pytest.mark.slow
def test_first_round_is_paired_by_seed(tmp_path: Path) -> None:
    def make(method: str, seed: int, ga: float) -> None:
        overrides = ["experiment=mnist_mlp", f"method={method}", "rounds=1", f"seed={seed}"]
        write_run(tmp_path / "outputs", resolve(*overrides), {"round": 1, "ga": ga})

    for seed, (ours, theirs) in enumerate([(0.5, 0.4), (0.7, 0.4), (0.3, 0.4)]):
        make("fola", seed, ours)
        make("fedavg", seed, theirs)
    make("fola", 3, 0.9)  # no partner: does not count
    out = fola("figure3", cwd=tmp_path).stdout
    assert "50.00 +- 20.00 | 40.00 +- 0.00 | 10.00 +- 20.00 | 2 of 3" in " ".join(out.split())


def test_published_numbers() -> None:
    table, text = read_published("fola", "2"), read_published("fola", "text of Sec. IV-C")
    assert (len(table), len(text)) == (26, 2)
    assert table["Ours", "GA (%)"] == 48.57
    assert table["Ours", "rounds to 30 %"] == 4
    assert table["FedNova", "LA (%)"] == 10.0
    assert table["SCAFFOLD", "GA (%)"] == 20.3
    assert table["FedBE", "E"] == 20
    assert (table["FedCurv", "GA (%)"], text["FedCurv", "GA (%)"]) == (41.31, 42.16)


def test_table_2_has_best_and_last_and_the_papers_two_numbers(tmp_path: Path) -> None:
    for seed, accuracies in enumerate([(0.1, 0.35, 0.3), (0.2, 0.45, 0.4)]):
        config = resolve("experiment=fola_table2", "row=fola_table2/fedavg", f"seed={seed}")
        rows = [{"round": i + 1, "ga": ga, "la": 0.12} for i, ga in enumerate(accuracies)]
        write_run(tmp_path / "outputs", config, *rows)
    done = fola("table2", cwd=tmp_path)
    out = " ".join(done.stdout.split())
    assert "| FedAvg | 40 | 40.00 +- 7.07 | 35.00 +- 7.07 | 12.00 +- 0.00 | 1.5 | 2.0 | 2.0 (1 of 2) | 2 |" in out
    assert "42.16 (43.34 in the text) | -2.16 | 14.15 | -2.15 (!) |" in out
    assert "- Ours: `bfl-run -m experiment=fola_table2 row=fola_table2/fola`" in out
    assert "no reproduction" not in out


def make_runs(out: Path, *overrides: str, seeds: int = 1, rounds: int = 2) -> None:
    """Accuracies that grow with the round and the seed."""
    for seed in range(seeds):
        rows = [{"round": r, "ga": 0.1 * r + 0.02 * seed, "la": 0.05 * r} for r in range(1, rounds + 1)]
        write_run(out, resolve(*overrides, f"rounds={rounds}", f"seed={seed}"), *rows)


@pytest.mark.slow
def test_figures_of_searches_and_learning_curves(tmp_path: Path) -> None:
    out = tmp_path / "outputs"
    for method in ("fola", "fedavg"):
        for epochs in (1, 5):
            make_runs(out, "experiment=fola_figure3", f"method={method}", f"local.epochs={epochs}", seeds=2, rounds=1)
    for row in ("fola", "offline", "fedavg"):
        make_runs(out, "experiment=fola_figure5", f"row=fola/{row}", seeds=2)
    for row, epochs in (("fola", 1), ("fola", 20), ("fedavg", 1), ("fedcurv_100", 1)):
        make_runs(out, "experiment=fola_figure6", f"row=fola/{row}", f"local.epochs={epochs}")
    make_runs(out, "experiment=fola_figure9", "row=fola/average")
    for number in (2, 3, 4, 5, 6, 8, 9):
        where = ["--where", "local.epochs=20"] if number == 9 else []
        done = fola(f"figure{number}", *where, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (out / f"report/fola_figure{number}.png").stat().st_size > 10_000
        assert (out / f"report/fola_figure{number}.tex").read_text().startswith("% FOLA")
    assert [row["variant"] for row in cells(out / "report/fola_figure5.csv")] == ["FOLA", "offline, no prior", "FedAvg"]
    assert cells(out / "report/fola_figure5.csv")[0]["last GA (%)"] == "21.00 +- 1.41"
    assert len(cells(out / "report/fola_figure6.csv")) == 4
    assert {row["method"] for row in cells(out / "report/fola_figure8.csv")} == {
        "FOLA",
        "FedAvg",
        "FedCurv, lambda 100",
    }
    assert [row["variant"] for row in cells(out / "report/fola_figure9.csv")] == ["FOLA", "prior, plain average"]
    twice = fola("figure9", cwd=tmp_path)  # E = 1 and E = 20 would be one curve
    assert "choose with --where" in twice.stderr
    assert fola("figure9", "--best-over", "local.epochs", cwd=tmp_path).returncode == 0


def test_figure_12_finds_the_posterior_that_runs_refer_to(tmp_path: Path) -> None:
    """Whatever its folder is called by now; a run with the posterior of another one is no point."""
    runs = Path("outputs")
    setting = ["experiment=fola_figure12", "row=fola_figure12/full", "partition.alpha=0.1"]
    optimum = write_run(tmp_path / runs, resolve(*setting, "rounds=15"), {"round": 15, "ga": 0.9})
    other = write_run(tmp_path / "other", resolve(*setting, "rounds=16"), {"round": 16, "ga": 0.9})
    for path, distance in ((optimum, 0.25), (other, 0.5)):
        config = resolve(*setting, f"reference_posterior={path}", "rounds=3", "local.epochs=5")
        write_run(tmp_path / runs, config, {"round": 3, "ga": 0.8, "ae": distance})
    config = resolve(*setting, f"reference_posterior={optimum}", f"start_from={optimum}", "rounds=1", "local.epochs=2")
    write_run(tmp_path / runs, config, {"round": 1, "la": 0.7, "ga": 0.8, "lf": 0.125})
    optimum.rename(tmp_path / runs / "optimum")
    done = fola("figure12", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "To make it" not in done.stdout
    found = [
        (row["kind"], row["epochs"], row["distance"]) for row in cells(tmp_path / "outputs/report/fola_figure12.csv")
    ]
    assert found == [("AE", "5", "0.25"), ("LF", "2", "0.125")]


@pytest.mark.parametrize("command", ["figure12", pytest.param("figure10", marks=pytest.mark.slow)])
def test_without_runs_it_says_what_to_run(command: str, tmp_path: Path) -> None:
    done = fola(command, "--runs", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert "bfl-run" in done.stderr
    assert "Traceback" not in done.stderr
