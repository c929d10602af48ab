"""The page of `bfl-report --html`: self-contained, the numbers that the runs hold, safe with any label."""

import re
from functools import cache
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bfl_bench import records
from bfl_bench.commands.report import main
from bfl_bench.report.html import TEMPLATES, unpack
from tests.composing import resolve, write_run

HOSTILE = '</script><b title="x">&'


@cache
def composed(method: str) -> dict[str, Any]:
    return resolve(f"method={method}")


def make(out: Path, method: str, seed: int, *accuracies: float, alpha: float = 0.1, **extra: Any) -> Path:
    """A finished run with an evaluated round per accuracy, and all files that the page shows."""
    base = composed(method)
    config = base | {"seed": seed, "partition": base["partition"] | {"alpha": alpha}} | extra
    rows = [{"round": i, "ga": a, "nll": 2 - a, "bytes_up": 100 * i} for i, a in enumerate(accuracies, 1)]
    folder = write_run(out, config, *rows)
    tables = {
        records.TIMING: (records.TIMING_COLUMNS, [(i, 2.0, 1.0, 0.5, 3.5, 10) for i in range(1, len(rows) + 1)]),
        records.CLIENTS: (records.CLIENTS_COLUMNS, [(1, 0, 5, 0.9, 1, 0), (2, 0, 5, 0.2, 1, 0), (2, 1, 5, 0.4, 1, 0)]),
        records.RELIABILITY: (
            records.RELIABILITY_COLUMNS,
            [(1, 1, 9, 0.4, 0.1), (2, 1, 0, 0, 0), (2, 2, 10 + 20 * seed, 0.8, 0.5 + 0.3 * seed)],
        ),
        records.PARTITION_COUNTS: (records.PARTITION_COLUMNS, [(0, 0, 7), (1, 0, 2), (1, 1, 3 + seed)]),
    }
    for name, (columns, lines) in tables.items():
        records.write_table(folder / name, columns, lines)
    return folder


def diverge(folder: Path) -> None:
    summary = records.read_json(folder / records.SUMMARY)
    records.write_json(folder / records.SUMMARY, {**(summary or {}), "status": "diverged"})


def make_page(runs: Path, *options: str) -> str:
    page = runs.parent / "pages" / "page.html"
    assert main([str(runs), "--metrics", "ga", "nll", "--html", str(page), *options]) == 0
    return page.read_text()


