"""The Table as one page of HTML: to sort, to filter, to compare two methods. It needs no network."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from bfl_bench.evaluation import columns
from bfl_bench.report.comparison import Row
from bfl_bench.report.html import TEMPLATES as REPORT
from bfl_bench.report.html import define, make_table
from bfl_bench.suite.spec import Suite

TEMPLATES = Path(__file__).parent / "page"
TITLES = {
    "ranks": "Mean ranks",
    "pareto": "What is worth its cost",
    "pareto_accuracy": "What accuracy is worth its cost",
    "pareto_ood": "What detection of foreign examples is worth its cost",
    "sensitivity": "What the search saw",
}


def make_page(
    suite: Suite, rows: Sequence[Row], metrics: Sequence[str], sentences: Sequence[str], pictures: Mapping[str, bytes]
) -> str:
    """The same input gives the same bytes."""
    values: dict[str, dict[str, dict[str, dict[int, float]]]] = {}
    for metric in metrics:
        for row in rows:
            if found := row.values(metric):
                values.setdefault(metric, {}).setdefault(row.block, {})[row.name] = found
    data = {
        "settings": list(suite.settings),
        "methods": list(dict.fromkeys(row.name for row in rows)),
        "metrics": list(metrics),
        "labels": {name: columns.label(name) for name in metrics},
        "values": values,
    }
    parts = {
        "title": escape(suite.title),
        "sentences": "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences),
        "table": make_table(rows, metrics, "std"),
        "pictures": "".join(_picture(name, content) for name, content in pictures.items()),
        "definitions": "".join(map(define, metrics)),
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "css": (REPORT / "page.css").read_text(),
        "js": (TEMPLATES / "page.js").read_text(),
    }
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], (TEMPLATES / "page.html").read_text())


def _picture(name: str, content: bytes) -> str:
    source = base64.b64encode(content).decode()
    title = escape(TITLES[name])
    image = f'<img alt="{title}" src="data:image/png;base64,{source}">'
    return f'<section aria-labelledby="h-{name}"><h2 id="h-{name}">{title}</h2>{image}</section>\n'
