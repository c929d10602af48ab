"""From a resolved config to objects: first what needs no data, checked; then the data and what depends on it.

A group's node names its callable with `_target_`; the other keys are its arguments, checked against its annotations.
"""

import functools
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import numpy as np
import torch
from torch import nn

from bfl_bench import records
from bfl_bench.aggregators.algebra import Gaussian
from bfl_bench.aggregators.server_step import ServerStep
from bfl_bench.checks import Above, AtLeast, Between, check_arguments, check_value
from bfl_bench.data.dataset import Dataset, DatasetConfig, Split
from bfl_bench.data.partition import Natural, Partition, PartitionConfig, deal_test, hold_out, indices_of
from bfl_bench.data.partition.partition import Ints
from bfl_bench.data.sources import default_data_dir
from bfl_bench.engines.process_setup import set_up_process
from bfl_bench.engines.worker import TEST, VALIDATION, Engine, EvalSettings, EvaluationSet, Worker
from bfl_bench.errors import ConfigError, RunError, UnsuitableError
from bfl_bench.groups import PARTS
from bfl_bench.identity import RUNS, read_config
from bfl_bench.likelihood import Categorical
from bfl_bench.method import DataInfo, LocalSettings, Method, Needs, ServerData, Task, Tensors
from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import GaussianSettings, count_layers, make_gaussian
from bfl_bench.models.lateral import Lateral
from bfl_bench.rng import derive_seed, seeded_globally, stream
from bfl_bench.run.checkpoint import read_state
from bfl_bench.run.loop import Experiment
from bfl_bench.run.observers import Observer


@dataclass(frozen=True)
class Settings:
    """The keys at the top of the config."""

    seed: Annotated[int, AtLeast(0)]
    rounds: Annotated[int, AtLeast(1)]
    num_clients: Annotated[int, AtLeast(1)] | None
    participation: Annotated[float, Above(0)]
    device: Literal["auto", "cpu", "cuda"]
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


@dataclass(frozen=True)
class Plan:
    """A checked config: what can be built without data."""

    settings: Settings
    device: torch.device
    dataset: DatasetConfig
    server_samples: int
    partition: PartitionConfig
    own_test: bool
    validation: float
    make_model: Callable[..., nn.Module]  # (input_shape, num_classes) -> module
    model_name: str
    gaussian: GaussianSettings | None
    method: Method
    alternatives: dict[str, Method]  # the method with the rules of eval.also_aggregate
    foreign: dict[str, DatasetConfig]  # the datasets of eval.ood
    engine: Engine
    observers: list[Observer]
    local: LocalSettings
    server: ServerStep
    eval: EvalSettings
    checkpoint: CheckpointSettings


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
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"{group}.name", name, "letters, digits, dots, dashes and underscores, for the folder")
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
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "cuda", "auto or cpu; torch sees no GPU on this machine")
    dataset = dict(config["dataset"])
    server_samples = dataset.pop("server_samples", 0)
    check_value("dataset.server_samples", server_samples, Annotated[int, AtLeast(0)])
    partition_node = dict(config["partition"])
    own_test = partition_node.pop("test", "auto")
    check_value("partition.test", own_test, Literal["auto", "shared", "per_client"])
    validation = partition_node.pop("validation", 0)
    check_value("partition.validation", validation, Annotated[float, Between(0, 0.9)])
    partition = construct("partition", {"partition": partition_node})
    if settings.num_clients is None and not isinstance(partition, Natural):
        raise ConfigError("num_clients", None, f"a number with partition {partition.name}")
    gaussian, model = _split_model(config["model"])
    method = _construct_method(config)
    needs = method.needs
    if gaussian is None and needs.gaussian_layers:
        allowed = f"a network with the keys of Gaussian layers (`defaults: [_gaussian, _self_]`) for {method.name}"
        raise ConfigError("model", config["model"].get("name"), allowed)
    asked = gaussian.bayesian_layers if gaussian is not None else 0
    if asked not in ("auto", "auto_all", 0) and not needs.gaussian_layers:
        allowed = f"auto, auto_all or 0; method {method.name} has no Gaussian layers"
        raise ConfigError("model.bayesian_layers", asked, allowed)
    if server_samples == 0 and needs.server_data != "none":
        allowed = f"above 0; method {method.name} needs {needs.server_data} examples on the server"
        raise ConfigError("dataset.server_samples", 0, allowed)
    if rounds := config["eval"].get("weight_rounds"):
        if settings.num_clients != 2 or settings.participation not in (1, 2):
            raise ConfigError("eval.weight_rounds", rounds, "[] unless there are two clients, both in every round")
        if method.weights != "size":
            raise ConfigError("eval.weight_rounds", rounds, "[] unless method.weights=size")
    personal = isinstance(partition, Natural) or needs.own_test
    made: dict[str, Any] = {key: _section(key, cls, config[key]) for key, cls in sections.items()}
    _check_steps(method, made["local"], made["server"])
    use_gpu = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    return Plan(
        settings=settings,
        device=torch.device("cuda" if use_gpu else "cpu"),
        dataset=construct("dataset", {"dataset": dataset}),
        server_samples=server_samples,
        partition=partition,
        own_test=own_test == "per_client" or (own_test == "auto" and personal),
        validation=validation,
        make_model=construct("model", {"model": model}, supplied=("input_shape", "num_classes")),
        model_name=config["model"]["name"],
        gaussian=gaussian,
        method=method,
        alternatives=_construct_alternatives(method, config),
        foreign=_construct_foreign(config),
        engine=construct("engine", config),
        observers=[] if config["observer"].get("name") == "none" else [construct("observer", config)],
        **made,
    )


