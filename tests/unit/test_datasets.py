import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from bfl_bench.checks import check_arguments
from bfl_bench.data.dataset import DatasetConfig
from bfl_bench.data.digits import Digits
from bfl_bench.data.images import SHAPES, Emnist, Images
from bfl_bench.data.natural.femnist import Femnist
from bfl_bench.data.natural.har import Har
from bfl_bench.data.natural.mnist_writers import MnistWriters
from bfl_bench.data.natural.pmnist import PermutedMnist
from bfl_bench.data.natural.shakespeare import Shakespeare
from bfl_bench.data.natural.vsn import VehicleSensors
from bfl_bench.data.synthetic import Synthetic
from bfl_bench.errors import ConfigError

torch.set_num_threads(1)

CONF = Path(__file__).parents[2] / "conf" / "dataset"
CLASSES = {
    "digits": Digits, "synthetic": Synthetic,
    "mnist": Images, "fashion_mnist": Images, "cifar10": Images, "svhn": Images,
    "kmnist": Images, "cifar100": Images, "emnist": Emnist,
    "pmnist": PermutedMnist, "mnist_writers": MnistWriters, "femnist": Femnist,
    "har": Har, "vsn": VehicleSensors, "shakespeare": Shakespeare,
}  # fmt: skip
NOWHERE = Path("nowhere")


def configured(name: str, /, **changes: object) -> DatasetConfig:
    """The dataset of conf/dataset/<name>.yaml with some keys changed, checked as a run checks it."""
    values = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    values.pop("defaults", None)
    assert values.pop("server_samples") == 0  # the builder's own: every dataset has it,
    assert values.pop("label_noise") == {"rate": 0.0, "kind": "uniform"}  # and this one every dataset of classes
    target = values.pop("_target_")
    assert target == f"{CLASSES[name].__module__}.{CLASSES[name].__name__}"
    return CLASSES[name](**check_arguments(CLASSES[name], values | changes))


def rejects(key: str, name: str, /, **changes: object) -> str:
    with pytest.raises(ConfigError) as error:
        configured(name, **changes)
    assert error.value.key == key
    assert error.value.got == changes.get(key, error.value.got)
    return error.value.allowed


@pytest.mark.parametrize("name", CLASSES)
def test_yaml_fits_its_class_and_begins_with_its_description(name):
    assert configured(name).name == name
    lines = (CONF / f"{name}.yaml").read_text().splitlines()
    assert lines[0].startswith("# ")
    for line in lines[lines.index(f"_target_: {CLASSES[name].__module__}.{CLASSES[name].__name__}") + 1 :]:
        assert "  # " in line or line.endswith(":")  # every key says what it does


@pytest.mark.parametrize("name", CLASSES)
def test_no_key_has_a_default_in_code(name):
    keys = set(configured(name).__dataclass_fields__)
    values = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    for key in keys:
        remaining = {k: v for k, v in values.items() if k in keys - {key}}
        with pytest.raises(ConfigError, match="the key is missing"):
            check_arguments(CLASSES[name], remaining)


# digits


def test_digits_are_the_real_images():
    from sklearn.datasets import load_digits

    data = configured("digits", mean=[0.0], std=[1.0]).load(NOWHERE)
    assert data.train.x.dtype == torch.float32
    assert data.train.y.dtype == torch.int64
    assert (len(data.train), len(data.test), data.num_classes) == (1438, 359, 10)
    assert data.input_shape == (1, 8, 8)
    assert data.augment is None
    real = load_digits()
    rows = {(*image.flatten().tolist(), label) for image, label in zip(real.images, real.target, strict=True)}
    loaded = [
        (*(x.double() * 16).flatten().tolist(), label)
        for split in (data.train, data.test)
        for x, label in zip(split.x, split.y.tolist(), strict=True)
    ]
    assert len(rows) == 1797  # no two are equal, so the comparison proves that none is lost or doubled
    assert set(loaded) == rows
    assert len(loaded) == 1797


def test_digits_as_configured_are_standardised():
    train = configured("digits").load(NOWHERE).train.x
    assert abs(train.mean()) < 1e-3
    assert abs(train.std() - 1) < 1e-3
    plain = configured("digits", mean=[0.0], std=[1.0]).load(NOWHERE).train.x
    half = configured("digits", mean=[0.5], std=[0.25]).load(NOWHERE).train.x
    torch.testing.assert_close(half, (plain - 0.5) / 0.25)
    assert (plain.min(), plain.max()) == (0, 1)


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.99])
def test_digits_split_is_stratified(fraction):
    data = configured("digits", test_fraction=fraction).load(NOWHERE)
    train, test = (split.y.bincount(minlength=10) for split in (data.train, data.test))
    assert ((test - fraction * (train + test)).abs() <= 0.5).all()
    assert train.min() > 0
    assert test.min() > 0


