"""How clients train in lockstep.

Methods are written for one client. Here every client's local update is a coroutine, a greenlet, that trains on
parameters of its own, a row of a matrix. Where `train` asks for the gradient of a minibatch, or for a step of plain
gradient descent, it waits; once all clients wait or are done, `models/copies.py` computes what they asked for. All
else, such as losses of a method's own, curvature and evaluation, one client does at a time, on the one network that
they share, which gets the client's parameters for it.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from bfl_bench.devices import bring, generators_of
from bfl_bench.engines.worker import Job, Reply, Worker
from bfl_bench.likelihood import Likelihood
from bfl_bench.method import Tensors
from bfl_bench.models.copies import Copies, copy_network, view_copies
from bfl_bench.models.flat import Entry, FlatModel, Objective

NUMBERS_IN_STEP = 440_000
"""Parameters of all clients that go in step, so that their rows stay in a cache of a few megabytes."""

FEWEST_IN_STEP = 8
"""Clients, of larger networks."""


class _Request(NamedTuple):
    """A minibatch of which a client asks for the gradient or, with a learning rate, for a step."""

    row: int
    x: Tensor
    y: Tensor
    noise: list[Tensor]
    lr: float | None


class Lockstep:
    def __init__(self, worker: Worker, num_jobs: int) -> None:
        model = worker.task.model
        self._worker, self._layout, self._device = worker, model.layout, model.vector.device
        self._num_jobs = num_jobs
        self._copies = copy_network(model, worker.task.data.input_shape)
        num = min(num_jobs, len(worker.client_indices), max(FEWEST_IN_STEP, NUMBERS_IN_STEP // model.layout.size))
        self._vectors = model.vector.new_empty(num, model.layout.size)
        self._gradients = model.gradient.new_zeros(num, model.layout.num_trainable)
        matrices = enumerate(zip(self._vectors, self._gradients, strict=True))
        loss = worker.task.likelihood.loss if _has_slopes(worker.task.likelihood) else None
        rows = [_Row(row, model, *both, self._copies, loss) for row, both in matrices]
        self._workers = [replace(worker, task=replace(worker.task, model=row)) for row in rows]

    def run(self, broadcast: Tensors, jobs: Iterable[Job]) -> Iterator[Reply]:
        """Take several jobs at a time, and of these so many together as there are rows, the largest clients first.

        So those that go in step have about as many steps. Replies wait until all of these jobs are done.
        """
        jobs = iter(jobs)
        while part := list(itertools.islice(jobs, self._num_jobs)):
            outcomes: dict[int, Reply | Exception] = {}
            by_size = sorted(part, key=lambda job: -len(self._worker.client_indices[job.client_id]))
            for start in range(0, len(part), len(self._workers)):
                outcomes |= self._run_together(broadcast, by_size[start : start + len(self._workers)])
            for job in part:
                outcome = outcomes.pop(job.client_id)
                if isinstance(outcome, Exception):  # in order: the first client that fails is the one that is named
                    raise outcome
                yield outcome

    def _run_together(self, broadcast: Tensors, jobs: Sequence[Job]) -> dict[int, Reply | Exception]:
        """Run each job until it asks for a step, answer all that ask, and so on until all are done.

        As the largest clients come first, the rows of those that go on when others are done lie side by side.
        """
        outcomes: dict[int, Reply | Exception] = {}
        seconds = [0.0] * len(jobs)
        waiting: list[_Request] = []

        def take_turn(row: int) -> None:
            job = jobs[row]
            try:
                outcomes[job.client_id] = self._workers[row].run(broadcast, job)
            except Exception as error:
                outcomes[job.client_id] = error

        turns = [greenlet(take_turn) for _ in jobs]

        def advance(row: int, given: object) -> None:
            started = time.perf_counter()
            request = turns[row].switch(given)
            seconds[row] += time.perf_counter() - started
            if request is not None:
                waiting.append(request)

        generators = generators_of(self._device)
        states = [generator.get_state() for generator in generators]
        try:
            for row in range(len(jobs)):
                advance(row, row)
            while waiting:
                requests = waiting.copy()
                waiting.clear()
                for batch in self._batches(requests):
                    started = time.perf_counter()
                    answers = self._answer(batch)
                    each = (time.perf_counter() - started) / len(batch)
                    for request, answer in zip(batch, answers, strict=True):
                        seconds[request.row] += each
                        advance(request.row, answer)
        finally:
            for turn in turns:
                if not turn.dead:
                    turn.throw()
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        for job, spent in zip(jobs, seconds, strict=True):
            if isinstance(outcome := outcomes[job.client_id], Reply):
                outcomes[job.client_id] = replace(outcome, train_seconds=spent - outcome.evaluation_seconds)
        return outcomes

    def _batches(self, requests: Sequence[_Request]) -> Iterable[list[_Request]]:
        """Put together what can be computed together, in the order of rows."""
        batches: dict[Any, list[_Request]] = {}
        for request in sorted(requests, key=lambda request: request.row):
            batches.setdefault((request.lr, request.x.shape[1:]), []).append(request)
        return batches.values()

    def _answer(self, batch: Sequence[_Request]) -> list[tuple[Tensor, Tensor]]:
        """Take the steps, or leave the gradients in the clients' rows; give each client its loss and outputs."""
        rows, lr = [request.row for request in batch], batch[0].lr
        matrix = self._gradients if lr is None else self._vectors
        where: slice | list[int] = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] < len(rows) else rows
        vectors = self._vectors[where]
        changed = matrix[where] if lr is None else vectors
        sizes = [len(request.y) for request in batch]
        most, likelihood = max(sizes), self._worker.task.likelihood
        x, y = _stack([request.x for request in batch], most), _stack([request.y for request in batch], most)
        noise = [_stack(layer, most) for layer in zip(*(request.noise for request in batch), strict=True)]
        counts = torch.tensor(sizes)[:, None]
        shares = bring((torch.arange(most) < counts) / counts, self._device)

        def change(entry: Entry, gradient: Tensor) -> None:
            if entry.stop > self._layout.num_trainable:
                return
            part = view_copies(entry, changed)
            if lr is None:
                part.copy_(gradient)
            else:
                part.add_(gradient, alpha=-lr)

        losses, outputs = self._copies.differentiate(
            vectors, x, noise, partial(likelihood.slopes, labels=y), shares, change
        )
        if isinstance(where, list):
            matrix[where] = changed
        each = zip(losses.unbind(), outputs.unbind(), sizes, strict=True)
        return [(own, values if size == most else values[:size]) for own, values, size in each]


