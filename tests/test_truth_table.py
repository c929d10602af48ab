"""The table and the figure of distances to true posteriors: cells, priors, and what is shown of runs."""

import csv
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex

from bfl_bench.commands.cells import compose_cells
from bfl_bench.commands.paper import collect, show
from bfl_bench.evaluation.truth import read_truth
from bfl_bench.papers.spec import Cell, find_table, list_cells
from bfl_bench.papers.truth import choose_styles
from bfl_bench.report.archive import pack
from bfl_bench.report.style import style
from scripts.truth import print_limits
from tests.composing import experiment, write_run

TABLE = find_table("truth_posteriors")
NUM_TRAIN = {"linear": 200, "diabetes": 354, "breast cancer": 455, "cultivars": 104, "digits": 1438, "sine": 120}


def test_methods_times_problems_times_alphas() -> None:
    cells = list_cells(TABLE)
    axes = {axis: {cell.names[axis] for cell in cells} for axis in ("cell", "problem", "partition.alpha")}
    assert set(axes["problem"]) == set(NUM_TRAIN)
    assert len(axes["cell"]) >= 10
    assert len(axes["partition.alpha"]) == 3
    assert len(cells) == len(axes["cell"]) * 6 * 3 * 3  # three alphas, three seeds


@pytest.mark.slow
def test_every_cell_has_the_prior_of_the_truth() -> None:
    """A precision of 1 of all data: as it is, or divided by the number of training examples."""
    per_example = ("local.weight_decay", "method.gamma", "method.delta")
    for cell in list_cells(TABLE):
        values, share = cell.values, 1 / NUM_TRAIN[cell.names["problem"]]
        stated = [values[key] for key in per_example if key in values]
        if values["method"] == "fedep":
            stated = [values["method.prior_precision"]]
        if stated:
            assert stated == [pytest.approx(share, rel=1e-3)], cell.names
            continue
        (composed,) = compose_cells([cell])
        method = composed.config["method"]
        total = method["prior_precision"] if "prior_precision" in method else 1 / method["prior_variance"]
        assert total == 1, cell.names
        assert method.get("beta", 1.0) == method.get("temperature", 1.0) == 1.0


@pytest.mark.parametrize("problem", NUM_TRAIN)
def test_problems_have_so_many_examples(problem: str) -> None:
    name = {"breast cancer": "breast_cancer", "digits": "pooled_digits"}.get(problem, problem)
    assert sum(experiment(f"experiment=truth_{name}", "method=fedavg").worker.task.sizes) == NUM_TRAIN[problem]


def test_limits_are_those_of_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    """The KL divergence of the best mean-field Gaussian is (sum of log P_ii - log det P) / 2, P being the precision."""
    print_limits(["linear"])
    rows = {line.split(" | ")[1]: line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]}
    precision = torch.linalg.inv(read_truth("linear").moments.matrix)
    kl = 0.5 * (precision.diagonal().log().sum() - torch.logdet(precision)).item()
    assert float(rows["best mean-field Gaussian"][2]) == pytest.approx(kl, rel=5e-3)  # as printed
    spread = -0.5 * (precision.diagonal() * torch.linalg.inv(precision).diagonal()).log().mean().item()
    assert float(rows["best mean-field Gaussian"][3]) == pytest.approx(spread, rel=5e-3)
    total_variations = {name: float(row[-1].rstrip(" |")) for name, row in rows.items()}
    assert 0 < total_variations["its mean alone"] < 0.05
    assert 0 < total_variations["100 of its draws"] < 0.05


def write(out: Path, cell: Cell, tv: float, kl: float | None) -> Path:
    (composed,) = compose_cells([cell])
    rows = [{"round": r, "nll": 1.0, "truth_tv": tv / r, "truth_kl": kl, "truth_spread": None} for r in (1, 2)]
    return write_run(out, composed.config, *rows)


def read(path: Path) -> str:
    """Read a text without the spaces that align its tables."""
    return " ".join(path.read_text().split())


def test_methods_are_told_apart_in_the_figure() -> None:
    methods = list(dict.fromkeys(cell.label for cell in list_cells(TABLE)))
    with style():
        looks = {(to_hex(look["color"]), look["linestyle"]) for look in choose_styles(methods).values()}
    assert len(looks) == len(methods) > 10


@pytest.mark.slow
def test_distances_stand_in_the_cell_of_their_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {}
    for cell in list_cells(TABLE):
        if cell.label in ("FedAvg", "FVB") and cell.names["problem"] in ("linear", "sine") and cell.seed == 0:
            places[cell.label, cell.names["problem"], cell.names["partition.alpha"]] = cell
    for number, (place, cell) in enumerate(places.items(), start=1):
        if place != ("FVB", "sine", "1.0"):
            write(tmp_path / "runs", cell, 0.02 * number, None if place[0] == "FedAvg" else number)
    archive = tmp_path / "some.tar.xz"
    pack(sorted((tmp_path / "runs").iterdir()), archive)
    show(TABLE, ["paper"], collect([archive], {}), tmp_path / "made")
    text = read(tmp_path / "made/truth_posteriors.md")
    assert "| FedAvg | 0.01 / 0.02 / 0.03 | 0.04 / 0.05 / 0.06 |" in text
    assert "| FVB | 0.07 / 0.08 / 0.09 | 0.1 / - / 0.12 |" in text
    kl = text.split("## KL to the true posterior")[1]
    assert "| FVB | 7 / 8 / 9 | 10 / - / 12 |" in kl
    assert "FedAvg" not in kl.split("No run of")[0]  # points have none
    with (tmp_path / "made/truth_posteriors.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {(row["method"], row["problem"], row["alpha"]): row["truth_tv"] for row in rows}
    assert float(found["FVB", "sine", "0.1"]) == pytest.approx(0.12)
    assert len(found) == 11
    other = next(
        cell
        for cell in list_cells(TABLE)
        if cell.seed == 1 and cell.label == "FVB" and cell.names == places["FVB", "sine", "0.1"].names
    )
    write(tmp_path / "second", other, 0.26, 12)  # beside 0.24
    show(TABLE, ["paper"], collect([archive, tmp_path / "second"], {}), tmp_path / "two")
    assert "| FVB | 0.07 / 0.08 / 0.09 | 0.1 / - / 0.125 ± 0.007 |" in read(tmp_path / "two/truth_posteriors.md")
    show(find_table("truth_figure"), ["paper"], collect([archive], {}), tmp_path / "made")
    assert (tmp_path / "made/truth_figure.png").stat().st_size > 10_000
    assert "| FVB | 0.090 | 0.120 |" in read(tmp_path / "made/truth_figure.md")
