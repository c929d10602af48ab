"""What a person sees of a run while it goes on. Reads records, never torch."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from bfl_bench import records


@contextmanager
def progress(rounds: int, title: str, bar: bool) -> Iterator[Callable[[int, Mapping[str, records.Cell] | None], None]]:
    """A bar on a terminal; elsewhere, or without `bar`, one line per evaluated round, so that logs stay readable."""
    if not bar or not sys.stderr.isatty():

        def print_line(round_: int, row: Mapping[str, records.Cell] | None) -> None:
            if row is not None:
                print(f"{title} round {round_}/{rounds} {in_short(row)}", file=sys.stderr, flush=True)

        yield print_line
        return
    from tqdm import tqdm

    with tqdm(total=rounds, desc=title, unit="round", dynamic_ncols=True) as shown:

        def advance(round_: int, row: Mapping[str, records.Cell] | None) -> None:
            if row is not None:
                shown.set_postfix_str(in_short(row), refresh=False)
            shown.update(round_ - shown.n)

        yield advance


def in_short(row: Mapping[str, records.Cell]) -> str:
    """Say how a round went in a few numbers, by their names in metrics.csv."""
    return " ".join(f"{name}={row[name]:.4f}" for name in ("ga", "nll", "train_loss") if row.get(name) is not None)
