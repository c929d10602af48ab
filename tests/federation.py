"""A tiny federation built directly from tensors: clients of unequal size, labels that can be learnt a little."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bfl_bench.aggregators.server_step import ServerStep
from bfl_bench.data.dataset import Augment, Split
from bfl_bench.engines.worker import TEST, EvalSettings, EvaluationSet, Worker
from bfl_bench.likelihood import Categorical, Prediction, Scores, average
from bfl_bench.method import Client, DataInfo, LocalSettings, Method, Task, Tensors
from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import GaussianSettings, make_gaussian

CPU = torch.device("cpu")
SIZES = (7, 12, 4)
NUM_FEATURES = 5
NUM_CLASSES = 3


def make_local(**changes: Any) -> LocalSettings:
    """Two epochs of small batches; no size in SIZES but one is a multiple of the batch size."""
    values: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 4,
        "lr": 0.2,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "clip": None,
        "optimizer": "sgd",
        "betas": [0.9, 0.999],
        "schedule": "constant",
    }
    return LocalSettings(**values | changes)


def make_eval(**changes: Any) -> EvalSettings:
    values: dict[str, Any] = {
        "every": 1,
        "local_every": 1,
        "batch_size": 8,
        "draws": 1,
        "local_draws": 1,
        "scored": "test",
        "local_share": 1.0,
        "predictive": "auto",
        "also_predict": [],
        "prior_precision": "auto",
        "laplace_layers": "all",
        "ece_bins": 5,
        "nll_epsilon": 0.0,
        "uncertainty": False,
        "posterior": False,
        "truth": None,
        "ood": {},
        "shift": [],
        "severities": [1, 2, 3, 4, 5],
        "also_aggregate": {},
        "weight_rounds": [],
        "weight_points": 5,
        "keep_messages": [],
        "unseen_steps": [0, 1],
        "personalise": [],
        "personalise_rule": "wb",
    }
    return EvalSettings(**values | changes)


def make_module() -> nn.Module:
    """Smooth, so that a rounding error stays one: no ReLU that could switch."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, 6), nn.Tanh(), nn.Linear(6, NUM_CLASSES))


def make_task(
    module: nn.Module | None = None, sizes: Sequence[int] = SIZES, server_lr: float = 1.0, **local: Any
) -> Task:
    return assemble_task(FlatModel(module or make_module(), CPU), sizes, server_lr, **local)


def assemble_task(
    model: FlatModel,
    sizes: Sequence[int],
    server_lr: float = 1.0,
    gaussian: GaussianSettings | None = None,
    shape: tuple[int, ...] = (NUM_FEATURES,),
    num_classes: int = NUM_CLASSES,
    **local: Any,
) -> Task:
    return Task(
        model=model,
        likelihood=Categorical(num_classes),
        data=DataInfo(shape, torch.tensor(-3.0), torch.tensor(3.0)),
        local=make_local(**local),
        server=make_server(lr=server_lr),
        sizes=tuple(sizes),
        initials=model.initial[None],
        gaussian=gaussian,
    )


def make_server(**changes: Any) -> ServerStep:
    values: dict[str, Any] = {
        "rule": "sgd",
        "lr": 1.0,
        "momentum": 0.0,
        "beta2": 0.99,
        "tau": 1e-3,
        "bias_correction": False,
    }
    return ServerStep(**values | changes)


def make_gaussian_settings(**changes: Any) -> GaussianSettings:
    values: dict[str, Any] = {
        "bayesian_layers": "auto",
        "mean_init": "network",
        "log_variance_init": -3.0,
        "log_variance_init_std": 0.5,
        "log_variance_clamp": "none",
        "log_variance_range": [-8.0, 8.0],
    }
    return GaussianSettings(**values | changes)


def make_gaussian_task(
    settings: GaussianSettings | None = None,
    num_layers: int | None = None,
    sizes: Sequence[int] = SIZES,
    server_lr: float = 1.0,
    **local: Any,
) -> Task:
    """The same network with Gaussian weights in its last `num_layers` linear layers; None: in both."""
    settings = settings or make_gaussian_settings()
    module = make_gaussian(make_module(), num_layers, settings)
    return assemble_task(FlatModel(module, CPU), sizes, server_lr, settings, **local)


def make_split(num: int, shape: tuple[int, ...] = (NUM_FEATURES,), seed: int = 1) -> Split:
    """Normal inputs, no two alike; the label is the largest of the first features, one time in five another."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, *shape, generator=generator)
    y = x.flatten(1)[:, :NUM_CLASSES].argmax(1)
    noise = torch.rand(num, generator=generator) < 0.2
    return Split(x, torch.where(noise, (y + 1) % NUM_CLASSES, y))


def make_clients(
    sizes: Sequence[int] = SIZES, shape: tuple[int, ...] = (NUM_FEATURES,), augment: Augment | None = None
) -> list[Client]:
    """Clients of these sizes; their examples lie scattered over the training set."""
    total = sum(sizes)
    train = make_split(total, shape)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(2))
    return [Client(id_, train, indices, augment) for id_, indices in enumerate(order.split(list(sizes)))]


def make_worker(method: Method, sizes: Sequence[int] = SIZES, seed: int = 3, **local: Any) -> Worker:
    clients = make_clients(sizes)
    return Worker(
        task=make_task(sizes=sizes, **local),
        method=method,
        train=clients[0].train,
        sets={TEST: EvaluationSet(make_split(25, seed=4))},
        augment=None,
        client_indices=tuple(client.indices for client in clients),
        settings=make_eval(batch_size=10, draws=3, local_draws=3, ece_bins=15),
        seed=seed,
        rounds=5,
    )


def predict(
    model: FlatModel, draws: Iterable[Tensor], x: Tensor, batch_size: int, num_classes: int = NUM_CLASSES
) -> Tensor:
    """Log of the mean over draws of the predicted probabilities, (n, C, ...)."""
    return average(model, draws, x, batch_size, Categorical(num_classes).mixture()).log_probabilities


def score(log_probabilities: Tensor, labels: Tensor, ece_bins: int, nll_epsilon: float = 0.0) -> Scores:
    prediction = Prediction(log_probabilities, None)
    return Categorical(log_probabilities.shape[1]).score(prediction, labels, ece_bins, nll_epsilon)


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_start(task: Task, seed: int = 6) -> Tensor:
    """A model that differs from the one the network holds; statistics, which may be variances, are positive."""
    start = torch.randn(task.model.layout.size, generator=generator(seed)) * 0.5
    start[task.model.layout.num_trainable :].abs_().add_(0.1)
    return start


def train_clients(
    method: Method,
    task: Task,
    state: Tensors,
    clients: Sequence[Client],
    seeds: Mapping[int, int] | None = None,
) -> list[tuple[int, Tensors]]:
    """What the clients send back in one round."""
    broadcast = method.broadcast(task, state)
    replies = []
    for client in clients:
        rng = generator(seeds[client.id] if seeds else 100 + client.id)
        memory = method.init_client(task, state, client.id)
        replies.append((client.id, method.client_update(task, broadcast, memory, client, rng).message))
    return replies


def run_round(method: Method, task: Task, state: Tensors, clients: Sequence[Client]) -> Tensors:
    replies = train_clients(method, task, state, clients)
    return method.server_update(task, state, iter(replies), generator(7))[0]
