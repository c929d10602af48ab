"""Programs of the benchmark in processes of their own, and the virtual environments of the peers."""

import json
import os
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peers.work import Result, Workload

from bfl_bench.records import write_text
from bfl_bench.run.environment import describe_environment

SCRIPTS = Path(__file__).parent
PEERS = {
    "flower": (["flwr[simulation]==1.42.0"], ["flwr", "ray"]),
    "pfl": (["pfl[pytorch]==0.6.0"], ["pfl"]),
    "blazefl": (["blazefl==2.0.3", f"torch=={torch.__version__.partition('+')[0]}", "numpy", "tqdm"], ["blazefl"]),
}
"""What is installed for a peer, and whose versions are told."""

OWN_PYTHON = {"blazefl": "python3.13"}
"""Peers that need another Python, and so a torch of their own."""


@dataclass(frozen=True)
class Job:
    """A program run in a process of its own."""

    seconds: float  # from its start to its end
    result: Result


def call(*command: str | Path, clean: bool = False) -> str:
    """What a command prints; `clean` keeps it from seeing more of this environment than its own."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {name: value for name, value in os.environ.items() if not (clean and name == "PYTHONPATH")} | quiet
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=SCRIPTS, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def _run_job(*command: str | Path, work: Workload, clean: bool = False) -> Job:
    started = time.perf_counter()
    *_, line = call(*command, json.dumps(asdict(work)), clean=clean).splitlines()
    return Job(time.perf_counter() - started, Result(**json.loads(line)))


def run_peer_job(name: str, python: Path, work: Workload) -> Job:
    return _run_job(python, "-m", f"peers.{name}_peer", work=work, clean=True)


def run_ours_job(loop: str, work: Workload) -> Job:
    """A loop of workloads.py; worker processes are made ready at the start, as bfl-run does."""
    begin = ""
    if loop == "processes":
        begin = "from bfl_bench.engines.fork_server import open_fork_server; open_fork_server(); "
    return _run_job(sys.executable, "-c", f"{begin}import workloads; workloads.main()", loop, work=work)


def make_peer(folder: Path, name: str) -> Path:
    """The Python of a peer's environment."""
    requirements, (package, *_) = PEERS[name]
    python = (folder / name / "bin" / "python").absolute()
    if not python.exists():
        subprocess.run([OWN_PYTHON.get(name, sys.executable), "-m", "venv", str(folder / name)], check=True)
        if name not in OWN_PYTHON:
            (site,) = (folder / name).glob("lib/python*/site-packages")
            write_text(site / "outer.pth", sysconfig.get_path("purelib") + "\n")
    if subprocess.run([str(python), "-c", f"import {package}"], capture_output=True).returncode:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
    return python


def describe_versions(pythons: dict[str, Path]) -> str:
    found = describe_environment(torch.device("cpu"), torch.get_num_threads(), {})
    versions = {name: str(found[name]) for name in ("bfl_bench", "commit", "python", "torch")}
    for peer, python in pythons.items():
        for package in PEERS[peer][1]:
            code = f"from importlib.metadata import version; print(version('{package}'))"
            versions[package] = call(python, "-c", code, clean=True).strip()
    return ", ".join(f"{name} {version}" for name, version in versions.items())
