"""The data and what depends on it: splits, network, task, worker; what only the data can tell is checked here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bfl_bench import records
from bfl_bench.aggregators.algebra import Gaussian
from bfl_bench.build.guarding import check_dataset, check_partition, guard, is_ours
from bfl_bench.build.parts import is_own
from bfl_bench.build.planning import Plan, plan
from bfl_bench.data.corruptions import Pixels
from bfl_bench.data.dataset import Dataset, Split, set_classes_aside
from bfl_bench.data.partition import Natural, Partition, deal_test, hold_out, indices_of
from bfl_bench.data.partition.partition import Ints
from bfl_bench.data.sources import default_data_dir
from bfl_bench.engines.process_setup import set_up_process
from bfl_bench.engines.worker import TEST, UNKNOWN, UNSEEN, VALIDATION, EvaluationSet, Worker
from bfl_bench.errors import ConfigError, PartError, RunError, UnsuitableError
from bfl_bench.evaluation.gaussian_noise import GaussianNoise
from bfl_bench.evaluation.truth import Truth, digest_data, list_truths, read_truth
from bfl_bench.identity import RUNS, fill_in, read_config
from bfl_bench.inference.laplace import check_laplace
from bfl_bench.likelihood import Categorical
from bfl_bench.method import DataInfo, ServerData, Task, Tensors
from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import count_layers, make_gaussian
from bfl_bench.models.lateral import Lateral, load_plain
from bfl_bench.rng import derive_seed, numpy_stream, seeded_globally, stream
from bfl_bench.run.checkpoint import read_state
from bfl_bench.run.loop import Experiment
from bfl_bench.run.unseen import limit_steps


def load(plan: Plan) -> tuple[Experiment, Dataset, Partition]:
    """Load the data, split it, make the network; check what only the data can tell."""
    others = {name: guard(method) for name, method in plan.alternatives.items()}
    plan = replace(plan, method=guard(plan.method), alternatives=others)
    settings = plan.settings
    set_up_process(settings.threads)
    data_dir = Path(settings.data_dir).expanduser() if settings.data_dir else default_data_dir()
    try:
        dataset = plan.dataset.load(data_dir)
    except ConfigError as error:
        raise error.below("dataset") from None
    if not is_ours(plan.dataset):
        check_dataset(plan.dataset.name, dataset)
    _check_labels(plan.dataset.name, dataset)
    dataset, unknown = _set_classes_aside(plan, dataset)
    dataset = _spoil_labels(plan, dataset)
    dataset, server_data = _hold_out(dataset, plan.server_samples, settings.seed)
    if not isinstance(dataset.likelihood, Categorical):
        _refuse_numbers(plan)
    try:
        dataset, partition, own_test = _split(plan, dataset)
    except ConfigError as error:
        top = ("num_clients", "seed") if plan.split_seed == settings.seed else ("num_clients",)
        raise error if error.key in top else error.below("partition") from None
    whole = partition
    partition, own_test, unseen = _set_apart(plan, partition, own_test)
    task = _make_task(plan, dataset, partition, server_data)
    _check_unseen(plan, task, unseen)
    start, reference = _read_earlier_runs(plan, task)
    worker = Worker(
        task=task,
        method=plan.method,
        train=dataset.train,
        sets=_evaluation_sets(plan, dataset, partition, own_test, {client: own for client, (_, own) in unseen.items()})
        | unknown
        | _foreign_sets(plan, dataset, data_dir),
        augment=dataset.augment,
        client_indices=tuple(map(torch.from_numpy, partition.indices)),
        settings=plan.eval,
        seed=settings.seed,
        rounds=settings.rounds,
        reference_posterior=reference,
        truth=_find_truth(plan, dataset, task),
        pixels=_find_images(plan, dataset),
        unseen={client: torch.from_numpy(part) for client, (part, _) in unseen.items()},
    ).to(plan.device)
    experiment = Experiment(
        worker=worker,
        engine=plan.engine,
        seed=settings.seed,
        cohort_size=_cohort_size(settings.participation, partition.sizes),
        in_turn=settings.cohort == "sequential",
        checkpoint_every=plan.checkpoint.every,
        keep_checkpoint=plan.checkpoint.keep,
        partition_info=partition.info,
        alternatives=plan.alternatives,
        start=start,
    )
    return experiment, dataset, whole


def _refuse_numbers(plan: Plan) -> None:
    """Refuse what is about classes where labels are numbers."""
    if plan.method.needs.classes:
        raise ConfigError("dataset", plan.dataset.name, f"a dataset of classes; method {plan.method.name} needs them")
    for key, neutral in (("uncertainty", False), ("ood", {}), ("shift", []), ("nll_epsilon", 0)):
        if (value := getattr(plan.eval, key)) != neutral:
            shown = list(value) if isinstance(value, dict) else value
            told = "[]" if neutral == {} else str(neutral).lower()
            raise ConfigError(f"eval.{key}", shown, f"{told}; the labels of {plan.dataset.name} are numbers")


def _check_labels(name: str, dataset: Dataset) -> None:
    """Refuse examples without a label, and labels that are no class: they would vanish from a partition."""
    for part, split in (("train", dataset.train), ("test", dataset.test)):
        if len(split.x) != len(split.y) or not len(split.y):
            found = f"{len(split.x)} inputs and {len(split.y)} labels"
            raise PartError(f"dataset {name}: {part} has {found}; expected: one label per input, at least one")
        if isinstance(dataset.likelihood, Categorical):
            low, high = split.y.min().item(), split.y.max().item()
            if split.y.dtype != torch.int64 or low < 0 or high >= dataset.num_classes:
                found = f"{split.y.dtype} from {low} to {high}"
                expected = f"{torch.int64} from 0 to {dataset.num_classes - 1}"
                raise PartError(f"dataset {name}: the labels of {part} are {found}; expected: {expected}")
        elif split.y.dim() != 1 or not split.y.is_floating_point() or not split.y.isfinite().all():
            found = f"{split.y.dtype} of shape {tuple(split.y.shape)}"
            raise PartError(
                f"dataset {name}: the labels of {part} are {found}; expected: finite numbers, one per input"
            )


def _set_classes_aside(plan: Plan, dataset: Dataset) -> tuple[Dataset, dict[str, EvaluationSet]]:
    """Keep the classes of partition.unknown_classes from everybody; their test examples are a foreign set."""
    classes, key = plan.unknown_classes, "partition.unknown_classes"
    if not classes:
        return dataset, {}
    if not isinstance(dataset.likelihood, Categorical) or dataset.test.y.dim() > 1:
        raise ConfigError(key, classes, f"[]; an example of dataset {plan.dataset.name} has no one class")
    most = dataset.num_classes - 2
    if len(set(classes)) != len(classes) or max(classes) >= dataset.num_classes or len(classes) > most:
        allowed = f"at most {most} different classes from 0 to {dataset.num_classes - 1}"
        raise ConfigError(key, classes, allowed)
    dataset, unknown = set_classes_aside(dataset, classes)
    return dataset, {} if plan.eval.scored == VALIDATION else {UNKNOWN: EvaluationSet(unknown, foreign=True)}


def _spoil_labels(plan: Plan, dataset: Dataset) -> Dataset:
    """Make a share of the training labels wrong, those of server and validation examples among them."""
    if not plan.label_noise.rate:
        return dataset
    if not isinstance(dataset.likelihood, Categorical):
        allowed = f"0; the labels of dataset {plan.dataset.name} are no classes"
        raise ConfigError("dataset.label_noise.rate", plan.label_noise.rate, allowed)
    rng = stream(plan.settings.seed, "label_noise")
    y = plan.label_noise.apply(dataset.train.y, dataset.num_classes, rng)
    return replace(dataset, train=replace(dataset.train, y=y))


def _make_task(plan: Plan, dataset: Dataset, partition: Partition, server_data: ServerData | None) -> Task:
    """Make the network and all that clients and server share; let the method and the engine refuse it."""
    try:
        model = FlatModel(_make_module(plan, dataset), plan.device)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            "model", plan.model_name, f"one whose parameters are there from the start ({reason})"
        ) from None
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
    if plan.eval.personalise:
        state = plan.method.init(task, stream(plan.settings.seed, "init"))
        if not isinstance(dataset.likelihood, Categorical):
            raise ConfigError("eval.personalise", plan.eval.personalise, "[] for labels that are no classes")
        if plan.method.gaussian(task, state) is None:
            allowed = f"[]; method {plan.method.name} has private networks or a full covariance"
            raise ConfigError("eval.personalise", plan.eval.personalise, allowed)
    plan.engine.check(task)
    _try_out(plan, task, dataset)
    linearised = "linearised" in (plan.eval.predictive, *plan.eval.also_predict)
    for method in (plan.method, *plan.alternatives.values()):
        try:
            method.check(task)
            if linearised or plan.eval.laplace_layers == "last":
                check_laplace(task)
        except UnsuitableError as error:
            name = {"model": plan.model_name, "dataset": plan.dataset.name}[error.key]
            raise ConfigError(error.key, name, f"{error.needed} for method {method.name}") from None
    return task


def _try_out(plan: Plan, task: Task, dataset: Dataset) -> None:
    """Refuse a network that cannot take the data, or does not give what the likelihood asks for."""
    model, test = task.model, dataset.test
    x, y = test.x[:2].to(plan.device), test.y[:2]
    batch_size = task.local.batch_size
    left_alone = next((client for client, size in enumerate(task.sizes) if size % batch_size == 1 or size == 1), None)
    with torch.no_grad(), seeded_globally(0, plan.device):
        try:
            outputs = model.module.eval()(x)
            trained = _train_once(model.module, x)
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            allowed = f"one for inputs of shape {dataset.input_shape} and type {x.dtype} ({reason})"
            raise ConfigError("model", plan.model_name, allowed) from None
        expected = (len(y), dataset.likelihood.num_outputs + plan.method.needs.extra_outputs, *y.shape[1:])
        for when, made in (("", outputs), (" in training", trained)):
            found = tuple(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
            if found != expected:
                allowed = f"one that makes {expected} of inputs of shape {tuple(x.shape)} (it makes {found}{when})"
                raise ConfigError("model", plan.model_name, allowed)
            if isinstance(made, torch.Tensor) and (problem := _find_problem(made)):
                raise ConfigError("model", plan.model_name, f"one that makes finite numbers (it makes {problem}{when})")
        if isinstance(trained, torch.Tensor) and not trained.requires_grad:
            raise ConfigError("model", plan.model_name, "one that can be trained (its outputs have no gradient)")
        if left_alone is not None:
            try:
                model.module.train()(x[:1])
            except ValueError as error:  # of BatchNorm
                why = f"client {left_alone} has {task.sizes[left_alone]} examples: {error}"
                allowed = f"one that leaves no client a minibatch of one example for model {plan.model_name} ({why})"
                raise ConfigError("local.batch_size", batch_size, allowed) from None
    model.load(model.initial)


@torch.enable_grad()
def _train_once(module: nn.Module, x: torch.Tensor) -> Any:
    """Return what the network makes of inputs in training."""
    return module.train()(x)


def _find_problem(outputs: torch.Tensor) -> str:
    if not outputs.is_floating_point():
        return str(outputs.dtype)
    return "" if bool(torch.isfinite(outputs).all()) else "NaN or infinite ones"


def _make_module(plan: Plan, dataset: Dataset, *names: int) -> nn.Module:
    """Make the network, with the Gaussian layers that the method and `model.bayesian_layers` ask for."""
    layers, needs = plan.gaussian.bayesian_layers if plan.gaussian else 0, plan.method.needs
    with seeded_globally(derive_seed(plan.settings.seed, "model", *names), plan.device):
        try:
            num_outputs = dataset.likelihood.num_outputs + needs.extra_outputs
            module = plan.make_model(dataset.input_shape, num_outputs)
            private = plan.make_model(dataset.input_shape, num_outputs) if needs.lateral else None
            if not isinstance(module, nn.Module):
                raise ConfigError("_target_", type(module).__name__, "what makes a torch.nn.Module")
        except (MemoryError, RuntimeError) as error:  # torch raises the latter where memory does not suffice
            raise ConfigError("model", plan.model_name, f"a network that can be made ({error})") from None
        except ConfigError as error:
            raise error.below("model") from None
        except UnsuitableError as error:
            raise ConfigError("model", plan.model_name, error.needed) from None
        if plan.gaussian is None or layers == 0 or not needs.gaussian_layers:
            return module
        available = count_layers(module)
        if isinstance(layers, int) and layers > available:
            raise ConfigError("model.bayesian_layers", layers, f"at most the {available} layers of the network")
        num_layers = None if layers == "auto" else available if layers in ("all", "auto_all") else layers
        assert not isinstance(num_layers, str)
        module = make_gaussian(module, num_layers, plan.gaussian)
        if private is None:
            return module
        try:
            return Lateral(module, make_gaussian(private, num_layers, plan.gaussian), needs.gate_per_unit)
        except UnsuitableError as error:
            raise ConfigError("model", plan.model_name, error.needed) from None


def _evaluation_sets(
    plan: Plan, dataset: Dataset, partition: Partition, own_test: list[Ints] | None, unseen: Mapping[int, Ints]
) -> dict[str, EvaluationSet]:
    """Make the test set and, where examples are held out, the validation set, or that one in the place of the other.

    The test examples of unseen clients are a set of their own.
    """
    own = None if own_test is None else tuple(map(torch.from_numpy, own_test))
    sets = {TEST: EvaluationSet(dataset.test, own)}
    if unseen and own_test is not None:
        sets[TEST] = _take_own(dataset.test, own_test)
        sets[UNSEEN] = _take_own(dataset.test, [unseen.get(i, np.zeros(0, np.int64)) for i in range(len(own_test))])
    if partition.validation is not None:
        indices = torch.from_numpy(np.concatenate(partition.validation))
        x = dataset.train.x[indices]
        ends = np.cumsum([len(part) for part in partition.validation])
        whose = tuple(torch.arange(end - len(part), end) for end, part in zip(ends, partition.validation, strict=True))
        split = Split(x if dataset.normalise is None else dataset.normalise(x), dataset.train.y[indices])
        sets[VALIDATION] = EvaluationSet(split, whose)
    if plan.eval.scored == VALIDATION:
        if VALIDATION not in sets or not len(sets[VALIDATION].split):
            raise ConfigError("eval.scored", VALIDATION, "test; no example is held out, see partition.validation")
        return {TEST: EvaluationSet(sets[VALIDATION].split, own and sets[VALIDATION].own)}
    return sets


def _take_own(test: Split, own: Sequence[Ints]) -> EvaluationSet:
    """Make a set of the examples that somebody owns."""
    kept = np.sort(np.concatenate(own))
    whose = tuple(torch.from_numpy(np.searchsorted(kept, part)) for part in own)
    return EvaluationSet(Split(test.x[kept], test.y[kept]), whose)


def _set_apart(
    plan: Plan, partition: Partition, own_test: list[Ints] | None
) -> tuple[Partition, list[Ints] | None, dict[int, tuple[Ints, Ints]]]:
    """Draw the clients that never train; return what is left, and their training and test examples.

    They are still counted as clients, but have no examples: no training, no validation and no test examples.
    """
    if not plan.unseen or own_test is None:
        return partition, own_test, {}
    eligible = [client for client, size in enumerate(partition.sizes) if size and len(own_test[client])]
    num = max(1, round(plan.unseen * len(partition.sizes)))
    if num >= len(eligible):
        allowed = f"a share that leaves some of the {len(eligible)} clients with training and test examples"
        raise ConfigError("partition.unseen", plan.unseen, allowed)
    drawn = numpy_stream(plan.split_seed, "partition", "unseen").permutation(len(eligible))[:num]
    unseen = {client: (partition.indices[client], own_test[client]) for client in sorted(eligible[i] for i in drawn)}

    def leave_out(parts: Sequence[Ints]) -> tuple[Ints, ...]:
        return tuple(part[:0] if client in unseen else part for client, part in enumerate(parts))

    validation = None if partition.validation is None else leave_out(partition.validation)
    left = replace(partition, indices=leave_out(partition.indices), validation=validation)
    return left, list(leave_out(own_test)), unseen


def _check_unseen(plan: Plan, task: Task, unseen: Mapping[int, tuple[Ints, Ints]]) -> None:
    """Refuse numbers of local steps that the method cannot take."""
    if unseen and not isinstance(task.likelihood, Categorical):
        raise ConfigError("partition.unseen", plan.unseen, "0 for labels that are no classes")
    for client, (part, _) in unseen.items():
        for num_steps in filter(None, plan.eval.unseen_steps):
            try:
                plan.method.check(limit_steps(task, client, len(part), num_steps))
            except ConfigError as error:
                allowed = f"numbers of steps that method {plan.method.name} can take ({error})"
                raise ConfigError("eval.unseen_steps", num_steps, allowed) from None


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


def _find_images(plan: Plan, dataset: Dataset) -> Pixels | None:
    """Tell how to corrupt the test images, where eval.shift asks for it."""
    if not plan.eval.shift:
        return None
    if plan.pixels is None or len(dataset.input_shape) != 3:
        raise ConfigError("eval.shift", plan.eval.shift, f"[]; dataset {plan.dataset.name} has no images of pixels")
    return plan.pixels


def _split(plan: Plan, dataset: Dataset) -> tuple[Dataset, Partition, list[Ints] | None]:
    """Who holds which training examples and, where clients have their own, which test examples.

    Test examples that are nobody's are left out then: the test set is all clients' examples together.
    """
    settings, groups = plan.settings, dataset.group()
    labels = groups.train.numpy()
    if isinstance(plan.partition, Natural) and dataset.owners is not None:
        chosen = plan.partition.choose(len(dataset.owners.names), settings.num_clients, plan.split_seed)
        partition = Partition.of(labels, indices_of(dataset.owners.train.numpy(), chosen))
        partition = hold_out(partition, plan.validation, plan.split_seed)
        own = indices_of(dataset.owners.test.numpy(), chosen)
    else:
        assert settings.num_clients is not None or isinstance(plan.partition, Natural)
        partition = plan.partition.split(labels, groups.num, settings.num_clients or 1, plan.split_seed)
        if not is_ours(plan.partition):
            check_partition(plan.partition.name, partition, len(labels), settings.num_clients or 1)
        counts = partition.label_counts(labels, groups.num)
        if partition.validation is None:
            partition = hold_out(partition, plan.validation, plan.split_seed)
        elif plan.validation:
            raise ConfigError("validation", plan.validation, "0: the partition's file says which examples are held out")
        if not plan.own_test:
            return dataset, partition, None
        own = deal_test(counts, groups.test.numpy(), plan.split_seed)
    kept = np.sort(np.concatenate(own))
    if not len(kept):
        raise ConfigError("test", "per_client", "shared; no client has a test example of its own")
    strata = dataset.strata and replace(dataset.strata, test=dataset.strata.test[kept])
    dataset = replace(dataset, test=Split(dataset.test.x[kept], dataset.test.y[kept]), strata=strata)
    return dataset, partition, [np.searchsorted(kept, part) for part in own] if plan.own_test else None


def reload(folder: Path, modules: Sequence[str] = ()) -> tuple[Experiment, Tensors]:
    """Load the experiment of a finished run, data and all, and the server's state at its end.

    A run folder is data that somebody else may have written: only parts of this package are made from it, and of the
    modules that are named.
    """
    experiment = load(plan_again(folder, modules))[0]
    return experiment, read_state(folder, experiment.worker.task.model.vector.device)


def plan_again(folder: Path, modules: Sequence[str] = ()) -> Plan:
    """Check the config of a run's folder again, and take parts of this package and of these modules from it alone."""
    config = read_config(folder)
    if config is None:
        raise RunError(f"{folder} is not the folder of a run, with its {records.CONFIG}")
    if foreign := [target for target in _targets(config) if not is_own(target, modules)]:
        named = f"{folder} names {foreign[0]!r}, which is no part of bfl-bench"
        raise RunError(f"{named}: code is not run from run folders")
    config = fill_in(config)
    config.pop("schema_version", None)
    config |= dict.fromkeys(RUNS)  # those folders may be gone, and are of no use any more
    config["observer"] = {"name": "none"}
    # Ray may not be installed.
    config["engine"] = {"_target_": "bfl_bench.engines.worker.Sequential", "name": "sequential"}
    return plan(config)


