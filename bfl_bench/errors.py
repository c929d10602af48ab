"""The errors a user can meet. Each is one clear sentence; the command line prints it without a traceback."""


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
