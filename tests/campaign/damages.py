"""Damaged files: every file of a finished run, and of one that was killed half way, damaged in every way we know.

The same command then has to give the same bytes, or to say which file is wrong; `bfl-report` has to read the run or to
say why not.
"""

import itertools
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from tests.campaign.crashes import SHORT, set_sync
from tests.campaign.driving import Ended, Tally, bfl_report, bfl_run, contents, differing, fault, only_folder
from tests.campaign.points import Points

WORDS = (*SHORT, "method=scaffold")
BOMB = b"a: &a [x,x]\n" + b"".join(b"%c: &%c [*%c,*%c]\n" % (i + 1, i + 1, i, i) for i in range(97, 117))


def _flip(content: bytes, moments: random.Random) -> bytes:
    place = moments.randrange(max(1, len(content)))
    return content[:place] + bytes([content[place] ^ (1 << moments.randrange(8))]) + content[place + 1 :]


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a bit": _flip,
    "another bit": _flip,
    "cut": lambda content, _: content[: len(content) // 2],
    "cut by one": lambda content, _: content[:-1],
    "empty": lambda content, _: b"",
    "zeros": lambda content, _: bytes(len(content)),
    "one more byte": lambda content, _: content + b"x",
    "one more line": lambda content, _: content + b"9,9\n",
    "twice": lambda content, _: content * 2,
    "line ends": lambda content, _: content.replace(b"\n", b"\r\n"),
    "digits": lambda content, _: content.replace(b"1", b"2"),
    "not text": lambda content, _: b"\xff\xfe\x00" + content,
    "a list": lambda content, _: b"[1, 2]",
    "null": lambda content, _: b"null",
    "other types": lambda content, _: b'{"schema_version": 1, "status": [], "round": "x", "final": 3, "notes": []}',
    "deep": lambda content, _: b'{"a":' * 5000,
    "a bomb": lambda content, _: BOMB,
    "a tag": lambda content, _: b"a: !!python/object/apply:os.system ['touch made']\n",
}
KINDS = ("missing", "a folder", "a pipe", "a link to nowhere", "a link to itself", "another file's")


def damage(path: Path, kind: str, moments: random.Random) -> bool:
    """Damage a file; False where that leaves it as it was."""
    content = path.read_bytes()
    if kind in CHANGES:
        changed = CHANGES[kind](content, moments)
        path.write_bytes(changed)
        return changed != content
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link to nowhere":
        path.symlink_to("nowhere")
    elif kind == "a link to itself":
        path.symlink_to(path.name)
    elif kind == "another file's":
        others = sorted(other for other in path.parent.iterdir() if other.is_file() and other.suffix == path.suffix)
        if not others:
            path.write_bytes(content)
            return False
        path.write_bytes(others[0].read_bytes())
    return True


def try_damages(work: Path, every: int, first: int = 0) -> Tally:
    """Damage files of runs in every `every`-th way, beginning with the `first`."""
    tally = Tally("damaged files")
    work.mkdir()
    out = work / "out"
    words = (*WORDS, f"out={out}")
    whole_run = bfl_run(work, *words, prepare=lambda: set_sync(0.0))
    assert whole_run.code == 0, whole_run.err
    whole = contents(only_folder(out))
    finished, begun = work / "finished", work / "begun"
    out.rename(finished)
    _kill_half_way(work, out, words)
    out.rename(begun)
    names = [sorted(_files(folder)) for folder in (finished, begun)]
    cases = [
        *((finished, name, kind) for name, kind in itertools.product(names[0], (*CHANGES, *KINDS))),
        *((begun, name, kind) for name, kind in itertools.product(names[1], (*CHANGES, *KINDS))),
    ]
    random.Random(1).shuffle(cases)
    for index in range(first % every, len(cases), every):
        kept, name, kind = cases[index]
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(kept, out)
        folder = only_folder(out)
        if not damage(folder / name, kind, random.Random(index)):
            continue
        case = f"{kept.name} run, {name}: {kind}"
        if kept is finished:
            table = work / "table.md"
            table.unlink(missing_ok=True)
            report = bfl_report(work, str(out), "--to", str(table), "--html", "page.html")
            tally.add(_judge_report(report, name, table), f"bfl-report: {case}", report)
        ended = bfl_run(work, *words)
        verdict, others = _judge(ended, folder, name, whole, finished=kept is finished)
        tally.add(verdict, f"bfl-run: {case}; other files: {' '.join(others)}", ended)
        if (work / "made").exists():
            tally.add("traceback", f"executed: {case}", ended)
    return tally


def _kill_half_way(work: Path, out: Path, words: tuple[str, ...]) -> None:
    log = work / "points"

    def start(kill: int | None, log_: Path | None) -> Ended:
        def prepare() -> None:
            set_sync(0.0)
            Points(out, kill, log_).install()

        return bfl_run(work, *words, prepare=prepare)

    assert start(None, log).code == 0
    points = log.read_text().splitlines()
    last = max(i for i, point in enumerate(points) if "os.rename" in point and "manifest.json" in point)
    shutil.rmtree(out)
    assert start(last, None).code == -signal.SIGKILL


def _files(out: Path) -> list[str]:
    folder = only_folder(out)
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return [str(path.relative_to(folder)) for path in files]


def _judge(ended: Ended, folder: Path, name: str, whole: dict[str, bytes], finished: bool) -> tuple[str, list[str]]:
    if found := fault(ended):
        return found, []
    if ended.code:
        said = Path(name).name in ended.err or (name.startswith("checkpoint") and "checkpoint" in ended.err)
        return ("told" if said else "unnamed"), []
    others = differing(folder, whole)
    if finished and f"changed since: {name}" in ended.out:
        return "told", others
    if finished and others == [name] and not _is_of_numbers(name):
        return "left alone", others
    return ("silent" if others else "same bytes"), others


def _judge_report(report: Ended, name: str, table: Path) -> str:
    if found := fault(report):
        return found
    said = report.err + report.out + (table.read_text() if table.exists() else "")
    if Path(name).name in said:
        return "told"
    if report.code:
        return "unnamed"
    return "silent" if _is_of_numbers(name) else "left alone"


def _is_of_numbers(name: str) -> bool:
    """Tell whether somebody reads a result in this file of a finished run."""
    return name == "summary.json" or (name.endswith(".csv") and name not in ("partition.csv", "timing.csv"))
