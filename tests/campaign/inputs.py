"""Bad words: values for every key of every group, made from the key's annotation by hypothesis.

A value that does not fit the annotation must be refused with exit code 2 and a sentence that names the key, with
nothing written; any other must end in a clean way, whatever it asks for.
"""

import inspect
import itertools
import pkgutil
import random
import shutil
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from bfl_bench.aggregators.server_step import ServerStep
from bfl_bench.build.planning import CheckpointSettings, Settings
from bfl_bench.checks import check_value
from bfl_bench.commands.words import read_by_hydra
from bfl_bench.engines.worker import EvalSettings
from bfl_bench.errors import ConfigError
from bfl_bench.groups import PARTS
from bfl_bench.method import LocalSettings
from bfl_bench.models.gaussian import GaussianSettings
from bfl_bench.records import config_folder
from tests.campaign.driving import Ended, Tally, bfl_run, fault
from tests.composing import NEEDS, SMALL

SECTIONS = {"local": LocalSettings, "server": ServerStep, "eval": EvalSettings, "checkpoint": CheckpointSettings}
LEFT_OUT = ("force", "dry_run", "out", "data_dir")
SUPPLIED = "self return input_shape num_classes means variances weights generator aggregator".split()
HOSTILE = [
    "null", "true", "-1", "0", "1e400", "-1e400", "nan", "inf", "-inf", str(2**63), "1" + "0" * 400, "1e-400",
    "''", "' '", "abc", "..", "/", "~", "[]", "[[]]", "{}", "{a:1}", "[1,a]", "'${seed}'", "'${nothing}'", "'???'",
    "'\\ud83d\\ude00'", "äöü", "'a\\nb'", "'%s%n'", "'<script>'", "'; rm -rf /'", "[" + "1," * 500 + "1]",
    "builtins.dict", "os.system", "0x10", "1_000", "1e3", "2.0", "'1'", "[null]", "{_target_:os.system}",
]  # fmt: skip


@dataclass(frozen=True)
class Key:
    key: str
    annotation: Any
    words: tuple[str, ...]  # what chooses the option that has the key


def find_keys() -> list[Key]:
    """List every key that the command line knows, with its annotation."""
    found = [*_of("", Settings, ())]
    for section, cls in SECTIONS.items():
        found += _of(f"{section}.", cls, ())
    found += _of("model.", GaussianSettings, ("method=fvb", "aggregator=eaa"))
    for group in PARTS:
        for path in sorted((config_folder() / group).glob("[!_]*.yaml")):
            if path.stem == "ray":  # is an extra
                continue
            words = (f"{group}={path.stem}", *_what_it_needs(group, path.stem))
            if (target := _target(path)) is not None:
                found += _of(f"{group}.", pkgutil.resolve_name(target), words)
    unique = {(key.key, str(key.annotation)): key for key in found if key.key not in LEFT_OUT}
    return list(unique.values())


def _target(path: Path) -> str | None:
    """Read what an option names, itself or through an option that it begins with."""
    content = yaml.safe_load(path.read_text()) or {}
    if "_target_" in content:
        return str(content["_target_"])
    below = (path.with_name(f"{name}.yaml") for name in content.get("defaults", ()) if isinstance(name, str))
    return next((found for file in below if file.exists() and (found := _target(file))), None)


def _what_it_needs(group: str, name: str) -> tuple[str, ...]:
    if group == "method":
        return tuple(NEEDS.get(name, ())) + (("aggregator=eaa",) if name.startswith("fvb") else ())
    if group == "aggregator":
        return () if name == "none" else ("method=fvb",)
    return ("data_dir=stand-in",) if group in ("dataset", "model") else ()


def _of(prefix: str, target: Any, words: tuple[str, ...]) -> Iterator[Key]:
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)
    for name, annotation in hints.items():
        if name not in SUPPLIED or (name == "weights" and prefix == "method."):
            yield Key(prefix + name, annotation, words)


def values(annotation: Any) -> "st.SearchStrategy[str]":
    """Make words for a key: of its own kind, at and beyond its bounds, and of every other kind."""
    return st.one_of(st.sampled_from(HOSTILE), _near(annotation).map(_as_word))


def draw_words(annotation: Any, num: int, seed: int) -> list[str]:
    """Draw at most so many different words for a key."""
    drawn: dict[str, None] = {}

    @seeded(seed)
    @settings(
        max_examples=3 * num + 5,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # a busy machine is slow
    )
    @given(values(annotation))
    def draw(word: str) -> None:
        drawn[word] = None

    draw()
    return random.Random(seed).sample(list(drawn), min(num, len(drawn)))


