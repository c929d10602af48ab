"""Objects out of config nodes.

A group's node names its callable with `_target_`; the other keys are its arguments, checked against its annotations.
"""

import functools
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

from bfl_bench.build.guarding import check_declarations, guard_rule, is_ours
from bfl_bench.checks import check_arguments
from bfl_bench.data.corruptions import Pixels
from bfl_bench.data.dataset import DatasetConfig
from bfl_bench.engines.worker import TEST, UNSEEN, VALIDATION
from bfl_bench.errors import ConfigError
from bfl_bench.method import Method, Needs
from bfl_bench.models.gaussian import GaussianSettings

FUNCTIONS = {
    "dataset": ("load",),
    "partition": ("split",),
    "engine": ("check", "start"),
    "observer": ("begin", "round", "end"),
}
"""What the objects of a group can do."""


def construct(group: str, config: Mapping[str, Any], supplied: tuple[str, ...] = (), **given: Any) -> Any:
    """The object a group's node and the `given` arguments describe, or a function of the `supplied` ones."""
    target = _target(group, config)
    values = {key: value for key, value in config[group].items() if key != "_target_"}
    if not takes(group, config, "name"):
        values.pop("name", None)
    try:
        arguments = check_arguments(target, values, (*supplied, *given)) | given
        part = functools.partial(target, **arguments) if supplied else target(**arguments)
    except ConfigError as error:
        raise error.below(group) from None
    if lacking := [name for name in FUNCTIONS.get(group, ()) if not callable(getattr(part, name, None))]:
        allowed = f"a class whose objects have the function {lacking[0]}, as every {group} has"
        raise ConfigError(f"{group}._target_", config[group]["_target_"], allowed)
    return part


def construct_method(config: Mapping[str, Any]) -> Method:
    """Construct the method, with the aggregation rule it asks for by a parameter of that name."""
    method = _construct_any_method(config)
    if not isinstance(method, Method):
        raise ConfigError("method._target_", config["method"]["_target_"], "a subclass of bfl_bench.method.Method")
    if misplaced := [field.name for field in fields(Needs) if hasattr(method, field.name)]:
        allowed = f"a class that declares {misplaced[0]} in `needs = Needs({misplaced[0]}=...)`"
        raise ConfigError("method._target_", config["method"]["_target_"], allowed)
    if not is_ours(method):
        check_declarations(method)
    return method


def _construct_any_method(config: Mapping[str, Any]) -> Any:
    rule, method = config["aggregator"].get("name"), config["method"].get("name")
    takes_rule = takes("method", config, "aggregator")
    if takes_rule and rule == "none":
        if _may_be_none(_target("method", config), "aggregator"):
            return construct("method", config, aggregator=None)
        raise ConfigError("aggregator", rule, f"a rule; method {method} needs one")
    if not takes_rule and rule != "none":
        raise ConfigError("aggregator", rule, f"none; method {method} takes no aggregator")
    if not takes_rule:
        return construct("method", config)
    return construct("method", config, aggregator=_construct_rule(config))


def takes(group: str, config: Mapping[str, Any], parameter: str) -> bool:
    """Tell whether what a group's node names has a parameter of this name."""
    target = _target(group, config)
    try:
        return parameter in inspect.signature(target).parameters
    except ValueError:  # some of Python's own have none
        allowed = "a class or function whose parameters have names"
        raise ConfigError(f"{group}._target_", config[group]["_target_"], allowed) from None


def _may_be_none(target: Callable[..., Any], parameter: str) -> bool:
    annotation = get_type_hints(target.__init__ if inspect.isclass(target) else target).get(parameter)
    return type(None) in get_args(annotation)


def construct_alternatives(method: Method, config: Mapping[str, Any]) -> dict[str, Method]:
    rules: dict[str, Any] = config["eval"].get("also_aggregate") or {}
    if rules and "aggregator" not in {field.name for field in fields(method)}:
        allowed = f"an empty list; method {method.name} takes no aggregator"
        raise ConfigError("eval.also_aggregate", list(rules), allowed)
    made: dict[str, Any] = {name: {"aggregator": _construct_rule({"aggregator": node})} for name, node in rules.items()}
    return {name: replace(method, **rule) for name, rule in made.items()} | dict(method.alternatives())


def _construct_rule(config: Mapping[str, Any]) -> Any:
    rule = construct("aggregator", config, supplied=("means", "variances", "weights", "generator"))
    return guard_rule(config["aggregator"].get("name"), rule)


def construct_foreign(config: Mapping[str, Any]) -> dict[str, DatasetConfig]:
    """Construct the datasets of eval.ood, normalised by the training data's constants where both have such."""
    own = config["dataset"]
    made: dict[str, DatasetConfig] = {}
    for name, node in (config["eval"].get("ood") or {}).items():
        if name in (own.get("name"), TEST, VALIDATION, UNSEEN):
            raise ConfigError("eval.ood", name, "another dataset than the run's own")
        values = {key: value for key, value in node.items() if key not in ("server_samples", "label_noise")}
        values |= {key: own[key] for key in ("mean", "std") if key in values and key in own}
        made[name] = construct("dataset", {"dataset": values})
    return made


def find_pixels(dataset: Mapping[str, Any]) -> Pixels | None:
    """Tell how a dataset's images in [0, 1] become network inputs, where its config does."""
    if not isinstance(dataset.get("mean"), list) or not isinstance(dataset.get("std"), list):
        return None
    return Pixels(tuple(dataset["mean"]), tuple(dataset["std"]))


def split_model(node: Mapping[str, Any]) -> tuple[GaussianSettings | None, dict[str, Any]]:
    """The settings of Gaussian layers, which a user's own network need not have, and the network's other keys."""
    names = [field.name for field in fields(GaussianSettings)]
    shared = {key: node[key] for key in names if key in node}
    rest = {key: value for key, value in node.items() if key not in names}
    return (construct_section("model", GaussianSettings, shared) if shared else None), rest


def is_own(path: object, modules: Sequence[str] = ()) -> bool:
    """Tell whether a `_target_` is a class or function of this package, or of these modules.

    What one of them only imports from elsewhere is not its own. Nothing but they is imported to find out.
    """
    if not isinstance(path, str):
        return False
    for module in ("bfl_bench", *modules):
        if path.startswith(f"{module}."):
            try:
                target = pkgutil.resolve_name(path)
            except (ImportError, AttributeError, ValueError):
                return False
            return f"{getattr(target, '__module__', '')}.".startswith(f"{module}.")
    return False


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


def construct_section(key: str, cls: type, values: Mapping[str, Any]) -> Any:
    try:
        return cls(**check_arguments(cls, values))
    except ConfigError as error:
        raise error.below(key) from None
