"""What a federated method is: a frozen dataclass of hyperparameters with pure functions over explicit state.

All memory lives in the server state and in the private states of the clients, both plain dictionaries of tensors that
the round loop stores and the checkpoint writes. Nothing hides in `self`, in an optimizer object or in a global
generator: that is what makes resuming, parallel engines and tests trivial.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

import torch
from torch import Tensor

from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.data.dataset import Augment, Split
from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import GaussianSettings

Tensors = dict[str, Tensor]
"""A state, a message or a model: named tensors."""

Weights = Literal["size", "uniform"]
"""How clients weigh in the aggregation: by their number of training examples, or all alike."""


@dataclass(frozen=True)
class LocalSettings:
    """How a client trains; every method reads it in the same way."""

    epochs: Annotated[int, AtLeast(1)]
    batch_size: Annotated[int, AtLeast(1)]
    lr: Annotated[float, Above(0)]
    momentum: Annotated[float, Between(0, 0.999999)]
    weight_decay: Annotated[float, AtLeast(0)]
    clip: Annotated[float, Above(0)] | None


@dataclass(frozen=True)
class DataInfo:
    """What everybody knows about the examples: their shape, the range of each channel, the number of classes."""

    input_shape: tuple[int, ...]
    low: Tensor  # (channels, 1, ...), broadcasts over an example
    high: Tensor
    num_classes: int


@dataclass(frozen=True)
class Task:
    """What all clients and the server share: the network, how to train it, and how large the clients are."""

    model: FlatModel  # scratch space: whoever needs it loads a vector first
    local: LocalSettings
    server_lr: float
    sizes: tuple[int, ...]  # training examples of each of the N clients
    gaussian: GaussianSettings | None = None  # of the network's Gaussian layers
    server_x: Tensor | None = None  # unlabelled examples that the server holds
    data: DataInfo | None = None

    def weight(self, kind: Weights, client_id: int) -> float:
        return float(self.sizes[client_id]) if kind == "size" else 1.0


@dataclass(frozen=True)
class Client:
    """One client's view of the training data, which are there once for all clients."""

    id: int
    train: Split  # the whole training set
    indices: Tensor  # (n,) this client's examples in it, where these lie
    augment: Augment | None

    def __len__(self) -> int:
        return len(self.indices)

    def gather(self, positions: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Network inputs and labels of the client's examples at these positions, augmented."""
        x, y = self.train.take(self.indices[positions])
        return (x if self.augment is None else self.augment(x, rng)), y


@dataclass(frozen=True)
class Update:
    """What a client hands back after its turn."""

    message: Tensors  # travels up; its bytes are counted
    local: Tensors  # the client's model after training: evaluated where it was trained, then dropped
    memory: Tensors | None = None  # private state, kept for the client's next turn
    metrics: dict[str, float] = field(default_factory=dict)  # what a person reads


class Method(Protocol):
    """The contract. `docs/design.md` shows how to write one; `methods/fedavg.py` is the smallest."""

    @property
    def name(self) -> str: ...

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        """The server's state before the first round; `task.model.initial` are the network's initial parameters."""
        ...

    def init_client(self, task: Task, state: Tensors, client_id: int) -> Tensors | None:
        """The private state of a client at its first turn; None for a method whose clients remember nothing."""
        ...

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        """What every client of the cohort receives."""
        ...

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors | None, client: Client, rng: torch.Generator
    ) -> Update: ...

    def server_update(
        self, task: Task, state: Tensors, replies: Iterable[tuple[int, Tensors]], rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        """The next state, and metrics, from (client id, message) in ascending order of ids.

        `replies` is consumed once: clients may still be training while the first messages are read.
        """
        ...

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        """Parameter vectors whose predictions are averaged: of the server's state, or of an update's `local`."""
        ...