class Reader(HTMLParser):
    """Tags with their attributes, and the text of the cells of the table."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def test_the_page_holds_what_the_runs_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    for seed in (0, 1):
        make(runs, "fedavg", seed, 0.5, 0.6 + 0.2 * seed)
        make(runs, "fola", seed, 0.5, 0.9 + 0.01 * seed, alpha=1)
    make(runs, "fola", 0, 0.3, 0.4)
    diverge(make(runs, "fola", 1, 0.1))
    (runs / "empty").mkdir()
    (runs / "empty" / records.CONFIG).write_text(
        next(runs.glob("*/config.yaml")).read_text().replace("seed: 0", "seed: 7")
    )
    page = make_page(runs)
    assert "| 0.7000 +- 0.1414 _ |" in capsys.readouterr().out  # the terminal has its report all the same
    table = [row for row in Reader(page).rows if len(row) > 3]
    assert [[cell.replace("\N{NO-BREAK SPACE}", " ").strip() for cell in row[1:]] for row in table] == [
        ["partition.alpha", "method.name", "global accuracy ↑", "negative log-likelihood ↓", "seeds", "diverged"],
        ["0.1", "fedavg", "0.7000 ± 0.1414", "1.3000 ± 0.1414", "2", "0"],
        ["0.1", "fola", "0.4000", "1.6000", "1", "1"],
        ["1", "fola", "0.9050 ± 0.0071", "1.0950 ± 0.0071", "2", "0"],
    ]
    assert "standard deviation over seeds" in page
    assert "not finished; not in the means" in page
    fedavg, single, _ = unpack(page)["rows"]
    assert fedavg["name"] == "alpha 0.1 · fedavg"
    assert fedavg["curves"]["rounds"] == [1, 2]
    assert fedavg["curves"]["values"]["ga"] == [[0.5, 0.5, 0.5], [0.7, 0.5586, 0.8414]]
    assert fedavg["reliability"] == [[0, 0, 0], [0.8, 0.725, 40]]  # (10 * 0.5 + 30 * 0.8) / 40
    assert fedavg["clients"] == {"quartiles": [0.2, 0.2, 0.3, 0.4, 0.4], "dots": [0.2, 0.2, 0.4, 0.4], "num": 4}
    assert fedavg["seconds"] == [3.0, 3.0, 3.0]
    assert fedavg["final"]["bytes_up"] == [200, 200, 200]
    assert single["curves"]["values"]["ga"] == [[0.3], [0.4]]  # one seed has no band, a diverged run no part
    first, second = unpack(page)["partitions"]
    assert (first["title"], first["clients"], first["rows"]) == ("digits, dirichlet 0.1, seed 0", 10, [0, 1])
    assert first["cells"] == [[0, 0, 7], [1, 0, 2], [1, 1, 3]]
    assert second["rows"] == [2]


def test_best_is_bold_and_what_was_not_run_is_named(tmp_path: Path) -> None:
    for seed in range(3):
        make(tmp_path / "runs", "fola", seed, 0.5, 0.8 + 0.01 * seed)
        make(tmp_path / "runs", "fedavg", seed, 0.5, 0.6 + 0.011 * seed)
        make(tmp_path / "runs", "fola", seed, 0.5, 0.6, alpha=1)
        make(tmp_path / "runs", "fedprox", seed, 0.5, 0.6, alpha=1)
    page = make_page(tmp_path / "runs", "--spread", "se")
    assert "<strong>0.8100</strong> <span" in page
    assert page.count("<strong>") == 2  # ga and nll of fola
    assert page.count("<u>0.6000</u>") == 2  # ga at alpha 1, where two share the best mean
    assert page.count("<u>") == 4
    assert page.count(">not run<") == 2  # fedavg at 1, fedprox at 0.1
    assert "standard error over seeds" in page
    styles = {row["name"]: (row["colour"], row["dash"]) for row in unpack(page)["rows"]}
    assert styles["alpha 0.1 · fola"][0] == styles["alpha 1 · fola"][0]  # a colour per method, a dash per setting
    assert styles["alpha 1 · fedprox"][1] == styles["alpha 1 · fola"][1] != styles["alpha 0.1 · fola"][1]


def test_page_needs_no_network_and_no_label_breaks_it(tmp_path: Path) -> None:
    make(tmp_path / "runs", "fedavg", 0, 0.5, note=HOSTILE)
    make(tmp_path / "runs", "fedavg", 0, 0.5, note="{{js}} plain")
    page = make_page(tmp_path / "runs")
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest", page)
    tags = Reader(page).tags
    assert not [
        name for name, attributes in tags if {"src", "href", "srcset"} & set(attributes) or name in ("link", "b")
    ]
    assert page.count("</script>") == 2
    assert {row["find"] for row in unpack(page)["rows"]} == {f"note={HOSTILE}", "note={{js}} plain"}
    assert page.count((TEMPLATES / "page.js").read_text()) == 1
    assert "{{js}} plain</td>" in page
    assert make_page(tmp_path / "runs") == page  # byte for byte


def test_runs_with_little_in_them(tmp_path: Path) -> None:
    config = composed("fedavg")
    write_run(tmp_path / "runs", config, {"round": 1, "ga": 0.5, "la": None})  # no more files than an old run has
    (row,) = unpack(make_page(tmp_path / "runs"))["rows"]
    assert (row["name"], row["seconds"], row["clients"], row["reliability"]) == ("fedavg", None, None, [])
    assert list(row["curves"]["values"]) == ["ga"]
    diverge(next((tmp_path / "runs").iterdir()))
    data = unpack(make_page(tmp_path / "runs"))
    assert (data["columns"], data["metric"], data["partitions"], data["rows"][0]["seeds"]) == ([], "", [], 0)


def test_long_and_large_runs_are_thinned(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs", "fedavg", 0, *[0.5] * 700)
    lines = [(2, client, 5, client / 1000, 1.0, 0.0) for client in range(1000)]
    records.write_table(folder / records.CLIENTS, records.CLIENTS_COLUMNS, lines)
    records.write_table(folder / records.PARTITION_COUNTS, records.PARTITION_COLUMNS, [(k, 0, 1) for k in range(1000)])
    data = unpack(make_page(tmp_path / "runs", "--spread", "bootstrap"))
    rounds = data["rows"][0]["curves"]["rounds"]
    assert len(rounds) <= 300
    assert rounds[-1] == 700
    assert len(data["rows"][0]["clients"]["dots"]) == 200
    assert (data["partitions"][0]["clients"], len(data["partitions"][0]["cells"])) == (1000, 100)


def test_the_page_names_and_defines_columns_as_the_registry_does(tmp_path: Path) -> None:
    rows: list[dict[str, records.Cell]] = [{"round": 1, "ga": 0.5, "nll": 1.0, "nll@eaa": 1.1, "<own>": 3.0}]
    write_run(tmp_path / "runs", composed("fedavg"), *rows)
    page = make_page(tmp_path / "runs")
    data = unpack(page)
    assert data["columns"] == ["ga", "nll", "nll@eaa", "<own>"]
    assert data["labels"]["nll@eaa"] == "negative log-likelihood under eaa"
    assert (data["labels"]["ga"], data["labels"]["<own>"]) == ("global accuracy", "<own>")
    assert set(data["columns"]) | {"ga", "ece", "bytes_up", "seconds_per_round"} == set(data["labels"])
    defined = dict(re.findall(r'<dt data-name="(.*?)">.*?</dt><dd>(.*?)</dd>', page))
    assert set(defined) == {escape(name) for name in data["labels"]}
    assert defined["ga"] == "share of the test set that the global model classifies correctly"
    assert '<dt data-name="ga">global accuracy ↑ <code>ga</code></dt>' in page
    assert '<dt data-name="&lt;own&gt;"><code>&lt;own&gt;</code></dt><dd>a column of the method&#x27;s own</dd>' in page
    (title,) = re.findall(r'title="(nll: .*?)"', page)
    assert title == "nll: mean over the test set of -log p(label) under the global model; in nats"


def test_the_page_has_the_uncertainty_of_the_last_round_over_seeds(tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = make(tmp_path / "runs", "fedavg", seed, 0.2, 0.5)
        calibrated = ("count_calibrated", "confidence_calibrated", "accuracy_calibrated")
        tables: dict[str, tuple[tuple[str, ...], list[tuple[float, ...]]]] = {
            records.RELIABILITY: (
                (*records.RELIABILITY_COLUMNS, *calibrated),
                [(2, 1, 9, 0.4, 0.1, 10 + 20 * seed, 0.3, 0.5 + 0.4 * seed)],
            ),
            records.RISK: (records.RISK_COLUMNS, [(1, 0.5, 0.9), (2, 0.5, 0.1), (2, 1.0, 0.2 + 0.2 * seed)]),
            records.SHIFT: (
                (*records.SHIFT_COLUMNS, "nll@blur"),
                [(2, 1, 0.8, 1, 0.1, 0.5), (2, 5, 0.4 + 0.2 * seed, 2, 0.2, 0.5)],
            ),
            records.ENTROPY: (
                (*records.ENTROPY_COLUMNS, "svhn"),
                [(2, 0.5, 30, 1), (2, 1.5, 10, 3 + 4 * seed)],
            ),
        }
        for name, (columns, lines) in tables.items():
            records.write_table(folder / name, columns, lines)
    (row,) = unpack(make_page(tmp_path / "runs"))["rows"]
    assert row["calibrated"] == [[0.3, 0.8, 40]]
    assert row["risk"] == {"risk": [[0.5, 0.1], [1, 0.3]]}
    assert row["shift"] == {"accuracy": [[1, 0.8], [5, 0.5]], "nll": [[1, 1], [5, 2]], "ece": [[1, 0.1], [5, 0.2]]}
    assert row["entropy"] == {
        "test": [[0.5, 0.75], [1.5, 0.25]],
        "svhn": [[0.5, round(2 / 12, 5)], [1.5, round(10 / 12, 5)]],
    }


def test_runs_without_these_files_have_no_uncertainty(tmp_path: Path) -> None:
    make(tmp_path / "runs", "fedavg", 0, 0.2, 0.5)
    (row,) = unpack(make_page(tmp_path / "runs"))["rows"]
    assert (row["risk"], row["shift"], row["entropy"]) == ({}, {}, {})
    assert row["calibrated"] == []