def construct(group: str, config: Mapping[str, Any], supplied: tuple[str, ...] = (), **given: Any) -> Any:
    """The object a group's node and the `given` arguments describe, or a function of the `supplied` ones."""
    target = _target(group, config)
    values = {key: value for key, value in config[group].items() if key != "_target_"}
    if "name" not in inspect.signature(target).parameters:
        values.pop("name", None)
    try:
        arguments = check_arguments(target, values, (*supplied, *given)) | given
        return functools.partial(target, **arguments) if supplied else target(**arguments)
    except ConfigError as error:
        raise error.below(group) from None


def _check_steps(method: Method, local: LocalSettings, server: ServerStep) -> None:
    """Refuse local and server steps that the method's algebra does not know."""
    if local.optimizer != "sgd" and method.needs.sgd:
        raise ConfigError("local.optimizer", local.optimizer, f"sgd; method {method.name} is made for its steps")
    if not server.is_plain and not method.needs.any_server_step:
        key, got = ("server.rule", server.rule) if server.rule != "sgd" else ("server.momentum", server.momentum)
        allowed = f"{'sgd' if key == 'server.rule' else 0}; the state of method {method.name} is not a point"
        raise ConfigError(key, got, allowed)


def _construct_method(config: Mapping[str, Any]) -> Method:
    """Construct the method, with the aggregation rule it asks for by a parameter of that name."""
    method = _construct_any_method(config)
    if not isinstance(method, Method):
        raise ConfigError("method._target_", config["method"]["_target_"], "a subclass of bfl_bench.method.Method")
    if misplaced := [field.name for field in fields(Needs) if hasattr(method, field.name)]:
        allowed = f"a class that declares {misplaced[0]} in `needs = Needs({misplaced[0]}=...)`"
        raise ConfigError("method._target_", config["method"]["_target_"], allowed)
    return method


def _construct_any_method(config: Mapping[str, Any]) -> Any:
    rule, method = config["aggregator"].get("name"), config["method"].get("name")
    target = _target("method", config)
    takes_rule = "aggregator" in inspect.signature(target).parameters
    if takes_rule and rule == "none":
        if _may_be_none(target, "aggregator"):
            return construct("method", config, aggregator=None)
        raise ConfigError("aggregator", rule, f"a rule; method {method} needs one")
    if not takes_rule and rule != "none":
        raise ConfigError("aggregator", rule, f"none; method {method} takes no aggregator")
    if not takes_rule:
        return construct("method", config)
    return construct("method", config, aggregator=_construct_rule(config))


def _may_be_none(target: Callable[..., Any], parameter: str) -> bool:
    annotation = get_type_hints(target.__init__ if inspect.isclass(target) else target).get(parameter)
    return type(None) in get_args(annotation)


def _construct_alternatives(method: Method, config: Mapping[str, Any]) -> dict[str, Method]:
    rules: dict[str, Any] = config["eval"].get("also_aggregate") or {}
    if rules and "aggregator" not in {field.name for field in fields(method)}:
        allowed = f"an empty list; method {method.name} takes no aggregator"
        raise ConfigError("eval.also_aggregate", list(rules), allowed)
    made: dict[str, Any] = {name: {"aggregator": _construct_rule({"aggregator": node})} for name, node in rules.items()}
    return {name: replace(method, **rule) for name, rule in made.items()} | dict(method.alternatives())


