"""Compose configs in tests as the command line does."""

import contextlib
import copy
import io
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from bfl_bench import records
from bfl_bench.build import load, plan
from bfl_bench.commands.cells import expand_table
from bfl_bench.commands.resolving import resolve as resolve_config
from bfl_bench.commands.words import CommandLine
from bfl_bench.identity import folder_name
from bfl_bench.records import config_folder
from bfl_bench.run.loop import Experiment, run
from bfl_bench.run.recorder import write_summary

SCRIPTS = Path(__file__).parent.parent / "scripts"
COMMAND = str(Path(sys.executable).with_name("bfl-run"))

SMALL = (
    "dataset=synthetic dataset.train_samples=120 dataset.test_samples=40 dataset.num_classes=3 dataset.shape=[1,4,4] "
    "num_clients=5 rounds=3 local.epochs=2 local.batch_size=16 local.lr=0.05 model.hidden=[8] partition.min_size=5"
).split()
"""Overrides that make a run small: clients of unequal size, a fraction of a second."""


DENSE = [f"method.{key}" for key in ("epochs=2", "generator_steps=2", "num_images=6", "width=2", "latent=3")]
LABELLED = ["dataset.server_samples=20"]
NEEDS = {
    **{key: [*LABELLED, "method.epochs=2"] for key in ("beta_predbayes", "bcm", "mixture")},
    "fedbens": ["method.members=2", "method.steps=3"],
    "fedbens_released": [*LABELLED, "method.members=2", "method.steps=3"],
    "fedfisher_released": [*LABELLED, "method.descent_steps=3", "method.select_every=1"],
    **{key: ["method.burn_in=1"] for key in ("fald", "dsgld")},
    "fedbe": ["dataset.server_samples=20", "method.epochs=2", "method.batch_size=8"],
    "dense": DENSE,
    "dense_fedlpa": DENSE,
    "fedep": ["method.burn_in_rounds=0"],
    "fedpa": ["method.burn_in_rounds=0"],
    "fedlpa_released": ["method.descent_steps=3"],
    "swag": ["method.start_round=2"],
    "virtual": ["server.lr=0.3"],
    "virtual_released": ["server.lr=0.3"],
}
"""What a method needs beside itself."""


def heed_interrupts() -> None:
    """For a process about to start: tests in the background may ignore Ctrl-C, and their children with them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def choose(method: str) -> list[str]:
    """Overrides for a small run of a method."""
    return [*SMALL, f"method={method}", *NEEDS.get(method, [])]


_RESOLVED: dict[object, dict[str, Any]] = {}


def resolve(*overrides: str) -> dict[str, Any]:
    """Compose a config, once for the same words: that takes a fifth of a second."""
    surroundings = [(name, value) for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"]
    key = (config_folder(), tuple(sorted(surroundings)), overrides)
    if key in _RESOLVED:
        return copy.deepcopy(_RESOLVED[key])
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = resolve_config(compose("config", expand_table(CommandLine({}, list(overrides))).overrides))
    reads = [config.get("start_from"), config.get("reference_posterior"), config["partition"].get("path")]
    if reads == [None, None, None]:  # else it depends on files too
        _RESOLVED[key] = copy.deepcopy(config)
    return config


def experiment(*overrides: str) -> Experiment:
    return load(plan(resolve(*overrides)))[0]


def run_in(folder: Path, *overrides: str, experiment_: Experiment | None = None) -> str:
    """Run in a folder and give back metrics.csv."""
    folder.mkdir(exist_ok=True)
    run(experiment_ or experiment(*overrides), folder)
    return (folder / records.METRICS).read_text()


def only_folder(out: Path) -> Path:
    (folder,) = [path for path in out.iterdir() if path.is_dir()]
    return folder


def write_run(out: Path, config: dict[str, Any], *rows: dict[str, records.Cell]) -> Path:
    """The files of a finished run, without running it: config.yaml, metrics.csv and summary.json."""
    folder = out / folder_name(config)
    folder.mkdir(parents=True)
    records.start(folder, config, force=False)
    records.Table(folder / records.METRICS, records.METRICS_COLUMNS).append(rows)
    write_summary(folder, "done", None, config["rounds"], {})
    return folder


def call_script(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As if it were a process of its own, but in this one, where all has been imported."""
    script = str(SCRIPTS / f"{name}.py")
    out, err, before, code = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = [script, *arguments]
    try:
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        err.write(f"{end.code}\n")
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())
