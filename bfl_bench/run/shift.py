"""The global model under shifts of the distribution: corrupted test images, by corruption and severity.

Every corruption and severity has a stream of its own, so that the same images are corrupted in the same way for all
methods of a seed.
"""

import math

from bfl_bench.engines.worker import TEST, Worker
from bfl_bench.rng import stream
from bfl_bench.run.predicting import Predictor
from bfl_bench.run.recorder import Row

SCORES = ("accuracy", "nll", "ece")


def measure(worker: Worker, predictor: Predictor) -> list[Row]:
    """Score the model for each severity: the means over the corruptions, and each corruption's, `accuracy@blur`."""
    assert worker.pixels is not None  # `build` sees to it
    split, rows = worker.sets[TEST].split, []
    for severity in worker.settings.severities:
        by_corruption: dict[str, dict[str, float]] = {}
        for name in worker.settings.shift:
            x = worker.pixels.corrupt(split.x, name, severity, stream(worker.seed, "shift", name, severity))
            by_corruption[name] = worker.score(predictor.predict(x), split.y).values
        row: Row = {"severity": severity}
        for score in SCORES:
            row[score] = math.fsum(values[score] for values in by_corruption.values()) / len(by_corruption)
        for name, values in by_corruption.items():
            row |= {f"{score}@{name}": values[score] for score in SCORES}
        rows.append(row)
    return rows
