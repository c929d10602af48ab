"""bfl-run: compose a config with Hydra, check it, run it, say how it ended.

A job never raises what a user can act on: it returns an `Outcome`, so that one bad point of a sweep cannot end the
sweep, in this process or in another. `main` turns outcomes, and Hydra's own complaints, into sentences and exit codes:
0 done, 1 failed or diverged, 2 wrong config, 130 interrupted.
"""

import contextlib
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bfl_bench.commands.cells import expand_table
from bfl_bench.commands.composing import check_package
from bfl_bench.commands.help import help_text
from bfl_bench.commands.outcome import STATUSES, Outcome, outcome_of
from bfl_bench.commands.printing import drop_output, say
from bfl_bench.commands.resolving import resolve, tell
from bfl_bench.commands.words import CommandLine, check_words, read_by_hydra, read_words
from bfl_bench.engines.fork_server import open_fork_server
from bfl_bench.errors import BflError, ConfigError, RunError
from bfl_bench.groups import GROUPS
from bfl_bench.identity import finished_summary, folder_name, is_stand_in, modernise_override
from bfl_bench.records import config_folder

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from bfl_bench.build import Plan
    from bfl_bench.run.observers import Observer


class SweepError(BflError):
    """Some points of a sweep did not finish; they have been listed already."""


class _Asked:
    """Whether somebody asked this process to stop: libraries that draw or import can swallow a KeyboardInterrupt."""

    stop = False


def main() -> None:
    _Asked.stop = False
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        code = _main()
    except KeyboardInterrupt:
        code = 130
    if _Asked.stop or code == 130:
        print("\nbfl-run: interrupted; the same command continues", file=sys.stderr)
        code = 130
    if code:
        sys.exit(code)


def _main() -> int:
    try:
        line = read_words(sys.argv[1:])
        if "--version" in line.options:
            from bfl_bench import __version__

            say(f"bfl-bench {__version__}")
            return 0
        if "--help" in line.options:
            say(help_text(line))
            return 0
        tell.cache_clear()
        line = replace(line, overrides=[modernise_override(override, tell) for override in line.overrides])
        line = expand_table(line)
        check_words(line)
        check_package(line)
    except ConfigError as error:
        print(f"bfl-run: {error}", file=sys.stderr)
        return error.exit_code
    return _run_hydra(line)


def _run_hydra(line: CommandLine) -> int:
    import hydra
    from hydra._internal.hydra import Hydra

    if not any(word.startswith("hydra.mode=") for word in line.overrides):
        # Hydra composes the whole config once more, to ask it for a mode that ours does not have.
        setattr(Hydra, "get_mode", lambda self, config_name, overrides: None)  # noqa: B010  (mypy refuses the plain one)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors to us instead of printing them
    sys.argv[1:] = _arrange(line).as_words()
    sweep = "--multirun" in line.options
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for hydra/launcher=ray
    here = os.getpid()
    outcomes: list[Outcome] = []

    def job(config: "DictConfig") -> Outcome:  # a launcher may call a copy of it in another process
        outcome = run_job(config, bar=os.getpid() == here)
        outcomes.append(outcome)
        return outcome

    try:
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(job)()
        # Our own sweeper has said what failed; others, which search, have not.
        ended = [outcome for outcome in outcomes if outcome.status == "failed"] if sweep else outcomes
        last = ended[-1] if ended else Outcome("done")
    except SweepError as error:
        return error.exit_code
    except SystemExit as stop:
        if stop.code == signal.SIGTERM:  # of Ray, whose handler takes the place of ours
            raise KeyboardInterrupt from None
        raise
    except Exception as error:
        if _Asked.stop:  # an import that was interrupted, say
            raise KeyboardInterrupt from None
        if isinstance(error, BrokenPipeError) and not outcomes:  # of what Hydra prints, for --cfg and the like
            drop_output()
            return 0
        last = outcome_of(error, line.as_words())
    if last.exit_code:
        print(f"{last.traceback}bfl-run: {last.message}", file=sys.stderr)
    return last.exit_code


