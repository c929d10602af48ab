"""Whether a run that was made again is what the results say."""

import math
from collections.abc import Mapping

from bfl_bench.suite.results import ABOUT, TIMES, Result

RELATIVE, ABSOLUTE = 0.05, 0.01
"""How far a number may be off on another kind of CPU, where sums round otherwise and training carries that on."""


def compare_result(stored: Result, again: Mapping[str, object] | None, name: str) -> list[str]:
    """List what differs: to the last digit on the same kind of CPU, beyond the tolerances above on another."""
    if again is None:
        return ["was not finished"]
    problems = [] if name == stored.run else [f"is called {name}, not {stored.run}"]
    if again["status"] != stored.status:
        problems.append(f"{again['status']}, not {stored.status}")
    exact = bool(stored.cpu) and again["cpu"] == stored.cpu
    found = {key: float(str(value)) for key, value in again.items() if key not in (*ABOUT, *TIMES)}
    expected = {key: value for key, value in stored.measured.items() if key not in TIMES}
    if found.keys() != expected.keys():
        problems.append(f"other columns: {', '.join(sorted(found.keys() ^ expected.keys()))}")
    for key in sorted(found.keys() & expected.keys()):
        close = math.isclose(found[key], expected[key], rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        if found[key] != expected[key] and (exact or not close):
            problems.append(f"{key} {found[key]!r}, not {expected[key]!r}")
    return problems
