"""Mean-field Gaussian posteriors of a network's weights: the pull of a prior, steps of log variances, KL, draws.

With n examples and a temperature beta a client minimises E_q[loss] + (beta / n) KL(q || prior), per example. Its slope
along the log variance s of a weight is (beta / n) (v P - 1) / 2, where v = exp(s) and P = (n / beta) h + 1 / (prior
variance) is the precision that the curvature h and the prior ask for. It is of the order beta / n however wrong v is: a
step of gradient descent that suits the means leaves variances where they start. The Fisher information of s is 1/2, so
that the natural gradient of the whole objective, n / beta times the one above, is v P - 1, which has no scale left.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bfl_bench.devices import bring
from bfl_bench.evaluation.posterior import Posterior
from bfl_bench.inference.train import Adjust, Gradient, Optimizer, make_optimizer
from bfl_bench.method import Method, Task, Tensors
from bfl_bench.models.gaussian import GaussianSettings

EDGE = 0.1
"""Of Renyi's divergence above alpha = 1: the least that is left of L / c, which is 1 for a q as wide as the prior."""


@dataclass(frozen=True)
class Prior:
    """An independent Gaussian for every Gaussian weight of the network, in the order of the flat vector's means."""

    mean: Tensor  # (D,)
    log_precision: Tensor  # (D,)

    def pull(self, task: Task, scale: float, alpha: float = 1.0) -> Adjust:
        """Adds the gradient of scale D(q || prior), where q are the means and log variances of the parameters.

        D is the KL divergence or, with another `alpha`, Renyi's divided by alpha, as FedGVI has it: the reverse KL at
        alpha = 0. With v and c the variances of q and prior and L = alpha c + (1 - alpha) v, its slopes along a mean
        and a log variance are d / L, d being the difference of the means, and ((v - c) / L - (1 - alpha) v d^2 / L^2)
        / 2. Above alpha = 1 it is finite only where L > 0; near that edge and beyond it q is pulled back as at `EDGE`.
        """
        layout, settings = task.model.layout, settings_of(task)
        precision = self.log_precision.exp()

        def add_renyi(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
            log_variance = parameters[layout.log_variances]
            ratio = (settings.clamp(log_variance) + self.log_precision).exp_()  # v / c
            mixed = (alpha + (1 - alpha) * ratio).clamp_(min=EDGE)  # L / c
            difference = parameters[layout.means] - self.mean
            widen = (ratio - 1) / mixed - (1 - alpha) * ratio * precision * (difference / mixed).square()
            if (passes := settings.passes_gradient(log_variance)) is not None:
                widen *= passes
            gradient[layout.means].add_(difference * precision / mixed, alpha=scale)
            gradient[layout.log_variances].add_(widen, alpha=0.5 * scale)

        def add_gradient(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
            log_variance = parameters[layout.log_variances]
            widen = (settings.clamp(log_variance) + self.log_precision).exp_().sub_(1)
            if (passes := settings.passes_gradient(log_variance)) is not None:
                widen *= passes
            gradient[layout.means].addcmul_(parameters[layout.means] - self.mean, precision, value=scale)
            gradient[layout.log_variances].add_(widen, alpha=0.5 * scale)

        return add_gradient if alpha == 1 else add_renyi

    def kl(self, task: Task, vector: Tensor) -> float:
        """KL(q || prior) in nats."""
        layout = task.model.layout
        distance = (vector[layout.means] - self.mean).square() * self.log_precision.exp()
        ratio = settings_of(task).clamp(vector[layout.log_variances]) + self.log_precision
        return 0.5 * float((distance + ratio.exp() - 1 - ratio).sum())


@dataclass(frozen=True, kw_only=True)
class NaturalVariances:
    """Natural-gradient steps for log variances, beside any optimizer for points and means.

    s = s - clip(rate (v P - 1), -1, 1). From too narrow a variance s rises by `rate` a step, near the optimum v = 1 / P
    its distance shrinks by the factor 1 - rate, and curvatures are averaged over about 1 / rate minibatches. Momentum
    and weight decay are for points and means alone; a clipped gradient (`local.clip`) shortens these steps, too.
    """

    others: Optimizer  # one that asks for the gradient without an offset
    first: int  # where the log variances, which come last, begin
    rate: float
    scale: float  # beta / n: the weight of the KL divergence in the objective

    def begin(self, parameters: Tensor) -> Tensors:
        return self.others.begin(parameters[: self.first])

    def step(self, parameters: Tensor, gradient: Gradient, memory: Tensors, lr: float, rng: torch.Generator) -> None:
        found = gradient(None)
        change = found[self.first :].mul_(2 * self.rate / self.scale).clamp_(-1, 1)
        parameters[self.first :].sub_(change)
        self.others.step(parameters[: self.first], lambda _: found[: self.first], memory, lr, rng)


def choose_optimizer(task: Task, rate: float | None, scale: float) -> Optimizer:
    """Return the optimizer of `task.local`, with natural-gradient steps for log variances unless `rate` is None."""
    optimizer = make_optimizer(task.local)
    if rate is None:
        return optimizer
    return NaturalVariances(others=optimizer, first=task.model.layout.log_variances.start, rate=rate, scale=scale)


@dataclass(frozen=True)
class GaussianLayersMethod(Method):
    """A method whose models are `params` of a network with Gaussian layers."""

    def gaussian(self, task: Task, model: Tensors) -> tuple[Tensor, Tensor] | None:
        layout = task.model.layout
        return model["params"][layout.means], settings_of(task).clamp(model["params"][layout.log_variances]).exp()

    def with_gaussian(self, task: Task, model: Tensors, mean: Tensor, variance: Tensor) -> Tensors:
        params = model["params"].clone()
        params[task.model.layout.means], params[task.model.layout.log_variances] = mean, variance.log()
        return {"params": params}

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        return draw(task, model["params"], num, rng)


def draw(task: Task, vector: Tensor, num: int, rng: torch.Generator, variance_scale: float = 1.0) -> Iterator[Tensor]:
    """Parameter vectors whose Gaussian weights are drawn and stand in the place of the means."""
    layout = task.model.layout
    mean = vector[layout.means]
    settings = settings_of(task)
    deviation = (0.5 * settings.clamp(vector[layout.log_variances])).exp() * (variance_scale**0.5 * settings.noise)
    for _ in range(num if len(mean) else 1):
        drawn = vector.clone()
        drawn[layout.means] += deviation * bring(torch.randn(len(mean), generator=rng), mean.device)
        yield drawn


def describe(task: Task, vector: Tensor, prior_variance: float | None, num: int | None = None) -> Posterior:
    """Take the first `num` Gaussians of a vector, or all, for `eval.posterior`; N(0, prior_variance) is their prior."""
    layout, settings = task.model.layout, settings_of(task)
    log_variance, initial = (params[layout.log_variances][:num] for params in (vector, task.model.initial))
    in_effect = settings.clamp(log_variance)
    return Posterior(
        mean=vector[layout.means][:num],
        log_variance=in_effect,
        initial_log_variance=settings.clamp(initial),
        prior_variance=prior_variance,
        clamped=in_effect != log_variance,
    )


def settings_of(task: Task) -> GaussianSettings:
    assert task.gaussian is not None  # the builder sees to it for a method with Gaussian layers
    return task.gaussian
