"""Partitions: the splits of the papers to the last sample, and what holds for every split."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from bfl_bench.checks import check_arguments
from bfl_bench.data import partition as partition_module
from bfl_bench.data.partition import Classes, Dirichlet, Disjoint, File, Iid, Partition, PartitionConfig
from bfl_bench.errors import ConfigError

CONF_DIR = Path(__file__).parents[2] / "conf" / "partition"
MNIST_CLASS_SIZES = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_LABELS = np.repeat(np.arange(10), MNIST_CLASS_SIZES)
FASHION_MNIST_LABELS = np.repeat(np.arange(10), 6000)
SMALL_LABELS = np.arange(600) * 7 % 9


def make_dirichlet(**changes: Any) -> Dirichlet:
    """As NIID-Bench has it, unless changed."""
    values: dict[str, Any] = {
        "name": "dirichlet",
        "alpha": 0.05,
        "mode": "per_class",
        "min_size": 10,
        "balance": True,
        "rng": "numpy_legacy",
        "max_tries": 5000,
    }
    return Dirichlet(**values | changes)


def histograms(partition: Partition, labels: np.ndarray, num_classes: int = 10) -> list[dict[int, int]]:
    counts = partition.label_counts(labels, num_classes)
    return [{k: int(count) for k, count in enumerate(row) if count} for row in counts]


# The papers' splits


def test_dirichlet_legacy_gives_every_client_of_fedlpa_appendix_g2() -> None:
    partition = make_dirichlet().split(MNIST_LABELS, 10, 10, seed=0)
    assert histograms(partition, MNIST_LABELS) == [
        {4: 2, 5: 12, 6: 2847, 9: 16},
        {1: 20, 4: 189, 5: 5349},
        {0: 669, 1: 476, 2: 67, 6: 15, 7: 6068},
        {0: 266, 1: 375, 3: 3956, 7: 196, 9: 5932},
        {0: 4, 1: 418, 2: 5862},
        {1: 2, 2: 25, 4: 5195, 5: 24, 6: 80, 8: 28},
        {1: 5034, 2: 3, 4: 22, 5: 6, 6: 2669},
        {0: 4914},
        {4: 433, 5: 29, 6: 307, 8: 5373},
        {0: 70, 1: 417, 2: 1, 3: 2175, 4: 1, 5: 1, 7: 1, 8: 450, 9: 1},
    ]
    assert (partition.info["path"], partition.info["tries"], partition.info["moved"]) == ("sampled", 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "tries"), [(FASHION_MNIST_LABELS, 2756), (MNIST_LABELS, 5005)], ids=["fashion_mnist", "mnist"]
)
def test_dirichlet_legacy_tries_of_niid_bench_at_beta_001(labels: np.ndarray, tries: int) -> None:
    partition = make_dirichlet(alpha=0.01, max_tries=6000).split(labels, 10, 20, seed=0)
    assert (partition.info["path"], partition.info["tries"]) == ("sampled", tries)


@pytest.mark.parametrize(
    ("config", "digest"),
    [
        (make_dirichlet(), "eafde94cfb0083fe71dd18cf7449d5980ad71ae0ff14ed81c1ce579ce2e187da"),
        (
            Classes("classes", classes_per_client=3, rng="numpy_legacy"),
            "7378281f650004c2c5d309f821d0a5183d60d34f34742da18084f5c0a85c3bb0",
        ),
        (Iid("iid", rng="numpy_legacy"), "aeb453e6cc35dfa7f6cd42ef8e4bbdd14205a736253b70e910d20d54389e157c"),
    ],
    ids=["dirichlet", "classes", "iid"],
)
def test_legacy_indices_are_those_of_niid_bench(config: PartitionConfig, digest: str) -> None:
    """The digests were made once by running NIID-Bench's own lines on these labels."""
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert config.split(SMALL_LABELS, 9, 12, seed=3).digest() == digest
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # noqa: NPY002


def test_classes_legacy_one_class_per_client_is_in_order() -> None:
    partition = Classes("classes", 1, "numpy_legacy").split(MNIST_LABELS, 10, 10, seed=5)
    assert histograms(partition, MNIST_LABELS) == [{k: size} for k, size in enumerate(MNIST_CLASS_SIZES)]


# What holds for every split

