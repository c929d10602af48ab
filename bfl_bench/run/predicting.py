"""How the global model predicts: in the method's own way, or in another that it has (`eval.predictive`).

Draws and linearised predictions of a Laplace approximation need the precision d of a prior. It is chosen anew in every
evaluated round among `GRID`: where the negative log-likelihood of the validation examples is lowest, or where the
marginal likelihood is highest, which the server can compute without any data.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from bfl_bench.engines.worker import VALIDATION, Worker
from bfl_bench.evaluation.truth import Moments
from bfl_bench.likelihood import AnyPrediction, Scores
from bfl_bench.method import Laplace, Method, Predictive, Tensors
from bfl_bench.rng import stream
from bfl_bench.run.recorder import Row

GRID = tuple(10 ** (step / 2) for step in range(13))  # 1 to 1e6
"""Precisions of a prior to choose from. At the upper end hardly anything is left of a posterior but its mean."""


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A global model that can be asked for predictions, and the columns that say how it makes them."""

    worker: Worker
    predict: Callable[[Tensor], AnyPrediction]  # of inputs (n, ...); all sets are predicted with the same draws
    moments: Callable[[], Moments]  # of the parameters that predict
    columns: Row = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        worker: Worker,
        method: Method,
        state: Tensors,
        round_: int,
        kind: Literal["auto"] | Predictive | None = None,
    ) -> "Predictor":
        """Choose a way to predict, that of `eval.predictive` unless `kind` is another."""
        settings = worker.settings
        kind = kind or settings.predictive
        own = method.predictives[0]

        def predict_own(x: Tensor) -> AnyPrediction:
            rng = stream(worker.seed, "evaluate", round_)
            return method.predict(worker.task, state, x, settings.draws, settings.batch_size, rng)

        def own_moments() -> Moments:
            found = method.weight_moments(worker.task, state)
            if found is not None:
                return found
            rng = stream(worker.seed, "evaluate", round_)
            drawn = torch.stack(list(method.draws(worker.task, state, settings.draws, rng)))
            return Moments.of(drawn[:, : worker.task.model.layout.means.stop])

        def mean_alone() -> Moments:
            return Moments.of(method.mean(worker.task, state)[None, : worker.task.model.layout.means.stop])

        if kind in ("auto", own):
            return cls(worker=worker, predict=predict_own, moments=own_moments)
        if kind == "mean":
            predict = partial(worker.predict_by_mean, method, state)
            return cls(worker=worker, predict=predict, moments=mean_alone)
        laplace = method.laplace(worker.task, state, settings.laplace_layers)
        assert laplace is not None  # `build` sees to what a method has
        way = _Way(worker, laplace, round_, linearised=kind == "linearised")
        prior = way.choose_prior()
        columns: Row = {"prior_precision": prior}
        if VALIDATION in worker.sets:
            split = worker.sets[VALIDATION].split
            columns["precision_ratio"] = laplace.compare_with_fisher(split.x, split.y)
        return cls(
            worker=worker,
            predict=lambda x: way.predict(x, [prior])[0],
            moments=partial(laplace.moments, prior),
            columns=columns,
        )

    def score(self, name: str) -> Scores:
        split = self.worker.sets[name].split
        return self.worker.score(self.predict(split.x), split.y)


@dataclass(frozen=True)
class _Way:
    """A Laplace approximation that predicts by draws or linearised."""

    worker: Worker
    laplace: Laplace
    round: int
    linearised: bool

    def predict(self, x: Tensor, priors: list[float]) -> list[AnyPrediction]:
        """Predict once for each precision of the prior."""
        settings = self.worker.settings
        if self.linearised:
            return self.laplace.linearise(x, priors, settings.batch_size)
        streams = (stream(self.worker.seed, "evaluate", self.round) for _ in priors)
        return [
            self.worker.mix(self.laplace.draw(prior, settings.draws, rng), x)
            for prior, rng in zip(priors, streams, strict=True)
        ]

    def choose_prior(self) -> float:
        asked = self.worker.settings.prior_precision
        if not isinstance(asked, str):
            return asked
        if asked == "evidence" or VALIDATION not in self.worker.sets:
            return max(GRID, key=self.laplace.log_evidence)
        split = self.worker.sets[VALIDATION].split
        losses = [self.worker.score(each, split.y).values["nll"] for each in self.predict(split.x, list(GRID))]
        comparable = [loss if math.isfinite(loss) else math.inf for loss in losses]
        return GRID[comparable.index(min(comparable))]
