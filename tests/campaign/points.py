"""Points of a process at which it changes files: where it can be killed, or its disk begin to fail.

The points are found by Python's audit events (files opened for writing, renamed, removed, cut, folders made and
removed) and by the writes into files; in the middle of a write means that half of the bytes have reached the file.
"""

import builtins
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Points:
    """Counts what is done to files below a folder; at one point the process is killed, or the disk begins to fail."""

    def __init__(self, below: Path, at: int | None, log: Path | None = None, failure: int | None = None) -> None:
        self._below, self._at, self._log, self._failure = str(below), at, log, failure
        self.seen: list[str] = []

    def install(self) -> None:
        """Listen from now on; nothing takes that back."""
        sys.addaudithook(self._hear)
        opener = io.open

        def open_(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            stream = opener(file, mode, *arguments, **named)
            return _Torn(stream, self, str(file)) if self._is_ours(file) and set(mode) & set("wax+") else stream

        builtins.open = io.open = open_  # type: ignore[assignment]

    def reach(self, what: str, path: object, half: Callable[[], object] | None = None) -> None:
        self.seen.append(f"{what} {str(path).removeprefix(self._below)}")
        if self._log is not None:
            descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, f"{self.seen[-1]}\n".encode())
            os.close(descriptor)
        number = len(self.seen) - 1
        if number == self._at and half is not None:
            half()
        if number == self._at and self._failure is None:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._at is not None and number >= self._at and self._fails(what):
            assert self._failure is not None
            raise OSError(self._failure, os.strerror(self._failure), str(path))

    def _fails(self, what: str) -> bool:
        """From its point on, a disk that is full can still remove and rename; one that is read-only cannot."""
        return self._failure == errno.EROFS or what in ("open", "write", "os.mkdir")

    def _is_ours(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and str(os.fspath(path)).startswith(self._below)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            if self._is_ours(arguments[0]) and isinstance(arguments[2], int) and arguments[2] & WRITING:
                self.reach("open", arguments[0])
        elif event in EVENTS and (self._is_ours(arguments[0]) or not str(arguments[0]).startswith("/")):
            self.reach(event, arguments[0])


class _Torn:
    """A file whose writes are points: at the fatal one half of the bytes arrive."""

    def __init__(self, stream: Any, points: Points, name: str) -> None:
        self._stream, self._points, self._name = stream, points, name

    def write(self, data: Any) -> Any:
        def half() -> None:
            self._stream.write(data[: len(data) // 2])
            self._stream.flush()

        self._points.reach("write", self._name, half)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> "_Torn":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)
