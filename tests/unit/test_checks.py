"""Config values against annotations: what fits passes unchanged, what does not is named in one sentence."""

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

import pytest

from bfl_bench.checks import Above, AtLeast, Between, check_arguments, check_value, describe
from bfl_bench.errors import BflError, ConfigError, as_written
from bfl_bench.method import LocalSettings


@dataclass(frozen=True)
class Dataclass:
    rate: Annotated[float, Above(0)]
    mode: Literal["per_class", "per_client"]
    steps: int = 3


class Plain:
    def __init__(self, rate: Annotated[float, Above(0)], *, mode: Literal["per_class", "per_client"], steps: int = 3):
        self.rate = rate


def function(rate: Annotated[float, Above(0)], mode: Literal["per_class", "per_client"], steps: int = 3) -> None: ...


targets = pytest.mark.parametrize("target", [Dataclass, Plain, function])
GOOD = {"rate": 0.5, "mode": "per_class"}


@targets
def test_good_values_come_back_unchanged(target: Callable[..., Any]) -> None:
    assert check_arguments(target, GOOD) == GOOD  # defaults stay with the target
    assert check_arguments(target, {**GOOD, "steps": 7}) == {**GOOD, "steps": 7}
    assert check_arguments(target, {**GOOD, "rate": 2}) == {**GOOD, "rate": 2}  # a whole number is a number
    target(**check_arguments(target, GOOD))


@targets
def test_unknown_key(target: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_arguments(target, {**GOOD, "stepps": 3})
    message = str(caught.value)
    assert caught.value.key == "stepps"
    assert "stepps" in message
    assert "3" in message
    assert "rate, mode, steps" in message
    assert "did you mean steps?" in message
    with pytest.raises(ConfigError, match="no such key") as caught:
        check_arguments(target, {**GOOD, "zzz": 3})
    assert "did you mean" not in str(caught.value)


def test_hint_knows_the_keys_beside() -> None:
    with pytest.raises(ConfigError, match=r"did you mean dataset\?"):
        check_arguments(Dataclass, {**GOOD, "datset": 3}, also=("dataset", "model"))


@targets
def test_missing_key(target: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="rate") as caught:
        check_arguments(target, {"mode": "per_class"})
    assert caught.value.key == "rate"
    assert "missing" in str(caught.value)
    assert "a number above 0" in str(caught.value)


def test_supplied_parameters_are_neither_asked_for_nor_allowed() -> None:
    def network(input_shape: tuple[int, ...], num_classes: int, width: int) -> None: ...

    supplied = ("input_shape", "num_classes")
    assert check_arguments(network, {"width": 3}, supplied) == {"width": 3}
    with pytest.raises(ConfigError, match="num_classes"):
        check_arguments(network, {"width": 3, "num_classes": 10}, supplied)


@targets
@pytest.mark.parametrize(
    ("key", "value"),
    [("rate", "0.1"), ("rate", 0), ("mode", "per_clas"), ("mode", None), ("steps", 2.0), ("steps", True)],
)
def test_wrong_values(target: Callable[..., Any], key: str, value: object) -> None:
    allowed = {"rate": "a number above 0", "mode": "per_class, per_client", "steps": "a whole number"}
    with pytest.raises(ConfigError) as caught:
        check_arguments(target, {**GOOD, key: value})
    assert str(caught.value) == f"{key}: got {as_written(value)}, allowed: {allowed[key]}"


FITS: list[tuple[Any, list[Any], list[Any]]] = [
    (int, [0, -3, 2**63 - 1], [True, 1.0, "1", None, [1], math.nan]),
    (float, [0, 0.5, -1e38], [True, "0.5", None, math.nan, math.inf, -math.inf, [0.5]]),
    (str, ["", "a"], [1, None, True, ["a"]]),
    (bool, [True, False], [0, 1, "true", None]),
    (Annotated[float, Above(0)], [1e-30, 5], [0, -0.0, -1, math.nan, math.inf, "1", None, True]),
    (Annotated[int, AtLeast(1)], [1, 2], [0, -1, 1.5, True, None]),
    (Annotated[float, Between(0, 0.5)], [0, 0.5, 0.25], [-1e-9, 0.500001, math.nan, None]),
    (Annotated[int, AtLeast(2), Between(0, 4)], [2, 4], [1, 5]),
    (Literal["a", "b"], ["a", "b"], ["c", "", None, 1]),
    (Literal[1, "auto"], [1, "auto"], [True, 1.0, "1", 2]),
    (Optional[int], [None, 3], [3.5, "3", True]),  # noqa: UP045
    (int | None, [None, 3], [3.5, "null"]),
    (Annotated[float, Above(0)] | None, [None, 0.1], [0, -1, "none"]),
    (Annotated[float | None, Above(0)], [None, 0.1], [0, -1, "none"]),
    (Union[int, str], [3, "x"], [None, 0.5, True, [3]]),  # noqa: UP007
    (Literal["reflect"] | Annotated[int, Between(0, 255)], ["reflect", 0, 255], ["zero", 256, -1, 0.5]),
    (list[int], [[], [1, 2]], [(1, 2), 1, None, [1.5], [True], ["1"], "12"]),
    (list[Annotated[int, AtLeast(1)]], [[1, 5]], [[1, 0], [None]]),
    (list[list[float]], [[[0.1], []]], [[0.1], [["a"]]]),
    (dict[str, float], [{}, {"a": 1}], [{"a": "1"}, [("a", 1)], None]),
    (Any, [None, 3, "x", [object]], []),
]


@pytest.mark.parametrize(("annotation", "good", "bad"), FITS, ids=lambda value: str(value)[:50])
def test_types_and_ranges(annotation: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check_value("some.key", value, annotation)
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            check_value("some.key", value, annotation)
        assert str(caught.value) == f"some.key: got {as_written(value)}, allowed: {describe(annotation)}"


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "a whole number"),
        (float, "a number"),
        (str, "a text"),
        (bool, "true or false"),
        (Annotated[float, Above(0)], "a number above 0"),
        (Annotated[int, AtLeast(1)], "a whole number of at least 1"),
        (Annotated[float, Between(0, 0.5)], "a number from 0 to 0.5"),
        (Literal["a", "b"], "a, b"),
        (Annotated[float, Above(0)] | None, "a number above 0 or null"),
        (Literal["reflect"] | int, "reflect or a whole number"),
        (list[Annotated[int, AtLeast(1)]], "a list of which each is a whole number of at least 1"),
        (Path, "Path"),
    ],
)
def test_annotations_in_words(annotation: Any, words: str) -> None:
    assert describe(annotation) == words


