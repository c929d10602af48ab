"""What a person sees at the end of a run: the closing table and the figures."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bfl_bench import records
from bfl_bench.commands.summary import print_summary
from bfl_bench.report.figures import draw_curves, draw_partition, draw_uncertainty, make_curves, make_uncertainty

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
    """Accuracies in percent, as the title says."""
    assert [axes.get_title() for axes in drawn(10).axes] == ["accuracy (%)", "loss (nats)", "calibration"]
    lines = {line.get_label(): line.get_ydata()[-1] for axes in drawn(10).axes for line in axes.lines}
    assert lines == {
        "global accuracy": 11.0,
        "local accuracy": 22.0,
        "worst 10 % of clients": 33.0,
        "training accuracy": 88.0,
        "negative log-likelihood": 0.44,
        "training loss": 0.77,
        "expected calibration error": 0.55,
        "Brier score": 0.66,
    }


@pytest.mark.slow
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


# The figure of uncertainty

BINS: list[dict[str, records.Cell]] = [
    {"round": 3, "bin": 1, "count": 1, "confidence": 0.2, "accuracy": 1.0},
    {"round": 3, "bin": 2, "count": 149, "confidence": 0.6, "accuracy": 0.8},
    {"round": 3, "bin": 3, "count": 50, "confidence": 0.9, "accuracy": 0.7},
]
CALIBRATED = [
    {**row, "count_calibrated": 100 * number, "confidence_calibrated": 0.7 + number / 10, "accuracy_calibrated": 0.75}
    for number, row in enumerate(BINS)
]
RISK: list[dict[str, records.Cell]] = [{"round": 3, "coverage": 0.5, "risk": 0.1}, {"coverage": 1.0, "risk": 0.2}]
ENTROPIES: list[dict[str, records.Cell]] = [
    {"round": 3, "entropy": 0.5, "test": 30, "svhn": 1},
    {"round": 3, "entropy": 1.5, "test": 10, "svhn": 3},
]
SHIFT: list[dict[str, records.Cell]] = [
    {"severity": s, "accuracy": 0.9 - s / 10, "nll": s, "accuracy@blur": 0.8 - s / 10, "nll@blur": 2 * s}
    for s in (1, 3, 5)
]


def lines_of(axes: Axes) -> dict[object, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def test_panels_show_what_the_tables_hold() -> None:
    tables = {
        records.RELIABILITY: CALIBRATED,
        records.RISK: RISK,
        records.ENTROPY: ENTROPIES,
        records.SHIFT: SHIFT,
    }
    figure = make_uncertainty(tables)
    figure.draw_without_rendering()
    reliability, risk, entropies, accuracy, loss = figure.axes
    assert lines_of(reliability)["as predicted"] == ([0.6, 0.9], [0.8, 0.7])  # one of 200 says nothing
    after = lines_of(reliability)["after temperature"]
    assert after == (pytest.approx([0.8, 0.9]), [0.75, 0.75])
    assert lines_of(risk)["most confident first"] == ([0.5, 1.0], [0.1, 0.2])
    assert lines_of(risk)["any order"][1] == [0.2, 0.2]
    shares = {patch.get_label(): patch.get_data() for patch in entropies.patches}
    assert {name: data.values.tolist() for name, data in shares.items()} == {
        "test set": [0.75, 0.25],
        "svhn": [0.25, 0.75],
    }
    assert shares["svhn"].edges.tolist() == [0, 1, 2]
    assert lines_of(accuracy) == {
        "mean": ([1, 3, 5], pytest.approx([0.8, 0.6, 0.4])),
        "blur": ([1, 3, 5], pytest.approx([0.7, 0.5, 0.3])),
    }
    assert lines_of(loss)["blur"] == ([1, 3, 5], [2, 6, 10])
    for axes in figure.axes:
        place = axes.get_legend().get_window_extent()
        assert not place.overlaps(axes.get_window_extent())
        assert not place.overlaps(axes.xaxis.label.get_window_extent())
        assert figure.bbox.ymin <= place.ymin


def test_the_figure_is_of_the_last_round_and_only_where_something_was_asked_for(tmp_path: Path) -> None:
    earlier = [{**row, "round": 2, "accuracy": 0.0} for row in BINS]
    records.Table(tmp_path / records.RELIABILITY, records.RELIABILITY_COLUMNS).append([*earlier, *BINS])
    draw_uncertainty(tmp_path)
    assert not (tmp_path / records.UNCERTAINTY_FIGURE).exists()
    records.Table(tmp_path / records.RISK, records.RISK_COLUMNS).append([{**row, "round": 3} for row in RISK])
    draw_uncertainty(tmp_path)
    assert (tmp_path / records.UNCERTAINTY_FIGURE).read_bytes().startswith(b"\x89PNG")


def test_the_style_is_in_effect_while_a_figure_is_made_and_not_beyond() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    first = drawn(5).axes[0]
    assert [line.get_color() for line in first.lines] == ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]
    assert min(text.get_fontsize() for text in first.get_legend().get_texts()) >= 10
    assert dict(matplotlib.rcParams) == before
