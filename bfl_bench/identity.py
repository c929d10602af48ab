"""What a run is: the part of its config that decides the results, and the name made of it. Knows no torch.

Names last. Of a part of our own only the class or function counts, not the module that it lies in. A key of `ADDED`
counts only where its value differs from the one that means "as before the key existed". A file that a run reads counts
by its content, and the folder of an earlier run by what that run is, not by their paths. Keys and values of `RENAMED`
are understood under their old names as well.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bfl_bench import reading, records
from bfl_bench.errors import DamagedError, RunError

# Keys that cannot change a result; `inputs` counts in the place of the paths that it describes, and of engines only
# `INEXACT_ENGINES` do.
WITHOUT_EFFECT = frozenset(
    "out data_dir engine observer force checkpoint dry_run hydra scale schema_version inputs".split()
)

INEXACT_ENGINES = frozenset({"Stacked"})
"""Classes of engines whose results differ from those of the others, by rounding."""

ADDED: dict[str, Any] = {
    "start_from": None,
    "reference_posterior": None,
    "local.optimizer": "sgd",
    "local.betas": [0.9, 0.999],
    "local.schedule": "constant",
    "server.rule": "sgd",
    "server.momentum": 0,
    "server.beta2": 0.99,
    "server.tau": 0.001,
    "server.bias_correction": False,
    "partition.validation": 0,
    "eval.uncertainty": False,
    "eval.ood": {},
    "eval.scored": "test",
    "eval.posterior": False,
    "eval.predictive": "auto",
    "eval.also_predict": [],
    "eval.prior_precision": "auto",
    "eval.laplace_layers": "all",
    "eval.truth": None,
    "eval.shift": [],
    "eval.severities": [1, 2, 3, 4, 5],
    "eval.local_share": 1.0,
    "mlp.dropout": 0.0,
    "lenet.dropout": 0.0,
    "cnn.dropout": 0.0,
    "partition.seed": None,
    "partition.unknown_classes": [],
    "Dense.student": "broadcast",
    "Dense.flip": False,
    "Fola.batch_weight": "share",
    "Fola.server_mean": "product",
    "FedCurv.penalty_gradient": True,
    "Virtual.natural_lr": None,
    "Virtual.own_model": "trained",
    "Fvb.examples": "own",
    "Fvb.variance_rate": None,
    "Fvb.warm_up": 0,
    "Virtual.variance_rate": None,
    "Virtual.sites_start": "network",
    "Virtual.loss_power": 0.0,
    "Virtual.alpha": 1.0,
    "Virtual.train_samples": 1,
    "model.noise": 1.0,
    "cohort": "random",
    "partition.unseen": 0,
    "eval.unseen_steps": [0, 1, 10, 100],
    "eval.personalise": [],
    "eval.personalise_rule": "wb",
    "dataset.label_noise": {"rate": 0.0, "kind": "uniform"},
    "checkpoint.keep": True,
}
"""Keys that some configs lack, with the value that means the same as their absence.

A key of a part is named by the part's class or function (`Fola.structure`), any other by its place in the config. An
entry stays for good: without it, every run has another name.
"""

_Added = dict[str, dict[str, Any]]

RENAMED = {
    "given.start": "start_from",
    "given.posterior": "reference_posterior",
    "data_dir=made-up": f"data_dir={records.STAND_IN}",
}
"""Keys, and what they are called now; with `=`, values of a key."""

RUNS = ("start_from", "reference_posterior")
"""Keys whose values are folders of earlier runs."""

PARTS = ("dataset", "partition", "method", "aggregator")

STAND_IN_PREFIX = f"{records.STAND_IN}-"
WITHOUT_FILES = frozenset({"Digits", "Synthetic", "Embedded"})
"""Classes of datasets that read no files, so that nothing stands in for their data."""


def _keep_silent(sentence: str) -> None:
    pass


def modernise(config: Mapping[str, Any], tell: Callable[[str], None] = _keep_silent) -> dict[str, Any]:
    """Rename what has another name today; `tell` gets a sentence on each. A value under today's name wins."""
    current: dict[str, Any] = _copy(dict(config))
    for old, new in RENAMED.items():
        if not _finds_old(current, old):
            continue
        (key, _, value), (new_key, _, new_value) = old.partition("="), new.partition("=")
        section, last = _find_section(current, key)
        tell(_describe_renaming(old, new))
        if value:
            section[last] = new_value
            continue
        found = section.pop(last)
        if not section:  # its last key
            above, name = _find_section(current, key.rpartition(".")[0])
            del above[name]
        section, last = _find_section(current, new_key)
        if section.get(last) is None:
            section[last] = found
    return current


