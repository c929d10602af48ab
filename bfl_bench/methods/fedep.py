"""FedEP: expectation propagation with clients as sites, whose moments come from the iterates of SGD.

Guo, Greengard, Wang, Gelman, Kim, Xing: "Federated Learning as Variational Inference: A Scalable Expectation
Propagation Approach", ICLR 2023. The server's Gaussian q starts at the model of `burn_in_rounds` rounds of FedAvg,
with precision `scale` n `prior_precision`. A client takes its site out of q, which leaves the cavity: q / q_k where it
has a site of its own (EP), q^(1 - n_k/n) where all share one (SEP), or q itself (ADF). SGD minimises its loss plus
half the squared distance to the cavity times N(0, 1 / (n_k prior_precision)), its part of the prior. The result, the
tilted distribution, has as its mean that of the iterates at the ends of epochs, and by `moments` the precision
identity   cavity + scale n_k prior_precision
laplace    cavity + scale n_k (prior_precision + mean squared gradient of examples, clipped)
sample     1 / variance of those iterates, shrunk towards one, clipped, and scaled to the length of identity's
where clipped is to two standard deviations from the mean over coordinates. Natural parameters of tilted / q, clipped
to the norm `clip` with EP, are what sites and server move by: 1/N of it times `server.lr`, and with SEP and ADF the
mean over the cohort times `server.lr`.

Deviations: natural parameters have no momentum, and there are no variational moments. Sites start as q^(n_k/n) of the
first q, so that their product is q in every round, at any participation. Where a cavity or the server would be
improper, its precision is `min_precision` and its mean the server's; these are counted."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean
from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.errors import ConfigError
from bfl_bench.evaluation.truth import Moments
from bfl_bench.inference.curvature import clip_outliers, diagonal_fisher
from bfl_bench.inference.duals import PrecisionMethod, disagreement, draw, moments_of, take_out
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Needs, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class FedEp(PrecisionMethod, PointMethod):
    sites: Literal["ep", "sep", "adf"]
    moments: Literal["identity", "laplace", "sample"]
    burn_in_rounds: Annotated[int, AtLeast(0)]
    burn_in_epochs: Annotated[int, AtLeast(0)]
    scale: Annotated[float, Above(0)]
    prior_precision: Annotated[float, Above(0)]
    shrinkage: Annotated[float, Between(1e-6, 1)]
    clip: Annotated[float, Above(0)] | None
    min_precision: Annotated[float, Above(0)]
    draws_from: Literal["mean", "posterior"]

    @property
    def needs(self) -> Needs:
        return Needs()

    def check(self, task: Task) -> None:
        if self.burn_in_epochs >= task.local.epochs:
            allowed = f"less than local.epochs={task.local.epochs}: each later epoch gives an iterate"
            raise ConfigError("method.burn_in_epochs", self.burn_in_epochs, allowed)

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        precision = torch.full_like(task.model.gradient, self.scale * sum(task.sizes) * self.prior_precision)
        start = task.model.initial[: len(precision)].clone()  # the mean of the first q, of which sites are made
        return super().init(task, rng) | {"precision": precision, "start": start, "round": precision.new_zeros(())}

    def init_client(self, task: Task, state: Tensors, client_id: int) -> Tensors:
        if self.sites != "ep" or state["round"] < self.burn_in_rounds:
            return {}
        mean = state["start"] if state["round"] > self.burn_in_rounds else state["params"][: len(state["start"])]
        share = self.scale * task.sizes[client_id] * self.prior_precision
        precision = torch.full_like(mean, share, dtype=torch.float64)
        return {"precision": precision, "shift": precision * mean}

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        gaussian = {"precision": state["precision"]} if state["round"] >= self.burn_in_rounds else {}
        return {"params": state["params"], "round": state["round"]} | gaussian

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        if broadcast["round"] < self.burn_in_rounds:
            return super().client_update(task, broadcast, memory, client, rng)
        params, server = broadcast["params"], broadcast["precision"].double()
        mean, size = params[: len(server)], len(server)
        power = 1 - len(client) / sum(task.sizes) if self.sites == "sep" else 1.0
        rest, shift, num_improper = power * server, power * server * mean, 0
        if memory:
            rest, shift, num_improper = take_out(server, mean, memory, self.min_precision)
        strength = (rest / len(client) + self.prior_precision).to(params.dtype)
        offset = (shift / len(client)).to(params.dtype)
        ends: list[Tensor] = []

        def pull(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
            gradient.addcmul_(strength, parameters).sub_(offset)

        def collect(parameters: Tensor, epoch_ends: bool) -> None:
            if epoch_ends:
                ends.append(parameters.double())

        trained = train(task, params, client, rng, adjust=pull, after_step=collect)
        iterates = torch.stack(ends[self.burn_in_epochs :])
        vector = trained.vector
        vector[:size] = iterates.mean(0).to(vector.dtype)
        tilted = self._tilted_precision(task, vector, iterates, rest, client, rng)
        model = {"params": vector, "precision": tilted.to(vector.dtype)}
        if memory:
            change, step = self._change(model, broadcast), task.server.lr / len(task.sizes)
            memory = {"precision": memory["precision"] + step * change[0], "shift": memory["shift"] + step * change[1]}
        metrics = trained.metrics | {"improper": float(num_improper)}
        return Update(message=model, local=model, memory=memory, metrics=metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        kept = {name: state[name] for name in ("precision", "start")} | {"round": state["round"] + 1}
        if state["round"] < self.burn_in_rounds:
            new, _ = super().server_update(task, state, replies, rng)
            return new | kept, {}
        size = len(state["precision"])
        points, changes, num = WeightedMean(), WeightedMean(), 0
        for client_id, message in replies:
            points.add(message["params"], task.weight(self.weights, client_id))
            changes.add(self._change(message, state), 1.0)
            num += 1
        share = num / len(task.sizes) if self.sites == "ep" else 1.0
        old, mean = state["precision"].double(), state["params"][:size]
        natural = torch.stack([old, old * mean]) + task.server.lr * share * changes.result()
        improper = natural[0] < self.min_precision
        precision = torch.where(improper, self.min_precision, natural[0])
        params = points.result()
        params[:size] = torch.where(improper, mean, natural[1] / precision)
        new = kept | {"params": params.to(mean.dtype), "precision": precision.to(state["precision"].dtype)}
        if state["round"] == self.burn_in_rounds:
            new["start"] = mean.clone()
        return new, {"server_improper": float(improper.sum())}

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        burning_in = "precision" not in model or ("round" in model and model["round"] < self.burn_in_rounds)
        if self.draws_from == "mean" or burning_in:
            return iter([model["params"]])
        return draw(model["params"], model["precision"], num, rng)

    def weight_moments(self, task: Task, state: Tensors) -> Moments | None:
        burning_in = state["round"] < self.burn_in_rounds
        return None if self.draws_from == "mean" or burning_in else moments_of(state)

    def _change(self, model: Tensors, server: Tensors) -> Tensor:
        """Natural parameters of the tilted distribution less those of the server's, clipped, (2, D)."""
        mean = server["params"][: len(server["precision"])]
        change = torch.stack(disagreement(model, mean, server["precision"]))
        if self.sites == "ep" and self.clip is not None:
            change *= (self.clip / change.norm()).clamp(max=1.0)
        return change

    def _tilted_precision(
        self, task: Task, vector: Tensor, iterates: Tensor, rest: Tensor, client: Client, rng: torch.Generator
    ) -> Tensor:
        """Of the tilted distribution, (D,), given that of the cavity."""
        scale = self.scale * len(client)
        identity = rest + scale * self.prior_precision
        if self.moments == "laplace":
            return identity + scale * clip_outliers(diagonal_fisher(task, vector, client, rng, "per_sample").double())
        if self.moments == "identity":
            return identity
        variance = iterates.var(0, correction=0)
        sampled = clip_outliers((self.shrinkage + (1 - self.shrinkage) * variance).reciprocal())
        length: Tensor = identity.norm() / sampled.norm()
        return sampled * length
