"""Papers' tables: cell -> overrides -> config -> identity -> folder, and never the other way round."""

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bfl_bench import records
from bfl_bench.commands import paper
from bfl_bench.commands.cells import compose_cells, expand_table, sweep_points
from bfl_bench.commands.words import CommandLine
from bfl_bench.errors import ConfigError
from bfl_bench.identity import STAND_IN_PREFIX, folder_name
from bfl_bench.papers.pages import add_last_row
from bfl_bench.papers.spec import Cell, find_table, list_cells, override, read_paper, read_tables, split_names
from bfl_bench.records import CONFIG, METRICS, SUMMARY, TIMING, TIMING_COLUMNS, config_folder, reference_folder
from bfl_bench.report.archive import SUFFIX, list_archived
from tests.composing import call_script, resolve, write_run

FOLA_LAPLACE = reference_folder() / "fola_laplace.tar.xz"
STORED = [line.split(" ", 2) for line in (Path(__file__).parent / "identities.txt").read_text().splitlines()]
"""The names that cells had before papers were files: of cpu all, of the other scales a number and a digest."""

# What became another cell. Fig. 12 and FedLPA's Fig. 2 have all their steps as cells; a run of Sec. IV-E keeps its
# messages; the shipped runs of Fig. 3 evaluate local models; FOLA's cells on CIFAR-10 split per class and name lambda.
CHANGED = {"fola_figure12", "fedlpa_figure2", "fola_laplace"}
CHANGED |= {"fola_table2", "fola_figure6", "fola_figure7", "fola_figure8", "fola_figure9"}
CHANGED_ON_TWO_CORES = {*CHANGED, "fola_figure3"}


def name_cells(cells: list[Cell]) -> list[str]:
    """Without the word that runs on stand-in data have before their names since."""
    return [
        one.name.removeprefix(STAND_IN_PREFIX)
        + (f" workers {workers}" if (workers := one.cell.values.get("engine.workers")) else "")
        for one in compose_cells(cells)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in STORED))
def test_cells_on_two_cores_are_what_they_were(name: str) -> None:
    cells = list_cells(read_tables()[name], "cpu")
    before = {rest for table, scale, rest in STORED if (table, scale) == (name, "cpu")}
    papers = [cell for cell in cells if not cell.own]
    if name not in CHANGED_ON_TWO_CORES:
        assert set(name_cells(papers)) | set(name_cells(cells)) >= before
        assert len(papers) == len(set(name_cells(papers)) & before)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale", "rest"), [entry for entry in STORED if entry[1] != "cpu"])
def test_cells_are_what_they_were(name: str, scale: str, rest: str) -> None:
    num, digest = rest.split()
    cells = list_cells(read_tables()[name], scale)
    if name == "fola_figure3":  # of 30 seeds the first and the last
        cells = [cell for cell in cells if cell.seed in (0, 29)]
    if name not in CHANGED:
        names = name_cells(cells)
        assert len(names) == int(num)
        assert hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest() == digest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fola_table2", "fedlpa_table5", "virtual_figure4", "fola_figure12"])
def test_values_set_in_copies_are_those_that_hydra_composes(name: str) -> None:
    for one in compose_cells(list_cells(read_tables()[name], "cpu")[-3:]):
        starts = [override(key, one.config[key]) for key in one.cell.starts]
        assert folder_name(resolve(*one.cell.overrides(), *starts)) == one.name


def test_a_value_that_names_rules_is_filled_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cell, *_) = [cell for cell in list_cells(find_table("fola_digits")) if cell.label == "gamma 1e-4"]
    (one,) = compose_cells([cell])
    assert one.name == folder_name(resolve(*cell.overrides()))
    assert one.config["eval"]["also_aggregate"]["rklb"]["name"] == "rklb"
    write_run(tmp_path, one.config, {"round": 1, "ga": 0.5, "la": 0.5})
    write_run(tmp_path, resolve("rounds=10", "seed=1"), {"round": 1, "ga": 0.5, "la": 0.5})  # without other rules
    assert show("fola_digits", runs=tmp_path, to=tmp_path / "to") == 0
    assert "| gamma 1e-4 | 1 " in " ".join(capsys.readouterr().out.split())


