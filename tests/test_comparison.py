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
    Comparison,
    bootstrap_interval,
    compare,
    differing_keys,
    holm,
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


def compared(out: Path, *metrics: str, **options: Any) -> Comparison:
    return compare(find_runs([out], {}, diverged=True)[0], metrics or ("ga",), **options)


def marks(comparison: Comparison) -> dict[str, tuple[set[str], set[str]]]:
    """By what is compared: metrics in which it is best by a test, and by its mean alone."""
    return {row.name: (row.best_in, row.leads_in - row.best_in) for row in comparison.rows}


def test_every_key_that_differs_is_shown() -> None:
    configs = [{"a": 1, "b": x, "c": x, "method.name": name} for x in (1, 2) for name in ("fola", "fedavg")]
    assert differing_keys(configs) == ["method.name", "b", "c"]
    assert differing_keys(configs, first=["c", "a"]) == ["c", "method.name", "b"]
    assert differing_keys(configs[:1]) == []


def test_what_a_parts_name_tells_is_not_shown() -> None:
    fedavg = {"method.name": "fedavg", "method._target_": "FedAvg", "method.weights": "size"}
    fedprox = {"method.name": "fedprox", "method._target_": "FedProx", "method.weights": "size", "method.mu": 1}
    assert differing_keys([fedavg, fedprox]) == ["method.name"]
    assert differing_keys([fedavg | {"method.weights": "uniform"}, fedprox]) == ["method.name", "method.weights"]
    assert differing_keys([fedavg, fedprox, fedprox | {"method.mu": 2}]) == ["method.name", "method.mu"]
    assert differing_keys([fedprox, fedprox | {"method._target_": "mine.FedProx"}]) == ["method._target_"]
    assert differing_keys([fedavg, fedavg | {"note": "x"}]) == ["note"]


# What is compared with what


def tuned(out: Path, num_seeds: int = 3) -> None:
    """Three methods, each with a learning rate of its own, at two alphas; fola wins at 0.1 and fedprox at 1."""
    levels = {("fola", 0.1): 0.9, ("fedavg", 0.1): 0.7, ("fedprox", 0.1): 0.5}
    levels |= {("fola", 1): 0.5, ("fedavg", 1): 0.7, ("fedprox", 1): 0.9}
    for (method, alpha), level in levels.items():
        lr = {"fola": 0.1, "fedavg": 0.01, "fedprox": 0.01}[method]
        for seed in range(num_seeds):
            ga = level + 0.01 * seed + 0.001 * seed * level  # differences vary a little over seeds
            make(out, method, seed, f"partition.alpha={alpha}", f"local.lr={lr}", ga=ga)


def test_methods_with_tuned_values_of_their_own_are_compared(tmp_path: Path) -> None:
    """The block is the alpha: no row is missing, and the winner is tested against all others, whatever their lr."""
    tuned(tmp_path)
    found = compared(tmp_path)
    labels = [tuple(row.label.values()) for row in found.rows]
    assert list(found.rows[0].label) == ["partition.alpha", "method.name", "local.lr"]
    assert labels == [
        (0.1, "fola", 0.1), (0.1, "fedavg", 0.01), (0.1, "fedprox", 0.01),
        (1, "fedprox", 0.01), (1, "fedavg", 0.01), (1, "fola", 0.1),
    ]  # fmt: skip
    assert found.keys.own == ("local.lr",)
    assert found.keys.setting == ("partition.alpha",)
    assert [row.label["method.name"] for row in found.rows if row.best_in] == ["fola", "fedprox"]
    assert {(v.setting, v.num_rows, v.num_tests, v.num_seeds) for v in found.verdicts} == {
        ("alpha 0.1", 3, 2, (3, 3)),
        ("alpha 1", 3, 2, (3, 3)),
    }


