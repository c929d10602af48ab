"""The registry of columns: complete, with the right directions and labels, and the one that documents show."""

import csv
import itertools
import re
from pathlib import Path

import pytest

from bfl_bench import records
from bfl_bench.evaluation import columns
from bfl_bench.records import config_folder
from tests.composing import SMALL, choose, resolve, run_in

DOCUMENT = Path(__file__).parent.parent.parent / "docs/metrics.md"
METHODS = sorted(path.stem for path in (config_folder() / "method").glob("[!_]*.yaml"))

EXPECTED = {
    "ga": ("up", "global accuracy"),
    "la": ("up", "local accuracy"),
    "ece": ("down", "expected calibration error"),
    "nll": ("down", "negative log-likelihood"),
    "brier": ("down", "Brier score"),
    "worst10": ("up", "worst 10 % of clients"),
    "train_loss": ("down", "training loss"),
    "train_acc": ("up", "training accuracy"),
    "bytes_up": ("down", "bytes sent to the server"),
    "bytes_down": ("down", "bytes sent to clients"),
    "s_acc": ("up", "S accuracy"),
    "s_loss": ("down", "S loss"),
    "mt_acc": ("up", "MT accuracy"),
    "mt_loss": ("down", "MT loss"),
    "worst10_own": ("up", "worst 10 % on own examples"),
    "validation_ga": ("up", "global accuracy (validation)"),
    "validation_ece": ("down", "expected calibration error (validation)"),
    "validation_nll": ("down", "negative log-likelihood (validation)"),
    "validation_brier": ("down", "Brier score (validation)"),
    "unseen_ga": ("up", "global accuracy (unseen clients)"),
    "unseen_ece": ("down", "expected calibration error (unseen clients)"),
    "unseen_nll": ("down", "negative log-likelihood (unseen clients)"),
    "unseen_brier": ("down", "Brier score (unseen clients)"),
    "unseen_acc": ("up", "accuracy of unseen clients"),
    "unseen_loss": ("down", "loss of unseen clients"),
    "rmse": ("down", "root mean squared error"),
    "crps": ("down", "CRPS"),
    "quantile_error": ("down", "calibration error of quantiles"),
    "covered50": (None, "coverage of 50 % intervals"),
    "covered90": (None, "coverage of 90 % intervals"),
    "covered95": (None, "coverage of 95 % intervals"),
    "width50": ("down", "width of 50 % intervals"),
    "width90": ("down", "width of 90 % intervals"),
    "width95": ("down", "width of 95 % intervals"),
    "validation_rmse": ("down", "root mean squared error (validation)"),
    "validation_crps": ("down", "CRPS (validation)"),
    "validation_quantile_error": ("down", "calibration error of quantiles (validation)"),
    "validation_covered50": (None, "coverage of 50 % intervals (validation)"),
    "validation_covered90": (None, "coverage of 90 % intervals (validation)"),
    "validation_covered95": (None, "coverage of 95 % intervals (validation)"),
    "validation_width50": ("down", "width of 50 % intervals (validation)"),
    "validation_width90": ("down", "width of 90 % intervals (validation)"),
    "validation_width95": ("down", "width of 95 % intervals (validation)"),
    "s_rmse": ("down", "S RMSE"),
    "mt_rmse": ("down", "MT RMSE"),
    "ece_signed": (None, "signed calibration error"),
    "ece_over": ("down", "overconfidence"),
    "ece_under": ("down", "underconfidence"),
    "ece_adaptive": ("down", "adaptive calibration error"),
    "ece_classwise": ("down", "classwise calibration error"),
    "mce": ("down", "maximum calibration error"),
    "brier_reliability": ("down", "Brier reliability"),
    "brier_resolution": ("up", "Brier resolution"),
    "brier_uncertainty": (None, "Brier uncertainty"),
    "brier_within": (None, "Brier within bins"),
    "aurc": ("down", "area under risk-coverage"),
    "e_aurc": ("down", "excess area under risk-coverage"),
    "acc80": ("up", "accuracy at 80 % coverage"),
    "acc90": ("up", "accuracy at 90 % coverage"),
    "temperature": (None, "temperature"),
    "nll_calibrated": ("down", "calibrated negative log-likelihood"),
    "ece_calibrated": ("down", "calibration error after temperature"),
    "coverage90": (None, "coverage of 90 % sets"),
    "set_size90": ("down", "size of 90 % sets"),
    "coverage90_worst": ("up", "worst client's coverage"),
    "set_size90_worst": ("down", "size of the worst client's sets"),
    "mt_ece": ("down", "MT calibration error"),
    "worst10_s_nll": ("down", "worst 10 % of clients, S loss"),
    "worst10_s_ece": ("down", "worst 10 % of clients, S calibration error"),
    "worst10_mt_nll": ("down", "worst 10 % of clients, MT loss"),
    "worst10_mt_ece": ("down", "worst 10 % of clients, MT calibration error"),
    "auroc_confidence": ("up", "AUROC by confidence"),
    "aupr_confidence": ("up", "AUPR by confidence"),
    "fpr95_confidence": ("down", "FPR at 95 % found by confidence"),
    "auroc_entropy": ("up", "AUROC by entropy"),
    "aupr_entropy": ("up", "AUPR by entropy"),
    "fpr95_entropy": ("down", "FPR at 95 % found by entropy"),
    "auroc_information": ("up", "AUROC by information"),
    "aupr_information": ("up", "AUPR by information"),
    "fpr95_information": ("down", "FPR at 95 % found by information"),
    "log_variance_moved": (None, "movement of log variances"),
    "log_variance_spread": (None, "spread of log variances' movement"),
    "snr10": (None, "signal-to-noise ratio, 10 %"),
    "snr50": (None, "signal-to-noise ratio, 50 %"),
    "snr90": (None, "signal-to-noise ratio, 90 %"),
    "posterior_kl": (None, "KL of the global posterior"),
    "truth_kl": ("down", "KL to the true posterior"),
    "truth_w2": ("down", "Wasserstein distance to the true posterior"),
    "truth_mean": ("down", "error of the posterior mean"),
    "truth_spread": (None, "log ratio of spreads"),
    "truth_tv": ("down", "total variation of predictions"),
    "truth_agreement": ("up", "agreement with the true posterior"),
    "truth_calibration": ("down", "calibration against the truth"),
    "truth_std": ("down", "error of predictive spread"),
    "shift_ga": ("up", "global accuracy under shift"),
    "shift_nll": ("down", "negative log-likelihood under shift"),
    "shift_ece": ("down", "expected calibration error under shift"),
    "prior_precision": (None, "prior precision"),
    "precision_ratio": (None, "precision over Fisher"),
    "kl": (None, "KL from the prior"),
    "std_norm": (None, "norm of standard deviations"),
    "clamped": (None, "clamped log variances"),
    "alarm": (None, "variance alarm"),
    "prior_loss": (None, "prior loss"),
    "repaired": ("down", "repaired eigenvalues"),
    "precision_zero": (None, "zero precisions"),
    "precision_cosine": (None, "cosine similarity of precisions"),
    "improper": ("down", "improper cavity coordinates"),
    "server_improper": ("down", "improper server coordinates"),
    "distillation_loss": ("down", "distillation loss"),
    "beta": (None, "beta"),
    "generator_loss": (None, "generator loss"),
    "residual": ("down", "relative residual"),
    "solver_steps": (None, "solver steps"),
    "unsolved_layers": ("down", "unsolved layers"),
    "ae": ("down", "aggregation error"),
    "lf": ("down", "local forgetting"),
    "seconds_per_round": ("down", "seconds per round"),
    "round": (None, "round"),
    "client": (None, "client"),
    "size": (None, "training examples"),
    "accuracy": ("up", "accuracy"),
    "bin": (None, "bin"),
    "confidence": (None, "confidence"),
    "examples": (None, "test examples"),
    "s_accuracy": ("up", "S accuracy of a client"),
    "s_nll": ("down", "S loss of a client"),
    "s_ece": ("down", "S calibration error"),
    "mt_accuracy": ("up", "MT accuracy of a client"),
    "mt_nll": ("down", "MT loss of a client"),
    "severity": (None, "severity"),
    "count_calibrated": (None, "count after temperature"),
    "confidence_calibrated": (None, "confidence after temperature"),
    "accuracy_calibrated": (None, "accuracy after temperature"),
    "coverage": (None, "coverage"),
    "risk": ("down", "risk"),
    "entropy": (None, "entropy"),
    "test": (None, "test set"),
    "weight": (None, "weight of the first client"),
    "client_seconds": ("down", "client seconds"),
    "server_seconds": ("down", "server seconds"),
    "evaluation_seconds": ("down", "evaluation seconds"),
    "wall_seconds": ("down", "wall-clock seconds"),
    "peak_memory_mb": ("down", "peak memory"),
    "class": (None, "class"),
}


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items())
def test_direction_and_label(name: str, expected: tuple[str | None, str]) -> None:
    assert (columns.direction(name), columns.label(name)) == expected


