"""Papers' tables: cell -> overrides -> config -> identity -> folder, and never the other way round."""

import csv
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from bfl_bench.commands import paper
from bfl_bench.commands.cells import compose_cells, expand_table, sweep_points
from bfl_bench.commands.words import CommandLine
from bfl_bench.errors import ConfigError
from bfl_bench.identity import STAND_IN_PREFIX, folder_name
from bfl_bench.papers.pages import add_last_row
from bfl_bench.papers.spec import Cell, find_table, list_cells, override, read_paper, read_tables, split_names
from bfl_bench.records import config_folder
from tests.composing import call_script, resolve, write_run

REFERENCE = Path(__file__).parent.parent / "reference"
STORED = [line.split(" ", 2) for line in (Path(__file__).parent / "identities.txt").read_text().splitlines()]
"""The names that cells had before papers were files: of cpu all, of the other scales a number and a digest."""

# What became another cell. Fig. 12 and FedLPA's Fig. 2 have all their steps as cells; the only run that Fig. 10 a needs
# keeps its messages; the shipped runs of Fig. 3 evaluate local models.
CHANGED = {"fola_figure12", "fedlpa_figure2", "fola_laplace"}
CHANGED_ON_TWO_CORES = {*CHANGED, "fola_figure3"}


def name_cells(cells: list[Cell]) -> list[str]:
    """Without the word that runs on stand-in data have before their names since."""
    return [
        one.name.removeprefix(STAND_IN_PREFIX)
        + (f" workers {workers}" if (workers := one.cell.values.get("engine.workers")) else "")
        for one in compose_cells(cells)
    ]


FEW = ("fola_table2", "fola_figure8", "fedlpa_figure5", "bfl_p_table5", "virtual_figure4", "ba_bfl_table1")


@pytest.mark.parametrize(
    "name",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
        for name in dict.fromkeys(name for name, _, _ in STORED)
    ],
)
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


@pytest.mark.parametrize("name", ["fola_table2", "fedlpa_table5", "virtual_figure4", "fola_figure12"])
def test_values_set_in_copies_are_those_that_hydra_composes(name: str) -> None:
    for one in compose_cells(list_cells(read_tables()[name], "cpu")[-3:]):
        starts = [override(key, one.config[key]) for key in one.cell.starts]
        assert folder_name(resolve(*one.cell.overrides(), *starts)) == one.name


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
    assert len(sweep("experiment=fola_table2", "scale=cpu")) == 21
    assert len(sweep("experiment=fola_table2", "scale=cpu", "seed=7")) == 7
    some = ["experiment=virtual_table2", "cell=FedProx", "federation=FEMNIST, mlp,HAR, mlp", "local.lr=0.1"]
    points = sweep(*some)
    assert len(points) == 2 * 4  # of five learning rates one, four of the server
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


def test_a_table_of_a_paper_from_nothing(tmp_path: Path) -> None:
    """BA-BFL's IVON rows as cells of their own, in ten lines."""
    (tmp_path / "ba_bfl.yaml").write_text(
        "table_ivon:\n"
        "  title: IVON on the clients\n"
        "  experiment: ba_bfl_released\n"
        "  values: {rounds: 10, local.lr: 0.1}\n"
        "  cells:\n"
        "    - {label: RKLB, aggregator: rklb}\n"
        "    - {label: WB, aggregator: wb}\n"
        "  grid: {partition.alpha: [0.1, 0.5], dataset: [fashion_mnist, svhn]}\n"
        "  seeds: 3\n"
        "  scales: {cpu: {values: {rounds: 2}, seeds: 1}}\n"
    )
    (table,) = read_paper(tmp_path / "ba_bfl.yaml").values()
    assert (len(list_cells(table)), len(list_cells(table, "cpu"))) == (2 * 2 * 2 * 3, 8)
    assert len(set(name_cells(list_cells(table)))) == 24
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
    assert "| FedAvg | 1 | 40.00 +- 7.07 | 35.00 +- 7.07 | 12.00 +- 0.00 | 1.5 | 2.0 | 2.0 (1 of 2) | 2 | 40 |" in out
    assert "42.16 (43.34 in the text) | -2.16 | 14.15 | -2.15 (!) |" in out
    shortened = "| scale cpu: rounds 5 (paper: 100); local.epochs 1 (paper: 20 or 40 or 10 or 1); dataset.crop_padding"
    assert shortened in out
    assert "- Ours (seed 0, 1, 2): `bfl-paper run fola_table2 scale=cpu cell=Ours seed=0,1,2`" in out
    assert "- FedAvg (seed 2): `bfl-paper run fola_table2 scale=cpu cell=FedAvg seed=2`" in out
    (row,) = read_csv(tmp_path / "to/fola_table2_cpu.csv")
    assert (float(row["best GA (%) mean"]), row["best GA (%) n"], row["paper's GA (%)"]) == (40.0, "2", "42.16")
    assert float(row["best GA (%) std"]) == pytest.approx(50**0.5)
    assert row["scale"].startswith("cpu: rounds 5 (paper: 100)")
    assert "scale cpu: rounds 5 (paper: 100)" in (tmp_path / "to/fola_table2_cpu.tex").read_text()