def _construct_foreign(config: Mapping[str, Any]) -> dict[str, DatasetConfig]:
    """Construct the datasets of eval.ood, normalised by the training data's constants where both have such."""
    own = config["dataset"]
    made: dict[str, DatasetConfig] = {}
    for name, node in (config["eval"].get("ood") or {}).items():
        if name in (own.get("name"), TEST, VALIDATION):
            raise ConfigError("eval.ood", name, "another dataset than the run's own")
        values = {key: value for key, value in node.items() if key != "server_samples"}
        values |= {key: own[key] for key in ("mean", "std") if key in values and key in own}
        made[name] = construct("dataset", {"dataset": values})
    return made


def _construct_rule(config: Mapping[str, Any]) -> Any:
    return construct("aggregator", config, supplied=("means", "variances", "weights", "generator"))


def _split_model(node: Mapping[str, Any]) -> tuple[GaussianSettings | None, dict[str, Any]]:
    """The settings of Gaussian layers, which a user's own network need not have, and the network's other keys."""
    names = [field.name for field in fields(GaussianSettings)]
    shared = {key: node[key] for key in names if key in node}
    rest = {key: value for key, value in node.items() if key not in names}
    return (_section("model", GaussianSettings, shared) if shared else None), rest


def _make_module(plan: Plan, dataset: Dataset, *names: int) -> nn.Module:
    """Make the network, with the Gaussian layers that the method and `model.bayesian_layers` ask for."""
    layers, needs = plan.gaussian.bayesian_layers if plan.gaussian else 0, plan.method.needs
    with seeded_globally(derive_seed(plan.settings.seed, "model", *names), plan.device):
        try:
            num_outputs = dataset.likelihood.num_outputs + needs.extra_outputs
            module = plan.make_model(dataset.input_shape, num_outputs)
            private = plan.make_model(dataset.input_shape, num_outputs) if needs.lateral else None
        except (MemoryError, RuntimeError) as error:  # torch raises the latter where memory does not suffice
            raise ConfigError("model", "a network that cannot be made", f"one that can ({error})") from None
        if plan.gaussian is None or layers == 0 or not needs.gaussian_layers:
            return module
        available = count_layers(module)
        if isinstance(layers, int) and layers > available:
            raise ConfigError("model.bayesian_layers", layers, f"at most the {available} layers of the network")
        num_layers = None if layers == "auto" else available if layers in ("all", "auto_all") else layers
        assert not isinstance(num_layers, str)
        module = make_gaussian(module, num_layers, plan.gaussian)
        return Lateral(module, make_gaussian(private, num_layers, plan.gaussian)) if private is not None else module


def _target(group: str, config: Mapping[str, Any]) -> Callable[..., Any]:
    path = config[group].get("_target_")
    if not isinstance(path, str):
        raise ConfigError(f"{group}._target_", path, "the dotted path of a class or function")
    try:
        target: Callable[..., Any] = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{group}._target_", path, f"something that can be imported ({error})") from None
    if not callable(target):
        raise ConfigError(f"{group}._target_", path, "a class or a function")
    return target


def _section(key: str, cls: type, values: Mapping[str, Any]) -> Any:
    try:
        return cls(**check_arguments(cls, values))
    except ConfigError as error:
        raise error.below(key) from None


def load(plan: Plan) -> tuple[Experiment, Dataset, Partition]:
    """Load the data, split it, make the network; check what only the data can tell."""
    settings = plan.settings
    set_up_process(settings.threads)
    data_dir = Path(settings.data_dir).expanduser() if settings.data_dir else default_data_dir()
    dataset, server_data = _hold_out(plan.dataset.load(data_dir), plan.server_samples, settings.seed)
    if plan.method.needs.classes and not isinstance(dataset.likelihood, Categorical):
        raise ConfigError("dataset", plan.dataset.name, f"a dataset of classes; method {plan.method.name} needs them")
    try:
        dataset, partition, own_test = _split(plan, dataset)
    except ConfigError as error:
        raise error if error.key == "num_clients" else error.below("partition") from None
    task = _make_task(plan, dataset, partition, server_data)
    start, reference = _read_earlier_runs(plan, task.model)
    worker = Worker(
        task=task,
        method=plan.method,
        train=dataset.train,
        sets=_evaluation_sets(dataset, partition, own_test) | _foreign_sets(plan, dataset, data_dir),
        augment=dataset.augment,
        client_indices=tuple(map(torch.from_numpy, partition.indices)),
        settings=plan.eval,
        seed=settings.seed,
        rounds=settings.rounds,
        reference_posterior=reference,
    ).to(plan.device)
    experiment = Experiment(
        worker=worker,
        engine=plan.engine,
        seed=settings.seed,
        cohort_size=_cohort_size(settings.participation, partition.sizes),
        checkpoint_every=plan.checkpoint.every,
        partition_info=partition.info,
        alternatives=plan.alternatives,
        start=start,
    )
    return experiment, dataset, partition


