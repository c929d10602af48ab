"""Clients that took part in no round: what the final model is worth to them, after so many local steps of their own."""

import math
from dataclasses import replace

from bfl_bench.engines.worker import UNSEEN, Worker
from bfl_bench.method import Client, Task, Tensors
from bfl_bench.rng import stream
from bfl_bench.run.recorder import Row


def measure(worker: Worker, state: Tensors) -> Row:
    """Let each unseen client take steps from the final state as the method does, and score it on its own examples.

    The steps are the first of one and the same local update, at the learning rate of the first round. Columns are means
    weighted by the number of test examples; after 0 steps, of the global model as it is.
    """
    row: Row = {}
    for num_steps in worker.settings.unseen_steps:
        found = [
            (len(own), _adapt_and_score(worker, state, client, num_steps))
            for client in worker.unseen
            if (own := worker.sets[UNSEEN].of(client)) is not None
        ]
        total = sum(num for num, _ in found)
        for position, name in enumerate(("unseen_acc", "unseen_loss")):
            row[f"{name}@{num_steps}"] = math.fsum(num * values[position] for num, values in found) / total
    return row


def limit_steps(task: Task, client_id: int, size: int, num_steps: int) -> Task:
    """Give the client its examples, and a local update of so many steps in as many epochs as they take."""
    sizes = (*task.sizes[:client_id], size, *task.sizes[client_id + 1 :])
    epochs = math.ceil(num_steps / math.ceil(size / task.local.batch_size))
    return replace(task, sizes=sizes, local=replace(task.local, epochs=epochs), max_steps=num_steps)


def _adapt_and_score(worker: Worker, state: Tensors, client_id: int, num_steps: int) -> tuple[float, float]:
    """Return accuracy and loss of the client's own model on its own test examples."""
    method, split, own = worker.method, worker.sets[UNSEEN].split, worker.sets[UNSEEN].of(client_id)
    assert own is not None
    model, num_draws = state, worker.settings.draws
    if num_steps:
        task = limit_steps(worker.task, client_id, len(worker.unseen[client_id]), num_steps)
        client = Client(client_id, worker.train, worker.unseen[client_id], worker.augment)
        memory, rng = method.init_client(task, state, client_id), stream(worker.seed, "unseen", client_id)
        model = method.client_update(task, method.broadcast(task, state), memory, client, rng).local
        num_draws = worker.settings.local_draws
    rng = stream(worker.seed, "unseen", client_id, "evaluate")
    values = worker.score(worker.predict(method, model, split.x[own], num_draws, rng), split.y[own]).values
    return values["accuracy"], values["nll"]
