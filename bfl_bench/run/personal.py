"""How clients fare on their own test examples (VIRTUAL's metrics).

S is the server's model on all clients' examples; MT is each client's own model on its own, whichever it trained last. A
client without a local update so far answers with the initial server model. Models need not be kept: a client's own one
does not change between its local updates, so neither does its score.
"""

import math
from collections.abc import Iterable

from torch import Tensor

from bfl_bench.engines.worker import TEST, Reply, Worker
from bfl_bench.likelihood import Scores
from bfl_bench.method import Tensors
from bfl_bench.rng import stream
from bfl_bench.run.recorder import Row, worst_tenth


class Personal:
    """Accuracy and loss of every client's own model; `scores` is what a checkpoint keeps."""

    def __init__(self, worker: Worker, scores: dict[str, list[float]]) -> None:
        self._num_examples = {client: len(own) for client, own in _own(worker).items()}
        self.scores = scores

    @classmethod
    def begin(cls, worker: Worker, state: Tensors) -> "Personal":
        """With the initial server model for all clients."""
        test, rng = worker.sets[TEST].split, stream(worker.seed, "evaluate", 0)
        prediction = worker.predict(worker.method, state, test.x, worker.settings.draws, rng)
        found = {client: worker.score(prediction[own], test.y[own]) for client, own in _own(worker).items()}
        return cls(worker, {str(client): _pair(scores) for client, scores in found.items()})

    def update(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            if reply.own_scores is not None:
                self.scores[str(reply.client_id)] = _pair(reply.own_scores)

    def row(self, scores: Scores) -> Row:
        """The columns, given the server's scores on the test set, which is all clients' examples together."""
        accuracies, losses = zip(*(self.scores[str(client)] for client in self._num_examples), strict=True)
        return {
            "s_acc": scores.values["accuracy"],
            "s_loss": scores.values["nll"],
            "mt_acc": self._mean(accuracies),
            "mt_loss": self._mean(losses),
            "worst10_own": worst_tenth(accuracies),
        }

    def _mean(self, values: Iterable[float]) -> float:
        weights = self._num_examples.values()
        return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def _own(worker: Worker) -> dict[int, Tensor]:
    """Return, for each client that has test examples of its own, where they are."""
    num_clients = len(worker.task.sizes)
    found = {client: worker.sets[TEST].of(client) for client in range(num_clients)}
    return {client: own for client, own in found.items() if own is not None}


def _pair(scores: Scores) -> list[float]:
    return [scores.values["accuracy"], scores.values["nll"]]
