"""Suites: equal budgets, choices that never see a test example, results as data, ranks, a stranger's method."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from bfl_bench import records
from bfl_bench.build import load, plan
from bfl_bench.commands import suite as command
from bfl_bench.commands.cells import compose_cells
from bfl_bench.errors import ConfigError, RunError
from bfl_bench.evaluation import columns
from bfl_bench.papers.spec import Cell
from bfl_bench.report.comparison import Ranks, Row
from bfl_bench.report.runs import Group, Run
from bfl_bench.run.environment import describe_cpu
from bfl_bench.run.estimate import Estimate
from bfl_bench.suite.choosing import Trial, freeze, keep_better_half, read_choices, read_trial, sort_trials
from bfl_bench.suite.drawing import draw_fronts, draw_ranks
from bfl_bench.suite.ranking import compare_orders, compare_with, find_front, find_ties
from bfl_bench.suite.results import TIMES, Result, read_results
from bfl_bench.suite.showing import describe, name_fronts
from bfl_bench.suite.spec import (
    Suite,
    choose,
    find_suite,
    list_suites,
    read_suite,
    report_cells,
    search_cells,
    search_points,
)
from bfl_bench.suite.tables import merge_rows, read_rows
from bfl_bench.suite.verifying import compare_result
from tests.composing import heed_interrupts

TINY: dict[str, Any] = {
    "title": "Tiny",
    "values": {
        "dataset": "synthetic",
        "dataset.train_samples": 90,
        "dataset.test_samples": 30,
        "dataset.num_classes": 3,
        "dataset.shape": [1, 4, 4],
        "num_clients": 3,
        "local.epochs": 1,
        "model.hidden": [4],
        "partition.validation": 0.2,
        "eval.uncertainty": True,
    },
    "points": 2,
    "search_seed": 1000,
    "seeds": 2,
    "metrics": ["nll_calibrated", "ga", "ece", "ece_calibrated"],
    "search": {"local.lr": {"low": 0.01, "high": 0.5}, "local.momentum": [0.0, 0.9]},
    "settings": {"near": {"partition.alpha": 10.0, "rounds": 2}, "far": {"partition.alpha": 0.5, "rounds": 1}},
    "methods": {"fedavg": {"label": "FedAvg"}, "fedprox": {"search": {"method.mu": {"low": 0.01, "high": 1.0}}}},
}


def write_suite(folder: Path, **changes: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | changes, sort_keys=False))
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Suite:
    return read_suite(write_suite(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", list_suites())
def test_every_shipped_suite_composes_with_one_budget_for_all(name: str) -> None:
    suite = find_suite(name)
    assert {len(search_points(suite, method)) for method in suite.methods} == {suite.points}
    assert all(columns.find(metric) for metric in suite.metrics)
    points = {method: search_points(suite, method)[0] for method in suite.methods}
    settings = list(suite.settings)  # each method in one of them, each of them with one
    chosen: dict[str, dict[str, dict[str, Any]]] = {setting: {} for setting in settings}
    for number, (method, point) in enumerate(points.items()):
        chosen[settings[number % len(settings)]][method] = point
    composed = compose_cells([cell for cell in report_cells(suite, chosen) if cell.seed == suite.seeds[0]])
    assert len({one.name for one in composed}) == len(suite.methods)
    for one in composed:
        assert one.config["partition"]["validation"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting"), [(name, one) for name in list_suites() for one in find_suite(name).settings]
)
def test_every_method_of_a_shipped_suite_can_run_in_every_setting(name: str, setting: str) -> None:
    """What a method refuses, such as too few local epochs, would leave a gap that is found after hours."""
    suite = choose(find_suite(name), [setting], [])
    first = [
        cell.with_words([f"data_dir={records.STAND_IN}"]) for cell in search_cells(suite) if cell.names["point"] == "0"
    ]
    assert len(first) == len(suite.methods)
    for one in compose_cells([cell.with_words([f"data_dir={records.STAND_IN}"]) for cell in first]):
        load(plan(one.config))


def test_points_are_spread_and_do_not_depend_on_other_methods(tmp_path: Path) -> None:
    suite = read_suite(write_suite(tmp_path, points=16))
    points = search_points(suite, "fedprox")
    assert points == search_points(
        read_suite(write_suite(tmp_path, points=16, methods={"fedprox": TINY["methods"]["fedprox"]})), "fedprox"
    )
    assert points != search_points(suite, "fedavg")
    for low, high in ((0.01, math.sqrt(0.005)), (math.sqrt(0.005), 0.5)):  # halves of the range, on a log scale
        assert sum(low <= point["local.lr"] <= high for point in points) == 8
    assert sorted({point["local.momentum"] for point in points}) == [0.0, 0.9]
    assert all(0.01 <= point["method.mu"] <= 1 for point in points)


def test_search_runs_have_no_test_set_and_reported_runs_no_search_seed(tiny: Suite) -> None:
    searched, reported = search_cells(tiny), report_cells(tiny, {"near": {"fedavg": {"local.lr": 0.1}}})
    assert len(searched) == 2 * 2 * 2
    assert {cell.values["eval.scored"] for cell in searched} == {"validation"}
    assert {cell.seed for cell in searched} == {1000}
    assert {cell.seed for cell in reported} == {0, 1}
    assert not any("eval.scored" in cell.values for cell in reported)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search_seed": 1}, "search_seed: got 1, allowed: a seed that no reported run has"),
        ({"select": "ece"}, "select: got 'ece', allowed: nll, ga"),
        ({"halvings": 2}, "halvings: got 2, allowed: so few that one of 2 points is left"),
        ({"metods": {}}, "tiny.yaml: got 'metods'"),
        ({"methods": {"fedavg": {"lr": 1}}}, "methods.fedavg: got 'lr'"),
        ({"methods": {"fedavg": {"search": {"local.lr": {"low": 0, "high": 1}}}}}, "search.local.lr: got"),
    ],
)
def test_a_wrong_suite_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_suite(write_suite(tmp_path, **changes))
    assert message in str(raised.value)


def trial(point: int, nll: float, ga: float, rung: int = 0) -> Trial:
    return Trial(
        setting="near",
        method="fedavg",
        point=point,
        rung=rung,
        values={"local.lr": point},
        nll=nll,
        ga=ga,
        run=f"r{point}",
    )


def test_the_best_trial_has_the_lowest_nll_then_the_highest_accuracy() -> None:
    trials = [trial(0, 0.5, 0.9), trial(1, 0.3, 0.7), trial(2, 0.3, 0.8), trial(3, math.inf, 0.0)]
    assert [one.point for one in sort_trials(trials, "nll")] == [2, 1, 0]
    assert [one.point for one in sort_trials(trials, "ga")] == [0, 2, 1]


def test_halvings_keep_the_better_points_and_double_the_rounds(tmp_path: Path) -> None:
    settings = {name: {"rounds": 12} for name in ("near", "far")}
    suite = read_suite(write_suite(tmp_path, points=8, halvings=2, settings=settings))
    first = search_cells(suite)
    assert {cell.values["rounds"] for cell in first} == {3}
    assert len(first) == 2 * 2 * 8
    trials = [trial(point, nll, 0.5) for point, nll in enumerate([5, 1, math.inf, 2, 9, 3, 4, 8])]
    kept = keep_better_half(trials, "nll", 4)
    assert kept == {("near", "fedavg"): [1, 3, 5, 6]}
    second, third = (search_cells(suite, rung, kept) for rung in (1, 2))
    assert [(int(cell.names["point"]), cell.values["rounds"]) for cell in second] == [(n, 6) for n in (1, 3, 5, 6)]
    assert {cell.values["rounds"] for cell in third} == {12}


def test_what_the_longest_runs_say_is_chosen(tmp_path: Path) -> None:
    suite = read_suite(write_suite(tmp_path, halvings=1))
    freeze(suite, [trial(0, 0.1, 0.9), trial(1, 0.2, 0.9), trial(1, 0.15, 0.9, rung=1)], tmp_path)
    (choice,) = read_choices(tmp_path, "tiny")["near"].values()
    assert (choice["values"], choice["nll"], choice["points"]) == ({"local.lr": 1}, 0.15, 2)
    assert [(row["point"], row["rung"]) for row in read_rows(tmp_path / "search.csv")] == [("0", "0"), ("1", "1")]


def test_an_incomplete_search_chooses_nothing_and_a_complete_one_is_frozen(tmp_path: Path, tiny: Suite) -> None:
    assert freeze(tiny, [trial(0, 0.5, 0.9)], tmp_path) == {"near": ["fedavg", "fedprox"], "far": ["fedavg", "fedprox"]}
    assert read_choices(tmp_path, "tiny") == {}
    left = freeze(tiny, [trial(0, 0.5, 0.9), trial(1, math.inf, 0.0)], tmp_path)
    assert left == {"near": ["fedprox"], "far": ["fedavg", "fedprox"]}
    (choice,) = read_choices(tmp_path, "tiny")["near"].values()
    assert (choice["values"], choice["points"], choice["diverged"]) == ({"local.lr": 0}, 2, 1)
    assert [row["nll"] for row in read_rows(tmp_path / "search.csv")] == ["0.5", ""]
    with pytest.raises(RunError, match="not a file of chosen values of suite other"):
        read_choices(tmp_path, "other")


@pytest.mark.parametrize("by", [{"set": "test", "column": "ga"}, {"set": "validation", "column": "validation_nll"}])
def test_a_run_that_knows_the_test_set_is_no_trial(tmp_path: Path, by: dict[str, str]) -> None:
    final = {"round": 1, "nll": 0.1, "ga": 0.9}
    records.write_json(tmp_path / records.SUMMARY, {"status": "done", "final": final, "best_by": by})
    with pytest.raises(RunError, match="not of validation examples alone"):
        read_trial(tmp_path, Cell(names={}, values={}), {})


def test_rows_are_merged_whatever_the_order(tmp_path: Path) -> None:
    rows = [{"setting": "a", "seed": seed, "ga": seed / 10, f"only_{seed}": 1} for seed in (10, 2, 0)]
    merge_rows(tmp_path / "one.csv", rows, ("setting", "seed"))
    for row in rows[::-1]:
        merge_rows(tmp_path / "two.csv", [{**row, "ga": "wrong"}], ("setting", "seed"))
        merge_rows(tmp_path / "two.csv", [row], ("setting", "seed"))
    assert (tmp_path / "one.csv").read_text() == (tmp_path / "two.csv").read_text()
    assert [row["seed"] for row in read_rows(tmp_path / "one.csv")] == ["0", "2", "10"]


def make_row(name: str, setting: str = "near", **metrics: list[float]) -> Row:
    seeds = range(len(next(iter(metrics.values()))))
    runs = tuple(Run(Path(), {"seed": s}, {key: values[s] for key, values in metrics.items()}) for s in seeds)
    return Row(label={}, block=setting, setting=setting, name=name, group=Group({"method.name": name}, runs))


def test_ties_are_the_longest_groups_within_the_critical_difference() -> None:
    ranks = Ranks({"a": 1.0, "b": 1.8, "c": 2.9, "d": 6.0}, 0.01, 2.0, 5)
    assert find_ties(ranks) == [["a", "b", "c"]]
    ranks = Ranks({"a": 1.0, "b": 2.5, "c": 4.0, "d": 9.0}, 0.01, 2.0, 5)
    assert find_ties(ranks) == [["a", "b"], ["b", "c"]]
    figure = draw_ranks(ranks, find_ties(ranks), "accuracy")
    assert {text.get_text().strip() for text in figure.axes[0].texts} >= {"a 1.00", "b 2.50", "c 4.00", "d 9.00"}


def test_the_front_has_what_nothing_beats() -> None:
    points = {"cheap": (1.0, 0.5), "good": (3.0, 0.9), "beaten": (3.0, 0.8), "twin": (3.0, 0.9), "dear": (9.0, 0.7)}
    assert find_front(points) == ["cheap", "good", "twin"]


def test_fronts_are_of_calibrated_loss_accuracy_and_detection_where_they_are_there(tmp_path: Path) -> None:
    """Far away nothing was calibrated and no foreign set is there; numbers have no accuracy."""
    settings: dict[str, dict[str, Any]] = {name: {} for name in ("near", "far", "numbers")}
    suite = read_suite(write_suite(tmp_path, settings=settings, metrics=["nll_calibrated", "ga", "nll"]))
    foreign = {"auroc_entropy@mnist": [0.8], "auroc_entropy@mnist@draws": [0.9]}
    costs = {"bytes_up": [1.0], "client_seconds": [1.0]}
    rows = [
        make_row("FedAvg", "near", ga=[0.9], nll_calibrated=[0.3], nll=[0.4], **foreign, **costs),
        make_row("FedAvg", "far", ga=[0.8], nll=[0.5], **costs),
        make_row("FedAvg", "numbers", nll=[1.5], **costs),
    ]
    fronts = name_fronts(suite, rows)
    assert fronts == {
        "pareto": {"near": "nll_calibrated", "far": "ga", "numbers": "nll"},
        "pareto_accuracy": {"near": "ga", "far": "ga"},
        "pareto_ood": {"near": "auroc_entropy@mnist"},
    }
    titles = [axes.get_title() for axes in draw_fronts(rows, fronts["pareto_accuracy"], list(costs)).axes]
    assert titles == ["near", "near", "far", "far"]
    sentences = describe(suite, [], rows, None)
    assert "near: on the front of AUROC by entropy, mnist against client time: FedAvg." in sentences


def test_orders_before_and_after_a_temperature_are_compared_where_tests_tell() -> None:
    noise = [0.0, 0.001, -0.001, 0.002, 0.0]
    rows = [
        make_row("a", ece=[0.1 + e for e in noise], ece_calibrated=[0.05 + e for e in noise[::-1]]),
        make_row("b", ece=[0.2 + e for e in noise[::-1]], ece_calibrated=[0.03 + e for e in noise]),
        make_row("c", ece=[0.3 - e for e in noise], ece_calibrated=[0.0311 - e for e in noise[::-1]]),
    ]
    found = compare_orders(rows, "ece", "ece_calibrated")
    assert found is not None
    assert (found.num_pairs, found.num_kept, found.num_reversed) == (3, 0, 2)  # b and c become a tie
    assert found.correlation == pytest.approx(-1 / 3)
    assert compare_orders(rows[:2], "ece", "ece_calibrated") is None


def test_methods_are_compared_with_the_baseline_by_direction() -> None:
    rows = [
        make_row("FedAvg", nll=[1.0, 1.1, 0.9]),
        make_row("better", nll=[0.5, 0.61, 0.4]),
        make_row("same", nll=[1.1, 1.0, 0.9]),
        make_row("alone", "far", nll=[1.0, 2.0, 3.0]),
    ]
    better, same = compare_with(rows, "nll", "FedAvg")
    assert (better.method, same.method) == ("better", "same")
    assert better.difference == pytest.approx(0.4967, abs=1e-4)  # positive although NLL is lower
    assert better.p_value is not None
    assert better.p_value < 0.01
    assert same.difference == pytest.approx(0.0)
    assert same.p_value == 1.0


def stored(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "setting": "near", "method": "fedavg", "label": "FedAvg", "seed": 0, "values": {}, "status": "done",
        "points": 2, "run": "name", "commit": "", "cpu": "x", "measured": {"ga": 0.5, "client_seconds": 1.0},
    }  # fmt: skip
    return Result(**values | changes)


def test_a_run_made_again_is_compared_to_the_last_digit_on_the_same_cpu_only() -> None:
    again = {"status": "done", "cpu": "x", "ga": 0.5, "client_seconds": 2.0}
    assert compare_result(stored(), again, "name") == []
    off = {**again, "ga": math.nextafter(0.5, 1)}
    assert compare_result(stored(), off, "name") == ["ga 0.5000000000000001, not 0.5"]
    assert compare_result(stored(cpu="y"), off, "name") == []
    assert compare_result(stored(cpu="y"), {**again, "ga": 0.6}, "name") == ["ga 0.6, not 0.5"]
    assert compare_result(stored(), {**again, "status": "diverged"}, "name") == ["diverged, not done"]
    assert compare_result(stored(), {**again, "nll": 1.0}, "other") == [
        "is called other, not name",
        "other columns: nll",
    ]
    assert compare_result(stored(), None, "name") == ["was not finished"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_suite(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_search_that_halves_ends_with_runs_of_full_length(here: Path) -> None:
    write_suite(here, points=4, halvings=1, settings={"near": {"partition.alpha": 10.0, "rounds": 4}})
    assert command.main(["tune", "tiny.yaml", "--method", "fedavg"]) == 0
    rows = read_rows(here / "outputs/suite/tiny/search.csv")
    assert sorted(row["rung"] for row in rows) == ["0", "0", "1", "1"]
    for row in rows:
        summary = records.read_json(here / "outputs" / row["run"] / records.SUMMARY)
        assert summary is not None
        assert summary["final"]["round"] == {"0": 2, "1": 4}[row["rung"]]
    best = min((row for row in rows if row["rung"] == "1"), key=lambda row: float(row["nll"]))
    choice = read_choices(here / "outputs/suite/tiny", "tiny")["near"]["fedavg"]
    assert choice["values"] == json.loads(best["values"])


def test_hours_are_counted_before_any_run_and_by_runs_that_are_there(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour for a run of FedAvg; FedProx cannot run, and why is said; FedAvg's runs near are there, of 18 s each."""
    settings = {name: {"partition.alpha": 10.0, "rounds": 2} for name in ("near", "far")}
    write_suite(here, settings=settings, methods={"fedavg": {}, "fedprox": {"values": {"server.rule": "none"}}})
    monkeypatch.setattr("bfl_bench.run.estimate.estimate", lambda experiment: Estimate(3000.0, 600.0))
    assert command.main(["tune", "tiny.yaml", "--dry-run"]) == 0
    found = capsys.readouterr().out
    assert "every method: 2 search points on seed 1000, 2 reported seeds\nrounds: near 2, far 2\n" in found
    for setting in settings:
        assert f"{setting}: 4 runs to make, about 2.00 CPU hours; without fedprox (server.rule: got 'none'" in found
    assert found.endswith("8 of 8 runs to make, about 4.0 CPU hours\n")
    monkeypatch.setattr(command, "_is_finished", lambda one: one.cell.names["point"] == "0")
    monkeypatch.setattr(records, "read_table", lambda path: [{"wall_seconds": 12.0, "evaluation_seconds": 6.0}])
    assert command.main(["tune", "tiny.yaml", "--dry-run", "--method", "fedavg", "--setting", "near"]) == 0
    assert capsys.readouterr().out.endswith("1 of 2 runs to make, about 0.0 CPU hours\n")
    monkeypatch.setattr(records, "read_table", lambda path: [{"wall_seconds": 12.0, "evaluation_seconds": 6.0}] * 200)
    assert command.main(["tune", "tiny.yaml", "--dry-run", "--method", "fedavg", "--setting", "near"]) == 0
    assert "near: 1 runs to make, about 1.00 CPU hours\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["engine=processes", "engine.workers=2"], marks=pytest.mark.slow),
        pytest.param(["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"], marks=pytest.mark.launchers),
    ],
)
def test_engines_and_launchers_find_the_same(words: list[str], here: Path) -> None:
    program = [sys.executable, "-m", "bfl_bench.commands.suite", "tune", "tiny.yaml", "--setting", "far"]
    for folder, more in (("plain", []), ("other", words)):
        subprocess.run([*program, "--to", folder, f"out={folder}/runs", *more], check=True, capture_output=True)
    assert (here / "other/search.csv").read_text() == (here / "plain/search.csv").read_text()
    assert (here / "other/chosen.yaml").read_text() == (here / "plain/chosen.yaml").read_text()


