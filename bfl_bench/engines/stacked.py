"""Clients of a round in lockstep: the steps that they ask for are taken as those of one batched network.

Results are those of one client after the other within rounding, and the same bytes at every repeat. `lockstep` does the
work; it needs greenlet, and is imported only where this engine is chosen.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from bfl_bench.checks import AtLeast
from bfl_bench.engines.worker import Runner, Worker
from bfl_bench.errors import ConfigError, UnsuitableError
from bfl_bench.method import Task
from bfl_bench.models.copies import copy_network


@dataclass(frozen=True)
class Stacked:
    name: str
    clients: Annotated[int, AtLeast(1)]

    def __post_init__(self) -> None:
        try:
            importlib.import_module("greenlet")
        except ImportError:
            allowed = "sequential or processes; greenlet has to be installed first: pip install -e '.[stacked]'"
            raise ConfigError("", self.name, allowed) from None

    def check(self, task: Task) -> None:
        try:
            copy_network(task.model, task.data.input_shape)
        except UnsuitableError as error:
            raise ConfigError("engine", self.name, f"another engine, or {error.needed}") from None

    @contextmanager
    def start(self, worker: Worker) -> Iterator[Runner]:
        from bfl_bench.engines.lockstep import Lockstep

        yield Lockstep(worker, self.clients)