def test_own_values_may_differ_between_settings(tmp_path: Path) -> None:
    """A method tuned anew for every alpha is one thing, not two of which each misses a setting."""
    for alpha, mu, lr in ((0.1, 1, 0.3), (1, 0.5, 0.1)):
        make(tmp_path, "fedprox", 0, f"partition.alpha={alpha}", f"method.mu={mu}", f"local.lr={lr}")
        make(tmp_path, "fedavg", 0, f"partition.alpha={alpha}")
    found = compared(tmp_path)
    assert found.keys.own == ("local.lr", "method.mu")
    assert len(found.rows) == 4
    assert len({row.block for row in found.rows}) == 2
    assert {row.name for row in found.rows} == {"fedprox", "fedavg"}


def test_what_was_varied_for_a_method_is_no_value_of_its_own(tmp_path: Path) -> None:
    for lr in (0.1, 0.01):
        make(tmp_path, "fola", 0, f"local.lr={lr}")
        make(tmp_path, "fedavg", 0, f"local.lr={lr}")
    make(tmp_path, "fedprox", 0, "local.lr=0.01")
    found = compared(tmp_path)
    assert found.keys.setting == ("local.lr",)
    assert [row.label for row in found.rows if row.group is None] == [{"local.lr": 0.1, "method.name": "fedprox"}]


