"""eval.shift: every corruption and severity on the right images, and nothing for data without pixels."""

from pathlib import Path

import pytest
import torch

from bfl_bench import records
from bfl_bench.data.corruptions import CORRUPTIONS, Pixels, corrupt
from bfl_bench.engines.worker import TEST
from bfl_bench.errors import ConfigError
from bfl_bench.rng import stream
from bfl_bench.run.checkpoint import read_state
from tests.composing import SMALL, experiment, run_in

FEW = ["method=fvb", "rounds=2", "local.epochs=1", "eval.draws=2", "eval.local_every=0", "eval.severities=[2,5]"]


def test_corrupted_images_are_what_the_global_model_is_asked(tmp_path: Path) -> None:
    options = [*FEW, "eval.shift=[contrast,gaussian_noise]"]
    run_in(tmp_path, *options)
    rows, metrics = (records.read_table(tmp_path / name) for name in (records.SHIFT, records.METRICS))
    worker, state = experiment(*options).worker, read_state(tmp_path, torch.device("cpu"))
    split = worker.sets[TEST].split
    images = split.x * 0.3762 + 0.3052  # digits: back to [0, 1] by conf/dataset/digits.yaml
    assert images.min() > -1e-6
    assert images.max() < 1 + 1e-6
    found = []
    for row, severity in zip(rows, (2, 5), strict=True):
        values = []
        for name in ("contrast", "gaussian_noise"):
            changed = corrupt(images.clamp(0, 1), name, severity, stream(0, "shift", name, severity))
            draws = worker.method.draws(worker.task, state, 2, stream(0, "evaluate", 2))
            values.append(worker.score(worker.mix(draws, (changed - 0.3052) / 0.3762), split.y).values)
            for score in ("accuracy", "nll", "ece"):
                assert row[f"{score}@{name}"] == pytest.approx(values[-1][score], rel=1e-5)
        for score in ("accuracy", "nll", "ece"):
            assert row[score] == pytest.approx((values[0][score] + values[1][score]) / 2, rel=1e-5)
        assert (row["round"], row["severity"]) == (2, severity)
        found.append(row)
    assert metrics[0]["shift_nll"] is None  # the last round alone
    for column, score in {"shift_ga": "accuracy", "shift_nll": "nll", "shift_ece": "ece"}.items():
        assert metrics[1][column] == pytest.approx(sum(float(row[score] or 0) for row in found) / 2)


def test_the_run_is_as_it_was(tmp_path: Path) -> None:
    run_in(tmp_path / "without", *FEW[:-1])
    run_in(tmp_path / "with", *FEW, "eval.shift=[all]")
    without, shifted = (records.read_table(tmp_path / name / records.METRICS) for name in ("without", "with"))
    assert [{name: row[name] for name in without[0]} for row in shifted] == without
    assert not (tmp_path / "without" / records.SHIFT).exists()
    columns = records.read_table(tmp_path / "with" / records.SHIFT)[0]
    assert {f"ece@{name}" for name in CORRUPTIONS} <= columns.keys()


def test_colours_are_normalised_one_by_one() -> None:
    pixels = Pixels((0.1, 0.5), (0.2, 2.0))
    images = torch.rand(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    inputs = (images - torch.tensor([0.1, 0.5]).view(2, 1, 1)) / torch.tensor([0.2, 2.0]).view(2, 1, 1)
    found = pixels.corrupt(inputs, "brightness", 3, torch.Generator())
    expected = ((images + 0.15).clamp(max=1) - torch.tensor([0.1, 0.5]).view(2, 1, 1)) / torch.tensor([0.2, 2.0]).view(
        2, 1, 1
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["eval.shift=[fog]"], r"eval\.shift: got 'fog', allowed: gaussian_noise, .*, occlusion, all"),
        (["eval.shift=[blur]", "eval.severities=[]"], r"eval\.severities: got \[\], allowed: at least one"),
        (["eval.severities=[6]"], r"eval\.severities: got \[6\], allowed: a list"),
        ([*SMALL, "eval.shift=[blur]"], r"eval\.shift: got \['blur'\], allowed: \[\]; dataset synthetic has no images"),
    ],
)
def test_what_cannot_be_corrupted_is_refused(options: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        experiment(*options)
