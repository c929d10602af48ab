"""What the options of rules may be, and what they do together."""

import pytest
import torch

from bfl_bench.aggregators import alpha, gaa, moments, rklb
from bfl_bench.build import plan
from bfl_bench.errors import ConfigError
from tests.composing import resolve

WRONG = [
    "ppa aggregator.num_samples=1",
    "alpha aggregator.max_iterations=0",
    "alpha aggregator.alpha=0",
    "alpha aggregator.alpha=1.1",
    "cf aggregator.clamp=[8,-8]",
    "cf aggregator.clamp=[1]",
    "eaa aggregator.running_clamp=[0,0]",
]


@pytest.mark.parametrize("override", WRONG)
def test_out_of_range(override: str) -> None:
    rule, value = override.split()
    with pytest.raises(ConfigError, match=value.split("=")[0]):
        plan(resolve("method=fvb", f"aggregator={rule}", value))


def test_normalised_and_clamped_gaa() -> None:
    means, variances = torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    weights = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert gaa(means, variances, weights, normalised=True, running_clamp=[-8, 8])[1].item() == pytest.approx(1.0)


def test_alpha_is_no_worse_than_where_it_starts() -> None:
    """Clients far apart, where a climb from the moments alone ends on a lower peak than `rklb`'s."""
    means = torch.tensor([[6.0], [5.0], [0.0]], dtype=torch.float64)
    variances = torch.tensor([[0.1], [0.1], [4.0]], dtype=torch.float64)
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)

    def overlap(gaussian: tuple[torch.Tensor, torch.Tensor]) -> float:
        """The sum over clients of w log of the integral of N(client)^0.5 N(candidate)^0.5, in closed form."""
        mean, variance = gaussian
        total = variances + variance
        logs = 0.25 * (variances.log() + variance.log()) - 0.5 * (total / 2).log() - (means - mean) ** 2 / (4 * total)
        return (weights.log() + logs.sum(1)).logsumexp(0).item()

    best = overlap(alpha(means, variances, weights, 0.5))
    assert best >= overlap(rklb(means, variances, weights))
    assert best >= overlap(moments(means, variances, weights))


def test_alpha_converges_at_small_alpha() -> None:
    """The distance to `rklb` is proportional to alpha down to the smallest that is allowed."""
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(4, 5, dtype=torch.float64, generator=generator)
    variances = torch.rand(4, 5, dtype=torch.float64, generator=generator) + 0.5
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    errors = []
    for value in (1e-3, 1e-6):
        _, variance = alpha(means, variances, weights, value)
        errors.append((variance / rklb(means, variances, weights)[1] - 1).abs().max().item())
    assert errors[1] == pytest.approx(errors[0] / 1000, rel=0.05)  # second order in alpha is left out
