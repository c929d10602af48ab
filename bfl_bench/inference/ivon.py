"""IVON: a diagonal Gaussian over all parameters, learnt at the price of one gradient a step.

Shen, Daheim, Cong, Nickl, Marconi, Bazan, Yokota, Gurevych, Cremers, Khan, Moellenhoff: "Variational Learning is
Effective for Large Deep Networks", ICML 2024.

The posterior is N(m, 1 / (ess (h + delta))): m are the network's parameters, h the curvature of the loss of an example.
A step on a minibatch draws e from N(0, 1 / (ess (h + delta))), takes the gradient g at m + e, and has
hhat = ess (h + delta) e g as an estimate of the curvature. Then, with c = 1 - beta2 and t the number of steps so far,
u = beta1 u + (1 - beta1) g
h = h + c (hhat - h) + c^2 (hhat - h)^2 / (2 (h + delta))
m = m - lr clip((u / (1 - beta1^t) + delta m) / (h + delta)), the new h in it
where the last term of the second line keeps h + delta positive.

Deviations: none. What is remembered is h + delta, in which the second line is a product: (h + delta) (1 + x + x^2 / 2)
with x = c (hhat - h) / (h + delta). It takes fewer passes over the memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bfl_bench.devices import bring
from bfl_bench.inference.train import Gradient
from bfl_bench.method import Tensors


@dataclass(frozen=True, kw_only=True, eq=False)
class Ivon:
    """The numbers of IVON, or vectors (D,), D being the number of trainable parameters.

    The objective is the mean loss plus `linear` m + `quadratic` m^2 / 2; the prior is
    N(`prior_mean`, 1 / (ess delta)), and a temperature T is an `ess` of n / T.
    """

    ess: float  # the number of examples that the posterior stands for
    h0: float  # the curvature before the first step
    beta1: float
    beta2: float
    delta: float | Tensor
    samples: int = 1  # gradients a step, each at a draw of its own
    clip: float | None = None  # largest change of a parameter in a step, divided by the learning rate
    rescale: bool = True  # the learning rate times h0 + delta: the first steps are as long as those of SGD
    prior_mean: Tensor | None = None  # None: 0
    linear: Tensor | None = None
    quadratic: Tensor | None = None

    def __post_init__(self) -> None:
        if self.rescale and isinstance(self.delta, Tensor):
            raise ValueError("a learning rate can be rescaled by a number delta only")

    def begin(self, parameters: Tensor) -> Tensors:
        return {
            "momentum": torch.zeros_like(parameters),
            "precision": torch.zeros_like(parameters).add_(self.h0).add_(self.delta),  # h + delta
            # On the CPU: reading the number of steps there does not wait for the device.
            "steps": torch.zeros((), dtype=torch.float64),
        }

    def step(self, parameters: Tensor, gradient: Gradient, memory: Tensors, lr: float, rng: torch.Generator) -> None:
        u, precision = memory["momentum"], memory["precision"]
        delta = self.delta if isinstance(self.delta, Tensor) else precision.new_full((), self.delta)
        g, product = self._sample(parameters, gradient, precision, rng)
        u.lerp_(g, 1 - self.beta1)
        self._learn_curvature(precision, product, delta)
        debias = 1 - self.beta1 ** memory["steps"].add_(1).item()
        distance = parameters if self.prior_mean is None else parameters - self.prior_mean
        change = torch.addcmul(u, delta, distance, value=debias, out=product)
        if self.linear is not None:
            change.add_(self.linear, alpha=debias)
        if self.quadratic is not None:
            change.addcmul_(self.quadratic, parameters, value=debias)
        if self.rescale:
            assert not isinstance(self.delta, Tensor)
            lr *= self.h0 + self.delta
        if self.clip is None:
            parameters.addcdiv_(change, precision, value=-lr / debias)
        else:
            bound = debias * self.clip
            parameters.add_(change.div_(precision).clamp_(-bound, bound), alpha=-lr / debias)

    def noise(self, like: Tensor, rng: torch.Generator) -> Tensor:
        """Draw from N(0, 1 / ess)."""
        return bring(torch.empty_like(like, device=rng.device).normal_(std=self.ess**-0.5, generator=rng), like.device)

    def _sample(
        self, parameters: Tensor, gradient: Gradient, precision: Tensor, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Average gradients, and offsets times gradients, over draws from the posterior."""
        offset = self.noise(parameters, rng).mul_(precision.rsqrt())
        mean = gradient(offset)
        product = offset.mul_(mean)
        if self.samples == 1:
            return mean, product
        mean = mean.clone()  # the next gradient lies in the same storage
        for _ in range(self.samples - 1):
            offset = self.noise(parameters, rng).mul_(precision.rsqrt())
            found = gradient(offset)
            mean.add_(found)
            product.addcmul_(offset, found)
        return mean.div_(self.samples), product.div_(self.samples)

    def _learn_curvature(self, precision: Tensor, product: Tensor, delta: Tensor) -> None:
        """Multiply h + delta by 1 + x + x^2 / 2 = 1/2 + (1 + x)^2 / 2; overwrites `product`, the mean of e g."""
        product.addcdiv_(delta, precision, value=1 / self.ess)  # ess times this, less 1, is (hhat - h) / (h + delta)
        if self.quadratic is not None:
            product.addcdiv_(self.quadratic, precision, value=1 / self.ess)
        half, start = precision.new_full((), 0.5), precision.new_full((), self.beta2 * 0.5**0.5)
        root = torch.add(start, product, alpha=(1 - self.beta2) * self.ess * 0.5**0.5, out=product)
        precision.mul_(torch.addcmul(half, root, root, out=root))
