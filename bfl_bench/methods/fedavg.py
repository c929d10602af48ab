"""FedAvg: every client trains the server's model on its own data, the server averages the results.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, Algorithm 1. With `weights: uniform` it is the FED baseline of BFL-P.

Deviations: none.
"""

from dataclasses import dataclass

from bfl_bench.inference.point import PointMethod


@dataclass(frozen=True)
class FedAvg(PointMethod):
    """`PointMethod` has all of it: that is what the other point methods start from."""
