"""What FedLap-Cov and BayesADMM have in common: a Gaussian site of each client, and a server that mixes and adds.

Client k keeps the natural parameters of its site, precision V_k and shift v_k, both 0 at first. Given the server's
N(m, 1/S) it finds an N(m_k, 1/S_k) of its own, and its site moves by the disagreement,
V_k = V_k + step (S_k - S)
v_k = v_k + step (S_k m_k - S m)
The server takes, with S_0 the precision of the prior N(0, 1/S_0) and `share` between 0 and 1,
S = (1 - share) mean S_k + share (S_0 + sum V_k)
S m = (1 - share) mean S_k m_k + share sum v_k
means over the cohort, sums over all clients. With a share of 1 that is the prior times the product of the sites.
A client sends m_k and S_k: the server knows by how much a site moves, and its sums are right at any participation.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean, step_towards
from bfl_bench.checks import Above
from bfl_bench.devices import bring
from bfl_bench.evaluation.truth import Moments
from bfl_bench.inference.train import Trained
from bfl_bench.method import Client, Method, Replies, Task, Tensors, Update

NOTHING = 1e-30
"""A precision that stands for none, so that there is a variance."""


@dataclass(frozen=True)
class Cavity:
    """What a client has beside its data: the server's Gaussian, and its own site as it enters there."""

    mean: Tensor  # (D,) of the server's Gaussian
    precision: Tensor
    site_precision: Tensor
    site_shift: Tensor
    is_first: bool  # no round has been


@dataclass(frozen=True)
class PrecisionMethod(Method):
    """A method whose models are `params` and, of the first of them, the trainable ones, `precision` (D,)."""

    def gaussian(self, task: Task, model: Tensors) -> tuple[Tensor, Tensor] | None:
        if "precision" not in model or model["precision"].dim() > 1:
            return None
        precision = model["precision"].double().clamp(min=NOTHING)
        return model["params"][: len(precision)], precision.reciprocal()

    def with_gaussian(self, task: Task, model: Tensors, mean: Tensor, variance: Tensor) -> Tensors:
        params = model["params"].clone()
        params[: len(mean)] = mean
        return {"params": params, "precision": variance.reciprocal().to(params.dtype)}


@dataclass(frozen=True)
class DualMethod(PrecisionMethod):
    """State: `params`, the server's mean, and `precision`, `precisions` and `shifts`, the sums over all clients' sites.

    In the first round the server's Gaussian is the prior, whose mean is 0; training starts at the network's initial
    parameters.
    """

    prior_precision: Annotated[float, Above(0)]
    damping: Annotated[float, Above(0)] | None
    min_precision: Annotated[float, Above(0)]

    @abstractmethod
    def fit(
        self, task: Task, start: Tensor, cavity: Cavity, client: Client, rng: torch.Generator
    ) -> tuple[Trained, Tensor]:
        """Train the client's Gaussian; its mean are the parameters, its precision is the tensor (D,)."""

    @abstractmethod
    def step(self, task: Task) -> float:
        """Say how far sites move."""

    @abstractmethod
    def share(self, task: Task) -> float:
        """Say how much of the server's Gaussian is prior and sites; the rest is the mean of the clients'."""

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        precision = torch.full_like(task.model.gradient, self.prior_precision)
        sums = {name: torch.zeros_like(precision, dtype=torch.float64) for name in ("precisions", "shifts")}
        return {"params": task.model.initial.clone(), "precision": precision, "round": precision.new_zeros(())} | sums

    def init_client(self, task: Task, state: Tensors, client_id: int) -> Tensors:
        return {"precision": torch.zeros_like(state["precisions"]), "shift": torch.zeros_like(state["shifts"])}

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        return {name: state[name] for name in ("params", "precision", "round")}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        start, mean, precision = broadcast["params"], _mean(broadcast), broadcast["precision"]
        own = [memory[name].to(precision.dtype) for name in ("precision", "shift")]
        cavity = Cavity(mean, precision, own[0], own[1], broadcast["round"].item() == 0)
        trained, found = self.fit(task, start, cavity, client, rng)
        model = {"params": trained.vector, "precision": found.to(start.dtype)}
        change, shift = disagreement(model, mean, precision)
        step = self.step(task)
        memory = {"precision": memory["precision"] + step * change, "shift": memory["shift"] + step * shift}
        return Update(message=model, local=model, memory=memory, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        mean, size, step, share = _mean(state), len(state["precision"]), self.step(task), self.share(task)
        points, changes, shifts = WeightedMean(), WeightedMean(), WeightedMean()
        sums = {name: state[name].clone() for name in ("precisions", "shifts")}
        for client_id, message in replies:
            weight = task.weight(self.weights, client_id)
            change, shift = disagreement(message, mean, state["precision"])
            points.add(message["params"], weight)
            changes.add(change, weight)
            shifts.add(shift, weight)
            sums["precisions"].add_(change, alpha=step)
            sums["shifts"].add_(shift, alpha=step)
        old = state["precision"].double()
        precision = (1 - share) * (old + changes.result()) + share * (self.prior_precision + sums["precisions"])
        shift = (1 - share) * (old * mean + shifts.result()) + share * sums["shifts"]
        improper = precision < self.min_precision
        precision = torch.where(improper, self.min_precision, precision)
        aggregated = points.result()
        aggregated[:size] = torch.where(improper, state["params"][:size], shift / precision)
        new = {
            "params": step_towards(state["params"], aggregated, task.server.lr),
            "precision": precision.to(state["precision"].dtype),
            "round": state["round"] + 1,
        }
        return new | sums, {"server_improper": float(improper.sum())}

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        return draw(model["params"], model["precision"], num, rng)

    def weight_moments(self, task: Task, state: Tensors) -> Moments | None:
        return moments_of(state)


def moments_of(model: Tensors) -> Moments:
    """Return the moments of `params` (P,) whose first D have the precision `precision` (D,)."""
    return Moments(model["params"][: len(model["precision"])], 1 / model["precision"].double())


def draw(params: Tensor, precision: Tensor, num: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield parameters (P,) whose first D, the trainable ones, are drawn with this precision (D,)."""
    deviation = precision.rsqrt()
    for _ in range(num):
        drawn = params.clone()
        drawn[: len(deviation)] += deviation * bring(torch.randn(len(deviation), generator=rng), drawn.device)
        yield drawn


def _mean(server: Tensors) -> Tensor:
    """The mean of the server's Gaussian, (D,): that of the prior before the first round."""
    params = server["params"][: len(server["precision"])]
    return torch.zeros_like(params) if server["round"] == 0 else params


def disagreement(model: Tensors, mean: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Natural parameters of a client's Gaussian less those of the server's, in float64."""
    own, server = model["precision"].double(), precision.double()
    return own - server, own * model["params"][: len(own)] - server * mean


def take_out(precision: Tensor, mean: Tensor, site: Tensors, lowest: float) -> tuple[Tensor, Tensor, int]:
    """Divide a Gaussian by a site: precision and shift of what is left, and how many coordinates had to be repaired.

    Where the precision would be below `lowest` it is that, and the mean stays.
    """
    left, shift = precision - site["precision"], precision * mean - site["shift"]
    improper = left < lowest
    return left.clamp(min=lowest), torch.where(improper, lowest * mean, shift), int(improper.sum())
