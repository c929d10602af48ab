"""The registry of columns: how every number of a run is called, what it is, and which way is better.

Reports, figures, the page, docs/metrics.md and `bfl-report --help` read it, so it imports nothing but the standard
library. A name that is not here, such as that of a metric of a user's own method, is shown as it is and never called
best. After a change, `python -m bfl_bench.evaluation.columns docs/metrics.md` writes the tables of the document anew.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Direction = Literal["up", "down"]
ARROWS = {"up": "↑", "down": "↓"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table, or a number that reports compute."""

    name: str  # in files
    label: str  # for people
    definition: str  # one sentence without its full stop, and without the unit
    direction: Direction | None  # None: no value is better than another
    unit: str = ""
    of: str = ""  # the methods, or the runs, that have it; empty: all of them


_ROUND = Column(name="round", label="round", definition="number of the round, from 1", direction=None)
_CLIENT = Column(name="client", label="client", definition="number of the client, from 0", direction=None)
_OWN_TEST = "runs whose clients have test examples of their own"
_REFERENCE = "methods with point models, with reference_posterior"

_VALIDATION = "runs with partition.validation above 0"
_VALIDATED = {
    "ga": "global accuracy",
    "ece": "expected calibration error",
    "nll": "negative log-likelihood",
    "brier": "Brier score",
}
_UNSEEN = "runs with partition.unseen above 0"
_NUMBERS = "runs whose labels are numbers"
_NUMERIC: tuple[tuple[str, str, str, Direction | None, str], ...] = (
    (
        "rmse",
        "root mean squared error",
        "root of the mean squared distance of label and mean prediction",
        "down",
        "label",
    ),
    ("crps", "CRPS", "mean continuous ranked probability score, E|X - y| - E|X - X'| / 2", "down", "label"),
    (
        "quantile_error",
        "calibration error of quantiles",
        "absolute difference of p and the share of labels below their predicted quantile of p, averaged over p = 5 %, "
        "10 %, ..., 95 %",
        "down",
        "share",
    ),
    *(
        (
            f"covered{level}",
            f"coverage of {level} % intervals",
            f"share of labels in their central {level} % interval, at best {level / 100:g}",
            None,
            "share",
        )
        for level in (50, 90, 95)
    ),
    *(
        (
            f"width{level}",
            f"width of {level} % intervals",
            f"mean width of the central {level} % intervals",
            "down",
            "label",
        )
        for level in (50, 90, 95)
    ),
)
_UNCERTAINTY = "runs with eval.uncertainty"
_TRUTH = "runs with eval.truth whose parameters can be told apart"
_POSTERIOR = "runs with eval.posterior whose state is a Gaussian"
_MOVED = "runs with eval.posterior whose state is a Gaussian from the start"
_CALIBRATED = "runs with eval.uncertainty and validation examples"
_OWN_COVERED = "runs with eval.uncertainty and validation examples, whose clients have test examples of their own"
_OWN_UNCERTAINTY = "runs with eval.uncertainty, whose clients have test examples of their own"
_LAPLACE = (
    "runs of fola, fedlpa, fisher_merging and fedfisher with draws or linearised in eval.predictive or"
    " eval.also_predict"
)
_SHIFTED = "runs with eval.shift, in the last round"
PREDICTIVES = {
    "mean": "if the mean of the posterior predicted alone",
    "draws": "if parameter draws from the posterior predicted",
    "linearised": "if the posterior predicted through the network linearised at its mean",
}
"""What follows the @ of columns of eval.also_predict."""
_SCORES = {
    "confidence": "1 - confidence",
    "entropy": "the entropy of the prediction",
    "information": "the mutual information of prediction and parameters",
}
_DETECTION: tuple[tuple[str, str, Direction, str], ...] = (
    ("auroc", "AUROC", "up", "how often a foreign example has more than one of the test set, ties counting half, of"),
    ("aupr", "AUPR", "up", "average precision of finding the foreign examples among those of the test set by"),
    (
        "fpr95",
        "FPR at 95 % found",
        "down",
        "share of the test set that is reported where 95 % of the foreign set is, by",
    ),
)
_FOREIGN = tuple(
    Column(
        name=f"{name}_{score}",
        label=f"{label} by {score}",
        definition=f"{definition} {what}",
        direction=direction,
        unit="share",
        of="runs with eval.ood or partition.unknown_classes; with partition.unseen and eval.uncertainty",
    )
    for score, what in _SCORES.items()
    for name, label, direction, definition in _DETECTION
)

