"""bfl-report: grouping by what differs, statistics against scipy and by hand, and what is missing or diverged."""

import csv
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from bfl_bench import records
from bfl_bench.commands.report import main
from bfl_bench.report.comparison import (
    bootstrap_interval,
    distinguishing_keys,
    holm,
    make_rows,
    mark_best,
    paired_p_value,
    rank,
)
from bfl_bench.report.runs import find_runs
from tests.composing import resolve, write_run


@cache
def composed(*overrides: str) -> dict[str, Any]:
    return resolve(*overrides)


def make(out: Path, method: str, seed: int, *overrides: str, **values: float) -> Path:
    config = composed(f"method={method}", *overrides) | {"seed": seed}
    return write_run(out, config, {"round": 1, "ga": 0.5, "nll": 1.0, **values})


def rows_of(out: Path, **options: Any) -> Any:
    return make_rows(find_runs([out], {}, diverged=True)[0], **options)


def test_the_fewest_keys_tell_configs_apart() -> None:
    configs = [{"a": 1, "b": x, "c": x, "method.name": name} for x in (1, 2) for name in ("fola", "fedavg")]
    assert distinguishing_keys(configs) == ["method.name", "b"]  # c says nothing that b does not
    assert distinguishing_keys(configs, first=["c"]) == ["c", "method.name"]
    assert distinguishing_keys(configs[:1]) == []


def test_groups_are_never_mixed(tmp_path: Path) -> None:
    for seed in (0, 1):
        make(tmp_path, "fedavg", seed, ga=0.4 + 0.2 * seed)
        make(tmp_path, "fedavg", seed, "local.lr=0.1", ga=0.9)
        make(tmp_path, "fola", seed, ga=0.7)
    rows = rows_of(tmp_path)
    labels = [tuple(row.label.values()) for row in rows]
    assert labels == [("fedavg", 0.01), ("fedavg", 0.1), ("fola", 0.01)]
    found = rows[0].stats("ga")
    assert (found.num, found.mean) == (2, pytest.approx(0.5))
    assert found.std == pytest.approx(np.std([0.4, 0.6], ddof=1))


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_paired_tests_are_scipys_over_common_seeds() -> None:
    ours, theirs = {0: 0.5, 1: 0.7, 2: 0.6, 7: 9.0}, {0: 0.4, 1: 0.65, 2: 0.57, 8: 0.1}
    differences = [0.1, 0.05, 0.03]
    assert paired_p_value(ours, theirs, "t") == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    assert paired_p_value(ours, theirs, "wilcoxon") == pytest.approx(stats.wilcoxon(differences).pvalue)
    assert paired_p_value({0: 1.0}, {0: 2.0}, "t") is None
    assert paired_p_value(theirs, theirs, "t") is None


def test_best_is_marked_only_where_the_test_supports_it(tmp_path: Path) -> None:
    for seed in range(5):
        make(tmp_path, "fola", seed, ga=0.8 + 0.01 * seed, nll=0.5 + 0.2 * (seed % 2))
        make(tmp_path, "fedavg", seed, ga=0.7 + 0.011 * seed, nll=0.6 - 0.1 * (seed % 3))
        make(tmp_path, "fedprox", seed, ga=0.6 + 0.012 * seed, nll=0.55)
    rows = rows_of(tmp_path)
    mark_best(rows, ["ga", "nll"], "t")
    assert {row.label["method.name"]: row.best_in for row in rows} == {
        "fola": {"ga"},
        "fedavg": set(),
        "fedprox": set(),
    }
    again = rows_of(tmp_path)
    mark_best(again, ["ga"], "wilcoxon")  # five seeds: its smallest p-value is 0.0625
    assert not any(row.best_in for row in again)


def test_a_lower_loss_is_better_and_what_has_no_direction_is_never_best(tmp_path: Path) -> None:
    """`gap` is a column of a user's own method, `kl` one that is neither good nor bad."""
    for seed in range(5):
        for method, level in (("fola", 0.1), ("fedavg", 0.5), ("fedprox", 0.9)):
            value = level + 0.01 * seed + 0.001 * seed * level  # differences vary a little over seeds
            names = ("ga", "nll", "nll@eaa", "distillation_loss", "kl", "gap", "gap@eaa")
            make(tmp_path, method, seed, **dict.fromkeys(names, value))
    rows = rows_of(tmp_path)
    mark_best(rows, ["ga", "nll", "nll@eaa", "distillation_loss", "kl", "gap", "gap@eaa"], "t")
    assert {row.label["method.name"]: row.best_in for row in rows} == {
        "fola": {"nll", "nll@eaa", "distillation_loss"},
        "fedavg": set(),
        "fedprox": {"ga"},
    }
    assert all(row.stats("gap") is not None for row in rows)


def test_blocks_are_compared_separately_and_missing_cells_shown(tmp_path: Path) -> None:
    for alpha in (0.1, 1.0):
        for method in ("fola", "fedavg", "fedprox"):
            if (alpha, method) != (1.0, "fedprox"):
                make(tmp_path, method, 0, f"partition.alpha={alpha}")
    rows = rows_of(tmp_path)
    missing = [row.label for row in rows if row.group is None]
    assert missing == [{"partition.alpha": 1, "method.name": "fedprox"}]
    assert len(rows) == 6