ODD = [
    ("fedlpa_table5", ["experiment=fedlpa_released", "local.epochs=10", "model=softmax", "local.lr=0.001"]),
    ("fedlpa_table5", ["experiment=fedlpa_released", "local.epochs=10", "method=dense_fedlpa", "method.epochs=20"]),
    ("fola_table2", ["experiment=fola_table2", "cell=Ours", "model=lenet", "local.lr=0.5"]),
    ("fola_table2", ["experiment=fola_table2", "cell=Ours", "data_dir=stand-in"]),
    ("virtual_table2", ["experiment=virtual", "local.lr=0.5"]),
    ("ba_bfl_table1", ["experiment=bfl_p_released", "method=fedavg"]),
    ("bfl_p_table1", ["experiment=ba_bfl_released", "aggregator=wb"]),
    ("fola_figure9", ["experiment=fola_table2", "cell=Ours"]),
]


QUICK = ("fola_table2", "virtual_table2", "fola_figure9")  # tables with few cells to compose


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
    write_run(tmp_path, resolve("experiment=fola_table2", "cell=Ours", "local.lr=0.5"), {"round": 1, "ga": 0.5})
    write_run(tmp_path, resolve("experiment=fola_table2", "cell=FedAvg"), {"round": 1, "ga": 0.5, "la": 0.1})
    assert show("fola_table2", "--near", runs=tmp_path, to=tmp_path / "to") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "local.lr" in line]
    assert line.endswith(": local.lr 0.5 (cell: 0.01)")


def test_no_published_number_stands_beside_random_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smoke = resolve("experiment=fola_table2", "cell=Ours", "scale=smoke")
    write_run(tmp_path, smoke, {"round": 2, "ga": 0.5, "la": 0.1})
    assert show("fola_table2", "scale=smoke", runs=tmp_path, to=tmp_path / "to") == 0
    out = capsys.readouterr().out
    assert "48.57" not in out
    assert 'data_dir "stand-in" (paper: null)' in out
    (row,) = read_csv(tmp_path / "to/fola_table2_smoke.csv")
    assert row["paper's GA (%)"] == ""
    one = compose_cells(list_cells(find_table("bfl_p_table1"), "smoke")[:1])
    write_run(tmp_path / "rules", one[0].config, {"round": 2, "ga": 0.5, "ece": 0.1, "nll": 1.0})
    assert show("bfl_p_table1", "scale=smoke", runs=tmp_path / "rules", to=tmp_path / "to") == 0
    assert read_csv(tmp_path / "to/bfl_p_table1_smoke.csv")[0]["paper"] == ""


def test_runs_that_did_not_finish_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = resolve("experiment=fola_table2", "cell=Ours")
    write_run(tmp_path, done, {"round": 1, "ga": 0.5, "la": 0.1})
    half = write_run(tmp_path, resolve("experiment=fola_table2", "cell=FedAvg"), {"round": 1, "ga": 0.5, "la": 0.1})
    (half / "summary.json").unlink()
    write_run(tmp_path / "other", resolve("experiment=fola"), {"round": 1, "ga": 0.5})
    assert show("fola_table2", runs=tmp_path, to=tmp_path / "to") == 0
    out = capsys.readouterr().out
    assert f"{half}: not finished" in out
    assert "other" not in out


