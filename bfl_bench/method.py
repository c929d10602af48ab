"""What a federated method is: a frozen dataclass of hyperparameters with pure functions over explicit state.

All memory lives in the server state and in the private states of the clients, both plain dictionaries of tensors that
the round loop stores and the checkpoint writes. Nothing hides in `self`, in an optimizer object or in a global
generator: that is what makes resuming, parallel engines and tests trivial.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

import torch
from torch import Tensor

from bfl_bench.aggregators.server_step import ServerStep
from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.data.dataset import Augment, Split
from bfl_bench.devices import bring
from bfl_bench.errors import ConfigError
from bfl_bench.evaluation.posterior import Posterior
from bfl_bench.evaluation.truth import Moments
from bfl_bench.likelihood import AnyPrediction, Categorical, Likelihood, average
from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import GaussianSettings

Tensors = dict[str, Tensor]
"""A state, a message or a model: named tensors."""

Replies = Iterable[tuple[int, Tensors]]
"""Client ids and their messages, in ascending order of ids."""

Weights = Literal["size", "uniform"]
"""How clients weigh in the aggregation: by their number of training examples, or all alike."""

Predictive = Literal["mean", "draws", "linearised"]
"""How a posterior predicts: its mean alone, parameter draws, or outputs that are linear in the parameters."""

Layers = Literal["all", "last"]
"""Which layers of a network a Laplace approximation is about; the others stay at their mean."""


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """How a client trains; every method reads it in the same way."""

    epochs: Annotated[int, AtLeast(1)]
    batch_size: Annotated[int, AtLeast(1)]
    lr: Annotated[float, Above(0)]
    momentum: Annotated[float, Between(0, 0.999999)]
    weight_decay: Annotated[float, AtLeast(0)]
    clip: Annotated[float, Above(0)] | None
    optimizer: Literal["sgd", "adam"]
    betas: list[Annotated[float, Between(0, 0.999999)]]
    schedule: Literal["constant", "cosine"]

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise ConfigError("betas", self.betas, "two numbers from 0 to 0.999999")
        if self.optimizer == "adam" and self.momentum:
            raise ConfigError("momentum", self.momentum, "0 with local.optimizer=adam, which has local.betas instead")


@dataclass(frozen=True)
class DataInfo:
    """What everybody knows about the examples: their shape and the range of each channel."""

    input_shape: tuple[int, ...]
    low: Tensor  # (channels, 1, ...), broadcasts over an example
    high: Tensor


@dataclass(frozen=True)
class ServerData:
    """Examples that the server holds."""

    x: Tensor  # (n, ...) network inputs
    y: Tensor | None  # (n,) withheld from a method that does not ask for labels


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all clients and the server share: the network, how to train it, and how large the clients are."""

    model: FlatModel  # scratch space: whoever needs it loads a vector first
    likelihood: Likelihood
    data: DataInfo
    local: LocalSettings
    server: ServerStep
    sizes: tuple[int, ...]  # training examples of each of the N clients
    initials: Tensor  # (M, P) initial parameters, M as many as the method needs; row 0 is `model.initial`
    gaussian: GaussianSettings | None = None  # of the network's Gaussian layers
    server_data: ServerData | None = None  # for a method that needs them
    max_steps: int | None = None  # of a local update, which end in its last epoch; None: all of the epochs

    @property
    def num_classes(self) -> int:
        assert isinstance(self.likelihood, Categorical)  # for methods that need classes
        return self.likelihood.num_classes

    def decide(self, outputs: Tensor) -> Tensor:
        """Return the most probable class of each example, (n, ...)."""
        assert isinstance(self.likelihood, Categorical)
        return self.likelihood.decide(outputs)

    def generalised_loss(self, outputs: Tensor, labels: Tensor, power: float) -> Tensor:
        """Compute the mean generalised cross-entropy, for methods that need classes."""
        assert isinstance(self.likelihood, Categorical)
        return self.likelihood.generalised_loss(outputs, labels, power)

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
        """Return network inputs and labels of the client's examples at these positions, augmented."""
        indices, target = self.indices[positions], self.train.target
        # Far faster than x[indices].
        x, y = (tensor.index_select(0, indices) for tensor in (self.train.x, self.train.y))
        if target is not None:
            x, y = bring(x, target), bring(y, target)
        return (x if self.augment is None else self.augment(x, rng)), y


