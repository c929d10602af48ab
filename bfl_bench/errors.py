"""The errors a user can meet. Each is one clear sentence; the command line prints it without a traceback."""

import sysconfig
import traceback
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parent
_NOT_A_USERS = (
    str(_PACKAGE),
    str(_PACKAGE.parent / "hydra_plugins"),
    *(str(Path(path).resolve()) for name in ("stdlib", "purelib", "platlib") for path in {sysconfig.get_path(name)}),
    "<",
)


def as_written(value: object) -> str:
    """Say a value as one writes it in a config: null, true, [1, 2], {key: value}; a text in quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {as_written(item)}' for key, item in value.items())}}}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value)


class BflError(Exception):
    """Something the user can act on; `exit_code` is what the command returns for it."""

    exit_code = 1


class ConfigError(BflError):
    """The experiment as written cannot run: `key: got X, allowed: Y`."""

    exit_code = 2

    def __init__(self, key: str, got: object, allowed: str) -> None:
        super().__init__(f"{key}: got {as_written(got)}, allowed: {allowed}")
        self.key, self.got, self.allowed = key, got, allowed

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, object, str]]:
        return ConfigError, (self.key, self.got, self.allowed)  # sweeps send errors between processes

    def below(self, prefix: str) -> "ConfigError":
        """The same error, its key prefixed by where the object stands in the config."""
        return ConfigError(f"{prefix}.{self.key}" if self.key else prefix, self.got, self.allowed)


class UnsuitableError(BflError):
    """A network, data or numbers that a part cannot take: what it would need instead.

    Numerics raise it without knowing any config; `build` names the key, which is `model` or what `key` says.
    """

    def __init__(self, needed: str, key: str = "model") -> None:
        super().__init__(needed)
        self.needed, self.key = needed, key

    def __reduce__(self) -> tuple[type["UnsuitableError"], tuple[str, str]]:
        return UnsuitableError, (self.needed, self.key)


class PartError(BflError):
    """A user's own part breaks its contract: which part, what it returned, what was expected."""


class DataError(BflError):
    """A dataset is missing, incomplete or altered."""


class RunError(BflError):
    """A run folder cannot be used: locked, unwritable, or made by another config."""


class DamagedError(RunError):
    """A file of a run is not what was written: cut, altered, of another kind."""


class DivergedError(BflError):
    """A loss, a parameter or a posterior became NaN or infinite."""


class OwnFrame(NamedTuple):
    """Where an error passed a user's own file."""

    file: str
    line: int
    innermost: bool  # nothing of this package came after it

    def __str__(self) -> str:
        return f"{Path(self.file).name}, line {self.line}"


def find_own_frame(error: BaseException) -> OwnFrame | None:
    """Find the innermost frame of a user's own file that an error passed on its way to this package; None: none.

    An error that comes from a worker process has it with it, as `note_own_frame` left it.
    """
    if (noted := getattr(error, "own_frame", None)) is not None:
        return OwnFrame(*noted)
    inside, found = False, None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(str(_PACKAGE)):
            inside, found = True, found and found._replace(innermost=False)
        elif inside and "-packages" not in frame.filename and not frame.filename.startswith(_NOT_A_USERS):
            found = OwnFrame(frame.filename, frame.lineno or 0, innermost=True)
    return found


def note_own_frame(error: BaseException) -> None:
    """Keep what `find_own_frame` finds for another process, where there is no traceback."""
    error.__dict__["own_frame"] = find_own_frame(error)
