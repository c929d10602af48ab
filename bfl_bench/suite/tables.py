"""CSV files that grow row by row and never depend on the order in which rows came."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bfl_bench import records

Line = Mapping[str, object]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def merge_rows(path: Path, rows: Iterable[Line], keys: Sequence[str]) -> None:
    """Add rows, in the place of those with the same keys; rows are sorted by keys, the other columns by name."""
    merged: dict[tuple[str, ...], Line] = {}
    for row in (*read_rows(path), *rows):
        merged[tuple(_in_order(row[key]) for key in keys)] = row
    columns = dict.fromkeys(keys) | dict.fromkeys(sorted({name for row in merged.values() for name in row}))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(merged[key] for key in sorted(merged))
    records.write_text(path, text.getvalue())


def _in_order(value: object) -> str:
    """Numbers by their size."""
    text = str(value)
    return text.zfill(12) if text.isdigit() else text