def _finds_old(config: Mapping[str, Any], old: str) -> bool:
    """Tell whether a config has a key, or a key with a value, that stands in `RENAMED`."""
    key, equals, value = old.partition("=")
    section, last = _find_section(config, key)
    return last in section and (not equals or section[last] == value)


def _is_old(config: Mapping[str, Any]) -> bool:
    return any(_finds_old(config, old) for old in RENAMED)


def _copy(value: Any) -> Any:
    """Copy mappings and lists within one another, as `copy.deepcopy` does, in a tenth of its time."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _find_section(config: Mapping[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Find where a dotted key stands, an empty section if nowhere, and its last part."""
    *names, last = key.split(".")
    section: Any = config
    for name in names:
        section = section.get(name) if isinstance(section, dict) else None
    return (section if isinstance(section, dict) else {}), last


def modernise_override(override: str, tell: Callable[[str], None] = _keep_silent) -> str:
    """Rename likewise in `key=value`, as it stands on the command line."""
    signs = override[: len(override) - len(override.lstrip("+~"))]
    assignment = override.removeprefix(signs)
    key, equals, value = assignment.partition("=")
    for old in (key, assignment):
        if old in RENAMED:
            tell(_describe_renaming(old, RENAMED[old]))
            return f"{signs}{RENAMED[old]}" + (equals + value if old == key else "")
    return override


def _describe_renaming(old: str, new: str) -> str:
    return f"{old} is called {new} now; the old name works for one more release"


def meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what decides the results, of a config or a part of one; 1 and 1.0 become the same.

    Where the data lie does not matter, unless they are stand-ins. `inputs` replaces paths. Without it, as in configs of
    older versions, the last part of the folder of an earlier run counts, which is that run's name.
    """
    if _is_old(config):
        config = modernise(config)
    kept: dict[str, Any] = _normalise({key: value for key, value in config.items() if key not in WITHOUT_EFFECT})
    if config.get("data_dir") == records.STAND_IN:
        kept["data_dir"] = records.STAND_IN
    engine = config.get("engine")
    if isinstance(engine, dict) and _shorten(engine.get("_target_")) in INEXACT_ENGINES:
        kept["engine"] = _normalise(engine)
    for key in RUNS:
        if isinstance(kept.get(key), str):
            kept[key] = Path(kept[key]).name or kept[key]
    for key, digest in (config.get("inputs") or {}).items():
        section, last = _find_section(kept, key)
        section[last] = digest
    for key in RUNS:
        if isinstance(kept.get(key), str):
            kept[key] = kept[key].removeprefix(STAND_IN_PREFIX)  # which names did not always have
    return kept


def _normalise(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shorten(item) if key == "_target_" else _normalise(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_normalise(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value


def _shorten(target: Any) -> Any:
    """Keep the class or function alone where it is our own; one of a user's counts with its module."""
    return target.rpartition(".")[2] if isinstance(target, str) and target.startswith("bfl_bench.") else target


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce a resolved or stored config to what the run is: configs with the same identity are the same run."""
    return _leave_out(meaning(config), _sort_added())


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Do the same, but with every added key, for a reader: equal identities are equal here, too."""
    return fill_in(meaning(config))


def _leave_out(node: dict[str, Any], added: _Added, place: str = "") -> dict[str, Any]:
    neutral = _added_to(node, added, place)
    return {
        key: _leave_out(value, added, f"{place}{key}.") if isinstance(value, dict) else value
        for key, value in node.items()
        if key not in neutral or value != neutral[key]
    }


def fill_in(node: dict[str, Any]) -> dict[str, Any]:
    """Give a config the added keys that it lacks, with the values that it means."""
    return _fill_in(node, _sort_added())