def test_every_registered_name_has_an_expectation() -> None:
    names = {column.name for group in columns.TABLES.values() for column in group}
    assert names - {"count"} == set(EXPECTED)  # count: of predictions in one file, of examples in another


def test_a_column_under_another_rule_is_as_good_or_bad_as_the_column() -> None:
    found = columns.find("nll@eaa")
    assert found is not None
    assert (found.name, found.direction, found.unit) == ("nll@eaa", "down", "nats")
    assert columns.label("nll@eaa") == "negative log-likelihood under eaa"
    assert columns.direction("ga@wb") == "up"
    assert columns.direction("solver_steps@cg") is None
    assert columns.describe("nll@eaa").endswith("if the same replies were combined by eaa; in nats")


def test_a_column_of_another_way_to_predict() -> None:
    found = columns.find("nll@linearised")
    assert found is not None
    assert (found.label, found.direction, found.unit) == ("negative log-likelihood by linearised", "down", "nats")
    assert found.definition.endswith("if the posterior predicted through the network linearised at its mean")
    assert columns.label("auroc_entropy@fashion_mnist@draws") == "AUROC by entropy, fashion_mnist@draws"


def test_columns_of_barycenters_and_of_unseen_clients() -> None:
    assert columns.label("mt_acc@wb(0.5)") == "MT accuracy, wb(0.5)"
    assert columns.describe("mt_loss@rklb(0.2)").endswith(
        "of barycenters (rklb) of local posteriors, with weight 0.2, and the global one; in nats"
    )
    assert columns.heading("unseen_acc@10") == "accuracy of unseen clients, 10 steps ↑"
    assert columns.describe("unseen_loss@1").endswith("after 1 local steps from the final model; in nats")