def test_the_row_below_a_table_is_in_every_table_of_a_text() -> None:
    assert (
        add_last_row("| a |\n| - |\n| 1 |\n\nx\n\n| b |\n", "| s |\n")
        == "| a |\n| - |\n| 1 |\n| s |\n\nx\n\n| b |\n| s |\n"
    )
    assert add_last_row("| a |\n", "") == "| a |\n"


SHIPPED = {
    "fola_table2 cpu": "| Ours | 1 | 26.42 +- 2.46 | 25.93 +- 2.61 | 11.72 +- 1.10 | 2.0 | never | never | 3 |",
    "fola_figure3 cpu": "| 0.01 | 10 | 0.1 | 5 | 32 |",
    "fola_figure10 paper": "| 10 | full, online | 91.790 | 0.450 | 90.090 |",
    "fola_figure11 paper": "| full, online | 10 | 90.690 | 91.800 | 87.130 | 1.000 |",
    "fola_figure12 cpu": "| LF | 1 | full | 20 | 0.023 | 90.910 |",
    "fedlpa_table5 cpu": "| FMNIST, beta=0.5, E=10 | FedAvg | 43.79 +- 6.10 | 54.67 | -10.88 (!) | 3 |",
    "fedlpa_figure2 cpu": "| FedLPA once, then FedAvg | 61.36 | 95.06 | 5 |",
    "virtual_table2 cpu": "| FEMNIST, mlp | S | Virtual | 92.9 | 90.9 | +2.0 | 1 | 2 |",
    "virtual_table3 cpu": "| 0 % | Virtual | MT |",
    "virtual_figure2 cpu": "| 1e-06 |",
    "virtual_figure5 cpu": "| VSN, mlp | Virtual |",
    "ba_bfl_table1 cpu": "| Non-IID | 0 | FedAVG |",
    "ba_bfl_figure3 cpu": "| fashion_mnist | ECE (%) | 0 | FedAVG |",
    "bfl_p_table1 cpu": "| Non-IID | FVBWA | EAA |",
    "bfl_p_table4 cpu": "| Non-IID | FVBWA | CF |",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_tables_are_rebuilt(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, scale = name.split()
    assert show(table, f"scale={scale}", runs=REFERENCE, to=tmp_path) == 0
    assert SHIPPED[name] in " ".join(capsys.readouterr().out.split())


def test_dense_with_a_tenth_of_its_epochs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And is not compared with the paper's cell, whose script has other values."""
    assert show("fedlpa_table5", "scale=cpu", runs=REFERENCE / "fedlpa_table5", to=tmp_path) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert '| DENSE, values of its own paper | 54.94 | - | - | 1 | method "dense", method.epochs 20 |' in out
    assert "| FMNIST, beta=0.5, E=10 | FedLPA: lr 0.01, closed form (EA) | 62.85 +- 9.81 | 67.63 | -4.78 | 3 |" in out
    by_text = "FedLPA by the text, weights by size: lr 0.001, conjugate gradients"
    assert f"| FMNIST, beta=0.5, E=10 | {by_text} | 50.90 +- 11.35 | - |" in out


@pytest.mark.slow
def test_every_shipped_run_is_a_cells() -> None:
    """So that nothing is shipped that no table shows."""
    shipped = {folder.name for folder in REFERENCE.glob("*/*") if folder.is_dir()}
    names: set[str] = set()
    for table in read_tables().values():
        if table.name == table.runs_of and any(f"{table.full_name}" in str(path) for path in REFERENCE.iterdir()):
            scale = "paper" if table.name == "laplace" else "cpu"
            names |= set(name_cells(list_cells(table, scale)))
    assert shipped <= names


def test_list_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert paper.main(["list", "virtual"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == [n for n in read_tables() if n.startswith("virtual")]
    assert "virtual_table3" in out
    assert "(paper 8, cpu 8, smoke 8 runs)" in out


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


def test_unfinished_evidence_does_not_hide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy of a shipped run under any folder name is found by what it is."""
    source = next((REFERENCE / "fola_table2").glob("*_fola_seed0_*"))
    shutil.copytree(source, tmp_path / "runs" / "whatever")
    assert show("fola_table2", "scale=cpu", runs=tmp_path / "runs", to=tmp_path / "to") == 0
    assert "| Ours " in capsys.readouterr().out