def _arrange(line: CommandLine) -> CommandLine:
    """In a sweep, take `method.mu=1` as `method.mu=choice(1)`.

    Hydra applies what is not swept to the config of the sweep as a whole, where a key that only some of the swept
    methods have does not exist; what is swept it applies to the points.
    """
    if "--multirun" not in line.options:
        return line
    return CommandLine(line.options, [_defer(override) for override in line.overrides])


def _defer(override: str) -> str:
    key, _, value = override.partition("=")
    if not value or "." not in key or key.lstrip("+").split(".")[0] not in GROUPS:
        return override
    return override if read_by_hydra(override).is_sweep_override() else f"{key}=choice({value})"


def _interrupt(signum: int, frame: object) -> None:
    _Asked.stop = True
    raise KeyboardInterrupt


class _Stopping:
    """An observer that ends the run where the exception did not."""

    def begin(self, info: object) -> None:
        _stop_if_asked()

    def round(self, round_: int, row: object) -> None:
        _stop_if_asked()

    def end(self, summary: object) -> None:
        return


def _stop_if_asked() -> None:
    if _Asked.stop:
        raise KeyboardInterrupt


def run_job(config: "DictConfig", bar: bool) -> Outcome:
    """One run: a point of a sweep, or the only one."""
    _stop_if_asked()
    # So that `_target_` finds a user's own module. Not earlier: Hydra runs every hydra_plugins/*.py on the path.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return _run(config, bar)
    except Exception as error:
        _stop_if_asked()
        return outcome_of(error)


def _run(config: "DictConfig", bar: bool) -> Outcome:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    resolved = resolve(config)
    if OmegaConf.select(config, "engine.name") == "processes":
        open_fork_server()  # now: it takes as long as the imports that follow

    from bfl_bench import build, records
    from bfl_bench.commands.summary import print_summary
    from bfl_bench.run.observers import show_progress

    sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    plan = build.plan(resolved)
    if plan.settings.dry_run:
        say(_describe_dry_run(plan, resolved))
        return Outcome("dry run")
    dataset_config = resolved["dataset"]
    stand_in = dataset_config["name"] if is_stand_in(resolved["data_dir"], dataset_config["_target_"]) else ""
    ended = execute(plan, resolved, [show_progress(bar), _Stopping()])
    note = ""
    if ended.skipped:
        changed = _changed_code(ended.folder, resolved)
        code = f" with other code of {', '.join(changed)}" if changed else ""
        touched = records.find_changed(ended.folder, ended.summary)
        files = f"; changed since: {', '.join(touched)}" if touched else ""
        note = f"finished earlier{code}{files}; force=true runs it again"
    print_summary(ended.summary, ended.folder, brief=sweep, note=note, stand_in=stand_in)
    return _outcome_of_summary(ended.summary, ended.skipped)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that is over."""

    folder: Path
    summary: dict[str, Any]
    skipped: bool  # it had finished earlier


def execute(plan: "Plan", config: dict[str, Any], observers: "Sequence[Observer]") -> Ended:
    """Run a checked config in its folder, unless it has finished there; errors are raised."""
    from bfl_bench import build, records
    from bfl_bench.report.figures import draw_curves, draw_partition, draw_uncertainty
    from bfl_bench.run.loop import run

    folder = Path(plan.settings.out) / folder_name(config)
    summary = None if plan.settings.force else finished_summary(folder, config)
    if summary is not None:
        if not (folder / records.CURVES_FIGURE).exists():  # killed between the last round and the figure
            with contextlib.suppress(RunError, OSError), records.locked(folder):  # another process may draw it
                draw_uncertainty(folder)
                draw_curves(folder)
        return Ended(folder=folder, summary=summary, skipped=True)
    experiment, dataset, partition = build.load(plan)
    with records.locked(folder):
        summary = None if plan.settings.force else finished_summary(folder, config)
        if summary is not None:  # by another process, while this one loaded the data
            return Ended(folder=folder, summary=summary, skipped=True)
        records.start(folder, config, plan.settings.force)
        groups = dataset.group()
        counts = partition.label_counts(groups.train.numpy(), groups.num)
        _describe_run(folder, plan, config, partition, counts)
        draw_partition(counts, folder)  # now: a run that says it is done is not drawn again
        summary = run(experiment, folder, [*plan.observers, *observers])
        draw_uncertainty(folder)
        draw_curves(folder)
    return Ended(folder=folder, summary=summary, skipped=False)


def _describe_dry_run(plan: "Plan", config: dict[str, Any]) -> str:
    """Say what would run: the config, the folder, the number of steps, about how long they take."""
    from bfl_bench import build
    from bfl_bench.run.estimate import describe_time

    experiment = build.load(plan)[0]
    folder = Path(plan.settings.out) / folder_name(config)
    steps = f"SGD steps: {experiment.count_steps():,}"
    return "\n".join([yaml.safe_dump(config, sort_keys=False), f"folder: {folder}", steps, describe_time(experiment)])


def _changed_code(folder: Path, config: dict[str, Any]) -> list[str]:
    """List the user's own modules whose source is not what the finished run in the folder was made with."""
    from bfl_bench import records
    from bfl_bench.run.environment import digest_own_code

    stored = (records.read_json(folder / records.ENVIRONMENT) or {}).get("own_code", {})
    current = digest_own_code(config)
    return [module for module, digest in stored.items() if current.get(module) != digest]