def test_digits_split_depends_on_its_seed_and_nothing_else():
    first = configured("digits").load(NOWHERE)
    np.random.seed(1)  # noqa: NPY002 - the global state that must not matter
    assert torch.equal(configured("digits").load(NOWHERE).test.x, first.test.x)
    assert not torch.equal(configured("digits", split_seed=1).load(NOWHERE).test.x, first.test.x)


def test_digits_split_does_not_change_between_versions():
    """Published numbers rest on this split."""
    y = configured("digits").load(NOWHERE).test.y
    assert y[:20].tolist() == [5, 3, 3, 6, 0, 5, 8, 3, 2, 7, 2, 1, 2, 3, 7, 3, 4, 6, 0, 8]


def test_digits_config_errors():
    rejects("test_fraction", "digits", test_fraction=0.0)
    rejects("test_fraction", "digits", test_fraction=1.0)
    rejects("split_seed", "digits", split_seed=-1)
    rejects("std", "digits", std=[0.0])
    assert rejects("mean", "digits", mean=[0.5, 0.5]) == "a list of 1"
    rejects("std", "digits", std=[])


# synthetic


@pytest.mark.parametrize("shape", [[20], [3, 8, 8], [1]])
def test_synthetic_shape_counts_and_balance(shape):
    config = configured("synthetic", shape=shape, train_samples=103, test_samples=50, num_classes=5)
    data = config.load(NOWHERE)
    assert data.train.x.shape == (103, *shape)
    assert data.input_shape == tuple(shape)
    assert data.train.x.dtype == torch.float32
    assert data.train.y.dtype == torch.int64
    assert sorted(data.train.y.bincount().tolist()) == [20, 20, 21, 21, 21]
    assert data.test.y.bincount().tolist() == [10] * 5
    assert (data.num_classes, data.augment) == (5, None)
    assert data.train.y[:50].unique().numel() > 3  # shuffled, not sorted


@pytest.mark.parametrize("shape", [[50], [3, 16, 16]])
@pytest.mark.parametrize("separation", [4.0, 12.0])
def test_synthetic_separation_is_the_distance_of_means_in_any_dimension(shape, separation):
    data = configured("synthetic", shape=shape, separation=separation, train_samples=4000).load(NOWHERE)
    x, y, dim = data.train.x.flatten(1), data.train.y, math.prod(shape)
    means = torch.stack([x[y == label].mean(0) for label in range(10)])
    noise = 2 * dim / 400  # squared distance that 400 examples per class leave between two estimated means
    distance = (torch.pdist(means).square().mean() - noise).sqrt()
    assert distance == pytest.approx(separation, rel=0.15)
    assert (x - means[y]).std() == pytest.approx(1, abs=0.01)


def test_synthetic_train_and_test_share_their_classes():
    data = configured("synthetic", separation=8.0, train_samples=1000, test_samples=1000).load(NOWHERE)
    means = torch.stack([data.train.x[data.train.y == label].mean(0) for label in range(10)])
    nearest = torch.cdist(data.test.x, means).argmin(1)
    assert (nearest == data.test.y).float().mean() > 0.97
    assert torch.cdist(data.test.x, data.train.x).min() > 0.5  # other examples


def test_synthetic_without_separation_has_nothing_to_learn():
    data = configured("synthetic", separation=0.0).load(NOWHERE)
    means = torch.stack([data.train.x[data.train.y == label].mean(0) for label in range(10)])
    assert (torch.cdist(data.test.x, means).argmin(1) == data.test.y).float().mean() < 0.2


def test_synthetic_depends_on_its_seed_and_nothing_else():
    first = configured("synthetic").load(NOWHERE)
    state = torch.get_rng_state()
    again = configured("synthetic", test_samples=10).load(NOWHERE)
    assert torch.equal(again.train.x, first.train.x)  # nor on the size of the other part
    assert torch.equal(again.train.y, first.train.y)
    assert torch.equal(torch.get_rng_state(), state)


def test_synthetic_seed_decides_means_and_noise():
    first, other = (configured("synthetic", data_seed=seed, separation=50.0).load(NOWHERE).train for seed in (0, 1))
    assert not torch.equal(first.y, other.y)
    means = [torch.stack([s.x[s.y == label].mean(0) for label in range(10)]) for s in (first, other)]
    assert (means[0] - means[1]).norm(dim=1).min() > 10
    noise = [s.x - m[s.y] for s, m in zip((first, other), means, strict=True)]
    assert not torch.allclose(*noise, atol=0.1)


def test_synthetic_config_errors():
    rejects("shape", "synthetic", shape=[])
    rejects("shape", "synthetic", shape=[3, 0])
    rejects("num_classes", "synthetic", num_classes=1)
    rejects("separation", "synthetic", separation=-1.0)
    rejects("data_seed", "synthetic", data_seed=0.5)
    assert "10" in rejects("train_samples", "synthetic", train_samples=9)
    rejects("test_samples", "synthetic", test_samples=9)


# images

SOURCES = ["mnist", "fashion_mnist", "kmnist", "cifar10", "cifar100", "svhn"]