@pytest.mark.slow
def test_a_suite_from_its_search_to_its_page(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", "tiny.yaml"]) == 1
    assert "there are no results of tiny yet" in capsys.readouterr().err
    assert command.main(["tune", "tiny.yaml", "--dry-run"]) == 0
    assert "8 of 8 runs to make" in capsys.readouterr().out
    assert command.main(["tune", "tiny.yaml"]) == 0
    choices = read_choices(here / "outputs/suite/tiny", "tiny")
    for setting in TINY["settings"]:
        trials = [row for row in read_rows(here / "outputs/suite/tiny/search.csv") if row["setting"] == setting]
        for method, choice in choices[setting].items():
            best = min((row for row in trials if row["method"] == method), key=lambda row: float(row["nll"]))
            assert choice["values"] == json.loads(best["values"])
    assert command.main(["run", "tiny.yaml"]) == 0
    results = read_results([here / "outputs/suite/tiny"])
    assert len(results) == 2 * 2 * 2
    assert {one.points for one in results} == {2}
    assert {one.cpu for one in results} == {" ".join(describe_cpu().values())}
    assert command.main(["run", "tiny.yaml", "--dry-run"]) == 0
    assert "0 of 8 runs to make" in capsys.readouterr().out
    assert command.main(["show", "tiny.yaml"]) == 0
    assert "## near" in capsys.readouterr().out
    for name in ("table.md", "table.tex", "pareto.png", "sensitivity.png", "page.html"):
        assert (here / "outputs/suite/tiny" / name).exists()
    assert command.main(["verify", "tiny.yaml", "--sample", "2"]) == 0
    assert "2 runs made again: all as the results say" in capsys.readouterr().out
    table = here / "outputs/suite/tiny/results.csv"
    table.write_text(table.read_text().replace(repr(results[0].measured["ga"]), "0.123456789"))
    assert command.main(["verify", "tiny.yaml", "--sample", "8"]) == 1
    assert "runs are not what the results say" in capsys.readouterr().err


DOCUMENT = (Path(__file__).parent.parent / "docs/suite.md").read_text()


@pytest.mark.slow
def test_a_strangers_method_stands_in_the_table_after_one_command(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("tune", "run"):
        assert command.main([name, "tiny.yaml"]) == 0
    before = (here / "outputs/suite/tiny/results.csv").read_text().splitlines()
    code, values = re.findall(r"```(?:python|yaml)\n(.*?)```", DOCUMENT, re.DOTALL)
    (here / "mine.py").write_text(code)
    (here / "conf/method").mkdir(parents=True)
    (here / "conf/method/mine.yaml").write_text(values)
    (line,) = re.findall(r"^    bfl-suite (add .*)$", DOCUMENT, re.MULTILINE)
    assert command.main(line.replace("add small", "add tiny.yaml").split()) == 0
    assert "| mine " in capsys.readouterr().out
    results = read_results([here / "outputs/suite/tiny"])
    assert len([one for one in results if one.method == "mine"]) == 2 * 2
    assert {one.points for one in results} == {2}
    assert set(before) <= set((here / "outputs/suite/tiny/results.csv").read_text().splitlines())
    assert command.main(["add", "tiny.yaml", "other", "--config-dir", "conf"]) == 2
    assert "a folder with method/other.yaml" in capsys.readouterr().err


def untimed(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k not in (*TIMES, "commit")} for row in read_rows(folder / "results.csv")]


@pytest.mark.slow
def test_a_suite_that_is_killed_ten_times_has_the_same_results(here: Path) -> None:
    program = [sys.executable, "-m", "bfl_bench.commands.suite"]
    for folder in ("whole", "killed"):
        (here / folder).mkdir()
        write_suite(here / folder)
    for step in ("tune", "run"):
        subprocess.run([*program, step, "tiny.yaml"], cwd=here / "whole", check=True, capture_output=True)
    for kill in range(10):
        process = subprocess.Popen(
            [*program, "tune" if kill < 5 else "run", "tiny.yaml"],
            cwd=here / "killed", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=heed_interrupts,
        )  # fmt: skip
        time.sleep(1.0 + 0.4 * (kill % 5))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if kill in (4, 9):
            subprocess.run(
                [*program, "tune" if kill < 5 else "run", "tiny.yaml"],
                cwd=here / "killed",
                check=True,
                capture_output=True,
            )
    assert untimed(here / "killed/outputs/suite/tiny") == untimed(here / "whole/outputs/suite/tiny")
    assert (here / "killed/outputs/suite/tiny/chosen.yaml").read_text() == (
        here / "whole/outputs/suite/tiny/chosen.yaml"
    ).read_text()