TABLES: Mapping[str, Sequence[Column]] = {
    "metrics.csv": (
        _ROUND,
        Column(
            name="ga",
            label="global accuracy",
            definition="share of the test set that the global model classifies correctly",
            direction="up",
            unit="share",
        ),
        Column(
            name="la",
            label="local accuracy",
            definition="share of the test set that a local model of the round's cohort classifies correctly, averaged "
            "with weights proportional to the clients' training set sizes",
            direction="up",
            unit="share",
        ),
        Column(
            name="ece",
            label="expected calibration error",
            definition="absolute difference of the global model's accuracy and mean confidence among test examples of "
            "similar confidence (eval.ece_bins bins of equal width), averaged over the test set",
            direction="down",
            unit="share",
        ),
        Column(
            name="nll",
            label="negative log-likelihood",
            definition="mean over the test set of -log p(label) under the global model",
            direction="down",
            unit="nats",
        ),
        Column(
            name="brier",
            label="Brier score",
            definition="mean over the test set of the squared distance between the global model's probabilities and "
            "the one-hot label, from 0 to 2",
            direction="down",
        ),
        Column(
            name="worst10",
            label="worst 10 % of clients",
            definition="mean accuracy on the test set of the worst tenth, rounded up, of the cohort's local models",
            direction="up",
            unit="share",
        ),
        Column(
            name="train_loss",
            label="training loss",
            definition="cross-entropy of the minibatches of the last local epoch, each before its step and without "
            "penalties or priors, averaged over the cohort with weights proportional to size",
            direction="down",
            unit="nats",
        ),
        Column(
            name="train_acc",
            label="training accuracy",
            definition="accuracy on the minibatches of the training loss, at the same moments, averaged like it",
            direction="up",
            unit="share",
        ),
        Column(
            name="bytes_up",
            label="bytes sent to the server",
            definition="size of all messages from clients to the server since the start of the run, as they are sent",
            direction="down",
            unit="bytes",
        ),
        Column(
            name="bytes_down",
            label="bytes sent to clients",
            definition="size of all that the server has sent to the clients of its cohorts since the start of the run",
            direction="down",
            unit="bytes",
        ),
    ),
    "metrics.csv, own test examples": (
        Column(
            name="s_acc",
            label="S accuracy",
            definition="accuracy of the global model on all clients' test examples, the same number as ga",
            direction="up",
            unit="share",
            of=_OWN_TEST,
        ),
        Column(
            name="s_loss",
            label="S loss",
            definition="negative log-likelihood of the global model on all clients' test examples, the same number as "
            "nll",
            direction="down",
            unit="nats",
            of=_OWN_TEST,
        ),
        Column(
            name="mt_acc",
            label="MT accuracy",
            definition="accuracy of each client's own model on its own test examples, averaged with weights "
            "proportional to the number of these",
            direction="up",
            unit="share",
            of=_OWN_TEST,
        ),
        Column(
            name="mt_loss",
            label="MT loss",
            definition="negative log-likelihood of each client's own model on its own test examples, averaged like the "
            "MT accuracy",
            direction="down",
            unit="nats",
            of=_OWN_TEST,
        ),
        Column(
            name="worst10_own",
            label="worst 10 % on own examples",
            definition="mean of the worst tenth, rounded up, of the accuracies of clients' own models on their own "
            "test examples",
            direction="up",
            unit="share",
            of=_OWN_TEST,
        ),
    ),
    "metrics.csv, validation": tuple(
        Column(
            name=f"validation_{name}",
            label=f"{label} (validation)",
            definition=f"what {name} is, on the validation examples of all clients together",
            direction="up" if name == "ga" else "down",
            unit="nats" if name == "nll" else "" if name == "brier" else "share",
            of=_VALIDATION,
        )
        for name, label in _VALIDATED.items()
    ),
    "metrics.csv, unseen clients": (
        *(
            Column(
                name=f"unseen_{name}",
                label=f"{label} (unseen clients)",
                definition=f"what {name} is, on the test examples of all unseen clients together",
                direction="up" if name == "ga" else "down",
                unit="nats" if name == "nll" else "" if name == "brier" else "share",
                of=_UNSEEN,
            )
            for name, label in _VALIDATED.items()
        ),
        Column(
            name="unseen_acc",
            label="accuracy of unseen clients",
            definition="accuracy of each unseen client's own model on its own test examples, averaged with weights "
            "proportional to the number of these, in the last round",
            direction="up",
            unit="share",
            of=_UNSEEN,
        ),
        Column(
            name="unseen_loss",
            label="loss of unseen clients",
            definition="negative log-likelihood of the same models, averaged likewise",
            direction="down",
            unit="nats",
            of=_UNSEEN,
        ),
    ),
    "metrics.csv, numbers": (
        *(
            Column(name=name, label=label, definition=definition, direction=direction, unit=unit, of=_NUMBERS)
            for name, label, definition, direction, unit in _NUMERIC
        ),
        *(
            Column(
                name=f"validation_{name}",
                label=f"{label} (validation)",
                definition=f"what {name} is, on the validation examples of all clients together",
                direction=direction,
                unit=unit,
                of=f"{_NUMBERS}, with validation examples",
            )
            for name, label, _, direction, unit in _NUMERIC
        ),
        *(
            Column(
                name=f"{model}_rmse",
                label=f"{model.upper()} RMSE",
                definition=definition,
                direction="down",
                unit="label",
                of=f"{_NUMBERS}, whose clients have test examples of their own",
            )
            for model, definition in (
                ("s", "RMSE of the global model on all clients' test examples, the same number as rmse"),
                ("mt", "RMSE of each client's own model on its own test examples, averaged like the MT loss"),
            )
        ),
    ),
    "metrics.csv, uncertainty": (
        Column(
            name="ece_signed",
            label="signed calibration error",
            definition="mean confidence less accuracy on the test set: above 0 the global model is overconfident",
            direction=None,
            unit="share",
            of=_UNCERTAINTY,
        ),
        Column(
            name="ece_over",
            label="overconfidence",
            definition="part of ece from bins whose mean confidence is above their accuracy",
            direction="down",
            unit="share",
            of=_UNCERTAINTY,
        ),
        Column(
            name="ece_under",
            label="underconfidence",
            definition="part of ece from bins whose mean confidence is below their accuracy",
            direction="down",
            unit="share",
            of=_UNCERTAINTY,
        ),
        Column(
            name="ece_adaptive",
            label="adaptive calibration error",
            definition="what ece is, over bins with equally many test examples",
            direction="down",
            unit="share",
            of=_UNCERTAINTY,
        ),
        Column(
            name="ece_classwise",
            label="classwise calibration error",
            definition="mean over the classes of the calibration error of the probability of the class",
            direction="down",
            unit="share",
            of=_UNCERTAINTY,
        ),
        Column(
            name="mce",
            label="maximum calibration error",
            definition="largest difference of accuracy and mean confidence among bins with at least 1 % of the test"
            " examples",
            direction="down",
            unit="share",
            of=_UNCERTAINTY,
        ),
        Column(
            name="brier_reliability",
            label="Brier reliability",
            definition="part of brier from probabilities that differ from frequencies, over bins of the probability"
            " of each class",
            direction="down",
            of=_UNCERTAINTY,
        ),
        Column(
            name="brier_resolution",
            label="Brier resolution",
            definition="part of brier, subtracted, from frequencies of bins that differ from those of the test set",
            direction="up",
            of=_UNCERTAINTY,
        ),
        Column(
            name="brier_uncertainty",
            label="Brier uncertainty",
            definition="part of brier that the classes' frequencies in the test set have by themselves",
            direction=None,
            of=_UNCERTAINTY,
        ),
        Column(
            name="brier_within",
            label="Brier within bins",
            definition="rest of brier, from probabilities that differ within a bin",
            direction=None,
            of=_UNCERTAINTY,
        ),
        Column(
            name="aurc",
            label="area under risk-coverage",
            definition="mean over all coverages of the share of errors among the most confident test examples",
            direction="down",
            unit="share",
            of=_UNCERTAINTY,
        ),
        Column(
            name="e_aurc",
            label="excess area under risk-coverage",
            definition="aurc less that of the best order of the same predictions",
            direction="down",
            unit="share",
            of=_UNCERTAINTY,
        ),
        Column(
            name="acc80",
            label="accuracy at 80 % coverage",
            definition="accuracy on the most confident 80 % of the test examples",
            direction="up",
            unit="share",
            of=_UNCERTAINTY,
        ),
        Column(
            name="acc90",
            label="accuracy at 90 % coverage",
            definition="accuracy on the most confident 90 % of the test examples",
            direction="up",
            unit="share",
            of=_UNCERTAINTY,
        ),
        Column(
            name="temperature",
            label="temperature",
            definition="number that divides the log probabilities so that the negative log-likelihood of the "
            "validation examples is lowest; below 1 the global model is underconfident",
            direction=None,
            of=_CALIBRATED,
        ),
        Column(
            name="nll_calibrated",
            label="calibrated negative log-likelihood",
            definition="what nll is, after the temperature",
            direction="down",
            unit="nats",
            of=_CALIBRATED,
        ),
        Column(
            name="ece_calibrated",
            label="calibration error after temperature",
            definition="what ece is, after the temperature",
            direction="down",
            unit="share",
            of=_CALIBRATED,
        ),
        Column(
            name="coverage90",
            label="coverage of 90 % sets",
            definition="share of test examples whose label is in their conformal set, made on the validation "
            "examples to hold 90 %",
            direction=None,
            unit="share",
            of=_CALIBRATED,
        ),
        Column(
            name="set_size90",
            label="size of 90 % sets",
            definition="mean number of classes in a conformal set",
            direction="down",
            unit="classes",
            of=_CALIBRATED,
        ),
        Column(
            name="coverage90_worst",
            label="worst client's coverage",
            definition="lowest coverage90 among the clients, on their own test examples",
            direction="up",
            unit="share",
            of=_OWN_COVERED,
        ),
        Column(
            name="set_size90_worst",
            label="size of the worst client's sets",
            definition="set_size90 of the client with the lowest coverage90",
            direction="down",
            unit="classes",
            of=_OWN_COVERED,
        ),
        Column(
            name="mt_ece",
            label="MT calibration error",
            definition="what ece is, of each client's own model on its own test examples, averaged like mt_acc",
            direction="down",
            unit="share",
            of=_OWN_UNCERTAINTY,
        ),
        *(
            Column(
                name=f"worst10_{model}_{score}",
                label=f"worst 10 % of clients, {model.upper()} {what}",
                definition=f"mean of the highest tenth, rounded up, of the {whose} {score} on own test examples",
                direction="down",
                unit="nats" if score == "nll" else "share",
                of=_OWN_UNCERTAINTY,
            )
            for model, whose in (("s", "global model's"), ("mt", "clients' own models'"))
            for score, what in (("nll", "loss"), ("ece", "calibration error"))
        ),
    ),
    "metrics.csv, out of distribution": _FOREIGN,
    "metrics.csv, posteriors": (
        Column(
            name="log_variance_moved",
            label="movement of log variances",
            definition="mean over the weights of the distance between the global model's log variance and the one that "
            "the run started with",
            direction=None,
            unit="nats",
            of=_MOVED,
        ),
        Column(
            name="log_variance_spread",
            label="spread of log variances' movement",
            definition="standard deviation over the weights of the change of the log variance since the start: 0 where "
            "all move alike, and nothing has been learnt from data",
            direction=None,
            unit="nats",
            of=_MOVED,
        ),
        *(
            Column(
                name=f"snr{percent}",
                label=f"signal-to-noise ratio, {percent} %",
                definition=f"value that {percent} % of the weights' ratios |mean| / standard deviation do not exceed",
                direction=None,
                of=_POSTERIOR,
            )
            for percent in (10, 50, 90)
        ),
        Column(
            name="posterior_kl",
            label="KL of the global posterior",
            definition="KL divergence of the global model's posterior from the prior",
            direction=None,
            unit="nats",
            of=f"{_POSTERIOR}, with a prior",
        ),
    ),
    "metrics.csv, truth": (
        Column(
            name="truth_kl",
            label="KL to the true posterior",
            definition="KL divergence of the Gaussian with the global posterior's moments from that with the true "
            "posterior's; empty where it is infinite, as of a point",
            direction="down",
            unit="nats",
            of=_TRUTH,
        ),
        Column(
            name="truth_w2",
            label="Wasserstein distance to the true posterior",
            definition="2-Wasserstein distance of these two Gaussians",
            direction="down",
            of=_TRUTH,
        ),
        Column(
            name="truth_mean",
            label="error of the posterior mean",
            definition="distance of the means in true posterior standard deviations, root mean square over parameters",
            direction="down",
            of=_TRUTH,
        ),
        Column(
            name="truth_spread",
            label="log ratio of spreads",
            definition="log of the global posterior's standard deviation over the true one, mean over parameters; "
            "below 0: too narrow; empty for a point",
            direction=None,
            of=_TRUTH,
        ),
        Column(
            name="truth_tv",
            label="total variation of predictions",
            definition="total variation between the predictive distribution and that of the true posterior, mean over "
            "the test set",
            direction="down",
            unit="share",
            of="runs with eval.truth",
        ),
        Column(
            name="truth_agreement",
            label="agreement with the true posterior",
            definition="share of the test set for which both predict the same class",
            direction="up",
            unit="share",
            of="runs with eval.truth whose labels are classes",
        ),
        Column(
            name="truth_calibration",
            label="calibration against the truth",
            definition="calibration error if the true predictive distribution drew the labels: of confidences in 15 "
            "bins, or of quantiles where labels are numbers",
            direction="down",
            unit="share",
            of="runs with eval.truth",
        ),
        Column(
            name="truth_std",
            label="error of predictive spread",
            definition="root mean squared difference of the predictive standard deviation and that of the true "
            "posterior",
            direction="down",
            unit="label",
            of="runs with eval.truth whose labels are numbers",
        ),
    ),
    "metrics.csv, shift": tuple(
        Column(
            name=f"shift_{name}",
            label=f"{_VALIDATED[name]} under shift",
            definition=f"what {name} is, on corrupted test images, averaged over eval.shift and eval.severities",
            direction="up" if name == "ga" else "down",
            unit="nats" if name == "nll" else "share",
            of=_SHIFTED,
        )
        for name in ("ga", "nll", "ece")
    ),
    "metrics.csv, predictives": (
        Column(
            name="prior_precision",
            label="prior precision",
            definition="d that is added to the precision of every parameter; as eval.prior_precision says, chosen in "
            "the round among 1, 3.16, 10, ..., 1e6",
            direction=None,
            of=_LAPLACE,
        ),
        Column(
            name="precision_ratio",
            label="precision over Fisher",
            definition="trace of the server's precision divided by that of the empirical Fisher information of the "
            "validation examples at the server's mean",
            direction=None,
            of=f"{_LAPLACE}, and validation examples",
        ),
    ),
    "metrics.csv, methods": (
        Column(
            name="kl",
            label="KL from the prior",
            definition="KL divergence of a client's posterior after training from its prior, of pfedbayes from its "
            "copy of the global one",
            direction=None,
            unit="nats",
            of="fvb, virtual, pfedbayes",
        ),
        Column(
            name="std_norm",
            label="norm of standard deviations",
            definition="Euclidean norm of the standard deviations exp(log_variance / 2), not clamped, of the global "
            "model's Gaussian weights",
            direction=None,
            of="fvb",
        ),
        Column(
            name="clamped",
            label="clamped log variances",
            definition="share of the global model's log variances that a clamp to model.log_variance_range changes",
            direction=None,
            unit="share",
            of="fvb, virtual with eval.posterior",
        ),
        Column(
            name="alarm",
            label="variance alarm",
            definition="-1 where the geometric mean of the global model's variances has collapsed below the first of "
            "method.alarm_variances, 1 where it has exploded above the second, else 0",
            direction=None,
            of="fvb",
        ),
        Column(
            name="prior_loss",
            label="prior loss",
            definition="the prior's part of the loss at the end of a client's training: lambda times the prior loss, "
            "from the second round on, and gamma times half the squared length of the parameters",
            direction=None,  # a client that does not move has none
            unit="nats",
            of="fola",
        ),
        Column(
            name="repaired",
            label="repaired eigenvalues",
            definition="negative eigenvalues of a client's Hessian that were set to zero, with method.structure full "
            "or eigenvalue",
            direction="down",
            of="fola",
        ),
        Column(
            name="precision_zero",
            label="zero precisions",
            definition="share of the server's precisions that are zero",
            direction=None,
            unit="share",
            of="fola",
        ),
        Column(
            name="precision_cosine",
            label="cosine similarity of precisions",
            definition="cosine similarity of two clients' precisions, each as one long vector less its smallest entry, "
            "averaged over all pairs of the cohort; of full Hessians near 1 by construction, as the smallest entry is "
            "negative, and less it nearly all entries are the same",
            direction=None,
            of="fola",
        ),
        Column(
            name="improper",
            label="improper cavity coordinates",
            definition="coordinates of a client's cavity whose precision fell below method.min_precision and was "
            "repaired",
            direction="down",
            of="virtual, fedep",
        ),
        Column(
            name="server_improper",
            label="improper server coordinates",
            definition="coordinates of the server's posterior whose precision fell below method.min_precision and was "
            "repaired",
            direction="down",
            of="virtual, bayesadmm, fedlap_cov, fedep",
        ),
        Column(
            name="distillation_loss",
            label="distillation loss",
            definition="mean cross-entropy to the ensemble in the last epoch of distillation",
            direction="down",
            unit="nats",
            of="fedbe, dense, beta_predbayes",
        ),
        Column(
            name="beta",
            label="beta",
            definition="exponent of the product of the clients' predictions, 1 less it being that of their mixture",
            direction=None,
            of="beta_predbayes",
        ),
        Column(
            name="generator_loss",
            label="generator loss",
            definition="loss of the generator for the last batch of images that it invented: cross-entropy to their "
            "labels, boundary and statistics",
            direction=None,  # the boundary makes it small where the student disagrees with the ensemble
            of="dense",
        ),
        Column(
            name="residual",
            label="relative residual",
            definition="norm of the left minus the right side of eq. 13 of FedLPA, relative to the right side, the "
            "largest over the layers",
            direction="down",
            of="fedlpa, fedfisher",
        ),
        Column(
            name="solver_steps",
            label="solver steps",
            definition="steps of the solver, summed over the layers",
            direction=None,
            of="fedlpa, fedfisher",
        ),
        Column(
            name="unsolved_layers",
            label="unsolved layers",
            definition="layers at which the solver did not do its work: cg stopped at method.max_steps above "
            "method.tolerance, or gd ended with a larger residual than the closed form that it started from",
            direction="down",
            of="fedlpa, fedfisher",
        ),
        Column(
            name="ae",
            label="aggregation error",
            definition="D of the global model, where D(theta) = (theta - mean)^T precision (theta - mean) / 2 under "
            "the last posterior of that run",
            direction="down",
            of=_REFERENCE,
        ),
        Column(
            name="lf",
            label="local forgetting",
            definition="D, as in the aggregation error, of the clients' local models, averaged with weights "
            "proportional to size",
            direction="down",
            of=_REFERENCE,
        ),
    ),
    "clients.csv": (
        _ROUND,
        _CLIENT,
        Column(name="size", label="training examples", definition="training examples of the client", direction=None),
        Column(
            name="accuracy",
            label="accuracy",
            definition="share of the test set that the client's local model classifies correctly",
            direction="up",
            unit="share",
        ),
        Column(
            name="nll",
            label="negative log-likelihood",
            definition="mean over the test set of -log p(label) under the client's local model",
            direction="down",
            unit="nats",
        ),
        Column(
            name="ece",
            label="expected calibration error",
            definition="that of the client's local model, as metrics.csv has that of the global model",
            direction="down",
            unit="share",
        ),
    ),
    "reliability.csv": (
        _ROUND,
        Column(name="bin", label="bin", definition="number of the bin, from 1 to eval.ece_bins", direction=None),
        Column(
            name="count",
            label="predictions",
            definition="predictions whose confidence lies in the bin",
            direction=None,
        ),
        Column(
            name="confidence",
            label="confidence",
            definition="mean confidence of these predictions, 0 where there are none",
            direction=None,
            unit="share",
        ),
        Column(
            name="accuracy",
            label="accuracy",
            definition="share of these predictions that are correct, 0 where there are none",
            direction=None,  # calibrated is what agrees with the confidence
            unit="share",
        ),
        *(
            Column(
                name=f"{name}_calibrated",
                label=f"{name} after temperature",
                definition=f"what {name} is, after the temperature",
                direction=None,
                of=_CALIBRATED,
            )
            for name in ("count", "confidence", "accuracy")
        ),
    ),
    "risk.csv": (
        _ROUND,
        Column(
            name="coverage",
            label="coverage",
            definition="share of the test examples that are kept, the most confident ones, from 0.01 to 1",
            direction=None,
            unit="share",
        ),
        Column(
            name="risk",
            label="risk",
            definition="share of errors among these",
            direction="down",
            unit="share",
        ),
    ),
    "entropy.csv": (
        _ROUND,
        Column(
            name="entropy",
            label="entropy",
            definition="middle of a range of entropies of predictions, 30 of which go from 0 to log C",
            direction=None,
            unit="nats",
        ),
        Column(
            name="test",
            label="test set",
            definition="test examples with such an entropy; those of foreign sets in columns of their names",
            direction=None,
        ),
    ),
    "own.csv": (
        _ROUND,
        _CLIENT,
        Column(name="examples", label="test examples", definition="test examples of the client's own", direction=None),
        *(
            Column(
                name=f"{model}_{score}",
                label=f"{model.upper()} {label}",
                definition=f"{what} of {whose} on these examples",
                direction="up" if score == "accuracy" else "down",
                unit="nats" if score == "nll" else "share",
            )
            for model, whose in (("s", "the global model"), ("mt", "the client's own model"))
            for score, label, what in (
                ("accuracy", "accuracy of a client", "accuracy"),
                ("nll", "loss of a client", "mean of -log p(label)"),
                ("ece", "calibration error", "expected calibration error"),
            )
            if (model, score) != ("mt", "ece")
        ),
        Column(
            name="mt_ece",
            label="MT calibration error",
            definition="expected calibration error of the client's own model on these examples",
            direction="down",
            unit="share",
        ),
    ),
    "shift.csv": (
        _ROUND,
        Column(
            name="severity",
            label="severity",
            definition="how strong the corruptions are, from 1 to 5; data/corruptions.py has the constants",
            direction=None,
        ),
        Column(
            name="accuracy",
            label="accuracy",
            definition="that of the global model on the test images of this severity, averaged over the corruptions of "
            "eval.shift; of one of them in columns such as accuracy@blur",
            direction="up",
            unit="share",
        ),
        Column(
            name="nll",
            label="negative log-likelihood",
            definition="likewise",
            direction="down",
            unit="nats",
        ),
        Column(
            name="ece",
            label="expected calibration error",
            definition="likewise",
            direction="down",
            unit="share",
        ),
    ),
    "weights.csv": (
        _ROUND,
        Column(
            name="weight",
            label="weight of the first client",
            definition="weight of the first of two clients, from 0 to 1, the other having the rest",
            direction=None,
            unit="share",
        ),
        Column(
            name="ga",
            label="global accuracy",
            definition="that of the global model that the round's replies would give with this weight",
            direction="up",
            unit="share",
        ),
        Column(
            name="nll",
            label="negative log-likelihood",
            definition="that of the same model",
            direction="down",
            unit="nats",
        ),
        Column(
            name="ece",
            label="expected calibration error",
            definition="that of the same model",
            direction="down",
            unit="share",
        ),
    ),
    "timing.csv": (
        _ROUND,
        Column(
            name="client_seconds",
            label="client seconds",
            definition="time of the training of all clients of the cohort, added up; clients in lockstep "
            "(engine=stacked) share the time of a common step equally",
            direction="down",
            unit="seconds",
        ),
        Column(
            name="server_seconds",
            label="server seconds",
            definition="time of the aggregation, without waiting for clients",
            direction="down",
            unit="seconds",
        ),
        Column(
            name="evaluation_seconds",
            label="evaluation seconds",
            definition="time of the evaluation of global and local models",
            direction="down",
            unit="seconds",
        ),
        Column(
            name="wall_seconds",
            label="wall-clock seconds",
            definition="time by the clock from the first client's training, and evaluation where it was due, to the "
            "end of aggregation",
            direction="down",
            unit="seconds",
        ),
        Column(
            name="peak_memory_mb",
            label="peak memory",
            definition="peak so far of what the run allocated on the GPU, or of the process's resident memory where "
            "there is none",
            direction="down",
            unit="megabytes",
        ),
    ),
    "partition.csv": (
        _CLIENT,
        Column(
            name="class",
            label="class",
            definition="number of the class, of sequences the first label",
            direction=None,
        ),
        Column(
            name="count",
            label="training examples",
            definition="training examples of the class that the client holds",
            direction=None,
        ),
    ),
    "reports": (
        Column(
            name="seconds_per_round",
            label="seconds per round",
            definition="training of all clients, added up, and aggregation, mean over the rounds of timing.csv",
            direction="down",
            unit="seconds",
        ),
    ),
}
"""By file; of metrics.csv in several parts. The columns stand in the order of the files."""