def _has_slopes(likelihood: Likelihood) -> bool:
    """Tell whether the slopes are those of the loss: a class with a loss of its own may have inherited them."""
    owner = next(kind for kind in type(likelihood).__mro__ if "loss" in vars(kind))
    return "slopes" in vars(owner)


def _stack(parts: Sequence[Tensor], most: int) -> Tensor:
    """Stack minibatches (n, ...) to (copies, most, ...), the shorter ones with zeros behind."""
    if len({len(part) for part in parts}) == 1:
        return torch.stack(list(parts))
    stacked = parts[0].new_zeros(len(parts), most, *parts[0].shape[1:])
    for place, part in zip(stacked, parts, strict=True):
        place[: len(part)] = part
    return stacked


class _Row(FlatModel):
    """A client's parameters and gradient, rows of matrices.

    What only a network can do is done by the one that all share: whoever asks for it, or for a part of it, finds this
    client's parameters there until the client waits again.
    """

    def __init__(
        self,
        number: int,
        shared: FlatModel,
        vector: Tensor,
        gradient: Tensor,
        copies: Copies,
        loss: Callable[..., Tensor] | None,
    ) -> None:
        self._number, self._shared, self._copies, self._loss = number, shared, copies, loss
        self.layout, self.initial, self.vector, self.gradient = shared.layout, shared.initial, vector, gradient
        self._trainable = [
            (parameter, entry.view(vector), entry.view(gradient))
            for (parameter, _, _), entry in zip(shared._trainable, shared.layout.entries, strict=False)
        ]
        self._counters, self._places, self._storage = {}, shared._places, shared._storage
        self._draws, self._generators = copies.draws, generators_of(vector.device)

    def __getattr__(self, name: str) -> Any:
        shared = self.__dict__["_shared"]
        shared.vector.copy_(self.vector)
        return getattr(shared, name)

    def differentiate(
        self, x: Tensor, y: Tensor, objective: Objective, lr: float | None = None
    ) -> tuple[Tensor, Tensor]:
        module = self._shared.module
        plain = objective.extra is None and objective.loss == self._loss and y.dim() == 1
        if not plain or not module.training:
            return super().differentiate(x, y, objective, lr)
        noise = self._copies.draw(len(x), x) if self._draws else []
        states = [generator.get_state() for generator in self._generators] if self._draws else []
        hub = cast(greenlet, getcurrent().parent)
        found: tuple[Tensor, Tensor] = hub.switch(_Request(self._number, x, y, noise, lr))
        if not module.training:  # another client has evaluated
            module.train()
        for generator, state in zip(self._generators, states, strict=False):  # others have drawn from it
            generator.set_state(state)
        return found