CONFIGS = st.one_of(
    st.builds(
        Dirichlet,
        name=st.just("dirichlet"),
        alpha=st.sampled_from([1e-5, 1e-3, 0.05, 1.0, 100.0]),
        mode=st.just("per_class"),
        min_size=st.integers(0, 3),
        balance=st.booleans(),
        rng=st.sampled_from(["default", "numpy_legacy"]),
        max_tries=st.integers(1, 5),
    ),
    st.builds(
        make_dirichlet,
        alpha=st.sampled_from([1e-5, 0.05, 1.0, 100.0]),
        mode=st.just("per_client"),
        rng=st.just("default"),
    ),
    st.builds(Classes, st.just("classes"), st.integers(1, 5), st.sampled_from(["default", "numpy_legacy"])),
    st.builds(Iid, st.just("iid"), st.sampled_from(["default", "numpy_legacy"])),
    st.builds(Disjoint, st.just("disjoint"), st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(
    config=CONFIGS,
    class_sizes=st.lists(st.integers(0, 30), min_size=5, max_size=8),
    num_clients=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_are_dealt_out_once(
    config: PartitionConfig, class_sizes: list[int], num_clients: int, seed: int
) -> None:
    num_classes = len(class_sizes)
    class_sizes[0] += 40  # enough for min_size 3 at 12 clients
    if isinstance(config, Disjoint):
        num_clients = min(num_clients, num_classes)
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(num_classes), class_sizes))

    partition = config.split(labels, num_classes, num_clients, seed)

    assert len(partition.indices) == num_clients
    assert all(client.dtype == np.int64 for client in partition.indices)
    used = np.concatenate(partition.indices)
    assert len(np.unique(used)) == len(used)
    assert set(used) <= set(range(len(labels)))
    counts = partition.label_counts(labels, num_classes)
    assert counts.shape == (num_clients, num_classes)
    assert tuple(counts.sum(axis=1)) == partition.sizes
    unused = np.array(class_sizes) - counts.sum(axis=0)
    assert partition.info["unused_samples"] == unused.sum()
    assert partition.info["empty_clients"] == partition.sizes.count(0)
    assert config.split(labels, num_classes, num_clients, seed).digest() == partition.digest()

    if isinstance(config, Dirichlet) and config.mode == "per_client":
        assert set(partition.sizes) == {len(labels) // num_clients}
    elif isinstance(config, Classes):  # a class is used up or has no owner, and no client has too many
        assert ((unused == 0) | (counts.sum(axis=0) == 0)).all()
        assert ((counts > 0).sum(axis=1) <= config.classes_per_client).all()
    else:
        assert unused.sum() == 0
    if isinstance(config, Dirichlet) and config.mode == "per_class":
        assert min(partition.sizes) >= config.min_size
        assert 1 <= int(partition.info["tries"]) <= config.max_tries
    if isinstance(config, Disjoint):
        assert ((counts > 0).sum(axis=0) <= 1).all()
    if isinstance(config, Iid):
        assert max(partition.sizes) - min(partition.sizes) <= 1


@pytest.mark.parametrize(
    "config",
    [
        make_dirichlet(),
        make_dirichlet(rng="default"),
        make_dirichlet(rng="default", mode="per_client"),
        Classes("classes", 2, "default"),
        Classes("classes", 2, "numpy_legacy"),
        Iid("iid", "default"),
        Iid("iid", "numpy_legacy"),
        Disjoint("disjoint", shuffle_classes=True),
    ],
)
def test_another_seed_is_another_partition(config: PartitionConfig) -> None:
    digests = {config.split(SMALL_LABELS, 9, 6, seed).digest() for seed in range(5)}
    assert len(digests) == 5


# Dirichlet


def test_repair_starts_from_the_try_that_needs_least() -> None:
    first = make_dirichlet(alpha=0.01, rng="default", max_tries=1).split(MNIST_LABELS, 10, 100, seed=0)
    best = make_dirichlet(alpha=0.01, rng="default", max_tries=300).split(MNIST_LABELS, 10, 100, seed=0)
    for partition, tries in ((first, 1), (best, 300)):
        assert (partition.info["path"], partition.info["tries"]) == ("repaired", tries)
        assert min(partition.sizes) == 10
    assert 0 < int(best.info["moved"]) < int(first.info["moved"])


def test_repair_moves_no_more_than_needed() -> None:
    """The same draw without a minimum shows what was missing."""
    changes: dict[str, Any] = {"alpha": 0.01, "rng": "default", "max_tries": 1}
    drawn = make_dirichlet(**changes, min_size=0).split(MNIST_LABELS, 10, 100, seed=0)
    repaired = make_dirichlet(**changes).split(MNIST_LABELS, 10, 100, seed=0)
    missing = sum(max(10 - size, 0) for size in drawn.sizes)
    assert repaired.info["moved"] == missing
    moved = repaired.label_counts(MNIST_LABELS, 10) - drawn.label_counts(MNIST_LABELS, 10)
    assert moved.clip(min=0).sum() == missing
    assert set(np.flatnonzero(moved.sum(axis=1) > 0)) == {n for n, size in enumerate(drawn.sizes) if size < 10}
    givers = [drawn.sizes[client] for client in np.flatnonzero(moved.sum(axis=1) < 0)]
    assert min(givers) > 0.8 * max(drawn.sizes)


def test_five_thousand_tries_end() -> None:
    partition = make_dirichlet(alpha=0.01, rng="default").split(MNIST_LABELS, 10, 100, seed=0)
    assert (partition.info["path"], partition.info["tries"]) == ("repaired", 5000)
    assert min(partition.sizes) == 10


def test_alpha_005_with_a_hundred_clients_ends() -> None:
    partition = make_dirichlet(rng="default").split(MNIST_LABELS, 10, 100, seed=0)
    assert min(partition.sizes) >= 10
    assert int(partition.info["tries"]) > 100


@pytest.mark.parametrize("min_size", [0, 1])
def test_all_proportions_zero_below_the_cap_is_a_failed_try(min_size: int) -> None:
    """At this alpha a class goes to one client; two classes at the same of two clients are one too many."""
    labels = np.repeat([0, 1], 10)
    config = make_dirichlet(alpha=1e-300, rng="default", min_size=min_size)
    partitions = [config.split(labels, 2, 2, seed) for seed in range(20)]
    assert {partition.sizes for partition in partitions} == {(10, 10)}
    assert {partition.info["path"] for partition in partitions} == {"sampled"}
    assert {partition.info["tries"] == 1 for partition in partitions} == {True, False}

    only_one_try = make_dirichlet(alpha=1e-300, rng="default", min_size=min_size, max_tries=1)
    for seed, partition in enumerate(partitions):
        path = "sampled" if partition.info["tries"] == 1 else "repaired"
        assert only_one_try.split(labels, 2, 2, seed).info["path"] == path


def draw_as_niid_bench(labels: np.ndarray, num_classes: int, num_clients: int, alpha: float) -> list[list[int]]:
    """One draw of NIID-Bench's loop, which cuts where a NaN, made a whole number, says."""
    state = np.random.RandomState(0)
    clients: list[list[int]] = [[] for _ in range(num_clients)]
    for k in range(num_classes):
        indices = np.where(labels == k)[0]
        state.shuffle(indices)
        with np.errstate(all="ignore"):
            p = state.dirichlet(np.repeat(alpha, num_clients))
            p = np.array([q * (len(c) < len(labels) / num_clients) for q, c in zip(p, clients, strict=True)])
            cuts = (np.cumsum(p / p.sum()) * len(indices)).astype(int)[:-1]
        for client, part in zip(clients, np.split(indices, cuts), strict=True):
            client.extend(part.tolist())
    return clients


@pytest.mark.parametrize("alpha", [1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("num_clients", [1, 4])
def test_the_last_client_gets_a_class_whose_proportions_are_no_numbers(alpha: float, num_clients: int) -> None:
    """As in NIID-Bench: NumPy's legacy Dirichlet gives nan here and, with one client, inf alone."""
    partition = make_dirichlet(alpha=alpha, min_size=0).split(SMALL_LABELS, 9, num_clients, seed=0)
    expected = draw_as_niid_bench(SMALL_LABELS, 9, num_clients, alpha)
    assert [sorted(client.tolist()) for client in partition.indices] == [sorted(client) for client in expected]
    assert partition.info["path"] == "sampled"


def test_a_tiny_alpha_is_skewed_and_the_repair_is_told() -> None:
    """Every class goes to the last client, and the others get the least that they must have."""
    partition = make_dirichlet(alpha=1e-9, max_tries=20).split(SMALL_LABELS, 9, 10, seed=0)
    assert partition.sizes == (*[10] * 9, 510)
    assert (partition.info["path"], partition.info["moved"]) == ("repaired", 90)


@pytest.mark.parametrize("rng", ["default", "numpy_legacy"])
def test_min_size_zero_keeps_the_first_draw_with_its_empty_clients(rng: str) -> None:
    config = make_dirichlet(alpha=0.01, min_size=0, balance=False, rng=rng)
    partition = config.split(MNIST_LABELS, 10, 20, seed=0)
    assert int(partition.info["empty_clients"]) == partition.sizes.count(0) > 0
    assert (partition.info["path"], partition.info["tries"], partition.info["moved"]) == ("sampled", 1, 0)


def test_cap_limits_clients_and_can_be_switched_off() -> None:
    """With the cap a client ends at most one class above the mean; without it some hold far more."""
    capped = make_dirichlet(rng="default", min_size=0).split(MNIST_LABELS, 10, 20, seed=0)
    free = make_dirichlet(rng="default", min_size=0, balance=False).split(MNIST_LABELS, 10, 20, seed=0)
    assert max(capped.sizes) < 3000 + max(MNIST_CLASS_SIZES) < max(free.sizes)


def test_large_alpha_is_nearly_even() -> None:
    counts = make_dirichlet(alpha=1e6, rng="default").split(MNIST_LABELS, 10, 10, 0).label_counts(MNIST_LABELS, 10)
    assert np.abs(counts - np.array(MNIST_CLASS_SIZES) / 10).max() < 10


@pytest.mark.parametrize(
    "config",
    [
        make_dirichlet(alpha=10.0, rng="default"),
        make_dirichlet(alpha=10.0, rng="default", mode="per_client"),
        Classes("classes", 5, "default"),
    ],
)
def test_default_mixes_the_samples_of_a_class_and_the_classes_of_a_client(config: PartitionConfig) -> None:
    client = config.split(MNIST_LABELS, 10, 10, seed=0).indices[0]
    labels = MNIST_LABELS[client]
    assert len(set(labels[:100])) > 1
    of_one_class = client[labels == labels[0]]
    assert np.ptp(of_one_class) > 2 * len(of_one_class)


def test_per_client_draws_from_dir_alpha_over_num_classes() -> None:
    """For Dir(alpha p) with p = 1/C, the mean of sum q^2 is (1 + alpha / C) / (1 + alpha)."""
    alpha, num_clients = 2.0, 1000
    config = make_dirichlet(alpha=alpha, mode="per_client", rng="default")
    partition = config.split(np.repeat(np.arange(10), 100_000), 10, num_clients, seed=0)
    assert set(partition.sizes) == {1000}
    # The first half of the clients, before classes run out.
    q = partition.label_counts(np.repeat(np.arange(10), 100_000), 10)[: num_clients // 2] / 1000
    assert (q**2).sum(axis=1).mean() == pytest.approx((1 + alpha / 10) / (1 + alpha), abs=0.03)


def test_per_client_takes_what_is_left_when_classes_run_out() -> None:
    """One wanted class per client: the third client finds both wanted classes empty sooner or later."""
    labels = np.repeat(np.arange(3), [2, 20, 20])
    config = make_dirichlet(alpha=1e-5, mode="per_client", rng="default")
    for seed in range(20):
        partition = config.split(labels, 3, 4, seed)
        assert partition.sizes == (10, 10, 10, 10)
        assert partition.info["unused_samples"] == 2


# Classes


@pytest.mark.parametrize(("num_clients", "classes_per_client"), [(10, 1), (5, 2), (10, 2), (7, 3), (30, 4), (3, 10)])
def test_classes_default_has_even_owners_and_exact_numbers(num_clients: int, classes_per_client: int) -> None:
    for seed in range(10):
        partition = Classes("classes", classes_per_client, "default").split(MNIST_LABELS, 10, num_clients, seed)
        owned = partition.label_counts(MNIST_LABELS, 10) > 0
        assert (owned.sum(axis=1) == classes_per_client).all()
        owners = owned.sum(axis=0)
        assert owners.max() - owners.min() <= 1
        assert owners.min() >= 1
        assert partition.info["unowned_classes"] == partition.info["unused_samples"] == 0


def test_owners_share_a_class_equally() -> None:
    counts = Classes("classes", 2, "default").split(MNIST_LABELS, 10, 15, seed=0).label_counts(MNIST_LABELS, 10)
    for column in counts.T:
        shares = column[column > 0]
        assert shares.max() - shares.min() <= 1


@pytest.mark.parametrize("rng", ["default", "numpy_legacy"])
def test_class_without_owner_is_left_unused(rng: str) -> None:
    partition = Classes("classes", 1, rng).split(MNIST_LABELS, 10, 4, seed=0)
    used = partition.label_counts(MNIST_LABELS, 10).sum(axis=0)
    assert partition.info["unowned_classes"] == 6
    assert sorted(used) == [0] * 6 + sorted(size for size, n in zip(MNIST_CLASS_SIZES, used, strict=True) if n)
    assert partition.info["unused_samples"] == 60_000 - used.sum()


# Disjoint


def test_disjoint_keeps_the_order_of_classes_and_samples() -> None:
    partition = Disjoint("disjoint", shuffle_classes=False).split(SMALL_LABELS, 9, 2, seed=0)
    assert [sorted(set(SMALL_LABELS[client])) for client in partition.indices] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8],
    ]
    assert all((np.diff(client) > 0).all() for client in partition.indices)


# File


def save_and_load(partition: Partition, path: Path, labels: np.ndarray) -> Partition:
    partition.save(path)
    return File("file", str(path)).split(labels, 10, len(partition.indices), seed=123)


@pytest.mark.parametrize("num_clients", [1, 20])
@pytest.mark.parametrize("file_name", ["partition.npz", "without_suffix"])
def test_file_gives_back_what_was_saved(tmp_path: Path, num_clients: int, file_name: str) -> None:
    saved = make_dirichlet(alpha=0.01, min_size=0, balance=False).split(MNIST_LABELS, 10, num_clients, seed=0)
    loaded = save_and_load(saved, tmp_path / file_name, MNIST_LABELS)
    assert loaded.digest() == saved.digest()
    assert loaded.sizes == saved.sizes
    assert loaded.info == {
        "path": "loaded",
        "empty_clients": saved.info["empty_clients"],
        "unused_samples": 0,
        "num_samples": 60_000,
        "labels_digest": saved.info["labels_digest"],
    }


def test_file_refuses_other_data(tmp_path: Path) -> None:
    path = tmp_path / "partition.npz"
    Iid("iid", "default").split(SMALL_LABELS, 9, 6, seed=0).save(path)
    with pytest.raises(ConfigError, match=r"^path: .*other data: 600 samples, here 599$"):
        File("file", str(path)).split(SMALL_LABELS[:-1], 9, 6, seed=0)
    with pytest.raises(ConfigError, match=r"^path: .*other data: the labels or their order differ$"):
        File("file", str(path)).split(SMALL_LABELS[::-1], 9, 6, seed=0)


def test_file_refuses_another_number_of_clients(tmp_path: Path) -> None:
    path = tmp_path / "partition.npz"
    Iid("iid", "default").split(SMALL_LABELS, 9, 6, seed=0).save(path)
    with pytest.raises(ConfigError, match=r"^num_clients: got 7, allowed: 6, as in .*partition.npz$"):
        File("file", str(path)).split(SMALL_LABELS, 9, 7, seed=0)


@pytest.mark.parametrize("content", ["none", "folder", "text", "empty", "cut", "npy", "pickle", "lacks"])
def test_file_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "partition.npz"
    if content == "folder":
        path.mkdir()
    elif content == "text":
        path.write_text("no archive")
    elif content == "empty":
        path.touch()
    elif content == "cut":
        Iid("iid", "default").split(SMALL_LABELS, 9, 6, seed=0).save(path)
        path.write_bytes(path.read_bytes()[:-100])
    elif content == "npy":
        with path.open("wb") as file:
            np.save(file, np.arange(3))
    elif content == "pickle":
        np.savez(path, indices=np.array([{}]), offsets=0, num_samples=600, labels_digest="")
    elif content == "lacks":
        np.savez(path, indices=np.arange(3))
    reason = "there is no such file" if content == "none" else "cannot be read"
    with pytest.raises(ConfigError, match=rf"^path: got .*partition.npz', allowed: .*{reason}"):
        File("file", str(path)).split(SMALL_LABELS, 9, 6, seed=0)


@pytest.mark.parametrize(
    ("indices", "offsets"),
    [
        ([0, 1, 1], [0, 2, 3]),  # a sample twice
        ([0, 1, 600], [0, 2, 3]),  # beyond the data
        ([0, 1, -1], [0, 2, 3]),
        ([0, 1, 2], [0, 2, 4]),  # offsets that do not tile the indices
        ([0, 1, 2], [1, 2, 3]),
        ([0, 1, 2], [0, 5, 2, 3]),
        ([0, 1, 2], [0]),
        ([0.0, 1.0, 2.0], [0, 2, 3]),
        ([[0, 1, 2]], [0, 1]),
    ],
)
def test_file_with_damaged_indices_is_refused(tmp_path: Path, indices: list[Any], offsets: list[int]) -> None:
    path = tmp_path / "partition.npz"
    sound = Iid("iid", "default").split(SMALL_LABELS, 9, 2, seed=0)
    digest = sound.info["labels_digest"]
    np.savez(path, indices=np.array(indices), offsets=np.array(offsets), num_samples=600, labels_digest=digest)
    with pytest.raises(ConfigError, match="damaged"):
        File("file", str(path)).split(SMALL_LABELS, 9, len(offsets) - 1, seed=0)


# Errors and config files


@pytest.mark.parametrize("num_clients", [0, 601])
@pytest.mark.parametrize(
    "config",
    [
        make_dirichlet(),
        make_dirichlet(mode="per_client", rng="default"),
        Classes("classes", 1, "default"),
        Iid("iid", "default"),
        Disjoint("disjoint", shuffle_classes=False),
    ],
)
def test_more_clients_than_samples_are_refused(config: PartitionConfig, num_clients: int) -> None:
    with pytest.raises(ConfigError, match=rf"^num_clients: got {num_clients}, .* at most the 600 training samples$"):
        config.split(SMALL_LABELS, 9, num_clients, seed=0)


@pytest.mark.parametrize(
    ("config", "num_clients", "seed", "message"),
    [
        (
            make_dirichlet(min_size=7),
            100,
            0,
            r"min_size: got 7, allowed: at most 6, as 100 clients share 600 samples",
        ),
        (make_dirichlet(mode="per_client"), 5, 0, r"rng: got 'numpy_legacy', allowed: default"),
        (make_dirichlet(), 5, 2**32, r"seed: got 4294967296, allowed: from 0 to 4294967295"),
        (Iid("iid", "numpy_legacy"), 5, -1, r"seed: got -1"),
        (
            Classes("classes", 10, "default"),
            5,
            0,
            r"classes_per_client: got 10, allowed: at most the 9 classes",
        ),
        (Disjoint("disjoint", False), 10, 0, r"num_clients: got 10, allowed: at most the 9 classes"),
    ],
)
def test_what_the_data_cannot_give_is_refused(
    config: PartitionConfig, num_clients: int, seed: int, message: str
) -> None:
    with pytest.raises(ConfigError, match="^" + message):
        config.split(SMALL_LABELS, 9, num_clients, seed)


def test_min_size_that_uses_every_sample_is_reached() -> None:
    partition = make_dirichlet(min_size=6, max_tries=2).split(SMALL_LABELS, 9, 100, seed=0)
    assert set(partition.sizes) == {6}


@pytest.mark.parametrize(
    "file",
    [CONF_DIR / f"{name}.yaml" for name in ("classes", "dirichlet", "disjoint", "file", "iid")],
    ids=lambda file: file.stem,
)
def test_config_files_fit_their_classes(file: Path, tmp_path: Path) -> None:
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# ")
    values: Any = OmegaConf.to_container(OmegaConf.load(file))
    assert values.pop("defaults") == ["_sets", "_self_"]  # keys that the builder reads, not the class
    target = getattr(partition_module, values.pop("_target_").removeprefix("bfl_bench.data.partition."))
    if file.stem == "file":  # what it reads is the user's to say
        with pytest.raises(ConfigError, match="path: got null, allowed: a text"):
            check_arguments(target, values)
        values["path"] = str(tmp_path / "partition.npz")
        Iid("iid", "default").split(SMALL_LABELS, 9, 9, seed=0).save(tmp_path / "partition.npz")
    config = target(**check_arguments(target, values))
    assert config.name == file.stem
    assert len(config.split(SMALL_LABELS, 9, 9, seed=0).indices) == 9


def test_values_out_of_range_are_refused_by_their_annotations() -> None:
    sound = vars(make_dirichlet())
    check_arguments(Dirichlet, sound)
    for key, value in (("alpha", 0), ("mode", "both"), ("min_size", -1), ("rng", "numpy"), ("max_tries", 0)):
        with pytest.raises(ConfigError, match=f"^{key}: "):
            check_arguments(Dirichlet, sound | {key: value})
    with pytest.raises(ConfigError, match=r"^classes_per_client: "):
        check_arguments(Classes, {"name": "classes", "classes_per_client": 0, "rng": "default"})