def test_what_all_rows_of_a_setting_share_belongs_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both methods train longer at alpha 1 and on other data: that tells settings, not methods."""
    for method in ("fola", "fedavg"):
        make(tmp_path, method, 0, "partition.alpha=0.1", "local.epochs=1", "method.weights=size")
        make(tmp_path, method, 0, "partition.alpha=1", "local.epochs=2", "method.weights=uniform")
    keys = compared(tmp_path).keys
    assert (keys.setting, keys.along) == (("partition.alpha",), ("local.epochs", "method.weights"))
    assert (keys.compared, keys.own) == (("method.name",), ())
    assert keys.columns == ("partition.alpha", "local.epochs", "method.weights", "method.name")
    assert {row.setting for row in compared(tmp_path).rows} == {"alpha 0.1", "alpha 1"}
    assert main([str(tmp_path), "--format", "latex"]) == 0  # which has no columns for them
    assert "At alpha 0.1: local.epochs 1, method.weights size." in capsys.readouterr().out


def test_of_a_setting_with_very_many_keys_those_that_tell_it_have_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["rounds=7", "num_clients=5", "model.hidden=[9]", "eval.ece_bins=7", "participation=0.5", "local.epochs=2"]
    for method in ("fola", "fedavg"):
        make(tmp_path, method, 0, "partition.alpha=0.1")
        make(tmp_path, method, 0, "partition.alpha=1", *more)
    found = compared(tmp_path)
    assert found.keys.columns == ("partition.alpha", "method.name")
    assert len(found.keys.along) == 6
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    sentence = "num_clients 5, eval.ece_bins 7, local.epochs 2, model.hidden [9], participation 0.5, rounds 7."
    assert f"\nAt alpha 1: {sentence}\n" in text
    assert "\nAt alpha 0.1: num_clients 10, " in text


def test_a_task_is_never_a_value_of_a_method(tmp_path: Path) -> None:
    """Each method has one alpha and one number of rounds, but they are not compared with one another."""
    make(tmp_path, "fola", 0, "partition.alpha=0.1", ga=0.9)
    make(tmp_path, "fedavg", 0, "partition.alpha=1")
    found = compared(tmp_path)
    assert found.keys.setting == ("partition.alpha",)
    assert not any(row.leads_in for row in found.rows)
    assert found.verdicts == []


def test_several_values_of_a_methods_own_key_are_compared(tmp_path: Path) -> None:
    make(tmp_path, "fedavg", 0, ga=0.5)
    for mu, ga in ((1, 0.4), (2, 0.6)):
        make(tmp_path, "fedprox", 0, f"method.mu={mu}", ga=ga)
    found = compared(tmp_path)
    assert [row.name for row in found.rows] == ["fedprox, mu 2", "fedavg", "fedprox, mu 1"]
    assert len({row.block for row in found.rows}) == 1
    lr = compared(tmp_path, compared=["method.mu"])
    assert lr.keys.compared == ("method.mu",)
    assert lr.keys.setting == ("method.name",)


def test_groups_are_never_mixed(tmp_path: Path) -> None:
    for seed in (0, 1):
        make(tmp_path, "fedavg", seed, ga=0.4 + 0.2 * seed)
        make(tmp_path, "fedavg", seed, "local.lr=0.3", ga=0.9)
        make(tmp_path, "fola", seed, ga=0.7)
    rows = compared(tmp_path).rows
    labels = [tuple(row.label.values()) for row in rows]
    assert labels == [(0.1, "fola"), (0.1, "fedavg"), (0.3, "fedavg")]
    found = rows[1].stats("ga")
    assert found is not None
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
    assert paired_p_value(theirs, theirs, "t") == paired_p_value(theirs, theirs, "wilcoxon") == 1


def test_best_is_marked_only_where_the_test_supports_it(tmp_path: Path) -> None:
    for seed in range(5):
        make(tmp_path, "fola", seed, ga=0.8 + 0.01 * seed, nll=0.5 + 0.2 * (seed % 2))
        make(tmp_path, "fedavg", seed, ga=0.7 + 0.011 * seed, nll=0.6 - 0.1 * (seed % 3))
        make(tmp_path, "fedprox", seed, ga=0.6 + 0.012 * seed, nll=0.55)
    assert marks(compared(tmp_path, "ga", "nll")) == {
        "fola": ({"ga"}, set()),
        "fedavg": (set(), {"nll"}),
        "fedprox": (set(), set()),
    }
    again = compared(tmp_path, test="wilcoxon")  # five seeds: its smallest p-value is 0.0625
    assert marks(again)["fola"] == (set(), {"ga"})
    assert [verdict.reason for verdict in again.verdicts] == [
        "a Wilcoxon test over fewer than 7 seeds cannot tell, with Holm over 2"
    ]


def test_tests_are_corrected_for_their_number(tmp_path: Path) -> None:
    """Differences d - e, d, d + e with e = 0.3572 d give t = 4.849 and, with two degrees of freedom, p = 0.04."""
    for seed, part in enumerate((-1, 0, 1)):
        difference = 0.1 * (1 + 0.3572 * part)
        make(tmp_path, "fola", seed, ga=0.8)
        make(tmp_path, "fedavg", seed, ga=0.8 - difference)
    assert marks(compared(tmp_path))["fola"] == ({"ga"}, set())
    for seed, part in enumerate((-1, 0, 1)):
        make(tmp_path, "fedprox", seed, ga=0.8 - 0.2 * (1 + 0.3572 * part))
    assert marks(compared(tmp_path))["fola"] == (set(), {"ga"})  # Holm: twice 0.04


def test_the_best_has_to_beat_every_other_row(tmp_path: Path) -> None:
    for seed, noise in enumerate((0.03, -0.02, 0.01)):
        make(tmp_path, "fola", seed, ga=0.8)
        make(tmp_path, "fedavg", seed, ga=0.2 + 0.01 * noise)  # beaten far and evenly
        make(tmp_path, "fedprox", seed, ga=0.79 + noise)  # ahead for one of the seeds
    assert marks(compared(tmp_path))["fola"] == (set(), {"ga"})


def test_wilcoxon_is_used_as_soon_as_it_can_tell(tmp_path: Path) -> None:
    """With one rival six seeds are enough: 2 / 2^6 = 0.031."""
    for seed in range(6):
        make(tmp_path, "fola", seed, ga=0.8 + 0.01 * seed)
        make(tmp_path, "fedavg", seed, ga=0.7 + 0.011 * seed)
    found = compared(tmp_path, test="wilcoxon")
    assert marks(found)["fola"] == ({"ga"}, set())
    assert [verdict.reason for verdict in found.verdicts] == [""]


def test_a_row_with_one_seed_leaves_the_tests_of_the_others(tmp_path: Path) -> None:
    for seed in range(4):
        make(tmp_path, "fola", seed, ga=0.8 + 0.01 * seed, nll=0.5)
        make(tmp_path, "fedavg", seed, ga=0.7 + 0.011 * seed, nll=0.6)
    make(tmp_path, "fedprox", 0, ga=0.1, nll=0.1)
    found = compared(tmp_path, "ga", "nll")
    assert marks(found) == {"fola": ({"ga", "nll"}, set()), "fedavg": (set(), set()), "fedprox": (set(), {"nll"})}
    assert [(v.num_tests, v.untested, v.reason) for v in found.verdicts] == [(1, ("fedprox",), "")] * 2


def test_rows_that_share_no_seeds_are_not_tested(tmp_path: Path) -> None:
    for seed in (0, 1):
        make(tmp_path, "fola", seed, ga=0.9)
        make(tmp_path, "fedavg", seed + 2, ga=0.5)
    found = compared(tmp_path)
    assert marks(found)["fola"] == (set(), {"ga"})
    assert [verdict.reason for verdict in found.verdicts] == ["rows share fewer than two seeds"]


def test_the_best_mean_is_shown_without_a_test_too_and_why(tmp_path: Path) -> None:
    make(tmp_path, "fola", 0, ga=0.9)
    make(tmp_path, "fedprox", 0, ga=0.9)
    make(tmp_path, "fedavg", 0, ga=0.5)
    found = compared(tmp_path)
    assert marks(found) == {"fola": (set(), {"ga"}), "fedprox": (set(), {"ga"}), "fedavg": (set(), set())}
    assert [verdict.reason for verdict in found.verdicts] == ["one seed per row"]
    make(tmp_path, "fedavg", 1, ga=0.5)
    assert [v.reason for v in compared(tmp_path).verdicts] == ["only one row has more than one seed"]


def test_a_lower_loss_is_better_and_what_has_no_direction_is_never_best(tmp_path: Path) -> None:
    """`gap` is a column of a user's own method, `kl` one that is neither good nor bad."""
    for seed in range(5):
        for method, level in (("fola", 0.1), ("fedavg", 0.5), ("fedprox", 0.9)):
            value = level + 0.01 * seed + 0.001 * seed * level  # differences vary a little over seeds
            names = ("ga", "nll", "nll@eaa", "distillation_loss", "kl", "gap", "gap@eaa")
            make(tmp_path, method, seed, **dict.fromkeys(names, value))
    found = compared(tmp_path, "ga", "nll", "nll@eaa", "distillation_loss", "kl", "gap", "gap@eaa")
    assert marks(found) == {
        "fola": ({"nll", "nll@eaa", "distillation_loss"}, set()),
        "fedavg": (set(), set()),
        "fedprox": ({"ga"}, set()),
    }
    assert all(row.stats("gap") is not None for row in found.rows)


