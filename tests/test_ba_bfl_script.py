"""Tables and figures of BA-BFL: rules that coincide, one seed, datasets without runs."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bfl_bench.commands import paper
from bfl_bench.commands.cells import compose_cells
from bfl_bench.papers.ba_bfl import draw_lines
from bfl_bench.papers.spec import find_table, list_cells
from bfl_bench.report import Stats, summarise
from tests.composing import write_run


def make_runs(out: Path, seeds: int) -> None:
    cells = [cell for cell in list_cells(find_table("ba_bfl_table1")) if cell.names["dataset"] == "fashion_mnist"]
    chosen = [cell for cell in cells if cell.label in ("0 / FedAVG", "1 / EAA", "1 / WB") and cell.seed < seeds]
    for one in compose_cells(chosen):
        row = {"round": 50, "ga": 0.88, "ece": 0.08 + 0.01 * one.cell.seed, "nll": 0.7}
        write_run(out, one.config, row)


def show(table: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert paper.main(["show", table, "--runs", str(runs), "--to", str(runs / "report")]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_of_one_seed_no_mark_is_possible_and_missing_datasets_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_runs(tmp_path, seeds=1)
    text = show("ba_bfl_table1", tmp_path, capsys)
    assert "| Non-IID | 0 | FedAVG | 88.00 | 87.88 +- 0.79 | +0.12 (?) | 8.00 | 9.42 +- 0.62 | -1.42 (?) |" in text
    assert "No run here of cifar10, svhn." in text
    assert "that these rules coincide is no finding" in text
    figure = show("ba_bfl_figure3", tmp_path, capsys)
    assert "| fashion_mnist | ECE (%) | 1 | WB | 8.0000 | - | 1 |" in figure
    assert "nan" not in figure + (tmp_path / "report/ba_bfl_figure3.csv").read_text()
    assert "No run here of cifar10, svhn." in figure


@pytest.mark.slow
def test_several_seeds_have_a_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_runs(tmp_path, seeds=2)
    assert "| FedAVG | 88.00 +- 0.00 | 87.88 +- 0.79 | +0.12 | 8.50 +- 0.50 |" in show(
        "ba_bfl_table1", tmp_path, capsys
    )
    assert "| fashion_mnist | ECE (%) | 1 | WB | 8.5000 | 0.5000 | 2 |" in show("ba_bfl_figure3", tmp_path, capsys)


def test_rules_with_the_same_results_are_one_line() -> None:
    def of(*values: float) -> dict[int, Stats]:
        return {layers: summarise([value]) for layers, value in zip((1, 2, 3), values, strict=True)}

    found = {"AALV": of(1, 2, 3), "EAA": of(1, 2, 3), "RKLB": of(1, 2, 3.5), "WB": of(1, 2, 3 + 1e-7)}
    axes = Figure().subplots()
    draw_lines(axes, {(rule, layers): s for rule, by in found.items() for layers, s in by.items()})
    assert axes.get_legend_handles_labels()[1] == ["AALV, EAA, WB", "RKLB"]
    assert sum(len(line.get_xdata()) == 3 and line.get_linestyle() == "-" for line in axes.get_lines()) == 2