def test_a_cell_names_the_cell_that_it_begins_with() -> None:
    cells = list_cells(find_table("fola_figure12"), "cpu")
    forgetting = [cell for cell in cells if cell.label.startswith("LF")]
    assert len(forgetting) == 2 * 5 * 2
    for cell in forgetting:
        assert cell.starts["start_from"] is cell.starts["reference_posterior"]
        assert cell.starts["start_from"].label == "known"
        assert cell.starts["start_from"].names["partition.alpha"] == cell.names["partition.alpha"]
    several = [cell for cell in list_cells(find_table("fedlpa_figure2")) if "then" in cell.label]
    assert [cell.starts["start_from"].seed for cell in several] == [cell.seed for cell in several] == [0, 1, 2]
    (composed, start) = compose_cells([several[1], several[1].starts["start_from"]])
    assert composed.config["start_from"] == f"outputs/{start.name}"


def sweep(*words: str) -> list[list[str]]:
    """The points that bfl-run -m makes of these words."""
    line = expand_table(CommandLine({"--multirun": ""}, list(words)))
    given = dict(word.lstrip("+").partition("=")[::2] for word in line.overrides if "hydra.sweeper." in word)
    names = {key.removeprefix("hydra.sweeper.names."): v.strip("'") for key, v in given.items() if ".names." in key}
    rest = [word for word in line.overrides if "hydra.sweeper." not in word]
    return sweep_points(given["hydra.sweeper.table"], given["hydra.sweeper.scale"], names, [rest])


def test_a_sweep_is_the_cells_and_words_choose_among_them() -> None:
    assert len(sweep("experiment=fola_table2", "scale=cpu")) == 3 * 14
    assert len(sweep("experiment=fola_table2", "scale=cpu", "seed=7")) == 14
    some = ["experiment=virtual_table2", "cell=FedProx", "federation=FEMNIST, mlp,HAR, mlp", "local.lr=0.1"]
    points = sweep(*some)
    assert len(points) == 2 * 6 * 4  # of five learning rates one, six of the server, four values of mu
    assert all("local.lr=0.1" in point and "method=fedprox" in point for point in points)
    with pytest.raises(ConfigError, match="cell: got 'FedProxx', allowed: FedAvg; FedProx; Virtual"):
        sweep("experiment=virtual_table2", "cell=FedProxx")
    starts = [word for point in sweep("experiment=fedlpa_figure2", "scale=cpu", "out=there") for word in point]
    found = sorted(word.rpartition("_")[0] for word in starts if word.startswith("start_from="))
    names = [f"start_from=there/mnist_niid_bench-0.5_fedlpa_released_seed{seed}" for seed in (0, 0, 1, 2)]
    assert found == names  # of seed 0 by gradient descent and by conjugate gradients


def test_names_with_commas_are_taken_apart() -> None:
    there = ["FEMNIST, mlp", "FEMNIST, conv", "HAR", "FEMNIST"]
    assert split_names("FEMNIST, mlp,HAR,FEMNIST, conv", there) == ["FEMNIST, mlp", "HAR", "FEMNIST, conv"]
    assert split_names("FEMNIST,HAR", there) == ["FEMNIST", "HAR"]
    assert split_names("FEMNIST,HARR", there) is None


