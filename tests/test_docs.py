"""What the documents show works as shown."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import BflRun

ROOT = Path(__file__).parent.parent


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def run_example(document: str, bfl_run: BflRun, folder: Path) -> None:
    """Write the files that a document shows, each named by its first line, and run its command."""
    for text in blocks(document, "python") + blocks(document, "yaml"):
        path = folder / text.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (command,) = blocks(document, "bash")
    result = bfl_run(*shlex.split(command)[1:])
    assert result.code == 0, result.err


def test_example_of_the_readme_runs(bfl_run: BflRun, tmp_path: Path) -> None:
    run_example("README.md", bfl_run, tmp_path)
    assert list((tmp_path / "outputs").glob("digits_dirichlet-0.1_noisy_seed0_*/metrics.csv"))


def test_skeletons_of_the_design_document_run(bfl_run: BflRun, tmp_path: Path) -> None:
    run_example("docs/design.md", bfl_run, tmp_path)
    (metrics,) = (tmp_path / "outputs").glob("stripes_*_deltas_*/metrics.csv")
    header, *_, last = metrics.read_text().splitlines()
    assert dict(zip(header.split(","), last.split(","), strict=True))["turns"] == "3.0"
    rule = bfl_run("--config-dir", "my_conf", "dataset=stripes", "method=fedavg", "aggregator=arithmetic")
    assert rule.code == 2
    assert "aggregator: got 'arithmetic', allowed: none; method fedavg takes no aggregator" in rule.err


def test_documents_speak_of_keys_and_files_that_exist() -> None:
    metrics = (ROOT / "docs/metrics.md").read_text()
    from bfl_bench import records

    tables = (records.METRICS_COLUMNS, records.CLIENTS_COLUMNS, records.TIMING_COLUMNS, records.WEIGHTS_COLUMNS)
    tables += (records.RELIABILITY_COLUMNS, records.PARTITION_COLUMNS)
    for column in itertools.chain(*tables):
        assert f"`{column}`" in metrics, column


@pytest.mark.slow
def test_first_screen_of_the_readme(bfl_run: BflRun) -> None:
    """The bare command prints what the README shows: the same folder, the same accuracy but for rounding elsewhere."""
    shown = (ROOT / "README.md").read_text()
    printed = bfl_run().out
    assert re.findall(r"done: (\S+)", printed) == re.findall(r"done: (\S+)", shown)
    accuracies = [float(re.findall(r"global accuracy +([\d.]+)", text)[0]) for text in (printed, shown)]
    assert abs(accuracies[0] - accuracies[1]) < 0.02  # another processor rounds differently, and training amplifies it
