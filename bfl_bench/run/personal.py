"""How clients fare on their own test examples (VIRTUAL's metrics).

S is the server's model on all clients' examples; MT is each client's own model on its own, whichever it trained last. A
client that has had no turn answers with the initial server model. Models need not be kept: a client's own one does
not change between its turns, so neither does its score.
"""

import math
from collections.abc import Iterable

from bfl_bench.engines.worker import Reply, Worker
from bfl_bench.evaluation.metrics import worst_tenth
from bfl_bench.evaluation.predict import Scores, score
from bfl_bench.method import Tensors
from bfl_bench.rng import stream
from bfl_bench.run.measure import Row


class Personal:
    """Accuracy and loss of every client's own model; `scores` is what a checkpoint keeps."""

    def __init__(self, worker: Worker, scores: dict[str, list[float]]) -> None:
        assert worker.own_test is not None
        self._num_examples = {client: len(own) for client, own in enumerate(worker.own_test) if len(own)}
        self.scores = scores

    @classmethod
    def begin(cls, worker: Worker, state: Tensors) -> "Personal":
        """With the initial server model for all clients."""
        assert worker.own_test is not None
        draws = worker.method.draws(worker.task, state, worker.settings.draws, stream(worker.seed, "evaluate", 0))
        predictions, settings = worker.predict(draws, worker.test.x), worker.settings
        found = {
            str(client): score(predictions[own], worker.test.y[own], settings.ece_bins, settings.nll_epsilon)
            for client, own in enumerate(worker.own_test)
            if len(own)
        }
        return cls(worker, {client: [scores.accuracy, scores.nll] for client, scores in found.items()})

    def update(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            if reply.own_scores is not None:
                self.scores[str(reply.client_id)] = [reply.own_scores.accuracy, reply.own_scores.nll]

    def row(self, scores: Scores) -> Row:
        """The columns, given the server's scores on the test set, which is all clients' examples together."""
        accuracies, losses = zip(*(self.scores[str(client)] for client in self._num_examples), strict=True)
        return {
            "s_acc": scores.accuracy,
            "s_loss": scores.nll,
            "mt_acc": self._mean(accuracies),
            "mt_loss": self._mean(losses),
            "worst10_own": worst_tenth(accuracies),
        }

    def _mean(self, values: Iterable[float]) -> float:
        weights = self._num_examples.values()
        return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
