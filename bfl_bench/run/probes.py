"""What a run can look at beside its own course: the round's replies under other rules and weights, and on disk."""

import math
from dataclasses import replace
from pathlib import Path

from bfl_bench import records
from bfl_bench.engines.worker import TEST, VALIDATION, Worker
from bfl_bench.evaluation import truth
from bfl_bench.evaluation.gaussian_noise import GaussianNoise
from bfl_bench.evaluation.posterior import describe_posterior
from bfl_bench.likelihood import AnyPrediction, Prediction
from bfl_bench.method import Method, Predictive, Replies, Tensors
from bfl_bench.rng import stream
from bfl_bench.run import uncertainty
from bfl_bench.run.checkpoint import write_tensors
from bfl_bench.run.predicting import Predictor
from bfl_bench.run.recorder import Row, global_values, set_values


def evaluate_alternative(
    worker: Worker, name: str, method: Method, state: Tensors, replies: Replies, round_: int
) -> Row:
    """What the round's global model would be under another rule; the run itself goes on with its own."""
    aggregated, server_metrics = method.server_update(
        worker.task, state, replies, stream(worker.seed, "server", round_)
    )
    predictor = Predictor.of(worker, method, aggregated, round_)
    prediction = predictor.predict(worker.sets[TEST].split.x)
    values: Row = {**global_values(worker.score(prediction, worker.sets[TEST].split.y)), **server_metrics}
    values |= predictor.columns | compare_with_truth(worker, predictor, prediction)
    return suffix(values | describe_state(worker, method, aggregated), name)


def evaluate_predictive(worker: Worker, kind: Predictive, state: Tensors, round_: int) -> Row:
    """What the round's global model would be worth if it predicted in another way."""
    predictor = Predictor.of(worker, worker.method, state, round_, kind)
    predictions = {name: predictor.predict(set_.split.x) for name, set_ in worker.sets.items()}
    row: Row = {**global_values(worker.score(predictions[TEST], worker.sets[TEST].split.y))}
    row |= compare_with_truth(worker, predictor, predictions[TEST])
    if VALIDATION in predictions:
        row |= set_values(VALIDATION, worker.score(predictions[VALIDATION], worker.sets[VALIDATION].split.y))
    classes = {name: one for name, one in predictions.items() if isinstance(one, Prediction)}
    return suffix(row | uncertainty.describe(worker, classes) | predictor.columns, kind)


def suffix(row: Row, name: str) -> Row:
    """Mark columns as those of another rule or way to predict; where that failed, all are empty."""
    nll = row["nll"]
    failed = nll is None or not math.isfinite(nll)
    return {
        f"{key}@{name}": None if failed or value is None or not math.isfinite(value) else value
        for key, value in row.items()
    }


def describe_state(worker: Worker, method: Method, state: Tensors) -> Row:
    """Compute the columns that `eval.posterior` adds for a state that is a Gaussian."""
    posterior = method.posterior(worker.task, state) if worker.settings.posterior else None
    return {} if posterior is None else {**describe_posterior(posterior)}


def compare_with_truth(worker: Worker, predictor: Predictor, prediction: AnyPrediction) -> Row:
    """Compute the columns of `eval.truth` for a model that predicts the test set so."""
    if worker.truth is None:
        return {}
    moments = predictor.moments() if worker.truth.identifiable else None
    if moments is not None and len(moments.mean) != len(worker.truth.moments.mean):  # a part of the parameters
        moments = None
    unit = worker.task.likelihood.unit if isinstance(worker.task.likelihood, GaussianNoise) else 1.0
    return {**truth.compare(worker.truth, moments, prediction, unit)}


def sweep_weights(worker: Worker, state: Tensors, replies: Replies, round_: int) -> list[Row]:
    """The global model of two clients' replies as the first one's weight goes from 0 to 1."""
    rows: list[Row] = []
    last = worker.settings.weight_points - 1
    for step in range(last + 1):
        task = replace(worker.task, sizes=(step, last - step))
        aggregated, _ = worker.method.server_update(task, state, replies, stream(worker.seed, "server", round_))
        values = global_values(Predictor.of(worker, worker.method, aggregated, round_).score(TEST))
        rows.append(
            {"round": round_, "weight": step / last, **{name: values.get(name) for name in ("ga", "nll", "ece")}}
        )
    return rows


def keep_messages(folder: Path, round_: int, replies: Replies) -> None:
    """The clients' messages as files, for whoever wants to study them."""
    (folder / records.MESSAGES).mkdir(exist_ok=True)
    for client_id, message in replies:
        write_tensors(folder / records.MESSAGES / f"round-{round_}-client-{client_id}.safetensors", message)