def test_a_users_own_module_with_postponed_annotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`from __future__ import annotations` turns every annotation into a text."""
    (tmp_path / "users_module_of_test_checks.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from typing import Annotated\n"
        "from bfl_bench.checks import AtLeast\n"
        "from bfl_bench.inference.point import PointMethod\n"
        "@dataclass(frozen=True)\n"
        "class Mine(PointMethod):\n"
        "    power: Annotated[int, AtLeast(2)]\n"
        "def function(power: Annotated[int, AtLeast(2)], untyped, other=None): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import users_module_of_test_checks as module  # type: ignore[import-not-found]

    good = {"name": "mine", "weights": "size", "power": 2}
    assert check_arguments(module.Mine, good) == good
    for bad in ({"power": 1}, {"weights": "sise"}, {"name": 3}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            check_arguments(module.Mine, good | bad)
    check_arguments(module.function, {"power": 2, "untyped": object()})
    with pytest.raises(ConfigError, match="of at least 2"):
        check_arguments(module.function, {"power": 1, "untyped": 0})
    with pytest.raises(ConfigError, match=r"untyped.*missing"):
        check_arguments(module.function, {"power": 3})


def test_local_settings() -> None:
    good: dict[str, Any] = {
        "epochs": 1,
        "batch_size": 8,
        "lr": 0.1,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "clip": None,
        "optimizer": "adam",
        "betas": [0.9, 0.99],
        "schedule": "cosine",
    }
    LocalSettings(**check_arguments(LocalSettings, good))
    for key, value in {
        "epochs": 0,
        "batch_size": 2.5,
        "lr": 0.0,
        "momentum": 1.0,
        "weight_decay": -1e-3,
        "clip": 0.0,
        "optimizer": 3,
    }.items():
        with pytest.raises(ConfigError, match=f"^{key}: got {value}"):
            check_arguments(LocalSettings, {**good, key: value})


def test_config_errors_travel_between_processes_and_know_where_they_are() -> None:
    error = ConfigError("lr", -1, "a number above 0").below("local")
    assert str(error) == "local.lr: got -1, allowed: a number above 0"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.key, again.got, again.allowed) == (str(error), "local.lr", -1, "a number above 0")
    assert isinstance(again, BflError)
    assert again.exit_code == 2
    assert ConfigError("", 1, "x").below("model").key == "model"


def test_values_are_said_as_they_are_written() -> None:
    said = {"null": None, "true": True, "false": False, "1": 1, "0.5": 0.5, "nan": float("nan"), "'a'": "a", "''": ""}
    for text, value in said.items():
        assert str(ConfigError("key", value, "else")) == f"key: got {text}, allowed: else"
    assert as_written([1, "a", [None, True]]) == "[1, 'a', [null, true]]"
    assert as_written({"a": None, "b": {"c": [False]}}) == "{a: null, b: {c: [false]}}"


@pytest.mark.parametrize("value", [1e-31, -1e-300, 5e-324])
def test_fractions_whose_reciprocals_overflow_are_refused(value: float) -> None:
    check_value("x", 1e-30, float)
    check_value("x", 0.0, float)
    with pytest.raises(ConfigError, match="fractions being 0 or at least 1e-30"):
        check_value("x", value, Annotated[float, AtLeast(-1)])
