"""Fisher merging: the clients' models averaged coordinate by coordinate, weighted by their Fisher information.

Matena, Raffel: "Merging Models with Fisher-Weighted Averaging", NeurIPS 2022. Clients train as in FedAvg; one pass over
their data gives the diagonal F_k of the Fisher information of an example, in expectation over labels as the network
predicts them (`fisher: model`), or for the labels of the data (`per_sample`). With c_k the weights of clients the new
model is sum c_k F_k theta_k / sum c_k F_k: the mean of the product of Laplace approximations that `fola` has in its
first round, without a prior.

Deviations: c_k are the clients' shares, which the authors search for on validation data. `normalise: true` scales each
F_k to norm 1, as their code does. Where sum c_k F_k is at most `floor` the plain average stands, as in FedFisher's
version of this method; the authors' code raises the first model's F to 1e-6 instead. In further rounds clients start
from the merged model and nothing else is carried over.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from bfl_bench.aggregators import WeightedMean
from bfl_bench.aggregators.algebra import solve
from bfl_bench.checks import AtLeast
from bfl_bench.inference.curvature import check_expected_gradient, diagonal_fisher
from bfl_bench.inference.laplace import LaplacePosterior
from bfl_bench.inference.merging import make_laplace
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Layers, Predictive, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class FisherMerging(PointMethod):
    predictives: ClassVar[tuple[Predictive, ...]] = ("mean", "draws", "linearised")

    fisher: Literal["model", "per_sample"]
    normalise: bool
    floor: Annotated[float, AtLeast(0)]

    def check(self, task: Task) -> None:
        if self.fisher == "model":
            check_expected_gradient(task)

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        trained = train(task, broadcast["params"], client, rng)
        precision = diagonal_fisher(task, trained.vector, client, rng, self.fisher)
        message = {"params": trained.vector, "precision": precision}
        return Update(message=message, local={"params": trained.vector}, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        points, precisions, scaled, products = WeightedMean(), WeightedMean(), WeightedMean(), WeightedMean()
        for client_id, message in replies:
            weight = task.weight(self.weights, client_id)
            precision = message["precision"].double()
            points.add(message["params"], weight)
            precisions.add(precision, weight)
            if self.normalise:
                precision = precision / precision.norm().clamp(min=torch.finfo(precision.dtype).tiny)
            scaled.add(precision, weight)
            products.add(precision * message["params"][: len(precision)], weight)
        aggregated, total = points.result(), scaled.result()
        known = torch.where(total > self.floor, total, torch.zeros_like(total))
        aggregated[: len(total)] = solve(known, products.result(), fallback=aggregated[: len(total)])
        precision = precisions.result().to(state["params"].dtype)  # not scaled: that of an example, for the posterior
        return task.server.move(state, aggregated) | {"precision": precision}, {}

    def laplace(self, task: Task, state: Tensors, layers: Layers) -> LaplacePosterior:
        return make_laplace(task, state, layers)
