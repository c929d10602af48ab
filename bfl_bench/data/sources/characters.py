"""Characters in MNIST's format: KMNIST (Clanuwat et al. 2018) and the choices of EMNIST (Cohen et al. 2017).

The packed files are known by their published checksums. Once unpacked they have none here and are checked for what
they must contain: a header that fits to the length, as many labels as images, labels of the classes.
"""

import gzip
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bfl_bench.data.sources.federations import CheckedFiles
from bfl_bench.data.sources.files import UNREADABLE, AlteredFileError, Arrays, File, PublishedFiles

Choice = Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"]
"""EMNIST's ways to choose among its images, and to merge capital and small letters that look alike."""

NUM_CLASSES: dict[str, int] = {
    "balanced": 47, "byclass": 62, "bymerge": 47, "letters": 26, "digits": 10, "mnist": 10
}  # fmt: skip
Read = Callable[[str], tuple[bytes, Path]]
"""Gives the unpacked content of a file by its name, and where it lies."""


def parse_idx(content: bytes, path: Path, num_dimensions: int) -> NDArray[np.uint8]:
    """Read MNIST's format: unsigned bytes behind a magic number and the sizes of the dimensions."""
    header = 4 * (1 + num_dimensions)
    words = np.frombuffer(content[:header], ">u4").tolist() if len(content) >= header else []
    if not words or words[0] != 0x800 + num_dimensions:
        raise AlteredFileError(path, f"it does not begin as an idx file of {num_dimensions} dimensions")
    shape = tuple(words[1:])
    size = header + int(np.prod([int(side) for side in shape], dtype=object))
    if len(content) != size:
        raise AlteredFileError(path, f"it holds {len(content):,} bytes unpacked, expected {size:,} for {shape}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def parse_part(
    read: Read, images: str, labels: str, first: int, num_classes: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, 28, 28) and labels from 0, where the file's begin with `first`."""
    content, path = read(images)
    x = parse_idx(content, path, 3)
    if x.shape[1:] != (28, 28) or not len(x):
        raise AlteredFileError(path, f"its images are {x.shape}, expected (n, 28, 28)")
    content, path = read(labels)
    y = parse_idx(content, path, 1).astype(np.int64) - first
    if len(y) != len(x):
        raise AlteredFileError(path, f"it has {len(y):,} labels for {len(x):,} images")
    if y.min() < 0 or y.max() >= num_classes:
        raise AlteredFileError(path, f"a label is none of {first} to {first + num_classes - 1}")
    return x, y


def read_packed(path: Path) -> tuple[bytes, Path]:
    """Read a file that is packed with gzip, or not."""
    try:
        return (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()), path
    except UNREADABLE as error:
        raise AlteredFileError(path, f"it cannot be unpacked ({error})") from error


# KMNIST

KMNIST_FILES = {
    "train-images-idx3-ubyte": "bdb82020997e1d708af4cf47b453dcf7",
    "train-labels-idx1-ubyte": "e144d726b3acfaa3e44228e80efcd344",
    "t10k-images-idx3-ubyte": "5c965bf0a639b31b8f53240b1b52f4d7",
    "t10k-labels-idx1-ubyte": "7320c461ea6c1c855c0b718fb2a4b134",
}  # md5 of the packed ones


def parse_kmnist(data_dir: Path, ending: str) -> Arrays:
    def read(name: str) -> tuple[bytes, Path]:
        return read_packed(data_dir / "KMNIST/raw" / (name + ending))

    train, train_labels, test, test_labels = KMNIST_FILES
    (train_x, train_y), (test_x, test_y) = (
        parse_part(read, images, labels, 0, 10) for images, labels in ((train, train_labels), (test, test_labels))
    )
    return Arrays(train_x[:, None], train_y, test_x[:, None], test_y)


KMNIST = PublishedFiles(
    tuple(File(f"KMNIST/raw/{name}.gz", None, "md5", md5) for name, md5 in KMNIST_FILES.items()),
    partial(parse_kmnist, ending=".gz"),
)
KMNIST_UNPACKED = CheckedFiles(tuple(f"KMNIST/raw/{name}" for name in KMNIST_FILES), partial(parse_kmnist, ending=""))

# EMNIST

EMNIST_ARCHIVE = File("EMNIST/raw/gzip.zip", None, "md5", "58c8d27c78d21e728a6bc7b3cc06412e")
KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def emnist_layouts(choice: Choice | None = None) -> tuple[PublishedFiles[Any], CheckedFiles[Any]]:
    """The one archive, or the files of a choice, packed or not; None: of any, to be checked and not to be read."""
    paths = [f"EMNIST/raw/emnist-{choice or '*'}-{part}-{kind}*" for part in ("train", "test") for kind in KINDS]
    archive, unpacked = (
        (partial(parse_emnist_archive, choice=choice), partial(parse_emnist_files, choice=choice))
        if choice
        else (_read_nothing, check_emnist_files)
    )
    return PublishedFiles((EMNIST_ARCHIVE,), archive), CheckedFiles(tuple(paths), unpacked)


def parse_emnist_archive(data_dir: Path, choice: Choice) -> Arrays:
    path = data_dir / EMNIST_ARCHIVE.path

    def read(name: str) -> tuple[bytes, Path]:
        try:
            with zipfile.ZipFile(path) as archive:
                return gzip.decompress(archive.read(f"gzip/{name}.gz")), path
        except UNREADABLE as error:
            raise AlteredFileError(path, f"{name}.gz in it cannot be unpacked ({error})") from error

    return _parse_choice(read, choice)


def parse_emnist_files(data_dir: Path, choice: Choice) -> Arrays:
    def read(name: str) -> tuple[bytes, Path]:
        path = data_dir / "EMNIST/raw" / name
        return read_packed(path if path.is_file() else path.with_name(f"{name}.gz"))

    return _parse_choice(read, choice)


def check_emnist_files(data_dir: Path) -> None:
    for choice in get_args(Choice):
        if any((data_dir / "EMNIST/raw").glob(f"emnist-{choice}-*")):
            parse_emnist_files(data_dir, choice)


def _read_nothing(data_dir: Path) -> None:
    return


def _parse_choice(read: Read, choice: Choice) -> Arrays:
    """The images of the files lie on their side, mirrored: rows and columns are exchanged back."""
    arrays: list[Any] = []
    for part in ("train", "test"):
        images, labels = (f"emnist-{choice}-{part}-{kind}" for kind in KINDS)
        x, y = parse_part(read, images, labels, int(choice == "letters"), NUM_CLASSES[choice])
        arrays += [np.ascontiguousarray(x.transpose(0, 2, 1))[:, None], y]
    return Arrays(*arrays)
