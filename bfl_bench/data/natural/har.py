"""Human activities by the motion of a smartphone at the waist (UCI's HAR and HAPT): a client per subject."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bfl_bench.checks import AtLeast, Between
from bfl_bench.data.dataset import Dataset
from bfl_bench.data.natural.owning import assemble, draw_test
from bfl_bench.data.sources import load_content
from bfl_bench.data.sources.federations import Activities, Examples, Signals, name_numbers

WINDOW, STEP = 128, 64  # samples, as in UCI's features: 2.56 s, every second half anew


@dataclass(frozen=True)
class Har:
    """Windows of motion: 561 features each, or the 6 channels themselves."""

    name: str
    features: Literal["precomputed", "raw"]
    test_fraction: Annotated[float, Between(0.01, 0.99)]
    split_seed: Annotated[int, AtLeast(0)]

    def load(self, data_dir: Path) -> Dataset:
        if self.features == "raw":
            (x, y, owner), num_classes = cut_windows(load_content("har_raw", data_dir)), 12
        else:
            activities: Activities = load_content("har", data_dir)
            (x, y, owner), num_classes = activities
        in_test = draw_test(owner, self.test_fraction, self.split_seed, "har")
        if self.features == "raw":
            x = standardise(x, ~in_test)
        return assemble(torch.from_numpy(x), torch.from_numpy(y), owner, in_test, num_classes)


def cut_windows(signals: Signals) -> Examples:
    """All windows (n, 6, WINDOW) within one activity of one recording."""
    change = np.diff(signals.label.astype(int)) | np.diff(signals.experiment.astype(int))
    bounds = [0, *(np.flatnonzero(change) + 1).tolist(), len(signals.label)]
    starts = np.concatenate(
        [np.arange(begin, end - WINDOW + 1, STEP) for begin, end in pairwise(bounds) if signals.label[begin] > 0]
    )
    x = signals.channels[:, starts[:, None] + np.arange(WINDOW)].transpose(1, 0, 2)
    y = signals.label[starts].astype(np.int64) - 1
    return Examples(x.astype(np.float32), y, name_numbers("subject", signals.user[starts]))


def standardise(x: NDArray[np.float32], in_train: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Each channel with the mean and the deviation that it has in the training windows."""
    train = x[in_train].astype(np.float64)
    mean, std = train.mean((0, 2), keepdims=True), train.std((0, 2), keepdims=True)
    scaled: NDArray[np.float64] = (x - mean) / std
    return scaled.astype(np.float32)
