"""Archives of runs: read like folders, made by scripts/reference.py, and every shipped table rebuilt from them."""

import contextlib
import csv
import io
import lzma
import os
import re
import tarfile
from functools import cache
from pathlib import Path

import pytest

from bfl_bench import records, report
from bfl_bench.commands import paper
from bfl_bench.commands.report import main as bfl_report
from bfl_bench.papers.spec import read_tables
from bfl_bench.records import reference_folder
from bfl_bench.report import archive as archives
from bfl_bench.report.archive import list_archived, pack
from bfl_bench.report.runs import locate
from tests.composing import call_script, resolve, write_run

RENDERED = reference_folder() / "tables"


def make_runs(out: Path) -> list[Path]:
    """Two finished runs with all files that tables and pages read."""
    folders: list[Path] = []
    for seed in (0, 1):
        config = resolve("method=fedavg", "rounds=3", f"seed={seed}", f"out={out}", "data_dir=/home/somebody")
        rows = [{"round": r, "ga": (r + seed) / 7, "nll": 1 / 3, "la": None, "bytes_up": 10**9 * r} for r in (1, 2, 3)]
        folder = write_run(out, config, *rows)
        times = [{"round": r, "client_seconds": 1.25, "server_seconds": 0.5 * r, "wall_seconds": 2.0} for r in (1, 2)]
        records.Table(folder / records.TIMING, records.TIMING_COLUMNS).append(times)
        clients = [{"round": r, "client": c, "accuracy": 0.1 * r + c / 8} for r in (1, 2) for c in (0, 1)]
        records.Table(folder / records.CLIENTS, records.CLIENTS_COLUMNS).append(clients)
        bins = [{"round": 3, "bin": b, "count": 4, "confidence": 0.5 + b / 3, "accuracy": b} for b in (0, 1)]
        records.Table(folder / records.RELIABILITY, records.RELIABILITY_COLUMNS).append(bins)
        records.write_json(folder / records.ENVIRONMENT, {"bfl_bench": "0.1.0", "commit": "abcdef0123"})
        (folder / "partition.png").write_bytes(b"a picture")
        (folder / records.CHECKPOINT).mkdir()
        folders.append(folder)
    return folders


def test_an_archive_is_read_like_the_folders_that_it_was_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = make_runs(tmp_path / "outputs")
    kept = tmp_path / "kept" / "some.tar.xz"
    assert pack(folders, kept) == sorted(folder.name for folder in folders)
    one, other = (sorted(report.find_runs([tmp_path / name], {})[0], key=str) for name in ("outputs", "kept"))
    assert [str(run.folder) for run in other] == [f"{kept}/{run.folder.name}" for run in one]
    for left, right in zip(one, other, strict=True):
        assert (left.config, left.final, left.folder.name) == (right.config, right.final, right.folder.name)
        for metric in ("ga", "nll", "la"):
            assert right.column(metric) == pytest.approx(left.column(metric), rel=5e-7)  # seven digits
        assert right.curve("bytes_up") == left.curve("bytes_up")  # whole numbers stay
        assert right.seconds_per_round() == left.seconds_per_round() == 1.25 + 0.75
        clients = records.read_table(right.folder / records.CLIENTS)
        assert [row["round"] for row in clients] == [2, 2]
        assert not (right.folder / "partition.png").exists()
    texts: list[str] = []
    for place in ("outputs", "kept"):
        page = tmp_path / f"{place}.html"
        assert bfl_report([str(tmp_path / place), "--html", str(page)]) == 0
        texts.append(capsys.readouterr().out + page.read_text())
    assert texts[0] == texts[1]
    assert b"somebody" not in b"".join(archives.read_archive(kept).values())


def test_the_same_run_in_a_folder_and_in_an_archive_counts_once(tmp_path: Path) -> None:
    folders = make_runs(tmp_path / "outputs")
    pack(folders[:1], tmp_path / "outputs" / "some.tar.xz")
    runs, notes = report.find_runs([tmp_path / "outputs"], {})
    assert len(runs) == 2
    (note,) = notes
    assert note.startswith(f"{tmp_path}/outputs/some.tar.xz/{folders[0].name}: the same config as ")


def test_runs_are_added_and_replaced(tmp_path: Path) -> None:
    folders, kept = make_runs(tmp_path / "outputs"), tmp_path / "some.tar.xz"
    assert len(pack(folders[:1], kept)) == 1
    assert len(pack(folders[1:], kept)) == 2
    before = kept.read_bytes()
    assert len(pack(folders, kept)) == 2
    assert kept.read_bytes() == before  # the same runs, the same bytes
    text = (folders[0] / records.METRICS).read_text()
    (folders[0] / records.METRICS).write_text(text.replace("1000000000", "5"))
    pack(folders[:1], kept)
    assert {run.column("bytes_up")[0] for run in report.find_runs([kept], {})[0]} == {5, 10**9}


