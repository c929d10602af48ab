"""Rules that combine what the clients send. Torch only: usable outside the runner.

from bfl_bench.aggregators import rklb
mean, variance = rklb(means, variances, weights)   # (K, D), (K, D), (K,) -> (D,), (D,)
"""

from bfl_bench.aggregators.algebra import WeightedMean, step_towards
from bfl_bench.aggregators.blocks import Combination, Rule, combine
from bfl_bench.aggregators.divergence import alpha
from bfl_bench.aggregators.full import rklb_full, wb_full
from bfl_bench.aggregators.rules import aalv, cf, eaa, gaa, moments, ppa, rklb, wb

__all__ = [
    "Combination",
    "Rule",
    "WeightedMean",
    "aalv",
    "alpha",
    "cf",
    "combine",
    "eaa",
    "gaa",
    "moments",
    "ppa",
    "rklb",
    "rklb_full",
    "step_towards",
    "wb",
    "wb_full",
]
