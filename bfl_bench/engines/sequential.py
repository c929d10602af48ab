"""One client after the other, in this process."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bfl_bench.engines.worker import Job, Reply, Runner, Worker
from bfl_bench.method import Tensors


@dataclass(frozen=True)
class Sequential:
    """One client after the other in this process; a reply is handed on before the next client starts."""

    name: str

    def check(self, device: torch.device) -> None:
        return

    @contextmanager
    def start(self, worker: Worker) -> Iterator[Runner]:
        yield _OneByOne(worker)


@dataclass(frozen=True)
class _OneByOne:
    worker: Worker

    def run(self, broadcast: Tensors, jobs: Iterable[Job]) -> Iterator[Reply]:
        for job in jobs:
            yield self.worker.run(broadcast, job)
