"""The files of the natural federations, where it is known whose example each one is.

Published files are known by their checksums. What everyone makes with LEAF's scripts, or unpacks from UCI's archives,
has none here: such files are checked for what they must contain.
"""

import gzip
import hashlib
import json
import logging
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bfl_bench.data.sources.files import UNREADABLE, AlteredFileError, Content, File, PublishedFiles

log = logging.getLogger(__name__)


class Examples(NamedTuple):
    """Examples and the name of each one's client."""

    x: NDArray[Any]
    y: NDArray[np.int64]
    owner: NDArray[np.str_]


class Parts(NamedTuple):
    """Examples that come with their own split."""

    train: Examples
    test: Examples


class Activities(NamedTuple):
    """Windows of motion, as 561 features each."""

    examples: Examples
    num_classes: int


class Signals(NamedTuple):
    """Motion at 50 Hz, one recording after the other."""

    channels: NDArray[np.float64]  # (6, n): acceleration and angular velocity along x, y, z
    label: NDArray[np.int8]  # (n,): the activity, 1 to 12, or -1
    user: NDArray[np.uint8]  # (n,): the subject, 1 to 30
    experiment: NDArray[np.uint8]  # (n,): the recording


class Writers(NamedTuple):
    """Who wrote each image of MNIST."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]


@dataclass(frozen=True)
class CheckedFiles(Generic[Content]):
    """Files that have no published checksum; `parse` raises `AlteredFileError` where their content cannot be right."""

    paths: tuple[str, ...]
    parse: Callable[[Path], Content]
    has_sums: bool = False

    def suspect(self, data_dir: Path) -> Path | None:
        found = (file for path in self.paths for file in sorted(data_dir.glob(path)))
        return next((file for file in found if file.stat().st_size == 0), None)

    def verify(self, data_dir: Path) -> None:
        self.parse(data_dir)

    def read(self, data_dir: Path) -> Content:
        return self.parse(data_dir)


# MNIST by writer


def parse_writers(data_dir: Path) -> Writers:
    """Rows of eight numbers, the third of which is the writer; those of the test file go on beyond MNIST's images."""
    train, test = (read_idx2(data_dir / path)[:, 2].astype(np.int64) for path in QMNIST_LABELS.paths)
    return Writers(train, test[:10_000])


def read_idx2(path: Path) -> NDArray[Any]:
    content = gzip.decompress(path.read_bytes())
    rows, columns = np.frombuffer(content, ">u4", 2, 4).tolist()
    return np.frombuffer(content, ">i4", offset=12).reshape(rows, columns)


QMNIST_LABELS = PublishedFiles(
    (
        File(
            "QMNIST/raw/qmnist-train-labels-idx2-int.gz",
            463_024,
            "sha256",
            "2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f",
        ),
        File(
            "QMNIST/raw/qmnist-test-labels-idx2-int.gz",
            526_800,
            "sha256",
            "9fbcbe594c3766fdf4f0b15c5165dc0d1e57ac604e01422608bb72c906030d06",
        ),
    ),
    parse_writers,
)


# What LEAF's scripts write


def read_leaf(
    folder: Path, width: int, labels: Sequence[int], convert: Callable[[NDArray[np.float64]], NDArray[Any]]
) -> Examples:
    """The users of all JSON files of a folder; `convert` may raise a `ValueError` about one user's inputs."""
    inputs, targets, owners = [], [], dict[str, int]()
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
            for position, user in enumerate(content["users"]):
                x, y = (np.array(content["user_data"][user][key], np.float64) for key in ("x", "y"))
                if user in owners:
                    raise ValueError(f"user {user} is there twice")
                if (counts := content.get("num_samples")) is not None and counts[position] != len(y):
                    raise ValueError(f"user {user} has {len(y)} labels, not {counts[position]}")
                if len(y) > 0 and x.shape != (len(y), width):
                    raise ValueError(f"the inputs of user {user} are {x.shape}, expected {(len(y), width)}")
                if not np.isin(y, labels).all():
                    raise ValueError(f"user {user} has a label that is none of {labels[0]} to {labels[-1]}")
                inputs.append(convert(x.reshape(len(y), width)))
                targets.append(y.astype(np.int64))
                owners[user] = len(y)
        except UNREADABLE as error:
            problem = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise AlteredFileError(path, problem) from error
    if sum(owners.values()) == 0:
        raise AlteredFileError(folder, "there is no example in it")
    names = np.repeat(np.array(list(owners)), list(owners.values()))
    return Examples(np.concatenate(inputs), np.concatenate(targets), names)