def _describe_run(folder: Path, plan: "Plan", config: dict[str, Any], partition: Any, counts: Any) -> None:
    """The files that say what the run works on, written before its first round."""
    from bfl_bench import records
    from bfl_bench.run.environment import describe_environment, join_code, join_cpus

    digest = partition.digest()
    earlier = records.read_json(folder / records.ENVIRONMENT)
    if earlier is not None and earlier.get("partition_sha256") != digest:
        file = f"see its {records.ENVIRONMENT}"
        raise RunError(f"{folder} was begun on another split of the data ({file}); start over with force=true")
    partition.save(folder / records.PARTITION)
    held = [(client, label, counts[client, label]) for client, label in zip(*counts.nonzero(), strict=True)]
    records.write_table(folder / records.PARTITION_COUNTS, records.PARTITION_COLUMNS, held)
    begun = (folder / records.CHECKPOINT / records.MANIFEST).exists()  # else no number is of the earlier code
    environment = describe_environment(plan.device, plan.settings.threads, config)
    if begun and earlier:
        environment, sentence = join_cpus(join_code(environment, earlier), earlier)
        if sentence:
            print(f"bfl-run: {folder.name}: {sentence}", file=sys.stderr)
    records.write_json(folder / records.ENVIRONMENT, {**environment, "partition_sha256": digest})


def _outcome_of_summary(summary: dict[str, Any], skipped: bool = False) -> Outcome:
    if summary["status"] == "diverged":
        return Outcome("diverged", f"diverged: {summary['reason']}", 1)
    return Outcome("skipped" if skipped else "done", objective=_objective(summary))


def _objective(summary: dict[str, Any]) -> float:
    """Choose what a search is to minimise: the NLL of the validation examples, else of those that are scored."""
    final = summary["final"] or {}
    found = final.get("validation_nll", final.get("nll"))
    return math.inf if found is None else found


def look_up(config: "DictConfig", error: Exception) -> Outcome:
    """How a point ended whose launcher gave up with this error: as its folder says, or else it failed."""
    from omegaconf import OmegaConf

    try:
        resolved = resolve(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
        summary = finished_summary(Path(resolved["out"]) / folder_name(resolved), resolved)
    except Exception as problem:
        return outcome_of(problem)
    if summary is not None:
        return _outcome_of_summary(summary)
    reason = next(iter(str(error).strip().splitlines()), "")
    return Outcome("failed", f"not finished when the launcher gave up ({type(error).__name__}: {reason})", 1)


def finish_sweep(points: list[tuple[str, Outcome]]) -> list[Outcome]:
    """Say how the points ended; a diverged one is a result, a failed one is not."""
    if not points:
        raise ConfigError("-m", "no points", "values that make at least one")
    ended = [outcome.status for _, outcome in points]
    counts = {status: ended.count(status) for status in STATUSES if status in ended}
    for overrides, outcome in points:
        if outcome.status in ("failed", "diverged"):
            print(f"{outcome.traceback}bfl-run: {overrides}: {outcome.message}", file=sys.stderr)
    say(f"Sweep of {len(points)}: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    if "failed" in counts:
        raise SweepError(f"{counts['failed']} of {len(points)} points failed")
    return [outcome for _, outcome in points]
