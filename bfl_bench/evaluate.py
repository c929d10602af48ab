"""One evaluation for all methods: average the predictions of parameter draws, then score them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bfl_bench import metrics
from bfl_bench.data.dataset import Split
from bfl_bench.flat import FlatModel


@dataclass(frozen=True)
class Scores:
    accuracy: float
    nll: float
    ece: float
    brier: float


@torch.inference_mode()
def predict(model: FlatModel, draws: Iterator[Tensor], x: Tensor, batch_size: int) -> Tensor:
    """Log of the mean over draws of the predicted probabilities, (n, C). The model is left in the last draw."""
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
    return total - math.log(num_draws)


def evaluate(
    model: FlatModel,
    draws: Iterator[Tensor],
    data: Split,
    batch_size: int,
    ece_bins: int,
    nll_epsilon: float = 0.0,
    num_classes: int | None = None,
) -> Scores:
    """Of outputs beyond `num_classes`, such as one for "none of these", the prediction is given that it is none."""
    log_probabilities = predict(model, draws, data.x, batch_size)
    if num_classes is not None and log_probabilities.shape[1] > num_classes:
        log_probabilities = log_probabilities[:, :num_classes].log_softmax(1)
    return Scores(
        accuracy=metrics.accuracy(log_probabilities, data.y),
        nll=metrics.negative_log_likelihood(log_probabilities, data.y, nll_epsilon),
        ece=metrics.expected_calibration_error(log_probabilities, data.y, ece_bins),
        brier=metrics.brier_score(log_probabilities, data.y),
    )
