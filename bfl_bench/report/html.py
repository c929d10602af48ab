"""One page of HTML out of the rows of a comparison: a table to sort and to filter, charts, definitions. No network.

`page/` holds what does not depend on the runs. The table is written here; the charts are drawn in the browser when they
come into view, from data that the page carries as compressed JSON. Only runs that did not diverge count, as in the
table.
"""

import base64
import csv
import itertools
import json
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from bfl_bench import reading, records
from bfl_bench.errors import DamagedError
from bfl_bench.evaluation import columns
from bfl_bench.report.comparison import Comparison, Row, Spread, bootstrap_interval, describe_values, text_of
from bfl_bench.report.runs import Run, summarise

TEMPLATES = Path(__file__).parent / "page"
MAX_ROUNDS, MAX_DOTS, MAX_CLIENTS = 300, 200, 100  # what a chart shows of very long or very large runs
FINAL = ("ga", "bytes_up", "ece")  # that charts other than the curves show
NUM_COLOURS, NUM_DASHES = 8, 7  # as in page.css and page.js
MAX_BLOCKS = 4  # that a reader can tell apart by dashes alone


def make_page(
    comparison: Comparison, metrics: Sequence[str], spread: Spread, caption: Sequence[str], notes: Sequence[str]
) -> str:
    """The same input gives the same bytes. `caption` says what the numbers are, `notes` what else is to be known."""
    rows = comparison.rows
    described = [_describe(row, spread) for row in rows]
    for item, style in zip(described, _styles(rows), strict=True):
        item |= style
    curves = list(dict.fromkeys(name for item in described for name in item["curves"]["values"]))
    splits = _partitions(rows)
    defined = list(dict.fromkeys([*metrics, *curves, *FINAL, "seconds_per_round"]))
    data = {
        "rows": described,
        "columns": curves,
        "labels": {name: columns.label(name) for name in defined},
        "metric": next((name for name in metrics if name in curves), curves[0] if curves else ""),
        "partitions": splits,
    }
    groups = [row.group for row in rows if row.group is not None]
    shared = {key: value for key, value in comparison.shared.items() if not key.endswith("_target_")}
    num_runs = sum(len(group.runs) for group in groups)
    parts = {
        "summary": f"Finished runs: {num_runs}. Groups of runs that differ in the seed alone: {len(groups)}.",
        "table": make_table(rows, metrics, spread),
        "caption": "".join(f"<p>{escape(sentence)}</p>\n" for sentence in caption),
        "notes": "".join(f"<li>{escape(note)}</li>" for note in notes),
        "definitions": "".join(map(define, defined)),
        "shared": "".join(f"<dt>{escape(key)}</dt><dd>{escape(_text(value))}</dd>" for key, value in shared.items()),
        "data": _pack(data),
        "css": (TEMPLATES / "page.css").read_text(),
        "js": (TEMPLATES / "page.js").read_text(),
    }
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], (TEMPLATES / "page.html").read_text())


def _pack(data: object) -> str:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode())).decode()


def unpack(page: str) -> Any:
    """Read the data that a page carries."""
    (packed,) = re.findall(r'id="data">(.*?)</script>', page)
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def define(name: str) -> str:
    """Write a metric's label, name and definition as items of a list of definitions."""
    known = columns.find(name) is not None
    label = f"{escape(columns.heading(name))} " if known else ""
    term = f'<dt data-name="{escape(name)}">{label}<code>{escape(name)}</code></dt>'
    return f"{term}<dd>{escape(columns.describe(name))}</dd>"


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def make_table(rows: Sequence[Row], metrics: Sequence[str], spread: Spread) -> str:
    """Write the head and body of a table whose columns a script can sort by the values that cells carry."""
    keys = list(rows[0].label)

    def head(name: str, kind: str, title: str = "") -> str:
        text = escape(name).replace(".", ".<wbr>").replace(" ↑", "&nbsp;↑").replace(" ↓", "&nbsp;↓")
        button = f'<button type="button" title="{escape(title)}">{text}</button>'
        return f'<th scope="col" class="{kind}" aria-sort="none">{button}</th>'

    def cell(row: Row, metric: str) -> str:
        found = row.stats(metric)
        if found is None:
            return '<td class="number">&ndash;</td>'
        mean, _, rest = text_of(row, metric, spread).replace("+-", "±").partition(" ")
        leading = f"<u>{mean}</u>" if metric in row.leads_in else mean
        shown = f"<strong>{mean}</strong>" if metric in row.best_in else leading
        beside = f' <span class="spread">{rest}</span>' if rest else ""
        return f'<td data-value="{found.mean:.7g}">{shown}{beside}</td>'

    lines = [
        '<th scope="col"><span class="unseen">colour</span></th>',
        *(head(key, "label") for key in keys),
        *(head(columns.heading(m), "number", f"{m}: {columns.describe(m)}") for m in metrics),
        head("seeds", "number", "runs that did not diverge"),
        head("diverged", "number", "runs in which a loss or a parameter became NaN or infinite"),
    ]
    text = f"<thead><tr>{''.join(lines)}</tr></thead>\n<tbody>\n"
    for row in rows:
        cells = [f"<td>{escape(_text(value))}</td>" for value in row.label.values()]
        cells += [cell(row, metric) for metric in metrics]
        cells += [f'<td class="number">{n}</td>' for n in (row.num_seeds, row.num_diverged)]
        if row.group is None:
            cells[len(keys) :] = [f'<td colspan="{len(metrics) + 2}" class="absent">not run</td>']
        text += f"<tr><td></td>{''.join(cells)}</tr>\n"
    return text + "</tbody>"


