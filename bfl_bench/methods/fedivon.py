"""FedIvon: clients learn a Gaussian over all parameters with IVON, the server weighs their means by curvature.

Pal, Gupta, Sarwar, Rai: "Federated Learning with Uncertainty and Personalization via Efficient Second-order
Optimization", TMLR 2025. IVON is in inference/ivon.py. The server's posterior is N(m, 1 / (ess (h + delta))). So is
a client's, with an ess of its own: the number of its examples, divided by the temperature. With p_k the weights of
clients, h = sum p_k h_k and m = sum p_k h_k m_k / sum p_k h_k; the server's ess is the sum of all clients'.

With an `aggregator` the rule combines the clients' variances 1 / (ess_k (h_k + delta)) instead, as in BA-BFL (Jamoussi,
Serra, Stavrou, Kountouris, 2024) with IVON, and the server's ess is the weighted mean of the cohort's. There `rklb`
with weights by size counts n_k twice, once as a weight and once in the precision; with `weights: uniform` its mean is
that of the product of the clients' posteriors.

`start: fixed` is what BA-BFL's released code does: every local update begins at h0, whatever the server's curvature is.
`cosine_steps` is its learning rate, which falls and rises within a local update.

Deviations: a curvature below zero, which IVON allows down to -delta, has weight 0 in the mean of the means; where no
client has another, the mean is the plain average. BA-BFL's code sends 1 / (n_k h_k + delta), without the factor n_k of
delta. IVON's momentum starts anew with every local update. Training loss and accuracy are those of the draws.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from bfl_bench.aggregators import Combination, Rule, WeightedMean, step_towards
from bfl_bench.aggregators.algebra import solve
from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.devices import bring
from bfl_bench.errors import ConfigError
from bfl_bench.evaluation.posterior import Posterior
from bfl_bench.inference.ivon import Ivon
from bfl_bench.inference.train import Gradient, train
from bfl_bench.method import Client, Method, Needs, Predictive, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class Swinging:
    """IVON with a learning rate that goes from its value to `floor` and back, on a cosine of `steps` steps each way."""

    ivon: Ivon
    steps: int
    floor: float

    def begin(self, parameters: Tensor) -> Tensors:
        return self.ivon.begin(parameters)

    def step(self, parameters: Tensor, gradient: Gradient, memory: Tensors, lr: float, rng: torch.Generator) -> None:
        height = 0.5 * (1 + math.cos(math.pi * memory["steps"].item() / self.steps))
        self.ivon.step(parameters, gradient, memory, self.floor + height * (lr - self.floor), rng)


@dataclass(frozen=True)
class FedIvon(Method):
    predictives: ClassVar[tuple[Predictive, ...]] = ("draws", "mean")
    needs: ClassVar[Needs] = Needs(sgd=True)

    aggregator: Rule | None  # None: the paper's, on curvatures
    start: Literal["server", "fixed"]
    ess: Literal["size"] | Annotated[float, Above(0)]
    temperature: Annotated[float, Above(0)]
    h0: Annotated[float, Above(0)]
    beta1: Annotated[float, Between(0, 0.999999)]
    beta2: Annotated[float, Between(0, 1)]
    delta: Annotated[float, AtLeast(0)]
    samples: Annotated[int, AtLeast(1)]
    clip: Annotated[float, Above(0)] | None
    rescale: bool
    cosine_steps: Annotated[int, AtLeast(1)] | None
    cosine_floor: Annotated[float, AtLeast(0)]

    def check(self, task: Task) -> None:
        for key, instead in (("momentum", "method.beta1"), ("weight_decay", "method.delta")):
            if value := getattr(task.local, key):
                raise ConfigError(f"local.{key}", value, f"0; method {self.name} has {instead} instead")

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        precision = torch.full_like(task.model.gradient, self.h0 + self.delta)
        ess = precision.new_full((), sum(map(self._ess, task.sizes)))
        return {"params": task.model.initial.clone(), "example_precision": precision, "ess": ess}

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        names = ("params", "example_precision") if self.start == "server" else ("params",)
        return {name: state[name] for name in names}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        ivon = Ivon(
            ess=self._ess(len(client)),
            h0=self.h0,
            beta1=self.beta1,
            beta2=self.beta2,
            delta=self.delta,
            samples=self.samples,
            clip=self.clip,
            rescale=self.rescale,
        )
        remembered = ivon.begin(task.model.gradient)
        if self.start == "server":
            remembered["precision"].copy_(broadcast["example_precision"])
        optimizer = ivon if self.cosine_steps is None else Swinging(ivon, self.cosine_steps, self.cosine_floor)
        trained = train(task, broadcast["params"], client, rng, optimizer=optimizer, memory=remembered)
        message = {"params": trained.vector, "example_precision": trained.memory["precision"]}
        local = message | {"ess": trained.vector.new_full((), ivon.ess)}
        return Update(message=message, local=local, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        size = len(state["example_precision"])
        points, precisions, curvatures, products = WeightedMean(), WeightedMean(), WeightedMean(), WeightedMean()
        ess = WeightedMean()
        gaussians = self.aggregator and Combination(self.aggregator, rng, torch.reciprocal)
        for client_id, message in replies:
            weight, own_ess = task.weight(self.weights, client_id), self._ess(task.sizes[client_id])
            precision = message["example_precision"].double()
            points.add(message["params"], weight)
            ess.add(torch.tensor(own_ess), weight)
            if gaussians is not None:
                gaussians.add(message["params"][:size], own_ess * precision, weight)
            else:
                curvature = (precision - self.delta).clamp(min=0)
                precisions.add(precision, weight)
                curvatures.add(curvature, weight)
                products.add(curvature * message["params"][:size], weight)
        aggregated = points.result()
        if gaussians is not None:
            aggregated[:size], variance = gaussians.result()
            new_ess = ess.result().item()
            precision = 1 / (variance * new_ess)
        else:
            aggregated[:size] = solve(curvatures.result(), products.result(), fallback=aggregated[:size])
            new_ess = sum(map(self._ess, task.sizes))
            precision = precisions.result()
        new = {
            "params": step_towards(state["params"], aggregated, task.server.lr),
            "example_precision": precision.to(state["example_precision"].dtype),
            "ess": torch.full_like(state["ess"], new_ess),
        }
        return new, {}

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        deviation = (model["ess"] * model["example_precision"]).rsqrt()
        for _ in range(num):
            drawn = model["params"].clone()
            drawn[: len(deviation)] += deviation * bring(torch.randn(len(deviation), generator=rng), drawn.device)
            yield drawn

    def gaussian(self, task: Task, model: Tensors) -> tuple[Tensor, Tensor] | None:
        precision = model["ess"] * model["example_precision"]
        return model["params"][: len(precision)], precision.reciprocal()

    def with_gaussian(self, task: Task, model: Tensors, mean: Tensor, variance: Tensor) -> Tensors:
        params = model["params"].clone()
        params[: len(mean)] = mean
        precision = (variance * model["ess"]).reciprocal().to(params.dtype)
        return {"params": params, "example_precision": precision, "ess": model["ess"]}

    def posterior(self, task: Task, state: Tensors) -> Posterior:
        precision, ess = state["example_precision"].double(), state["ess"].double()
        started = sum(map(self._ess, task.sizes)) * (self.h0 + self.delta)
        return Posterior(
            mean=state["params"][: len(precision)],
            log_variance=-(ess * precision).log(),
            initial_log_variance=torch.full_like(precision, -math.log(started)),
            prior_variance=1 / (ess.item() * self.delta) if self.delta else None,
        )

    def _ess(self, size: int) -> float:
        """How many examples the posterior of a client of this size stands for."""
        return (size if self.ess == "size" else float(self.ess)) / self.temperature
