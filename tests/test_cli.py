"""The installed command, as a user meets it."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from bfl_bench import records
from bfl_bench.build import load, plan
from bfl_bench.commands import run as cli
from bfl_bench.identity import folder_name
from tests.composing import COMMAND, SMALL, only_folder, resolve
from tests.conftest import BflRun


def test_a_run_writes_its_files_and_is_not_run_twice(bfl_run: BflRun, tmp_path: Path) -> None:
    overrides = [*SMALL, "method=fedavg"]
    result = bfl_run(*overrides)
    assert result.code == 0, result.err
    folder = only_folder(tmp_path / "outputs")
    assert folder.name.startswith("synthetic_dirichlet-0.1_fedavg_seed0_")
    assert {path.name for path in folder.iterdir()} - {".lock"} == {
        "metrics.csv", "timing.csv", "clients.csv", "summary.json", "config.yaml", "environment.json",
        "partition.npz", "partition.csv", "partition.png", "curves.png", "checkpoint", "reliability.csv",
    }  # fmt: skip
    assert "global accuracy" in result.out
    assert str(folder.relative_to(tmp_path)) in result.out
    lines = (folder / "metrics.csv").read_text().splitlines()
    assert lines[0] == "round,ga,la,ece,nll,brier,worst10,train_loss,train_acc,bytes_up,bytes_down"
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2", "3"]
    assert (folder / "clients.csv").read_text().startswith("round,client,size,accuracy,nll,ece\n1,0,")
    bins = [line.split(",") for line in (folder / "reliability.csv").read_text().splitlines()]
    assert bins[0] == ["round", "bin", "count", "confidence", "accuracy"]
    assert [sum(int(row[2]) for row in bins[1:] if row[0] == r) for r in "123"] == [40, 40, 40]  # all test examples
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["schema_version"]) == ("done", records.VERSIONS[records.SUMMARY])
    assert set(summary["rounds_to_ga"]) == {f"{p}%" for p in range(30, 100, 10)}
    assert json.loads((folder / "environment.json").read_text())["partition_sha256"]
    held = records.read_table(folder / "partition.csv")
    sizes = {row["client"]: row["size"] for row in records.read_table(folder / "clients.csv")}
    assert {client: sum(row["count"] for row in held if row["client"] == client) for client in sizes} == sizes

    first = (folder / "metrics.csv").read_bytes()
    written = (folder / "metrics.csv").stat().st_mtime_ns
    again = bfl_run(*overrides, "engine=sequential", "checkpoint.every=2")  # cannot change the result
    assert "finished earlier" in again.out
    assert (folder / "metrics.csv").stat().st_mtime_ns == written
    assert bfl_run(*overrides, "force=true").code == 0
    assert (folder / "metrics.csv").stat().st_mtime_ns > written
    assert (folder / "metrics.csv").read_bytes() == first

    sweep = bfl_run("-m", *overrides, "seed=0,1")
    assert sweep.code == 0
    assert "1 done, 1 skipped" in sweep.out
    assert sum(path.is_dir() for path in (tmp_path / "outputs").iterdir()) == 2


@pytest.mark.slow
def test_sweep_points_equal_single_runs(bfl_run: BflRun, tmp_path: Path) -> None:
    assert bfl_run("-m", *SMALL, "method=fedprox", "local.lr=0.1,0.01", "out=sweep").code == 0
    assert bfl_run(*SMALL, "method=fedprox", "local.lr=0.01", "out=single").code == 0
    single = only_folder(tmp_path / "single")
    assert (tmp_path / "sweep" / single.name / "metrics.csv").read_bytes() == (single / "metrics.csv").read_bytes()


@pytest.mark.slow
def test_sweep_survives_bad_points_and_fills_in_what_is_missing(bfl_run: BflRun, tmp_path: Path) -> None:
    points = [*SMALL, "method=fedavg,nonsense", "partition.alpha=0.1,-1", "local.lr=0.05,1e30"]
    result = bfl_run("-m", *points)
    assert result.code == 1
    assert "Sweep of 8: 1 done, 1 diverged, 6 failed" in result.out
    assert "partition.alpha=-1: partition.alpha: got -1, allowed: a number above 0" in result.err
    assert "method: got 'nonsense', allowed: bayesadmm, bayesadmm_released, bcm, bcm_same" in result.err
    assert "diverged: round 1, client" in result.err
    assert "Traceback" not in result.err
    again = bfl_run("-m", *points)
    assert "1 skipped, 1 diverged, 6 failed" in again.out
    diverged_only = bfl_run("-m", *SMALL, "local.lr=0.05,1e30")
    assert diverged_only.code == 0  # divergence is a result


def test_divergence_is_named(bfl_run: BflRun, tmp_path: Path) -> None:
    result = bfl_run(*SMALL, "local.lr=1e30")
    assert result.code == 1
    assert "diverged: round 1, client 0: params became NaN or infinite" in result.err
    summary = json.loads((only_folder(tmp_path / "outputs") / "summary.json").read_text())
    assert summary["status"] == "diverged"
    assert "round 1, client 0" in summary["reason"]


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("rounds=abc", "bfl-run: rounds: got 'abc', allowed: a whole number of at least 1"),
        ("method=nope", "bfl-run: method: got 'nope', allowed: bayesadmm, bayesadmm_released, bcm, bcm_same"),
        ("local.epoch=3", "bfl-run: local.epoch: got '3', allowed: no such key; the keys are epochs"),
        ("nothing=3", "bfl-run: nothing: got '3', allowed: no such key; the keys are seed"),
        ("num_clients=4000", "bfl-run: num_clients: got 4000"),
    ],
)
def test_errors_are_one_sentence_and_leave_no_folder(bfl_run, tmp_path: Path, argument: str, sentence: str) -> None:
    result = bfl_run(argument)
    assert result.code == 2
    assert result.err.startswith(sentence)
    assert "Traceback" not in result.err
    assert not (tmp_path / "outputs").exists()


def test_dry_run_counts_steps_and_makes_no_folder(bfl_run: BflRun, tmp_path: Path) -> None:
    result = bfl_run(*SMALL, "dry_run=true", "participation=0.4", "partition=iid", "partition.min_size=5")
    assert result.code == 2  # iid has no minimum size
    overrides = [o for o in SMALL if not o.startswith("partition")]
    result = bfl_run(*overrides, "dry_run=true", "participation=0.4", "partition=iid")
    # 3 rounds of 2 clients with 24 examples each: 2 batches of at most 16, 2 epochs
    assert "SGD steps: 24\ntime: about 0.0 minutes (" in result.out
    assert "folder: outputs/synthetic_iid_fola_seed0_" in result.out
    assert not (tmp_path / "outputs").exists()


def test_tab_completion_answers() -> None:
    environment = {**os.environ, "COMP_LINE": "bfl-run method=fedpr", "COMP_POINT": "20"}
    done = subprocess.run([COMMAND, "-sc", "query=bash"], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["method=fedprox"]


def test_second_process_is_told(bfl_run: BflRun, tmp_path: Path) -> None:
    dry = bfl_run(*SMALL, "dry_run=true").out
    folder = tmp_path / next(line for line in dry.splitlines() if line.startswith("folder:")).split()[1]
    folder.mkdir(parents=True)
    with FileLock(folder / records.LOCK):
        result = bfl_run(*SMALL)
    assert result.code == 1
    assert "another process is running in" in result.err


def test_folder_of_another_config_is_refused(bfl_run: BflRun, tmp_path: Path) -> None:
    assert bfl_run(*SMALL).code == 0
    path = only_folder(tmp_path / "outputs") / "config.yaml"
    path.write_text(path.read_text().replace("rounds: 3", "rounds: 4"))
    result = bfl_run(*SMALL)
    assert result.code == 1
    assert "belongs to another config" in result.err


def test_unwritable_place_is_one_sentence(bfl_run: BflRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = bfl_run(*SMALL, "out=file")
    assert result.code == 1
    assert result.err.startswith("bfl-run: cannot read or write")
    assert "Traceback" not in result.err


@pytest.mark.slow
def test_own_dataset_model_and_method_without_touching_the_package(bfl_run: BflRun, tmp_path: Path) -> None:
    (tmp_path / "my_parts.py").write_text(
        """