def test_a_table_of_a_paper_in_ten_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BA-BFL's IVON rows: cells as in the paper and shortened, beside the numbers of the authors' notebook."""
    lines = (config_folder() / "paper" / "ba_bfl.yaml").read_text().partition("\nivon:\n")[2].splitlines()
    assert len([line for line in lines if line.startswith("  ")]) == len(lines) <= 10
    table = find_table("ba_bfl_ivon")
    assert (len(list_cells(table)), len(list_cells(table, "cpu"))) == (3 * 3 * 3, 3)
    composed = compose_cells(list_cells(table))
    assert len({one.name for one in composed}) == 27
    for one in composed:
        config, dataset = one.config, one.cell.names["dataset"]
        assert (config["rounds"], config["local"]["epochs"], config["local"]["lr"]) == (50, 50, 0.1)
        assert config["method"]["h0"] == {"fashion_mnist": 5, "svhn": 2, "cifar10": 1}[dataset]
        assert (config["method"]["start"], config["method"]["cosine_steps"]) == ("fixed", 50)
    for one in composed[:3]:  # Fashion-MNIST with EAA
        write_run(tmp_path, one.config, {"round": 50, "ga": 0.88 + one.cell.seed / 1000})
    assert show("ba_bfl_ivon", runs=tmp_path, to=tmp_path / "to") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "| Non-IID | IVON | EAA | 88.10 +- 0.08 | 88.13 | -0.03 | 3 |" in out
    assert "IVON / RKLB (dataset fashion_mnist, svhn, cifar10; seed 0, 1, 2)" in out


def test_a_misspelt_key_of_a_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ba_bfl.yaml").write_text("a: {title: x, celss: [], scales: {}}\n")
    with pytest.raises(ConfigError, match=r"ba_bfl.yaml: a: got 'celss', allowed: cells, "):
        read_paper(tmp_path / "ba_bfl.yaml")


# Showing


def show(*words: str, runs: Path, to: Path) -> int:
    return paper.main(["show", *words, "--runs", str(runs), "--to", str(to)])


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_table_2_of_fola(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, accuracies in enumerate([(0.1, 0.35, 0.3), (0.2, 0.45, 0.4)]):
        config = resolve("experiment=fola_table2", "cell=FedAvg", "scale=cpu", f"seed={seed}")
        rows = [{"round": i + 1, "ga": ga, "la": 0.12} for i, ga in enumerate(accuracies)]
        write_run(tmp_path, config, *rows)
    assert show("fola_table2", "scale=cpu", runs=tmp_path, to=tmp_path / "to") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "| FedAvg | - | 1 | 40.00 +- 7.07 | 35.00 +- 7.07 | 12.00 +- 0.00 | 1.5 | 2.0 | 2.0 (1 of 2) | 2 | 40 |" in out
    )
    assert "42.16 (43.34 in the text) | -2.16 | 14.15 | -2.15 (!) |" in out
    shortened = "| scale cpu: rounds 5 (paper: 100); local.epochs 1 (paper: 20 or 40 or 10 or 1); dataset.crop_padding"
    assert shortened in out
    assert "3 seeds (ours at full length: 1)" in out
    ours = "- Ours, lambda 100 (seed 0, 1, 2): `bfl-paper run fola_table2 scale=cpu 'cell=Ours, lambda 100' seed=0,1,2`"
    assert ours in out
    assert "- FedAvg (seed 2): `bfl-paper run fola_table2 scale=cpu cell=FedAvg seed=2`" in out
    (row,) = read_csv(tmp_path / "to/fola_table2_cpu.csv")
    assert (float(row["best GA (%) mean"]), row["best GA (%) n"], row["paper's GA (%)"]) == (40.0, "2", "42.16")
    assert float(row["best GA (%) std"]) == pytest.approx(50**0.5)
    assert row["scale"].startswith("cpu: rounds 5 (paper: 100)")
    assert "scale cpu: rounds 5 (paper: 100)" in (tmp_path / "to/fola_table2_cpu.tex").read_text()


def test_validation_examples_choose_lambda_and_not_the_test_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of lambda 0 only one seed is there: that one decides, and all seeds of the chosen one are shown."""
    validation = {("0", 0): 0.5, ("1", 0): 0.3, ("1", 1): 0.9, ("100", 0): 0.6, ("100", 1): 0.1}
    for (strength, seed), accuracy in validation.items():
        words = ["experiment=fola_table2", f"cell=Ours, lambda {strength}", "scale=cpu", f"seed={seed}"]
        folder = write_run(tmp_path, resolve(*words), {"round": 1, "ga": 1 - accuracy, "la": 0.1})
        summary = json.loads((folder / "summary.json").read_text())
        summary["final"]["validation_ga"] = accuracy
        (folder / "summary.json").write_text(json.dumps(summary))
    assert show("fola_table2", "scale=cpu", runs=tmp_path, to=tmp_path / "to") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "| Ours | 100 | 1 | 65.00 +- 35.36 |" in out
    assert "mean over seeds 0 (0: 50.00 %, 1: 30.00 %, 100: 60.00 %)." in out
    (row,) = read_csv(tmp_path / "to/fola_table2_cpu.csv")
    assert (row["method"], row["lambda"], row["paper's GA (%)"]) == ("Ours", "100", "48.57")


