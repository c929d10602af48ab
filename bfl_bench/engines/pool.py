"""A round's jobs handed out to several workers, and their replies handed on in order, as from one after the other.

All that is random comes from streams that belong to round and client, so it does not matter who does what. A worker
that dies is replaced, and its job done again.
"""

import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from bfl_bench.engines.worker import Job, Reply, Worker
from bfl_bench.errors import RunError, note_own_frame
from bfl_bench.method import Tensors

MAX_DEATHS = 3  # of workers over one job: then it is the job


class WorkerDiedError(Exception):
    """A worker is gone, and the job that it had is not done."""


@dataclass(eq=False)
class Peer:
    """A worker as seen from here."""

    round: int = field(default=0, init=False)  # of the broadcast that it holds
    index: int | None = field(default=None, init=False)  # of the job that it works on


P = TypeVar("P", bound=Peer)


class Pool(ABC, Generic[P]):
    """What all pools of workers have in common; a kind of worker adds how it is started, given a job and heard."""

    def __init__(self, num: int) -> None:
        self.peers = [self.spawn() for _ in range(num)]
        self._round = 0

    @abstractmethod
    def spawn(self) -> P:
        """Start a worker; it holds no broadcast yet."""

    def pack(self, broadcast: Tensors) -> Any:
        """A round's broadcast as it is sent."""
        return broadcast

    @abstractmethod
    def send(self, peer: P, packed: Any, job: Job) -> None:
        """Give a worker a job, and the packed broadcast, or None where it holds it already."""

    @abstractmethod
    def ready(self) -> list[P]:
        """Wait for any of the workers that have a job: those that have answered, or died."""

    @abstractmethod
    def receive(self, peer: P) -> Reply | Exception:
        """The answer of a ready worker, which may be what its job raised; `WorkerDiedError` where there is none."""

    def run(self, broadcast: Tensors, jobs: Iterable[Job]) -> Iterator[Reply]:
        """At most two jobs per worker are under way or waiting to be handed on."""
        self._round += 1
        packed = self.pack(broadcast)
        waiting = enumerate(jobs)
        given: dict[int, Job] = {}
        deaths: dict[int, int] = {}
        again: deque[int] = deque()
        replies: dict[int, Reply | Exception] = {}
        following = 0  # the index whose reply is handed on next
        exhausted = False
        while True:
            for peer in self.peers:
                if peer.index is None and (again or (not exhausted and len(given) < 2 * len(self.peers))):
                    if again:
                        peer.index = again.popleft()
                    elif (item := next(waiting, None)) is None:
                        exhausted = True
                        continue
                    else:
                        peer.index, given[item[0]] = item
                    self.send(peer, None if peer.round == self._round else packed, given[peer.index])
                    peer.round = self._round
            if not given:
                return
            for peer in self.ready():
                assert peer.index is not None
                try:
                    found = self.receive(peer)
                except WorkerDiedError as error:
                    deaths[peer.index] = deaths.get(peer.index, 0) + 1
                    if deaths[peer.index] >= MAX_DEATHS:
                        job = given[peer.index]
                        where = f"round {job.round}, client {job.client_id}"
                        reason = f" ({error})" if str(error) else ""
                        raise RunError(f"{where}: its worker process died {MAX_DEATHS} times{reason}") from None
                    again.append(peer.index)
                    self.peers[self.peers.index(peer)] = self.spawn()
                    continue
                replies[peer.index], peer.index = found, None
            while following in replies:
                del given[following]
                reply = replies.pop(following)
                if isinstance(reply, Exception):  # in order: the first client that fails is the one that is named
                    raise reply
                yield reply
                following += 1


def answer(worker: Worker, broadcast: Tensors, job: Job) -> Reply | Exception:
    """The reply to a job, or what it raised, with a note that says where: tracebacks do not travel."""
    try:
        return worker.run(broadcast, job)
    except Exception as error:
        note_own_frame(error)
        error.add_note(f"In a worker process:\n{traceback.format_exc()}")
        return error
