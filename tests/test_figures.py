"""What a person sees at the end of a run: the closing table and the two figures."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from bfl_bench import records
from bfl_bench.commands.summary import print_summary
from bfl_bench.report.figures import draw_curves, draw_partition, make_curves

ROW: dict[str, records.Cell] = {
    "round": 4, "ga": 0.11, "la": 0.22, "worst10": 0.33, "nll": 0.44, "ece": 0.55, "brier": 0.66, "train_loss": 0.77,
    "train_acc": 0.88,
}  # fmt: skip


def drawn(num_rounds: int) -> Figure:
    """A run whose every metric grows to that of ROW; drawn, so that places are known."""
    shares = [number / num_rounds for number in range(1, num_rounds + 1)]
    rows = [{name: (value or 0) * share for name, value in ROW.items()} for share in shares]
    figure = make_curves([row | {"round": number} for number, row in enumerate(rows, 1)])
    figure.draw_without_rendering()
    return figure


def test_each_line_has_the_label_of_its_column() -> None:
    lines = {line.get_label(): line.get_ydata()[-1] for axes in drawn(10).axes for line in axes.lines}
    assert lines == {
        "global accuracy": 0.11,
        "local accuracy": 0.22,
        "worst 10 % of clients": 0.33,
        "training accuracy": 0.88,
        "negative log-likelihood": 0.44,
        "training loss": 0.77,
        "expected calibration error": 0.55,
        "Brier score": 0.66,
    }


@pytest.mark.parametrize("num_rounds", [1, 2, 7, 20, 300])
def test_rounds_are_whole_and_legends_lie_beside_the_lines(num_rounds: int) -> None:
    figure = drawn(num_rounds)
    assert len(figure.axes) == 3
    for axes in figure.axes:
        low, high = axes.get_xlim()
        shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert shown
        assert all(float(tick).is_integer() for tick in shown)
        legend = axes.get_legend()
        assert [text.get_text() for text in legend.get_texts()] == [line.get_label() for line in axes.lines]
        place = legend.get_window_extent()
        assert not place.overlaps(axes.get_window_extent())
        assert figure.bbox.ymin <= place.ymin  # and not cut off
        assert not place.overlaps(axes.xaxis.label.get_window_extent())


def test_a_run_without_rounds_has_empty_panels(tmp_path: Path) -> None:
    assert not any(axes.lines or axes.get_legend() for axes in make_curves([]).axes)
    draw_curves(tmp_path)
    draw_partition(np.array([[3, 0], [1, 2], [0, 9]]), tmp_path)
    for name in (records.CURVES_FIGURE, records.PARTITION_FIGURE):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_curves_show_what_was_measured() -> None:
    """Local models are evaluated less often; what was never measured has no line."""
    rows = [{"round": 1, "ga": 0.5, "la": None}, {"round": 2, "ga": 0.6, "la": 0.3}]
    accuracy, loss, _ = make_curves(rows).axes
    assert {line.get_label(): line.get_xdata().tolist() for line in accuracy.lines} == {
        "global accuracy": [1, 2],
        "local accuracy": [2],
    }
    assert loss.get_legend() is None


def test_closing_table(capsys: pytest.CaptureFixture[str]) -> None:
    best = {name: value and value + 0.01 for name, value in ROW.items()} | {"round": 3, "brier": None}
    summary = {"status": "done", "final": ROW, "best": best}
    print_summary(summary, Path("outputs/here"))
    assert capsys.readouterr().out == (
        "\n                                 final      best"
        "   (round 4; best by global accuracy on the test set, round 3)\n"
        "global accuracy                 0.1100    0.1200\n"
        "local accuracy                  0.2200    0.2300\n"
        "worst 10 % of clients           0.3300    0.3400\n"
        "negative log-likelihood         0.4400    0.4500\n"
        "expected calibration error      0.5500    0.5600\n"
        "Brier score                     0.6600         -\n"
        "\ndone: outputs/here\n"
    )
    chosen = summary | {"best_by": {"set": "validation", "column": "validation_nll"}}
    print_summary(chosen, Path("outputs/here"))
    assert "best by negative log-likelihood (validation), round 3)" in capsys.readouterr().out
    print_summary(summary, Path("outputs/here"), brief=True, note="again")
    assert capsys.readouterr().out == "done (again): outputs/here ga=0.1100 nll=0.4400 train_loss=0.7700\n"
    print_summary({"status": "done", "final": None, "best": None}, Path("there"), stand_in="mnist")
    said = "\nRandom stand-in data, not mnist: these numbers say nothing about it.\n\ndone: there\n"
    assert capsys.readouterr().out == said
    print_summary({"status": "diverged", "final": None, "best": None}, Path("there"))
    assert capsys.readouterr().out == "\ndiverged: there\n"