def _near(annotation: Any) -> "st.SearchStrategy[Any]":
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        names = ("bound", "low", "high")
        ends = [getattr(bound, name) for bound in arguments[1:] for name in names if hasattr(bound, name)]
        steps = [end + step for end in ends for step in (-1, -1e-9, 0, 1e-9, 1)]
        near = _near(arguments[0])
        return st.one_of(near, st.sampled_from([*steps, *map(int, steps)])) if steps else near
    if origin in (Union, types.UnionType):
        return st.one_of(*map(_near, arguments))
    if origin is Literal:
        return st.sampled_from([*arguments, f"{arguments[0]}x", str(arguments[0]).upper()])
    if origin is list:
        return st.lists(_near(arguments[0]), max_size=4)
    if annotation is int:
        return st.one_of(st.integers(-3, 40), st.integers())
    if annotation is float:
        return st.one_of(st.floats(0, 2), st.floats())
    return st.sampled_from([True, None, 3, 0.5, "text", []])


def _as_word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ",".join(map(_as_word, value)) + "]" if isinstance(value, list) else str(value)


def try_inputs(work: Path, per_key: int, share: float, seed: int) -> Tally:
    """Try so many values for every key, or for a share of the keys."""
    tally = Tally("bad words")
    work.mkdir()
    keys = find_keys()
    chosen = random.Random(seed).sample(keys, max(1, round(share * len(keys))))
    for number, key in enumerate(chosen):
        for word in draw_words(key.annotation, per_key, seed + number):
            _attempt(work, key, word, tally)
    for words in COMBINATIONS if share == 1 else random.Random(seed).sample(COMBINATIONS, 4):
        ended = bfl_run(work, *words, "rounds=1", "data_dir=stand-in", "dry_run=true")
        tally.add(fault(ended) or ("told" if ended.code else "taken"), " ".join(words), ended)
    return tally


def _attempt(work: Path, key: Key, word: str, tally: Tally) -> None:
    base = [word_ for word_ in SMALL if _belongs(word_, key.words)]
    ended = bfl_run(work, *base, *key.words, "rounds=1", *_shortened(key, word), f"{key.key}={word}")
    tally.add(judge(ended, key, word, work), f"{' '.join(key.words)} {key.key}={word:.60}", ended)
    shutil.rmtree(work / "outputs", ignore_errors=True)


def _belongs(word: str, chosen: tuple[str, ...]) -> bool:
    """Leave out what is of another dataset or network than the chosen one."""
    groups = {choice.partition("=")[0] for choice in chosen}
    groups |= {"model"} if "dataset" in groups else set()  # which the dataset brings
    return not any(word.startswith(group) for group in groups & {"dataset", "model", "partition"})


def _shortened(key: Key, word: str) -> list[str]:
    """Only plan what could take long for good reasons: other data, and large numbers of what is done."""
    if any(choice.startswith(("dataset=", "model=")) for choice in key.words):
        return ["dry_run=true"]
    try:
        value = read_by_hydra(f"{key.key}={word}").value()
    except Exception:
        return []
    return ["dry_run=true"] if isinstance(value, int) and value > 40 else []


def judge(ended: Ended, key: Key, word: str, work: Path) -> str:
    """Tell how a value was taken: one that does not fit the annotation has to be refused by the name of its key."""
    if found := fault(ended):
        return found
    if ended.code == 2 and any((work / "outputs").glob("*")):
        return "written"
    try:
        check_value(key.key, read_by_hydra(f"{key.key}={word}").value(), key.annotation)
    except ConfigError:
        if ended.code != 2:
            return "silent"
    except Exception:  # no value at all
        if ended.code != 2:
            return "silent"
    if ended.code == 2 and key.key.rpartition(".")[2] not in ended.err:
        return "unnamed"
    return {0: "taken", 1: "ended in a sentence", 2: "refused"}[ended.code or 0]


def _options(group: str) -> list[str]:
    return [f"{group}={path.stem}" for path in sorted((config_folder() / group).glob("[!_]*.yaml"))]


COMBINATIONS = [
    *itertools.product(_options("dataset"), _options("model")),
    *itertools.product(_options("method"), _options("model")),
    *itertools.product(_options("dataset"), _options("partition")),
    *itertools.product(_options("method"), _options("aggregator")),
    *itertools.product(_options("method"), ["dataset=har", "dataset=shakespeare", "dataset=synthetic"]),
]
"""Pairs of groups' options."""