def test_a_name_nobody_registered_is_itself_and_has_no_direction() -> None:
    for name in ("turns", "turns@eaa", "gap", "accuracy_of_mine"):
        assert columns.find(name) is None
        assert (columns.label(name), columns.direction(name), columns.heading(name)) == (name, None, name)
        assert columns.describe(name) == "a column of the method's own"


def test_headings_have_an_arrow_where_there_is_a_direction() -> None:
    assert [columns.heading(name) for name in ("ga", "nll", "kl")] == [
        "global accuracy ↑",
        "negative log-likelihood ↓",
        "KL from the prior",
    ]


def test_descriptions_name_the_unit() -> None:
    assert columns.describe("nll") == "mean over the test set of -log p(label) under the global model; in nats"
    assert columns.describe("ga") == "share of the test set that the global model classifies correctly"


def test_files_have_the_columns_of_the_registry() -> None:
    files = {
        "metrics.csv": records.METRICS_COLUMNS,
        "timing.csv": records.TIMING_COLUMNS,
        "clients.csv": records.CLIENTS_COLUMNS,
        "weights.csv": records.WEIGHTS_COLUMNS,
        "risk.csv": records.RISK_COLUMNS,
        "entropy.csv": records.ENTROPY_COLUMNS,
        "own.csv": records.OWN_COLUMNS,
        "shift.csv": records.SHIFT_COLUMNS,
        "partition.csv": records.PARTITION_COLUMNS,
    }
    named = (records.METRICS, records.TIMING, records.CLIENTS, records.WEIGHTS, records.RISK, records.ENTROPY)
    assert set(files) == {*named, records.PARTITION_COUNTS, records.OWN, records.SHIFT}
    for file, names in files.items():
        assert tuple(column.name for column in columns.TABLES[file]) == names, file
    reliability = [column.name for column in columns.TABLES["reliability.csv"] if not column.of]
    assert tuple(reliability) == records.RELIABILITY_COLUMNS


