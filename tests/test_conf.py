"""Every file in conf/ composes, builds and runs; what is wrong raises one sentence."""

from pathlib import Path

import pytest

from bfl_bench.build import plan
from bfl_bench.errors import ConfigError
from bfl_bench.groups import PARTS
from bfl_bench.identity import folder_name
from bfl_bench.papers.spec import list_cells, read_tables
from bfl_bench.records import config_folder
from tests.composing import NEEDS, SMALL, experiment, resolve, run_in

GROUPS = (*PARTS, "experiment", "scale")
FILES = {group: sorted(path.stem for path in (config_folder() / group).glob("[!_]*.yaml")) for group in GROUPS}
CHOICES = [(group, name) for group in GROUPS for name in FILES[group]]

# What an option needs beside itself in order to run on small synthetic data.
ALSO = {
    ("dataset", "digits"): ["rounds=1"],
    ("model", "lenet"): ["dataset.shape=[1,16,16]"],
    ("model", "conv3"): ["dataset.shape=[1,16,16]"],
    ("model", "cnn"): ["dataset.shape=[3,16,16]"],
    ("model", "resnet8"): ["dataset.shape=[3,8,8]"],
    ("partition", "disjoint"): ["num_clients=3"],
    **{("aggregator", name): ["method=fvb"] for name in FILES["aggregator"] if name != "none"},
}
TRACKERS = [("observer", name) for name in ("tensorboard", "mlflow", "wandb")]  # need packages, as Ray does
ELSEWHERE = (("engine", "ray"), *TRACKERS, ("scale", "cpu"))  # which only tables have
LEFT_OUT = {  # need files: their own tests run them
    *(("dataset", name) for name in ("mnist", "fashion_mnist", "cifar10", "cifar10_cropped", "svhn")),
    *(("dataset", name) for name in ("kmnist", "emnist", "cifar100")),
    *(("dataset", name) for name in ("pmnist", "mnist_writers", "femnist", "har", "vsn", "shakespeare")),
    *(("dataset", name) for name in ("wine", "bike", "kin8nm", "abalone", "auto_mpg")),
    ("partition", "file"),
    ("partition", "natural"),
    ("model", "lstm"),
    ("model", "resnet18"),  # too large for a test
    ("engine", "processes"),
    ("engine", "ray"),
    *TRACKERS,
    *(("experiment", name) for name in FILES["experiment"]),
    *(("scale", name) for name in FILES["scale"]),
}


def test_there_is_something_in_every_group() -> None:
    assert all(FILES[group] for group in GROUPS)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), [choice for choice in CHOICES if choice not in ELSEWHERE])
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


@pytest.mark.slow
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
        assert names <= set(read_tables()), names - set(read_tables())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in read_tables() if not name.startswith("truth_")])  # those are small
def test_every_table_has_a_scale_for_two_cores_and_one_for_seconds(name: str) -> None:
    """It sweeps no more than the paper does, on real data; the other is short, on stand-ins."""
    table = read_tables()[name]
    short, smoke = list_cells(table, "cpu"), list_cells(table, "smoke")
    assert all("data_dir" not in cell.values for cell in short)
    for cell in smoke:
        assert (cell.values["data_dir"], cell.values["local.epochs"]) == ("stand-in", 1)
        assert cell.values["rounds"] <= 2
    assert {cell.names["cell"] for cell in smoke} <= {cell.names["cell"] for cell in list_cells(table)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["fola_figure5", "cell=offline, no prior", "num_clients=10", "seed=0"],
        ["virtual_table2", "cell=Virtual", "federation=VSN, mlp", "method.beta=1e-05"],
        ["ba_bfl_table1", "cell=2 / WB", "dataset=svhn", "seed=0"],
        ["fedlpa_table2", "cell=FedLPA", "split=#C=2", "num_clients=20", "seed=0"],
        ["bfl_p_table4", "cell=FVBWA / CF", "dataset=fashion_mnist", "seed=0"],
    ],
)
def test_one_cell_of_each_paper_runs_at_smoke_scale(words: list[str], tmp_path: Path) -> None:
    cells = list_cells(read_tables()[words[0]], "smoke")
    for word in words[1:]:
        axis, _, name = word.partition("=")
        cells = [cell for cell in cells if (str(cell.seed) if axis == "seed" else cell.names[axis]) == name]
    (cell,) = cells
    assert len(run_in(tmp_path, *cell.overrides()).splitlines()) in (2, 3)


def test_table_2_of_fola_has_an_own_number_of_epochs_per_method() -> None:
    cells = list_cells(read_tables()["fola_table2"])
    epochs = {cell.values["method"]: cell.values["local.epochs"] for cell in cells}
    ours = {"fola": 20, "fola_algorithm1": 20, "fola_eq22": 20, "fola_released": 40}
    others = {"fedavg": 40, "fedcurv": 10, "fedcurv_released": 10, "fednova": 10, "scaffold": 1, "fedbe": 20}
    assert epochs == ours | others


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
        "epochs": 5, "batch_size": 32, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": None,
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
    ("device=tpu", "device: got 'tpu', allowed: auto, cpu, or another device of torch, such as cuda, cuda:1 or xpu"),
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