def make_plain(plan: Plan, experiment: Experiment, vector: torch.Tensor) -> nn.Module:
    """Make the network without Gaussian layers and private parts, with the parameters of a flat vector (P,).

    Its tensors are its own, in PyTorch's shapes and order in memory; those of Gaussian weights are the means.
    """
    task = experiment.worker.task
    num_outputs = task.likelihood.num_outputs + plan.method.needs.extra_outputs
    with seeded_globally(0, plan.device):
        module: nn.Module = plan.make_model(task.data.input_shape, num_outputs).to(plan.device, torch.float32)
    load_plain(module, task.model.layout.to_state_dict(vector))
    return module.eval()


def _targets(node: Any) -> Iterator[Any]:
    """Yield every `_target_` of a config, at any depth."""
    if isinstance(node, dict):
        yield from (node["_target_"],) if "_target_" in node else ()
    for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _targets(item)


def _read_earlier_runs(plan: Plan, task: Task) -> tuple[Tensors | None, Gaussian | None]:
    """The state to start from and the posterior to measure distances to, out of other runs' folders."""
    model = task.model
    start, reference = _read_earlier_run("start_from", plan), None
    if start is not None and ("params" not in start or start["params"].shape != model.vector.shape):
        allowed = f"a run whose network has {len(model.vector)} parameters"
        raise ConfigError("start_from", plan.settings.start_from, allowed)
    own = {} if start is None else plan.method.init(task, stream(plan.settings.seed, "init"))
    for name, value in own.items():
        if start and name in start and start[name].shape != value.shape:
            shapes = f"shape {tuple(value.shape)}, as this method has it (there: {tuple(start[name].shape)})"
            raise ConfigError("start_from", plan.settings.start_from, f"a run whose {name} has {shapes}")
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


