"""VIRTUAL: expectation propagation in a star-shaped Bayesian network, with networks that clients keep to themselves.

Corinzia, Beuret, Buhmann: "Variational Federated Multi-Task Learning", 2019, Algorithm 1. The server's posterior s is a
product of K site factors s_i, one per client, kept as natural parameters: precision, and shift = precision x mean. A
client takes its own factor out and its share of the prior in, p^(1/K) s / s_i, the cavity, which is the prior of its
local update (eq. 3, KL weighted by beta). What it learns becomes its new factor; the ratio of new and old, damped,
travels to the server, which multiplies. With `private: lateral` a client also has a Gaussian network of its own.

Deviations: training is SGD on means; log variances take natural-gradient steps (`variance_rate`), with null and in
method `virtual_published` SGD, too, which does not move them; `natural_lr` is SGD on natural parameters, as released.
Sites start as s^(1/K) of the initial s, so that their product is the server's posterior in every round, unless messages
are pruned; sites and server take the same step (`server.lr`). Of a pruned message the client keeps everything, as
released. Gates of the lateral connections: one per layer, or as released one per unit (`lateral_units`). MT is of a
client's model as trained, not damped; `own_model: damped` is the released code's. Points, such as biases, are averaged.
Where a cavity or the server would be less precise than `min_precision`, it gets that precision and the server's mean;
these are counted. In the conjugate case none is less precise than the prior, which is the bound by default: where
variances are learnt, cavities far wider than that appear, and networks diverge (docs/results.md).

Without private networks and with beta = 1 this is partitioned variational inference (Ashman, Bui, Nguyen, Markou,
Weller, Swaroop, Turner, 2022; method `pvi`) but for where the sites start. With `sites_start: prior` that is p^(1/K): s
and all cavities start as the prior p, and the first local updates as the network's initial Gaussian. PVI's own sites
are s_i / p^(1/K). One undamped round is BCM-same, the product of the clients' posteriors over p^(K-1); with
`sites_start: none`, where they start as 1, and `prior_power: size` it is BCM-split, the product of posteriors with
priors p^(n_i/n). Left out: early stopping by the training ELBO, Gaussian biases.

FedGVI (Mildner, Hamelijnck, Giampouras, Damoulas, ICML 2025; method `fedgvi`) is PVI with the generalised cross-entropy
(`loss_power`) for the log-likelihood and Renyi's divergence (`alpha`) for KL. Its released code sums the loss over the
`train_samples` of a step instead of averaging, which is a beta of 1 / train_samples at a higher learning rate, which
Adam does not see (method `fedgvi_released`); and it drops divergences where they are infinite.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean, step_towards
from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.errors import ConfigError
from bfl_bench.evaluation.posterior import Posterior
from bfl_bench.inference import sites
from bfl_bench.inference.train import train
from bfl_bench.inference.variational import GaussianLayersMethod, Prior, choose_optimizer, describe, draw
from bfl_bench.method import Client, Needs, Predictive, Replies, Task, Tensors, Update
from bfl_bench.models.lateral import count_shared


@dataclass(frozen=True)
class Virtual(GaussianLayersMethod):
    predictives: ClassVar[tuple[Predictive, ...]] = ("draws", "mean")

    private: Literal["lateral", "lateral_units", "none"]
    beta: Annotated[float, AtLeast(0)]
    prior_variance: Annotated[float, Above(0)]
    prior_power: Literal["equal", "size"]
    damping: Annotated[float, Between(0, 1)] | Literal["share"] | None
    init_from: Literal["own", "server"]
    prune: Annotated[float, Between(0, 99.999)]
    min_precision: Annotated[float, Above(0)] | Literal["prior"]
    kl: Literal["exact", "released"]
    evaluation_variance: Annotated[float, Above(0)]
    natural_lr: Annotated[float, Above(0)] | None
    own_model: Literal["trained", "damped"]
    variance_rate: Annotated[float, Above(0)] | None = None
    sites_start: Literal["network", "prior", "none"] = "network"
    loss_power: Annotated[float, Between(0, 1)] = 0.0
    alpha: Annotated[float, AtLeast(0)] = 1.0
    train_samples: Annotated[int, AtLeast(1)] = 1

    @property
    def needs(self) -> Needs:
        return Needs(
            gaussian_layers=True,
            own_test=self.sites_start == "network",  # MT and S are VIRTUAL's
            lateral=self.private != "none",
            gate_per_unit=self.private == "lateral_units",
            sgd=self.natural_lr is not None,
            classes=self.loss_power > 0,
        )

    def check(self, task: Task) -> None:
        if self.variance_rate is not None and self.beta == 0:
            raise ConfigError("method.variance_rate", self.variance_rate, "null with method.beta=0")
        if self.variance_rate is not None and self.natural_lr is not None:
            raise ConfigError("method.variance_rate", self.variance_rate, "null with method.natural_lr")
        if self.alpha != 1 and self.kl != "exact":
            raise ConfigError("method.alpha", self.alpha, f"1 with method.kl={self.kl}")
        if self._step(task) <= 0:
            allowed = f"a number above 0 with server.lr={task.server.lr:g}: as 1 - server.lr no factor moves forward"
            raise ConfigError("method.damping", self.damping, allowed)
        if count_shared(task.model.layout)[1] == 0:
            raise ConfigError("model.bayesian_layers", 0, "auto, all or a number above 0 for virtual")
        if self.prune and not sites.hidden_weights(task):
            raise ConfigError("method.prune", self.prune, "0 with one Gaussian layer: the output layer is not pruned")
        if self.natural_lr is not None and (task.local.momentum or task.local.weight_decay):
            allowed = "null with local.momentum or local.weight_decay: steps on natural parameters are plain"
            raise ConfigError("method.natural_lr", self.natural_lr, allowed)

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        params = task.model.initial.clone()
        sites.close_gates(task, params)
        precision, shift = self._start(task)
        return {"params": params, "precision": precision, "shift": shift}

    def init_client(self, task: Task, state: Tensors, client_id: int) -> Tensors:
        """Make the site s^(power) of the initial server posterior, and the initial private network."""
        precision, shift = self._start(task)
        power = self._power(task, client_id)
        memory = {"precision": power * precision, "shift": power * shift}
        return memory | {"private": sites.read_private(task, task.model.initial)}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        layout = task.model.layout
        num_points, num_means = count_shared(layout)
        share = self._power(task, client.id)
        cavity = broadcast["precision"] - memory["precision"]
        precision = cavity + share / self.prior_variance
        improper = precision < self._least
        server_mean = broadcast["shift"] / broadcast["precision"]
        precision = torch.where(improper, self._least, precision)
        mean = torch.where(improper, server_mean, (broadcast["shift"] - memory["shift"]) / precision)

        start = broadcast["params"].clone()
        sites.write_private(task, start, memory["private"])
        if self.init_from == "server":
            factor = [share * broadcast[name] - memory[name] for name in ("precision", "shift")]
            sites.start_from_server(task, start, broadcast, factor)
        num_private = layout.means.stop - layout.means.start - num_means
        prior_precision = torch.cat([precision, precision.new_full((num_private,), 1 / self.prior_variance)])
        prior_mean = torch.cat([mean, mean.new_zeros(num_private)])
        prior = Prior(prior_mean.to(start.dtype), prior_precision.log().to(start.dtype))
        scale = self.beta / len(client)
        exact = self.kl == "exact"
        pull = prior.pull(task, scale, self.alpha) if exact else sites.pull_as_released(prior, task, scale)
        loss = functools.partial(task.generalised_loss, power=self.loss_power) if self.loss_power else None
        optimizer = choose_optimizer(task, self.variance_rate, scale)
        if self.natural_lr is not None:  # a factor's own precision is not to become negative
            floor = torch.cat([cavity.clamp(min=self._least), prior_precision[num_means:]]).to(start.dtype)
            optimizer = sites.NaturalSgd(layout, self.natural_lr * share, floor)
        trained = train(
            task,
            start,
            client,
            rng,
            optimizer=optimizer,
            adjust=pull,
            loss=loss,
            after_step=sites.project_gates(task),
            num_samples=self.train_samples,
        )

        new_precision, new_shift = sites.natural(task, trained.vector)
        changes = torch.stack([new_precision - broadcast["precision"], new_shift - broadcast["shift"]])
        changes = (self._step(task) * changes).float()  # as they travel
        memory = {
            "precision": memory["precision"] + changes[0],
            "shift": memory["shift"] + changes[1],
            "private": sites.read_private(task, trained.vector),
        }
        message = sites.prune(changes, memory["precision"], self.prune, sites.hidden_weights(task))
        message["points"] = trained.vector[layout.points][:num_points].clone()
        metrics = trained.metrics | {"kl": prior.kl(task, trained.vector), "improper": float(improper.sum())}
        local = trained.vector
        if self.own_model == "damped":
            local = sites.damp(task, local, broadcast, self._damping(task))
        return Update(message=message, local={"params": local}, memory=memory, metrics=metrics)

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
        improper = precision < self._least
        precision = torch.where(improper, self._least, precision)
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

    def gaussian(self, task: Task, model: Tensors) -> tuple[Tensor, Tensor] | None:
        return super().gaussian(task, model) if self.private == "none" else None

    def posterior(self, task: Task, state: Tensors) -> Posterior:
        return describe(task, state["params"], self.prior_variance, num=count_shared(task.model.layout)[1])

    def _start(self, task: Task) -> tuple[Tensor, Tensor]:
        """Choose the server's posterior before the first round, which is the product of the first sites."""
        precision, shift = sites.natural(task, task.model.initial)
        if self.sites_start == "network":
            return precision, shift
        return torch.full_like(precision, 1 / self.prior_variance if self.sites_start == "prior" else 0), shift.zero_()

    @property
    def _least(self) -> float:
        """The least precision of a cavity and of the server."""
        return 1 / self.prior_variance if self.min_precision == "prior" else self.min_precision

    def _damping(self, task: Task) -> float:
        """The power of a new factor against the old one."""
        if isinstance(self.damping, str):
            return 1 / len(task.sizes)
        return 1 - task.server.lr if self.damping is None else self.damping

    def _step(self, task: Task) -> float:
        """The same, times the server's step."""
        return task.server.lr * self._damping(task)

    def _power(self, task: Task, client_id: int) -> float:
        """Of the prior in a client's cavity: 1/K over all clients, or n_i/n as in the released code."""
        return 1 / len(task.sizes) if self.prior_power == "equal" else task.sizes[client_id] / sum(task.sizes)
