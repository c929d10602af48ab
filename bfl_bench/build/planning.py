"""A config, checked: every key, type and range, and every combination that needs no data."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import nn

from bfl_bench import records
from bfl_bench.aggregators.server_step import ServerStep
from bfl_bench.build.parts import (
    construct,
    construct_alternatives,
    construct_foreign,
    construct_method,
    construct_section,
    find_pixels,
    split_model,
    takes,
)
from bfl_bench.checks import Above, AtLeast, Between, check_arguments, check_value
from bfl_bench.data.corruptions import CORRUPTIONS, Pixels
from bfl_bench.data.dataset import DatasetConfig
from bfl_bench.data.label_noise import LabelNoise
from bfl_bench.data.partition import Natural, PartitionConfig
from bfl_bench.devices import choose_device
from bfl_bench.engines.worker import Engine, EvalSettings
from bfl_bench.errors import ConfigError
from bfl_bench.groups import PARTS
from bfl_bench.identity import RUNS
from bfl_bench.method import LocalSettings, Method
from bfl_bench.models.gaussian import GaussianSettings
from bfl_bench.run.observers import Observer


@dataclass(frozen=True)
class Settings:
    """The keys at the top of the config."""

    seed: Annotated[int, AtLeast(0)]
    rounds: Annotated[int, AtLeast(1)]
    num_clients: Annotated[int, AtLeast(1)] | None
    participation: Annotated[float, Above(0)]
    cohort: Literal["random", "sequential"]
    device: str
    threads: Annotated[int, Between(1, 256)]
    data_dir: str | None
    out: str
    scale: Literal["paper", "cpu", "smoke"]
    start_from: str | None
    reference_posterior: str | None
    force: bool
    dry_run: bool


@dataclass(frozen=True)
class CheckpointSettings:
    every: Annotated[int, AtLeast(1)]
    keep: bool


@dataclass(frozen=True)
class Plan:
    """A checked config: what can be built without data."""

    settings: Settings
    device: torch.device
    dataset: DatasetConfig
    server_samples: int
    label_noise: LabelNoise
    partition: PartitionConfig
    own_test: bool
    validation: float
    unseen: float  # share of the clients
    split_seed: int  # of the partition
    unknown_classes: list[int]
    make_model: Callable[..., nn.Module]  # (input_shape, num_classes) -> module
    model_name: str
    gaussian: GaussianSettings | None
    method: Method
    alternatives: dict[str, Method]  # the method with the rules of eval.also_aggregate
    foreign: dict[str, DatasetConfig]  # the datasets of eval.ood
    pixels: Pixels | None  # of the dataset's images
    engine: Engine
    observers: list[Observer]
    local: LocalSettings
    server: ServerStep
    eval: EvalSettings
    checkpoint: CheckpointSettings


CLEAN = {"rate": 0.0, "kind": "uniform"}
"""The label noise of a dataset that does not have the key."""


def plan(config: Mapping[str, Any]) -> Plan:
    """Check every key, type and range, and every combination that needs no data."""
    sections = {
        "local": LocalSettings,
        "server": ServerStep,
        "eval": EvalSettings,
        "checkpoint": CheckpointSettings,
    }
    for key in (*PARTS, *sections):
        if not isinstance(config.get(key), dict):
            raise ConfigError(key, config.get(key), "a group of keys, as in conf/")
    for group in PARTS:
        name = config[group].get("name")
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
            allowed = "letters, digits, dots, dashes and underscores, for the folder, no dot or dash at the start"
            raise ConfigError(f"{group}.name", name, allowed)
    top = {key: value for key, value in config.items() if key not in (*PARTS, *sections, "inputs")}
    settings = Settings(**check_arguments(Settings, top, also=(*PARTS, *sections)))
    for key in RUNS:
        if top[key] is not None and key not in config.get("inputs", {}):
            raise ConfigError(key, top[key], f"the folder of a run, with its {records.CONFIG}")
    if settings.participation > 1 and settings.participation != int(settings.participation):
        raise ConfigError(
            "participation",
            settings.participation,
            "a fraction above 0 up to 1, or a whole number of clients",
        )
    if settings.num_clients is not None and settings.participation > max(1, settings.num_clients):
        raise ConfigError("participation", settings.participation, f"at most num_clients, {settings.num_clients}")
    if settings.cohort == "sequential" and settings.participation != 1:
        allowed = "1 with cohort=sequential, where one client after the other has a round"
        raise ConfigError("participation", settings.participation, allowed)
    device = choose_device(settings.device)
    dataset = dict(config["dataset"])
    server_samples = dataset.pop("server_samples", 0)
    check_value("dataset.server_samples", server_samples, Annotated[int, AtLeast(0)])
    label_noise = construct_section("dataset.label_noise", LabelNoise, dataset.pop("label_noise", CLEAN))
    partition_node = dict(config["partition"])
    own_test = partition_node.pop("test", "auto")
    check_value("partition.test", own_test, Literal["auto", "shared", "per_client"])
    validation = partition_node.pop("validation", 0)
    check_value("partition.validation", validation, Annotated[float, Between(0, 0.9)])
    unseen = partition_node.pop("unseen", 0)
    check_value("partition.unseen", unseen, Annotated[float, Between(0, 0.9)])
    split_seed = partition_node.pop("seed", None)
    check_value("partition.seed", split_seed, Annotated[int, AtLeast(0)] | None)
    unknown_classes = partition_node.pop("unknown_classes", [])
    check_value("partition.unknown_classes", unknown_classes, list[Annotated[int, AtLeast(0)]])
    partition = construct("partition", {"partition": partition_node})
    if settings.num_clients is None and not isinstance(partition, Natural):
        raise ConfigError("num_clients", None, f"a number with partition {partition.name}")
    gaussian, model = split_model(config["model"])
    method = construct_method(config)
    needs = method.needs
    if gaussian is None and needs.gaussian_layers:
        allowed = f"a network with the keys of Gaussian layers (`defaults: [_gaussian, _self_]`) for {method.name}"
        raise ConfigError("model", config["model"].get("name"), allowed)
    asked = gaussian.bayesian_layers if gaussian is not None else 0
    if asked not in ("auto", "auto_all", 0) and not needs.gaussian_layers:
        allowed = f"auto, auto_all or 0; method {method.name} has no Gaussian layers"
        raise ConfigError("model.bayesian_layers", asked, allowed)
    if needs.dropout and "dropout" in model and not takes("model", config, "dropout"):
        allowed = f"a network with the key dropout, such as mlp, lenet, cnn and resnet8, for method {method.name}"
        raise ConfigError("model", config["model"].get("name"), allowed)
    if server_samples == 0 and needs.server_data != "none":
        allowed = f"above 0; method {method.name} needs {needs.server_data} examples on the server"
        raise ConfigError("dataset.server_samples", 0, allowed)
    if rounds := config["eval"].get("weight_rounds"):
        if settings.num_clients != 2 or settings.participation not in (1, 2) or settings.cohort != "random":
            raise ConfigError("eval.weight_rounds", rounds, "[] unless there are two clients, both in every round")
        if method.weights != "size":
            raise ConfigError("eval.weight_rounds", rounds, "[] unless method.weights=size")
    personal = isinstance(partition, Natural) or needs.own_test
    made: dict[str, Any] = {key: construct_section(key, cls, config[key]) for key, cls in sections.items()}
    _check_steps(method, made["local"], made["server"])
    if made["eval"].posterior and type(method).posterior is Method.posterior:
        raise ConfigError("eval.posterior", True, f"false; the state of method {method.name} is no Gaussian")
    if made["eval"].personalise and type(method).gaussian is Method.gaussian:
        allowed = f"[]; the models of method {method.name} are no Gaussians"
        raise ConfigError("eval.personalise", made["eval"].personalise, allowed)
    _check_predictives(method, made["eval"])
    if unseen and own_test == "shared":
        raise ConfigError("partition.test", own_test, "auto or per_client with partition.unseen above 0")
    made["eval"] = _name_corruptions(made["eval"])
    return Plan(
        settings=settings,
        device=device,
        dataset=construct("dataset", {"dataset": dataset}),
        server_samples=server_samples,
        label_noise=label_noise,
        partition=partition,
        own_test=own_test == "per_client" or (own_test == "auto" and bool(personal or unseen)),
        validation=validation,
        unseen=unseen,
        split_seed=settings.seed if split_seed is None else split_seed,
        unknown_classes=unknown_classes,
        make_model=construct("model", {"model": model}, supplied=("input_shape", "num_classes")),
        model_name=config["model"]["name"],
        gaussian=gaussian,
        method=method,
        alternatives=construct_alternatives(method, config),
        foreign=construct_foreign(config),
        pixels=find_pixels(config["dataset"]),
        engine=construct("engine", config),
        observers=[] if config["observer"].get("name") == "none" else [construct("observer", config)],
        **made,
    )


def _check_steps(method: Method, local: LocalSettings, server: ServerStep) -> None:
    """Refuse local and server steps that the method's algebra does not know."""
    if local.optimizer != "sgd" and method.needs.sgd:
        raise ConfigError("local.optimizer", local.optimizer, f"sgd; method {method.name} is made for its steps")
    if not server.is_plain and not method.needs.any_server_step:
        key, got = ("server.rule", server.rule) if server.rule != "sgd" else ("server.momentum", server.momentum)
        allowed = f"{'sgd' if key == 'server.rule' else 0}; the state of method {method.name} is not a point"
        raise ConfigError(key, got, allowed)