METRICS = tuple(
    column
    for table, group in TABLES.items()
    if table.startswith("metrics.csv") or table == "reports"
    for column in group
    if column.name != "round"
)
"""What reports compare."""

_BY_NAME = {column.name: column for group in list(TABLES.values())[::-1] for column in group}


def find(name: str) -> Column | None:
    """Look up a column; None for a name that is not registered.

    `nll@eaa` is the column before the @ under another rule, solver or way to predict. Where several files have a column
    of the name, it is that of the first in `TABLES`, so that metrics.csv goes before all others.
    """
    base, _, rule = name.partition("@")
    column = _BY_NAME.get(base)
    if column is None or not rule:
        return column
    if column in _FOREIGN:
        return replace(column, name=name, label=f"{column.label}, {rule}", definition=f"{column.definition}; on {rule}")
    if base in ("unseen_acc", "unseen_loss"):
        definition = f"{column.definition}, after {rule} local steps from the final model"
        return replace(column, name=name, label=f"{column.label}, {rule} steps", definition=definition)
    if personal := re.fullmatch(r"(\w+)\((.+)\)", rule):
        own = f"of barycenters ({personal[1]}) of local posteriors, with weight {personal[2]}, and the global one"
        return replace(column, name=name, label=f"{column.label}, {rule}", definition=f"{column.definition}; {own}")
    if rule in PREDICTIVES:
        definition = f"{column.definition}, {PREDICTIVES[rule]}"
        return replace(column, name=name, label=f"{column.label} by {rule}", definition=definition)
    definition = f"{column.definition}, if the same replies were combined by {rule}"
    return replace(column, name=name, label=f"{column.label} under {rule}", definition=definition)