# FEMNIST


def parse_leaf_femnist(data_dir: Path) -> Parts:
    train, test = (read_leaf(data_dir / "femnist" / part, 784, range(62), to_pixels) for part in ("train", "test"))
    if strangers := set(test.owner.tolist()) - set(train.owner.tolist()):
        problem = f"user {min(strangers)} has test images only; LEAF splits each writer's images with `-t sample`"
        raise AlteredFileError(data_dir / "femnist/test", problem)
    return Parts(train, test)


def to_pixels(x: NDArray[np.float64]) -> NDArray[np.uint8]:
    """LEAF writes k / 255."""
    pixels = np.rint(255 * x)
    if not ((np.abs(255 * x - pixels) < 0.01) & (pixels >= 0) & (pixels <= 255)).all():
        raise ValueError("a pixel is no multiple of 1/255 from 0 to 1")
    return pixels.astype(np.uint8).reshape(-1, 28, 28)


def parse_femnist_subset(data_dir: Path) -> Parts:
    with np.load(data_dir / FEMNIST_SUBSET.paths[0], allow_pickle=False) as archive:
        parts = [
            Examples(archive[f"{part}_x"], archive[f"{part}_y"].astype(np.int64), archive[f"{part}_writer"])
            for part in ("train", "test")
        ]
    count = len(set(parts[0].owner.tolist()))
    log.info("femnist: %s holds a part of FEMNIST, %d writers", FEMNIST_SUBSET.paths[0], count)
    return Parts(*parts)


FEMNIST_LEAF = CheckedFiles(("femnist/train/*.json", "femnist/test/*.json"), parse_leaf_femnist)
FEMNIST_SUBSET = PublishedFiles(
    (
        File(
            "femnist/femnist_leaf_subset.npz",
            1_867_897,
            "sha256",
            "c51cfb01634a8afccfb433b744a8df817f47f96161e270f1a397adbb393b1d38",
        ),
    ),
    parse_femnist_subset,
)


# Vehicle sensors


def parse_leaf_vsn(data_dir: Path) -> Examples:
    """Both folders in one, if there are two: the dataset draws a split of its own."""
    folders = [data_dir / "vehicle_sensor" / part for part in ("train", "test")]
    parts = [read_leaf(folder, 100, (-1, 0, 1), keep_finite) for folder in folders if any(folder.glob("*.json"))]
    x, y, owner = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Examples(x, (y > 0).astype(np.int64), owner)


def keep_finite(x: NDArray[np.float64]) -> NDArray[np.float64]:
    if not np.isfinite(x).all():
        raise ValueError("a number is not finite")
    return x


def parse_vsn_subset(data_dir: Path) -> Examples:
    with np.load(data_dir / VSN_SUBSET.paths[0], allow_pickle=False) as archive:
        x, y, owner = archive["x"], (archive["y"] > 0).astype(np.int64), name_numbers("sensor", archive["sensor"])
    log.info("vsn: %s holds a part of the data, %d rows", VSN_SUBSET.paths[0], len(y))
    return Examples(x, y, owner)


def name_numbers(kind: str, numbers: NDArray[Any]) -> NDArray[np.str_]:
    """Names that sort as their numbers do."""
    width = len(str(numbers.max()))
    return np.array([f"{kind} {number:0{width}d}" for number in numbers.tolist()])


