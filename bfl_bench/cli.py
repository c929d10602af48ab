"""bfl-run: compose a config with Hydra, check it, run it, say how it ended.

A job never raises what a user can act on: it returns an `Outcome`, so that one bad point of a sweep cannot end the
sweep, in this process or in another. `main` turns outcomes, and Hydra's own complaints, into sentences and exit codes:
0 done, 1 failed or diverged, 2 wrong config, 130 interrupted.
"""

import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bfl_bench.checks import unknown_key
from bfl_bench.errors import BflError, ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from bfl_bench.build import Plan

_PACKAGE = Path(__file__).parent
GROUPS = ("method", "aggregator", "dataset", "partition", "model", "engine", "experiment")


def config_folder() -> Path:
    """conf/ lies inside the package in a wheel, and beside it in a checkout."""
    return next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())


STATUSES = ("done", "skipped", "dry run", "diverged", "failed")  # skipped: it had finished earlier


@dataclass(frozen=True)
class Outcome:
    """How a job ended: one of STATUSES, and a sentence where there is something to say."""

    status: str
    message: str = ""
    exit_code: int = 0


class SweepError(BflError):
    """Some points of a sweep did not finish; they have been listed already."""


def main() -> None:
    if "--version" in sys.argv[1:]:
        from bfl_bench import __version__

        print(f"bfl-bench {__version__}")
        return
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(help_text())
        return
    sys.exit(_run_hydra())


def _run_hydra() -> int:
    import hydra

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors to us instead of printing them
    sys.path.append(str(Path.cwd()))  # so that `_target_` finds a user's own module in the working directory
    signal.signal(signal.SIGTERM, _interrupt)
    outcomes: list[Outcome] = []

    def job(config: "DictConfig") -> Outcome:
        outcome = run_job(config)
        outcomes.append(outcome)
        return outcome

    try:
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(job)()
        sweep = any(argument in ("-m", "--multirun") for argument in sys.argv[1:])
        last = Outcome("done") if sweep or not outcomes else outcomes[-1]
    except KeyboardInterrupt:
        print("\nbfl-run: interrupted; the same command continues", file=sys.stderr)
        return 130
    except SweepError as error:
        return error.exit_code
    except Exception as error:
        last = outcome_of(error, sys.argv[1:])
    if last.exit_code:
        print(f"bfl-run: {last.message}", file=sys.stderr)
    return last.exit_code


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def run_job(config: "DictConfig") -> Outcome:
    """One run: a point of a sweep, or the only one."""
    try:
        return _run(config)
    except (BflError, OSError) as error:
        return outcome_of(error)


def _run(config: "DictConfig") -> Outcome:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from bfl_bench import build, records, show
    from bfl_bench.run import run

    resolved = resolve(config)
    sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    plan = build.plan(resolved)
    folder = Path(plan.settings.out) / records.folder_name(resolved)
    if not plan.settings.force and not plan.settings.dry_run:
        summary = records.finished_summary(folder, resolved)
        if summary is not None:
            show.print_summary(summary, folder, brief=sweep, note="finished earlier; force=true runs it again")
            return _outcome_of_summary(summary, skipped=True)
    experiment, dataset, partition = build.load(plan)
    if plan.settings.dry_run:
        print(OmegaConf.to_yaml(config, resolve=True) + f"\nfolder: {folder}\nSGD steps: {experiment.count_steps():,}")
        return Outcome("dry run")
    with records.locked(folder):
        summary = None if plan.settings.force else records.finished_summary(folder, resolved)
        if summary is not None:  # by another process, while this one loaded the data
            return _outcome_of_summary(summary, skipped=True)
        records.start(folder, resolved, plan.settings.force)
        _describe_run(folder, plan, dataset, partition)
        with show.progress(experiment.rounds, records.folder_name(resolved)) as on_round:
            summary = run(experiment, folder, on_round)
        show.draw_curves(folder)
    show.print_summary(summary, folder, brief=sweep)
    return _outcome_of_summary(summary)


def resolve(config: "DictConfig") -> dict[str, Any]:
    """The config as plain values; the rules named in eval.also_aggregate are filled in with their own configs."""
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
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
    return resolved  # type: ignore[no-any-return]


def _describe_run(folder: Path, plan: "Plan", dataset: Any, partition: Any) -> None:
    """The files that say what the run works on, written before its first round."""
    from bfl_bench import records, show
    from bfl_bench.environment import describe_environment

    partition.save(folder / records.PARTITION)
    counts = partition.label_counts(dataset.train.y.numpy(), dataset.num_classes)
    show.draw_partition(counts, folder)
    environment = describe_environment(plan.device, plan.settings.threads)
    records.write_json(folder / records.ENVIRONMENT, {**environment, "partition_sha256": partition.digest()})


