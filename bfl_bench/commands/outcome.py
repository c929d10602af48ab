"""How a job ended, and what is said of it: errors, also Hydra's, as one sentence and an exit code."""

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bfl_bench.checks import unknown_key
from bfl_bench.errors import BflError, ConfigError
from bfl_bench.records import config_folder

LAUNCHERS = {"joblib": "joblib", "submitit_local": "slurm", "submitit_slurm": "slurm", "ray": "ray"}
"""Hydra's launchers that an extra of this package installs."""

GROUPS = ("method", "aggregator", "dataset", "partition", "model", "engine", "experiment", "scale")


STATUSES = ("done", "skipped", "dry run", "diverged", "failed")  # skipped: it had finished earlier


@dataclass(frozen=True)
class Outcome:
    """How a job ended: one of STATUSES, and a sentence where there is something to say."""

    status: str
    message: str = ""
    exit_code: int = 0
    traceback: str = ""  # of an error that nobody foresaw


def outcome_of(error: BaseException, overrides: Sequence[str] = ()) -> Outcome:
    """An error as one sentence and an exit code; an unforeseen one keeps its traceback."""
    if isinstance(error, BflError):
        return Outcome("failed", str(error), error.exit_code)
    if type(error).__module__.startswith(("hydra.", "omegaconf.")):
        return Outcome("failed", _translate(error, overrides), 2)
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        return Outcome("failed", f"cannot read or write{where}: {error.strerror or error}; earlier files are intact", 1)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    sentence = f"unforeseen {type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}: {error}"
    return Outcome("failed", sentence, 1, "".join(traceback.format_exception(error)))


def _translate(error: BaseException, overrides: Sequence[str]) -> str:
    """Hydra's and OmegaConf's complaints in our form: key, what was given, what is allowed."""
    text = str(error).split("Config search path")[0]
    if match := re.search(r"Could not find '([\w/]+)/([^']*)'\s+Available options in '[^']*':\s*(.*)", text, re.DOTALL):
        group, given, options = match.groups()
        allowed = ", ".join(options.split())
        if group == "hydra/launcher" and given in LAUNCHERS:
            allowed += f"; {given} has to be installed first: pip install -e '.[{LAUNCHERS[given]}]'"
        return str(ConfigError(group, given, allowed))
    if match := re.search(r"Could not override '([^']+)'", text):
        given = next((value for key, _, value in (o.partition("=") for o in overrides) if key == match[1]), "")
        return str(
            ConfigError(match[1], given, unknown_key(match[1].split(".")[-1], _keys_beside(match[1], overrides)))
        )
    if match := re.search(r"Missing mandatory value: (\S+)", text):
        return str(ConfigError(match[1], None, "a value; the key has no default"))
    return " ".join(f"{text} {error.__cause__ or ''}".split())


def _keys_beside(key: str, overrides: Sequence[str]) -> list[str]:
    """The keys that stand where `key` does not, under the groups that the other overrides choose; none if unknown."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    choices = [override for override in overrides if override.partition("=")[0] in GROUPS]
    try:
        if GlobalHydra.instance().is_initialized():
            config = compose("config", choices)
        else:
            with initialize_config_dir(str(config_folder()), version_base="1.3"):
                config = compose("config", choices)
    except Exception:  # a hint must not raise: the choices themselves may be what is wrong
        return []
    node = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else config
    return [str(name) for name in node] if OmegaConf.is_dict(node) else []