ODD = [  # what an audit made scripts print beside published numbers; the names of stand-in data are of that time
    (
        "fedlpa_table5",
        [
            "dataset=mnist",
            "data_dir=made-up",
            "model=softmax",
            "local.lr=0.001",
            "local.epochs=10",
            "rounds=1",
            "method=fedavg",
            "partition=niid_bench",
            "partition.alpha=0.1",
        ],
    ),
    ("fedlpa_table5", ["experiment=fedlpa_released", "local.epochs=10", "model=softmax", "local.lr=0.001"]),
    ("fedlpa_table5", ["experiment=fedlpa_released", "local.epochs=10", "method=dense_fedlpa", "method.epochs=20"]),
    ("fola_table2", ["experiment=fola_table2", "cell=Ours, lambda 1", "model=lenet", "local.lr=0.5"]),
    ("fola_table2", ["experiment=fola_table2", "cell=Ours, lambda 1", "local.lr=0.5"]),
    ("fola_table2", ["experiment=fola_table2", "cell=Ours, lambda 1", "data_dir=stand-in"]),
    (
        "fola_table2",
        ["experiment=fola_table2", "cell=Ours, lambda 1", "model=lenet", "local.lr=0.5", "data_dir=made-up"],
    ),
    ("virtual_table2", ["experiment=virtual", "local.lr=0.5"]),
    (
        "virtual_table2",
        [
            "experiment=virtual_table2",
            "cell=FedAvg",
            "federation=FEMNIST, mlp",
            "local.lr=0.03",
            "server.lr=0.8",
            "data_dir=made-up",
        ],
    ),
    ("ba_bfl_table1", ["experiment=bfl_p_released", "method=fedavg"]),
    ("bfl_p_table1", ["experiment=ba_bfl_released", "aggregator=wb"]),
    ("fola_figure9", ["experiment=fola_table2", "cell=Ours, lambda 1"]),
]


QUICK = ("fola_table2", "fola_figure9")  # tables with few cells to compose


@pytest.mark.parametrize(
    ("name", "overrides"),
    [odd if odd[0] in QUICK else pytest.param(*odd, marks=pytest.mark.slow) for odd in ODD],
)
def test_a_run_that_is_no_cells_is_in_no_table_but_near(
    name: str, overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row: dict[str, Any] = {"round": 1, "ga": 0.16, "la": 0.1, "s_acc": 1.0, "mt_acc": 1.0, "ece": 0.1, "nll": 1.0}
    write_run(tmp_path, resolve(*overrides), row)
    for scale in ("paper", "cpu"):
        assert show(name, f"scale={scale}", runs=tmp_path, to=tmp_path / "to") == 1
        err = capsys.readouterr().err
        assert f"no finished run of {name} there" in err
        assert f"    bfl-paper run {name}{'' if scale == 'paper' else ' scale=cpu'}\n" in err
    assert not (tmp_path / "to").exists()
    script, _, table = name.partition("_") if not name.startswith(("ba_bfl", "bfl_p")) else (name[:-7], "", name[-6:])
    done = call_script(script.rstrip("_"), table, "--runs", str(tmp_path), cwd=tmp_path)
    assert (done.returncode, "no finished run" in done.stderr) == (1, True)


def test_near_runs_are_listed_with_their_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(
        tmp_path, resolve("experiment=fola_table2", "cell=Ours, lambda 1", "local.lr=0.5"), {"round": 1, "ga": 0.5}
    )
    write_run(tmp_path, resolve("experiment=fola_table2", "cell=FedAvg"), {"round": 1, "ga": 0.5, "la": 0.1})
    assert show("fola_table2", "--near", runs=tmp_path, to=tmp_path / "to") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "local.lr" in line]
    assert line.endswith(": local.lr 0.5 (cell: 0.01)")


