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

from bfl_bench.aggregators import WeightedMean
from bfl_bench.checks import Above, AtLeast
from bfl_bench.inference import kronecker
from bfl_bench.inference.laplace import LaplacePosterior, kronecker_laplace
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
        message = {"params": trained.vector}
        factors = kronecker.factors(task, trained.vector, client, rng, self.factor_split)
        damped = kronecker.damp(list(factors.values()), self.damping, self.damping_norm)
        for name, (a, b) in zip(factors, damped, strict=True):
            message |= {f"{name}.A": kronecker.upper_triangle(a), f"{name}.B": kronecker.upper_triangle(b)}
        return Update(message=message, local={"params": trained.vector}, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        messages: list[Tensors] = []
        weights: list[float] = []
        mean = WeightedMean()
        for client_id, message in replies:
            messages.append(message)
            weights.append(task.weight(self.weights, client_id))
            mean.add(message["params"], weights[-1])
        aggregated = mean.result()  # of what is in no layer, such as statistics of the network
        shares = torch.tensor(weights, dtype=torch.float64, device=aggregated.device) / sum(weights)
        residual, num_steps, num_unsolved, factors = 0.0, 0, 0, Tensors()
        for layer in kronecker.find_layers(task.model):
            a, b = (_stack(messages, f"{layer.name}.{factor}") for factor in "AB")
            means = torch.stack([layer.read(message["params"].double()) for message in messages])
            posteriors = kronecker.Posteriors(a, b, means, shares)
            matrix, steps, alarm = self._solve(posteriors)
            if alarm:
                log.warning("fedlpa: layer %s: %s", layer.name, alarm)
            layer.write(aggregated, matrix)
            residual, num_steps = max(residual, posteriors.residual(matrix)), num_steps + steps
            num_unsolved += bool(alarm)
            factors |= {
                f"{layer.name}.{name}": posteriors.mean_factor(each).float() for name, each in (("A", a), ("B", b))
            }
        found = {"residual": residual, "solver_steps": num_steps, "unsolved_layers": num_unsolved}
        return task.server.move(state, aggregated) | factors, {name: float(value) for name, value in found.items()}

    def laplace(self, task: Task, state: Tensors, layers: Layers) -> LaplacePosterior:
        """Predict with the precision as if A and B were independent over clients, sum p A x sum p B (Appendix E)."""
        names = [layer.name for layer in kronecker.find_layers(task.model)]
        factors = {name: (state[f"{name}.A"], state[f"{name}.B"]) for name in names}
        return kronecker_laplace(task, state["params"], factors, sum(task.sizes), layers)

    def _solve(self, posteriors: kronecker.Posteriors) -> tuple[Tensor, int, str]:
        """Return the mean of the product, the number of steps, and a sentence where the solver did not do its work."""
        start = posteriors.approximate_inverse()(posteriors.right_side())
        if self.solver == "ea":
            return start, 0, ""
        if self.solver == "gd":
            matrix, steps = posteriors.descend(start, self.descent_steps, self.descent_lr), self.descent_steps
            found, before = posteriors.residual(matrix), posteriors.residual(start)
            worse = f"{steps} steps of gradient descent went from a residual of {before:.1e}, the closed form's, to "
            return matrix, steps, "" if found <= before else f"{worse}{found:.1e}; a smaller method.descent_lr may help"
        matrix, steps = posteriors.conjugate_gradients(start, self.tolerance, self.max_steps)
        found = posteriors.residual(matrix)
        short = steps == self.max_steps and found > self.tolerance
        stopped = (
            f"conjugate gradients stopped after {steps} steps at a residual of {found:.1e}, not {self.tolerance:.1e}"
        )
        return matrix, steps, f"{stopped}; raise method.max_steps or method.damping" if short else ""


def _stack(messages: list[Tensors], name: str) -> Tensor:
    return torch.stack([kronecker.from_upper_triangle(message[name].double()) for message in messages])