@pytest.fixture
def fake_files(monkeypatch):
    """Random arrays of the right shape in place of the real files; returns what was asked for and given."""
    seen = {}

    def fake(name: str, data_dir: Path) -> SimpleNamespace:
        channels, side = SHAPES[name]
        rng = np.random.default_rng(0)
        arrays = SimpleNamespace(
            train_x=rng.integers(0, 256, (20, channels, side, side), dtype=np.uint8),
            train_y=np.arange(20) % 10,
            test_x=rng.integers(0, 256, (10, channels, side, side), dtype=np.uint8),
            test_y=np.arange(10),
        )
        for array in vars(arrays).values():
            array.flags.writeable = False  # as arrays mapped from a file are
        seen.update(name=name, data_dir=data_dir, arrays=arrays)
        return arrays

    monkeypatch.setattr("bfl_bench.data.images.load_arrays", fake)
    return seen


@pytest.mark.parametrize("name", SOURCES)
def test_images_without_augmentation_are_normalised(name, fake_files):
    config = configured(name)
    data = config.load(NOWHERE)
    arrays = fake_files["arrays"]
    assert (fake_files["name"], fake_files["data_dir"]) == (name, NOWHERE)
    assert data.augment is None
    assert data.num_classes == 10
    mean, std = (np.reshape(values, (-1, 1, 1)) for values in (config.mean, config.std))
    for split, x, y in (
        (data.train, arrays.train_x, arrays.train_y),
        (data.test, arrays.test_x, arrays.test_y),
    ):
        assert split.x.dtype == torch.float32
        assert split.y.dtype == torch.int64
        np.testing.assert_allclose(split.x.numpy(), (x / 255 - mean) / std, rtol=1e-5, atol=1e-6)
        assert split.y.tolist() == y.tolist()


def test_images_pixels_by_hand(fake_files):
    """MNIST's black and white: (0 - 0.1307) / 0.3081 and (1 - 0.1307) / 0.3081."""
    x = configured("mnist").load(NOWHERE).train.x
    assert x.min().item() == pytest.approx(-0.4242, abs=1e-4)
    assert x.max().item() == pytest.approx(2.8215, abs=1e-4)


def test_images_source_and_name_are_independent(fake_files):
    config = configured("cifar10", name="cifar10_plain", mean=[0.0], std=[1.0])
    data = config.load(NOWHERE)
    assert (config.name, fake_files["name"]) == ("cifar10_plain", "cifar10")
    np.testing.assert_allclose(data.test.x.numpy(), fake_files["arrays"].test_x / 255, rtol=1e-6)


SWITCHES = [{"crop_padding": 4}, {"flip": True}, {"autoaugment": True}, {"cutout": 16}]


@pytest.mark.parametrize("switch", SWITCHES)
def test_images_with_augmentation_keep_raw_training_images(switch, fake_files):
    data = configured("cifar10", **switch).load(NOWHERE)
    assert data.train.x.dtype == torch.uint8
    np.testing.assert_array_equal(data.train.x.numpy(), fake_files["arrays"].train_x)
    plain = configured("cifar10").load(NOWHERE)
    assert torch.equal(data.test.x, plain.test.x)  # never augmented
    assert data.augment is not None
    inputs = data.augment(data.train.x, torch.Generator().manual_seed(0))
    assert inputs.dtype == torch.float32
    assert inputs.shape == plain.train.x.shape
    assert not torch.equal(inputs, plain.train.x)
    assert data.train.x.tolist() == fake_files["arrays"].train_x.tolist()  # untouched for the next epoch


def test_images_loading_leaves_the_global_random_state_alone(fake_files):
    state = torch.get_rng_state()
    data = configured("cifar10", crop_padding=4, flip=True, autoaugment=True, cutout=16).load(NOWHERE)
    data.augment(data.train.x, torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_images_config_errors():
    rejects("source", "mnist", source="emnist")
    rejects("source", "emnist", source="mnist")
    rejects("split", "emnist", split="words")
    rejects("crop_fill", "cifar10", crop_fill=256)
    rejects("crop_fill", "cifar10", crop_fill="mirror")
    assert configured("cifar10", crop_fill="reflect").crop_fill == "reflect"
    rejects("std", "cifar10", std=[0.5, 0.5, 0.0])
    assert rejects("mean", "cifar10", mean=[0.5, 0.5]) == "a list of 1 or a list of 3"
    assert rejects("mean", "mnist", mean=[0.5] * 3, std=[0.5] * 3) == "a list of 1"
    assert "mean" in rejects("std", "cifar10", std=[0.5])
    assert "grey" in rejects("autoaugment", "fashion_mnist", autoaugment=True)
    rejects("flip", "cifar10", flip=1)
    rejects("crop_padding", "mnist", crop_padding=-1)
    assert rejects("crop_padding", "mnist", crop_padding=28) == "0 to 27 for 28x28 images"
    assert configured("mnist", crop_padding=27).crop_padding == 27
    assert rejects("cutout", "cifar10", cutout=33) == "0 to 32 for 32x32 images"
    assert configured("cifar10", cutout=32).cutout == 32