def _make_task(plan: Plan, dataset: Dataset, partition: Partition, server_data: ServerData | None) -> Task:
    """Make the network and all that clients and server share; let the method and the engine refuse it."""
    model = FlatModel(_make_module(plan, dataset), plan.device)
    others = range(1, plan.method.needs.num_initials)
    initials = [model.initial, *(FlatModel(_make_module(plan, dataset, j), plan.device).initial for j in others)]
    asked = plan.method.needs.server_data
    if server_data is not None:
        y = server_data.y.to(plan.device) if asked == "labelled" and server_data.y is not None else None
        server_data = ServerData(server_data.x.to(plan.device), y)
    task = Task(
        model=model,
        likelihood=dataset.likelihood,
        data=_describe_data(dataset, plan.device),
        local=plan.local,
        server=plan.server,
        sizes=partition.sizes,
        initials=torch.stack(initials),
        gaussian=plan.gaussian,
        server_data=None if asked == "none" else server_data,
    )
    plan.engine.check(plan.device)
    for method in (plan.method, *plan.alternatives.values()):
        try:
            method.check(task)
        except UnsuitableError as error:
            name = {"model": plan.model_name, "dataset": plan.dataset.name}[error.key]
            raise ConfigError(error.key, name, f"{error.needed} for method {method.name}") from None
    return task


def _evaluation_sets(dataset: Dataset, partition: Partition, own_test: list[Ints] | None) -> dict[str, EvaluationSet]:
    own = None if own_test is None else tuple(map(torch.from_numpy, own_test))
    sets = {TEST: EvaluationSet(dataset.test, own)}
    if partition.validation is not None:
        indices = torch.from_numpy(np.concatenate(partition.validation))
        x = dataset.train.x[indices]
        ends = np.cumsum([len(part) for part in partition.validation])
        whose = tuple(torch.arange(end - len(part), end) for end, part in zip(ends, partition.validation, strict=True))
        split = Split(x if dataset.normalise is None else dataset.normalise(x), dataset.train.y[indices])
        sets[VALIDATION] = EvaluationSet(split, whose)
    return sets


def _foreign_sets(plan: Plan, dataset: Dataset, data_dir: Path) -> dict[str, EvaluationSet]:
    """Load the test examples of the datasets in eval.ood."""
    sets: dict[str, EvaluationSet] = {}
    for name, foreign in plan.foreign.items():
        test = foreign.load(data_dir).test
        if tuple(test.x.shape[1:]) != dataset.input_shape:
            allowed = f"datasets with inputs of shape {dataset.input_shape} (these are {tuple(test.x.shape[1:])})"
            raise ConfigError("eval.ood", name, allowed)
        sets[name] = EvaluationSet(test, foreign=True)
    return sets


def _split(plan: Plan, dataset: Dataset) -> tuple[Dataset, Partition, list[Ints] | None]:
    """Who holds which training examples and, where clients have their own, which test examples.

    Test examples that are nobody's are left out then: the test set is all clients' examples together.
    """
    settings, labels = plan.settings, first_labels(dataset.train)
    if isinstance(plan.partition, Natural) and dataset.owners is not None:
        chosen = plan.partition.choose(len(dataset.owners.names), settings.num_clients, settings.seed)
        partition = Partition.of(labels, indices_of(dataset.owners.train.numpy(), chosen))
        partition = hold_out(partition, plan.validation, settings.seed)
        own = indices_of(dataset.owners.test.numpy(), chosen)
    else:
        assert settings.num_clients is not None or isinstance(plan.partition, Natural)
        partition = plan.partition.split(labels, dataset.num_classes, settings.num_clients or 1, settings.seed)
        counts = partition.label_counts(labels, dataset.num_classes)
        if partition.validation is None:
            partition = hold_out(partition, plan.validation, settings.seed)
        elif plan.validation:
            raise ConfigError("validation", plan.validation, "0: the partition's file says which examples are held out")
        if not plan.own_test:
            return dataset, partition, None
        own = deal_test(counts, first_labels(dataset.test), settings.seed)
    kept = np.sort(np.concatenate(own))
    if not len(kept):
        raise ConfigError("test", "per_client", "shared; no client has a test example of its own")
    dataset = replace(dataset, test=Split(dataset.test.x[kept], dataset.test.y[kept]))
    return dataset, partition, [np.searchsorted(kept, part) for part in own] if plan.own_test else None


