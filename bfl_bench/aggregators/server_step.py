"""The server's step from its model to the aggregated one: plain, with momentum, or adaptive.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: "Adaptive Federated Optimization", ICLR 2021, Algorithm
2. The mean change of the clients takes the place of a negative gradient.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from bfl_bench.aggregators.algebra import step_towards
from bfl_bench.checks import Above, Between

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """The numbers of the step. What it remembers lies in the server's state, in float64.

    With D the change from the server's model to the aggregated one, b1 = `momentum` and b2 = `beta2`:
    sgd         m = b1 m + D;             step lr m                 (momentum 0 and lr 1: FedAvg; else FedAvgM)
    adagrad     m = b1 m + (1 - b1) D;    step lr m / (sqrt(v) + tau),   v = v + D^2
    adam        likewise, v = b2 v + (1 - b2) D^2
    yogi        likewise, v = v - (1 - b2) D^2 sign(v - D^2)
    m and v start at 0. `bias_correction` multiplies the step of adam and yogi after t rounds by
    sqrt(1 - b2^t) / (1 - b1^t), as the authors' code does.
    """

    rule: Literal["sgd", "adagrad", "adam", "yogi"]
    lr: Annotated[float, Above(0)]
    momentum: Annotated[float, Between(0, 0.999999)]
    beta2: Annotated[float, Between(0, 0.999999)]
    tau: Annotated[float, Above(0)]
    bias_correction: bool

    @property
    def is_plain(self) -> bool:
        """Whether nothing is remembered."""
        return self.rule == "sgd" and self.momentum == 0

    def begin(self, trainable: Tensor) -> Tensors:
        """Make what the step remembers before the first round, for so many trainable parameters (D,)."""
        zeros = torch.zeros_like(trainable, dtype=torch.float64)
        if self.is_plain:
            return {}
        if self.rule == "sgd":
            return {"server_first": zeros}
        return {"server_first": zeros, "server_second": zeros.clone(), "server_steps": zeros.new_zeros(())}

    def move(self, state: Tensors, aggregated: Tensor) -> Tensors:
        """Take the step: the new `params` (P,), and what is remembered.

        Statistics and frozen parameters, which lie behind the trainable ones, have no gradient to average: with memory
        they become the aggregated ones.
        """
        params = state["params"]
        if self.is_plain:
            return {"params": step_towards(params, aggregated, self.lr)}
        size = len(state["server_first"])
        old, moved = params[:size].double(), aggregated.double().clone()
        change = moved[:size] - old
        if self.rule == "sgd":
            first = self.momentum * state["server_first"] + change
            moved[:size] = old + self.lr * first
            return {"params": moved.to(params.dtype), "server_first": first}
        first = self.momentum * state["server_first"] + (1 - self.momentum) * change
        second = self._second(state["server_second"], change.square())
        steps = state["server_steps"] + 1
        factor: Tensor | float = self.lr
        if self.bias_correction and self.rule != "adagrad":
            factor = self.lr * (1 - self.beta2**steps).sqrt() / (1 - self.momentum**steps)
        moved[:size] = old + factor * first / (second.sqrt() + self.tau)
        memory = {"server_first": first, "server_second": second, "server_steps": steps}
        return {"params": moved.to(params.dtype)} | memory

    def _second(self, old: Tensor, squared: Tensor) -> Tensor:
        if self.rule == "adagrad":
            return old + squared
        if self.rule == "adam":
            return self.beta2 * old + (1 - self.beta2) * squared
        return old - (1 - self.beta2) * squared * (old - squared).sign()
