"""Every file in conf/ composes, builds and runs; what is wrong raises one sentence."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import open_dict

from bfl_bench.build import plan
from bfl_bench.commands import run as cli
from bfl_bench.errors import ConfigError
from bfl_bench.groups import PARTS
from bfl_bench.identity import folder_name
from bfl_bench.records import config_folder
from tests.composing import NEEDS, SMALL, experiment, resolve, run_in

GROUPS = (*PARTS, "experiment", "scale")  # rows need an experiment, see below
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
    *(("dataset", name) for name in ("mnist", "fashion_mnist", "cifar10", "cifar10_cropped", "svhn")),
    *(("dataset", name) for name in ("pmnist", "mnist_writers", "femnist", "har", "vsn", "shakespeare")),
    ("partition", "file"),
    ("partition", "natural"),
    ("model", "lstm"),
    ("engine", "processes"),
    ("engine", "ray"),
    *(("experiment", name) for name in FILES["experiment"]),
    *(("scale", name) for name in FILES["scale"]),
}


def test_there_is_something_in_every_group() -> None:
    assert all(FILES[group] for group in GROUPS)


@pytest.mark.parametrize(("group", "name"), [choice for choice in CHOICES if choice != ("engine", "ray")])
def test_composes_and_passes_the_checks(group: str, name: str) -> None:
    overrides = [f"{group}={name}", *NEEDS.get(name, [])]
    if group == "aggregator" and name != "none":
        overrides.append("method=fvb")
    if (group, name) == ("partition", "file"):
        overrides.append("partition.path=x.npz")
    config = resolve(*overrides)
    assert plan(config).settings.rounds >= 1
    assert folder_name(config)
    if group not in ("experiment", "scale"):
        assert name.startswith(config[group]["name"])  # cifar10_cropped is cifar10


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
SCALED = sorted(path.stem for path in (config_folder() / "scale" / "of").glob("*.yaml"))
TABLES_AND_FIGURES = [name for name in FILES["experiment"] if "_table" in name or "_figure" in name]


def sweep_of(name: str, scale: str = "paper") -> tuple[dict[str, Any], dict[str, str]]:
    """The composed config and what it sweeps."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", [f"experiment={name}", f"scale={scale}"], return_hydra_config=True)
        params = {key: str(value) for key, value in (config.hydra.sweeper.params or {}).items()}
        with open_dict(config):
            del config["hydra"]
        return cli.resolve(config), params


@pytest.mark.slow
@pytest.mark.parametrize("row", [row.removesuffix(".yaml") for row in ROWS])
def test_every_row_is_swept_by_an_experiment_that_it_fits(row: str) -> None:
    users = [name for name in FILES["experiment"] if row in SWEPT_ROWS[name]]
    assert users or row == "fola_table2/fedprox"  # an addition that no table has
    assert plan(resolve(f"experiment={(users or ['fola_table2'])[0]}", f"row={row}"))


def read_swept_rows(path: Path) -> list[str]:
    content = yaml.safe_load(path.read_text()) if path.exists() else None
    swept = ((content or {}).get("hydra") or {}).get("sweeper", {}).get("params", {}).get("row", "")
    return [row.strip() for row in swept.split(",") if row]


SWEPT_ROWS = {
    name: read_swept_rows(config_folder() / "experiment" / f"{name}.yaml")
    + read_swept_rows(config_folder() / "scale" / "of" / f"{name}_cpu.yaml")
    for name in FILES["experiment"]
}


@pytest.mark.parametrize("name", FILES["experiment"])
def test_the_sweep_of_an_experiment_names_rows_that_exist(name: str) -> None:
    assert all(f"{row}.yaml" in ROWS for row in SWEPT_ROWS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES_AND_FIGURES)
def test_every_table_and_figure_has_a_scale_for_two_cores(name: str) -> None:
    """It passes the checks, sweeps no more than the paper does, and is on real data."""
    (paper, swept), (short, shortened) = sweep_of(name), sweep_of(name, "cpu")
    assert plan(short)
    assert short["data_dir"] != "stand-in"
    assert short["scale"] == "cpu"
    assert short["rounds"] * short["local"]["epochs"] <= paper["rounds"] * paper["local"]["epochs"]
    assert set(shortened) <= {*swept, "seed", "partition.alpha"}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES_AND_FIGURES)
def test_smoke_scale_is_short_whatever_is_swept(name: str) -> None:
    config, swept = sweep_of(name, "smoke")
    assert config["data_dir"] == "stand-in"
    assert (config["rounds"] <= 2, config["local"]["epochs"], swept["local.epochs"]) == (True, 1, "1")
    assert "rounds" not in swept


def test_every_scale_belongs_to_an_experiment() -> None:
    assert {name.rpartition("_")[0] for name in SCALED} <= set(FILES["experiment"])


def test_the_papers_tables_and_figures_are_there() -> None:
    """All but those without runs: toy Gaussians, sketches, and the table that lists datasets."""
    wanted = {
        "fola": (["2"], range(3, 13)),
        "virtual": ("1234", range(2, 7)),
        "ba_bfl": ("1", range(2, 6)),
        "fedlpa": (range(1, 13), range(1, 6)),
        "bfl_p": ("1345", ()),
    }
    for paper, (tables, figures) in wanted.items():
        names = {f"{paper}_table{n}" for n in tables} | {f"{paper}_figure{n}" for n in figures}
        assert names <= set(TABLES_AND_FIGURES), names - set(TABLES_AND_FIGURES)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("fola_figure5", "fola/offline"),
        ("virtual_table2", "virtual/vsn"),
        ("ba_bfl_table1", "ba_bfl/wb_2"),
        ("fedlpa_table2", "fedlpa/classes_2"),
        ("bfl_p_table4", "bfl_p/fvbwa_cf"),
    ],
)
def test_one_experiment_of_each_paper_runs_at_smoke_scale(name: str, row: str, tmp_path: Path) -> None:
    method = [f"method={row.split('/')[0]}"] if row.startswith(("virtual", "fedlpa")) else []
    text = run_in(tmp_path, f"experiment={name}", f"row={row}", "scale=smoke", *method)
    assert len(text.splitlines()) in (2, 3)


def test_table_2_of_fola_has_an_own_number_of_epochs_per_method() -> None:
    epochs = {
        method: resolve("experiment=fola_table2", f"row=fola_table2/{method}")["local"]["epochs"]
        for method in ("fola", "fedavg", "fedcurv", "fednova", "scaffold", "fedbe")
    }
    assert epochs == {"fola": 20, "fedavg": 40, "fedcurv": 10, "fednova": 10, "scaffold": 1, "fedbe": 20}


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
        "epochs": 5, "batch_size": 32, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0, "clip": None,
        "optimizer": "sgd", "betas": [0.9, 0.999], "schedule": "constant",
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
    ("local.lr=true", "local.lr: got true"),
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
    ("++aggregator.name=wb", "aggregator._target_: got null, allowed: the dotted path"),
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