def _describe(row: Row, spread: Spread) -> dict[str, Any]:
    """What the charts show of a row."""
    runs = [run for run in row.runs if not run.diverged]
    first = "not run" if row.group is None else _text(row.group.config["method.name"])
    timed = [run.seconds_per_round() for run in runs if (run.folder / records.TIMING).exists()]
    return {
        "name": describe_values(row.label, row.label, " · ") or first,
        "find": " ".join(f"{key}={_text(value)}" for key, value in row.label.items()),
        "absent": row.group is None,
        "seeds": len(runs),
        "curves": _curves(runs, spread),
        "reliability": _reliability(runs),
        "calibrated": _reliability(runs, "_calibrated"),
        "risk": _mean_lines(runs, records.RISK, "coverage", ("risk",)),
        "shift": _mean_lines(runs, records.SHIFT, "severity", ("accuracy", "nll", "ece")),
        "entropy": _entropies(runs),
        "clients": _clients(runs),
        "seconds": _interval(timed, spread),
        "final": {name: _interval(row.values(name).values(), spread, 10) for name in FINAL},
    }


def _styles(rows: Sequence[Row]) -> list[dict[str, int]]:
    """A colour per thing that is compared and a dash per block, where these are few; else all pairs in turn."""
    names = list(dict.fromkeys(row.name for row in rows))
    blocks = list(dict.fromkeys(row.block for row in rows))
    if 1 < len(names) <= NUM_COLOURS and len(blocks) <= MAX_BLOCKS:
        return [{"colour": names.index(row.name), "dash": blocks.index(row.block)} for row in rows]
    places = itertools.accumulate((row.group is not None for row in rows), initial=0)
    return [
        {"colour": i % NUM_COLOURS, "dash": i // NUM_COLOURS % NUM_DASHES} for i, _ in zip(places, rows, strict=False)
    ]


def _interval(values: Iterable[records.Cell], spread: Spread, digits: int = 5) -> list[float] | None:
    """Mean, low and high over seeds; the mean alone for a single seed, None for none."""
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    if len(known) == 1:
        return [float(f"{known[0]:.{digits}g}")]
    found = summarise(known)
    numbers = [found.mean]
    if spread == "bootstrap":
        numbers += bootstrap_interval(known, 1000)
    else:
        width = found.std if spread == "std" else found.standard_error
        numbers += [found.mean - width, found.mean + width]
    return [float(f"{number:.{digits}g}") for number in numbers]


def _curves(runs: Sequence[Run], spread: Spread) -> dict[str, Any]:
    tables = [records.read_table(run.folder / records.METRICS) for run in runs]
    by_round = [{int(line["round"] or 0): line for line in table} for table in tables]
    rounds = sorted({number for lines in by_round for number in lines})
    step = math.ceil(len(rounds) / MAX_ROUNDS) or 1
    rounds = rounds[::-1][::step][::-1]  # the last round always
    names = dict.fromkeys(name for table in tables for line in table for name in line if name != "round")
    values = {
        name: [_interval([lines.get(number, {}).get(name) for lines in by_round], spread, 4) for number in rounds]
        for name in names
    }
    return {"rounds": rounds, "values": {name: found for name, found in values.items() if any(found)}}


class _Line(dict[str, float]):
    """A line of a table, which names its file where a column is missing."""

    def __init__(self, path: records.Place, cells: Iterable[tuple[str, float]]) -> None:
        super().__init__(cells)
        self._path = path

    def __missing__(self, name: str) -> float:
        raise DamagedError(f"{self._path} is damaged: it has no column {name}")


def _last_round(path: records.Place) -> Sequence[dict[str, float]]:
    """The lines of the last evaluated round; none where a run has no such file."""
    if not path.exists():
        return []
    head, *lines = reading.read_text(path).splitlines() or [""]
    last = f"{lines[-1].split(',')[0]}," if lines else ""
    names, *found = csv.reader([head, *(line for line in lines if line.startswith(last))])
    try:
        return [_Line(path, zip(names, (float(cell or "nan") for cell in line), strict=True)) for line in found]
    except ValueError as error:
        raise DamagedError(f"{path} is damaged: {error}") from None


def _mean_lines(runs: Sequence[Run], file: str, by: str, names: Sequence[str]) -> dict[str, list[list[float]]]:
    """Points of the last round of a table, their heights averaged over the seeds."""
    found: dict[str, dict[float, list[float]]] = {name: {} for name in names}
    for run in runs:
        for line in _last_round(run.folder / file):
            for name, points in found.items():
                points.setdefault(line[by], []).append(line[name])
    return {
        name: [[x, float(f"{sum(heights) / len(heights):.5g}")] for x, heights in sorted(points.items())]
        for name, points in found.items()
        if points
    }


def _entropies(runs: Sequence[Run]) -> dict[str, list[list[float]]]:
    """The share of each set's examples by entropy, over all seeds; the test set first."""
    sums: dict[str, dict[float, float]] = {}
    for run in runs:
        for line in _last_round(run.folder / records.ENTROPY):
            for name, count in line.items():
                if name not in ("round", "entropy"):
                    counts = sums.setdefault(name, {})
                    counts[line["entropy"]] = counts.get(line["entropy"], 0.0) + count
    return {
        name: [[round(x, 4), round(count / (sum(counts.values()) or 1), 5)] for x, count in counts.items()]
        for name, counts in sums.items()
    }


def _reliability(runs: Sequence[Run], suffix: str = "") -> list[list[float]]:
    """Confidence, accuracy and count of each bin, over all seeds."""
    bins: dict[float, list[float]] = {}
    for run in runs:
        for line in _last_round(run.folder / records.RELIABILITY):
            sums = bins.setdefault(line["bin"], [0.0, 0.0, 0.0])
            if f"count{suffix}" in line:
                for i, value in enumerate((line[f"confidence{suffix}"], line[f"accuracy{suffix}"], 1.0)):
                    sums[i] += line[f"count{suffix}"] * value
    if not any(total for *_, total in bins.values()):
        return []
    return [
        [round(s[0] / s[2], 4), round(s[1] / s[2], 4), s[2]] if s[2] else [0, 0, 0] for _, s in sorted(bins.items())
    ]


def _clients(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Accuracies of the last evaluated local models of all seeds: quartiles, and the values or evenly many of them."""
    found = sorted(line["accuracy"] for run in runs for line in _last_round(run.folder / records.CLIENTS))
    if not found:
        return None
    quartiles = np.percentile(found, [0, 25, 50, 75, 100])
    dots = found if len(found) <= MAX_DOTS else np.percentile(found, np.linspace(0, 100, MAX_DOTS))
    return {"quartiles": np.round(quartiles, 4).tolist(), "dots": np.round(dots, 4).tolist(), "num": len(found)}


def _partitions(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The split of the first seed of each row, once where rows share it: client, class and count of what is held."""
    found: dict[str, dict[str, Any]] = {}
    for index, row in enumerate(rows):
        run = next((run for run in row.runs if (run.folder / records.PARTITION_COUNTS).exists()), None)
        if run is None:
            continue
        _, lines = reading.read_table(run.folder / records.PARTITION_COUNTS)
        kind = [_text(run.config[key]) for key in ("partition.name", "partition.alpha") if key in run.config]
        title = f"{run.config['dataset.name']}, {' '.join(kind)}, seed {run.config['seed']}"
        identity = str([title, run.config.get("num_clients"), lines])
        if identity not in found:
            cells = [[int(cell or 0) for cell in line] for line in lines]
            num = max([run.config.get("num_clients") or 1, *(cell[0] + 1 for cell in cells)])
            kept = [cell for cell in cells if cell[0] < MAX_CLIENTS]
            found[identity] = {
                "title": title,
                "clients": num,
                "shown": min(num, MAX_CLIENTS),
                "cells": kept,
                "rows": [],
            }
        found[identity]["rows"].append(index)
    return list(found.values())
