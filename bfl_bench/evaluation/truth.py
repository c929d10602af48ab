"""True posteriors of small problems, and how far a method's posterior and its predictions are from them.

A problem is a dataset, a network, noise and a prior N(0, 1 / prior_precision) of every parameter; conf/experiment has
one file for each, truth_NAME. `posteriors/NAME.npz` holds its posterior given all training examples: in closed form
where the model is conjugate, else by NUTS, as `scripts/truth.py` makes it. All distances are computed in float64.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bfl_bench.errors import RunError
from bfl_bench.evaluation.regression import mixture_cdf, mixture_quantile
from bfl_bench.likelihood import AnyPrediction, NumericPrediction, Prediction
from bfl_bench.reading import read_arrays, read_json

POSTERIORS = Path(__file__).parent / "posteriors"
DIGESTS = "sha256.json"
NUM_EDGES = 256  # of the bins in which the total variation of densities is summed up
BEYOND = 8  # standard deviations of the true predictive that the bins cover
LEVELS = torch.arange(1, 20, dtype=torch.float64) / 20


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of a distribution over a network's P parameters."""

    mean: Tensor  # (P,)
    covariance: Tensor  # (P, P), or (P,) where it is diagonal; zeros: a point

    @property
    def matrix(self) -> Tensor:
        covariance = self.covariance.double()
        return covariance.diag() if covariance.dim() == 1 else covariance

    @classmethod
    def of(cls, draws: Tensor) -> "Moments":
        """Take the moments of draws (S, P), all alike; of a single one, a point."""
        draws = draws.double()
        mean = draws.mean(0)
        return cls(mean, (draws - mean).T @ (draws - mean) / len(draws))


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The posterior of a problem, and what it predicts for the test examples."""

    name: str
    moments: Moments
    identifiable: bool  # whether moments of parameters mean something: not in a network with symmetric hidden units
    prediction: AnyPrediction
    draws: Tensor  # (S, P), some of them
    about: Mapping[str, Any]  # how it was made, and what it belongs to


def list_truths() -> list[str]:
    return sorted(path.stem for path in POSTERIORS.glob("*.npz"))


def read_truth(name: str) -> Truth:
    """Read a stored posterior; a file that is not the one that was made is refused."""
    path = POSTERIORS / f"{name}.npz"
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != read_json(POSTERIORS / DIGESTS)[name]:
        raise RunError(f"{path} is damaged: its sha256 is {found}; make it again with scripts/truth.py {name}")
    arrays = read_arrays(path)
    about = json.loads(str(arrays["about"]))
    size = len(arrays["mean"])
    covariance = np.zeros((size, size))
    covariance[np.triu_indices(size)] = arrays["covariance"]
    covariance = covariance + np.triu(covariance, 1).T
    prediction: AnyPrediction
    if "log_probabilities" in arrays:
        prediction = Prediction(torch.from_numpy(arrays["log_probabilities"]), None)
    else:
        prediction = NumericPrediction(torch.from_numpy(arrays["means"]), torch.from_numpy(arrays["variances"]))
    return Truth(
        name=name,
        moments=Moments(torch.from_numpy(arrays["mean"]), torch.from_numpy(covariance)),
        identifiable=about["identifiable"],
        prediction=prediction,
        draws=torch.from_numpy(arrays["draws"]),
        about=about,
    )


def digest_data(*tensors: Tensor) -> str:
    """Compute the sha256 of data, to four digits: sums of another processor may differ in the last."""
    digest = hashlib.sha256()
    for tensor in tensors:
        rounded = (tensor.double() * 1e4).round().to(torch.int64).cpu()
        digest.update(str(tuple(tensor.shape)).encode() + rounded.numpy().tobytes())
    return digest.hexdigest()


def compare(truth: Truth, moments: Moments | None, prediction: AnyPrediction, unit: float) -> dict[str, float | None]:
    """Compute the columns of `eval.truth`; those of moments only where they mean something."""
    row: dict[str, float | None] = {}
    if truth.identifiable and moments is not None:
        row |= compare_moments(moments, truth.moments)
    if isinstance(prediction, Prediction) and isinstance(truth.prediction, Prediction):
        return row | compare_classes(prediction.log_probabilities, truth.prediction.log_probabilities)
    assert isinstance(prediction, NumericPrediction)
    assert isinstance(truth.prediction, NumericPrediction)
    return row | compare_numbers(prediction, truth.prediction, unit)


def compare_moments(found: Moments, true: Moments) -> dict[str, float | None]:
    difference = found.mean.double() - true.mean.double()
    scaled = torch.linalg.solve(true.matrix, difference)
    variances = found.matrix.diagonal()
    spread = (variances / true.matrix.diagonal()).log().mean().item() / 2 if (variances > 0).all() else None
    return {
        "truth_kl": gaussian_kl(found, true),
        "truth_w2": gaussian_w2(found, true),
        "truth_mean": math.sqrt((difference @ scaled).item() / len(difference)),
        "truth_spread": spread,
    }


def gaussian_kl(found: Moments, true: Moments) -> float | None:
    """Compute KL(found || true) of Gaussians, in nats; None: infinite, as of a point."""
    root, failed = torch.linalg.cholesky_ex(found.matrix)
    if failed or (root.diagonal() < 1e-12).any():
        return None
    true_root = torch.linalg.cholesky(true.matrix)
    difference = found.mean.double() - true.mean.double()
    whitened = torch.linalg.solve_triangular(true_root, root, upper=False)
    distance = torch.linalg.solve_triangular(true_root, difference[:, None], upper=False)
    log_ratio = 2 * (true_root.diagonal().log().sum() - root.diagonal().log().sum())
    total = whitened.square().sum() + distance.square().sum() - len(difference) + log_ratio
    return 0.5 * float(total)


def gaussian_w2(found: Moments, true: Moments) -> float:
    """Compute the 2-Wasserstein distance of Gaussians: sqrt(|a - b|^2 + tr(A + B - 2 (A^1/2 B A^1/2)^1/2))."""
    values, vectors = torch.linalg.eigh(true.matrix)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    inner = torch.linalg.eigvalsh(root @ found.matrix @ root).clamp(min=0).sqrt().sum()
    squared = (found.mean.double() - true.mean.double()).square().sum()
    squared += found.matrix.trace() + true.matrix.trace() - 2 * inner
    return math.sqrt(max(squared.item(), 0.0))


def compare_classes(log_probabilities: Tensor, true: Tensor, num_bins: int = 15) -> dict[str, float | None]:
    """Compare predictive probabilities (n, C): distance, agreement, and calibration with the truth as the labels."""
    ours, theirs = log_probabilities.double().exp(), true.double().exp()
    confidence, chosen = ours.max(1)
    right = theirs.gather(1, chosen[:, None])[:, 0]
    bins = (confidence * num_bins).ceil().long().clamp(1, num_bins) - 1
    gaps = torch.zeros(num_bins, dtype=torch.float64).index_add(0, bins, confidence - right)
    return {
        "truth_tv": (ours - theirs).abs().sum(1).mean().item() / 2,
        "truth_agreement": (chosen == theirs.max(1).indices).double().mean().item(),
        "truth_calibration": gaps.abs().sum().item() / len(ours),
    }


def compare_numbers(found: NumericPrediction, true: NumericPrediction, unit: float) -> dict[str, float | None]:
    """Compare predictive mixtures: distance, spread, and calibration with labels that the truth would draw."""
    mean, deviation = _describe(true)
    steps = torch.linspace(-BEYOND, BEYOND, NUM_EDGES, dtype=torch.float64)
    ends = torch.zeros(1, len(mean)).double(), torch.ones(1, len(mean)).double()
    masses: list[Tensor] = []  # of the bins between the steps, and of what lies beyond, (edges + 1, n)
    for one in (found, true):
        below = torch.stack([_cdf(one, mean + step * deviation) for step in steps])
        masses.append(torch.diff(torch.cat([ends[0], below, ends[1]]), dim=0))
    gaps = []
    for level in LEVELS.tolist():
        quantiles = mixture_quantile(found.means, found.variances, level)
        gaps.append(abs(_cdf(true, quantiles).mean().item() - level))
    return {
        "truth_tv": (masses[0] - masses[1]).abs().sum(0).mean().item() / 2,
        "truth_calibration": math.fsum(gaps) / len(gaps),
        "truth_std": (_describe(found)[1] - deviation).square().mean().sqrt().item() * unit,
    }


def _cdf(prediction: NumericPrediction, at: Tensor) -> Tensor:
    return mixture_cdf(prediction.means, prediction.variances, at)


def _describe(prediction: NumericPrediction) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation of each mixture, (n,)."""
    means, variances = prediction.means.double(), prediction.variances.double()
    mean = means.mean(0)
    return mean, (variances.mean(0) + (means - mean).square().mean(0)).sqrt()
