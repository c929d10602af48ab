"""The round loop: cohort, broadcast, local training, server update, evaluation, records, checkpoint."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bfl_bench import records
from bfl_bench.engines.worker import Engine, Job, Runner, Worker, check_finite
from bfl_bench.errors import DivergedError
from bfl_bench.method import Method, Tensors
from bfl_bench.rng import stream
from bfl_bench.run import probes
from bfl_bench.run.checkpoint import CheckpointFolder
from bfl_bench.run.measure import (
    Measured,
    Row,
    client_rows,
    metrics_row,
    num_bytes,
    peak_memory_mb,
    reliability_rows,
    write_summary,
)
from bfl_bench.run.personal import Personal

OnRound = Callable[[int, Row | None], None]
"""Called after every round with its number and, where it was evaluated, its row of metrics.csv."""


@dataclass(frozen=True)
class Experiment:
    """A run with everything loaded: what `run` needs besides a folder to write to."""

    worker: Worker
    engine: Engine
    seed: int
    rounds: int
    cohort_size: int
    checkpoint_every: int
    partition_info: Mapping[str, Any]
    alternatives: Mapping[str, Method] = field(default_factory=dict)  # evaluated on the same replies, by name
    start: Tensors | None = None  # another run's last state, to begin with

    def cohort(self, round_: int) -> list[int]:
        """The clients of a round, in ascending order; clients without examples are never drawn."""
        eligible = [client for client, size in enumerate(self.worker.task.sizes) if size > 0]
        chosen = torch.randperm(len(eligible), generator=stream(self.seed, "cohort", round_))[: self.cohort_size]
        return sorted(eligible[i] for i in chosen.tolist())

    def count_steps(self) -> int:
        """SGD steps of the whole run."""
        local, sizes = self.worker.task.local, self.worker.task.sizes
        rounds = (self.cohort(round_) for round_ in range(1, self.rounds + 1))
        return sum(math.ceil(sizes[client] / local.batch_size) for cohort in rounds for client in cohort) * local.epochs


def run(experiment: Experiment, folder: Path, on_round: OnRound) -> dict[str, Any]:
    """Run, or continue, an experiment in a folder that this process holds; returns what summary.json says."""
    (folder / records.SUMMARY).unlink(missing_ok=True)

    def summarise(status: str, reason: str | None) -> dict[str, Any]:
        return write_summary(folder, status, reason, experiment.rounds, experiment.partition_info)

    try:
        with experiment.engine.start(experiment.worker) as runner:
            _run_rounds(experiment, runner, folder, on_round)
    except DivergedError as error:
        return summarise("diverged", str(error))
    except KeyboardInterrupt:
        summarise("interrupted", None)
        raise
    return summarise("done", None)


def _run_rounds(experiment: Experiment, runner: Runner, folder: Path, on_round: OnRound) -> None:
    worker, method, task = experiment.worker, experiment.worker.method, experiment.worker.task
    tables = {
        records.METRICS: records.Table(folder / records.METRICS, records.METRICS_COLUMNS),
        records.TIMING: records.Table(folder / records.TIMING, records.TIMING_COLUMNS),
        records.CLIENTS: records.Table(folder / records.CLIENTS, records.CLIENTS_COLUMNS),
        records.WEIGHTS: records.Table(folder / records.WEIGHTS, records.WEIGHTS_COLUMNS),
        records.RELIABILITY: records.Table(folder / records.RELIABILITY, records.RELIABILITY_COLUMNS),
    }
    checkpoints = CheckpointFolder(folder / records.CHECKPOINT)
    saved = checkpoints.load(task.model.vector.device)
    if saved is None:
        state = method.init(task, stream(experiment.seed, "init"))
        state |= {name: tensor for name, tensor in (experiment.start or {}).items() if name in state}
        memories: dict[int, Tensors] = {}
        totals = {"bytes_up": 0, "bytes_down": 0}
        finished = 0
        personal = Personal.begin(worker, state) if worker.own_test is not None else None
    else:
        state, memories, totals, finished = saved.state, saved.memories, saved.notes["totals"], saved.round
        personal = Personal(worker, saved.notes["personal"]) if worker.own_test is not None else None
    for name, table in tables.items():
        table.resume(saved.notes["lengths"][name] if saved else 0)

    unsaved: dict[int, Tensors] = {}
    for round_ in range(finished + 1, experiment.rounds + 1):
        measured = Measured()
        cohort = experiment.cohort(round_)
        broadcast = method.broadcast(task, state)
        due = _is_due(round_, worker.settings.every, experiment.rounds)
        replies: Iterable[tuple[int, Tensors]] = _collect(
            experiment, runner, state, memories, broadcast, cohort, round_, measured
        )
        before = state
        started = time.perf_counter()
        swept, kept = round_ in worker.settings.weight_rounds, round_ in worker.settings.keep_messages
        if swept or kept or (due and experiment.alternatives):
            replies = list(replies)
        state, server_metrics = method.server_update(task, state, replies, stream(experiment.seed, "server", round_))
        check_finite({**state, **server_metrics}, f"round {round_}, server")
        wall_seconds = time.perf_counter() - started
        server_seconds = wall_seconds - measured.waited_seconds
        if personal is not None:
            personal.update(measured.replies)
        memories |= measured.memories
        unsaved |= measured.memories
        totals["bytes_up"] += measured.bytes_up
        totals["bytes_down"] += num_bytes(broadcast) * len(cohort)

        started = time.perf_counter()
        row: Row | None = None
        if due:
            scores = probes.score_global(worker, method, state, round_)
            check_finite({"test NLL": scores.nll}, f"round {round_}, server")
            row = metrics_row(round_, scores, measured, task.sizes)
            row |= {**totals, **server_metrics}
            if personal is not None:
                row |= personal.row(scores)
            if worker.known is not None:
                row["ae"] = worker.distance(state)
            for name, alternative in experiment.alternatives.items():
                row |= probes.evaluate_alternative(worker, name, alternative, before, replies, round_)
            tables[records.METRICS].append([row])
            tables[records.RELIABILITY].append(reliability_rows(round_, scores))
        if swept:
            tables[records.WEIGHTS].append(probes.sweep_weights(worker, before, replies, round_))
        if kept:
            probes.keep_messages(folder, round_, replies)
        evaluation_seconds = time.perf_counter() - started + sum(r.evaluation_seconds for r in measured.replies)
        tables[records.CLIENTS].append(client_rows(round_, measured, task.sizes))
        tables[records.TIMING].append(
            [
                {
                    "round": round_,
                    "client_seconds": sum(reply.train_seconds for reply in measured.replies),
                    "server_seconds": server_seconds,
                    "evaluation_seconds": evaluation_seconds,
                    "wall_seconds": wall_seconds,
                    "peak_memory_mb": peak_memory_mb(task.model.vector.device),
                }
            ]
        )
        if round_ % experiment.checkpoint_every == 0 or round_ == experiment.rounds:
            lengths = {name: table.length for name, table in tables.items()}
            notes = {"totals": totals, "lengths": lengths, "personal": personal.scores if personal else {}}
            checkpoints.save(round_, state, unsaved, notes)
            unsaved = {}
        on_round(round_, row)


def _collect(
    experiment: Experiment,
    runner: Runner,
    state: Tensors,
    memories: Mapping[int, Tensors],
    broadcast: Tensors,
    cohort: list[int],
    round_: int,
    measured: Measured,
) -> Iterator[tuple[int, Tensors]]:
    """The cohort's messages as they come, noting in `measured` all but the messages."""
    worker = experiment.worker
    evaluate_local = _is_due(round_, worker.settings.local_every, experiment.rounds)
    jobs = (
        Job(
            round_,
            client,
            memories[client] if client in memories else worker.method.init_client(worker.task, state, client),
            evaluate_local,
        )
        for client in cohort
    )
    asked = time.perf_counter()
    for reply in runner.run(broadcast, jobs):
        measured.waited_seconds += time.perf_counter() - asked
        if reply.memory is not None:
            measured.memories[reply.client_id] = reply.memory
        measured.bytes_up += num_bytes(reply.message)
        message = reply.message
        measured.replies.append(replace(reply, message={}, memory=None))
        yield reply.client_id, message
        asked = time.perf_counter()


def _is_due(round_: int, every: int, last: int) -> bool:
    return round_ == last or (every > 0 and round_ % every == 0)
