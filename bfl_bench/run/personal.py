"""How clients fare on their own test examples (VIRTUAL's metrics).

S is the server's model on all clients' examples; MT is each client's own model on its own, whichever it trained last. A
client without a local update so far answers with the initial server model. Models need not be kept: a client's own one
does not change between its local updates, so neither does its score.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bfl_bench.aggregators import aalv, eaa, moments, rklb, wb
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


RULES = {"wb": wb, "rklb": rklb, "eaa": eaa, "aalv": aalv, "moments": moments}


def personalise(worker: Worker, state: Tensors, replies: Iterable[Reply], round_: int) -> Row:
    """Score barycenters of each local posterior of the round and the new global one, for every weight of the former.

    No training and no message is needed for these (Jamoussi, Serra, Stavrou, Kountouris: "Cost-Free Personalization via
    Information-Geometric Projection in Bayesian Federated Learning", 2025, whose lambda is weight / (1 - weight)).
    What is no Gaussian, such as a bias, is averaged. Draws are those that the local model was evaluated with.
    """
    row: Row = {}
    settings, task = worker.settings, worker.task
    local = [reply for reply in replies if reply.local]
    for weight in settings.personalise if local else ():
        found: dict[str, list[tuple[int, float]]] = {"la": [], "mt_acc": [], "mt_loss": []}
        for reply in local:
            model = _barycenter(worker, state, reply.local, weight)
            if model is None:
                continue
            names, own = ("client", round_, reply.client_id), worker.sets[TEST].of(reply.client_id)
            everywhere = worker.score_local(model, names, None).values
            found["la"].append((task.sizes[reply.client_id], everywhere["accuracy"]))
            if own is not None:
                scores = worker.score_local(model, names, own).values
                found["mt_acc"].append((len(own), scores["accuracy"]))
                found["mt_loss"].append((len(own), scores["nll"]))
        ending = f"@{settings.personalise_rule}({weight:g})"
        row |= {f"{name}{ending}": _weighted_mean(values) for name, values in found.items() if values}
        if found["mt_acc"]:
            row[f"worst10_own{ending}"] = worst_tenth([accuracy for _, accuracy in found["mt_acc"]])
    return row


def _barycenter(worker: Worker, state: Tensors, local: Tensors, weight: float) -> Tensors | None:
    """Combine a client's posterior, with this weight, and the server's; None where one of them is no Gaussian yet."""
    method, task = worker.method, worker.task
    pair = [method.gaussian(task, model) for model in (local, state)]
    own, served = pair
    if own is None or served is None:
        return None
    means, variances = (torch.stack([a.double(), b.double()]) for a, b in zip(own, served, strict=True))
    weights = torch.tensor([weight, 1 - weight], dtype=torch.float64, device=means.device)
    mean, variance = RULES[worker.settings.personalise_rule](means, variances, weights)
    params = torch.lerp(state["params"], local["params"], weight)
    return method.with_gaussian(task, {**local, "params": params}, mean.to(params.dtype), variance)


def _weighted_mean(values: Iterable[tuple[int, float]]) -> float:
    pairs = list(values)
    return math.fsum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs)


def _own(worker: Worker) -> dict[int, Tensor]:
    """Return, for each client that has test examples of its own, where they are."""
    num_clients = len(worker.task.sizes)
    found = {client: worker.sets[TEST].of(client) for client in range(num_clients)}
    return {client: own for client, own in found.items() if own is not None}


def _values(scores: Scores) -> list[float]:
    names = SCORES if "accuracy" in scores.values else NUMERIC_SCORES
    return [scores.values[name] for name in names]
