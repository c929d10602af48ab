"""Ray's actors: the same bytes as one client after the other, whatever happens to an actor, and nothing left behind."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bfl_bench.build import plan
from bfl_bench.errors import ConfigError, RunError
from bfl_bench.run.loop import run
from tests.composing import COMMAND, SMALL, choose, experiment, heed_interrupts, only_folder, resolve, run_in
from tests.test_processes import files, mortal

RAY = ["engine=ray", "engine.workers=2"]


def test_where_ray_is_not_installed_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it then fails
    sentence = "engine: got 'ray', allowed: sequential or processes; ray has to be installed first: "
    with pytest.raises(ConfigError, match=re.escape(sentence + "pip install -e '.[ray]'")):
        plan(resolve(*SMALL, *RAY))


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Ray with room for two workers, which this process uses already and others can join: its address."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.mark.launchers
@pytest.mark.parametrize("method", ["scaffold", "fola"])
@pytest.mark.usefixtures("cluster")
def test_the_same_bytes_as_sequential(method: str, tmp_path: Path) -> None:
    for name, engine in (("sequential", []), ("ray", RAY)):
        run_in(tmp_path / name, *choose(method), "participation=0.8", *engine)
    assert files(tmp_path / "sequential") == files(tmp_path / "ray")


@pytest.mark.launchers
@pytest.mark.usefixtures("cluster")
def test_a_killed_actor_changes_nothing(tmp_path: Path) -> None:
    run_in(tmp_path / "whole", *SMALL, "method=fedavg")
    run_in(tmp_path / "killed", experiment_=mortal(tmp_path / "marks", 1, *RAY))
    assert not list((tmp_path / "marks").iterdir())  # it did die
    assert files(tmp_path / "whole") == files(tmp_path / "killed")


@pytest.mark.launchers
@pytest.mark.usefixtures("cluster")
def test_a_diverged_client_ends_the_run_as_it_does_sequentially(tmp_path: Path) -> None:
    summaries = []
    for name, engine in (("sequential", []), ("ray", RAY)):
        (tmp_path / name).mkdir()
        diverging = experiment(*SMALL, "method=fedavg", "local.lr=1e30", *engine)
        summaries.append(run(diverging, tmp_path / name))
    assert summaries[0]["status"] == "diverged"
    assert summaries[0] == summaries[1]


@pytest.mark.launchers
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("engine.gpus_per_worker=0.1", "engine.gpus_per_worker: got 0.1, allowed: 0, as the device is the CPU"),
        ("engine.workers=5", "engine.cpus_per_worker: got 1, allowed: at most 0.4; Ray has 2 CPUs for 5 workers"),
    ],
)
@pytest.mark.usefixtures("cluster")
def test_workers_that_would_be_waited_for_in_vain(override: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        run_in(tmp_path / "run", *SMALL, *RAY, override)


@pytest.mark.launchers
@pytest.mark.usefixtures("cluster")
def test_a_job_of_ray_does_not_wait_for_workers(tmp_path: Path) -> None:
    import ray

    def start(config: dict[str, Any]) -> str:
        from bfl_bench.build import load

        experiment = load(plan(config))[0]
        with pytest.raises(ConfigError) as error, experiment.engine.start(experiment.worker):
            pass
        return str(error.value)

    sentence: str = ray.get(ray.remote(start).remote(resolve(*SMALL, *RAY)))
    assert sentence.startswith("engine: got 'ray', allowed: sequential in a job of Ray's")


@pytest.mark.launchers
def test_a_cluster_is_joined_and_left_as_it_was(cluster: str, tmp_path: Path) -> None:
    import ray

    before = len(ray._private.state.jobs())
    command = [COMMAND, *SMALL, "method=fedavg", *RAY, f"engine.address={cluster}", f"out={tmp_path / 'joined'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all("round" in line for line in done.stderr.splitlines())  # nothing but the progress
    run_in(tmp_path / "whole", *SMALL, "method=fedavg")
    assert files(tmp_path / "whole") == files(only_folder(tmp_path / "joined"))
    assert len(ray._private.state.jobs()) == before + 1
    assert ray.available_resources()["CPU"] == 2


@pytest.mark.launchers
def test_where_no_ray_answers_a_sentence_says_so() -> None:
    engine: Any = plan(resolve(*SMALL, *RAY, "engine.address=127.0.0.1:1")).engine
    with pytest.raises(RunError, match=r"engine.address: no Ray answers at 127.0.0.1:1"):
        engine._init()


@pytest.mark.launchers
def test_an_interrupted_run_leaves_no_process_of_ray(tmp_path: Path) -> None:
    command = [COMMAND, *SMALL, "rounds=1000", *RAY, f"out={tmp_path}"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    assert process.stderr is not None
    assert process.stderr.readline().endswith("\n")  # the first round is over
    session = ["pgrep", "--list-name", "--session", str(process.pid)]
    assert "raylet" in subprocess.run(session, capture_output=True, text=True).stdout
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "interrupted; the same command continues" in err
    assert "Traceback" not in err
    assert subprocess.run(session, capture_output=True, text=True).stdout == ""