def _find_truth(plan: Plan, dataset: Dataset, task: Task) -> Truth | None:
    """Read the true posterior of eval.truth; the problem has to be the one that it is of."""
    name = plan.eval.truth
    if name is None:
        return None
    if name not in list_truths():
        raise ConfigError("eval.truth", name, f"null, {', '.join(list_truths())}")
    truth = read_truth(name)
    shapes = [list(entry.shape) for entry in task.model.layout.entries if entry.stop <= task.model.layout.means.stop]
    noise = dataset.likelihood.variance if isinstance(dataset.likelihood, GaussianNoise) else None
    same = {
        "noise": noise == truth.about["noise"],
        "network": shapes == truth.about["shapes"],
        "examples": plan.validation == plan.server_samples == 0
        and plan.eval.scored == TEST
        and digest_data(dataset.train.x, dataset.train.y, dataset.test.x, dataset.test.y) == truth.about["data"],
    }
    if other := [what for what, is_same in same.items() if not is_same]:
        raise ConfigError("eval.truth", name, f"null, or the {other[0]} of experiment=truth_{name}, all of them")
    return truth


def _describe_data(dataset: Dataset, device: torch.device) -> DataInfo:
    """Take the range of each channel from the training inputs, as the network gets them but not augmented."""
    lows: list[torch.Tensor] = []
    highs: list[torch.Tensor] = []
    for part in torch.split(dataset.train.x, 5000):
        x = part if dataset.normalise is None else dataset.normalise(part)
        others = [axis for axis in range(x.dim()) if axis != 1]
        lows.append(x.amin(others))
        highs.append(x.amax(others))
    broadcast = (-1, *[1] * (len(dataset.input_shape) - 1))
    low, high = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
    return DataInfo(dataset.input_shape, low.view(broadcast).to(device), high.view(broadcast).to(device))


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
    strata = dataset.strata and replace(dataset.strata, train=dataset.strata.train[kept])
    return replace(dataset, train=Split(train.x[kept], train.y[kept]), owners=owners, strata=strata), server_data


def _cohort_size(participation: float, sizes: tuple[int, ...]) -> int:
    """Clients per round: `participation` of all, at least one, at most those that have data."""
    with_data = sum(size > 0 for size in sizes)
    wanted = int(participation) if participation > 1 else max(1, round(participation * len(sizes)))
    return min(wanted, with_data)
