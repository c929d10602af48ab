"""What `bfl-report` costs on many runs: the command, its page, and showing that page in a browser.

    python benchmarks/report.py [--runs 1000] [--repeats 5] [--against CHECKOUT] [--keep DIR]

The runs are made up, but written as `bfl-run` writes them: tables, summary, environment and checkpoint of 20 rounds
with 10 clients, the numbers at random. First methods, alphas and seeds make rows of ten runs each; then every run has a
learning rate of its own, so that each is a row. With --against the code of another checkout takes turns, and ratios are
within a turn. The page is opened in Chromium where it is installed, with its driver and selenium (the extra `browser`);
what counts is the processor time of its main thread until that is idle.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from workloads import CPU

from bfl_bench import records
from bfl_bench.commands.resolving import resolve
from bfl_bench.identity import folder_name
from bfl_bench.report import markdown
from bfl_bench.run.checkpoint import CheckpointFolder
from bfl_bench.run.environment import describe_environment
from bfl_bench.run.recorder import Notes, write_summary

METHODS = ("fedavg", "fedprox", "fola", "scaffold", "fednova")
ROUNDS, CLIENTS, BINS = 20, 10, 15
WHOLE: dict[str, Callable[[int, int, Mapping[str, Any]], int]] = {
    "client": lambda number, round_, row: number,
    "bin": lambda number, round_, row: number + 1,
    "count": lambda number, round_, row: int(1000 * row["count"]),
    "size": lambda number, round_, row: 100 + number,
    "bytes_up": lambda number, round_, row: 138_640 * round_,
    "bytes_down": lambda number, round_, row: 138_640 * round_,
}
"""Columns of whole numbers, by the place of the row in its round."""

ROOT = Path(__file__).parents[1]


def write_run(out: Path, config: dict[str, Any], environment: dict[str, Any], rng: np.random.Generator) -> None:
    """Write the files of a finished run, with numbers drawn at random."""
    folder = out / folder_name(config)
    folder.mkdir(parents=True)
    records.start(folder, config, force=False)
    columns = {
        records.METRICS: records.METRICS_COLUMNS,
        records.TIMING: records.TIMING_COLUMNS,
        records.CLIENTS: records.CLIENTS_COLUMNS,
        records.RELIABILITY: records.RELIABILITY_COLUMNS,
    }
    counts = {records.CLIENTS: CLIENTS, records.RELIABILITY: BINS}
    tables = {name: records.Table(folder / name, columns[name]) for name in columns}
    for round_ in range(1, ROUNDS + 1):
        for name, table in tables.items():
            numbers = rng.random((counts.get(name, 1), len(columns[name]))).tolist()
            rows = [dict(zip(columns[name], line, strict=True)) | {"round": round_} for line in numbers]
            for number, row in enumerate(rows):
                row |= {key: value(number, round_, row) for key, value in WHOLE.items() if key in row}
            table.append(rows)
    held = [(client, label, int(rng.integers(1, 99))) for client in range(CLIENTS) for label in range(10)]
    records.write_table(folder / records.PARTITION_COUNTS, records.PARTITION_COLUMNS, held)
    records.write_json(folder / records.ENVIRONMENT, environment)
    notes = Notes(tables={name: table.describe() for name, table in tables.items()})
    CheckpointFolder(folder / records.CHECKPOINT).save(ROUNDS, {"params": torch.zeros(10)}, {}, notes)
    write_summary(folder, "done", None, ROUNDS, {})


def make_runs(out: Path, number: int, different: bool) -> None:
    """Write runs of five methods at several alphas, ten seeds each; or ones that all differ in the learning rate."""
    with initialize_config_dir(str(records.config_folder()), version_base="1.3"):
        bases = [resolve(compose("config", [f"method={method}"])) for method in METHODS]
    environment = describe_environment(CPU, 1, {})
    rng = np.random.default_rng(0)
    for i in range(number):
        method, place = bases[i % len(bases)], i // len(bases)
        seed, alpha = (0, 0.1) if different else (place % 10, round(0.01 * (1 + place // 10), 2))
        config = method | {"seed": seed, "partition": method["partition"] | {"alpha": alpha}}
        if different:
            config["local"] = method["local"] | {"lr": round(1e-4 * (1 + place), 4)}
        write_run(out, config, environment, rng)


def call_report(checkout: Path, runs: Path, page: Path | None) -> float:
    """Report with the code of a checkout; the processor seconds that it took."""
    code = "import sys; from bfl_bench.commands.report import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, str(runs), *([] if page is None else ["--html", str(page)])]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    subprocess.run(words, check=True, capture_output=True, cwd=checkout, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def open_browser() -> Any:
    """Start Chromium; None where it, its driver or selenium is missing."""
    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    try:
        from selenium import webdriver
    except ImportError:
        return None
    if not all(programs):
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))


def show_page(browser: Any, page: Path) -> float:
    """Open a page in a new process of the browser; the processor seconds of its main thread until all is drawn."""
    browser.switch_to.new_window("tab")
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    browser.get(page.as_uri())
    for _ in range(5):
        browser.execute_async_script(
            "const done = arguments[0]; requestIdleCallback(() => requestAnimationFrame(done))"
        )
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    browser.close()
    browser.switch_to.window(browser.window_handles[0])
    return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, to take turns with")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the runs are made, or were made before")
    options = parser.parse_args()
    checkouts = [ROOT, *([options.against.resolve()] if options.against else [])]
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep or Path(scratch)
        for name in ("grouped", "different"):
            if not (place / name).is_dir():
                make_runs(place / name, options.runs, different=name == "different")
        found: dict[str, list[list[float]]] = {}  # by what was measured, for each checkout
        browser = open_browser()
        for _ in range(options.repeats):
            for i, checkout in enumerate(checkouts):
                page = Path(scratch) / f"page-{i}.html"
                measured = {
                    "command (processor seconds)": call_report(checkout, place / "grouped", None),
                    "with a page of different rows (processor seconds)": call_report(
                        checkout, place / "different", page
                    ),
                    "size of that page (MB)": page.stat().st_size / 1e6,
                }
                if browser is not None:
                    measured["that page in Chromium (processor seconds)"] = show_page(browser, page)
                for name, value in measured.items():
                    found.setdefault(name, [[] for _ in checkouts])[i].append(value)
        if browser is not None:
            browser.quit()
    head = [f"{options.runs} runs", "here", *(["there", "here / there"] if options.against else [])]
    rows = []
    for name, turns in found.items():
        cells = [f"{statistics.median(values):.2f}" for values in turns]
        if options.against:
            cells.append(f"{statistics.median(a / b for a, b in zip(*turns, strict=True)):.2f}")
        rows.append([name, *cells])
    print(markdown(head, rows), end="")


if __name__ == "__main__":
    main()