VSN_LEAF = CheckedFiles(("vehicle_sensor/train/*.json",), parse_leaf_vsn)
VSN_SUBSET = PublishedFiles(
    (
        File(
            "vehicle_sensor/vehicle_sensor_subset.npz",
            1_413_428,
            "sha256",
            "357fc1efdc0baf9bc056cb281033370a7ad358cb456143b2dd87104bc1b42401",
        ),
    ),
    parse_vsn_subset,
)


# Activities


def parse_features(data_dir: Path) -> Activities:
    with np.load(data_dir / HAPT_FEATURES.paths[0], allow_pickle=False) as archive:
        x, y = archive["x"].astype(np.float32), archive["y"].astype(np.int64) - 1
        return Activities(Examples(x, y, name_numbers("subject", archive["subject"])), 12)


def describe_uci_files(folder: str, train: str, test: str, subjects: str, num_classes: int) -> CheckedFiles[Activities]:
    """UCI's text files: both parts together, as the dataset draws a split of its own."""
    paths = tuple(
        f"{folder}/{part}/{name}_{part.lower()}.txt" for part in (train, test) for name in ("X", "y", subjects)
    )

    def parse(data_dir: Path) -> Activities:
        parts = []
        for inputs, labels, people in (paths[:3], paths[3:]):
            x = read_table(data_dir / inputs, 561, -1 - 1e-6, 1 + 1e-6)
            y = read_table(data_dir / labels, 1, 1, num_classes)[:, 0].astype(np.int64)
            subject = read_table(data_dir / people, 1, 1, 30)[:, 0].astype(np.int64)
            for path, rows in ((labels, len(y)), (people, len(subject))):
                if rows != len(x):
                    raise AlteredFileError(data_dir / path, f"it has {rows} rows, but {inputs} has {len(x)}")
            parts.append((x.astype(np.float32), y - 1, subject))
        x, y, subject = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Activities(Examples(x, y, name_numbers("subject", subject)), num_classes)

    return CheckedFiles(paths, parse)


def read_table(path: Path, columns: int, low: float, high: float) -> NDArray[np.float64]:
    if path.stat().st_size == 0:
        raise AlteredFileError(path, "it is empty")
    try:
        table = np.loadtxt(path, np.float64, ndmin=2)
    except UNREADABLE as error:
        raise AlteredFileError(path, f"it is no table of numbers ({error})") from error
    if table.shape[1] != columns:
        raise AlteredFileError(path, f"it has {table.shape[1]} columns, expected {columns}")
    if not ((table >= low) & (table <= high)).all():
        raise AlteredFileError(path, f"a number is not from {low:.0f} to {high:.0f}")
    return table


@dataclass(frozen=True)
class SignalArchive:
    """The raw signals as one .npz: per channel its levels and their numbers. The checksum is that of the arrays."""

    digest: str
    paths: tuple[str, ...] = ("hapt/hapt_raw.npz",)
    has_sums: bool = True

    def suspect(self, data_dir: Path) -> Path | None:
        path = data_dir / self.paths[0]  # a zip keeps its directory at the end, so a cut one is no zip
        return None if zipfile.is_zipfile(path) else path

    def verify(self, data_dir: Path) -> None:
        self.read(data_dir)

    def read(self, data_dir: Path) -> Signals:
        path = data_dir / self.paths[0]
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                arrays = {name: archive[name].astype(kind) for name, kind in SIGNAL_ARRAYS.items()}
        except UNREADABLE as error:
            raise AlteredFileError(path, f"it cannot be read as signals ({error})") from error
        if (digest := hash_signals(arrays)) != self.digest:
            raise AlteredFileError(path, f"the sha256 of its arrays is {digest}, expected {self.digest}")
        channels = np.stack([arrays[f"levels_{name}"][arrays[f"code_{name}"]] for name in CHANNELS])
        return Signals(channels, arrays["label"], arrays["user"], arrays["experiment"])


