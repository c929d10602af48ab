"""Calibration beyond the ECE of `metrics`: its direction, other bins, and the parts of the Brier score.

`log_probabilities` is (n, C), `labels` is (n,). Everything is computed in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bfl_bench.evaluation.ranking import sort_with_ties
from bfl_bench.likelihood import Bin


@dataclass(frozen=True)
class SignedError:
    """The ECE in two parts: of bins whose confidence is above their accuracy, and of those where it is below."""

    over: float
    under: float

    @property
    def signed(self) -> float:
        """sum_m n_m/n (confidence_m - accuracy_m): positive where the model is overconfident on the whole."""
        return self.over - self.under


def signed_calibration_error(bins: Sequence[Bin]) -> SignedError:
    """Split the ECE of these bins into two parts, both at least 0, whose sum it is."""
    total = sum(bin_.count for bin_ in bins)
    gaps = [bin_.count * (bin_.confidence - bin_.accuracy) for bin_ in bins]
    over, under = (math.fsum(sign * gap for gap in gaps if sign * gap > 0) / total for sign in (1, -1))
    return SignedError(over, under)


def maximum_calibration_error(bins: Sequence[Bin]) -> float:
    """Take the largest |accuracy_m - confidence_m| of the bins with at least 1 % of the examples.

    Up to 100 bins there is always such a bin; among more there may be none, and the result is NaN.
    """
    total = sum(bin_.count for bin_ in bins)
    gaps = [abs(bin_.accuracy - bin_.confidence) for bin_ in bins if bin_.count > 0 and 100 * bin_.count >= total]
    return max(gaps, default=math.nan)


def adaptive_calibration_error(log_probabilities: Tensor, labels: Tensor, num_bins: int) -> float:
    """Compute the ECE over bins of equal count, cut from the examples in ascending order of confidence.

    The example of rank r = 0, ..., n-1 lies in bin floor(r M / n): where n is not a multiple of M the counts differ by
    one, and with fewer examples than bins each is a bin of its own. Examples of equal confidence all count as right to
    the degree that they are on average, so a cut through them gives each side the same accuracy in whatever order.
    """
    confidence, prediction = log_probabilities.double().exp().max(1)
    right = sort_with_ties(confidence, (prediction == labels).double())
    n = len(labels)
    bins = torch.arange(n, device=labels.device) * num_bins // n
    gaps = torch.zeros(num_bins, dtype=torch.float64, device=labels.device)
    return gaps.index_add(0, bins, right - confidence.sort().values).abs().sum().item() / n


def classwise_calibration_error(log_probabilities: Tensor, labels: Tensor, num_bins: int) -> float:
    """Average over the classes c the ECE of p(c) as a prediction of "the label is c".

    The bins are of equal width, the m-th being (m-1, m] / M, the first with 0: as those of `calibration_bins`, but
    every example lies in one bin of each class.
    """
    predicted, observed, cells = _by_class(log_probabilities, labels, num_bins)
    n, num_classes = log_probabilities.shape
    gaps = predicted.new_zeros(num_classes * num_bins).index_add(0, cells, predicted - observed)
    return gaps.abs().sum().item() / (n * num_classes)


@dataclass(frozen=True, kw_only=True)
class BrierParts:
    """Parts of the Brier score, which is reliability - resolution + uncertainty + within."""

    reliability: float
    resolution: float
    uncertainty: float
    within: float


def brier_decomposition(log_probabilities: Tensor, labels: Tensor, num_bins: int) -> BrierParts:
    """Decompose `brier_score` after Murphy, over the bins of `classwise_calibration_error`, summed over the classes.

    With p the mean probability of class c in a bin, y the share of the class there, and Y its share of all examples:
    reliability sums n_m/n (p - y)^2, resolution n_m/n (y - Y)^2, uncertainty Y (1 - Y). `within` is what the bins do
    not see (Stephenson et al. 2008): the variance of the probabilities inside a bin less twice their covariance with
    the label. It is 0 where all probabilities of a bin are equal.
    """
    predicted, observed, cells = _by_class(log_probabilities, labels, num_bins)
    n, num_classes = log_probabilities.shape
    values = torch.stack([torch.ones_like(predicted), predicted, observed])
    sums = values.new_zeros(3, num_classes * num_bins).index_add(1, cells, values)
    count = sums[0]
    mean_predicted, mean_observed = sums[1:] / count.clamp(min=1)
    share = observed.view(n, num_classes).mean(0)
    distance, miss = predicted - mean_predicted[cells], observed - mean_observed[cells]
    parts = [
        (count * (mean_predicted - mean_observed).square()).sum() / n,
        (count * (mean_observed - share.repeat_interleave(num_bins)).square()).sum() / n,
        (share * (1 - share)).sum(),
        (distance.square() - 2 * distance * miss).sum() / n,
    ]
    reliability, resolution, uncertainty, within = torch.stack(parts).tolist()
    return BrierParts(reliability=reliability, resolution=resolution, uncertainty=uncertainty, within=within)


def _by_class(log_probabilities: Tensor, labels: Tensor, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out each example's probability of each class, whether it is the label, and their cell of (class, bin)."""
    probabilities = log_probabilities.double().exp()
    classes = torch.arange(probabilities.shape[1], device=labels.device)
    bins = (probabilities * num_bins).ceil().long().clamp(1, num_bins) - 1
    observed = (labels[:, None] == classes).double()
    return probabilities.flatten(), observed.flatten(), (classes * num_bins + bins).flatten()
