"""Progress and limits of sweeps, scales, stand-ins for data."""

import pickle
from pathlib import Path

import pytest

from bfl_bench.data.sources import SOURCES, stand_in
from bfl_bench.identity import folder_name, identity
from hydra_plugins.bfl_sweeper import spread, time_left
from tests.composing import SMALL, resolve
from tests.conftest import BflRun


def test_a_limited_sweep_has_different_points_of_every_axis() -> None:
    points = [(row, dataset, seed) for row in range(12) for dataset in range(3) for seed in range(5)]
    chosen = spread(points, 6)
    assert chosen == sorted(set(chosen))
    assert chosen[0] == points[0]
    assert all(len({point[axis] for point in chosen}) >= 3 for axis in range(3))
    assert spread(points[:4], 4) == points[:4]


def test_the_time_left_is_that_of_the_points_run_so_far() -> None:
    assert time_left([], 9) == ""
    assert time_left([2.0, 4.0], 10) == ", at most about 30 s left"
    assert time_left([60.0], 10) == ", at most about 10 min left"
    assert time_left([3600.0], 5) == ", at most about 5.0 h left"


@pytest.mark.slow
def test_a_sweep_announces_its_points_and_skips_what_is_done(bfl_run: BflRun) -> None:
    done = bfl_run("-m", *SMALL, "method=fedavg", "rounds=1", "seed=0,1")
    assert "[1/2] " in done.out
    assert "[2/2, at most about " in done.out
    again = bfl_run("-m", *SMALL, "method=fedavg", "rounds=1", "seed=0,1,2", "hydra.sweeper.limit=2")
    assert "2 of the 3 points of the sweep" in again.out
    assert "1 done, 1 skipped" in again.out  # seeds 2 and 0


def test_only_tables_and_figures_have_a_scale_cpu(bfl_run: BflRun) -> None:
    for chosen in ([], ["experiment=fola"]):
        done = bfl_run(*chosen, "scale=cpu", "dry_run=true")
        assert done.code == 2
        assert "scale: got 'cpu'" in done.err


def test_scale_is_no_part_of_what_a_run_is_but_stand_ins_are() -> None:
    short = resolve("experiment=fola_table2", "cell=Ours, lambda 1", "scale=cpu")
    same = resolve(
        *("experiment=fola_table2", "cell=Ours, lambda 1", "rounds=5", "local.epochs=1", "dataset.flip=false"),
        *("dataset.crop_padding=0", "dataset.autoaugment=false", "dataset.cutout=0", "eval.batch_size=250"),
    )
    assert folder_name(short) == folder_name(same)
    assert folder_name(resolve("data_dir=stand-in")) != folder_name(resolve())
    assert folder_name(resolve("data_dir=/elsewhere")) == folder_name(resolve())
    assert identity(resolve("experiment=fola", "scale=smoke"))["data_dir"] == "stand-in"


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_has_a_stand_in_that_is_the_same_each_time(name: str) -> None:
    first, second = stand_in.make(name), stand_in.make(name)
    assert pickle.dumps(first) == pickle.dumps(second)


def test_a_folder_that_only_ends_in_that_name_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="stand-in"):
        SOURCES["femnist"].read(tmp_path / "stand-in")
