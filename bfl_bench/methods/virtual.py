"""VIRTUAL: expectation propagation in a star-shaped Bayesian network, with networks that clients keep to themselves.

Corinzia, Beuret, Buhmann: "Variational Federated Multi-Task Learning", 2019, Algorithm 1. The server's posterior s is a
product of K site factors s_i, one per client, kept as natural parameters: precision, and shift = precision x mean. A
client takes its own factor out and its share of the prior in, p^(1/K) s / s_i, the cavity, which is the prior of its
local update (eq. 3, KL weighted by beta). What it learns becomes its new factor; the ratio of new and old, damped,
travels to the server, which multiplies. With `private: lateral` a client also has a Gaussian network of its own.

Deviations: training is SGD on means and log variances. Sites start as s^(1/K) of the initial s, so that their product
is the server's posterior in every round; the step of the server (`server.lr`) is taken by sites and server alike.
Points, such as biases, are averaged. Where a cavity or the server would be improper, its precision is `min_precision`
and its mean the server's; these are counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean, step_towards
from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.errors import ConfigError
from bfl_bench.inference import sites
from bfl_bench.inference.train import train
from bfl_bench.inference.variational import Prior, draw
from bfl_bench.method import Client, Method, Needs, Predictive, Replies, Task, Tensors, Update
from bfl_bench.models.lateral import count_shared


@dataclass(frozen=True)
class Virtual(Method):
    predictives: ClassVar[tuple[Predictive, ...]] = ("draws", "mean")

    private: Literal["lateral", "none"]
    beta: Annotated[float, AtLeast(0)]
    prior_variance: Annotated[float, Above(0)]
    prior_power: Literal["equal", "size"]
    damping: Annotated[float, Between(0, 1)] | None
    init_from: Literal["own", "server"]
    prune: Annotated[float, Between(0, 99.999)]
    min_precision: Annotated[float, Above(0)]
    kl: Literal["exact", "released"]
    evaluation_variance: Annotated[float, Above(0)]

    @property
    def needs(self) -> Needs:
        return Needs(gaussian_layers=True, own_test=True, lateral=self.private == "lateral")

    def check(self, task: Task) -> None:
        if self._step(task) <= 0:
            allowed = f"a number above 0 with server.lr={task.server.lr:g}: as 1 - server.lr no factor moves forward"
            raise ConfigError("method.damping", self.damping, allowed)
        if count_shared(task.model.layout)[1] == 0:
            raise ConfigError("model.bayesian_layers", 0, "auto, all or a number above 0 for virtual")

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        params = task.model.initial.clone()
        sites.close_gates(task, params)
        precision, shift = sites.natural(task, params)
        return {"params": params, "precision": precision, "shift": shift}

    def init_client(self, task: Task, state: Tensors, client_id: int) -> Tensors:
        """Make the site s^(power) of the initial server posterior, and the initial private network."""
        precision, shift = sites.natural(task, task.model.initial)
        power = self._power(task, client_id)
        memory = {"precision": power * precision, "shift": power * shift}
        return memory | {"private": sites.read_private(task, task.model.initial)}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        layout = task.model.layout
        num_points, num_means = count_shared(layout)
        precision = broadcast["precision"] - memory["precision"]
        precision += self._power(task, client.id) / self.prior_variance
        improper = precision < self.min_precision
        server_mean = broadcast["shift"] / broadcast["precision"]
        precision = torch.where(improper, self.min_precision, precision)
        mean = torch.where(improper, server_mean, (broadcast["shift"] - memory["shift"]) / precision)

        start = broadcast["params"].clone()
        sites.write_private(task, start, memory["private"])
        if self.init_from == "server":
            share = self._power(task, client.id)
            factor = [share * broadcast[name] - memory[name] for name in ("precision", "shift")]
            sites.start_from_server(task, start, broadcast, factor)
        num_private = layout.means.stop - layout.means.start - num_means
        prior_precision = torch.cat([precision, precision.new_full((num_private,), 1 / self.prior_variance)])
        prior_mean = torch.cat([mean, mean.new_zeros(num_private)])
        prior = Prior(prior_mean.to(start.dtype), prior_precision.log().to(start.dtype))
        scale = self.beta / len(client)
        pull = prior.pull(task, scale) if self.kl == "exact" else sites.pull_as_released(prior, task, scale)
        trained = train(task, start, client, rng, adjust=pull)

        new_precision, new_shift = sites.natural(task, trained.vector)
        changes = torch.stack([new_precision - broadcast["precision"], new_shift - broadcast["shift"]])
        message = sites.prune(self._step(task) * changes, self.prune)
        change = sites.unprune(message, num_means)
        memory = {
            "precision": memory["precision"] + change[0],
            "shift": memory["shift"] + change[1],
            "private": sites.read_private(task, trained.vector),
        }
        message["points"] = trained.vector[layout.points][:num_points].clone()
        metrics = trained.metrics | {"kl": prior.kl(task, trained.vector), "improper": float(improper.sum())}
        return Update(message=message, local={"params": trained.vector}, memory=memory, metrics=metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        layout = task.model.layout
        num_points, num_means = count_shared(layout)
        points = WeightedMean()
        precision, shift = state["precision"].clone(), state["shift"].clone()
        for client_id, message in replies:
            change = sites.unprune(message, num_means)
            precision, shift = precision + change[0], shift + change[1]
            points.add(message["points"], task.weight(self.weights, client_id))
        improper = precision < self.min_precision
        precision = torch.where(improper, self.min_precision, precision)
        shift = torch.where(improper, precision * state["shift"] / state["precision"], shift)
        params = state["params"].clone()
        params[layout.points][:num_points] = step_towards(
            params[layout.points][:num_points], points.result(), task.server.lr
        )
        params[layout.means][:num_means] = (shift / precision).to(params.dtype)
        params[layout.log_variances][:num_means] = -precision.log().to(params.dtype)
        new = {"params": params, "precision": precision, "shift": shift}
        return new, {"server_improper": float(improper.sum())}

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        is_server = "precision" in model
        return draw(task, model["params"], num, rng, self.evaluation_variance if is_server else 1.0)

    def _step(self, task: Task) -> float:
        """The power of a new factor against the old one, times the server's step."""
        return task.server.lr * (1 - task.server.lr if self.damping is None else self.damping)

    def _power(self, task: Task, client_id: int) -> float:
        """Of the prior in a client's cavity: 1/K over all clients, or n_i/n as in the released code."""
        return 1 / len(task.sizes) if self.prior_power == "equal" else task.sizes[client_id] / sum(task.sizes)
