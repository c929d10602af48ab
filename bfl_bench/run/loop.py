"""The round loop: cohort, broadcast, local updates, server update, evaluation, records, checkpoint."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bfl_bench import records
from bfl_bench.engines.worker import (
    TEST,
    UNSEEN,
    Engine,
    Job,
    Runner,
    Worker,
    check_finite,
    check_numbers,
    check_tensors,
)
from bfl_bench.errors import DivergedError, PartError
from bfl_bench.likelihood import Bin, Prediction
from bfl_bench.method import Method, Replies, Tensors
from bfl_bench.rng import stream
from bfl_bench.run import probes, shift, uncertainty, unseen
from bfl_bench.run.checkpoint import CheckpointFolder, Memories, check_kinds
from bfl_bench.run.observers import Observer, Position, RunInfo
from bfl_bench.run.personal import Personal, personalise
from bfl_bench.run.predicting import Predictor
from bfl_bench.run.recorder import Measured, Notes, Recorder, Row, num_bytes, set_values, write_summary

MOST_COUNTED = 10_000  # rounds whose steps are counted one by one


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A run with everything loaded: what `run` needs besides a folder to write to."""

    worker: Worker
    engine: Engine
    seed: int
    cohort_size: int
    checkpoint_every: int
    keep_checkpoint: bool = True  # that of the last round, once the run is done
    partition_info: Mapping[str, Any]
    in_turn: bool = False  # one client a round, in ascending order, again and again
    alternatives: Mapping[str, Method] = field(default_factory=dict)  # evaluated on the same replies, by name
    start: Tensors | None = None  # another run's last state, to begin with

    @property
    def rounds(self) -> int:
        return self.worker.rounds

    def cohort(self, round_: int) -> list[int]:
        """Choose the clients of a round, in ascending order; clients without examples never are."""
        eligible = [client for client, size in enumerate(self.worker.task.sizes) if size > 0]
        if self.in_turn:
            return [eligible[(round_ - 1) % len(eligible)]]
        chosen = torch.randperm(len(eligible), generator=stream(self.seed, "cohort", round_))[: self.cohort_size]
        return sorted(eligible[i] for i in chosen.tolist())

    def count_steps(self) -> int:
        """Count the local steps of the whole run; of a very long one as if it went on as it begins."""
        counted = min(self.rounds, MOST_COUNTED)
        steps = sum(sum(self.steps_of(self.cohort(round_))) for round_ in range(1, counted + 1))
        return steps * self.rounds // counted

    def steps_of(self, cohort: Sequence[int]) -> list[int]:
        """Count the local steps of each client of a cohort."""
        local, sizes = self.worker.task.local, self.worker.task.sizes
        return [math.ceil(sizes[client] / local.batch_size) * local.epochs for client in cohort]

    def is_due(self, round_: int, every: int) -> bool:
        """Tell whether what is done every so many rounds is done in this one; in the last it always is."""
        return round_ == self.rounds or (every > 0 and round_ % every == 0)

    def count_due(self, every: int) -> int:
        """Count the rounds in which it is done."""
        return math.ceil(self.rounds / every) if every > 0 else 1