def test_rows_stand_best_first_within_numbered_settings(tmp_path: Path) -> None:
    for alpha in (0.1, 2, 10):  # as texts, 10 would come before 2
        make(tmp_path, "fedavg", 0, f"partition.alpha={alpha}", ga=0.6, nll=0.6, kl=0.6)
        make(tmp_path, "fola", 0, f"partition.alpha={alpha}", ga=0.5, nll=0.5, kl=0.5)

    def order(metric: str) -> list[tuple[object, ...]]:
        return [tuple(row.label.values()) for row in compared(tmp_path, metric).rows]

    assert order("ga") == [(alpha, name) for alpha in (0.1, 2, 10) for name in ("fedavg", "fola")]
    assert order("nll") == [(alpha, name) for alpha in (0.1, 2, 10) for name in ("fola", "fedavg")]
    assert order("kl") == [(alpha, name) for alpha in (0.1, 2, 10) for name in ("fedavg", "fola")]  # by name


def test_blocks_are_compared_separately_and_missing_cells_shown(tmp_path: Path) -> None:
    for alpha in (0.1, 1.0):
        for method in ("fola", "fedavg", "fedprox"):
            if (alpha, method) != (1.0, "fedprox"):
                make(tmp_path, method, 0, f"partition.alpha={alpha}")
    rows = compared(tmp_path).rows
    missing = [row.label for row in rows if row.group is None]
    assert missing == [{"partition.alpha": 1, "method.name": "fedprox"}]
    assert len(rows) == 6


