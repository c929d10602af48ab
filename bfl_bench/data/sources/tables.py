"""The files of regression datasets: tables of text, a row per example.

Those that a package carries are known by their checksums. Those that a user puts in place have none here: they are
checked for their columns, their number of rows, and for being numbers.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bfl_bench.data.sources.federations import CheckedFiles
from bfl_bench.data.sources.files import UNREADABLE, AlteredFileError, File, PublishedFiles


class Table(NamedTuple):
    """Features and labels of n examples."""

    x: NDArray[np.float64]  # (n, d)
    y: NDArray[np.float64]  # (n,)


def reader(
    path: str,
    rows: int,
    columns: Sequence[str],
    label: str,
    *,
    header: bool = True,
    delimiter: str = ",",
    categories: Mapping[str, Sequence[str]] | None = None,
    left_out: Sequence[str] = (),
) -> Callable[[Path], Table]:
    """Make the function that reads such a file; a category becomes a feature of its own, 0 or 1."""

    def read(data_dir: Path) -> Table:
        file = data_dir / path
        try:
            with file.open(newline="", encoding="utf-8") as stream:
                lines = [line for line in csv.reader(stream, delimiter=delimiter) if line]
            if header and [name.strip() for name in lines.pop(0)] != list(columns):
                raise AlteredFileError(file, f"its first line is not {delimiter.join(columns)}")
            if len(lines) != rows or any(len(line) != len(columns) for line in lines):
                raise AlteredFileError(file, f"it has {len(lines):,} rows, expected {rows:,} of {len(columns)} columns")
            cells = {name: [line[place].strip() for line in lines] for place, name in enumerate(columns)}
            features: list[list[float]] = []
            for name in columns:
                if name in (label, *left_out):
                    continue
                if categories and name in categories:
                    known = list(categories[name])
                    if unknown := set(cells[name]) - set(known):
                        raise AlteredFileError(file, f"its {name} is {sorted(unknown)[0]!r}, expected one of {known}")
                    features += [[float(cell == one) for cell in cells[name]] for one in known]
                else:
                    features.append([float(cell) for cell in cells[name]])
            table = Table(np.array(features).T, np.array([float(cell) for cell in cells[label]]))
        except UNREADABLE as error:
            raise AlteredFileError(file, f"it cannot be read as a table of numbers ({error})") from error
        if not np.isfinite(table.x).all() or not np.isfinite(table.y).all():
            raise AlteredFileError(file, "it has cells that are no numbers")
        return table

    return read


ABALONE = PublishedFiles(
    (
        File(
            "abalone/abalone.csv",
            216_900,
            "sha256",
            "ffa124af26414bfd9d9a8bf691a48e0c9c3e34967b7552dc39b7db0e5dcf21bd",
        ),
    ),
    reader(
        "abalone/abalone.csv",
        4177,
        "sex length diameter height whole_weight shucked_weight viscera_weight shell_weight rings".split(),
        "rings",
        categories={"sex": ["M", "F", "I"]},
    ),
)
AUTO_MPG = PublishedFiles(
    (
        File(
            "auto_mpg/autompg.csv",
            None,
            "sha256",
            "6ab76e3754350d7c037f1ca10c4911b91eba14487a4734b571e54a687e9a3023",
        ),
    ),
    reader(
        "auto_mpg/autompg.csv",
        392,
        "cylinders displacement horsepower weight acceleration year origin name mpg".split(),
        "mpg",
        header=False,
        categories={"origin": ["1", "2", "3"]},
        left_out=["name"],
    ),
)
WINE = CheckedFiles(
    ("wine/winequality-red.csv",),
    reader(
        "wine/winequality-red.csv",
        1599,
        "fixed acidity;volatile acidity;citric acid;residual sugar;chlorides;free sulfur dioxide;total sulfur dioxide;"
        "density;pH;sulphates;alcohol;quality".split(";"),
        "quality",
        delimiter=";",
    ),
)
BIKE = CheckedFiles(
    ("bike/hour.csv",),
    reader(
        "bike/hour.csv",
        17_379,
        "instant dteday season yr mnth hr holiday weekday workingday weathersit temp atemp hum windspeed casual "
        "registered cnt".split(),
        "cnt",
        left_out=["instant", "dteday", "casual", "registered"],
    ),
)
KIN8NM = CheckedFiles(
    ("kin8nm/kin8nm.csv",),
    reader("kin8nm/kin8nm.csv", 8192, [*(f"theta{number}" for number in range(1, 9)), "y"], "y"),
)