def test_no_published_number_stands_beside_random_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smoke = resolve("experiment=fola_table2", "cell=Ours, lambda 1", "scale=smoke")
    write_run(tmp_path, smoke, {"round": 2, "ga": 0.5, "la": 0.1})
    assert show("fola_table2", "scale=smoke", runs=tmp_path, to=tmp_path / "to") == 0
    out = capsys.readouterr().out
    assert "48.57" not in out
    assert "random stand-ins for the data" in out
    assert "null" not in out
    (row,) = read_csv(tmp_path / "to/fola_table2_smoke.csv")
    assert row["paper's GA (%)"] == ""
    one = compose_cells(list_cells(find_table("bfl_p_table1"), "smoke")[:1])
    write_run(tmp_path / "rules", one[0].config, {"round": 2, "ga": 0.5, "ece": 0.1, "nll": 1.0})
    assert show("bfl_p_table1", "scale=smoke", runs=tmp_path / "rules", to=tmp_path / "to") == 0
    assert read_csv(tmp_path / "to/bfl_p_table1_smoke.csv")[0]["paper"] == ""


def test_rules_by_the_equations_have_a_table_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the same numbers of the paper; a run by the released code is not in it."""
    for table, label in (("bfl_p_table1_equations", "FVBWA / GAA"), ("bfl_p_table1", "FVBWA / GAA")):
        cells = [cell for cell in list_cells(find_table(table), "cpu") if cell.label == label]
        (one,) = compose_cells(cells)
        assert one.config["aggregator"]["name"] == ("gaa" if "equations" in table else "gaa_released")
        accuracy = 0.9 if "equations" in table else 0.2
        write_run(tmp_path, one.config, {"round": 8, "ga": accuracy, "ece": 0.1, "nll": 1.0})
    assert show("bfl_p_table1_equations", "scale=cpu", runs=tmp_path, to=tmp_path / "to") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "# BFL-P, table 1: runs by the paper's equations" in out
    assert "| Non-IID | FVBWA | GAA | 90.00 | 88.39 +- 0.26 | +1.61 (?) |" in out
    assert "20.00" not in out
    ours = [cell for cell in list_cells(find_table("ba_bfl_table1_equations")) if cell.label == "3 / GAA"]
    assert {one.config["aggregator"]["name"] for one in compose_cells(ours)} == {"gaa"}


def test_runs_that_differ_in_the_number_of_processes_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table 5 of BFL-P: the same run in two folders, each with its own time."""
    cells = [cell for cell in list_cells(find_table("bfl_p_table5"), "cpu") if cell.label == "FEDAVG / N/A"]
    for one in compose_cells(cells):
        workers = one.config["engine"]["workers"]
        folder = write_run(tmp_path / str(workers), one.config, {"round": 2, "ga": 0.5})
        records.Table(folder / TIMING, TIMING_COLUMNS).append([{"round": 1, "wall_seconds": 8.0 / workers}])
    assert show("bfl_p_table5", "scale=cpu", runs=tmp_path, to=tmp_path / "to") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "| FEDAVG | N/A | 1 | 8.000 |" in out
    assert "| FEDAVG | N/A | 2 | 4.000 | - | 0.500 |" in out


