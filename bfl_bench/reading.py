"""The one reader of files that anybody may have written: a run's, or what lies where a run's should.

Whatever is in them, reading ends: with plain values, or with a `DamagedError` that names the file. Sizes and depths are
bounded, nothing is executed, and only regular files are opened, so that a pipe cannot keep a reader waiting. Knows no
torch, and numpy only where arrays are read.
"""

import csv
import functools
import io
import json
import math
import os
import re
import stat
import zipfile
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import yaml

from bfl_bench.errors import DamagedError

if TYPE_CHECKING:
    import numpy as np

LARGEST = 2**30  # bytes of a file
LARGEST_CONFIG = 2**20
LARGEST_IN_SECTIONS = 2**16  # as sections are remembered
DEEPEST = 40  # lists and mappings within one another
PLAIN = (str, int, float, bool, type(None))

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where it is installed


class Readable(Protocol):
    """A path, or its like in an archive."""

    def read_text(self) -> str: ...


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Read a regular file of a bounded size; `FileNotFoundError` where there is none."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # so that a pipe without a writer does not block
        with os.fdopen(file, "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError(f"{path} is damaged: it is no regular file")
            if status.st_size > largest:
                raise DamagedError(
                    f"{path} is damaged: it has {status.st_size:,} bytes, at most {largest:,} make sense"
                )
            return stream.read(largest + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None


def read_text(path: Readable, largest: int = LARGEST) -> str:
    try:
        return read_bytes(path, largest).decode() if isinstance(path, Path) else path.read_text()
    except UnicodeDecodeError:
        raise DamagedError(f"{path} is damaged: it is no text") from None


def read_json(path: Readable) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        content: Any = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise DamagedError(f"{path} is damaged: it holds no JSON object")
    return content


def read_yaml(path: Readable) -> dict[str, Any]:
    """Read a YAML mapping of plain values; aliases, tags and dates are refused. What it returns is not to be changed.

    Runs share most sections of their configs, so a section that was read before is not read again. A file that does not
    fall into sections, keys of the first level with what is below them, is read in one piece, and so is a damaged one.
    """
    text = read_text(path, LARGEST_CONFIG)
    if _NO_SECTION.search(text) or len(text) > LARGEST_IN_SECTIONS:
        return _read_whole(path, text)
    content: dict[str, Any] = {}
    try:
        for section in _SECTION.split(text)[1:]:
            content |= _read_section(section)
    except (DamagedError, yaml.YAMLError, ValueError):
        return _read_whole(path, text)
    return content


_SECTION = re.compile(r"^(?=[A-Za-z_])", re.MULTILINE)
_NO_SECTION = re.compile(r"\A[^A-Za-z_]|\A\Z|^(?![A-Za-z_ \n]|- |\Z)", re.MULTILINE)


@functools.lru_cache(maxsize=4096)
def _read_section(text: str) -> dict[str, Any]:
    return _read_whole(Path("section"), text)


def _read_whole(path: Readable, text: str) -> dict[str, Any]:
    try:
        _check_events(path, text)
        content: Any = yaml.load(text, _LOADER)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DamagedError(f"{path} is damaged: {reason}") from None
    if not isinstance(content, dict):
        raise DamagedError(f"{path} is damaged: it holds no keys with values")
    _check_plain(path, content)
    return content


def _check_events(path: Readable, text: str) -> None:
    """Refuse what grows when it is loaded, before anything is."""
    depth = 0
    for event in yaml.parse(text, _LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise DamagedError(f"{path} is damaged: it has an alias, *{event.anchor}")
        if (tag := getattr(event, "tag", None)) is not None:
            raise DamagedError(f"{path} is damaged: it has a tag, {tag}")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise DamagedError(f"{path} is damaged: it is nested more than {DEEPEST} deep")


def _check_plain(path: Readable, node: Any) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            if not isinstance(key, str):
                raise DamagedError(f"{path} is damaged: a key is {key!r}, no text")
            _check_plain(path, value)
    elif isinstance(node, list):
        for item in node:
            _check_plain(path, item)
    elif not isinstance(node, PLAIN):
        raise DamagedError(f"{path} is damaged: a value is {node!r}, no text and no number")


def read_table(path: Readable) -> tuple[list[str], list[list[str]]]:
    """Read a CSV file: its columns, and its rows, each with a cell for every column."""
    try:
        lines = list(csv.reader(read_text(path).splitlines()))
    except csv.Error as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    if not lines:
        raise DamagedError(f"{path} is damaged: it is empty")
    columns, *rows = lines
    for number, row in enumerate(rows, start=2):
        if len(row) != len(columns):
            raise DamagedError(f"{path} is damaged: line {number} has {len(row)} cells for {len(columns)} columns")
    return columns, rows


def read_arrays(path: Path) -> dict[str, "np.ndarray[Any, Any]"]:
    """Read the arrays of an .npz file; what they announce has to be there before room is made for it."""
    import numpy as np

    try:
        with zipfile.ZipFile(io.BytesIO(read_bytes(path))) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > LARGEST:
                raise DamagedError(f"{path} is damaged: unpacked it has more than {LARGEST:,} bytes")
            found: dict[str, np.ndarray[Any, Any]] = {}
            for member in members:
                with archive.open(member) as stream:
                    found[member.filename.removesuffix(".npy")] = _read_array(stream, member.file_size)
            return found
    except FileNotFoundError:
        raise
    except (OSError, EOFError, ValueError, TypeError, LookupError, zipfile.BadZipFile, zlib.error) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None


def _read_array(stream: IO[bytes], size: int) -> "np.ndarray[Any, Any]":
    import numpy as np

    content = stream.read(size + 1)
    header = io.BytesIO(content)
    version = np.lib.format.read_magic(header)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(header)
    if math.prod(shape) * dtype.itemsize != len(content) - header.tell():
        raise ValueError(
            f"an array of shape {shape} is announced, and {len(content) - header.tell():,} bytes are there"
        )
    array: np.ndarray[Any, Any] = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    return array