def damage(kept: Path, kind: str) -> None:
    content = kept.read_bytes()
    if kind == "a pipe":
        kept.unlink()
        os.mkfifo(kept)
    elif kind == "cut":
        kept.write_bytes(content[: len(content) // 2])
    elif kind == "no archive":
        kept.write_bytes(b"something else")
    elif kind == "no tar":
        kept.write_bytes(lzma.compress(b"something else" * 100))
    else:
        with tarfile.open(kept, "w:xz") as tar:
            member = tarfile.TarInfo("run/config.yaml")
            member.size = 2**29  # zeros, which compress to nearly nothing
            with contextlib.suppress(OSError):
                tar.addfile(member, io.BytesIO(bytes(2**20)))
            tar.fileobj.write(bytes(512))  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["cut", "no archive", "no tar", "huge", "a pipe"])
def test_a_damaged_archive_is_left_out_with_a_sentence(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders, kept = make_runs(tmp_path / "outputs"), tmp_path / "outputs" / "some.tar.xz"
    pack(folders, kept)
    damage(kept, kind)
    runs, notes = report.find_runs([tmp_path / "outputs"], {})
    assert len(runs) == 2
    assert [note for note in notes if "some.tar.xz" in note and note.endswith("; left out")] == notes
    assert len(notes) == 1
    assert bfl_report([str(tmp_path / "outputs"), "--metrics", "ga"]) == 0
    assert "some.tar.xz" in capsys.readouterr().out


def test_what_is_no_file_of_a_run_is_ignored(tmp_path: Path) -> None:
    kept = tmp_path / "some.tar.xz"
    with tarfile.open(kept, "w:xz") as tar:
        for name in ("../config.yaml", "/config.yaml", "run/deep/config.yaml", "run/pickle.pkl", "config.yaml"):
            tar.addfile(tarfile.TarInfo(name))
        link = tarfile.TarInfo("run/config.yaml")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert list(archives.read_archive(kept)) == ["../config.yaml"]  # a run called `..`, of which nothing is unpacked
    assert report.find_runs([kept], {}) == ([], [])


def test_shipped_runs_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate(Path("reference")) == reference_folder()
    assert locate(Path("reference/bfl_p_table1")) == reference_folder() / "bfl_p_table1.tar.xz"
    assert locate(Path("elsewhere")) is None
    runs, notes = report.find_runs([Path("reference/bfl_p_table1")], {})
    assert (len(runs) >= 12, notes) == (True, [])
    assert str(runs[0].folder).startswith("reference/bfl_p_table1/fashion_mnist_")
    (tmp_path / "reference").mkdir()  # a folder of the user's own counts more
    assert report.find_runs([Path("reference")], {}) == ([], [])


def test_lists_and_differences_of_archived_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = make_runs(tmp_path / "outputs")
    pack(folders, tmp_path / "some.tar.xz")
    assert bfl_report([str(tmp_path / "some"), "--list"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"| {tmp_path}/some/{folders[0].name} | done | 3 of 3 | - | - |" in out
    assert out.endswith("2 runs")
    assert bfl_report(["--diff", *(str(tmp_path / "some" / folder.name) for folder in folders)]) == 0
    assert "| seed | 0 | 1 |" in " ".join(capsys.readouterr().out.split())


def test_models_are_not_in_archives() -> None:
    runs, _ = report.find_runs([reference_folder() / "bfl_p_table1.tar.xz"], {})
    with pytest.raises(report.ReportError, match="without models and messages; to make them:\n\n    bfl-paper run x"):
        runs[0].path("bfl-paper run x")


@pytest.mark.slow
def test_the_script_takes_the_cells_of_a_table_and_no_other_runs(tmp_path: Path) -> None:
    source = reference_folder() / "bfl_p_table1.tar.xz"
    some = [folder for folder in list_archived(source) if "seed0" in folder.name]
    pack(some, tmp_path / "outputs.tar.xz")
    make_runs(tmp_path / "outputs")
    done = call_script("reference", "outputs", "outputs.tar.xz", "--to", "kept/bfl_p_table1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 runs are no cell's of bfl_p_table1; left out\n" in done.stdout
    assert f"kept/bfl_p_table1.tar.xz: {len(some)} runs, 0 before" in done.stdout
    names = {folder.name for folder in list_archived(tmp_path / "kept" / "bfl_p_table1.tar.xz")}
    assert names == {folder.name for folder in some}
    done = call_script("reference", "outputs", "--to", "kept/other.tar.xz", "--where", "seed=1", cwd=tmp_path)
    assert "kept/other.tar.xz: 1 runs, 0 before" in done.stdout


# The shipped tables


@cache
def shipped() -> paper.Collected:
    return paper.collect([Path("reference")], {})


def render(name: str, to: Path) -> str:
    """What `bfl-paper show` writes of the shipped archives; NAME is that of a file in reference/tables."""
    table, scale = next(
        (table, scale)
        for table in read_tables().values()
        for scale in table.scales
        if name == table.full_name + ("" if scale == "paper" else f"_{scale}")
    )
    with contextlib.redirect_stdout(io.StringIO()):
        paper.show(table, [scale], shipped(), to)
    return (to / f"{name}.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in RENDERED.iterdir()))
def test_every_shipped_table_is_rebuilt_in_all_its_rows_and_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert render(name, tmp_path) == (RENDERED / f"{name}.md").read_text()
    with (tmp_path / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:  # numbers, not text with spreads and marks; and what the scale shortened
        numbers = [value for key, value in row.items() if key != "scale"]
        assert not [value for value in numbers if re.search(r"\+-|\([!?]\)|nan", value)]
        assert row["scale"].startswith("cpu: ") if name.endswith("_cpu") else row["scale"] == "paper"
    if name.endswith("_cpu"):
        assert "{scale cpu: " in (tmp_path / f"{name}.tex").read_text()


@pytest.mark.slow
def test_no_table_of_which_there_are_runs_is_left_out(tmp_path: Path) -> None:
    collected = shipped()
    able = {
        table.full_name + ("" if scale == "paper" else f"_{scale}")
        for table in read_tables().values()
        for scale in paper.distinct_scales(table)
        if paper.runs_of_cells(table, collected, [scale])
    }
    there = {path.stem for path in RENDERED.iterdir()}
    assert there <= able
    for name in able - there:
        with pytest.raises(report.ReportError, match=r"models|messages"):  # which archives have not
            render(name, tmp_path)
