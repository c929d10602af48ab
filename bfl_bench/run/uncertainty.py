"""What the uncertainty field measures of the global model, out of the predictions that a round has made anyway.

Calibration and selective prediction on the test set; with validation examples, a temperature fitted on them and
conformal sets; with foreign sets, how well their examples are told from the test set's, and so those of clients that
never train. evaluation/ has the formulas.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from bfl_bench.engines.worker import TEST, UNSEEN, VALIDATION, Worker
from bfl_bench.evaluation import calibration, detection, selective
from bfl_bench.evaluation.conformal import conformal_coverage, conformal_threshold, coverage_of_clients, worst_covered
from bfl_bench.evaluation.temperature import apply_temperature, fit_temperature
from bfl_bench.likelihood import (
    Bin,
    Prediction,
    calibration_bins,
    expected_calibration_error,
    flatten_positions,
    negative_log_likelihood,
)
from bfl_bench.run.recorder import Row

NUM_ENTROPIES = 30  # bins of the histogram, from 0 to the entropy of the uniform distribution
MISSED = 0.1  # share of examples whose label a conformal set may miss


def describe(worker: Worker, predictions: Mapping[str, Prediction]) -> Row:
    """Compute the columns that `eval.uncertainty` and `eval.ood` add, from the predictions by set."""
    row: Row = {}
    if worker.settings.uncertainty:
        test = _flatten(worker, predictions, TEST)
        row |= _describe_test(*test, worker.settings.ece_bins)
        if VALIDATION in predictions:
            validation = _flatten(worker, predictions, VALIDATION)
            row |= _calibrate(validation, test, worker.settings.ece_bins) | _cover(worker, validation, test)
    for name in list_outside(worker):
        row |= _detect(name, predictions[TEST], predictions[name])
    return row


def list_outside(worker: Worker) -> list[str]:
    """Name the sets to be told from the test set: the foreign ones and, if asked for, the unseen clients' examples."""
    asked = [UNSEEN] if worker.settings.uncertainty else []
    return [name for name, set_ in worker.sets.items() if set_.foreign or name in asked]


def calibrate_bins(worker: Worker, prediction: Prediction, temperature: float) -> list[Bin]:
    """Make the reliability diagram of the test set after the temperature."""
    log_probabilities, labels = _flatten(worker, {TEST: prediction}, TEST)
    return calibration_bins(apply_temperature(log_probabilities, temperature), labels, worker.settings.ece_bins)


def trace_risk(worker: Worker, prediction: Prediction) -> list[Row]:
    """Take the risk-coverage curve of the test set at each percent of coverage."""
    curve = selective.risk_coverage_curve(*_flatten(worker, {TEST: prediction}, TEST)).tolist()
    places = [max(math.ceil(len(curve) * percent / 100), 1) - 1 for percent in range(1, 101)]
    return [{"coverage": percent / 100, "risk": curve[place]} for percent, place in enumerate(places, start=1)]


def count_entropies(worker: Worker, predictions: Mapping[str, Prediction]) -> list[Row]:
    """Count the examples of the test set and of those outside by the entropy of their predictions."""
    sets = [TEST, *list_outside(worker)]
    most = math.log(predictions[TEST].log_probabilities.shape[1])
    counts: dict[str, list[float]] = {}
    for name in sets:
        entropies = _entropy(predictions[name]).flatten().cpu()
        counts[name] = torch.histc(entropies, NUM_ENTROPIES, 0, most).tolist()  # the highest lies in the last bin
    width, rows = most / NUM_ENTROPIES, list[Row]()
    for number in range(NUM_ENTROPIES):
        row: Row = {"entropy": width * (number + 0.5)}
        rows.append(row | {name: int(found[number]) for name, found in counts.items()})
    return rows


def _flatten(worker: Worker, predictions: Mapping[str, Prediction], name: str) -> tuple[Tensor, Tensor]:
    return flatten_positions(predictions[name].log_probabilities, worker.sets[name].split.y)


def _describe_test(log_probabilities: Tensor, labels: Tensor, num_bins: int) -> Row:
    bins = calibration_bins(log_probabilities, labels, num_bins)
    signed = calibration.signed_calibration_error(bins)
    brier = calibration.brier_decomposition(log_probabilities, labels, num_bins)
    return {
        "ece_signed": signed.signed,
        "ece_over": signed.over,
        "ece_under": signed.under,
        "ece_adaptive": calibration.adaptive_calibration_error(log_probabilities, labels, num_bins),
        "ece_classwise": calibration.classwise_calibration_error(log_probabilities, labels, num_bins),
        "mce": calibration.maximum_calibration_error(bins),
        "brier_reliability": brier.reliability,
        "brier_resolution": brier.resolution,
        "brier_uncertainty": brier.uncertainty,
        "brier_within": brier.within,
        "aurc": selective.area_under_risk_coverage(log_probabilities, labels),
        "e_aurc": selective.excess_area_under_risk_coverage(log_probabilities, labels),
        "acc80": selective.accuracy_at_coverage(log_probabilities, labels, 0.8),
        "acc90": selective.accuracy_at_coverage(log_probabilities, labels, 0.9),
    }


def _calibrate(validation: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], num_bins: int) -> Row:
    """Fit a temperature on the validation set and score the test set with it."""
    temperature = fit_temperature(*validation)
    calibrated = apply_temperature(test[0], temperature)
    return {
        "temperature": temperature,
        "nll_calibrated": negative_log_likelihood(calibrated, test[1]),
        "ece_calibrated": expected_calibration_error(calibrated, test[1], num_bins),
    }


def _cover(worker: Worker, validation: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Row:
    """Measure conformal sets of the test set, whose threshold is found on the validation set."""
    threshold = conformal_threshold(*validation, MISSED)
    overall = conformal_coverage(*test, threshold)
    row: Row = {"coverage90": overall.coverage, "set_size90": overall.set_size}
    own = worker.sets[TEST].own
    if own is not None and len(test[1]) == len(worker.sets[TEST].split):  # sequences have no example per position
        clients = torch.empty(len(test[1]), dtype=torch.long, device=test[1].device)
        for client, examples in enumerate(own):
            clients[examples] = client
        coverages = coverage_of_clients(*test, threshold, clients, len(own))
        worst = coverages[worst_covered(coverages)]
        row |= {"coverage90_worst": worst.coverage, "set_size90_worst": worst.set_size}
    return row


def _detect(name: str, inside: Prediction, outside: Prediction) -> Row:
    """Measure how well scores tell the examples of another set from those of the test set."""
    scores = {"confidence": (_lack(inside), _lack(outside)), "entropy": (_entropy(inside), _entropy(outside))}
    if inside.expected_entropy is not None and outside.expected_entropy is not None:
        scores["information"] = (_information(inside), _information(outside))
    row: Row = {}
    for score, both in scores.items():
        pair = [values.flatten() for values in both]  # of sequences, every position
        row[f"auroc_{score}@{name}"] = detection.auroc(*pair)
        row[f"aupr_{score}@{name}"] = detection.average_precision(*pair)
        row[f"fpr95_{score}@{name}"] = detection.false_positive_rate_at_95(*pair)
    return row


def _lack(prediction: Prediction) -> Tensor:
    return detection.lack_of_confidence(prediction.log_probabilities)


def _entropy(prediction: Prediction) -> Tensor:
    return detection.entropy(prediction.log_probabilities)


def _information(prediction: Prediction) -> Tensor:
    assert prediction.expected_entropy is not None
    return detection.mutual_information(prediction.log_probabilities, prediction.expected_entropy)
