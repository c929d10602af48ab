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
    """Windows of motion: 561 features each, features computed here, or the 6 channels themselves."""

    name: str
    features: Literal["precomputed", "computed", "raw"]
    test_fraction: Annotated[float, Between(0.01, 0.99)]
    split_seed: Annotated[int, AtLeast(0)]

    def load(self, data_dir: Path) -> Dataset:
        if self.features == "precomputed":
            activities: Activities = load_content("har", data_dir)
            (x, y, owner), num_classes = activities
        else:
            (x, y, owner), num_classes = cut_windows(load_content("har_raw", data_dir)), 12
        in_test = draw_test(owner, self.test_fraction, self.split_seed, "har")
        if self.features == "computed":
            x = compute_features(x)
        if self.features != "precomputed":
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


def compute_features(windows: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, 6, time), x, y and z of acceleration and of rotation, to (n, 223): moments and spectra of 16 signals.

    Beside the channels these are their changes from sample to sample, and the lengths of the four vectors. UCI's 561
    features are of this kind, with filters before and more quantiles after.
    """
    changes = np.diff(windows, axis=2, append=windows[:, :, -1:])
    vectors = np.stack([windows[:, :3], windows[:, 3:], changes[:, :3], changes[:, 3:]], axis=1)
    lengths = np.linalg.norm(vectors, axis=2)
    signals = np.concatenate([vectors.reshape(len(windows), 12, -1), lengths], axis=1)  # (n, 16, time)
    mean = signals.mean(2)
    centred = signals - mean[..., None]
    std = centred.std(2)
    scaled = centred / np.where(std > 0, std, 1)[..., None]
    squares = scaled * scaled
    quartiles = np.sort(signals, axis=2)[..., np.linspace(0, signals.shape[2] - 1, 5).astype(int)]
    power = np.abs(np.fft.rfft(centred, axis=2)) ** 2
    total = power.sum(2)
    share = power / np.where(total > 0, total, 1)[..., None]
    found = [mean, std, *np.moveaxis(quartiles, 2, 0), (squares * scaled).mean(2), (squares * squares).mean(2)]
    found += [np.log1p(total), power.argmax(2), share @ np.arange(power.shape[2])]
    found.append(-(share * np.log(share + 1e-12)).sum(2))
    correlations = scaled[:, :6] @ scaled[:, :6].transpose(0, 2, 1) / scaled.shape[2]
    features = np.concatenate([*found, correlations[:, *np.triu_indices(6, 1)]], axis=1)
    return features.astype(np.float32)


def standardise(x: NDArray[np.float32], in_train: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Each channel or feature with the mean and the deviation that it has in the training windows."""
    train = x[in_train].astype(np.float64)
    axes = (0, *range(2, x.ndim))
    mean, std = train.mean(axes, keepdims=True), train.std(axes, keepdims=True)
    scaled: NDArray[np.float64] = (x - mean) / np.where(std > 0, std, 1.0)
    return scaled.astype(np.float32)
