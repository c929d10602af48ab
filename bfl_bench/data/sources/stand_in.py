"""Stand-ins for the real files: small random data of the same shapes, to try out an experiment in seconds.

`data_dir=stand-in` asks for them. Every number is drawn from a fixed seed. Classes differ in their means, so that
something can be learnt; nothing that is learnt means anything.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bfl_bench.data.sources.characters import NUM_CLASSES, Choice
from bfl_bench.data.sources.federations import Activities, Examples, Parts, Signals, Writers, name_numbers
from bfl_bench.data.sources.files import Arrays
from bfl_bench.data.sources.tables import Table

TRAIN, TEST = 1200, 200  # examples
TABLES = {"abalone": 10, "auto_mpg": 9, "wine": 11, "bike": 12, "kin8nm": 8}  # features


def make(source: str) -> Any:
    """What the files of a source would be read to."""
    if source in ("mnist", "fashion_mnist", "kmnist"):
        return _images(1, 28)
    if source in ("cifar10", "svhn", "cifar100"):
        return _images(3, 32, 100 if source == "cifar100" else 10)
    if source == "emnist":
        return make_emnist("balanced")
    if source == "qmnist":
        return Writers(np.arange(TRAIN) % 40, 40 + np.arange(TEST) % 10)
    if source == "femnist":  # 100 writers of digits, each with 12 images to train on
        arrays = _images(1, 28)
        return Parts(_own(arrays.train_x[:, 0], arrays.train_y, 100), _own(arrays.test_x[:, 0], arrays.test_y, 100))
    if source == "vsn":
        return _own(*_features(100, 2), 23)
    if source == "har":
        return Activities(_own(*_features(561, 12), 30), 12)
    if source == "har_raw":
        return _signals()
    if source in TABLES:
        return _table(TABLES[source])
    if source == "shakespeare":
        return {"made up": _play(num_roles=100, length=1000)}
    raise ValueError(f"{source} has no stand-in")


def make_emnist(choice: Choice) -> Arrays:
    return _images(1, 28, NUM_CLASSES[choice])


def _draw(num: int, shape: tuple[int, ...], num_classes: int, seed: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Class means, the same for every seed, and noise; standard normal each."""
    means = np.random.default_rng(0).normal(size=(num_classes, *shape))
    y = np.arange(num) % num_classes
    return means[y] + np.random.default_rng(seed).normal(size=(num, *shape)), y


def _images(channels: int, side: int, num_classes: int = 10) -> Arrays:
    parts = []
    for num, seed in ((TRAIN, 1), (TEST, 2)):
        x, y = _draw(num, (channels, side, side), num_classes, seed)
        parts += [np.clip(64 + 32 * x, 0, 255).astype(np.uint8), y]
    return Arrays(*parts)


def _features(width: int, num_classes: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    x, y = _draw(TRAIN, (width,), num_classes, 1)
    return np.clip(0.3 * x, -1, 1).astype(np.float32), y


def _table(width: int) -> Table:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(TRAIN, width))
    return Table(x, x.sum(1) + rng.normal(size=TRAIN))


def _own(x: NDArray[Any], y: NDArray[np.int64], num_clients: int) -> Examples:
    """Each client gets examples that follow each other, hence all classes in turn."""
    return Examples(x, y, name_numbers("client", np.arange(len(y)) * num_clients // len(y)))


def _signals() -> Signals:
    """30 subjects with 12 activities of 3 seconds each."""
    label = np.tile(np.repeat(np.arange(1, 13), 150), 30).astype(np.int8)
    user = np.repeat(np.arange(1, 31), 12 * 150).astype(np.uint8)
    noise = np.random.default_rng(1).normal(size=(6, len(label)))
    return Signals(noise + label / 6, label, user, user.copy())


def _play(num_roles: int, length: int) -> str:
    rng = np.random.default_rng(1)
    speeches = ["".join(rng.choice(list("abcdefgh .,"), length)) for _ in range(num_roles)]
    names = [f"ROLE {a}{b}" for a in "ABCDEFGHIJ" for b in "ABCDEFGHIJ"]
    return "ACT I.\n\n" + "\n\n".join(f"{name}.\n{speech}" for name, speech in zip(names, speeches, strict=True))
