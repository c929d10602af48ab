"""How a run ended, on the terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bfl_bench.commands.printing import say
from bfl_bench.evaluation import columns
from bfl_bench.run.observers import in_short

SHOWN = ("ga", "la", "worst10", "nll", "ece", "brier")
SHOWN_NUMERIC = ("rmse", "nll", "crps", "covered90", "width90", "quantile_error")


def print_summary(
    summary: Mapping[str, Any], folder: Path, brief: bool = False, note: str = "", stand_in: str = ""
) -> None:
    """Print the final metrics, as a table or in one line, and where the files are.

    `stand_in` is the dataset that random data stand in for, if they do.
    """
    final, best = summary["final"], summary["best"]
    status = summary["status"] + (f" ({note})" if note else "")
    if brief:
        say(f"{status}: {folder} {in_short(final) if final else ''}")
        return
    if final is not None:
        by = summary.get("best_by", {"set": "test", "column": "ga"})  # runs of earlier versions do not say
        where = " on the test set" if by["set"] == "test" else ""
        chosen = f"best by {columns.label(by['column'])}{where}, round {best['round']}"
        say(f"\n{'':<28}{'final':>10}{'best':>10}   (round {final['round']}; {chosen})")
        for name in SHOWN_NUMERIC if final.get("rmse") is not None else SHOWN:
            cells = (f"{row[name]:>10.4f}" if row.get(name) is not None else f"{'-':>10}" for row in (final, best))
            say(f"{columns.label(name):<28}" + "".join(cells))
    if stand_in:
        say(f"\nRandom stand-in data, not {stand_in}: these numbers say nothing about it.")
    say(f"\n{status}: {folder}")
