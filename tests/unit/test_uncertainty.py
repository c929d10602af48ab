"""What `eval.uncertainty` and `eval.ood` add to metrics.csv: the right function on the right set, nothing unasked."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bfl_bench import records
from bfl_bench.data.dataset import Split
from bfl_bench.engines.worker import TEST, UNKNOWN, VALIDATION, EvaluationSet, Worker
from bfl_bench.errors import ConfigError
from bfl_bench.evaluation import calibration, detection, selective
from bfl_bench.evaluation.conformal import conformal_coverage, conformal_threshold
from bfl_bench.evaluation.temperature import apply_temperature, fit_temperature
from bfl_bench.likelihood import (
    Prediction,
    calibration_bins,
    expected_calibration_error,
    negative_log_likelihood,
)
from bfl_bench.method import Tensors
from bfl_bench.run import uncertainty
from bfl_bench.run.checkpoint import read_state
from tests.composing import SMALL, experiment, resolve, run_in

FEW = [*SMALL, "rounds=2", "eval.every=2", "eval.ece_bins=7"]
IMAGES = [f"data_dir={records.STAND_IN}", "dataset=mnist", "model.hidden=[8]", "num_clients=3"]
IMAGES += ["rounds=1", "local.epochs=1"]
DIGITS = ["method=fedavg", "model.hidden=[8]", "num_clients=3", "rounds=2", "eval.every=2"]


def run(folder: Path, *overrides: str) -> tuple[dict[str, records.Cell], Worker, Tensors]:
    """The only row of metrics.csv, and what it takes to compute it again."""
    run_in(folder, *overrides)
    (row,) = records.read_table(folder / records.METRICS)
    return row, experiment(*overrides).worker, read_state(folder, torch.device("cpu"))


def predict(worker: Worker, state: Tensors, name: str, round_: int) -> Prediction:
    return worker.predict_global(name, worker.method, state, round_)


def test_nothing_is_added_unasked(tmp_path: Path) -> None:
    row, worker, _ = run(tmp_path, *FEW, "method=fedavg", "partition.validation=0.25")
    assert not {"temperature", "aurc", "mce", "coverage90"} & row.keys()
    assert set(worker.sets) == {TEST, VALIDATION}


@pytest.mark.parametrize("method", ["fedavg", "fvb"])
def test_the_test_set_is_described(method: str, tmp_path: Path) -> None:
    row, worker, state = run(tmp_path, *FEW, f"method={method}", "eval.uncertainty=true")
    logp, y = predict(worker, state, TEST, 2).log_probabilities, worker.sets[TEST].split.y
    expected = {
        "ece_adaptive": calibration.adaptive_calibration_error(logp, y, 7),
        "ece_classwise": calibration.classwise_calibration_error(logp, y, 7),
        "aurc": selective.area_under_risk_coverage(logp, y),
        "acc80": selective.accuracy_at_coverage(logp, y, 0.8),
        "acc90": selective.accuracy_at_coverage(logp, y, 0.9),
    }
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-9), name
    numbers = {name: float(value) for name, value in row.items() if value is not None}
    assert numbers["ece_over"] + numbers["ece_under"] == pytest.approx(numbers["ece"])
    assert numbers["ece_over"] - numbers["ece_under"] == pytest.approx(numbers["ece_signed"])
    parts = numbers["brier_reliability"] - numbers["brier_resolution"] + numbers["brier_uncertainty"]
    assert parts + numbers["brier_within"] == pytest.approx(numbers["brier"])
    assert 0 <= numbers["e_aurc"] <= numbers["aurc"]
    assert numbers["mce"] >= numbers["ece"]
    assert "temperature" not in row  # there is no validation set to fit it on


def test_temperature_and_conformal_sets_come_from_validation(tmp_path: Path) -> None:
    row, worker, state = run(tmp_path, *FEW, "method=fedavg", "eval.uncertainty=true", "partition.validation=0.3")
    logp, y = predict(worker, state, TEST, 2).log_probabilities, worker.sets[TEST].split.y
    held, labels = predict(worker, state, VALIDATION, 2).log_probabilities, worker.sets[VALIDATION].split.y
    temperature = fit_temperature(held, labels)
    assert row["temperature"] == pytest.approx(temperature, rel=1e-9)
    assert temperature != pytest.approx(fit_temperature(logp, y), rel=1e-3)  # the test set's own would be another
    calibrated = apply_temperature(logp, temperature)
    assert row["nll_calibrated"] == pytest.approx(negative_log_likelihood(calibrated, y), rel=1e-9)
    assert row["ece_calibrated"] == pytest.approx(expected_calibration_error(calibrated, y, 7), rel=1e-9)
    covered = conformal_coverage(logp, y, conformal_threshold(held, labels, 0.1))
    assert (row["coverage90"], row["set_size90"]) == (covered.coverage, covered.set_size)
    assert "coverage90_worst" not in row


def test_the_worst_client_is_the_one_whose_labels_are_missed_most(tmp_path: Path) -> None:
    options = [*FEW, "method=fedavg", "eval.uncertainty=true", "partition.validation=0.3", "partition.test=per_client"]
    row, worker, state = run(tmp_path, *options)
    test, own = worker.sets[TEST].split, worker.sets[TEST].own
    assert own is not None
    logp = predict(worker, state, TEST, 2).log_probabilities
    held = predict(worker, state, VALIDATION, 2).log_probabilities
    threshold = conformal_threshold(held, worker.sets[VALIDATION].split.y, 0.1)
    found = [conformal_coverage(logp[part], test.y[part], threshold) for part in own if len(part)]
    worst = min(found, key=lambda client: client.coverage)
    assert len({client.coverage for client in found}) > 1
    assert (row["coverage90_worst"], row["set_size90_worst"]) == (worst.coverage, worst.set_size)
    assert worst.set_size != pytest.approx(max(client.set_size for client in found))


def test_foreign_examples_are_told_from_those_of_the_test_set(tmp_path: Path) -> None:
    """The stand-ins of all datasets are the same images, so that nothing can tell them apart: half of all pairs."""
    row, worker, state = run(tmp_path, *IMAGES, "method=fvb", "eval.draws=3", "eval.ood=[fashion_mnist]")
    assert row["auroc_entropy@fashion_mnist"] == pytest.approx(0.5)
    assert not any(name.startswith("fashion_mnist_") for name in row)  # nobody classifies them
    brighter = Split(worker.sets[TEST].split.x * 1.3 + 0.1, worker.sets[TEST].split.y)
    worker = replace(worker, sets=worker.sets | {"fashion_mnist": EvaluationSet(brighter, foreign=True)})
    predictions = {name: predict(worker, state, name, 1) for name in worker.sets}
    found = uncertainty.describe(worker, predictions)
    inside, outside = predictions[TEST], predictions["fashion_mnist"]
    assert inside.expected_entropy is not None
    assert outside.expected_entropy is not None
    pairs = {
        "confidence": [1 - p.log_probabilities.double().exp().amax(1) for p in (inside, outside)],
        "entropy": [detection.entropy(p.log_probabilities) for p in (inside, outside)],
        "information": [
            detection.mutual_information(inside.log_probabilities, inside.expected_entropy),
            detection.mutual_information(outside.log_probabilities, outside.expected_entropy),
        ],
    }
    for score, (low, high) in pairs.items():
        assert found[f"auroc_{score}@fashion_mnist"] == pytest.approx(detection.auroc(low, high), rel=1e-9)
        assert found[f"aupr_{score}@fashion_mnist"] == pytest.approx(detection.average_precision(low, high), rel=1e-9)
        expected = detection.false_positive_rate_at_95(low, high)
        assert found[f"fpr95_{score}@fashion_mnist"] == pytest.approx(expected, rel=1e-9)
    assert len({found[f"auroc_{score}@fashion_mnist"] for score in pairs}) == 3
    assert found["auroc_entropy@fashion_mnist"] != pytest.approx(0.5, abs=0.01)


def test_one_member_has_no_mutual_information(tmp_path: Path) -> None:
    row, _, _ = run(tmp_path, *IMAGES, "method=fedavg", "eval.ood=[fashion_mnist]")
    assert "auroc_entropy@fashion_mnist" in row
    assert "auroc_information@fashion_mnist" not in row


def test_foreign_inputs_are_normalised_by_the_training_datas_constants() -> None:
    foreign = experiment(*IMAGES, "eval.ood=[fashion_mnist]").worker.sets["fashion_mnist"].split.x
    own = experiment(f"data_dir={records.STAND_IN}", "dataset=fashion_mnist").worker.sets[TEST].split.x
    pixels = own * 0.3530 + 0.2860  # back by the constants of Fashion-MNIST
    torch.testing.assert_close(foreign, (pixels - 0.1307) / 0.3081, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ("[cifar10]", r"eval\.ood: got 'cifar10', allowed: datasets with inputs of shape \(1, 28, 28\)"),
        ("[nothing]", r"eval\.ood: got 'nothing', allowed: abalone, "),
        ("[mnist]", r"eval\.ood: got 'mnist', allowed: another dataset"),
        ("mnist", r"eval\.ood: got 'mnist', allowed: a list of names of datasets"),
    ],
)
def test_sets_that_cannot_be_compared_are_refused(names: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        experiment(*IMAGES, f"eval.ood={names}")


def test_datasets_are_filled_in_like_rules() -> None:
    assert resolve(*IMAGES, "eval.ood=[fashion_mnist]")["eval"]["ood"]["fashion_mnist"]["source"] == "fashion_mnist"


def test_classes_that_nobody_learns_are_foreign(tmp_path: Path) -> None:
    row, worker, state = run(tmp_path, *DIGITS, "partition.unknown_classes=[7,0]")
    whole = experiment(*DIGITS)
    known, foreign = worker.sets[TEST].split, worker.sets[UNKNOWN].split
    y = whole.worker.sets[TEST].split.y
    assert torch.equal(foreign.x, whole.worker.sets[TEST].split.x[(y == 7) | (y == 0)])
    kept = y[(y != 7) & (y != 0)]
    renumbered = {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 8: 6, 9: 7}
    assert known.y.tolist() == [renumbered[label] for label in kept.tolist()]
    assert set(worker.train.y.tolist()) == set(range(8))
    labels = whole.worker.train.y
    assert len(worker.train) == int(((labels != 7) & (labels != 0)).sum())
    inside, outside = (predict(worker, state, name, 2).log_probabilities for name in (TEST, UNKNOWN))
    assert inside.shape[1] == 8  # no output of the network is theirs
    expected = detection.auroc(detection.entropy(inside), detection.entropy(outside))
    assert row["auroc_entropy@unknown_classes"] == pytest.approx(expected)
    assert expected > 0.6


def test_a_search_does_not_see_test_examples_of_unknown_classes() -> None:
    options = [*DIGITS, "partition.unknown_classes=[7]", "partition.validation=0.3", "eval.scored=validation"]
    assert set(experiment(*options).worker.sets) == {TEST}


def test_natural_clients_keep_what_is_left_of_theirs() -> None:
    options = ["dataset=mnist_writers", "partition=natural", f"data_dir={records.STAND_IN}", "num_clients=4"]
    before, after = (experiment(*options, *more).worker for more in ([], ["partition.unknown_classes=[1]"]))
    for worker in (before, after):
        assert worker.sets[TEST].own is not None
    for client in range(4):
        labels = before.train.y[before.client_indices[client]]
        left = [label - (label > 1) for label in labels.tolist() if label != 1]
        assert after.train.y[after.client_indices[client]].tolist() == left


@pytest.mark.parametrize("classes", ["[10]", "[1,1]", "[0,1,2,3,4,5,6,7,8]", "[-1]", "3"])
def test_unknown_classes_that_cannot_be_are_refused(classes: str) -> None:
    with pytest.raises(ConfigError, match=r"partition\.unknown_classes: got "):
        experiment(*DIGITS, f"partition.unknown_classes={classes}")


def test_every_client_is_scored_on_its_own_examples(tmp_path: Path) -> None:
    options = [*FEW, "method=fedavg", "eval.uncertainty=true", "partition.test=per_client"]
    row, worker, state = run(tmp_path, *options)
    test, own = worker.sets[TEST].split, worker.sets[TEST].own
    assert own is not None
    logp = predict(worker, state, TEST, 2).log_probabilities
    lines = records.read_table(tmp_path / records.OWN)
    assert [line["client"] for line in lines] == [client for client, part in enumerate(own) if len(part)]
    for line in lines:
        part = own[int(line["client"] or 0)]
        assert line["examples"] == len(part)
        assert line["s_nll"] == pytest.approx(negative_log_likelihood(logp[part], test.y[part]))
        assert line["s_ece"] == pytest.approx(expected_calibration_error(logp[part], test.y[part], 7))
    numbers = {name: [float(line[name] or 0) for line in lines] for name in lines[0]}
    for name in ("s_nll", "s_ece", "mt_nll", "mt_ece"):  # of five clients, the worst
        assert row[f"worst10_{name}"] == pytest.approx(max(numbers[name]))
        assert min(numbers[name]) < max(numbers[name])
    for column, name in {"mt_acc": "mt_accuracy", "mt_loss": "mt_nll", "mt_ece": "mt_ece"}.items():
        total = sum(n * value for n, value in zip(numbers["examples"], numbers[name], strict=True))
        assert row[column] == pytest.approx(total / sum(numbers["examples"])), column


def test_the_last_round_leaves_what_figures_need(tmp_path: Path) -> None:
    options = [
        *IMAGES,
        "method=fedavg",
        "eval.uncertainty=true",
        "eval.ood=[fashion_mnist]",
        "partition.validation=0.2",
    ]
    row, worker, state = run(tmp_path, *options)
    logp, y = predict(worker, state, TEST, 1).log_probabilities, worker.sets[TEST].split.y
    curve = selective.risk_coverage_curve(logp, y)
    risk = records.read_table(tmp_path / records.RISK)
    assert len(risk) == 100
    assert (risk[-1]["coverage"], risk[-1]["risk"]) == (1, pytest.approx(curve[-1].item()))
    middle = -(-len(y) // 2) - 1  # half of the examples, rounded up
    assert (risk[49]["coverage"], risk[49]["risk"]) == (0.5, pytest.approx(curve[middle].item()))
    entropies = records.read_table(tmp_path / records.ENTROPY)
    found = detection.entropy(logp)
    width = torch.log(torch.tensor(10.0)).item() / 30
    for number, line in enumerate(entropies):
        assert line["entropy"] == pytest.approx((number + 0.5) * width)
        inside = (found >= number * width) & (found < (number + 1) * width)
        assert line["test"] == int(inside.sum()) == line["fashion_mnist"]  # stand-ins are the same images
    calibrated = apply_temperature(logp, float(row["temperature"] or 0))
    bins = calibration_bins(calibrated, y, 15)
    lines = records.read_table(tmp_path / records.RELIABILITY)
    assert [line["count_calibrated"] for line in lines] == [bin_.count for bin_ in bins]
    assert [line["confidence_calibrated"] for line in lines] == pytest.approx([bin_.confidence for bin_ in bins])