def run(experiment: Experiment, folder: Path, observers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Run, or continue, an experiment in a folder that this process holds; return what summary.json says."""
    (folder / records.SUMMARY).unlink(missing_ok=True)
    begun: list[Observer] = []
    position = Position()

    def end(status: str, reason: str | None) -> dict[str, Any]:
        summary = write_summary(
            folder, status, reason, experiment.rounds, experiment.partition_info, experiment.worker.settings.scored
        )
        for observer in begun:
            observer.end(summary)
        return summary

    try:
        with experiment.engine.start(experiment.worker) as runner:
            course = _Course(experiment, folder, position)
            info = RunInfo(folder=folder, rounds=experiment.rounds, finished=course.finished, position=position)
            for observer in observers:
                observer.begin(info)
                begun.append(observer)
            for round_ in range(course.finished + 1, experiment.rounds + 1):
                row = course.advance(runner, round_)
                for observer in observers:
                    observer.round(round_, row)
            course.finish()
    except DivergedError as error:
        return end("diverged", str(error))
    except KeyboardInterrupt:
        end("interrupted", None)
        raise
    finally:
        position.over = True
    summary = end("done", None)
    if not experiment.keep_checkpoint:
        CheckpointFolder(folder / records.CHECKPOINT).drop()
    return summary


def _check_server(who: str, returned: object) -> tuple[Tensors, dict[str, float]]:
    """Raise where a method of a user's own did not return a state and metrics."""
    what = f"{who}: server_update returned"
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise PartError(f"{what} {type(returned).__name__}; expected: the state and metrics, two dictionaries")
    check_tensors(f"{what} as state", returned[0])
    check_numbers(f"{what} as metrics", returned[1])
    return returned


class _Course:
    """A run between two rounds: the server's state, the clients' private states, the recorder, the checkpoint."""

    def __init__(self, experiment: Experiment, folder: Path, position: Position) -> None:
        worker = experiment.worker
        self._position = position
        self._experiment, self._worker, self._folder = experiment, worker, folder
        self._checkpoints = CheckpointFolder(folder / records.CHECKPOINT)
        device = worker.task.model.vector.device
        saved = self._checkpoints.load(device)
        has_own_test = worker.sets[TEST].own is not None
        initial = worker.method.init(worker.task, stream(experiment.seed, "init"))
        check_tensors(f"method {worker.method.name}: init returned", initial)
        if saved is None:
            self.finished = 0
            self._state = initial
            self._state |= {name: value for name, value in (experiment.start or {}).items() if name in self._state}
            self._memories = Memories(folder / records.CHECKPOINT, device)
            notes = Notes()
            self._personal = Personal.begin(worker, self._state) if has_own_test else None
        else:
            check_kinds(folder / records.CHECKPOINT, saved.state, initial)
            for client, memory in saved.memories.items():
                where = folder / records.CHECKPOINT / f"client {client}"
                check_kinds(where, memory, worker.method.init_client(worker.task, initial, client))
            self.finished, self._state, self._memories = saved.round, saved.state, saved.memories
            notes = saved.notes
            self._personal = Personal(worker, notes.personal) if has_own_test else None
        self._recorder = Recorder(folder, worker.task.sizes, notes)

    def finish(self) -> None:
        self._checkpoints.finish()

    def advance(self, runner: Runner, round_: int) -> Row | None:
        """Play a round, evaluate it where that is due, and keep what has to be kept."""
        before = self._state
        measured, replies = self._play(runner, round_)
        started = time.perf_counter()
        row = self._evaluate(round_, before, measured, replies)
        settings, recorder = self._worker.settings, self._recorder
        if round_ in settings.weight_rounds:
            recorder.record_weights(probes.sweep_weights(self._worker, before, replies, round_))
        if round_ in settings.keep_messages:
            probes.keep_messages(self._folder, round_, replies)
        measured.evaluation_seconds = time.perf_counter() - started
        recorder.record_clients(round_, measured)
        recorder.record_times(round_, measured, self._worker.task.model.vector.device)
        if round_ % self._experiment.checkpoint_every == 0 or round_ == self._experiment.rounds:
            notes = recorder.notes(self._personal.scores if self._personal else {})
            memories = self._memories
            changed, early = memories.unwritten(), memories.early()
            memories.settle(self._checkpoints.save(round_, self._state, changed, notes, recorder.paths, early))
        return row

    def _play(self, runner: Runner, round_: int) -> tuple[Measured, list[tuple[int, Tensors]]]:
        """Let the cohort train and the server update; keep the replies where something else wants to see them."""
        worker, method, settings = self._worker, self._worker.method, self._worker.settings
        cohort = self._experiment.cohort(round_)
        self._position.begin(round_, self._experiment.steps_of(cohort))
        broadcast = method.broadcast(worker.task, self._state)
        measured = Measured(bytes_down=num_bytes(broadcast) * len(cohort))
        incoming = self._collect(runner, broadcast, cohort, round_, measured)
        kept: list[tuple[int, Tensors]] = []
        started = time.perf_counter()
        alternatives = self._experiment.alternatives and self._experiment.is_due(round_, settings.every)
        if alternatives or round_ in settings.weight_rounds or round_ in settings.keep_messages:
            kept = list(incoming)
            incoming = iter(kept)
        rng = stream(self._experiment.seed, "server", round_)
        returned: object = method.server_update(worker.task, self._state, incoming, rng)
        self._state, measured.server_metrics = _check_server(f"method {method.name}, round {round_}", returned)
        if (unread := next(incoming, None)) is not None:
            what = f"method {method.name}: server_update did not read the reply of client {unread[0]}"
            raise PartError(f"{what}; expected: all {len(cohort)} replies of the cohort")
        check_finite({**self._state, **measured.server_metrics}, f"round {round_}, server")
        measured.wall_seconds = time.perf_counter() - started
        measured.server_seconds = measured.wall_seconds - measured.waited_seconds
        self._recorder.count(measured)
        if self._personal is not None:
            self._personal.update(measured.replies)
        return measured, kept

    def _evaluate(self, round_: int, before: Tensors, measured: Measured, replies: Replies) -> Row | None:
        worker = self._worker
        if not self._experiment.is_due(round_, worker.settings.every):
            return None
        predictor = Predictor.of(worker, worker.method, self._state, round_)
        predictions = {name: predictor.predict(set_.split.x) for name, set_ in worker.sets.items()}
        labelled = {name: set_.split.y for name, set_ in worker.sets.items() if not set_.foreign}
        scores = {name: worker.score(predictions[name], y) for name, y in labelled.items()}
        check_finite({"test NLL": scores[TEST].values["nll"]}, f"round {round_}, server")
        row = self._recorder.metrics_row(round_, scores, measured)
        row |= probes.describe_state(worker, worker.method, self._state)
        row |= probes.compare_with_truth(worker, predictor, predictions[TEST])
        if self._personal is not None:
            row |= self._personal.row(scores[TEST])
            if worker.settings.uncertainty:
                own = self._personal.describe_clients(predictions[TEST])
                self._recorder.record(records.OWN, round_, own)
                row |= self._personal.worst(own)
        if worker.reference_posterior is not None:
            row["ae"] = worker.distance(self._state, worker.reference_posterior)
        for name, alternative in self._experiment.alternatives.items():
            row |= probes.evaluate_alternative(worker, name, alternative, before, replies, round_)
        row |= personalise(worker, self._state, measured.replies, round_)
        for name in scores:
            if name != TEST:
                row |= set_values(name, scores[name])
        classes = {name: one for name, one in predictions.items() if isinstance(one, Prediction)}
        row |= uncertainty.describe(worker, classes) | predictor.columns
        temperature, calibrated = row.get("temperature"), list[Bin]()
        if temperature is not None:
            calibrated = uncertainty.calibrate_bins(worker, classes[TEST], temperature)
        for kind in worker.settings.also_predict:
            row |= probes.evaluate_predictive(worker, kind, self._state, round_)
        if round_ == worker.rounds:
            row |= self._record_last(round_, predictor, classes)
        self._recorder.record_metrics(row, scores[TEST].bins, calibrated)
        return row

    def _record_last(self, round_: int, predictor: Predictor, predictions: Mapping[str, Prediction]) -> Row:
        """Write what is drawn of the final model alone; return the columns of metrics.csv among it."""
        worker, recorder = self._worker, self._recorder
        if worker.settings.uncertainty:
            recorder.record(records.RISK, round_, uncertainty.trace_risk(worker, predictions[TEST]))
        if uncertainty.list_outside(worker):
            recorder.record(records.ENTROPY, round_, uncertainty.count_entropies(worker, predictions))
        row = unseen.measure(worker, self._state) if UNSEEN in worker.sets else {}
        return row | (recorder.record_shift(round_, shift.measure(worker, predictor)) if worker.settings.shift else {})

    def _collect(
        self, runner: Runner, broadcast: Tensors, cohort: Sequence[int], round_: int, measured: Measured
    ) -> Iterator[tuple[int, Tensors]]:
        """Yield the cohort's messages as they come, noting in `measured` all but the messages."""
        worker, memories = self._worker, self._memories
        evaluate_local = self._experiment.is_due(round_, worker.settings.local_every)
        jobs = (
            Job(
                round=round_,
                client_id=client,
                memory=memories[client]
                if client in memories
                else worker.method.init_client(worker.task, self._state, client),
                evaluate_local=evaluate_local,
            )
            for client in cohort
        )
        asked = time.perf_counter()
        for reply in runner.run(broadcast, jobs):
            measured.waited_seconds += time.perf_counter() - asked
            if reply.memory:
                memories.put(reply.client_id, round_, reply.memory)
            measured.bytes_up += num_bytes(reply.message)
            measured.replies.append(replace(reply, message={}, memory={}))
            self._position.reply()
            yield reply.client_id, reply.message
            asked = time.perf_counter()
