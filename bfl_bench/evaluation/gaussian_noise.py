"""Numbers with Gaussian noise: the likelihood of regression.

Labels are as the network gets them, in units of `unit`; scores are in the labels' own unit. The variance of the noise
is a number, or learnt: the network's second output then gives it, softplus(output) + 1e-6, for each input of its own.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bfl_bench.evaluation.regression import (
    central_intervals,
    crps,
    mixture_nll,
    quantile_calibration_error,
    root_mean_squared_error,
)
from bfl_bench.likelihood import AnyPrediction, NumericPrediction, Reduction, Scores

SMALLEST = 1e-6  # variance that can be learnt
NUM_LEVELS = 19  # of the calibration of quantiles: 5 %, 10 %, ..., 95 %


@dataclass(frozen=True)
class GaussianNoise:
    """Labels (n,) are N(output, variance); outputs are (n, 1), or (n, 2) where the variance is learnt."""

    variance: float | None  # in units of `unit`, squared; None: learnt
    unit: float = 1.0  # what a label of 1 is in the unit that scores are in

    @property
    def num_outputs(self) -> int:
        return 2 if self.variance is None else 1

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Take means and variances, (n,) each, out of a network's outputs."""
        if self.variance is None:
            return outputs[:, 0], F.softplus(outputs[:, 1]) + SMALLEST
        return outputs[:, 0], torch.full_like(outputs[:, 0], self.variance)

    def loss(self, outputs: Tensor, labels: Tensor, reduction: Reduction = "mean") -> Tensor:
        mean, variance = self.split(outputs)
        losses = ((2 * math.pi * variance).log() + (labels - mean).square() / variance) / 2
        return losses.mean() if reduction == "mean" else losses.sum()

    def slopes(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = self.split(outputs)
        squares = (labels - mean).square() / variance
        along = [(mean - labels) / variance]
        if self.variance is None:
            along.append((1 - squares) / (2 * variance) * outputs[:, 1].sigmoid())
        return ((2 * math.pi * variance).log() + squares) / 2, torch.stack(along, 1)

    def measure(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Add nothing: the loss says it all."""
        return {}

    def mixture(self) -> "NumericMixture":
        return NumericMixture(self)

    def score(self, prediction: AnyPrediction, labels: Tensor, ece_bins: int, nll_epsilon: float = 0.0) -> Scores:
        """Score predictions in the labels' own unit; the two numbers are for classes."""
        assert isinstance(prediction, NumericPrediction)
        means, targets = prediction.means.double() * self.unit, labels.double() * self.unit
        variances = prediction.variances.double() * self.unit**2
        values = {
            "rmse": root_mean_squared_error(means, targets),
            "nll": mixture_nll(means, variances, targets),
            "crps": crps(means, variances, targets),
            "quantile_error": quantile_calibration_error(means, variances, targets, NUM_LEVELS),
        }
        for interval in central_intervals(means, variances, targets):
            values[f"covered{100 * interval.level:.0f}"] = interval.coverage
            values[f"width{100 * interval.level:.0f}"] = interval.width
        return Scores(values, ())

    def linearise(self, outputs: Tensor, variances: Tensor) -> NumericPrediction:
        mean, noise = self.split(outputs)
        return NumericPrediction(mean[None], (noise + variances[:, 0])[None])

    def expected_labels(self, outputs: Tensor) -> tuple[Tensor, float]:
        """Make the six labels of a Gauss-Hermite rule of three points, that in the middle four times.

        A squared gradient is a polynomial of degree 4 in the label, of which the rule gives the exact mean.
        """
        mean, variance = self.split(outputs)
        points = outputs.new_tensor([0.0, 0.0, 0.0, 0.0, 3**0.5, -(3**0.5)])
        return (mean[:, None] + variance.sqrt()[:, None] * points).flatten(), 1.0


class NumericMixture:
    """The members' Gaussians, side by side."""

    def __init__(self, likelihood: GaussianNoise) -> None:
        self._likelihood = likelihood
        self._members: list[tuple[Tensor, Tensor]] = []

    def add(self, outputs: Tensor) -> None:
        self._members.append(self._likelihood.split(outputs))

    def result(self) -> NumericPrediction:
        if not self._members:
            raise ValueError("a prediction needs at least one draw of the parameters")
        means, variances = zip(*self._members, strict=True)
        return NumericPrediction(torch.stack(means), torch.stack(variances))
