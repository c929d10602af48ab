"""What papers print. `published/NAME.csv` holds it.

In BA-BFL's, `model` is the number of Bayesian layers. BA-BFL does not say what follows its +-; its released code takes
the population standard deviation.
"""

import csv
from pathlib import Path

HERE = Path(__file__).parent
Row = tuple[str, str, str]
"""Partition, model and aggregator as the tables of BFL-P and BA-BFL print them."""


def read_published(paper: str, table: str) -> dict[tuple[str, str], float]:
    """What a paper prints, by row and column."""
    with (HERE / "published" / f"{paper}.csv").open(newline="") as file:
        return {(c["row"], c["column"]): float(c["value"]) for c in csv.DictReader(file) if c["table"] == table}


def read_published_rows(paper: str, table: str) -> dict[tuple[str, Row, str], tuple[float, float | None]]:
    """Value and spread, None where none is printed, by dataset, row and metric, of BFL-P and BA-BFL."""
    with (HERE / "published" / f"{paper}.csv").open(newline="") as file:
        return {
            (c["dataset"], (c["partition"], c["model"], c["aggregator"]), c["metric"]): (
                float(c["value"]),
                float(c["spread"]) if c["spread"] else None,
            )
            for c in csv.DictReader(file)
            if c["table"] == table
        }
