"""Clients of a round in several processes of this machine, with the same bytes as a result as one after the other.

A worker process starts once per run and keeps its network and its view of the data, which lies in shared memory. What
goes to and fro afterwards, a round's broadcast, jobs and replies, goes through pipes.
"""

import io
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, parent_process
from typing import Annotated, Any

import torch

from bfl_bench.checks import AtLeast
from bfl_bench.engines.fork_server import open_fork_server
from bfl_bench.engines.pool import Peer, Pool, WorkerDiedError, answer
from bfl_bench.engines.process_setup import set_up_process
from bfl_bench.engines.worker import Job, Reply, Runner, Worker
from bfl_bench.errors import ConfigError
from bfl_bench.method import Task, Tensors


@dataclass(frozen=True)
class Processes:
    name: str
    workers: Annotated[int, AtLeast(1)]

    def check(self, task: Task) -> None:
        if task.model.vector.device.type != "cpu":
            raise ConfigError("engine", self.name, "sequential on a GPU")

    @contextmanager
    def start(self, worker: Worker) -> Iterator[Runner]:
        pool = _Pool(worker, self.workers)
        try:
            yield pool
        finally:
            pool.close()


@dataclass(eq=False)
class _Peer(Peer):
    process: BaseProcess
    pipe: Connection


class _Pool(Pool[_Peer]):
    def __init__(self, worker: Worker, num: int) -> None:
        self._context = open_fork_server()
        self._data = worker.tensors()
        self._parcel = pickle.dumps(worker.with_tensors([torch.empty(0)] * len(self._data)))
        for tensor in self._data:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        self._threads = torch.get_num_threads()
        super().__init__(num)

    def close(self) -> None:
        for peer in self.peers:
            peer.process.kill()
            peer.process.join()
            peer.pipe.close()

    def spawn(self) -> _Peer:
        here, there = self._context.Pipe()
        arguments = (self._parcel, self._data, self._threads, there)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        there.close()  # so that the end of the process is the end of the pipe
        return _Peer(process, here)

    def send(self, peer: _Peer, packed: Tensors | None, job: Job) -> None:
        with suppress(OSError):  # where it has died, reading from it will show
            peer.pipe.send_bytes(_dumps((packed, job)))

    def ready(self) -> list[_Peer]:
        busy: dict[Any, _Peer] = {peer.pipe: peer for peer in self.peers if peer.index is not None}
        return [busy[pipe] for pipe in wait(list(busy))]

    def receive(self, peer: _Peer) -> Reply | Exception:
        try:
            found: Reply | Exception = pickle.loads(peer.pipe.recv_bytes())
        except (EOFError, OSError):
            raise WorkerDiedError from None
        return found


def _serve(parcel: bytes, data: list[torch.Tensor], threads: int, pipe: Connection) -> None:
    """The life of a worker process: jobs until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    set_up_process(threads)
    worker: Worker = pickle.loads(parcel).with_tensors(data)
    broadcast: Tensors = {}
    while True:
        try:
            received, job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        broadcast = broadcast if received is None else received
        pipe.send_bytes(_dumps(answer(worker, broadcast, job)))


def _end_with_parent() -> None:
    """Wait for the end of the process that started this one, and end too, in the middle of a job if need be."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Pickler(pickle.Pickler):
    """Tensors as NumPy arrays, which takes a fifteenth of the time that they take by themselves."""

    def reducer_override(self, thing: object) -> Any:
        if type(thing) is torch.Tensor:
            return torch.from_numpy, (thing.numpy(),)
        return NotImplemented


def _dumps(thing: object) -> memoryview:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(thing)
    return buffer.getbuffer()
