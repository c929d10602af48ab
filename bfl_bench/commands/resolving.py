"""A composed config as plain values."""

import functools
import sys
from typing import TYPE_CHECKING, Any

from bfl_bench.errors import ConfigError
from bfl_bench.identity import describe_inputs, modernise

if TYPE_CHECKING:
    from omegaconf import DictConfig


FILLED_IN = {"also_aggregate": "aggregator", "ood": "dataset"}
"""Keys of `eval` that list options of a group."""


@functools.cache  # a sweep says it once
def tell(sentence: str) -> None:
    print(f"bfl-run: {sentence}", file=sys.stderr)


def resolve(config: "DictConfig") -> dict[str, Any]:
    """Turn a config into plain values, by today's names; `inputs` says what the files and folders in it hold.

    The rules named in eval.also_aggregate and the datasets in eval.ood are filled in with their own configs.
    """
    from omegaconf import OmegaConf

    container: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    resolved = modernise(container, tell)
    if "inputs" in resolved:
        raise ConfigError("inputs", resolved["inputs"], "no such key in a config; a run adds it")
    if isinstance(resolved["eval"], dict):
        for key, group in FILLED_IN.items():
            resolved["eval"][key] = _fill_in(f"eval.{key}", resolved["eval"].get(key), group)
    if inputs := describe_inputs(resolved):
        resolved["inputs"] = inputs
    return resolved


def _fill_in(key: str, names: Any, group: str) -> dict[str, Any]:
    """Look up the configs of options of a group that a list names."""
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    options = [name for name in GlobalHydra.instance().config_loader().get_group_options(group) if name != "none"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(key, names, f"a list of names of {group}s")
    for name in names:
        if name not in options:
            raise ConfigError(key, name, ", ".join(options))
    return {name: OmegaConf.to_container(compose("config", [f"{group}={name}"])[group]) for name in names}