from dataclasses import dataclass, replace
import torch
from torch import nn
from bfl_bench.data.dataset import Dataset, Split
from bfl_bench.likelihood import Categorical
from bfl_bench.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Stripes:
    name: str
    width: int
    def load(self, data_dir):
        y = torch.arange(60) % 3
        x = torch.nn.functional.one_hot(y, self.width).float()
        return Dataset(Split(x, y), Split(x, y), Categorical(3))

class Net(nn.Module):
    def __init__(self, input_shape, num_classes, width: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(input_shape[0], width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Tanh())
        self.head = nn.Linear(width, num_classes)
    def forward(self, x):
        return self.head(self.body(x))

@dataclass(frozen=True)
class Half(FedAvg):
    factor: float
    def client_update(self, task, broadcast, memory, client, rng):
        update = super().client_update(task, broadcast, memory, client, rng)
        return replace(update, message={"params": update.message["params"] * self.factor})
"""
    )
    for group, text in {
        "dataset": "_target_: my_parts.Stripes\nname: stripes\nwidth: 5\n",
        "model": "_target_: my_parts.Net\nname: net\nwidth: 6\n",
        "method": "_target_: my_parts.Half\nname: half\nweights: size\nfactor: 0.5\n",
    }.items():
        (tmp_path / "my_conf" / group).mkdir(parents=True)
        (tmp_path / "my_conf" / group / "mine.yaml").write_text(text)
    arguments = [
        "--config-dir",
        "my_conf",
        "dataset=mine",
        "model=mine",
        "method=mine",
        "partition=iid",
        "rounds=2",
    ]
    result = bfl_run(*arguments)
    assert result.code == 0, result.err
    metrics = only_folder(tmp_path / "outputs") / "metrics.csv"
    assert metrics.parent.name.startswith("stripes_iid_half_")
    first = metrics.read_bytes()
    assert bfl_run(*arguments, "force=true").code == 0
    assert metrics.read_bytes() == first  # dropout and BatchNorm included
    wrong = bfl_run(*arguments, "method.factor=no")
    assert wrong.err.startswith("bfl-run: method.factor: got 'no', allowed: a number")


def test_config_yaml_reruns_the_run(bfl_run: BflRun, tmp_path: Path) -> None:
    """The stored config is the whole resolved config."""
    assert bfl_run(*SMALL).code == 0
    stored = yaml.safe_load((only_folder(tmp_path / "outputs") / "config.yaml").read_text())
    assert stored["dataset"]["train_samples"] == 120
    assert folder_name(stored) == only_folder(tmp_path / "outputs").name


@pytest.mark.slow
def test_a_key_that_only_some_points_have(bfl_run: BflRun, tmp_path: Path) -> None:
    """FedAvg has no mu: that point does not compose, the other runs."""
    result = bfl_run("-m", *SMALL, "method=fedavg,fedprox", "method.mu=0.1")
    assert result.code == 1
    assert "Sweep of 2: 1 done, 1 failed" in result.out
    assert "method.mu: got '0.1', allowed: no such key; the keys are _target_, name, weights" in result.err
    assert only_folder(tmp_path / "outputs").name.startswith("synthetic_dirichlet-0.1_fedprox_")


def test_wrong_key_of_ones_own_method(bfl_run: BflRun, tmp_path: Path) -> None:
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "mine.yaml").write_text("_target_: nowhere.Mine\nname: mine\n")
    result = bfl_run("--config-dir", "conf", "method=mine", "method.foo=3")
    assert result.code == 2
    assert result.err == "bfl-run: method.foo: got '3', allowed: no such key; the keys are _target_, name\n"


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("dataset.name=../../x", "bfl-run: dataset.name: got '../../x', allowed: letters"),
        ("threads=100000", "bfl-run: threads: got 100000"),
        ("model.hidden=[999999999999]", "bfl-run: model: got 'mlp', allowed: a network that can be made"),
    ],
)
def test_odd_values_are_one_sentence(bfl_run: BflRun, tmp_path: Path, argument: str, sentence: str) -> None:
    result = bfl_run(argument)
    assert result.code == 2
    assert result.err.startswith(sentence)
    assert "Traceback" not in result.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_an_error_in_ones_own_method_fails_that_point_only(bfl_run: BflRun, tmp_path: Path) -> None:
    (tmp_path / "exploding.py").write_text(
        "from bfl_bench.methods.fedavg import FedAvg\n"
        "class Exploding(FedAvg):\n"
        "    def client_update(self, *arguments):\n"
        "        raise ZeroDivisionError('boom')\n"
    )
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "exploding.yaml").write_text(
        "_target_: exploding.Exploding\nname: exploding\nweights: size\n"
    )
    result = bfl_run(*SMALL, "--config-dir", "conf", "method=exploding,fedavg", "-m")
    assert result.code == 1
    assert "Sweep of 2: 1 done, 1 failed" in result.out
    assert "unforeseen ZeroDivisionError in exploding.py, line 4: boom" in result.err


@pytest.mark.slow
def test_a_finished_run_says_that_its_own_code_has_changed(bfl_run: BflRun, tmp_path: Path) -> None:
    source = "from bfl_bench.methods.fedavg import FedAvg\n\nclass Mine(FedAvg):\n    pass\n"
    (tmp_path / "mine_of_a_user.py").write_text(source)
    (tmp_path / "conf" / "method").mkdir(parents=True)
    text = "_target_: mine_of_a_user.Mine\nname: mine\nweights: size\n"
    (tmp_path / "conf" / "method" / "mine.yaml").write_text(text)
    command = [*SMALL, "rounds=1", "--config-dir", "conf", "method=mine"]
    assert bfl_run(*command).code == 0
    folder = only_folder(tmp_path / "outputs")
    first = json.loads((folder / "environment.json").read_text())
    assert list(first["own_code"]) == ["mine_of_a_user"]
    assert "done (finished earlier; force=true runs it again): outputs" in bfl_run(*command).out
    (tmp_path / "mine_of_a_user.py").write_text(source + "# changed\n")
    skipped = "done (finished earlier with other code of mine_of_a_user; force=true runs it again): outputs"
    assert skipped in bfl_run(*command).out
    assert bfl_run(*command, "force=true").code == 0
    second = json.loads((folder / "environment.json").read_text())
    assert second["own_code"] != first["own_code"]
    assert "earlier_code" not in second
    (folder / "summary.json").unlink()  # as if it had been killed, and is continued with other code
    (tmp_path / "mine_of_a_user.py").write_text(source)
    assert bfl_run(*command).code == 0
    third = json.loads((folder / "environment.json").read_text())
    assert third["own_code"] == first["own_code"]
    assert [code["own_code"] for code in third["earlier_code"]] == [second["own_code"]]
    assert "with other code" not in bfl_run(*command).out


def test_stand_ins_are_named_where_a_run_ends(bfl_run: BflRun, tmp_path: Path) -> None:
    result = bfl_run("dataset=mnist", "data_dir=stand-in", "method=fedavg", "rounds=1", "local.epochs=1")
    assert result.code == 0, result.err
    assert (
        "Random stand-in data, not mnist: these numbers say nothing about it.\n\ndone: outputs/stand-in-mn"
        in result.out
    )
    assert only_folder(tmp_path / "outputs").name.startswith("stand-in-mnist_dirichlet-0.1_fedavg_seed0_")


def test_another_split_is_not_continued(bfl_run: BflRun, tmp_path: Path) -> None:
    assert bfl_run(*SMALL).code == 0
    folder = only_folder(tmp_path / "outputs")
    (folder / "summary.json").unlink()
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(environment | {"partition_sha256": "other"}))
    result = bfl_run(*SMALL)
    assert result.code == 1
    assert "was begun on another split" in result.err


@pytest.mark.slow
def test_curves_are_drawn_if_a_kill_prevented_it(bfl_run: BflRun, tmp_path: Path) -> None:
    assert bfl_run(*SMALL).code == 0
    curves = only_folder(tmp_path / "outputs") / "curves.png"
    curves.unlink()
    assert "finished earlier" in bfl_run(*SMALL).out
    assert curves.exists()


@pytest.mark.slow
def test_figures_that_another_process_draws_are_left_to_it(bfl_run: BflRun, tmp_path: Path) -> None:
    assert bfl_run(*SMALL).code == 0
    folder = only_folder(tmp_path / "outputs")
    (folder / records.CURVES_FIGURE).unlink()
    with FileLock(folder / records.LOCK):
        result = bfl_run(*SMALL)
    assert result.code == 0
    assert "finished earlier; force=true" in result.out
    assert not (folder / records.CURVES_FIGURE).exists()
    (folder / records.METRICS).write_text((folder / records.METRICS).read_text() + "9\n")
    result = bfl_run(*SMALL)
    assert result.code == 0
    assert "finished earlier; changed since: metrics.csv; force=true" in result.out


def test_the_partition_is_drawn_before_the_first_round(
    bfl_run: BflRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed after its last round is finished, and is never drawn again."""
    from bfl_bench.run import loop

    monkeypatch.setattr(loop, "run", lambda *_: _stop())
    assert bfl_run(*SMALL).code == 130
    assert (only_folder(tmp_path / "outputs") / records.PARTITION_FIGURE).exists()


def _stop() -> None:
    raise KeyboardInterrupt


def test_a_searching_sweeper_gets_a_number_to_minimise() -> None:
    final = {"round": 2, "nll": 0.5}
    summary = {"status": "done", "final": final}
    assert float(cli._outcome_of_summary(summary)) == 0.5
    assert float(cli._outcome_of_summary(summary | {"final": final | {"validation_nll": 0.75}})) == 0.75
    assert float(cli._outcome_of_summary(summary | {"final": None})) == math.inf
    assert float(cli._outcome_of_summary({"status": "diverged", "final": final, "reason": "NaN"})) == math.inf


def test_only_a_searching_sweeper_takes_intervals(bfl_run: BflRun) -> None:
    wrong = "local.lr: got 'interval(0.1,0.2)', allowed: values that can be counted"
    for sweeper, refused in (("bfl", True), ("basic", True), ("nothing", False)):
        result = bfl_run("-m", f"hydra/sweeper={sweeper}", "local.lr=interval(0.1,0.2)", *SMALL)
        assert result.code == 2
        assert (wrong in result.err) == refused, result.err


def test_an_empty_sweep_is_said_to_be_empty(bfl_run: BflRun) -> None:
    result = bfl_run("-m", "seed=range(0,0)")
    assert result.code == 2
    assert "no points" in result.err


@pytest.mark.slow
def test_an_experiment_brings_its_sweep_and_the_command_line_wins(bfl_run: BflRun, tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    for name, text in {
        "experiment/study": "local: {epochs: 1}\nhydra: {sweeper: {params: {local.lr: '0.01,0.02', seed: '0,1'}}}\n",
    }.items():
        (conf / f"{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (conf / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    small = [override for override in SMALL if not override.startswith("local.")]
    assert "4 done" in bfl_run("-m", "--config-dir", "conf", *small, "experiment=study").out
    configs = [yaml.safe_load(path.read_text()) for path in (tmp_path / "outputs").glob("*/config.yaml")]
    points = sorted((config["seed"], config["local"]["lr"], config["local"]["epochs"]) for config in configs)
    assert points == [(0, 0.01, 1), (0, 0.02, 1), (1, 0.01, 1), (1, 0.02, 1)]
    again = bfl_run("-m", "--config-dir", "conf", *small, "experiment=study", "seed=1", "local.lr=0.02")
    assert "Sweep of 1: 1 skipped" in again.out


# Renamed keys and values


def read_stored(tmp_path: Path) -> list[dict[str, object]]:
    return [yaml.safe_load(path.read_text()) for path in sorted((tmp_path / "outputs").glob("*/config.yaml"))]


@pytest.mark.slow
def test_old_names_on_the_command_line_work_and_are_told(bfl_run: BflRun, tmp_path: Path) -> None:
    assert bfl_run(*SMALL, "rounds=1").code == 0
    first = only_folder(tmp_path / "outputs")
    done = bfl_run(*SMALL, "rounds=1", "seed=1", f"given.start={first}", "data_dir=made-up")
    assert done.code == 0
    assert "bfl-run: given.start is called start_from now" in done.err
    assert "bfl-run: data_dir=made-up is called data_dir=stand-in now" in done.err
    (config,) = [config for config in read_stored(tmp_path) if config["seed"] == 1]
    assert (config["start_from"], config["data_dir"]) == (str(first), "stand-in")
    assert config["inputs"] == {"start_from": first.name}
    again = bfl_run(*SMALL, "rounds=1", "seed=1", "start_from=outputs/" + first.name, "data_dir=stand-in")
    assert "finished earlier" in again.out
    assert "now" not in again.err


@pytest.mark.slow
def test_old_names_in_an_experiment_of_a_user(bfl_run: BflRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sections, what it sweeps, and the environment variable; a sweep tells each once."""
    monkeypatch.setenv("BFL_DATA_DIR", "made-up")
    assert bfl_run(*SMALL, "rounds=1").code == 0
    first = only_folder(tmp_path / "outputs")
    (tmp_path / "mine/experiment").mkdir(parents=True)
    section = f"# @package _global_\ngiven:\n  start: {first}\n"
    (tmp_path / "mine/experiment/section.yaml").write_text(section)
    swept = f"# @package _global_\nhydra:\n  sweeper:\n    params:\n      given.start: {first},null\n"
    (tmp_path / "mine/experiment/swept.yaml").write_text(swept)
    options = ["-m", "--config-dir", "mine", *SMALL, "dry_run=true"]
    done = bfl_run(*options, "experiment=section", "seed=1,2")
    assert done.code == 0
    assert done.err.count("given.start is called start_from now") == 1
    assert done.err.count("data_dir=made-up is called data_dir=stand-in now") == 1
    lines = done.out.splitlines()
    assert lines.count(f"start_from: {first}") == 2
    assert lines.count(f"  start_from: {first.name}") == 2  # of inputs
    assert lines.count("data_dir: stand-in") == 2
    assert "given:" not in lines
    done = bfl_run(*options, "experiment=swept", "seed=3")
    assert done.code == 0
    assert done.err.count("given.start is called start_from now") == 1
    lines = done.out.splitlines()
    assert (lines.count(f"start_from: {first}"), lines.count("start_from: null")) == (1, 1)


# Files and folders as inputs


@pytest.mark.slow
def test_a_partition_file_that_changed_runs_anew(bfl_run: BflRun, tmp_path: Path) -> None:
    for seed in (0, 1):
        load(plan(resolve(*SMALL, f"seed={seed}")))[2].save(tmp_path / f"{seed}.npz")
    saved = [(tmp_path / name).read_bytes() for name in ("0.npz", "1.npz")]
    assert saved[0] != saved[1]
    small = [override for override in SMALL if "min_size" not in override]
    command = [*small, "rounds=1", "method=fedavg", "partition=file", "partition.path=mine.npz"]
    for content, note in ((saved[0], False), (saved[0], True), (saved[1], False), (saved[0], True)):
        (tmp_path / "mine.npz").write_bytes(content)
        done = bfl_run(*command)
        assert done.code == 0
        assert ("finished earlier" in done.out) == note
    folders = list((tmp_path / "outputs").iterdir())
    assert len(folders) == 2
    assert {(folder / "partition.npz").read_bytes() for folder in folders} == set(saved)


def test_inputs_that_cannot_be_read(bfl_run: BflRun, tmp_path: Path) -> None:
    small = [override for override in SMALL if "min_size" not in override]
    missing = bfl_run(*small, "partition=file", "partition.path=gone.npz")
    assert missing.code == 2
    assert "partition.path: got 'gone.npz', allowed: a partition.npz" in missing.err
    for key in ("start_from", "reference_posterior"):
        missing = bfl_run(*SMALL, f"{key}=gone")
        assert missing.code == 2
        assert f"{key}: got 'gone', allowed: the folder of a run" in missing.err
    described = bfl_run(*SMALL, "+inputs={start_from: x}")
    assert described.code == 2
    assert "inputs: got" in described.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", [["bfl-run", *SMALL, "dry_run=true"], ["bfl-data", "list"], ["bfl-paper", "list"]])
def test_a_pipe_that_nobody_reads(words: list[str], tmp_path: Path) -> None:
    """As after `| head`: nothing is said, and nothing is wrong."""
    command = Path(COMMAND).with_name(words[0])
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([command, *words[1:]], stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
