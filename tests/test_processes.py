"""Worker processes: the same bytes as one client after the other, whatever happens to a worker."""

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bfl_bench import records
from bfl_bench.build import load, plan
from bfl_bench.engines import processes
from bfl_bench.errors import ConfigError, RunError
from bfl_bench.method import Client, Task, Tensors, Update
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.models.flat import FlatModel
from bfl_bench.run.loop import Experiment, run
from tests.composing import COMMAND, SMALL, choose, experiment, resolve, run_in
from tests.federation import CPU, make_module

PARALLEL = ["engine=processes", "engine.workers=2"]
EVERYTHING = ["fedavg", "fedbe", "fedcurv", "fedlpa", "fola", "fvb", "scaffold", "virtual"]


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (records.METRICS, records.CLIENTS)}


def check_same(tmp_path: Path, *overrides: str) -> None:
    for name, engine in (("sequential", []), ("processes", PARALLEL)):
        run_in(tmp_path / name, *overrides, *engine)
    assert files(tmp_path / "sequential") == files(tmp_path / "processes")


@pytest.mark.slow
def test_the_same_bytes_as_sequential(tmp_path: Path) -> None:
    check_same(tmp_path, *choose("scaffold"), "participation=0.6", "local.momentum=0.5")


@pytest.mark.slow
@pytest.mark.parametrize("method", EVERYTHING)
def test_every_kind_of_method_gives_the_same_bytes(method: str, tmp_path: Path) -> None:
    check_same(tmp_path, *choose(method), "partition.test=per_client")


def test_a_copied_network_has_storage_of_its_own() -> None:
    model = FlatModel(make_module(), CPU)
    model.vector.add_(1.0)
    copy: FlatModel = pickle.loads(pickle.dumps(model))
    assert torch.equal(copy.vector, model.vector)
    assert torch.equal(copy.initial, model.initial)
    copy.assert_views()
    copy.vector.zero_()
    assert copy(torch.ones(1, 5)).abs().sum() == 0
    assert model(torch.ones(1, 5)).abs().sum() > 0


@dataclass(frozen=True)
class Mortal(FedAvg):
    """The worker that gets client 1 in round 2 is killed, so many times as there are files to take away."""

    marks: str

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        if client.id == 1:
            for mark in sorted(Path(self.marks).iterdir())[:1]:
                mark.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().client_update(task, broadcast, memory, client, rng)


def mortal(marks: Path, num: int, *overrides: str) -> Experiment:
    marks.mkdir(exist_ok=True)
    for number in range(num):
        (marks / str(number)).touch()
    config: dict[str, Any] = resolve(*SMALL, "method=fedavg", *overrides)
    config["method"] |= {"_target_": f"{__name__}.Mortal", "marks": str(marks)}
    return load(plan(config))[0]


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    run_in(tmp_path / "whole", *SMALL, "method=fedavg")
    run_in(tmp_path / "killed", experiment_=mortal(tmp_path / "marks", 2, *PARALLEL))
    assert not list((tmp_path / "marks").iterdir())  # it did die, twice
    assert files(tmp_path / "whole") == files(tmp_path / "killed")


@dataclass(frozen=True)
class Endless(FedAvg):
    """A worker writes down its number, and then its local update does not end."""

    marks: str

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        (Path(self.marks) / str(os.getpid())).touch()
        while True:
            broadcast["params"] @ broadcast["params"]


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them_in_the_middle_of_a_job(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    own = ["method=fedavg", f"method._target_={__name__}.Endless", f"+method.marks={marks}"]
    run = subprocess.Popen([COMMAND, *SMALL, *own, *PARALLEL, f"out={tmp_path}/outputs"])
    end = time.monotonic() + 100
    while len(list(marks.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    workers = [int(path.name) for path in marks.iterdir()]
    assert len(workers) == 2
    assert all(map(is_alive, workers))
    run.kill()
    run.wait()
    end = time.monotonic() + 10  # a second, where nothing else computes
    while any(map(is_alive, workers)) and time.monotonic() < end:
        time.sleep(0.02)
    left = [pid for pid in workers if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.slow
def test_a_job_that_kills_every_worker_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="round 1, client 1: its worker process died 3 times"):
        run_in(tmp_path / "run", experiment_=mortal(tmp_path / "marks", 9, *PARALLEL))


@pytest.mark.slow
def test_a_diverged_client_ends_the_run_as_it_does_sequentially(tmp_path: Path) -> None:
    overrides = [*SMALL, "method=fedavg", "local.lr=1e30"]
    summaries = []
    for name, engine in (("sequential", []), ("processes", PARALLEL)):
        (tmp_path / name).mkdir()
        summaries.append(run(experiment(*overrides, *engine), tmp_path / name))
    assert summaries[0]["status"] == "diverged"
    assert summaries[0] == summaries[1]


def test_the_nursery_can_open_before_torch_is_imported() -> None:
    code = "import sys, bfl_bench.commands.run, bfl_bench.engines.fork_server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_errors_survive_the_way_between_processes() -> None:
    error = ConfigError("model", "x", "another")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.key) == (ConfigError, str(error), "model")


def test_what_goes_through_a_pipe_comes_out_the_same() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    sent = {
        "number": torch.tensor(1.5, dtype=torch.float64),
        "nothing": torch.empty(0),
        "turned": matrix.T,
        "part": matrix[:, 1],
        "labels": torch.tensor([3, 1]),
        "flags": torch.tensor([True, False]),
    }
    found = pickle.loads(processes._dumps((sent, {"note": math.nan})))[0]
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        found[name].add_(found[name])  # it can be written to
    assert torch.equal(matrix, torch.arange(6.0).view(2, 3))
