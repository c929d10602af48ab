"""Bad parts: methods, networks, rules, data, partitions and observers of a user's own that break their contract."""

import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.campaign import own_parts
from tests.campaign.driving import Ended, Tally, bfl_run, fault
from tests.composing import SMALL

MODULE = "tests.campaign.own_parts"
SHORT = (*SMALL, "rounds=2", "num_clients=3", "local.epochs=1")


@dataclass(frozen=True, kw_only=True)
class Case:
    part: str  # what a sentence has to begin with: method own, network own
    where: str
    what: str
    words: tuple[str, ...]
    allowed: bool = False  # by the contract: any end in a sentence will do


OPTIONS = {
    "aggregator": ("rule", ("returned",)),
    "model": ("network", ("always", "training", "made")),
    "dataset": ("Data", ("load",)),
    "partition": ("Shares", ("split",)),
    "observer": ("Watcher", ("begin", "round", "end")),
}
"""Groups, the part of ours in each, and the places where it misbehaves."""

RETURNED: dict[str, Mapping[str, object]] = {
    "aggregator": own_parts.RULES,
    "model": own_parts.NETWORKS,
    "dataset": own_parts.DATASETS,
    "partition": own_parts.PARTITIONS,
    "observer": {"raises": None},
}


def cases() -> Iterator[Case]:
    """List all parts, and everything that they can do wrong."""
    for target, places in (("Point", own_parts.METHODS), ("Gaussian", own_parts.GAUSSIANS)):
        for where, among in places.items():
            for what in (*among, *(own_parts.KEPT if where in ("message", "state", "broadcast") else ())):
                words = [f"method={'fedavg' if target == 'Point' else 'fola'}", f"method._target_={MODULE}.{target}"]
                words += ["method.name=own", f"+method.where={where}", f"+method.what={what!r}"]
                words += ["eval.predictive=mean"] if where == "mean" else []
                yield Case(part="method", where=where, what=what, words=(*words,), allowed=_is_allowed(where, what))
    for group, (_, places_) in OPTIONS.items():
        for where in places_:
            for what in own_parts.MADE if where == "made" else RETURNED[group]:
                method = "method=fvb" if group == "aggregator" else "method=fedavg"
                words = [method, f"{group}=own", f"{group}.what={what!r}"]
                words += [f"{group}.where={where}"] if group in ("model", "observer") else []
                yield Case(part=group, where=where, what=what, words=(*words,), allowed=_is_harmless(group, what))


def _is_allowed(where: str, what: str) -> bool:
    private = where in ("memory", "init_client") and what in own_parts.OF_ITS_OWN
    return private or what in own_parts.KEPT or (where, what) == ("draws", "double")


def _is_harmless(group: str, what: str) -> bool:
    return what in own_parts.HARMLESS or (group, what) == ("model", "double")


def write_options(conf: Path) -> None:
    """Write config files for the parts of ours."""
    for group, (target, _) in OPTIONS.items():
        (conf / group).mkdir(parents=True)
        where = "where: ''\n" if group in ("model", "observer") else ""
        (conf / group / "own.yaml").write_text(f"_target_: {MODULE}.{target}\nname: own\n{where}what: ''\n")


def try_parts(work: Path, every: int, first: int = 0) -> Tally:
    """Run with every `every`-th bad part, beginning with the `first`."""
    tally = Tally("bad parts")
    work.mkdir()
    write_options(work / "conf")
    out = work / "outputs"
    all_cases = list(cases())
    random.Random(2).shuffle(all_cases)
    for case in all_cases[first % every :: every]:
        ended = bfl_run(work, "--config-dir", "conf", *_arrange(case))
        tally.add(_judge(case, ended), f"{case.part}, {case.where}: {case.what}", ended)
        shutil.rmtree(out, ignore_errors=True)
    return tally


def _arrange(case: Case) -> list[str]:
    own = ("model", case.part) if case.part == "dataset" else (case.part,)
    base = [word for word in SHORT if not word.startswith(tuple(f"{part}{sign}" for part in own for sign in ".="))]
    return [*base, *case.words]


def _judge(case: Case, ended: Ended) -> str:
    last = ended.err.strip().splitlines()[-1] if ended.err.strip() else ""
    if (case.what == "raises" or case.allowed) and ended.code == 1 and "own_parts.py" in last:
        return "own error"  # with a traceback, which its author needs
    if found := fault(ended):
        return found
    if ended.code:
        if case.allowed:
            return "allowed"
        named = "own" in last or "diverged" in last or last.startswith(f"bfl-run: {case.part}")
        return "told" if named else "unnamed"
    return "allowed" if case.allowed else "silent"
