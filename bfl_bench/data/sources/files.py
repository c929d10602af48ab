"""The files of each dataset: where they stand below the data folder, their checksums, how they are read."""

import hashlib
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from bfl_bench.errors import DataError

Content = TypeVar("Content")
ContentOut = TypeVar("ContentOut", covariant=True)


class Arrays(NamedTuple):
    """A whole dataset: images (n, channels, height, width) and labels (n,)."""

    train_x: NDArray[np.uint8]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int64]


class AlteredFileError(Exception):
    """A file is not the published one; whoever knows the dataset turns this into advice for the user."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} is truncated or altered: {problem}")


class Layout(Protocol[ContentOut]):
    """One way in which a dataset's files can stand below a data folder."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The files; one with a star stands for all that match, at least one."""

    @property
    def has_sums(self) -> bool:
        """Whether checksums of the files, or of the arrays in them, are known; else only what they must contain is."""

    def suspect(self, data_dir: Path) -> Path | None:
        """The first file that a quick look, without checksums, already shows to be cut or replaced."""

    def verify(self, data_dir: Path) -> None:
        """Raise `AlteredFileError` unless every file is the published one."""

    def read(self, data_dir: Path) -> ContentOut:
        """Verify, then parse."""


@dataclass(frozen=True)
class File:
    """A published file with its checksum, md5 or sha256."""

    path: str
    size: int | None  # None: only the checksum was published
    algorithm: str
    digest: str

    def verify(self, path: Path) -> None:
        if (size := path.stat().st_size) != self.size and self.size is not None:
            raise AlteredFileError(path, f"it has {size:,} bytes, expected {self.size:,}")
        with path.open("rb") as stream:
            # The flag keeps md5 usable on hardened systems; it is what the authors' files are known by.
            found = hashlib.file_digest(stream, lambda: hashlib.new(self.algorithm, usedforsecurity=False))
        if (digest := found.hexdigest()) != self.digest:
            raise AlteredFileError(path, f"its {self.algorithm} is {digest}, expected {self.digest}")


@dataclass(frozen=True)
class PublishedFiles(Generic[Content]):
    """The files as their authors published them; `parse` gets the data folder."""

    files: tuple[File, ...]
    parse: Callable[[Path], Content]
    has_sums: bool = True

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(file.path for file in self.files)

    def suspect(self, data_dir: Path) -> Path | None:
        sizes = {file: (data_dir / file.path).stat().st_size for file in self.files}
        wrong = (data_dir / file.path for file, size in sizes.items() if size != (file.size or size) or size == 0)
        return next(wrong, None)

    def verify(self, data_dir: Path) -> None:
        for file in self.files:
            file.verify(data_dir / file.path)

    def read(self, data_dir: Path) -> Content:
        self.verify(data_dir)
        return self.parse(data_dir)


