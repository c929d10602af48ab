"""KMNIST, EMNIST and CIFAR-100: small files in the official formats go through the real code."""

import gzip
import hashlib
import pickle
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from bfl_bench.data.sources import SOURCES, characters, fetching, files, load_arrays, load_emnist
from bfl_bench.data.sources.characters import NUM_CLASSES
from bfl_bench.errors import DataError
from tests.composing import experiment
from tests.unit.test_sources import pin, write_idx

KMNIST = "KMNIST/raw"
EMNIST = "EMNIST/raw"


def write_kmnist(data_dir: Path, ending: str = ".gz") -> None:
    random = np.random.default_rng(0)
    for part, num in (("train", 30), ("t10k", 12)):
        for kind, array in (
            ("images-idx3", random.integers(0, 256, (num, 28, 28))),
            ("labels-idx1", np.arange(num) % 10),
        ):
            path = data_dir / KMNIST / f"{part}-{kind}-ubyte"
            write_idx(path, array)
            if ending:
                path.with_name(path.name + ending).write_bytes(gzip.compress(path.read_bytes(), mtime=0))
                path.unlink()


def write_emnist(data_dir: Path, choice: str, first: int = 0) -> dict[str, np.ndarray]:
    """The files of a choice as they are published: packed, images with rows and columns exchanged."""
    random = np.random.default_rng(1)
    written = {}
    for part, num in (("train", 2 * NUM_CLASSES[choice]), ("test", NUM_CLASSES[choice])):
        upright = random.integers(0, 256, (num, 28, 28))
        labels = np.arange(num) % NUM_CLASSES[choice]
        for kind, array in (("images-idx3", upright.transpose(0, 2, 1)), ("labels-idx1", labels + first)):
            path = data_dir / EMNIST / f"emnist-{choice}-{part}-{kind}-ubyte"
            write_idx(path, array)
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
            path.unlink()
        written |= {f"{part}_x": upright[:, None], f"{part}_y": labels}
    return written


