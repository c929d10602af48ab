"""How long a run will take here, from a few timed steps and predictions."""

import math
import time
from dataclasses import dataclass, replace

import torch

from bfl_bench.engines.worker import TEST
from bfl_bench.errors import BflError
from bfl_bench.method import Client, Tensors
from bfl_bench.rng import stream
from bfl_bench.run.loop import Experiment

TIMED_STEPS = 10


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run on this machine, with one client after the other and without the server's work."""

    training: float
    evaluation: float

    def describe(self) -> str:
        parts = f"{self.training / 60:.1f} training, {self.evaluation / 60:.1f} evaluation"
        return (
            f"time: about {(self.training + self.evaluation) / 60:.1f} minutes ({parts}) on this machine, one client "
            f"after the other, by {TIMED_STEPS} timed steps"
        )


def describe_time(experiment: Experiment) -> str:
    """Say how long the run will take, or why that is not known."""
    try:
        return estimate(experiment).describe()
    except (BflError, RuntimeError, ValueError) as error:  # a method may need more than a few examples
        return f"time: not known ({next(iter(str(error).splitlines()), type(error).__name__)})"


def estimate(experiment: Experiment) -> Estimate:
    """Let a client of the first cohort train for about ten steps, and predict a batch of the test set."""
    worker = experiment.worker
    task, settings, local = worker.task, worker.settings, worker.task.local
    client = max(experiment.cohort(1), key=lambda client: task.sizes[client])
    epochs = min(local.epochs, TIMED_STEPS)  # what follows the last epoch keeps its share, as far as possible
    per_epoch = min(math.ceil(TIMED_STEPS / epochs), math.ceil(task.sizes[client] / local.batch_size))
    state = worker.method.init(task, stream(experiment.seed, "init"))
    _update(experiment, state, client, 1, 1)  # the first step of a process takes longer
    started = _now(task.model.vector)
    trained = _update(experiment, state, client, epochs, per_epoch)
    per_step = (_now(task.model.vector) - started) / (epochs * per_epoch)
    share = settings.local_share * len(worker.sets[TEST].split)
    num_global = experiment.count_due(settings.every)
    num_local = experiment.count_due(settings.local_every) * experiment.cohort_size
    examples = sum(len(set_.split) for set_ in worker.sets.values())
    evaluation = num_global * examples * _time_prediction(experiment, state, settings.draws)
    evaluation += num_local * share * _time_prediction(experiment, trained, settings.local_draws)
    return Estimate(experiment.count_steps() * per_step, evaluation)


def _update(experiment: Experiment, state: Tensors, client: int, epochs: int, per_epoch: int) -> Tensors:
    """Let a client train on a few of its examples; return its model."""
    worker = experiment.worker
    task = replace(worker.task, local=replace(worker.task.local, epochs=epochs))
    indices = worker.client_indices[client][: per_epoch * task.local.batch_size]
    view = Client(client, worker.train, indices, worker.augment)
    broadcast, memory = worker.method.broadcast(task, state), worker.method.init_client(task, state, client)
    return worker.method.client_update(task, broadcast, memory, view, stream(experiment.seed, "estimate")).local


def _time_prediction(experiment: Experiment, model: Tensors, draws: int) -> float:
    """Measure the seconds per example of predicting, on at most a batch."""
    worker = experiment.worker
    x = worker.sets[TEST].split.x[: worker.settings.batch_size]
    worker.predict(worker.method, model, x[:2], draws, stream(experiment.seed, "estimate"))
    started = _now(x)
    worker.predict(worker.method, model, x, draws, stream(experiment.seed, "estimate"))
    return (_now(x) - started) / len(x)


def _now(tensor: torch.Tensor) -> float:
    """Read the clock when the device has done what it was given."""
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
