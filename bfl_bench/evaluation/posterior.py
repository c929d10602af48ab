"""What a Gaussian over a network's weights looks like: has it moved from where it started, what does it know?"""

from dataclasses import dataclass

from torch import Tensor

QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Independent Gaussians of D weights, where they started, and their prior; log variances as they are in effect."""

    mean: Tensor  # (D,)
    log_variance: Tensor  # (D,)
    initial_log_variance: Tensor | None = None  # (D,); None: they start as points
    prior_variance: float | None = None  # of a prior N(0, prior_variance); None: there is no proper one
    clamped: Tensor | None = None  # (D,) which log variances a clamp changes; None: there is none


def describe_posterior(posterior: Posterior) -> dict[str, float]:
    """Compute the columns that `eval.posterior` adds, in float64; nothing of a posterior without weights."""
    mean, log_variance = posterior.mean.double(), posterior.log_variance.double()
    if not len(mean):
        return {}
    found: dict[str, float] = {}
    if posterior.initial_log_variance is not None:
        change = log_variance - posterior.initial_log_variance.double()
        found["log_variance_moved"] = change.abs().mean().item()
        found["log_variance_spread"] = change.std(correction=0).item()
    ordered = (mean.abs() * (-0.5 * log_variance).exp()).sort().values
    for share in QUANTILES:
        found[f"snr{share * 100:.0f}"] = ordered[round(share * (len(ordered) - 1))].item()
    if posterior.prior_variance is not None:
        precision = 1 / posterior.prior_variance
        ratio = log_variance.exp() * precision
        distance = mean.square() * precision
        found["posterior_kl"] = 0.5 * (distance + ratio - 1 - ratio.log()).sum().item()
    if posterior.clamped is not None:
        found["clamped"] = posterior.clamped.double().mean().item()
    return found
