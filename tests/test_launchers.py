"""Sweeps through Hydra's launchers: the same files, summary and exit code as without."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException

from bfl_bench import records
from bfl_bench.commands.outcome import outcome_of
from tests.composing import COMMAND, SMALL, only_folder
from tests.conftest import BflRun

PARTS = """
from dataclasses import replace
from bfl_bench.methods.fedavg import FedAvg

class Exploding(FedAvg):
    def client_update(self, *arguments):
        raise ZeroDivisionError("boom")

class Diverging(FedAvg):
    def client_update(self, *arguments):
        update = super().client_update(*arguments)
        nowhere = {"params": update.message["params"] / 0}
        return replace(update, message=nowhere, local=nowhere)
"""
FILES = (records.METRICS, records.CLIENTS, records.SUMMARY, records.CONFIG)
LAUNCHERS = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit_local": ["hydra/launcher=submitit_local"],
    "ray": ["hydra/launcher=ray", "+hydra.launcher.ray.init.include_dashboard=false"],
}


def sweep(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """In a working directory with methods of one's own: one that raises, one that diverges."""
    (folder / "conf" / "method").mkdir(parents=True, exist_ok=True)
    (folder / "parts.py").write_text(PARTS)
    for name in ("exploding", "diverging"):
        text = f"_target_: parts.{name.capitalize()}\nname: {name}\nweights: size\n"
        (folder / "conf" / "method" / f"{name}.yaml").write_text(text)
    command = [COMMAND, "--config-dir", "conf", "-m", *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.glob("[!.]*/*") if path.name in FILES}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("plain")
    check(sweep(folder, "method=fedavg,exploding,diverging,nonsense"))
    return contents(folder / "outputs")


def check(done: "subprocess.CompletedProcess[str]") -> None:
    assert done.returncode == 1
    assert "Sweep of 4: 1 done, 1 diverged, 2 failed" in done.stdout
    assert "method=exploding: unforeseen ZeroDivisionError in parts.py, line 7: boom" in done.stderr
    assert "method=diverging: diverged: round 1, client 0: params became NaN or infinite" in done.stderr
    assert "method=nonsense: method: got 'nonsense', allowed: bayesadmm" in done.stderr


@pytest.mark.launchers
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_sweep_gives_what_it_gives_without(launcher: str, plain: dict[str, bytes], tmp_path: Path) -> None:
    check(sweep(tmp_path, *LAUNCHERS[launcher], "method=fedavg,exploding,diverging,nonsense"))
    assert contents(tmp_path / "outputs") == plain
    assert len(plain) == 2 * len(FILES) - 2 + 1  # nothing is measured before divergence; no summary of a failure


@pytest.mark.launchers
def test_a_point_that_is_there_twice_is_run_once(plain: dict[str, bytes], tmp_path: Path) -> None:
    done = sweep(tmp_path, *LAUNCHERS["joblib"], "method=fedavg", "seed=0,0")
    if done.returncode == 0:
        assert "Sweep of 2: 1 done, 1 skipped" in done.stdout
    else:  # the two met
        assert "Sweep of 2: 1 done, 1 failed" in done.stdout
        assert "another process is running in" in done.stderr
    folder = only_folder(tmp_path / "outputs")
    assert (folder / records.METRICS).read_bytes() == plain[f"{folder.name}/{records.METRICS}"]


@pytest.mark.slow
def test_where_a_launcher_gives_up_the_folders_tell(bfl_run: BflRun, monkeypatch: pytest.MonkeyPatch) -> None:
    basic: Any = Plugins.instance().class_name_to_class["hydra._internal.core_plugins.basic_launcher.BasicLauncher"]
    launch = basic.launch

    def give_up(self: Any, job_overrides: Any, initial_job_idx: int) -> Any:
        returns = [] if "seed=1" in job_overrides[0] else launch(self, job_overrides, initial_job_idx)
        if "seed=0" in job_overrides[0]:
            return returns
        raise RuntimeError("a process was killed\nsomewhere")

    monkeypatch.setattr(basic, "launch", give_up)
    result = bfl_run("-m", *SMALL, "method=fedavg", "seed=0,1,2")
    assert result.code == 1
    assert "Sweep of 3: 2 done, 1 failed" in result.out  # seed 2 was killed after the end of the run
    assert "seed=1: not finished when the launcher gave up (RuntimeError: a process was killed)\n" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(("launcher", "extra"), [("joblib", "joblib"), ("submitit_slurm", "slurm"), ("ray", "ray")])
def test_where_a_launcher_is_not_installed_a_sentence_names_the_extra(launcher: str, extra: str) -> None:
    text = f"In 'hydra/config': Could not find 'hydra/launcher/{launcher}'\n"
    error = MissingConfigException(text, f"hydra/launcher/{launcher}", ["basic"])
    outcome = outcome_of(error, ["seed=1", f"hydra/launcher={launcher}"])
    allowed = f"basic; {launcher} has to be installed first: pip install -e '.[{extra}]'"
    assert outcome.message == f"hydra/launcher: got '{launcher}', allowed: {allowed}"
