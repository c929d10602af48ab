"""`bfl-report --clean`: what it removes, what it never does, and that it asks first."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from bfl_bench import records
from bfl_bench.commands.report import main
from bfl_bench.report.cleaning import find_useless, remove_runs
from tests.test_report_command import make


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Path]:
    """One run of each kind, and a link to a finished one."""
    names = ("done", "diverged", "unfinished", "damaged", "running", "stale")
    found = {name: make(tmp_path, "fola", seed, "rounds=7") for seed, name in enumerate(names)}
    summary = records.read_json(found["diverged"] / records.SUMMARY) or {}
    records.write_json(found["diverged"] / records.SUMMARY, {**summary, "status": "diverged"})
    for name in ("unfinished", "running"):
        (found[name] / records.SUMMARY).unlink()
    (found["damaged"] / records.SUMMARY).write_text("{")
    found["stale"] = found["stale"].rename(tmp_path / "digits_fola_seed5_01234567")
    (tmp_path / "link").symlink_to(found["unfinished"])
    (tmp_path / "notes").mkdir()
    return found


def names_of(found: list[Any], runs: dict[str, Path]) -> set[str]:
    by_path = {str(path): name for name, path in runs.items()}
    return {by_path[str(one.folder)] for one in found}


def test_what_is_found(runs: dict[str, Path], tmp_path: Path) -> None:
    with FileLock(runs["running"] / records.LOCK):
        assert names_of(find_useless([tmp_path], ["unfinished"]), runs) == {"unfinished", "damaged"}
        assert names_of(find_useless([tmp_path], ["stale"]), runs) == {"stale"}
        assert names_of(find_useless([tmp_path], ["unfinished", "stale"]), runs) == {"unfinished", "damaged", "stale"}


def test_a_stale_run_that_somebody_works_on_is_not_found(runs: dict[str, Path], tmp_path: Path) -> None:
    (runs["stale"] / records.SUMMARY).unlink()
    with FileLock(runs["stale"] / records.LOCK):
        assert not find_useless([tmp_path], ["stale"])
    assert names_of(find_useless([tmp_path], ["stale"]), runs) == {"stale"}


def test_only_what_was_not_touched_for_so_long(runs: dict[str, Path], tmp_path: Path) -> None:
    for path in runs["unfinished"].iterdir():
        os.utime(path, (1000, 1000))
    now = max(path.stat().st_mtime for path in runs["damaged"].iterdir()) + 86400
    (runs["running"] / records.SUMMARY).write_text((runs["done"] / records.SUMMARY).read_text())
    assert names_of(find_useless([tmp_path], ["unfinished"], 0.9, now), runs) == {"unfinished", "damaged"}
    assert names_of(find_useless([tmp_path], ["unfinished"], 1.1, now), runs) == {"unfinished"}


def call(monkeypatch: pytest.MonkeyPatch, answer: str | None, *words: object) -> int:
    class Terminal:
        def isatty(self) -> bool:
            return answer is not None

        def readline(self) -> str:
            return f"{answer}\n"

    monkeypatch.setattr(sys, "stdin", Terminal())
    return main([str(word) for word in words])


@pytest.mark.parametrize(("answer", "removed"), [("y", True), ("YES", True), ("n", False), ("", False), ("yep", False)])
def test_it_asks(
    answer: str,
    removed: bool,
    runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with FileLock(runs["running"] / records.LOCK):
        code = call(monkeypatch, answer, tmp_path, "--clean", "unfinished")
    assert code == (0 if removed else 1)
    text = capsys.readouterr().out
    assert "Remove 2 runs, 0.0" in text
    assert "| damaged" in text
    for name, path in runs.items():
        assert path.exists() == (not removed or name not in ("unfinished", "damaged")), name


def test_where_nobody_can_be_asked_it_takes_yes(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, None, tmp_path, "--clean", "stale") == 2
    assert "--clean: got 'stale', allowed: together with --yes" in capsys.readouterr().err
    assert runs["stale"].exists()
    assert call(monkeypatch, None, tmp_path, "--clean", "stale", "--yes") == 0
    assert not runs["stale"].exists()
    assert capsys.readouterr().out.endswith("removed 1 of 1\n")
    assert call(monkeypatch, None, tmp_path, "--clean", "stale") == 0
    assert capsys.readouterr().out == "nothing to remove\n"


def test_what_changed_since_the_question_is_kept(runs: dict[str, Path], tmp_path: Path) -> None:
    found = [one for one in find_useless([tmp_path], ["unfinished"]) if one.folder != runs["damaged"]]
    assert names_of(found, runs) == {"unfinished", "running"}
    (runs["unfinished"] / records.SUMMARY).write_text((runs["done"] / records.SUMMARY).read_text())
    with FileLock(runs["running"] / records.LOCK):
        kept = remove_runs(found)
    assert len(kept) == 2
    assert any("has finished meanwhile" in sentence for sentence in kept)
    assert any("another process is running" in sentence for sentence in kept)
    assert all(path.exists() for path in runs.values())


def test_a_run_with_another_below_it_is_kept(runs: dict[str, Path], tmp_path: Path) -> None:
    runs["done"].rename(runs["unfinished"] / "below")
    (one,) = [one for one in find_useless([tmp_path], ["unfinished"]) if one.folder == runs["unfinished"]]
    (sentence,) = remove_runs([one])
    assert "has another run below it" in sentence
    assert (runs["unfinished"] / "below" / records.CONFIG).exists()