def _outcome_of_summary(summary: dict[str, Any], skipped: bool = False) -> Outcome:
    if summary["status"] == "diverged":
        return Outcome("diverged", f"diverged: {summary['reason']}", 1)
    return Outcome("skipped" if skipped else "done")


def outcome_of(error: BaseException, overrides: Sequence[str] = ()) -> Outcome:
    """An error as one sentence and an exit code; an unforeseen one keeps its traceback."""
    if isinstance(error, BflError):
        return Outcome("failed", str(error), error.exit_code)
    if type(error).__module__.startswith(("hydra.", "omegaconf.")):
        return Outcome("failed", _translate(error, overrides), 2)
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        return Outcome("failed", f"cannot read or write{where}: {error.strerror or error}; earlier files are intact", 1)
    trace = "".join(traceback.format_exception(error))
    return Outcome("failed", f"unforeseen error, please report it:\n{trace}", 1)


def _translate(error: BaseException, overrides: Sequence[str]) -> str:
    """Hydra's and OmegaConf's complaints in our form: key, what was given, what is allowed."""
    text = str(error).split("Config search path")[0]
    if match := re.search(r"Could not find '([\w/]+)/([^']*)'\s+Available options in '[^']*':\s*(.*)", text, re.DOTALL):
        group, given, options = match.groups()
        return str(ConfigError(group, given, ", ".join(options.split())))
    if match := re.search(r"Could not override '([^']+)'", text):
        given = next((value for key, _, value in (o.partition("=") for o in overrides) if key == match[1]), "")
        return str(
            ConfigError(match[1], given, unknown_key(match[1].split(".")[-1], _keys_beside(match[1], overrides)))
        )
    if match := re.search(r"Missing mandatory value: (\S+)", text):
        return str(ConfigError(match[1], None, "a value; the key has no default"))
    return " ".join(f"{text} {error.__cause__ or ''}".split())


def _keys_beside(key: str, overrides: Sequence[str]) -> list[str]:
    """The keys that stand where `key` does not, under the groups that the other overrides choose."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    choices = [override for override in overrides if override.partition("=")[0] in GROUPS]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        node = OmegaConf.select(compose("config", choices), key.rpartition(".")[0]) if "." in key else compose("config")
    return [str(name) for name in node] if OmegaConf.is_dict(node) else []


def finish_sweep(points: list[tuple[str, Outcome]]) -> list[Outcome]:
    """Say how the points ended; a diverged one is a result, a failed one is not."""
    ended = [outcome.status for _, outcome in points]
    counts = {status: ended.count(status) for status in STATUSES if status in ended}
    for overrides, outcome in points:
        if outcome.status in ("failed", "diverged"):
            print(f"bfl-run: {overrides}: {outcome.message}", file=sys.stderr)
    print(f"Sweep of {len(points)}: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    if "failed" in counts:
        raise SweepError(f"{counts['failed']} of {len(points)} points failed")
    return [outcome for _, outcome in points]


def _first_comment(path: Path) -> str:
    comments = (line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")


def help_text() -> str:
    """Every group with its options, each with the comment its file starts with."""
    lines = [
        "bfl-run [key=value ...]        run one federated experiment",
        "bfl-run -m [key=a,b,c ...]     run every combination of the values",
        "",
        "For example: bfl-run method=fedprox dataset=mnist partition.alpha=0.01 local.epochs=5 local.lr=0.01",
    ]
    for group in GROUPS:
        files = sorted((config_folder() / group).glob("[!_]*.yaml"))
        lines += ["", group] + [f"  {path.stem:<16} {_first_comment(path)}" for path in files]
    lines += ["", "Other keys, with their defaults (conf/config.yaml):", ""]
    text = (config_folder() / "config.yaml").read_text()
    lines += ["  " + line for line in text.split("\n\n", 1)[1].split("hydra:")[0].strip().splitlines()]
    lines += [
        "",
        "bfl-run --cfg job         print the composed config and stop",
        "bfl-run --config-dir D    look for config files of your own in D first",
        "bfl-run --version         print the version",
        'bfl-run --hydra-help      Hydra\'s own options; tab completion: eval "$(bfl-run -sc install=bash)"',
        "bfl-data list             datasets and whether they are here",
    ]
    return "\n".join(lines)
