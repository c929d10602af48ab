"""How clients fare on their own test examples (VIRTUAL's metrics).

S is the server's model on all clients' examples; MT is each client's own model on its own, whichever it trained last. A
client without a local update so far answers with the initial server model. Models need not be kept: a client's own one
does not change between its local updates, so neither does its score.
"""

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from bfl_bench.engines.worker import TEST, Reply, Worker
from bfl_bench.likelihood import AnyPrediction, Scores
from bfl_bench.method import Tensors
from bfl_bench.rng import stream
from bfl_bench.run.recorder import Row, worst_tenth

SCORES = ("accuracy", "nll", "ece")  # of classes
NUMERIC_SCORES = ("rmse", "nll", "crps")


class Personal:
    """Accuracy, loss and calibration error of every client's own model; `scores` is what a checkpoint keeps.

    Where labels are numbers, the RMSE, the loss and the CRPS.
    """

    def __init__(self, worker: Worker, scores: dict[str, list[float]]) -> None:
        self._worker, self._own = worker, _own(worker)
        self._num_examples = {client: len(own) for client, own in self._own.items()}
        self.scores = scores

    @classmethod
    def begin(cls, worker: Worker, state: Tensors) -> "Personal":
        """With the initial server model for all clients."""
        test, rng = worker.sets[TEST].split, stream(worker.seed, "evaluate", 0)
        prediction = worker.predict(worker.method, state, test.x, worker.settings.draws, rng)
        found = {client: worker.score(prediction[own], test.y[own]) for client, own in _own(worker).items()}
        return cls(worker, {str(client): _values(scores) for client, scores in found.items()})

    def update(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            if reply.own_scores is not None:
                self.scores[str(reply.client_id)] = _values(reply.own_scores)

    def row(self, scores: Scores) -> Row:
        """The columns, given the server's scores on the test set, which is all clients' examples together."""
        first, losses = zip(*(self.scores[str(client)][:2] for client in self._num_examples), strict=True)
        loss: Row = {"s_loss": scores.values["nll"], "mt_loss": self._mean(losses)}
        if "accuracy" not in scores.values:
            return loss | {"s_rmse": scores.values["rmse"], "mt_rmse": self._mean(first)}
        return {
            "s_acc": scores.values["accuracy"],
            "s_loss": loss["s_loss"],
            "mt_acc": self._mean(first),
            "mt_loss": loss["mt_loss"],
            "worst10_own": worst_tenth(first),
        }

    def describe_clients(self, prediction: AnyPrediction) -> list[Row]:
        """Score the server's model and each client's own one on the client's test examples, one client after another.

        `prediction` is the server's of the test set. What a checkpoint of an older version did not keep is empty.
        """
        labels, rows = self._worker.sets[TEST].split.y, []
        for client, own in self._own.items():
            row: Row = {"client": client, "examples": len(own)}
            served = _values(self._worker.score(prediction[own], labels[own]))
            for model, values in (("s", served), ("mt", self.scores[str(client)])):
                row |= {f"{model}_{name}": value for name, value in zip(SCORES, values, strict=False)}
            rows.append(row)
        return rows

    def worst(self, rows: Sequence[Row]) -> Row:
        """The columns of `eval.uncertainty`: the clients' calibration errors, and the tenth that fares worst."""
        row: Row = {"mt_ece": self._mean([value or 0.0 for value in (row.get("mt_ece") for row in rows)])}
        for name in (f"{model}_{score}" for model in ("s", "mt") for score in ("nll", "ece")):
            row[f"worst10_{name}"] = -worst_tenth([-(row.get(name) or 0.0) for row in rows])
        return row

    def _mean(self, values: Iterable[float]) -> float:
        weights = self._num_examples.values()
        return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def _own(worker: Worker) -> dict[int, Tensor]:
    """Return, for each client that has test examples of its own, where they are."""
    num_clients = len(worker.task.sizes)
    found = {client: worker.sets[TEST].of(client) for client in range(num_clients)}
    return {client: own for client, own in found.items() if own is not None}


def _values(scores: Scores) -> list[float]:
    names = SCORES if "accuracy" in scores.values else NUMERIC_SCORES
    return [scores.values[name] for name in names]