def header(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return next(csv.reader(file))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_columns_of_a_method_are_registered_as_its_own(method: str, tmp_path: Path) -> None:
    run_in(tmp_path, *choose(method), "rounds=1")
    module = resolve(f"method={method}")["method"]["_target_"].split(".")[-2]
    own = columns.TABLES["metrics.csv, methods"]
    of_others = {column.name for column in columns.METRICS if column not in own} | {"round"}
    written = {name.split("@")[0] for name in header(tmp_path / records.METRICS)}
    expected = {column.name for column in own if module in column.of.split(", ")}
    if method == "fedfisher_released":  # it descends: no system is solved
        expected -= {"residual", "solver_steps", "unsolved_layers"}
    assert written - of_others == expected
    for file in (records.TIMING, records.CLIENTS, records.RELIABILITY):
        assert header(tmp_path / file) == [column.name for column in columns.TABLES[file] if not column.of]


def test_columns_that_settings_bring_are_registered(tmp_path: Path) -> None:
    two = [*SMALL, "num_clients=2", "rounds=1"]
    own = ["partition.test=per_client", "eval.uncertainty=true", "partition.validation=0.2"]
    run_in(tmp_path / "own", *two, "method=virtual", "server.lr=0.3", *own)
    run_in(tmp_path / "ways", *two, "method=fola", "eval.also_predict=[linearised]", *own[1:])
    run_in(tmp_path / "shift", "method=fedavg", "rounds=1", "local.epochs=1", "eval.shift=[blur]")
    run_in(tmp_path / "rules", *two, "method=fvb", "eval.also_aggregate=[wb]", "eval.personalise=[0.5]")
    run_in(tmp_path / "unseen", *two, "method=fedavg", "partition.unseen=0.5")
    numbers = ["dataset=diabetes", "local.lr=0.02", "num_clients=3", "rounds=1"]
    run_in(tmp_path / "numbers", *numbers, "method=virtual", "partition.validation=0.2")
    run_in(tmp_path / "rules", *two, "method=fvb", "eval.also_aggregate=[wb]")
    run_in(tmp_path / "solvers", *two, "method=fedlpa", "method.also_solve=[ea]")
    run_in(tmp_path / "posterior", *two, "method=fola", "eval.weight_rounds=[1]")
    records.start(tmp_path / "posterior", resolve(*two, "method=fola"), force=False)
    run_in(tmp_path / "known", *two, "method=fola", f"reference_posterior={tmp_path / 'posterior'}")
    names = set(itertools.chain(*(header(path) for path in tmp_path.glob("*/metrics.csv"))))
    assert {"worst10_mt_ece", "temperature@linearised", "precision_ratio@linearised", "shift_nll"} <= names
    assert {"la@wb(0.5)", "unseen_ga", "unseen_acc@10", "unseen_loss@0"} <= names
    assert {"rmse", "mt_rmse", "validation_covered90"} <= names
    assert {"mt_acc", "worst10_own", "brier@wb", "std_norm@wb", "residual@ea", "ae", "lf", "repaired"} <= names
    assert [name for name in sorted(names) if columns.find(name) is None] == []
    for file in (records.RELIABILITY, records.RISK):
        assert header(tmp_path / "own" / file) == [column.name for column in columns.TABLES[file]]
    assert header(tmp_path / "own/own.csv") == [column.name for column in columns.TABLES["own.csv"]]
    assert header(tmp_path / "shift/shift.csv")[:5] == [column.name for column in columns.TABLES["shift.csv"]]
    assert header(tmp_path / "posterior/weights.csv") == [column.name for column in columns.TABLES["weights.csv"]]


# The document


def test_the_document_has_the_tables_of_the_registry() -> None:
    text = DOCUMENT.read_text()
    assert columns.fill(text) == text, "run: python -m bfl_bench.evaluation.columns docs/metrics.md"
    assert sorted(re.findall(r"<!-- columns: (.*) -->", text)) == sorted(columns.TABLES)
    for name in {column.name for group in columns.TABLES.values() for column in group}:
        assert f"\n| `{name}` |" in text


def test_tables_are_written_anew_and_nothing_else() -> None:
    text = "Words.\n\n<!-- columns: reports -->\n\n| old |\n| --- |\n\nMore | words.\n\n| other |\n"
    filled = columns.fill(text)
    assert filled.startswith("Words.\n\n<!-- columns: reports -->\n\n| column | label | better | unit | definition |\n")
    assert "| `seconds_per_round` | seconds per round | ↓ | seconds | " in filled
    assert filled.endswith("timing.csv |\n\nMore | words.\n\n| other |\n")
    assert "| old |" not in filled
    assert columns.fill(filled) == filled
