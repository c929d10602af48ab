"""Clients of a round in several processes of this machine, with the same bytes as a result as one after the other.

A worker process starts once per run and keeps its network and its view of the data, which lies in shared memory. What
goes to and fro afterwards, a round's broadcast, jobs and replies, goes through pipes. All that is random comes from
streams that belong to round and client, so it does not matter who does what. A worker that dies is replaced, and its
job done again.
"""

import multiprocessing
import pickle
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Annotated, Any

import torch

from bfl_bench.checks import AtLeast
from bfl_bench.data.dataset import Split
from bfl_bench.engine import Job, Reply, Runner, Worker
from bfl_bench.errors import ConfigError, RunError
from bfl_bench.method import Tensors

MAX_DEATHS = 3  # of workers over one job: then it is the job


@dataclass(frozen=True)
class Processes:
    name: str
    workers: Annotated[int, AtLeast(1)]

    @contextmanager
    def start(self, worker: Worker) -> Iterator[Runner]:
        if worker.task.model.vector.device.type != "cpu":
            raise ConfigError("engine", self.name, "sequential on a GPU")
        pool = _Pool(worker, self.workers)
        try:
            yield pool
        finally:
            pool.close()


@dataclass
class _Peer:
    """A worker process as seen from here."""

    process: BaseProcess
    pipe: Connection
    round: int = 0  # of the broadcast that it holds
    index: int | None = None  # of the job that it works on


class _Pool:
    def __init__(self, worker: Worker, num: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        nothing = Split(torch.empty(0), torch.empty(0, dtype=torch.long))
        self._parcel = pickle.dumps(replace(worker, train=nothing, test=nothing))
        self._data = [worker.train.x, worker.train.y, worker.test.x, worker.test.y]
        for tensor in self._data:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        self._threads = torch.get_num_threads()
        self._peers = [self._spawn() for _ in range(num)]
        self._round = 0

    def run(self, broadcast: Tensors, jobs: Iterable[Job]) -> Iterator[Reply]:
        """At most two jobs per worker are under way or waiting for their turn to be handed on."""
        self._round += 1
        waiting = enumerate(jobs)
        given: dict[int, Job] = {}
        deaths: dict[int, int] = {}
        again: deque[int] = deque()
        replies: dict[int, Reply | Exception] = {}
        following = 0  # the index whose reply is handed on next
        exhausted = False
        while True:
            for peer in self._peers:
                if peer.index is None and (again or (not exhausted and len(given) < 2 * len(self._peers))):
                    if again:
                        peer.index = again.popleft()
                    elif (item := next(waiting, None)) is None:
                        exhausted = True
                        continue
                    else:
                        peer.index, given[item[0]] = item
                    self._send(peer, broadcast, given[peer.index])
            if not given:
                return
            for peer in self._ready():
                try:
                    found = pickle.loads(peer.pipe.recv_bytes())
                except (EOFError, OSError):
                    assert peer.index is not None
                    deaths[peer.index] = deaths.get(peer.index, 0) + 1
                    if deaths[peer.index] >= MAX_DEATHS:
                        job = given[peer.index]
                        where = f"round {job.round}, client {job.client_id}"
                        raise RunError(f"{where}: its worker process died {MAX_DEATHS} times") from None
                    again.append(peer.index)
                    self._peers[self._peers.index(peer)] = self._spawn()
                    continue
                assert peer.index is not None
                replies[peer.index], peer.index = found, None
            while following in replies:
                del given[following]
                reply = replies.pop(following)
                if isinstance(reply, Exception):  # in its turn: the first client that fails is the one that is named
                    raise reply
                yield reply
                following += 1

    def close(self) -> None:
        for peer in self._peers:
            peer.process.kill()
            peer.process.join()
            peer.pipe.close()

    def _spawn(self) -> _Peer:
        here, there = self._context.Pipe()
        arguments = (self._parcel, self._data, self._threads, there)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        there.close()  # so that the end of the process is the end of the pipe
        return _Peer(process, here)

    def _send(self, peer: _Peer, broadcast: Tensors, job: Job) -> None:
        new = peer.round != self._round
        peer.round = self._round
        with suppress(OSError):  # where it has died, reading from it will show
            peer.pipe.send_bytes(pickle.dumps((broadcast if new else None, job)))

    def _ready(self) -> list[_Peer]:
        busy: dict[Any, _Peer] = {peer.pipe: peer for peer in self._peers if peer.index is not None}
        return [busy[pipe] for pipe in wait(list(busy))]


def _serve(parcel: bytes, data: list[torch.Tensor], threads: int, pipe: Connection) -> None:
    """The life of a worker process: jobs until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    torch.set_num_threads(threads)
    train_x, train_y, test_x, test_y = data
    worker: Worker = replace(pickle.loads(parcel), train=Split(train_x, train_y), test=Split(test_x, test_y))
    broadcast: Tensors = {}
    while True:
        try:
            received, job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        broadcast = broadcast if received is None else received
        try:
            answer: Reply | Exception = worker.run(broadcast, job)
        except Exception as error:
            answer = error
        pipe.send_bytes(pickle.dumps(answer))
