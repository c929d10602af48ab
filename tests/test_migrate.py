"""Runs of earlier versions get the names and keys of today."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from bfl_bench import records
from bfl_bench.build import load, plan
from bfl_bench.commands.migrate import main
from bfl_bench.identity import RUNS, finished_summary, folder_name, read_config
from bfl_bench.report.runs import by_name, find_folders, find_runs
from tests.composing import SMALL, resolve, write_run

REFERENCE = Path(__file__).parent.parent / "reference"


def write_old(out: Path, name: str, *overrides: str, start: str | None = None, **values: Any) -> dict[str, Any]:
    """A finished run as the version before wrote it, in a folder with this hash; returns the config of today for it."""
    config = resolve(*SMALL, *overrides)
    folder = write_run(out, config, {"round": 1, "ga": 0.5})
    old = {key: value for key, value in config.items() if key not in ("start_from", "reference_posterior", "inputs")}
    old |= {"given": {"start": start, "posterior": None}, **values}
    records.start(folder, old, force=False)
    folder.rename(out / name)
    return config


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_runs_get_their_new_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that others build on, though they are found after them, and below another folder."""
    out, deep = tmp_path / "outputs", tmp_path / "with" / "more"
    words = "synthetic_dirichlet-0.1_fola_seed"
    last = write_old(deep, f"{words}0_ffffffff", "data_dir=stand-in", data_dir="made-up")
    write_old(out, f"{words}2_bbbbbbbb", "seed=2", start=f"with/more/{words}0_ffffffff")
    write_old(out, f"{words}1_aaaaaaaa", "seed=1", start=f"/gone/outputs/{words}2_bbbbbbbb")
    write_old(out, f"{words}3_cccccccc", "seed=3", start="/gone/run_12345678")
    write_old(out, "by_hand_deadbeef", "seed=4")
    (out / "no_run").mkdir()
    (out / "no_run" / records.CONFIG).write_text("seed: 1\n")
    assert main([str(out), str(tmp_path / "with")]) == 0
    printed = capsys.readouterr().out
    assert "5 runs: 4 renamed, 5 configs rewritten, 0 problems" in printed
    assert "start_from=/gone/run_12345678 is not below these folders" in printed
    (base,) = deep.iterdir()
    assert base.name == folder_name(last)
    assert finished_summary(base, last) is not None
    configs = {config["seed"]: config for path in out.iterdir() if (config := read_config(path)) is not None}
    assert configs[2]["inputs"] == {"start_from": base.name}
    assert configs[2]["start_from"] == f"with/more/{base.name}"
    assert configs[1]["inputs"] == {"start_from": folder_name(configs[2])}
    assert configs[1]["start_from"] == f"/gone/outputs/{folder_name(configs[2])}"
    assert "inputs" not in configs[3]
    assert configs[3]["start_from"] == "/gone/run_12345678"
    expected = {folder_name(configs[seed]) for seed in (1, 2, 3)}
    assert {path.name for path in out.iterdir()} == {"by_hand_deadbeef", "no_run", *expected}
    for path in (base, *out.iterdir()):
        stored = yaml.safe_load((path / records.CONFIG).read_text())
        assert "given" not in stored
    assert (out / "no_run" / records.CONFIG).read_text() == "seed: 1\n"
    command = resolve(*SMALL, "seed=2", f"start_from={base}")
    assert folder_name(command) == folder_name(configs[2])  # today's command finds the migrated run

    before = snapshot(tmp_path)
    assert main([str(out), str(tmp_path / "with")]) == 0
    assert "5 runs: 0 renamed, 0 configs rewritten, 0 problems" in capsys.readouterr().out
    assert snapshot(tmp_path) == before


