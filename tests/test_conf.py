"""Every file in conf/ composes, builds and runs; what is wrong raises one sentence."""

from pathlib import Path

import pytest
import yaml

from bfl_bench.build import plan
from bfl_bench.cli import help_text
from bfl_bench.errors import ConfigError
from bfl_bench.outcome import GROUPS
from bfl_bench.records import config_folder, folder_name
from tests.composing import NEEDS, SMALL, experiment, resolve, run_in

FILES = {group: sorted(path.stem for path in (config_folder() / group).glob("[!_]*.yaml")) for group in GROUPS}
CHOICES = [(group, name) for group in GROUPS for name in FILES[group]]

# What an option needs beside itself in order to run on small synthetic data.
ALSO = {
    ("dataset", "digits"): ["rounds=1"],
    ("model", "lenet"): ["dataset.shape=[1,16,16]"],
    ("model", "conv3"): ["dataset.shape=[1,16,16]"],
    ("model", "cnn"): ["dataset.shape=[3,16,16]"],
    ("partition", "disjoint"): ["num_clients=3"],
    **{("aggregator", name): ["method=fvb"] for name in FILES["aggregator"] if name != "none"},
}
LEFT_OUT = {  # need files: their own tests run them
    *(("dataset", name) for name in ("mnist", "fashion_mnist", "cifar10", "svhn")),
    *(("dataset", name) for name in ("pmnist", "mnist_writers", "femnist", "har", "vsn", "shakespeare")),
    ("partition", "file"),
    ("partition", "natural"),
    ("model", "lstm"),
    ("engine", "processes"),
    *(("experiment", name) for name in FILES["experiment"]),
}


def test_there_is_something_in_every_group() -> None:
    assert all(FILES[group] for group in GROUPS)


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_composes_and_passes_the_checks(group: str, name: str) -> None:
    overrides = [f"{group}={name}", *NEEDS.get(name, [])]
    if group == "aggregator" and name != "none":
        overrides.append("method=fvb")
    if (group, name) == ("partition", "file"):
        overrides.append("partition.path=x.npz")
    config = resolve(*overrides)
    assert plan(config).settings.rounds >= 1
    assert folder_name(config)
    if group != "experiment":
        assert config[group]["name"] == name


@pytest.mark.parametrize(("group", "name"), [choice for choice in CHOICES if choice not in LEFT_OUT])
def test_runs_one_round(group: str, name: str, tmp_path: Path) -> None:
    small = [o for o in SMALL if not (o.startswith("dataset") and group == "dataset")]
    small = [
        o for o in small if not (o.startswith("model.") and (group, name) != ("model", "mlp") and group == "model")
    ]
    small = [o for o in small if not (o.startswith("partition.") and group == "partition")]
    if group == "dataset" and name == "synthetic":
        small = list(SMALL)
    text = run_in(tmp_path, *small, f"{group}={name}", "rounds=1", *ALSO.get((group, name), NEEDS.get(name, [])))
    assert len(text.splitlines()) == 2


ROWS = sorted(str(path.relative_to(config_folder() / "row")) for path in (config_folder() / "row").glob("*/*.yaml"))


@pytest.mark.parametrize("row", [row.removesuffix(".yaml") for row in ROWS])
def test_every_row_fits_its_experiment(row: str) -> None:
    """conf/row/NAME/... are rows of conf/experiment/NAME.yaml."""
    name = row.split("/")[0]
    base, config = resolve(f"experiment={name}"), resolve(f"experiment={name}", f"row={row}")
    assert plan(config)
    assert config["dataset"] == base["dataset"]


@pytest.mark.parametrize("name", FILES["experiment"])
def test_the_sweep_of_an_experiment_names_rows_that_exist(name: str) -> None:
    text = yaml.safe_load((config_folder() / "experiment" / f"{name}.yaml").read_text())
    rows = text.get("hydra", {}).get("sweeper", {}).get("params", {}).get("row", "")
    assert all(f"{row.strip()}.yaml" in ROWS for row in rows.split(",") if row)


def test_table_2_of_fola_has_an_own_number_of_epochs_per_method() -> None:
    epochs = {
        method: resolve("experiment=fola_table2", f"row=fola_table2/{method}")["local"]["epochs"]
        for method in ("fola", "fedavg", "fedcurv", "fednova", "scaffold", "fedbe")
    }
    assert epochs == {"fola": 20, "fedavg": 40, "fedcurv": 10, "fednova": 10, "scaffold": 1, "fedbe": 20}