def hash_signals(arrays: dict[str, NDArray[Any]]) -> str:
    found = hashlib.sha256()
    for name in SIGNAL_ARRAYS:
        found.update(np.ascontiguousarray(arrays[name]).data)
    return found.hexdigest()


CHANNELS = ("acc_x", "acc_y", "acc_z", "gyro_x", "gyro_y", "gyro_z")
SIGNAL_ARRAYS = {
    "user": "u1",
    "experiment": "u1",
    "label": "i1",
    **{f"levels_{name}": "<f8" for name in CHANNELS},
    **{f"code_{name}": "<u2" for name in CHANNELS},
}
HAPT_RAW = SignalArchive("866d3a1f28abc96f36fb0dc16f62cbdf0861890d9f77d71ffd69e172988f0dac")
HAPT_TEXT = describe_uci_files("hapt", "Train", "Test", "subject_id", 12)
HAPT_FEATURES = PublishedFiles(
    (
        File(
            "hapt/hapt_features561.npz",
            9_286_157,
            "sha256",
            "83c2cc472da9be08a0dc3adc12f56a266609009c032bc30d34808382204c40e8",
        ),
    ),
    parse_features,
)
HAR_TEXT = describe_uci_files("UCI HAR Dataset", "train", "test", "subject", 6)


# Plays


def parse_plays(data_dir: Path) -> dict[str, str]:
    names = {path: Path(path).stem.removesuffix("_gut") for path in PLAYS.paths}
    return {name: (data_dir / path).read_text("utf-8") for path, name in names.items()}


def parse_tiny_shakespeare(data_dir: Path) -> dict[str, str]:
    return {"tinyshakespeare": (data_dir / TINY_SHAKESPEARE.paths[0]).read_text("utf-8")}


