"""A composed config as plain values."""

import functools
import sys
from typing import TYPE_CHECKING, Any

from bfl_bench.errors import ConfigError
from bfl_bench.identity import describe_inputs, modernise

if TYPE_CHECKING:
    from omegaconf import DictConfig


@functools.cache  # a sweep says it once
def tell(sentence: str) -> None:
    print(f"bfl-run: {sentence}", file=sys.stderr)


def resolve(config: "DictConfig") -> dict[str, Any]:
    """Turn a config into plain values, by today's names; `inputs` says what the files and folders in it hold.

    The rules named in eval.also_aggregate are filled in with their own configs.
    """
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    container: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    resolved = modernise(container, tell)
    if "inputs" in resolved:
        raise ConfigError("inputs", resolved["inputs"], "no such key in a config; a run adds it")
    if isinstance(resolved["eval"], dict):
        names = resolved["eval"].get("also_aggregate")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError("eval.also_aggregate", names, "a list of names of aggregators")
        options = GlobalHydra.instance().config_loader().get_group_options("aggregator")
        for name in names:
            if name == "none" or name not in options:
                allowed = ", ".join(option for option in options if option != "none")
                raise ConfigError("eval.also_aggregate", name, allowed)
        rules = {name: compose("config", [f"aggregator={name}"])["aggregator"] for name in names}
        resolved["eval"]["also_aggregate"] = {name: OmegaConf.to_container(rule) for name, rule in rules.items()}
    if inputs := describe_inputs(resolved):
        resolved["inputs"] = inputs
    return resolved
