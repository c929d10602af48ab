"""What the documents show works as shown."""

import itertools
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from bfl_bench.commands.config_files import list_options
from bfl_bench.groups import GROUPS
from bfl_bench.records import config_folder
from scripts.site_hooks import describe_configuration
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


def test_a_method_of_ones_own_runs(bfl_run: BflRun, tmp_path: Path) -> None:
    run_example("docs/how-to/own-method.md", bfl_run, tmp_path)
    assert list((tmp_path / "outputs").glob("digits_dirichlet-0.1_noisy_seed0_*/metrics.csv"))


def test_data_of_ones_own_run(bfl_run: BflRun, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = {"train": 200, "test": 60}
    arrays = {f"x_{part}": rng.normal(size=(num, 1, 4, 4)) for part, num in sizes.items()}
    arrays |= {f"y_{part}": np.arange(num) % 3 for part, num in sizes.items()}
    (tmp_path / "my_data").mkdir()
    np.savez(tmp_path / "my_data" / "my_images.npz", **arrays)
    run_example("docs/how-to/own-data.md", bfl_run, tmp_path)
    assert list((tmp_path / "outputs").glob("my_images_dirichlet-0.1_fola_seed0_*/metrics.csv"))


def test_every_method_and_rule_is_in_its_document() -> None:
    """Rows of methods stand in docs/methods.md, and so does everything that conf/ has of them."""
    text = (ROOT / "docs/methods.md").read_text()
    for group in ("method", "aggregator"):
        for path in (ROOT / "conf" / group).glob("[!_]*.yaml"):
            name = path.stem
            suffixed = name.endswith(("_released", "_normalised")) and group == "aggregator"  # named by their endings
            assert f"`{name}`" in text or suffixed or name == "none", name


def test_every_link_between_documents_leads_somewhere() -> None:
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text()):
            generated = link.endswith("reference/configuration.md")
            assert generated or (path.parent / link).exists(), f"{path.name}: {link}"


def test_the_page_of_keys_has_every_option_and_key() -> None:
    text = describe_configuration()
    for group in GROUPS:
        for name in list_options(group, [config_folder()]):
            assert f"| `{name}` | " in text, f"{group}={name}"
    assert "| `local.lr` | `0.1` |" in text
    assert "| `method.mu` | `" in text.split("### `method=fedprox`")[1].split("###")[0]
    assert "_target_" not in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (3, 4) for line in tables)


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