def test_names_say_what_stands_in_for_data(tmp_path: Path) -> None:
    """Also those of runs that were named before names said so; what builds on them keeps its name."""
    words = "mnist_dirichlet-0.1_fola_seed"
    config = resolve("dataset=mnist", "data_dir=stand-in")
    base = write_run(tmp_path, config, {"round": 1, "ga": 0.5})
    assert base.name.startswith(f"stand-in-{words}0_")
    old = base.rename(tmp_path / base.name.removeprefix("stand-in-"))
    later = resolve("dataset=mnist", "data_dir=stand-in", "seed=1") | {"start_from": str(old)}
    stored = [later | {"inputs": {"start_from": name}} for name in (old.name, base.name)]
    assert folder_name(stored[0]) == folder_name(stored[1]) == folder_name(later)
    assert folder_name(later) == folder_name(later | {"start_from": str(base)})
    follower = write_run(tmp_path, stored[0], {"round": 1, "ga": 0.5})
    runs, _ = find_runs([tmp_path], {})
    (built,) = [run for run in runs if run.config["seed"] == 1]
    assert by_name(runs)[built.config["start_from"]].folder == old
    assert main([str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {base.name, follower.name}


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "synthetic_dirichlet-0.1_fola_seed0"
    config = write_old(tmp_path, f"{words}_aaaaaaaa")
    write_old(tmp_path, f"{words}_bbbbbbbb", device="auto")  # the same run twice
    write_run(tmp_path, config, {"round": 1, "ga": 0.75})
    before = snapshot(tmp_path)
    assert main([str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "3 runs: 0 renamed, 0 configs rewritten, 2 problems" in captured.out
    assert captured.err.count(f"not renamed, because there is another {folder_name(config)}") == 2
    assert snapshot(tmp_path) == before
    for path in sorted((tmp_path / folder_name(config)).iterdir()):
        path.unlink()
    assert main([str(tmp_path)]) == 1  # an empty folder, which a system would replace
    assert "2 runs: 0 renamed, 0 configs rewritten, 2 problems" in capsys.readouterr().out
    (tmp_path / folder_name(config)).rmdir()
    assert main([str(tmp_path)]) == 1  # two runs, one name
    assert "2 runs: 1 renamed, 1 configs rewritten, 1 problems" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {folder_name(config), f"{words}_bbbbbbbb"}


def test_a_run_that_is_going_on_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "synthetic_dirichlet-0.1_fola_seed0_aaaaaaaa"
    write_old(tmp_path, name)
    with FileLock(tmp_path / name / records.LOCK):
        assert main([str(tmp_path)]) == 1
    assert "a process is running in it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert main([str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] != [name]


def test_interrupted_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many folders have been renamed by then, the references come out right."""
    words = "synthetic_dirichlet-0.1_fola_seed"
    write_old(tmp_path, f"{words}0_aaaaaaaa")
    write_old(tmp_path, f"{words}1_bbbbbbbb", "seed=1", start=f"{words}0_aaaaaaaa")
    original, renamed = Path.rename, []

    def rename(path: Path, target: Path) -> Path:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(path)
        return original(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            main([str(tmp_path)])
    assert main([str(tmp_path)]) == 0
    configs = {config["seed"]: config for path in tmp_path.iterdir() if (config := read_config(path)) is not None}
    assert configs[1]["inputs"] == {"start_from": folder_name(configs[0])}
    assert {path.name for path in tmp_path.iterdir()} == {folder_name(config) for config in configs.values()}


def test_the_partition_that_a_run_saved_is_the_one_it_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever has become of the file since."""
    small = [override for override in SMALL if "min_size" not in override]
    source = tmp_path / "partition.npz"
    load(plan(resolve(*SMALL)))[2].save(source)
    config = resolve(*small, "partition=file", f"partition.path={source}")
    old = {key: value for key, value in config.items() if key != "inputs"}
    folder = tmp_path / "outputs" / "synthetic_file_fola_seed0_aaaaaaaa"
    folder.mkdir(parents=True)
    records.start(folder, old, force=False)
    load(plan(config))[2].save(folder / records.PARTITION)
    source.write_bytes(b"something else")
    assert main([str(tmp_path / "outputs")]) == 0
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == [folder_name(config)]


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent")]) == 1
    captured = capsys.readouterr()
    assert "absent: no such folder" in captured.err
    assert "0 runs" in captured.out


def test_reference_runs_have_the_names_of_today() -> None:
    """And those that they build on, in FOLA's figure 12 and FedLPA's figure 2, are there by these names."""
    folders, notes = find_folders([REFERENCE])
    assert notes == []
    assert len(folders) >= 261
    names = {folder.name for folder in folders}
    num_inputs = 0
    for folder in folders:
        config = read_config(folder)
        assert config is not None
        assert folder_name(config) == folder.name
        inputs = config.get("inputs", {})
        assert set(inputs.values()) <= names
        assert {key: config[key] for key in RUNS if config[key] is not None} == inputs
        num_inputs += len(inputs)
    assert num_inputs >= 57