def test_help_lists_every_option_with_its_line() -> None:
    text = help_text()
    for group, names in FILES.items():
        assert f"\n{group}\n" in text
        for name in names:
            line = next(line for line in text.splitlines() if line.strip().startswith(f"{name} "))
            assert len(line.split(maxsplit=1)[1]) > 15, line


def test_dataset_brings_its_model_and_the_command_line_wins() -> None:
    assert resolve("dataset=cifar10")["model"]["name"] == "cnn"
    assert resolve("dataset=cifar10", "model=lenet")["model"]["name"] == "lenet"
    assert resolve("dataset=fashion_mnist")["model"]["name"] == "lenet"
    assert resolve()["model"]["name"] == "mlp"


def test_experiment_wins_over_the_dataset_and_the_command_line_over_both() -> None:
    config = resolve("experiment=mnist_mlp")
    assert (config["dataset"]["name"], config["model"]["hidden"]) == ("mnist", [500, 300])
    config = resolve("experiment=mnist_mlp", "dataset=cifar10", "local.lr=0.5")
    assert (config["dataset"]["name"], config["model"]["name"], config["local"]["lr"]) == (
        "cifar10",
        "mlp",
        0.5,
    )


def test_defaults_are_those_of_the_readme() -> None:
    config = resolve()
    assert config["participation"] == 1.0
    assert config["local"] == {
        "epochs": 5, "batch_size": 32, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0, "clip": None
    }  # fmt: skip
    assert (config["rounds"], config["num_clients"], config["partition"]["alpha"]) == (20, 10, 0.1)
    assert config["eval"]["ece_bins"] == 15
    assert config["threads"] == 1


WRONG = [
    ("rounds=abc", "rounds: got 'abc', allowed: a whole number"),
    ("rounds=0", "rounds: got 0"),
    ("rounds=1.5", "rounds: got 1.5"),
    ("seed=-1", "seed: got -1"),
    ("participation=0", "participation: got 0"),
    ("participation=1.5", "participation: got 1.5"),
    ("participation=11", "participation: got 11, allowed: at most num_clients, 10"),
    ("partition.alpha=0", "partition.alpha: got 0, allowed: a number above 0"),
    ("partition.alpha=nan", "partition.alpha: got nan"),
    ("local.lr=true", "local.lr: got True"),
    ("local.momentum=1", "local.momentum: got 1"),
    ("local.clip=0", "local.clip: got 0"),
    ("eval.local_every=-1", "eval.local_every: got -1"),
    ("method.weights=sizes", "method.weights: got 'sizes', allowed: size, uniform"),
    ("model.hidden=[0]", "model.hidden: got [0]"),
    ("device=tpu", "device: got 'tpu', allowed: auto, cpu, cuda"),
    ("+local.epoch=3", "did you mean epochs?"),
    ("+rnds=3", "did you mean rounds?"),
    ("method._target_=no.such.Thing", "method._target_: got 'no.such.Thing'"),
    ("local=5", "local: got 5"),
    ("++aggregator.name=wb", "aggregator._target_: got None, allowed: the dotted path"),
]


@pytest.mark.parametrize(("override", "sentence"), WRONG)
def test_wrong_values_are_named_before_any_data_is_loaded(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(resolve(override))
    assert sentence in str(error.value)


WRONG_FOR_THE_DATA = [
    (["num_clients=100000"], "num_clients: got 100000"),
    (["model=lenet"], "model: got 'lenet'"),
    (["partition=disjoint", "num_clients=11"], "num_clients: got 11"),
    (["partition=classes", "partition.classes_per_client=11"], "partition.classes_per_client: got 11"),
    (["partition=file", "partition.path=/no/such/file.npz"], "partition.path: got '/no/such/file.npz'"),
]


@pytest.mark.parametrize(("overrides", "sentence"), WRONG_FOR_THE_DATA)
def test_what_only_the_data_can_tell_is_named_before_training(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        experiment(*overrides)
    assert str(error.value).startswith(sentence)


def test_participation_counts() -> None:
    assert experiment(*SMALL).cohort_size == 5
    assert experiment(*SMALL, "participation=0.5").cohort_size == 2
    assert experiment(*SMALL, "participation=0.01").cohort_size == 1
    assert experiment(*SMALL, "participation=3").cohort_size == 3