def test_a_diverged_run_is_named_and_not_in_the_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, status in ((0, "done"), (1, "diverged")):
        config = resolve("experiment=fola_table2", "cell=FedAvg", "scale=cpu", f"seed={seed}")
        folder = write_run(tmp_path, config, {"round": 5, "ga": 0.1 + 0.8 * seed, "la": 0.1})
        summary = records.read_json(folder / SUMMARY) or {}
        records.write_json(folder / SUMMARY, summary | {"status": status})
    assert show("fola_table2", "scale=cpu", runs=tmp_path, to=tmp_path / "to") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "| FedAvg | - | 1 | 10.00 | 10.00 |" in out
    assert f"{folder}: diverged; not in the means" in out
    assert "FedAvg (seed 2): `bfl-paper run fola_table2" in out  # the diverged one is not missing


def test_what_frozen_variances_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for one in compose_cells(list_cells(find_table("bfl_p_variances"))):
        rule, way = one.cell.label.split(" / ")
        value = {"AALV": 1, "EAA": 2, "GAA": 3, "RKLB": 4, "WB": 5}[rule] / 10 + (0.05 if way == "released" else 0)
        row = {"round": 15, "ga": value, "ece": value / 10, "nll": 2 * value, "std_norm": 10 * value}
        write_run(tmp_path, one.config, row)
    assert show("bfl_p_variances", runs=tmp_path, to=tmp_path / "to") == 0
    assert "| GAA | 30 | 35 | 3 | 3.5 | 0.6 | 0.7 | 3 | 3.5 |" in " ".join(capsys.readouterr().out.split())
    rows = read_csv(tmp_path / "to/bfl_p_variances.csv")
    assert [row["rule"] for row in rows] == ["AALV", "EAA", "GAA", "RKLB", "WB"]
    assert float(rows[4]["std norm, released"]) == 5.5


def test_one_seed_says_that_no_mark_is_possible(tmp_path: Path) -> None:
    """In the table itself, and so in LaTeX too: across all columns."""
    config = resolve("experiment=fola_table2", "cell=FedAvg", "scale=cpu", "seed=1")
    write_run(tmp_path, config, {"round": 5, "ga": 0.1, "la": 0.1})
    assert show("fola_table2", "scale=cpu", runs=tmp_path, to=tmp_path / "to") == 0
    text = " ".join((tmp_path / "to/fola_table2_cpu.md").read_text().split())
    assert "| -32.16 (?) | 14.15 | -4.15 (?) |" in text
    assert "| (?): one seed here, so that no difference can be marked as beyond the spread |" in text
    latex = (tmp_path / "to/fola_table2_cpu.tex").read_text()
    across = "\\multicolumn{17}{p{0.9\\linewidth}}{"
    assert f"{across}scale cpu: rounds 5 (paper: 100)" in latex
    assert f"{across}(?): one seed here" in latex
    config = resolve("experiment=fola_table2", "cell=FedAvg", "scale=cpu", "seed=0")
    write_run(tmp_path, config, {"round": 5, "ga": 0.2, "la": 0.3})
    assert show("fola_table2", "scale=cpu", runs=tmp_path, to=tmp_path / "to") == 0
    assert "(?)" not in (tmp_path / "to/fola_table2_cpu.md").read_text()


def test_runs_that_did_not_finish_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = resolve("experiment=fola_table2", "cell=Ours, lambda 1")
    write_run(tmp_path, done, {"round": 1, "ga": 0.5, "la": 0.1})
    half = write_run(tmp_path, resolve("experiment=fola_table2", "cell=FedAvg"), {"round": 1, "ga": 0.5, "la": 0.1})
    (half / "summary.json").unlink()
    write_run(tmp_path / "other", resolve("experiment=fola"), {"round": 1, "ga": 0.5})
    assert show("fola_table2", runs=tmp_path, to=tmp_path / "to") == 0
    out = capsys.readouterr().out
    assert f"{half}: not finished" in out
    assert "other" not in out