def first_labels(split: Split) -> Ints:
    """One label per example; of a sequence, its first."""
    y = split.y.numpy()
    return y if y.ndim == 1 else y[:, 0]


def reload(folder: Path) -> tuple[Experiment, Tensors]:
    """The experiment of a finished run, data and all, and the server's state at its end."""
    config = read_config(folder)
    if config is None:
        raise RunError(f"{folder} is not the folder of a run, with its {records.CONFIG}")
    config.pop("schema_version")
    config |= dict.fromkeys(RUNS)  # those folders may be gone, and are of no use any more
    config["engine"] = {
        "_target_": "bfl_bench.engines.worker.Sequential",
        "name": "sequential",
    }  # Ray may not be installed
    experiment = load(plan(config))[0]
    return experiment, read_state(folder, experiment.worker.task.model.vector.device)


def _read_earlier_runs(plan: Plan, model: FlatModel) -> tuple[Tensors | None, Gaussian | None]:
    """The state to start from and the posterior to measure distances to, out of other runs' folders."""
    start, reference = _read_earlier_run("start_from", plan), None
    if start is not None and ("params" not in start or start["params"].shape != model.vector.shape):
        allowed = f"a run whose network has {len(model.vector)} parameters"
        raise ConfigError("start_from", plan.settings.start_from, allowed)
    state = _read_earlier_run("reference_posterior", plan)
    if state is not None:
        size = model.layout.num_trainable
        if "precision" not in state or len(state["precision"]) != size or plan.method.needs.gaussian_layers:
            allowed = f"a run of fola whose network has {size} trainable parameters, and a method with point models"
            raise ConfigError("reference_posterior", plan.settings.reference_posterior, allowed)
        reference = Gaussian(state["params"][:size], state["precision"])
    return start, reference


def _read_earlier_run(key: str, plan: Plan) -> Tensors | None:
    folder = getattr(plan.settings, key)
    try:
        return None if folder is None else read_state(Path(folder).expanduser(), plan.device)
    except RunError as error:
        raise ConfigError(key, folder, f"the folder of a finished run, with its checkpoint ({error})") from None


def _describe_data(dataset: Dataset, device: torch.device) -> DataInfo:
    """The range of a channel is that of the test inputs, which are as the network gets them."""
    x = dataset.test.x.transpose(0, 1).flatten(1)  # (channels, ...)
    broadcast = (-1, *[1] * (len(dataset.input_shape) - 1))
    low, high = (bound.view(broadcast).to(device) for bound in (x.amin(1), x.amax(1)))
    return DataInfo(dataset.input_shape, low, high)


def _hold_out(dataset: Dataset, num_samples: int, seed: int) -> tuple[Dataset, ServerData | None]:
    """Take random training examples away for the server, as inputs that are not augmented."""
    if num_samples == 0:
        return dataset, None
    train = dataset.train
    if num_samples >= len(train):
        raise ConfigError("dataset.server_samples", num_samples, f"fewer than the {len(train)} training samples")
    order = torch.randperm(len(train), generator=stream(seed, "server_samples"))
    kept = order[num_samples:].sort().values
    held_out, y = train.x[order[:num_samples]], train.y[order[:num_samples]]
    server_data = ServerData(held_out if dataset.normalise is None else dataset.normalise(held_out), y)
    owners = dataset.owners and replace(dataset.owners, train=dataset.owners.train[kept])
    return replace(dataset, train=Split(train.x[kept], train.y[kept]), owners=owners), server_data


def _cohort_size(participation: float, sizes: tuple[int, ...]) -> int:
    """Clients per round: `participation` of all, at least one, at most those that have data."""
    with_data = sum(size > 0 for size in sizes)
    wanted = int(participation) if participation > 1 else max(1, round(participation * len(sizes)))
    return min(wanted, with_data)
