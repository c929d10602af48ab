"""One evaluation for all methods: average the predictions of parameter draws, then score them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bfl_bench.evaluation import metrics
from bfl_bench.models.flat import FlatModel


@dataclass(frozen=True)
class Scores:
    accuracy: float
    nll: float
    ece: float
    brier: float
    bins: tuple[metrics.Bin, ...]  # of the reliability diagram


@torch.inference_mode()
def predict(
    model: FlatModel, draws: Iterator[Tensor], x: Tensor, batch_size: int, num_classes: int | None = None
) -> Tensor:
    """Log of the mean over draws of the predicted probabilities, (n, C, ...). The model is left in the last draw.

    Of outputs beyond `num_classes`, such as one for "none of these", the prediction is given that it is none.
    """
    model.module.eval()
    total: Tensor | None = None
    num_draws = 0
    for params in draws:
        model.load(params)
        logits = torch.cat([model(part) for part in torch.split(x, batch_size)])
        log_probabilities = logits.log_softmax(1)
        total = log_probabilities if total is None else torch.logaddexp(total, log_probabilities)
        num_draws += 1
    if total is None:
        raise ValueError("a prediction needs at least one draw of the parameters")
    if num_classes is not None and total.shape[1] > num_classes:
        return total[:, :num_classes].log_softmax(1)
    return total - math.log(num_draws)


def score(log_probabilities: Tensor, labels: Tensor, ece_bins: int, nll_epsilon: float = 0.0) -> Scores:
    """Of predictions (n, C) for labels (n,), or (n, C, positions) for (n, positions): each position then counts."""
    if log_probabilities.dim() > 2:
        log_probabilities, labels = log_probabilities.movedim(1, -1).flatten(0, -2), labels.flatten()
    bins = metrics.calibration_bins(log_probabilities, labels, ece_bins)
    return Scores(
        accuracy=metrics.accuracy(log_probabilities, labels),
        nll=metrics.negative_log_likelihood(log_probabilities, labels, nll_epsilon),
        ece=metrics.calibration_error(bins),
        brier=metrics.brier_score(log_probabilities, labels),
        bins=tuple(bins),
    )
