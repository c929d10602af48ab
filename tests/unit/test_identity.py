"""What a run is: names that outlive moved modules, added and renamed keys, and paths; that tell all else apart."""

import copy
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bfl_bench import identity as identity_module
from bfl_bench import records
from bfl_bench.errors import RunError
from bfl_bench.identity import (
    ADDED,
    RENAMED,
    WITHOUT_EFFECT,
    complete,
    describe_inputs,
    digest_file,
    finished_summary,
    folder_name,
    identity,
    modernise,
    modernise_override,
    read_config,
)
from bfl_bench.records import config_folder
from bfl_bench.report import by_name, find_runs
from bfl_bench.report.output import parse_where
from tests.composing import SMALL, resolve, write_run

CONFIG: dict[str, Any] = {
    "dataset": {"name": "digits", "val": 0.1},
    "partition": {"name": "dirichlet", "alpha": 0.05, "mode": "per_class"},
    "method": {"name": "fedavg", "weights": "size"},
    "aggregator": {"name": "none"},
    "model": {"name": "mlp", "hidden": [3, 4]},
    "engine": {"name": "sequential"},
    "local": {"lr": 0.1, "clip": None},
    "checkpoint": {"every": 1},
    "seed": 3,
    "rounds": 20,
    "out": "outputs",
    "data_dir": None,
    "force": False,
    "dry_run": False,
}

# The folder of a run


def test_folder_name_is_readable() -> None:
    name = folder_name(CONFIG)
    assert name.startswith("digits_dirichlet-0.05_fedavg_seed3_")
    assert len(name.rsplit("_", 1)[1]) == 8
    named = folder_name({**CONFIG, "aggregator": {"name": "product"}})
    assert named.startswith("digits_dirichlet-0.05_fedavg_product_seed3_")
    assert folder_name({**CONFIG, "partition": {"name": "iid"}}).startswith("digits_iid_fedavg_seed3_")


@pytest.mark.parametrize(
    "change",
    [
        {"out": "elsewhere"},
        {"data_dir": "/data"},
        {"engine": {"name": "parallel", "workers": 4}},
        {"observer": {"name": "tracker"}},
        {"force": True},
        {"dry_run": True},
        {"checkpoint": {"every": 10}},
        {"checkpoint": {"every": 1, "keep": False}},
    ],
)
def test_what_cannot_change_results_does_not_change_the_folder(change: dict[str, Any]) -> None:
    assert folder_name(CONFIG | change) == folder_name(CONFIG)
    assert identity(CONFIG | change) == identity(CONFIG)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 4},
        {"rounds": 21},
        {"local": {"lr": 0.1, "clip": 1.0}},
        {"local": {"lr": 0.10000000001, "clip": None}},
        {"model": {"name": "mlp", "hidden": [4, 3]}},
        {"dataset": {"name": "digits", "val": 0.2}},
        {"participation": 0.5},
    ],
)
def test_what_changes_results_changes_the_folder(change: dict[str, Any]) -> None:
    assert folder_name(CONFIG | change) != folder_name(CONFIG)


def test_order_of_keys_does_not_matter() -> None:
    backwards = {
        key: dict(reversed(value.items())) if isinstance(value, dict) else value
        for key, value in reversed(CONFIG.items())
    }
    assert list(backwards) != list(CONFIG)
    assert folder_name(backwards) == folder_name(CONFIG)


def test_a_finished_run_is_recognised(tmp_path: Path) -> None:
    assert finished_summary(tmp_path / "absent", CONFIG) is None
    assert finished_summary(tmp_path, CONFIG) is None
    records.start(tmp_path, CONFIG, force=False)
    assert finished_summary(tmp_path, CONFIG) is None
    for status, finished in {"done": True, "diverged": True, "interrupted": False}.items():
        records.write_json(tmp_path / records.SUMMARY, {"status": status, "final": {"ga": 0.5}})
        summary = finished_summary(tmp_path, {**CONFIG, "out": "elsewhere", "engine": {"name": "other"}})
        if finished:
            assert summary is not None
            assert summary["status"] == status
            assert summary["final"] == {"ga": 0.5}
        else:
            assert summary is None