@dataclass(frozen=True, kw_only=True)
class Update:
    """The result of a client's local update."""

    message: Tensors  # travels up; its bytes are counted
    local: Tensors  # the client's model after training: evaluated where it was trained, then dropped
    memory: Tensors = field(default_factory=dict)  # private state, kept for the client's next local update
    metrics: dict[str, float] = field(default_factory=dict)  # what a person reads


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a method asks of the rest; the defaults ask for nothing."""

    gaussian_layers: bool = False  # the network's layers get Gaussian weights (`model.bayesian_layers`)
    lateral: bool = False  # beside the shared network stands a private one (models/lateral.py)
    gate_per_unit: bool = False  # of the private network; else one per layer
    own_test: bool = False  # clients are tested on examples of their own, unless `partition.test` says otherwise
    server_data: Literal["none", "unlabelled", "labelled"] = "none"  # of `dataset.server_samples`
    extra_outputs: int = 0  # of the network, beyond those that the likelihood asks for
    classes: bool = False  # labels are classes
    num_initials: int = 1  # rows of `Task.initials`
    any_server_step: bool = False  # the state is a point: momentum and adaptive steps of the server make sense
    sgd: bool = False  # local training must be SGD, because the method's algebra is
    dropout: bool = False  # the network has the key `dropout`, or layers of its own with dropout


class Laplace(Protocol):
    """A Gaussian over parameters that waits for a prior: its precision is the data's plus d for every parameter."""

    def draw(self, prior_precision: float, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        """Yield parameter vectors (P,)."""
        ...

    def linearise(self, x: Tensor, prior_precisions: Sequence[float], batch_size: int) -> list[AnyPrediction]:
        """Predict with a network that is linear in its parameters, once for each d."""
        ...

    def log_evidence(self, prior_precision: float) -> float:
        """Compute the log marginal likelihood of the data, but for what does not depend on d."""
        ...

    def moments(self, prior_precision: float) -> Moments:
        """Return mean and covariance of all trainable parameters."""
        ...

    def compare_with_fisher(self, x: Tensor, y: Tensor) -> float:
        """Divide the trace of the data's precision by that of the Fisher information of these examples at the mean."""
        ...


@dataclass(frozen=True)
class Method(ABC):
    """The contract. `docs/design.md` shows how to write one; `methods/fedavg.py` is the smallest."""

    name: str
    weights: Weights

    @property
    def needs(self) -> Needs:
        """Declare what the method asks for; a class attribute of that name does as well."""
        return Needs()

    def check(self, task: Task) -> None:
        """Refuse a network or a task with a `ConfigError`, before anything is trained or written."""
        return

    @abstractmethod
    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        """Make the server's state before the first round; `task.model.initial` are the network's initial parameters."""

    def init_client(self, task: Task, state: Tensors, client_id: int) -> Tensors:
        """Make the private state of a client before its first local update; empty: clients remember nothing."""
        return {}

    def broadcast(self, task: Task, state: Tensors) -> Tensors:
        """Choose what every client of the cohort receives."""
        return dict(state)

    @abstractmethod
    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        """Train on the client's data."""

    @abstractmethod
    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        """Make the next state, and metrics, of the cohort's messages.

        Every reply has to be read, once: clients may still be training while the first messages are read.
        """

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        """Yield parameter vectors whose predictions are averaged: of the server's state, or of an update's `local`."""
        yield model["params"]

    def predict(
        self, task: Task, model: Tensors, x: Tensor, num: int, batch_size: int, rng: torch.Generator
    ) -> AnyPrediction:
        """Predict the labels of x (n, ...) with at most `num` draws from the posterior."""
        return average(task.model, self.draws(task, model, num, rng), x, batch_size, task.likelihood.mixture())

    def posterior(self, task: Task, state: Tensors) -> Posterior | None:
        """Describe the Gaussian that the server's state is, for `eval.posterior`; None: it is none, or not yet."""
        return None

    def gaussian(self, task: Task, model: Tensors) -> tuple[Tensor, Tensor] | None:
        """Return means and variances (D,) of the server's state or of an update's `local`, for `eval.personalise`.

        None: it is no product of Gaussians, or not yet.
        """
        return None

    def with_gaussian(self, task: Task, model: Tensors, mean: Tensor, variance: Tensor) -> Tensors:
        """Return the model with these Gaussians in the place of those that `gaussian` gives."""
        raise NotImplementedError

    def weight_moments(self, task: Task, state: Tensors) -> Moments | None:
        """Return the moments of the parameters that `draws` draws, for `eval.truth`; None: estimate them by draws."""
        posterior = self.posterior(task, state)
        return None if posterior is None else Moments(posterior.mean, posterior.log_variance.exp())

    @property
    def predictives(self) -> tuple[Predictive, ...]:
        """Name the ways to predict that the method has; the first is that of `predict`."""
        own = type(self)
        drawn = own.draws is not Method.draws or own.predict is not Method.predict
        return ("draws",) if drawn else ("mean",)

    def mean(self, task: Task, model: Tensors) -> Tensor:
        """Return the parameter vector (P,) that predicts alone, where "mean" is among `predictives`."""
        return model["params"]

    def laplace(self, task: Task, state: Tensors, layers: Layers) -> Laplace | None:
        """Return the Laplace approximation around the server's model, where "linearised" is among `predictives`."""
        return None

    def alternatives(self) -> Mapping[str, "Method"]:
        """Name variants of this method that are to be evaluated on the same replies."""
        return {}
