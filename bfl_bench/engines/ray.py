"""Clients of a round in Ray's actors, here or on a cluster: on equal hardware the same bytes as one after the other.

What a worker needs goes into Ray's object store once, and the actors of a machine read the data where it lies there.
An actor starts once per run and keeps its network; afterwards a round's broadcast, jobs and replies go to and fro. Ray
is imported only where this engine is chosen.
"""

import importlib
import logging
import math
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch

from bfl_bench.checks import Above, AtLeast
from bfl_bench.engines.pool import Peer, Pool, WorkerDiedError, answer
from bfl_bench.engines.process_setup import set_up_process
from bfl_bench.engines.worker import Job, Reply, Runner, Worker
from bfl_bench.errors import ConfigError, RunError
from bfl_bench.method import Task, Tensors


@dataclass(frozen=True)
class Ray:
    name: str
    workers: Annotated[int, AtLeast(1)]
    cpus_per_worker: Annotated[float, Above(0)]
    gpus_per_worker: Annotated[float, AtLeast(0)]
    address: str | None

    def __post_init__(self) -> None:
        try:
            importlib.import_module("ray.exceptions")  # `ray` alone might be any folder of that name
        except ImportError:
            allowed = "sequential or processes; ray has to be installed first: pip install -e '.[ray]'"
            raise ConfigError("", self.name, allowed) from None

    def check(self, task: Task) -> None:
        on_cpu = task.model.vector.device.type == "cpu"
        if on_cpu != (self.gpus_per_worker == 0):
            allowed = "0, as the device is the CPU" if on_cpu else "above 0, as the device is a GPU"
            raise ConfigError("engine.gpus_per_worker", self.gpus_per_worker, allowed)

    @contextmanager
    def start(self, worker: Worker) -> Iterator[Runner]:
        with self._connect():
            self._check_room()
            pool = _Pool(worker, self)
            try:
                yield pool
            finally:
                pool.close()

    @contextmanager
    def _connect(self) -> Iterator[None]:
        """Ray, started or joined, and gone afterwards; one that this process uses already stays."""
        import ray

        if ray.is_initialized():
            if ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
                allowed = "sequential in a job of Ray's, which would wait for workers that others hold"
                raise ConfigError("engine", self.name, allowed)
            yield
            return
        try:
            self._init()
            yield
        finally:
            ray.shutdown()

    def _init(self) -> None:
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        num_cpus = None if self.address else math.ceil(self.workers * self.cpus_per_worker)
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        handler = signal.getsignal(signal.SIGTERM)
        try:
            if match := re.fullmatch(r"([\w.-]+):(\d+)", self.address or ""):
                socket.create_connection((match[1], int(match[2])), timeout=10).close()  # Ray would try for minutes
            ray.init(self.address or "local", num_cpus=num_cpus, **quiet)
        except OSError as error:
            raise RunError(f"engine.address: no Ray answers at {self.address} ({_first_line(error)})") from None
        signal.signal(signal.SIGTERM, handler)  # Ray has put one of its own in its place

    def _check_room(self) -> None:
        """Actors that fit nowhere would be waited for in vain."""
        import ray

        there = ray.cluster_resources()
        for key, unit in (("cpus_per_worker", "CPU"), ("gpus_per_worker", "GPU")):
            each, total = getattr(self, key), there.get(unit, 0)
            if self.workers * each > total:
                allowed = f"at most {total / self.workers:g}; Ray has {total:g} {unit}s for {self.workers} workers"
                raise ConfigError(f"engine.{key}", each, allowed)


@dataclass(eq=False)
class _Peer(Peer):
    actor: Any
    reply: Any = field(default=None, init=False)  # Ray's reference to the answer that is being made


class _Pool(Pool[_Peer]):
    def __init__(self, worker: Worker, engine: Ray) -> None:
        import ray

        self._ray = ray
        tensors = worker.tensors()
        self._worker = ray.put(worker.with_tensors([torch.empty(0)] * len(tensors)))
        self._data = ray.put([tensor.cpu().numpy() for tensor in tensors])
        self._threads = torch.get_num_threads()
        self._start = ray.remote(num_cpus=engine.cpus_per_worker, num_gpus=engine.gpus_per_worker)(_Actor).remote
        super().__init__(engine.workers)

    def close(self) -> None:
        for peer in self.peers:
            self._ray.kill(peer.actor)

    def spawn(self) -> _Peer:
        return _Peer(self._start(self._worker, self._data, self._threads))

    def pack(self, broadcast: Tensors) -> Any:
        return self._ray.put(broadcast)

    def send(self, peer: _Peer, packed: Any, job: Job) -> None:
        peer.reply = peer.actor.run.remote(packed, job)

    def ready(self) -> list[_Peer]:
        busy = {peer.reply: peer for peer in self.peers if peer.index is not None}
        return [busy[reply] for reply in self._ray.wait(list(busy))[0]]

    def receive(self, peer: _Peer) -> Reply | Exception:
        try:
            found: Reply | Exception = self._ray.get(peer.reply)
        except self._ray.exceptions.RayError as error:
            self._ray.kill(peer.actor)  # it may only be out of reach
            raise WorkerDiedError(_first_line(error)) from None
        return found


class _Actor:
    """A worker in a process of Ray's."""

    def __init__(self, worker: Worker, data: list[np.ndarray], threads: int) -> None:
        set_up_process(threads)
        device = worker.task.model.vector.device
        # Views of memory that all actors of a machine share, and that nobody writes to.
        self._worker = worker.with_tensors([torch.from_numpy(array) for array in data]).to(device)
        self._broadcast: Tensors = {}

    def run(self, broadcast: Tensors | None, job: Job) -> Reply | Exception:
        self._broadcast = self._broadcast if broadcast is None else broadcast
        return answer(self._worker, self._broadcast, job)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
