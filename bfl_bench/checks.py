"""Check config values against the annotations of what they configure.

Every configurable thing is a callable whose parameters carry their types and, where a type says too little, a range:

    @dataclass(frozen=True)
    class Dirichlet:
        alpha: Annotated[float, Above(0)]
        mode: Literal["per_class", "per_client"]

`check_arguments` compares a mapping of config values with such a signature and raises one `ConfigError` that names
the key, what was given and what is allowed. The same works for a user's own class.
"""

import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from bfl_bench.errors import ConfigError


@dataclass(frozen=True)
class Above:
    """A number strictly above `bound`."""

    bound: float

    def __contains__(self, value: float) -> bool:
        return value > self.bound

    def __str__(self) -> str:
        return f"above {self.bound:g}"


@dataclass(frozen=True)
class AtLeast:
    """A number of at least `bound`."""

    bound: float

    def __contains__(self, value: float) -> bool:
        return value >= self.bound

    def __str__(self) -> str:
        return f"of at least {self.bound:g}"


@dataclass(frozen=True)
class Between:
    """A number in the closed interval [low, high]."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Interval:
    """A list of two numbers, the lower first."""

    def __contains__(self, value: list[float]) -> bool:
        return len(value) == 2 and value[0] < value[1]

    def __str__(self) -> str:
        return "(two numbers, the lower first)"


LARGEST_INT = 2**63 - 1  # of a tensor's whole numbers
LARGEST_FLOAT = 3.4e38  # of single precision
SMALLEST_FLOAT = 1e-30  # so that one divided by it, times a little, is a number of single precision, too

Bound = Above | AtLeast | Between | Interval


def check_arguments(
    target: Callable[..., Any],
    values: Mapping[str, Any],
    supplied: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The checked keyword arguments for `target`.

    `supplied` names parameters that the program itself fills in; `also` names keys that stand beside these in the
    config, for the hint in a message about a misspelt one.
    """
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)
    signature = inspect.signature(target).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values())
    parameters = {
        name: parameter
        for name, parameter in signature.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name not in supplied
    }
    for name in values:
        if name not in parameters and not takes_any:
            raise ConfigError(name, values[name], unknown_key(name, (*parameters, *also)))
    for name, parameter in parameters.items():
        if name in values:
            check_value(name, values[name], hints.get(name, Any))
        elif parameter.default is parameter.empty:
            raise ConfigError(name, None, f"{describe(hints.get(name, Any))}; the key is missing")
    return dict(values)


def unknown_key(name: str, keys: Sequence[str], elsewhere: Sequence[str] = ()) -> str:
    """Say which keys there are, and which was perhaps meant: a similar one, or one of the same name `elsewhere`."""
    close = get_close_matches(name, keys, 1) or list(elsewhere)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    return f"no such key; the keys are {', '.join(keys)}{hint}" if keys else "no such key"


def check_value(key: str, value: Any, annotation: Any) -> None:
    if not _fits(value, annotation):
        limit = ", numbers being at most 2^63 - 1 or, with a fraction, 3.4e38" if _is_huge(value) else ""
        limit += ", fractions being 0 or at least 1e-30" if _is_tiny(value) else ""
        raise ConfigError(key, value, describe(annotation) + limit)


def _is_huge(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_huge, value))
    if isinstance(value, float):
        return math.isfinite(value) and abs(value) > LARGEST_FLOAT
    return isinstance(value, int) and abs(value) > LARGEST_INT


def _is_tiny(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_tiny, value))
    return isinstance(value, float) and 0 < abs(value) < SMALLEST_FLOAT


def _fits(value: Any, annotation: Any) -> bool:
    if annotation is Any:
        return True
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _fits(value, arguments[0]) and (
            value is None or all(value in bound for bound in arguments[1:] if isinstance(bound, Bound))
        )
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, arguments[1]) for item in value.values())
    if annotation is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and abs(value) <= LARGEST_FLOAT and not _is_tiny(value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INT
    if annotation is None:
        return value is None
    return isinstance(value, annotation) if isinstance(annotation, type) else True


def describe(annotation: Any) -> str:
    """An annotation in words, for the end of an error message."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return " ".join(
            [describe(arguments[0]), " and ".join(str(bound) for bound in arguments[1:] if isinstance(bound, Bound))]
        )
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is Literal:
        return ", ".join(str(choice) for choice in arguments)
    if origin is list:
        return f"a list of which each is {describe(arguments[0])}"
    words = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
    return words.get(
        annotation,
        "null" if annotation in (None, type(None)) else getattr(annotation, "__name__", "anything"),
    )