WITHOUT_DRAWS = (1, 10)
"""Values of eval.draws and eval.local_draws that say nothing where nothing is drawn: one draw, and the default."""


def _check_predictives(method: Method, settings: EvalSettings) -> None:
    """Refuse ways to predict that the method does not have, and options that would have no effect."""
    own, *others = method.predictives
    ways = ", ".join(method.predictives)
    if settings.predictive not in ("auto", *method.predictives):
        raise ConfigError("eval.predictive", settings.predictive, f"auto, {ways}; method {method.name} has no other")
    for kind in settings.also_predict:
        if kind not in method.predictives:
            raise ConfigError("eval.also_predict", kind, f"{ways}; method {method.name} has no other")
    chosen = own if settings.predictive == "auto" else settings.predictive
    kinds = {chosen, *settings.also_predict}
    if not ("linearised" in others and kinds - {"mean"}):
        for key, neutral in (("prior_precision", "auto"), ("laplace_layers", "all")):
            if (value := getattr(settings, key)) != neutral:
                needed = "eval.predictive or eval.also_predict have draws or linearised of a Laplace approximation"
                raise ConfigError(f"eval.{key}", value, f"{neutral} unless {needed}")
    drawing = {"draws": "draws" in kinds, "local_draws": own == chosen == "draws"}
    for key, drawn in drawing.items():
        value = getattr(settings, key)
        if not drawn and value not in WITHOUT_DRAWS:
            nothing = f"method {method.name} draws nothing" + (" unless eval.predictive=draws" if others else "")
            raise ConfigError(f"eval.{key}", value, f"10, the default; {nothing}")


def _name_corruptions(settings: EvalSettings) -> EvalSettings:
    """Check the names in eval.shift, where `all` stands for all of them."""
    for name in settings.shift:
        if name not in (*CORRUPTIONS, "all"):
            raise ConfigError("eval.shift", name, ", ".join([*CORRUPTIONS, "all"]))
    if settings.shift and not settings.severities:
        raise ConfigError("eval.severities", [], "at least one of 1 to 5 with eval.shift")
    return replace(settings, shift=list(CORRUPTIONS)) if "all" in settings.shift else settings