def test_a_folder_of_another_config_is_refused(tmp_path: Path) -> None:
    records.start(tmp_path, CONFIG, force=False)
    with pytest.raises(RunError, match=r"another config.*force=true"):
        finished_summary(tmp_path, {**CONFIG, "rounds": 21})


def test_one_and_one_point_zero_are_the_same_run() -> None:
    config = {"dataset": {"name": "d"}, "partition": {"name": "dirichlet", "alpha": 1}, "method": {"name": "m"}}
    config |= {"aggregator": {"name": "none"}, "seed": 0, "widths": [1.0, 2.5]}
    same = config | {"partition": {"name": "dirichlet", "alpha": 1.0}, "widths": [1, 2.5]}
    assert folder_name(config) == folder_name(same)
    assert folder_name(config) != folder_name(config | {"widths": [1, 2]})


# Golden names


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("", "digits_dirichlet-0.1_fola_seed0_3b114cbd"),
        ("local.lr=0.01", "digits_dirichlet-0.1_fola_seed0_578dc20b"),
        (
            "method=fedavg dataset=mnist partition.alpha=1 seed=3 local.momentum=0.9 local.lr=0.01",
            "mnist_dirichlet-1_fedavg_seed3_4d9fa1c7",
        ),
        (
            "method=fvb_published aggregator=wb model.bayesian_layers=2 eval.also_aggregate=[eaa,gaa_released] "
            "local.lr=0.01",
            "digits_dirichlet-0.1_fvb_wb_seed0_3d27966f",
        ),
        (
            "experiment=fola dataset=cifar10 method.structure=eigenvalue participation=0.5",
            "cifar10_dirichlet-0.01_fola_seed0_619dd6a9",
        ),
        (
            "experiment=fedlpa_released dataset=svhn partition=classes local.epochs=10",
            "svhn_classes_fedlpa_released_seed0_ed56b171",
        ),
        (
            "method=virtual_published dataset=pmnist model=mlp_100_100 server.lr=0.3 partition=natural "
            "num_clients=null local.lr=0.01",
            "pmnist_natural_virtual_seed0_19b08b19",
        ),
        (
            "method=fedprox method.mu=0.1 dataset=fashion_mnist partition=niid_bench data_dir=stand-in eval.every=5 "
            "local.lr=0.01",
            "stand-in-fashion_mnist_niid_bench-0.5_fedprox_seed0_216ff6b3",
        ),
        (
            "method=scaffold dataset=synthetic dataset.num_classes=3 model.hidden=[8] partition=iid engine=processes "
            "local.lr=0.01",
            "synthetic_iid_scaffold_seed0_2a967d64",
        ),
    ],
)
def test_names_stay(command: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command has the same name in every version.

    A new key belongs into `ADDED`, a renamed one into `RENAMED`. Whoever changes a name all the same orphans the
    finished runs of all users: that needs an entry in CHANGELOG.md and a way to migrate.
    """
    monkeypatch.delenv("BFL_DATA_DIR", raising=False)
    assert folder_name(resolve(*command.split())) == name


# Modules move, keys are added


def move_modules(node: Any) -> Any:
    """The same config after every module of our own has gone elsewhere."""
    if isinstance(node, dict):
        return {key: move_modules(value) for key, value in node.items()}
    return re.sub(r"^bfl_bench\..*\.", "bfl_bench.elsewhere.deeper.", node) if isinstance(node, str) else node


def test_moved_modules_leave_the_name() -> None:
    """At any depth: the rules of eval.also_aggregate are parts, too."""
    config = resolve("method=fvb", "aggregator=wb", "eval.also_aggregate=[eaa,gaa]")
    moved = move_modules(config)
    assert moved["eval"]["also_aggregate"]["eaa"]["_target_"] == "bfl_bench.elsewhere.deeper.eaa"
    assert moved["model"]["_target_"] == "bfl_bench.elsewhere.deeper.mlp"
    assert folder_name(moved) == folder_name(config)
    moved["eval"]["also_aggregate"]["eaa"]["_target_"] = "bfl_bench.elsewhere.deeper.other"
    assert folder_name(moved) != folder_name(config)


def test_a_part_of_a_user_counts_with_its_module() -> None:
    names = set()
    for target in ("one.Noisy", "two.Noisy", "bfl_bench.Noisy", "bfl_bench_of_mine.Noisy"):
        config = resolve()
        config["method"]["_target_"] = target
        names.add(folder_name(config))
    assert len(names) == 4


def targets_below(folder: Path) -> list[str]:
    contents = [yaml.safe_load(path.read_text()) or {} for path in folder.rglob("*.yaml")]
    return [content["_target_"] for content in contents if "_target_" in content]


def test_parts_of_our_own_are_told_apart_by_class_or_function() -> None:
    targets = {target for target in targets_below(config_folder()) if target.startswith("bfl_bench.")}
    assert len(targets) > 30
    assert len({target.rpartition(".")[2] for target in targets}) == len(targets)


OTHERWISE = {
    "start_from": "folder",
    "reference_posterior": "folder",
    "local.optimizer": "adam",
    "local.betas": [0.9, 0.99],
    "local.schedule": "cosine",
    "server.rule": "yogi",
    "server.momentum": 0.9,
    "server.beta2": 0.999,
    "server.tau": 0.01,
    "server.bias_correction": True,
    "partition.validation": 0.1,
    "eval.uncertainty": True,
    "eval.ood": {"mnist": {"name": "mnist"}},
    "eval.scored": "validation",
    "eval.posterior": True,
    "eval.predictive": "linearised",
    "eval.also_predict": ["mean"],
    "eval.prior_precision": 10.0,
    "eval.laplace_layers": "last",
    "eval.truth": "linear",
    "eval.shift": ["blur"],
    "eval.severities": [1, 5],
    "eval.local_share": 0.2,
    "partition.seed": 1,
    "partition.unknown_classes": [3],
    "model.noise": 0.5,
    "cohort": "sequential",
    "partition.unseen": 0.2,
    "eval.unseen_steps": [5],
    "eval.personalise": [0.5],
    "eval.personalise_rule": "rklb",
    "dataset.label_noise": {"rate": 0.1, "kind": "uniform"},
}


def with_value(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    *sections, last = key.split(".")
    node = config
    for section in sections:
        node = node[section]
    node[last] = value
    return config


@pytest.mark.parametrize(("key", "value"), OTHERWISE.items())
def test_an_added_key_counts_where_it_changes_something(key: str, value: object) -> None:
    config = resolve()
    with_neutral, otherwise = (with_value(config, key, v) for v in (ADDED[key], value))
    assert folder_name(with_neutral) == folder_name(config) != folder_name(otherwise)
    assert complete(with_neutral) == complete(config) != complete(otherwise)


def test_every_added_key_is_tested() -> None:
    """Those of parts have tests of their own, below; those of sections that change no result change no name."""
    sections = {key for key, value in resolve().items() if isinstance(value, dict)} - WITHOUT_EFFECT
    assert list(OTHERWISE) == [key for key in ADDED if "." not in key or key.split(".")[0] in sections]


@pytest.mark.parametrize("model", ["mlp", "mlp_100_100", "lenet", "cnn"])
def test_a_network_without_dropout_is_the_one_before_there_was_dropout(model: str) -> None:
    config = resolve(f"model={model}")
    before = copy.deepcopy(config)
    del before["model"]["dropout"]
    assert folder_name(config) == folder_name(before) == folder_name(with_value(config, "model.dropout", 0))
    assert complete(config) == complete(before)
    assert folder_name(with_value(config, "model.dropout", 0.1)) != folder_name(config)


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ("fola", "batch_weight", "one"),
        ("fola_released", "server_mean", "average"),
        ("fedcurv", "penalty_gradient", False),
    ],
)
def test_a_method_without_a_later_key_is_the_one_that_does_as_before(method: str, key: str, value: object) -> None:
    config = resolve(f"method={method}")
    before = copy.deepcopy(config)
    del before["method"][key]
    assert folder_name(config) == folder_name(before)
    assert complete(config) == complete(before)
    assert folder_name(with_value(config, f"method.{key}", value)) != folder_name(config)


@pytest.mark.parametrize("method", ["fvb", "virtual"])
def test_published_steps_of_variances_are_those_before_there_were_others(method: str) -> None:
    config = resolve(f"method={method}_published")
    before = copy.deepcopy(config)
    added = [key.split(".")[1] for key in ADDED if key.startswith(f"{method.capitalize()}.")]
    assert "variance_rate" in added
    for key in added:
        del before["method"][key]
    assert folder_name(config) == folder_name(before) != folder_name(resolve(f"method={method}"))
    assert complete(config) == complete(before)
    for key, value in (("variance_rate", 0.1), ("examples", "all"), ("warm_up", 2)):
        if key in added:
            assert folder_name(with_value(config, f"method.{key}", value)) != folder_name(config)


def test_a_key_added_to_a_part_belongs_to_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the part stands; the key of the same name of another part counts, whatever its value."""
    config = resolve("method=fvb", "aggregator=wb", "eval.also_aggregate=[eaa,wb]")
    monkeypatch.setattr(identity_module, "_sort_added", identity_module._sort_added.__wrapped__)
    monkeypatch.setitem(ADDED, "Fvb.extra", 1.0)
    monkeypatch.setitem(ADDED, "wb.extra", [])
    added = with_value(with_value(config, "method.extra", 1), "aggregator.extra", [])
    added["eval"]["also_aggregate"]["wb"]["extra"] = []
    assert identity(added) == identity(config)
    assert complete(config) == complete(added)
    assert complete(config)["eval"]["also_aggregate"]["wb"]["extra"] == []
    for key in ("model.extra", "method.other", "extra"):
        assert folder_name(with_value(added, key, 1)) != folder_name(config)
    assert folder_name(with_value(added, "method.extra", 2)) != folder_name(config)
    assert folder_name(with_value(added, "method._target_", "mine.Fvb")) != folder_name(
        with_value(config, "method._target_", "mine.Fvb")
    )


def test_reports_take_the_absence_of_a_key_for_its_value(tmp_path: Path) -> None:
    config = resolve(*SMALL)
    write_run(tmp_path, config, {"round": 1, "ga": 0.5})
    adam = write_run(tmp_path, with_value(config, "local.optimizer", "adam"), {"round": 1, "ga": 0.6})
    for value, expected in (("sgd", {0.5}), ("adam", {0.6})):
        runs, _ = find_runs([tmp_path], parse_where([f"local.optimizer={value}"]))
        assert {run.final["ga"] for run in runs} == expected
        assert [run.config["local.optimizer"] for run in runs] == [value]
    shutil.copytree(adam, tmp_path / "copy")
    records.start(tmp_path / "copy", with_value(config, "local.optimizer", "sgd"), force=False)
    runs, notes = find_runs([tmp_path], {})
    assert len(runs) == 2
    assert "the same config as" in notes[0]


# Files and folders that a run reads


def test_a_partition_file_counts_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    for path, content in (("one", b"1"), ("same", b"1"), ("below/same", b"1"), ("other", b"2")):
        Path(path).write_bytes(content)
    Path("link").symlink_to("below/same")

    def name(path: str) -> str:
        return folder_name(resolve("partition=file", f"partition.path={path}"))

    first = name("one")
    assert {name(path) for path in ("same", "below/same", "./one", f"{tmp_path}/one", "link")} == {first}
    assert name("other") != first
    Path("one").write_bytes(b"2")
    assert name("one") == name("other")
    os.mkfifo("pipe")
    assert digest_file("pipe") is None  # and nobody waits for a writer


def test_an_input_is_described_once_and_then_needs_no_file(tmp_path: Path) -> None:
    path = tmp_path / "partition.npz"
    path.write_bytes(b"content")
    config = resolve("partition=file", f"partition.path={path}")
    assert config["inputs"] == {  # echo -n content | sha256sum
        "partition.path": "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    }
    records.start(tmp_path, config, force=False)
    name = folder_name(config)
    path.unlink()
    stored = read_config(tmp_path)
    assert stored is not None
    assert folder_name(stored) == name
    assert "inputs" not in resolve()


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: None,
        lambda folder: folder.mkdir(),
        lambda folder: (folder.mkdir(), (folder / "config.yaml").mkdir()),
        lambda folder: (folder.mkdir(), (folder / "config.yaml").write_text("a: [")),
        lambda folder: (folder.mkdir(), (folder / "config.yaml").write_bytes(b"\xff\xfe\x00")),
        lambda folder: (folder.mkdir(), (folder / "config.yaml").write_text("a list, no config")),
        lambda folder: (folder.mkdir(), (folder / "config.yaml").write_text("seed: 0\nrounds: 1\ndataset: digits")),
    ],
)
def test_what_cannot_be_read_is_not_described(tmp_path: Path, make: Callable[[Path], object]) -> None:
    folder = tmp_path / "run"
    make(folder)
    keys = ("start_from", "reference_posterior")
    config = with_value(with_value(resolve(), keys[0], str(folder)), keys[1], str(folder))
    assert describe_inputs(config | {"partition": {"path": str(folder)}}) == {}
    assert describe_inputs(config | {"partition": None, keys[0]: 5}) == {}