UNREADABLE = (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class CifarArchive:
    """CIFAR-10 as one .npz; it may be compressed or not, so the checksums are those of the arrays in it."""

    paths: tuple[str, ...] = ("cifar10.npz",)
    has_sums: bool = True

    def suspect(self, data_dir: Path) -> Path | None:
        path = data_dir / self.paths[0]  # a zip keeps its directory at the end, so a cut one is no zip
        return None if zipfile.is_zipfile(path) else path

    def verify(self, data_dir: Path) -> None:
        self.read(data_dir)

    def read(self, data_dir: Path) -> Arrays:
        path = data_dir / self.paths[0]
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                train_x, train_y, test_x, test_y = (archive[name] for name in Arrays._fields)
            # The labels handed on are the bytes that are hashed, whatever number type the archive holds.
            train_y, test_y = train_y.astype(np.uint8), test_y.astype(np.uint8)
        except UNREADABLE as error:
            raise AlteredFileError(path, f"it cannot be read as CIFAR-10 arrays ({error})") from error
        rows = CIFAR_BATCH_SIZE
        expected = {"train_x": (5 * rows, 3, 32, 32), "train_y": (5 * rows,)}
        expected |= {"test_x": (rows, 3, 32, 32), "test_y": (rows,)}
        for name, array in zip(Arrays._fields, (train_x, train_y, test_x, test_y), strict=True):
            if array.shape != expected[name] or array.dtype != np.uint8:
                found = f"{array.dtype} {array.shape}"
                raise AlteredFileError(path, f"{name} is {found}, expected uint8 {expected[name]}")
        batches = [(train_x[i : i + rows], train_y[i : i + rows]) for i in range(0, 5 * rows, rows)]
        for (batch, sums), arrays in zip(CIFAR_SHA256.items(), [*batches, (test_x, test_y)], strict=True):
            for what, array, expected_sum in zip(("images", "labels"), arrays, sums, strict=True):
                digest = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
                if digest != expected_sum:
                    problem = f"the sha256 of the {what} of {batch} is {digest}, expected {expected_sum}"
                    raise AlteredFileError(path, problem)
        return Arrays(train_x, train_y.astype(np.int64), test_x, test_y.astype(np.int64))


def import_torchvision_datasets() -> Any:
    """`torchvision.datasets`; beside a torch it was not built for, its import fails in one of many ways."""
    try:
        from torchvision import datasets
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise DataError(
            f"torchvision cannot be imported ({error}), most likely because it does not match the installed "
            "torch: install a matching pair with `pip install --upgrade torch torchvision`"
        ) from error
    return datasets


def parse_mnist(folder: Path) -> Arrays:
    """Four idx files; torchvision's own class would prefer an unchecked cache if one lay beside `folder`."""
    reader = import_torchvision_datasets().mnist
    arrays = []
    for part in ("train", "t10k"):
        images = reader.read_image_file(str(folder / f"{part}-images-idx3-ubyte"))
        labels = reader.read_label_file(str(folder / f"{part}-labels-idx1-ubyte"))
        arrays += [images.numpy()[:, None], labels.numpy()]
    return Arrays(*arrays)


def parse_cifar10(data_dir: Path) -> Arrays:
    return parse_cifar("CIFAR10", data_dir)


def parse_cifar100(data_dir: Path) -> Arrays:
    """The labels are the 100 fine ones."""
    return parse_cifar("CIFAR100", data_dir)


def parse_cifar(kind: str, data_dir: Path) -> Arrays:
    """Python pickles, which torchvision opens after it has compared their checksums too."""
    reader = getattr(import_torchvision_datasets(), kind)
    arrays = []
    for train in (True, False):
        with warnings.catch_warnings():  # NumPy 2.4.0 to 2.4.4 warn of pickles as old as these
            warnings.simplefilter("ignore")
            part = reader(data_dir, train=train)
        arrays += [np.ascontiguousarray(part.data.transpose(0, 3, 1, 2)), np.array(part.targets, np.int64)]
    return Arrays(*arrays)


def parse_svhn(data_dir: Path) -> Arrays:
    datasets = import_torchvision_datasets()
    arrays = []
    for split in ("train", "test"):
        part = datasets.SVHN(data_dir / "svhn", split=split)
        arrays += [np.ascontiguousarray(part.data), part.labels]
    return Arrays(*arrays)


def describe_idx_files(folder: str, sha256: dict[str, str]) -> PublishedFiles[Arrays]:
    sizes = dict(zip(sha256, (47_040_016, 60_008, 7_840_016, 10_008), strict=True))
    files = tuple(File(f"{folder}/{name}", sizes[name], "sha256", sha256[name]) for name in sha256)
    return PublishedFiles(files, lambda data_dir: parse_mnist(data_dir / folder))


MNIST = describe_idx_files(
    "MNIST/raw",
    {
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
)
FASHION_MNIST = describe_idx_files(
    "FashionMNIST/raw",
    {
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
)
CIFAR_BATCHES = PublishedFiles(
    tuple(
        File(f"cifar-10-batches-py/{name}", size, "md5", md5)
        for name, size, md5 in (
            ("data_batch_1", 31_035_704, "c99cafc152244af753f735de768cd75f"),
            ("data_batch_2", 31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
            ("data_batch_3", 31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
            ("data_batch_4", 31_035_696, "634d18415352ddfa80567beed471001a"),
            ("data_batch_5", 31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
            ("test_batch", 31_035_526, "40351d587109b95175f43aff81a1287e"),
            ("batches.meta", 158, "5ff9c542aee3614f3951f8cda6e48888"),
        )
    ),
    parse_cifar10,
)
CIFAR100 = PublishedFiles(
    tuple(
        File(f"cifar-100-python/{name}", None, "md5", md5)
        for name, md5 in (
            ("train", "16019d7e3df5f24257cddd939b257f8d"),
            ("test", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
            ("meta", "7973b15100ade9c7d40fb424638fde48"),
        )
    ),
    parse_cifar100,
)
CIFAR_ARCHIVE = CifarArchive()
CIFAR_BATCH_SIZE = 10_000
CIFAR_SHA256 = {  # by batch: of the images (rows of 3072 bytes, channel first), of the labels (one byte each)
    "data_batch_1": (
        "a50e8b48728e1667d682a807155c375279d5ae321fb12242c02e3104a6bc8b21",
        "d829dbdf32167c9d7b3687cee66d92d80d46c441308b5aca0d11e8b69e27dac9",
    ),
    "data_batch_2": (
        "0b825e5592c3b72ea18d6ec2ff5f5b19d33e41a75f5039054a9bb87be3cf69a0",
        "5d18f7371ed35ea9ade77952fe958b0660a45cd6c8b8a8970030f21612cfd7e3",
    ),
    "data_batch_3": (
        "c6ee1dd4601a69ec085d8ebf53ee6441775491a6839a0a9ae8fa198e88a3a429",
        "32cf77b0ee2e790b1c4384d2d82e42dc1571b87e67f6da8f444b2725b2973f65",
    ),
    "data_batch_4": (
        "1f6b6c799cff375a9f8fae2fac909d51ee09f38a6a60eebb9e8fec6f47ddc48f",
        "d2815e3f8f656272864920fc0edde56b04ec9cf81bf397c0dd3069f4aea51aeb",
    ),
    "data_batch_5": (
        "58e3bbf713e28357476a351d3a05d056372f94c681d04ca9d62a076fdf2a643b",
        "2ddf3ab27d5d04409c94ce7b56849c243129c10de1058ae0bfe14c77e934800c",
    ),
    "test_batch": (
        "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
        "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
}
SVHN = PublishedFiles(
    (
        File("svhn/train_32x32.mat", 182_040_794, "md5", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        File("svhn/test_32x32.mat", 64_275_384, "md5", "eb5a983be6a315427106f1b164d9cef3"),
    ),
    parse_svhn,
)