def _fill_in(node: dict[str, Any], added: _Added, place: str = "") -> dict[str, Any]:
    absent = {key: neutral for key, neutral in _added_to(node, added, place).items() if key not in node}
    return {
        key: _fill_in(value, added, f"{place}{key}.")
        if isinstance(value, dict)
        else (value.copy() if isinstance(value, list) else value)
        for key, value in (node | absent).items()
    }


@functools.cache
def _sort_added() -> _Added:
    """Sort the entries of `ADDED` by the section or the part that they belong into."""
    found: _Added = {}
    for key, neutral in ADDED.items():
        section, _, last = key.rpartition(".")
        found.setdefault(section, {})[last] = _normalise(neutral)
    return found


def _added_to(node: Mapping[str, Any], added: _Added, place: str) -> dict[str, Any]:
    """Find the entries of `ADDED` that belong into a section of a config."""
    target = _shorten(node.get("_target_"))
    by_part = added.get(target, {}) if isinstance(target, str) and target else {}
    return by_part | added.get(place.removesuffix("."), {})


def folder_name(config: Mapping[str, Any]) -> str:
    """Name a run by dataset, partition, method, aggregator, seed, and a short hash of all that decides the results.

    The name of a run on random stand-in data says so first.
    """
    config = identity(config)
    text = json.dumps(config, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    partition = config["partition"]["name"]
    if "alpha" in config["partition"]:
        partition += f"-{config['partition']['alpha']}"
    prefix = STAND_IN_PREFIX if is_stand_in(config.get("data_dir"), config["dataset"].get("_target_")) else ""
    parts = [prefix + config["dataset"]["name"], partition, config["method"]["name"]]
    if config["aggregator"]["name"] != "none":
        parts.append(config["aggregator"]["name"])
    return "_".join([*parts, f"seed{config['seed']}", digest])


def is_stand_in(data_dir: object, dataset: object) -> bool:
    """Whether a run with this `data_dir` and this `dataset._target_` works on random data in the place of real ones."""
    return data_dir == records.STAND_IN and _shorten(dataset) not in WITHOUT_FILES


def describe_inputs(config: Mapping[str, Any]) -> dict[str, str]:
    """Describe the files and folders that a config names, by key: a file by its sha256, an earlier run by its name.

    What cannot be read has no entry; `build` says what is wrong with it.
    """
    path = _find_section(dict(config), "partition.path")[0].get("path")
    found = {"partition.path": digest_file(path)} | {key: _name_run(config.get(key)) for key in RUNS}
    return {key: digest for key, digest in found.items() if digest is not None}


def digest_file(path: object) -> str | None:
    """Compute the sha256 of a file's content; None where it cannot be read."""
    if not isinstance(path, str | Path):
        return None
    try:
        return hashlib.sha256(reading.read_bytes(Path(path).expanduser())).hexdigest()  # waits for no pipe
    except (OSError, DamagedError):
        return None


def _name_run(folder: object) -> str | None:
    config = read_config(Path(folder).expanduser()) if isinstance(folder, str) else None
    return None if config is None else folder_name(config)


def read_config(folder: records.Place) -> dict[str, Any] | None:
    """Read the config in a run's folder, by today's names; None where there is none, or that of something else.

    It is not to be changed: other runs' configs may share what is in it.
    """
    try:
        return load_config(folder)
    except (FileNotFoundError, DamagedError):
        return None


def load_config(folder: records.Place) -> dict[str, Any] | None:
    """Do the same, but raise a `DamagedError` on a damaged file, and `FileNotFoundError` where there is none."""
    content = reading.read_yaml(folder / records.CONFIG)
    if not isinstance(content, dict) or not {"seed", "rounds"} <= set(content):
        return None
    named = all(isinstance(content.get(part), dict) and "name" in content[part] for part in PARTS)
    if not named:
        return None
    return modernise(content) if _is_old(content) else content


def finished_summary(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the summary of a run that is over; None where there is none, or only a part of one."""
    if not (folder / records.CONFIG).exists():
        return None
    try:
        stored = load_config(folder)
        if stored is None or identity(stored) != identity(config):
            raise RunError(
                f"{folder} belongs to another config (see its {records.CONFIG}); use another `out`, or force=true"
            )
        summary = records.read_json(folder / records.SUMMARY)
    except DamagedError as error:
        raise RunError(f"{error}; use another `out`, or force=true") from None
    return summary if summary and summary["status"] in ("done", "diverged") else None
