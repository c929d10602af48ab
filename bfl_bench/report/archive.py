"""Runs in an archive: what tables and pages read of many run folders, in one file, read without unpacking.

NAME.tar.xz holds a folder per run with the files of `KEPT`; `tar xf` makes run folders of it again. Numbers in tables
have seven significant digits there, as float32 has no more; of clients.csv and reliability.csv the last round is kept.
"""

import csv
import io
import lzma
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from bfl_bench import reading, records
from bfl_bench.errors import BflError, DamagedError
from bfl_bench.identity import RUNS, complete, folder_name, read_config

SUFFIX = ".tar.xz"
TRIMMED = (records.CLIENTS, records.RELIABILITY)  # of which only the last round is read
TABLES = (records.METRICS, records.TIMING, records.WEIGHTS, records.PARTITION_COUNTS, *TRIMMED)
KEPT = (records.CONFIG, records.SUMMARY, records.ENVIRONMENT, *TABLES)
MOST_BYTES = 256 * 2**20  # of all files of an archive together, unpacked
DIGITS = 7


class ArchiveError(BflError):
    """An archive that cannot be read; the sentence says why."""


@dataclass(frozen=True)
class Archived:
    """A folder or a file in an archive, read like a path."""

    archive: Path
    inside: str  # RUN or RUN/FILE
    files: Mapping[str, bytes] = field(repr=False, compare=False)  # of the whole archive, by their places in it

    @property
    def name(self) -> str:
        return self.inside.rpartition("/")[2]

    def __truediv__(self, name: str) -> "Archived":
        return Archived(self.archive, f"{self.inside}/{name}", self.files)

    def __str__(self) -> str:
        return f"{self.archive}/{self.inside}"

    def exists(self) -> bool:
        return self.inside in self.files

    def read_text(self) -> str:
        if self.inside not in self.files:
            raise FileNotFoundError(f"{self} does not exist")
        return self.files[self.inside].decode()


def list_archived(archive: Path, called: Path | None = None) -> list[Archived]:
    """List the folders of runs in an archive, which messages name as the user does."""
    files = read_archive(archive.resolve())
    names = [name.removesuffix(f"/{records.CONFIG}") for name in files if name.endswith(f"/{records.CONFIG}")]
    return [Archived(called or archive, name, files) for name in sorted(names)]


@cache
def read_archive(archive: Path) -> Mapping[str, bytes]:
    """Read all files of an archive into memory, of those names that runs have; anything else in it is ignored."""
    files: dict[str, bytes] = {}
    left = MOST_BYTES
    try:
        with tarfile.open(fileobj=io.BytesIO(reading.read_bytes(archive)), mode="r:xz") as tar:
            for member in tar:
                left -= member.size
                if left < 0:
                    raise ArchiveError(f"{archive} holds more than {MOST_BYTES // 2**20} MB")
                folder, _, name = member.name.rpartition("/")
                if not member.isfile() or name not in KEPT or not folder or "/" in folder:
                    continue
                content = tar.extractfile(member)
                assert content is not None  # of a file
                files[member.name] = content.read()
    except (DamagedError, OSError, EOFError, ValueError, lzma.LZMAError, tarfile.TarError) as error:
        raise ArchiveError(f"{archive} is no archive of runs, or damaged ({error})") from None
    return files


def pack(folders: Iterable[records.Place], archive: Path) -> list[str]:
    """Add runs to an archive, which need not exist yet; a run of the same name is replaced. Return all names."""
    runs: dict[str, dict[str, bytes]] = {}
    if archive.exists():
        for earlier in list_archived(archive):
            runs[earlier.name] = _read_kept(earlier)
    for folder in folders:
        name, files = describe_run(folder)
        runs[name] = files
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:xz", preset=9) as tar:
        for name in sorted(runs):
            for file, content in runs[name].items():
                member = tarfile.TarInfo(f"{name}/{file}")  # without owner and time: the same runs, the same bytes
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    archive.parent.mkdir(parents=True, exist_ok=True)
    records.write_bytes(archive, memory.getvalue())
    read_archive.cache_clear()
    return sorted(runs)


def describe_run(folder: records.Place) -> tuple[str, dict[str, bytes]]:
    """Give a run's name and the content of the files that are kept; paths of the machine become the defaults."""
    files, config = _read_kept(folder), read_config(folder)
    if config is None:
        raise ArchiveError(f"{folder} is not the folder of a run")
    config |= {"out": "outputs", **{key: complete(config)[key] for key in RUNS}}
    if config["data_dir"] != records.STAND_IN:
        config["data_dir"] = None
    files[records.CONFIG] = yaml.safe_dump(config, sort_keys=False).encode()
    for name in TABLES:
        if name in files:
            files[name] = _shorten(files[name].decode(), last_only=name in TRIMMED).encode()
    return folder_name(config), files


def _read_kept(folder: records.Place) -> dict[str, bytes]:
    return {name: (folder / name).read_text().encode() for name in KEPT if (folder / name).exists()}


def _shorten(table: str, last_only: bool) -> str:
    head, *lines = csv.reader(table.splitlines())
    if last_only and "round" in head:
        place = head.index("round")
        lines = [line for line in lines if line[place] == lines[-1][place]]
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([head, *([_round(cell) for cell in line] for line in lines)])
    return text.getvalue()


def _round(cell: str) -> str:
    """Write a number with at most so many digits; whole numbers stay."""
    if not cell or cell.lstrip("-").isdigit():
        return cell
    return records.format_cell(float(f"{float(cell):.{DIGITS}g}"))