def test_of_many_missing_combinations_only_the_number_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five alphas, each with a pair of methods of its own: of ten methods eight are missing everywhere."""
    names = ["fola", "fedavg", "fedprox", "fedcurv", "scaffold", "fednova", "fedov", "fedlpa", "swag", "ensemble"]
    alphas = [0.1, 0.2, 0.3]
    for i, alpha in enumerate(alphas):
        for method in names[2 * i : 2 * i + 2]:
            make(tmp_path, method, 0, f"partition.alpha={alpha}")
    found = compared(tmp_path)
    assert (sum(row.group is None for row in found.rows), found.num_missing) == (12, 0)
    for i, alpha in enumerate((0.4, 0.5), 3):
        for method in names[2 * i : 2 * i + 2]:
            make(tmp_path, method, 0, f"partition.alpha={alpha}")
    found = compared(tmp_path)
    assert (sum(row.group is None for row in found.rows), found.num_missing) == (0, 40)
    assert main([str(tmp_path)]) == 0
    assert "40 combinations of settings and what is compared were not run" in capsys.readouterr().out


def test_ranks_over_settings(tmp_path: Path) -> None:
    table = {"fola": [0.9, 0.8, 0.7, 0.6], "fedavg": [0.8, 0.85, 0.6, 0.5], "fedprox": [0.7, 0.6, 0.5, 0.4]}
    for method, values in table.items():
        for alpha, value in zip((0.1, 0.3, 0.5, 1.0), values, strict=True):
            make(tmp_path, method, 0, f"partition.alpha={alpha}", ga=value)
    ranks = rank(compared(tmp_path).rows, "ga")
    assert ranks is not None
    assert ranks.mean_ranks == {"fola": 1.25, "fedavg": 1.75, "fedprox": 3.0}
    assert ranks.p_value == pytest.approx(stats.friedmanchisquare(*table.values()).pvalue)
    assert ranks.critical_difference == pytest.approx(2.343 * np.sqrt(3 * 4 / (6 * 4)), rel=1e-3)  # Demsar 2006
    assert rank(compared(tmp_path).rows[:6], "ga") is None


def test_ranks_follow_the_direction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method, value in {"fola": 0.1, "fedavg": 0.2, "fedprox": 0.3}.items():
        for alpha in (0.1, 0.3, 0.5):
            make(tmp_path, method, 0, f"partition.alpha={alpha}", **dict.fromkeys(("ga", "nll", "kl", "gap"), value))
    rows = compared(tmp_path).rows
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
    assert "fola & \\textbf{81.00 $\\pm$ 0.58} \\\\\n" in text
    assert " & global accuracy (\\%) $\\uparrow$ \\\\\n" in text
    assert "3 seeds; fewer for fedavg: 2. Diverged runs, not in the means: fedavg: 1." in text
    assert main([str(tmp_path), "--metrics", "ga", "nll", "--format", "csv", "--to", str(tmp_path / "x/t.csv")]) == 0
    cells = list(csv.DictReader((tmp_path / "x/t.csv").read_text().splitlines()))
    assert [(cell["method.name"], cell["metric"]) for cell in cells][:2] == [("fola", "ga"), ("fola", "nll")]
    assert [cell["best"] for cell in cells] == ["True", "False", "False", "False"]
    assert [cell["best_mean"] for cell in cells] == ["True", "True", "False", "True"]
    assert main([str(tmp_path), "--metrics", "ga", "kl", "ece", "--format", "markdown"]) == 0
    head = (
        "| method.name | global accuracy ↑    | KL from the prior | expected calibration error ↓ | seeds | diverged |"
    )
    assert head in capsys.readouterr().out.splitlines()
    assert main([str(tmp_path), "--metrics", "ga", "kl", "ece"]) == 0
    head = "| method.name | global accuracy ↑  | prior | error ↓     | seeds | diverged |"
    assert head in capsys.readouterr().out.splitlines()
    assert main([str(tmp_path / "nothing")]) == 1
    assert "no finished run there" in capsys.readouterr().err


@pytest.mark.slow
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