def pack_emnist(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the files into the one archive, and take that for the published one."""
    path = data_dir / characters.EMNIST_ARCHIVE.path
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(path.parent.glob("*.gz")):
            archive.write(file, f"gzip/{file.name}")
            file.unlink()
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(characters, "EMNIST_ARCHIVE", replace(characters.EMNIST_ARCHIVE, digest=digest))
    monkeypatch.setitem(SOURCES, "emnist", replace(SOURCES["emnist"], layouts=characters.emnist_layouts()))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of tmp_path/original, as an official source has one."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

    monkeypatch.setenv("no_proxy", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "original"))) as http:
        thread = Thread(target=http.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


# KMNIST


def test_published_kmnist_is_known_by_its_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kmnist(tmp_path)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is truncated or altered: its md5 is"):
        load_arrays("kmnist", tmp_path)
    layout = pin(characters.KMNIST, tmp_path)
    monkeypatch.setitem(SOURCES, "kmnist", replace(SOURCES["kmnist"], layouts=(layout,)))
    arrays = load_arrays("kmnist", tmp_path)
    assert arrays.train_x.shape == (30, 1, 28, 28)
    assert arrays.train_x.dtype == np.uint8
    assert arrays.test_y.tolist() == [*range(10), 0, 1]
    content = gzip.decompress((tmp_path / KMNIST / "t10k-images-idx3-ubyte.gz").read_bytes())
    assert arrays.test_x.tobytes() == content[16:]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("cut", "bytes unpacked, expected"),
        ("magic", "does not begin as an idx file"),
        ("empty", "does not begin as an idx file"),
        ("label", "a label is none of 0 to 9"),
        ("missing label", "29 labels for 30 images"),
        ("shape", r"its images are \(30, 14, 56\)"),
        ("huge", "bytes unpacked, expected"),
    ],
)
def test_unpacked_kmnist_is_checked_for_what_it_must_contain(damage: str, problem: str, tmp_path: Path) -> None:
    write_kmnist(tmp_path, ending="")
    assert len(load_arrays("kmnist", tmp_path).train_y) == 30
    images, labels = (tmp_path / KMNIST / f"train-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
    content = images.read_bytes()
    if damage == "cut":
        images.write_bytes(content[:-1])
    elif damage == "magic":
        images.write_bytes(b"\x00\x00\x0d" + content[3:])
    elif damage == "empty":
        images.write_bytes(b"\x00")
    elif damage == "shape":
        images.write_bytes(content[:8] + np.array([14, 56], ">u4").tobytes() + content[16:])
    elif damage == "huge":
        images.write_bytes(content[:4] + np.array([2**32 - 1] * 3, ">u4").tobytes() + content[16:])
    elif damage == "label":
        write_idx(labels, np.full(30, 10))
    else:
        write_idx(labels, np.arange(29) % 10)
    with pytest.raises(DataError, match=f"is truncated or altered: .*{problem}"):
        load_arrays("kmnist", tmp_path)


def test_kmnist_from_its_official_source(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's class leaves the packed files, and those are put in place."""
    from torchvision import datasets

    write_kmnist(tmp_path / "original")
    layout = pin(characters.KMNIST, tmp_path / "original")
    resources = [(Path(file.path).name, file.digest) for file in layout.files]
    monkeypatch.setattr(datasets.KMNIST, "mirrors", [f"{server}/{KMNIST}/"])
    monkeypatch.setattr(datasets.KMNIST, "resources", resources)
    monkeypatch.setitem(SOURCES, "kmnist", replace(SOURCES["kmnist"], layouts=(layout, characters.KMNIST_UNPACKED)))
    assert len(load_arrays("kmnist", tmp_path / "data").test_y) == 12
    names = {path.name for path in (tmp_path / "data" / KMNIST).iterdir()}
    assert names == {Path(path).name for path in layout.paths}


# EMNIST


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("choice", ["balanced", "letters", "digits"])
def test_emnist_stands_upright_and_counts_classes_from_zero(
    choice: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_emnist(tmp_path, choice, first=1 if choice == "letters" else 0)
    if packed:
        pack_emnist(tmp_path, monkeypatch)
    arrays = load_emnist(choice, tmp_path)
    for name, array in arrays._asdict().items():
        assert np.array_equal(array, written[name]), name
        assert array.flags.c_contiguous
        assert array.dtype == (np.int64 if name.endswith("y") else np.uint8)
    SOURCES["emnist"].verify(tmp_path)
    assert SOURCES["emnist"].status(tmp_path) == ("present", tmp_path / EMNIST)


def test_an_altered_emnist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_emnist(tmp_path, "digits")
    labels = tmp_path / EMNIST / "emnist-digits-test-labels-idx1-ubyte.gz"
    content = labels.read_bytes()
    labels.write_bytes(content[:-6])
    for act in (lambda: load_emnist("digits", tmp_path), lambda: SOURCES["emnist"].verify(tmp_path)):
        with pytest.raises(DataError, match=r"emnist-digits-test-labels-idx1-ubyte\.gz is truncated or altered"):
            act()
    labels.write_bytes(content)
    pack_emnist(tmp_path, monkeypatch)
    path = tmp_path / EMNIST / "gzip.zip"
    path.write_bytes(path.read_bytes() + b"!")
    with pytest.raises(DataError, match=r"gzip\.zip is truncated or altered: its md5"):
        load_emnist("digits", tmp_path)


def test_emnist_letters_are_counted_from_one_in_the_files(tmp_path: Path) -> None:
    write_emnist(tmp_path, "letters", first=0)
    with pytest.raises(DataError, match="a label is none of 1 to 26"):
        load_emnist("letters", tmp_path)


def test_emnist_from_its_official_source_is_one_archive(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets

    write_emnist(tmp_path / "original", "mnist")
    pack_emnist(tmp_path / "original", monkeypatch)
    monkeypatch.setattr(datasets.EMNIST, "url", f"{server}/{EMNIST}/gzip.zip")
    monkeypatch.setattr(datasets.EMNIST, "md5", characters.EMNIST_ARCHIVE.digest)
    monkeypatch.setattr(fetching, "EMNIST_ARCHIVE", characters.EMNIST_ARCHIVE)
    assert len(load_emnist("mnist", tmp_path / "data").train_y) == 20
    assert [path.name for path in (tmp_path / "data" / EMNIST).iterdir()] == ["gzip.zip"]
    with pytest.raises(DataError, match=r"emnist-byclass-train-images-idx3-ubyte\.gz in it cannot be unpacked"):
        load_emnist("byclass", tmp_path / "data")


def test_a_choice_that_is_not_there_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_emnist(tmp_path, "digits")
    monkeypatch.setitem(SOURCES, "emnist", replace(SOURCES["emnist"], ways=()))
    with pytest.raises(DataError, match=r"put gzip\.zip into .* or emnist-letters-train-images-idx3-ubyte\*, "):
        load_emnist("letters", tmp_path)


# CIFAR-100


def write_cifar100(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """The three pickles, which both this package and torchvision take for the published ones."""
    from torchvision.datasets import CIFAR100

    random = np.random.default_rng(2)
    folder = data_dir / "cifar-100-python"
    folder.mkdir(parents=True)
    written = {}
    for part, num in (("train", 200), ("test", 100)):
        x, fine = random.integers(0, 256, (num, 3, 32, 32), np.uint8), np.arange(num) % 100
        content = {"data": x.reshape(num, 3072), "fine_labels": fine.tolist(), "coarse_labels": (fine // 5).tolist()}
        (folder / part).write_bytes(pickle.dumps(content, protocol=2))
        written |= {f"{part}_x": x, f"{part}_y": fine}
    names = {"fine_label_names": [f"kind {i}" for i in range(100)], "coarse_label_names": []}
    (folder / "meta").write_bytes(pickle.dumps(names, protocol=2))
    layout = pin(files.CIFAR100, data_dir)
    md5 = {Path(file.path).name: file.digest for file in layout.files}
    monkeypatch.setattr(CIFAR100, "train_list", [["train", md5["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", md5["test"]]])
    monkeypatch.setattr(CIFAR100, "meta", CIFAR100.meta | {"md5": md5["meta"]})
    layout = replace(layout, files=tuple(replace(file, size=None) for file in layout.files))
    monkeypatch.setitem(SOURCES, "cifar100", replace(SOURCES["cifar100"], layouts=(layout,)))
    return written


def test_cifar100_has_its_fine_labels_and_is_known_by_its_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_cifar100(tmp_path, monkeypatch)
    for name, array in load_arrays("cifar100", tmp_path)._asdict().items():
        assert np.array_equal(array, written[name])
        assert array.dtype == (np.int64 if name.endswith("y") else np.uint8)
    path = tmp_path / "cifar-100-python/train"
    path.write_bytes(path.read_bytes() + b"!")
    with pytest.raises(DataError, match="cifar-100-python/train is truncated or altered: its md5"):
        load_arrays("cifar100", tmp_path)
    path.write_bytes(b"")
    assert SOURCES["cifar100"].status(tmp_path) == ("altered", path)


# As datasets of a run


def test_the_number_of_classes_is_that_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar100(tmp_path, monkeypatch)
    write_emnist(tmp_path, "letters", first=1)
    write_kmnist(tmp_path, ending="")
    small = [f"data_dir={tmp_path}", "num_clients=2", "partition=iid", "method=fedavg"]
    for dataset, num_classes, last in (
        (["dataset=cifar100"], 100, 64),
        (["dataset=emnist", "dataset.split=letters"], 26, 84),
        (["dataset=kmnist"], 10, 84),
    ):
        task = experiment(*small, *dataset).worker.task
        assert task.num_classes == num_classes
        assert task.model.layout.entries[-2].shape == (num_classes, last)


@pytest.mark.parametrize("choice", NUM_CLASSES)
def test_stand_ins_have_the_classes_of_the_choice(choice: str) -> None:
    overrides = ["dataset=emnist", f"dataset.split={choice}", "data_dir=stand-in", "method=fedavg", "num_clients=2"]
    assert experiment(*overrides, "model=softmax").worker.task.num_classes == NUM_CLASSES[choice]