PLAY_SUMS = {  # as in the Python package `shakespeare`, whose Cymbeline lacks acts III and IV
    "alls_well_that_ends_well": (133_682, "59fdc8e61c63b960bf9030c0a126204d4c0c8c07e2ae62c9a7343ba51a39f6d4"),
    "antony_and_cleopatra": (151_470, "4ee34c39371d05df790b880f2835521919dff45f7eec183855ff7dae1bac95e9"),
    "as_you_like_it": (125_228, "5954146ea5d9231477fed18ee11e0f22267e4d4d4213a39d56e343047e6d8bdf"),
    "comedy_of_errors": (88_209, "1e5f9faa9879d172aaaaf8828def61ad2a0c0ad1ecee149f634d65c3f67809e4"),
    "coriolanus": (164_969, "c4f748c8d386f98db9d39e6cbac69913c940653a222eb847b608be64e4d66aeb"),
    "cymbeline": (98_303, "7a8a994373868eb84d60c7e4c30a7865ed7fe90c74534cc37c173a3b80f98b21"),
    "hamlet": (173_942, "bbe5635616c6e0e0bcf01b7b8c324be8b42451c51848f11c283bd2f4442b1e0a"),
    "henry_iv_part_1": (138_391, "f40b5de9ca126d9ff1c388d0648a2f19c3e7ad3ac80a9662579954bb2e7589f9"),
    "henry_iv_part_2": (153_117, "2898cb3be5e2691cc0310cc94fe70153e3245c88ec307b1b6d43315ec1ab28b2"),
    "henry_v": (152_768, "336564231a0d5aa8dfb4b27964670fbbe27886a2d429f96facfa35c41dda09b9"),
    "henry_vi_part_1": (129_800, "3598ca5644950f443225b86f4774772d12f12e6b95e33cac4f54d131004c2e19"),
    "henry_vi_part_2": (148_292, "c0d4023b61f2aa672fec92fd107a4a2ca3d79008749e3357efecc6a05ddf6603"),
    "henry_vi_part_3": (144_686, "82738995a59a5f18570f16b45503c3ade9ed7098ad3daa01bc963abf409491ff"),
    "henry_viii": (143_482, "33cea8e4fd0a150ced19d1f08fee6df86bd692c1a41b4cdcfc387c47f1470ada"),
    "john": (121_087, "635af28743587546b71008084f15714c9f4fa0a894766427c9b21c052306bf56"),
    "julius_caesar": (116_216, "ee8ca8e9edb603625af98acb395fdd8c1a1697b064444a989dc21817b73ca7b5"),
    "lear": (151_922, "7ac00e23da6e4874b715b3c3c0c1cdc442bc790eb6ac3f39c0610052e5e636fa"),
    "loves_labours_lost": (128_644, "8858afe4d5b0d80936edc0346957f89aca9929de76c2763e76c10a9adb53b2a2"),
    "macbeth": (103_427, "54e1d8055ffa2aec7e831ec43044dd646cacdfce5bf333fa81e6af9c0363c3b7"),
    "measure_for_measure": (126_095, "373e7bad7682ef155ac631da7a4422b0b73c5e9ca84321ab37dac7cce9ba64d9"),
    "merchant_of_venice": (120_445, "97642a677f13b095c481d712734876908db828624e01024a42f8b5ad93c6c599"),
    "merry_wives_of_windsor": (128_164, "b435e5342e22a3681544b5e3bd65fce730edbb28495681a33a7567ddf9f6e5da"),
    "midsummer_nights_dream": (96_249, "fe198104bcbcfa38bbf24c21073844dcbc5be6b8b7cd1bb76a68099f12667152"),
    "much_ado_about_nothing": (122_354, "d47957039342adc96b4b4a3d3871a980de1193127c768b978d368f3d17625c50"),
    "othello": (154_519, "12c32a0e148c3a2f4d9bb5710198f18cd04a5f8197f8cbeb25ca482174382d3d"),
    "pericles": (108_950, "113765d4bd41dfbd7faba192b4a5a20d53fed0da8544b59e4e6a30c6c45eac30"),
    "richard_ii": (130_293, "8ac6a1bac1b42517b70384a1645af44f2db9052d6b9eb508f1135bf8a29513df"),
    "richard_iii": (175_659, "98140214b31451a5b9e4af8bdae9ec1c24cb0966aeabbcaed21d11c8364fe9d9"),
    "romeo_and_juliet": (141_753, "6a5e0c9ee103a9bd95d8b045f5c53f66779b45b198788db458075f828a0425f4"),
    "taming_of_the_shrew": (123_283, "63952a385bfe626dfc4d1af732582b4c734e4134eaa8470cc85b57984e7e7d36"),
    "tempest": (98_439, "76b1bfcff40ead1585c280a7f14147c2761c7b9e6d6fb8598e7aae6e99509e26"),
    "timon_of_athens": (111_091, "e06be61630cfc3b60aa817034c7eabe0f941c28bf46ad18ad8e0332ff6232d07"),
    "tragedy_of_titus_andronicus": (120_441, "6ebff81eb9567ddcd9184e7bf7f35f4e5bdb75a8b7a02db4fe24bf118f562e84"),
    "troilus_and_cressida": (156_291, "d8900eea5aa6df25f79151994fba50753ad88cec14d825bb0fb1ee88ac7c6772"),
    "twelfth_night": (114_876, "bb5b25bd3fe7a34776cab3f6205b410fa442059657aba082334edc80eea958ef"),
    "two_gentlemen_of_verona": (100_983, "26d11defe685c4c34333ee7772c34a0594a8497307f9e8cfb01dac0811505428"),
    "winters_tale": (152_788, "06b39203a7b376902a73d8539eb9f0de4f4246cee0a9bfc6a30a9256d9250393"),
}
PLAYS = PublishedFiles(
    tuple(
        File(f"shakespeare/plays/{name}_gut.txt", size, "sha256", digest) for name, (size, digest) in PLAY_SUMS.items()
    ),
    parse_plays,
)
TINY_SHAKESPEARE = PublishedFiles(
    (
        File(
            "shakespeare/tinyshakespeare.txt",
            1_115_394,
            "sha256",
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ),
    ),
    parse_tiny_shakespeare,
)