def test_ranks_over_settings(tmp_path: Path) -> None:
    table = {"fola": [0.9, 0.8, 0.7, 0.6], "fedavg": [0.8, 0.85, 0.6, 0.5], "fedprox": [0.7, 0.6, 0.5, 0.4]}
    for method, values in table.items():
        for alpha, value in zip((0.1, 0.3, 0.5, 1.0), values, strict=True):
            make(tmp_path, method, 0, f"partition.alpha={alpha}", ga=value)
    ranks = rank(rows_of(tmp_path), "ga")
    assert ranks is not None
    assert ranks.mean_ranks == {"fola": 1.25, "fedavg": 1.75, "fedprox": 3.0}
    assert ranks.p_value == pytest.approx(stats.friedmanchisquare(*table.values()).pvalue)
    assert ranks.critical_difference == pytest.approx(2.343 * np.sqrt(3 * 4 / (6 * 4)), rel=1e-3)  # Demsar 2006
    assert rank(rows_of(tmp_path)[:6], "ga") is None


def test_ranks_follow_the_direction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method, value in {"fola": 0.1, "fedavg": 0.2, "fedprox": 0.3}.items():
        for alpha in (0.1, 0.3, 0.5):
            make(tmp_path, method, 0, f"partition.alpha={alpha}", **dict.fromkeys(("ga", "nll", "kl", "gap"), value))
    rows = rows_of(tmp_path)
    losses, accuracies = rank(rows, "nll"), rank(rows, "ga")
    assert losses is not None
    assert accuracies is not None
    assert losses.mean_ranks == {"fola": 1, "fedavg": 2, "fedprox": 3}
    assert accuracies.mean_ranks == {"fola": 3, "fedavg": 2, "fedprox": 1}
    assert rank(rows, "kl") is None
    assert rank(rows, "gap") is None
    assert main([str(tmp_path), "--metrics", "nll", "kl", "gap"]) == 0
    sentences = [line for line in capsys.readouterr().out.splitlines() if "mean ranks" in line]
    assert [sentence.split(";")[0] for sentence in sentences] == [
        "negative log-likelihood: mean ranks over 3 settings: fola 1.00, fedavg 2.00, fedprox 3.00"
    ]


def test_bootstrap_interval() -> None:
    low, high = bootstrap_interval([0.0, 1.0] * 50)
    assert (low, high) == pytest.approx((0.4, 0.6), abs=0.02)
    assert bootstrap_interval([0.5, 0.5]) == (0.5, 0.5)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        make(tmp_path, "fola", seed, ga=0.8 + 0.01 * seed)
        folder = make(tmp_path, "fedavg", seed, ga=0.6 + 0.011 * seed)
    summary = records.read_json(folder / records.SUMMARY)
    assert summary is not None
    records.write_json(folder / records.SUMMARY, {**summary, "status": "diverged"})
    assert main([str(tmp_path), "--metrics", "ga"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "| method.name | global accuracy ↑ | seeds | diverged |" in text
    assert "| fedavg | 0.6055 +- 0.0078 | 2 | 1 |" in text
    assert "| fola | 0.8100 +- 0.0100 * | 3 | 0 |" in text
    assert "standard deviation over seeds" in text
    assert main([str(tmp_path), "--metrics", "ga", "--format", "latex", "--spread", "se"]) == 0
    text = capsys.readouterr().out
    assert r"\textbf{0.8100 $\pm$ 0.0058}" in text.replace("+-", r"$\pm$")
    assert r"method.name & global accuracy $\uparrow$ & seeds & diverged \\" in text
    assert main([str(tmp_path), "--metrics", "ga", "nll", "--format", "csv", "--to", str(tmp_path / "x/t.csv")]) == 0
    cells = list(csv.DictReader((tmp_path / "x/t.csv").read_text().splitlines()))
    assert [(cell["method.name"], cell["metric"]) for cell in cells][:2] == [("fedavg", "ga"), ("fedavg", "nll")]
    assert cells[2]["best"] == "True"
    assert main([str(tmp_path), "--metrics", "ga", "gap", "ece", "--format", "markdown"]) == 0
    head = "| method.name | global accuracy ↑    | gap | expected calibration error ↓ | seeds | diverged |"
    assert head in capsys.readouterr().out.splitlines()
    assert main([str(tmp_path), "--metrics", "ga", "gap", "ece"]) == 0
    head = "| method.name | global accuracy ↑  | gap | error ↓     | seeds | diverged |"
    assert head in capsys.readouterr().out.splitlines()
    assert main([str(tmp_path / "nothing")]) == 1
    assert "no finished run there" in capsys.readouterr().err


def test_help_lists_the_metrics_even_where_a_terminal_knows_no_arrows() -> None:
    code = "from bfl_bench.commands.report import main; main(['--help'])"
    for encoding, arrow in (("utf-8", "↓"), ("ascii", "?")):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
        words = " ".join(result.stdout.decode().split())
        assert f" nll negative log-likelihood {arrow} " in words
        assert " kl KL from the prior std_norm " in words
        assert f" seconds_per_round seconds per round {arrow} " in words
        assert " round round " not in words
