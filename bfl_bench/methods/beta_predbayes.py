"""beta-PredBayes: clients sample their own posteriors, and the server combines what these predict, in one round.

Hasan, Zhang, Guo, Chen, Poupart: "Calibrated One Round Federated Learning with Bayesian Inference in the Predictive
Space", AAAI 2024. A client samples with cyclical SGHMC: in cycles of `cycle_epochs` local epochs the learning rate
falls from `local.lr` to 0, the last `sampled_epochs` of a cycle have noise, and the model at the end of each of them is
a sample, of which the last `samples` are sent. With p_k(y|x) the mean prediction of client k's samples,
p proportional to product^b mixture^(1-b), where product is prod p_k and mixture mean p_k, both normalised.
b minimises the negative log-likelihood of labelled examples of the server, in [0, 1]. `beta: 1` is the Bayesian
committee machine without its prior (`method=bcm`), `beta: 0` the mixture (`method=mixture`). A student learns the
combined prediction on the server's inputs, for `epochs` epochs.

Deviations: the negative log-likelihood is convex in b, so that b is found by bisection, where the authors take 10
epochs of Adam. The combination predicts, the student with `eval.predictive=mean`, both with `eval.also_predict`. Noise
has the temperature `temperature` and the client's number of examples; in the authors' code it is divided by the number
of all examples twice, which leaves next to none. A local training shorter than a cycle gives one sample, its last
model. In further rounds clients start from the student, or without one from the average of the clients' last samples.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from bfl_bench.aggregators import WeightedMean
from bfl_bench.checks import Above, AtLeast, Between
from bfl_bench.errors import ConfigError
from bfl_bench.inference.distill import Student
from bfl_bench.inference.langevin import CyclicalSghmc, refuse_other_settings
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.products import combine, fit_beta, product_and_mixture
from bfl_bench.inference.train import Adam, train
from bfl_bench.likelihood import AnyPrediction, Prediction, average
from bfl_bench.method import Client, Needs, Predictive, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class BetaPredBayes(PointMethod):
    """The state has the samples of all clients, `models` (K, S, P), beside `params`, and `beta`."""

    predictives: ClassVar[tuple[Predictive, ...]] = ("draws", "mean")

    cycle_epochs: Annotated[int, AtLeast(1)]
    sampled_epochs: Annotated[int, AtLeast(1)]
    samples: Annotated[int, AtLeast(1)]
    friction: Annotated[float, Between(0, 1)]
    temperature: Annotated[float, AtLeast(0)]
    decay: Annotated[float, AtLeast(0)]
    beta: Annotated[float, Between(0, 1)] | None
    epochs: Annotated[int, AtLeast(0)]
    batch_size: Annotated[int, AtLeast(1)]
    lr: Annotated[float, Above(0)]

    def __post_init__(self) -> None:
        if self.sampled_epochs > self.cycle_epochs:
            raise ConfigError("sampled_epochs", self.sampled_epochs, f"at most cycle_epochs, {self.cycle_epochs}")

    @property
    def needs(self) -> Needs:
        data: Literal["none", "unlabelled", "labelled"] = "unlabelled" if self.epochs else "none"
        data = "labelled" if self.beta is None else data
        return Needs(any_server_step=True, sgd=True, classes=True, server_data=data)

    def check(self, task: Task) -> None:
        instead = {"momentum": "method.friction instead", "weight_decay": "method.decay instead"}
        refuse_other_settings(task, self.name, **instead)

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        beta = torch.tensor(0.5 if self.beta is None else self.beta, dtype=torch.float64)
        return super().init(task, rng) | {"models": task.model.initial[None, None].clone(), "beta": beta}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        epoch_steps = math.ceil(len(client) / task.local.batch_size)
        optimizer = CyclicalSghmc(
            friction=self.friction,
            decay=self.decay,
            variance=self.temperature / len(client),
            cycle_steps=self.cycle_epochs * epoch_steps,
            noisy_steps=self.sampled_epochs * epoch_steps,
        )
        epoch, kept = 0, list[Tensor]()

        def collect(parameters: Tensor, epoch_ends: bool) -> None:
            nonlocal epoch
            if epoch_ends and epoch % self.cycle_epochs >= self.cycle_epochs - self.sampled_epochs:
                kept.append(task.model.vector.clone())
            epoch += epoch_ends

        trained = train(task, broadcast["params"], client, rng, optimizer=optimizer, after_step=collect)
        models = torch.stack(kept[-self.samples :] or [trained.vector])
        return Update(message={"models": models}, local={"models": models[None]}, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        models, mean, metrics = list[Tensor](), WeightedMean(), dict[str, float]()
        for client_id, message in replies:
            models.append(message["models"])
            mean.add(message["models"][-1], task.weight(self.weights, client_id))
        params, stacked, data = mean.result(), torch.stack(models), task.server_data
        beta = 0.5 if self.beta is None else self.beta
        if data is not None:
            both = product_and_mixture(_predict_each(task, stacked, data.x, batch_size=1000))
            if self.beta is None:
                assert data.y is not None  # `build` sees to what a method needs
                beta = fit_beta(*both, data.y)
            if self.epochs:
                student = Student(task, models[0][-1], Adam((0.9, 0.999)), self.lr)
                targets = combine(*both, beta).exp().to(data.x.dtype)
                for _ in range(self.epochs):
                    metrics["distillation_loss"] = student.train_epoch(data.x, targets, self.batch_size, rng)
                params = task.model.vector.clone()
        metrics["beta"] = beta
        return task.server.move(state, params) | {
            "models": stacked,
            "beta": torch.full_like(state["beta"], beta),
        }, metrics

    def predict(
        self, task: Task, model: Tensors, x: Tensor, num: int, batch_size: int, rng: torch.Generator
    ) -> AnyPrediction:
        beta = model["beta"].item() if "beta" in model else 0.0  # a client alone: both are its own
        if beta == 0:  # a mixture has members, whose disagreement can be measured
            return average(task.model, model["models"].flatten(0, 1), x, batch_size, task.likelihood.mixture())
        found = _predict_each(task, model["models"], x, batch_size)
        return Prediction(combine(*product_and_mixture(found), beta), None)


def _predict_each(task: Task, models: Tensor, x: Tensor, batch_size: int) -> Tensor:
    """Predict with the samples of each client, log probabilities (K, n, C)."""
    each = [average(task.model, samples, x, batch_size, task.likelihood.mixture()) for samples in models]
    return torch.stack([one.log_probabilities.double() for one in each if isinstance(one, Prediction)])
