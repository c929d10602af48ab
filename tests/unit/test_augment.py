import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from bfl_bench.data.augment import auto_augment, cutout, normalise, random_crop, random_flip
from bfl_bench.data.images import Images

torch.set_num_threads(1)

AUGMENTATIONS = {
    "crop": lambda x, g: random_crop(x, 4, 128, g),
    "crop_reflect": lambda x, g: random_crop(x, 4, "reflect", g),
    "flip": random_flip,
    "autoaugment": auto_augment,
    "cutout": lambda x, g: cutout(x, 16, g),
}
each_augmentation = pytest.mark.parametrize("augment", AUGMENTATIONS.values(), ids=AUGMENTATIONS.keys())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(n: int, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    """Noise from 1 to 255: no two crops agree by chance, and black is always a hole."""
    return torch.randint(1, 256, (n, channels, height, width), generator=generator(9)).to(torch.uint8)


@each_augmentation
def test_a_seed_fixes_the_result_and_another_changes_it(augment):
    x = random_images(32)
    result = augment(x, generator(1))
    assert torch.equal(result, augment(x, generator(1)))
    assert not torch.equal(result, augment(x, generator(2)))


@each_augmentation
def test_a_second_batch_gets_new_draws(augment):
    x, g = random_images(32), generator()
    assert not torch.equal(augment(x, g), augment(x, g))


@each_augmentation
def test_equal_images_of_one_batch_get_different_draws(augment):
    x = random_images(1).expand(64, -1, -1, -1)
    assert len(augment(x, generator()).flatten(1).unique(dim=0)) > 1


@each_augmentation
def test_input_and_global_random_state_stay_as_they_were(augment):
    x = random_images(8)
    before, state = x.clone(), torch.get_rng_state()
    result = augment(x, generator())
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert result.dtype == torch.uint8
    assert result.shape == x.shape


@each_augmentation
def test_the_global_seed_does_not_matter(augment):
    x = random_images(16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = augment(x, generator())
        torch.manual_seed(2)
        second = augment(x, generator())
    assert torch.equal(first, second)


@each_augmentation
def test_an_empty_batch_stays_empty(augment):
    assert augment(random_images(0), generator()).shape == (0, 3, 32, 32)


@pytest.mark.parametrize("fill", [0, 128, 255, "reflect"])
def test_each_crop_is_one_window_of_its_padded_image(fill):
    padding, height, width = 2, 6, 7
    x = random_images(300, channels=2, height=height, width=width)
    cropped = random_crop(x, padding, fill, generator())
    seen = set()
    for image, result in zip(x, cropped, strict=True):
        if fill == "reflect":
            padded = pad(image.float()[None], [padding] * 4, mode="reflect")[0]
        else:
            padded = torch.full((2, height + 4, width + 4), float(fill))
            padded[:, 2:-2, 2:-2] = image
        places = [
            (top, left)
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
            if torch.equal(result.float(), padded[:, top : top + height, left : left + width])
        ]
        assert len(places) == 1
        seen.update(places)
    assert len(seen) == (2 * padding + 1) ** 2  # all 25 places occur among 300 draws


def test_crop_of_more_than_half_the_image_reflects_correctly():
    x = random_images(1, channels=1, height=4, width=4)
    windows = {tuple(random_crop(x, 3, "reflect", generator(seed)).flatten().tolist()) for seed in range(400)}
    padded = pad(x.float(), [3] * 4, mode="reflect")[0, 0]
    expected = {tuple(padded[a : a + 4, b : b + 4].int().flatten().tolist()) for a in range(7) for b in range(7)}
    assert windows == expected


def test_flip_gives_the_image_or_its_mirror_and_both_about_equally_often():
    x = random_images(400, height=4, width=5)
    flipped = random_flip(x, generator())
    mirrored = 0
    for image, result in zip(x, flipped, strict=True):
        if torch.equal(result, image[:, :, [4, 3, 2, 1, 0]]):
            mirrored += 1
        else:
            assert torch.equal(result, image)
    assert 150 < mirrored < 250  # five standard deviations


@pytest.mark.parametrize("length", [1, 5, 16, 32])
def test_cutout_blackens_one_clipped_square_and_nothing_else(length):
    x = random_images(400)
    holed = cutout(x, length, generator())
    starts = [centre - length // 2 for centre in range(32)]
    spans = [[i for i in range(start, start + length) if 0 <= i < 32] for start in starts]
    centres = set()
    for image, result in zip(x, holed, strict=True):
        hole = (result == 0).all(0)
        assert torch.equal(result, image * ~hole)  # the same hole in all channels, the rest untouched
        rows, columns = hole.any(1).nonzero()[:, 0].tolist(), hole.any(0).nonzero()[:, 0].tolist()
        assert hole.sum() == len(rows) * len(columns)  # a full rectangle
        centres.add((spans.index(rows), spans.index(columns)))
    assert len(centres) > 200


def test_cutout_is_clipped_at_every_border_and_sometimes_whole():
    holes = (cutout(random_images(400), 16, generator()) == 0).all(1)
    sizes = holes.flatten(1).sum(1)
    assert sizes.max() == 16 * 16
    assert sizes.min() < 12 * 12
    narrow = holes.any(2).sum(1) < 16  # holes that lost rows
    for border in (0, 31):
        assert (narrow & holes.any(2)[:, border]).any()


def test_cutout_centres_are_uniform():
    """A hole of one pixel shows its centre: 32 x 32 cells, each with probability 1/1024."""
    holes = (cutout(torch.ones(20_000, 1, 32, 32, dtype=torch.uint8), 1, generator()) == 0)[:, 0].sum(0)
    assert holes.sum() == 20_000
    for counts in (holes.sum(0), holes.sum(1)):
        assert (counts.float() - 625).abs().max() < 130  # five standard deviations


def test_autoaugment_equals_torchvision_image_by_image():
    from torchvision.transforms import AutoAugment, AutoAugmentPolicy

    x = random_images(24)
    seeds = torch.randint(2**63 - 1, (24,), generator=generator(3)).tolist()
    policy = AutoAugment(AutoAugmentPolicy.CIFAR10, fill=[128.0] * 3)
    expected = []
    with torch.random.fork_rng(devices=[]):
        for image, seed in zip(x, seeds, strict=True):
            torch.manual_seed(seed)
            expected.append(policy(image))
    assert torch.equal(auto_augment(x, generator(3)), torch.stack(expected))


def test_autoaugment_draws_many_policies():
    results = auto_augment(random_images(1).expand(200, -1, -1, -1), generator())
    assert len(results.flatten(1).unique(dim=0)) > 30


def test_autoaugment_fills_uncovered_pixels_with_grey():
    white = torch.full((200, 3, 32, 32), 255, dtype=torch.uint8)
    white[:, :, 8:24, 8:24] = 1  # two tones, of which no colour operation makes 128 at the border
    results = auto_augment(white, generator())
    edges = torch.cat([results[:, 0, :, 0], results[:, 0, :, -1]], 1)
    assert (edges == 128).any(1).sum() > 20  # moved by a shear, shift or rotation


def test_normalise_by_hand():
    x = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    result = normalise(x, 255, [0.5, 0.1, 0.25], [0.5, 0.2, 0.25])
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.flatten(), torch.tensor([-1.0, 0.5, 3.0]))
    torch.testing.assert_close(normalise(x, 255, [0.5], [0.5]).flatten(), torch.tensor([-1.0, -0.6, 1.0]))
    torch.testing.assert_close(normalise(x, 255, [0], [1]).flatten(), torch.tensor([0.0, 0.2, 1.0]))


def images(**changes: object) -> Images:
    values = {
        "name": "test", "source": "cifar10", "mean": [0.5] * 3, "std": [0.5] * 3, "crop_padding": 0,
        "crop_fill": 128, "flip": False, "autoaugment": False, "cutout": 0,
    }  # fmt: skip
    return Images(**(values | changes))


def test_augment_is_the_chain_of_fola_in_its_order():
    x = random_images(16)
    config = images(crop_padding=4, flip=True, autoaugment=True, cutout=16)
    g = generator(5)
    expected = cutout(auto_augment(random_flip(random_crop(x, 4, 128, g), g), g), 16, g)
    result = config.augment(x, generator(5))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, (expected.float() / 255 - 0.5) / 0.5)
    assert (result == -1).all(1).flatten(1).any(1).all()  # holes are black before normalising, so -1 after


@pytest.mark.parametrize(
    ("switch", "function"),
    [
        ({"crop_padding": 4, "crop_fill": "reflect"}, AUGMENTATIONS["crop_reflect"]),
        ({"flip": True}, AUGMENTATIONS["flip"]),
        ({"autoaugment": True}, AUGMENTATIONS["autoaugment"]),
        ({"cutout": 16}, AUGMENTATIONS["cutout"]),
    ],
    ids=["crop", "flip", "autoaugment", "cutout"],
)
def test_each_switch_alone_does_only_its_own(switch, function):
    x = random_images(16)
    result = images(mean=[0.0], std=[1.0], **switch).augment(x, generator(6))
    torch.testing.assert_close(result, function(x, generator(6)).float() / 255)


def test_torchvision_is_not_imported_without_autoaugment(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)  # importing it would now raise
    monkeypatch.setitem(sys.modules, "torchvision", None)
    images(crop_padding=4, flip=True, cutout=16).augment(random_images(2), generator())
    with pytest.raises(ImportError):
        auto_augment(random_images(2), generator())