def test_an_earlier_run_counts_by_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by where it lies or what its folder is called, and down to the runs that it builds on itself."""
    base = resolve(*SMALL)

    def starting(start: str | Path, key: str = "start_from") -> dict[str, Any]:
        config = {**base, key: str(start)}
        return {**config, "inputs": describe_inputs(config)}

    first = write_run(tmp_path / "here", base)
    other = write_run(tmp_path / "here", {**base, "seed": 1})
    shutil.copytree(first, tmp_path / "copy")
    (tmp_path / "link").symlink_to(first)
    monkeypatch.chdir(first)
    places = (first, tmp_path / "copy", tmp_path / "link", ".", "../../copy")
    assert len({folder_name(starting(place)) for place in places}) == 1
    assert resolve(*SMALL, "start_from=.") == starting(".")
    configs = (base, starting(first), starting(other), starting(first, "reference_posterior"))
    assert len({folder_name(config) for config in configs}) == 4
    chains = [write_run(tmp_path / "chains", starting(start)) for start in (first, other)]
    assert folder_name(starting(chains[0])) != folder_name(starting(chains[1]))
    assert starting(chains[0])["inputs"] == {"start_from": chains[0].name}
    assert identity(starting(chains[0]))["start_from"] == chains[0].name


def test_runs_are_found_by_the_names_that_others_have_for_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path, resolve(*SMALL), {"round": 1, "ga": 0.5})
    renamed = folder.rename(tmp_path / "by_hand")
    runs, _ = find_runs([tmp_path], {})
    named = by_name(runs)
    assert set(named) == {"by_hand", folder.name}
    assert named[folder.name].folder == renamed


# Renamed keys and values


def test_old_names_of_a_config() -> None:
    told: list[str] = []
    old = {"given": {"start": "outputs/a", "posterior": None}, "data_dir": "made-up", "seed": 3}
    kept = copy.deepcopy(old)
    new = modernise(old, told.append)
    assert new == {"start_from": "outputs/a", "reference_posterior": None, "data_dir": "stand-in", "seed": 3}
    assert old == kept
    assert len(told) == 3
    assert "given.start is called start_from now" in told[0]
    assert "data_dir=made-up is called data_dir=stand-in now" in told[2]
    assert modernise(new, told.append) == new
    assert len(told) == 3


def test_a_value_under_todays_name_wins() -> None:
    assert modernise({"given": {"start": "a"}, "start_from": "b"}) == {"start_from": "b"}
    assert modernise({"given": {"start": "a"}, "start_from": None}) == {"start_from": "a"}


def test_what_was_never_a_key_stays_for_others_to_complain_about() -> None:
    for config in ({"given": {"finish": 1}}, {"given": 3}, {"data_dir": "made-up/here"}):
        assert modernise(config) == config
    assert modernise({"given": {"start": "a", "finish": 1}}) == {"start_from": "a", "given": {"finish": 1}}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("given.start=outputs/a=b", "start_from=outputs/a=b"),
        ("++given.posterior=x", "++reference_posterior=x"),
        ("~given.start", "~start_from"),
        ("data_dir=made-up", "data_dir=stand-in"),
        ("data_dir=made-up/below", "data_dir=made-up/below"),
        ("given.started=x", "given.started=x"),
        ("method=fola", "method=fola"),
    ],
)
def test_old_names_on_the_command_line(old: str, new: str) -> None:
    told: list[str] = []
    assert modernise_override(old, told.append) == new
    assert len(told) == (old != new)


def test_todays_names_are_keys() -> None:
    config = resolve()
    for old, new in RENAMED.items():
        assert new.split("=")[0] in config
        assert old not in config


def test_a_stored_config_with_old_keys_is_the_same_run(tmp_path: Path) -> None:
    config = resolve(*SMALL, "data_dir=stand-in")
    old = {key: value for key, value in config.items() if key not in ("start_from", "reference_posterior")}
    old |= {"data_dir": "made-up", "given": {"start": None, "posterior": None}}
    assert identity(old) == identity(config)
    records.start(tmp_path, old, force=False)
    assert finished_summary(tmp_path, config) is None  # and does not raise
    records.write_json(tmp_path / records.SUMMARY, {"status": "done", "final": {"ga": 0.5}})
    runs, _ = find_runs([tmp_path], parse_where(["data_dir=made-up"]))
    assert [run.config["data_dir"] for run in runs] == ["stand-in"]
    old["given"]["start"] = "outputs/run_1a"
    records.start(tmp_path, old, force=False)
    for where in ("given.start=run_1a", "start_from=run_1a", "start_from=elsewhere/run_1a", "out=ignored"):
        assert len(find_runs([tmp_path], parse_where([where]))[0]) == 1
    for where in ("given.start=null", "start_from=null", "given.start=run_2b"):
        assert find_runs([tmp_path], parse_where([where]))[0] == []


def test_of_old_configs_the_name_of_the_earlier_run_counts() -> None:
    """They have no digest; the folder was called by what it was."""
    one, other = ({**CONFIG, "given": {"start": path, "posterior": None}} for path in ("/here/run_1a", "run_1a"))
    assert identity(one) == identity(other) != identity(CONFIG)
    assert identity(one)["start_from"] == "run_1a"


def test_a_stored_config_without_an_added_key_reads_as_one_with_it() -> None:
    """To the letter: reports group runs by this text, and 0 is not written as 0.0."""
    config = resolve("model=lenet", "dataset=fashion_mnist", "method=fedavg")
    older = copy.deepcopy(config)
    del older["model"]["dropout"]
    del older["eval"]["ood"]
    del older["local"]["optimizer"]
    assert json.dumps(complete(older), sort_keys=True) == json.dumps(complete(config), sort_keys=True)
