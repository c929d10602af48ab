"""SWAG: FedAvg, and a Gaussian over the models that it passes through.

Maddox, Garipov, Izmailov, Vetrov, Wilson: "A Simple Baseline for Bayesian Uncertainty in Deep Learning", NeurIPS 2019,
for federated learning proposed as a baseline by Linsner, Adilova, Daeubener, Kamp, Fischer: "Approaches to Uncertainty
Quantification in Federated Deep Learning", 2021. With `iterates: server` the models are the server's after aggregation:
nothing more is sent than in FedAvg, and clients train as there. From round `start_round` on, every `every` rounds,
means of the model and of its square are updated, and the model's distance from the new mean becomes a row of A, of
which the last `rank` are kept. With standard normal z and z', a draw is mean + sqrt(scale) (sqrt(mean of squares -
mean^2) z + A' z' / sqrt(rows - 1)). Until the first model is taken in, the server's model predicts.

With `iterates: clients` the models are those of a client's steps in its last local epoch. It sends their means and
variances, which the server combines to the moments of the clients' mixture; the draws have no A, and the mean is the
model that the next round starts from.

Deviations: the authors' code divides A by sqrt(rank - 1) even as long as it has fewer rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from bfl_bench.aggregators import Combination, WeightedMean, moments
from bfl_bench.checks import AtLeast
from bfl_bench.devices import bring
from bfl_bench.errors import UnsuitableError
from bfl_bench.evaluation.posterior import Posterior
from bfl_bench.evaluation.truth import Moments
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Predictive, Replies, Task, Tensors, Update

BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Swag(PointMethod):
    predictives: ClassVar[tuple[Predictive, ...]] = ("draws", "mean")

    iterates: Literal["server", "clients"]
    start_round: Annotated[int, AtLeast(1)]
    every: Annotated[int, AtLeast(1)]
    rank: Annotated[int, AtLeast(2)]
    scale: Annotated[float, AtLeast(0)]
    floor: Annotated[float, AtLeast(0)]

    def check(self, task: Task) -> None:
        if any(isinstance(module, BATCH_NORM) for module in task.model.module.modules()):
            raise UnsuitableError("a network without BatchNorm, whose statistics every draw would need anew")

    def init(self, task: Task, rng: torch.Generator) -> Tensors:
        state = super().init(task, rng)
        zeros = torch.zeros_like(task.model.gradient, dtype=torch.float64)
        if self.iterates == "clients":
            return state | {"variance": zeros}
        more = {"mean": zeros, "square": zeros.clone(), "deviations": task.model.gradient.new_zeros(0, len(zeros))}
        return state | more | {"round": zeros.new_zeros(()), "collected": zeros.new_zeros(())}

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        if self.iterates == "server":
            return super().client_update(task, broadcast, memory, client, rng)
        means, squares = WeightedMean(), WeightedMean()
        epochs_left = task.local.epochs

        def collect(parameters: Tensor, epoch_ends: bool) -> None:
            nonlocal epochs_left
            if epochs_left == 1:
                model = parameters.double()  # a copy
                means.add(model, 1.0)
                squares.add(model.square(), 1.0)
            epochs_left -= epoch_ends

        trained = train(task, broadcast["params"], client, rng, after_step=collect)
        params, mean = trained.vector, means.result()
        variance = (squares.result() - mean.square()).clamp(min=self.floor)
        params[: len(mean)] = mean.to(params.dtype)
        model = {"params": params, "variance": variance.to(params.dtype)}
        return Update(message=model, local=model, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        if self.iterates == "server":
            new, metrics = super().server_update(task, state, replies, rng)
            return new | self._collect(state, new["params"]), metrics
        size = len(state["variance"])
        points, gaussians = WeightedMean(), Combination(moments, rng)
        for client_id, message in replies:
            weight = task.weight(self.weights, client_id)
            points.add(message["params"], weight)
            gaussians.add(message["params"][:size], message["variance"], weight)
        return task.server.move(state, points.result()) | {"variance": gaussians.result()[1]}, {}

    def _collect(self, state: Tensors, params: Tensor) -> Tensors:
        """Take in the server's new model where it is the round's turn."""
        round_, num = state["round"] + 1, state["collected"] + 1
        since = round_.item() - self.start_round
        if since < 0 or since % self.every:
            kept = ("mean", "square", "deviations", "collected")
            return {name: state[name] for name in kept} | {"round": round_}
        model = params[: len(state["mean"])].double()
        mean = state["mean"] + (model - state["mean"]) / num
        square = state["square"] + (model.square() - state["square"]) / num
        rows = torch.cat([state["deviations"], (model - mean).to(params.dtype)[None]])[-self.rank :]
        return {"mean": mean, "square": square, "deviations": rows, "round": round_, "collected": num}

    def draws(self, task: Task, model: Tensors, num: int, rng: torch.Generator) -> Iterator[Tensor]:
        params = model["params"]
        if "variance" in model:
            mean, variance, rows = params[: len(model["variance"])], model["variance"], params.new_zeros(0, 1)
        elif "collected" in model and model["collected"] > 0:
            mean, variance, rows = model["mean"], model["square"] - model["mean"].square(), model["deviations"]
        else:
            yield params
            return
        deviation = variance.clamp(min=self.floor).sqrt().to(params.dtype)
        for _ in range(num):
            noise = deviation * bring(torch.randn(len(deviation), generator=rng), params.device)
            if len(rows) > 1:
                noise += bring(torch.randn(len(rows), generator=rng), params.device) @ rows / (len(rows) - 1) ** 0.5
            drawn = params.clone()
            drawn[: len(mean)] = mean.to(params.dtype) + self.scale**0.5 * noise
            yield drawn

    def mean(self, task: Task, model: Tensors) -> Tensor:
        params = model["params"].clone()
        if "collected" in model and model["collected"] > 0:
            params[: len(model["mean"])] = model["mean"].to(params.dtype)
        return params

    def weight_moments(self, task: Task, state: Tensors) -> Moments | None:
        """Return those of `draws`, the part of low rank included."""
        found = super().weight_moments(task, state)
        rows = state["deviations"].double() if "deviations" in state else None
        if found is None or rows is None or len(rows) < 2:
            return found
        return Moments(found.mean, found.matrix + self.scale * rows.T @ rows / (len(rows) - 1))

    def posterior(self, task: Task, state: Tensors) -> Posterior | None:
        """Without the part of low rank; a draw has `scale` times the covariance."""
        if "variance" in state:
            mean, variance = state["params"][: len(state["variance"])], state["variance"]
        elif state["collected"] > 0:
            mean, variance = state["mean"], state["square"] - state["mean"].square()
        else:
            return None
        return Posterior(mean=mean, log_variance=(self.scale * variance.clamp(min=self.floor)).log())