def label(name: str) -> str:
    """Name a column for people."""
    column = find(name)
    return name if column is None else column.label


def direction(name: str) -> Direction | None:
    """Say which way a column is better; None where no way is, and where nobody knows."""
    column = find(name)
    return None if column is None else column.direction


def heading(name: str) -> str:
    """Name a column for people with an arrow that points to the better values."""
    way = direction(name)
    return label(name) if way is None else f"{label(name)} {ARROWS[way]}"


def describe(name: str) -> str:
    """Define a column in a sentence, with its unit."""
    column = find(name)
    if column is None:
        return "a column of the method's own"
    unit = "" if column.unit in ("", "share") else f"; in {column.unit}"
    return column.definition + unit


def as_markdown(group: Sequence[Column]) -> str:
    """Make the table of docs/metrics.md."""
    differ = len({column.of for column in group}) > 1
    head = ["column", *(["of"] if differ else []), "label", "better", "unit", "definition"]
    lines = [head, ["---"] * len(head)]
    for column in group:
        way = "" if column.direction is None else ARROWS[column.direction]
        of = [column.of] if differ else []
        lines.append([f"`{column.name}`", *of, column.label, way, column.unit, column.definition])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fill(document: str) -> str:
    """Write the tables anew that follow lines such as `<!-- columns: clients.csv -->` in a Markdown text."""

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}\n\n{as_markdown(TABLES[found[2]])}\n"

    return re.sub(r"(<!-- columns: (.+?) -->)\n+(?:\|.*\n)*\n*", table, document)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
