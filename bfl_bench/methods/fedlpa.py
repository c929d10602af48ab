"""FedLPA: layer-wise Laplace approximations with Kronecker factors, combined in one round.

Liu, Liu, Ye, Shen, Li, Jiang, Li: "FedLPA: One-shot Federated Learning with Layer-Wise Posterior Aggregation", NeurIPS
2024, Algorithm 1. Clients train as in FedAvg, then one pass over their data gives A and B of every layer, the Kronecker
factors of the empirical Fisher, damped as in eq. 30. They send the model and the upper triangles. The server wants the
mean of the product of these Gaussians: sum_k B_k M A_k = sum_k B_k M_k A_k for every layer (eqs. 11-14).

Deviations: `solver: cg` solves it to a relative residual, where the paper descends on its square; `gd` is that descent,
`ea` the closed form of Appendix E. `weights: size` gives each sum the weights n_k / n of the released code. In `ea`
the weights sum to one: as eq. 35 is printed, K equal clients would give M / K. In further rounds clients start from the
aggregated model and nothing else is carried over.
"""

import logging
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from bfl_bench.checks import Above, AtLeast
from bfl_bench.inference import kronecker
from bfl_bench.inference.laplace import LaplacePosterior
from bfl_bench.inference.merging import make_laplace, merge_layers, pack_factors, read_replies, solve_exactly
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Layers, Method, Predictive, Replies, Task, Tensors, Update

log = logging.getLogger(__name__)

Solver = Literal["cg", "gd", "ea"]


@dataclass(frozen=True)
class FedLpa(PointMethod):
    predictives: ClassVar[tuple[Predictive, ...]] = ("mean", "draws", "linearised")

    solver: Solver
    damping: Annotated[float, Above(0)]
    damping_norm: kronecker.Norm
    factor_split: kronecker.Split
    tolerance: Annotated[float, Above(0)]
    max_steps: Annotated[int, AtLeast(1)]
    descent_steps: Annotated[int, AtLeast(0)]
    descent_lr: Annotated[float, Above(0)]
    also_solve: list[Solver]

    def check(self, task: Task) -> None:
        kronecker.find_layers(task.model)

    def alternatives(self) -> dict[str, Method]:
        """The same method with other solvers, to be evaluated on the same replies."""
        return {solver: replace(self, solver=solver, also_solve=[]) for solver in self.also_solve}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        trained = train(task, broadcast["params"], client, rng)
        factors = kronecker.factors(task, trained.vector, client, rng, self.factor_split)
        damped = kronecker.damp(list(factors.values()), self.damping, self.damping_norm)
        message = {"params": trained.vector} | pack_factors(dict(zip(factors, damped, strict=True)))
        return Update(message=message, local={"params": trained.vector}, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        # the mean is of what is in no layer, such as statistics of the network
        messages, shares, aggregated = read_replies(task, self.weights, replies)
        merged = merge_layers(task, messages, shares, self._solve, aggregated)
        for name, alarm in merged.alarms.items():
            log.warning("fedlpa: layer %s: %s", name, alarm)
        return task.server.move(state, aggregated) | merged.factors, merged.metrics

    def laplace(self, task: Task, state: Tensors, layers: Layers) -> LaplacePosterior:
        """Predict with the precision as if A and B were independent over clients, sum p A x sum p B (Appendix E)."""
        return make_laplace(task, state, layers)

    def _solve(self, posteriors: kronecker.Posteriors) -> tuple[Tensor, int, str]:
        """Return the mean of the product, the number of steps, and a sentence where the solver did not do its work."""
        if self.solver == "cg":
            return solve_exactly(posteriors, self.tolerance, self.max_steps)
        start = posteriors.approximate_inverse()(posteriors.right_side())
        if self.solver == "ea":
            return start, 0, ""
        matrix, steps = posteriors.descend(start, self.descent_steps, self.descent_lr), self.descent_steps
        found, before = posteriors.residual(matrix), posteriors.residual(start)
        worse = f"{steps} steps of gradient descent went from a residual of {before:.1e}, the closed form's, to "
        return matrix, steps, "" if found <= before else f"{worse}{found:.1e}; a smaller method.descent_lr may help"