@pytest.mark.parametrize(
    "content", [b'{"status": "do', b"\xff\xfe\x00", b"[1, 2]", b'{"schema_version": 1, "status": 3}']
)
def test_a_damaged_summary_is_left_out_with_a_sentence(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, resolve("experiment=fola_table2", "cell=Ours, lambda 1"), {"round": 1, "ga": 0.5, "la": 0.1})
    bad = write_run(tmp_path, resolve("experiment=fola_table2", "cell=FedAvg"), {"round": 1, "ga": 0.5, "la": 0.1})
    (bad / SUMMARY).write_bytes(content)
    assert show("fola_table2", runs=tmp_path, to=tmp_path / "to") == 0
    out = capsys.readouterr().out
    assert "| Ours " in out
    assert "| FedAvg " not in out
    assert f"- {bad / SUMMARY} is damaged: " in out


def test_the_row_below_a_table_is_in_every_table_of_a_text() -> None:
    assert (
        add_last_row("| a |\n| - |\n| 1 |\n\nx\n\n| b |\n", "| s |\n")
        == "| a |\n| - |\n| 1 |\n| s |\n\nx\n\n| b |\n| s |\n"
    )
    assert add_last_row("| a |\n", "") == "| a |\n"


@pytest.mark.slow
def test_dense_with_a_tenth_of_its_epochs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And is not compared with the paper's cell, whose script has other values."""
    assert show("fedlpa_table5", "scale=cpu", runs=reference_folder() / "fedlpa_table5", to=tmp_path) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert '| DENSE, values of its own paper | 54.94 | - | - | 1 | method "dense", method.epochs 20 |' in out
    assert "| FMNIST, beta=0.5, E=10 | FedLPA: lr 0.01, closed form (EA) | 62.85 +- 9.81 | 67.63 | -4.78 | 3 |" in out
    by_text = "FedLPA by the text, weights by size: lr 0.001, conjugate gradients"
    assert f"| FMNIST, beta=0.5, E=10 | {by_text} | 50.90 +- 11.35 | - |" in out


@pytest.mark.slow
def test_every_shipped_run_is_a_cells() -> None:
    """So that nothing is shipped that nobody shows: an archive has a table of its name, or a report in the results."""
    results = (Path(__file__).parent.parent / "docs/results.md").read_text()
    for archive in reference_folder().glob(f"*{SUFFIX}"):
        collected, name = paper.collect([archive], {}), archive.name.removesuffix(SUFFIX)
        assert collected.notes == {}
        if name not in read_tables():
            assert f"bfl-report reference/{name} " in results
            continue
        assert len(paper.runs_of_cells(find_table(name), collected)) == len(collected.runs), archive.name


def test_list_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert paper.main(["list", "virtual"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == [n for n in read_tables() if n.startswith("virtual")]
    assert "virtual_table3" in out
    assert "(paper 8, cpu 24, smoke 8 runs)" in out


def test_an_unknown_table_or_scale_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert paper.main(["show", "fola_tabel2"]) == 2
    assert "table: got 'fola_tabel2', allowed: a name of `bfl-paper list` (did you mean fola_table2?)" in (
        capsys.readouterr().err
    )
    assert paper.main(["show", "fola_table2", "scale=gpu"]) == 2
    assert "scale: got 'gpu', allowed: paper, cpu, smoke" in capsys.readouterr().err


def test_every_entry_has_a_maker_and_the_folder_only_papers() -> None:
    for table in read_tables().values():
        module = __import__(f"bfl_bench.papers.{table.paper}", fromlist=["MAKERS"])
        assert table.name in module.MAKERS
    stems = {path.stem for path in (config_folder() / "paper").glob("*.yaml")}
    assert stems == set(paper.PAPERS)
    assert all(isinstance(yaml.safe_load(p.read_text()), dict) for p in (config_folder() / "paper").iterdir())


def test_a_shipped_run_is_found_under_any_folder_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = next(run for run in list_archived(FOLA_LAPLACE) if "_fedavg_seed0_" in run.name)
    (tmp_path / "runs" / "whatever").mkdir(parents=True)
    for name in (CONFIG, SUMMARY, METRICS):
        (tmp_path / "runs" / "whatever" / name).write_text((source / name).read_text())
    assert show("fola_figure11", runs=tmp_path / "runs", to=tmp_path / "to") == 0
    assert "| FedAvg " in capsys.readouterr().out
