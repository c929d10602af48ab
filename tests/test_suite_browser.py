"""The Table's page in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bfl_bench.suite.results import write_results
from bfl_bench.suite.showing import show
from bfl_bench.suite.spec import read_suite
from tests.test_html_browser import browser as browser  # the fixture
from tests.test_html_browser import find
from tests.test_suite import write_suite

pytestmark = pytest.mark.browser

ACCURACIES = {("near", "fedavg"): 0.7, ("near", "fedprox"): 0.8, ("far", "fedavg"): 0.6, ("far", "fedprox"): 0.5}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods in two settings, three seeds, of which FedProx far away lacks one; a label tries to break out."""
    folder = tmp_path_factory.mktemp("suite")
    suite = read_suite(write_suite(folder, methods={"fedavg": {"label": "FedAvg"}, "fedprox": {"label": "<b>FedProx"}}))
    rows: list[dict[str, object]] = []
    for (setting, method), accuracy in ACCURACIES.items():
        for seed in range(2 if (setting, method) == ("far", "fedprox") else 3):
            about = {"setting": setting, "method": method, "label": suite.methods[method].label, "seed": seed}
            about |= {
                "values": "{}",
                "points": 2,
                "status": "done",
                "run": "r",
                "commit": "",
                "cpu": "",
                "suite": "tiny",
            }
            measured = {"ga": accuracy + 0.01 * seed, "nll_calibrated": 1 - accuracy, "ece": 0.1, "ece_calibrated": 0.1}
            rows.append({**about, **measured, "bytes_up": 1000, "client_seconds": 1.0, "server_seconds": 0.1})
    write_results(folder, rows)
    show(suite, [folder], folder)
    return folder / "page.html"


@pytest.fixture
def opened(browser: Any, page: Path) -> Iterator[Any]:
    browser.get(page.as_uri())
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def column(browser: Any, number: int) -> list[str]:
    rows = [row.find_elements("css selector", "td") for row in find(browser, "#table tbody tr")]
    return [cells[number].text for cells in rows]


def test_heads_sort_and_the_filter_chooses(opened: Any) -> None:
    assert sorted(column(opened, 2)) == ["<b>FedProx", "<b>FedProx", "FedAvg", "FedAvg"]
    (head,) = [head for head in find(opened, "#table th") if head.text.startswith("global accuracy")]
    head.find_element("css selector", "button").click()
    assert [text[:4] for text in column(opened, 4)] == ["0.50", "0.61", "0.71", "0.81"]
    head.find_element("css selector", "button").click()
    assert [text[:4] for text in column(opened, 4)] == ["0.81", "0.71", "0.61", "0.50"]
    (box,) = find(opened, "#filter")
    box.send_keys("near fedavg")
    assert column(opened, 1) == ["near"]
    assert find(opened, "#count")[0].text == "1 of 4 rows"


def test_two_methods_are_compared_over_common_seeds(opened: Any) -> None:
    (metric,) = find(opened, "#metric")
    metric.send_keys("global accuracy")
    rows = [[cell.text for cell in row.find_elements("css selector", "td")] for row in find(opened, "#compared tr")]
    assert rows == [
        ["near", "0.7100", "0.8100", "-0.1000 ± 0.0000", "3"],
        ["far", "0.6050", "0.5050", "0.1000 ± 0.0000", "2"],
    ]


def test_pictures_are_there_without_a_network(opened: Any) -> None:
    pictures = find(opened, "img")
    assert pictures
    for picture in pictures:
        assert picture.get_attribute("src").startswith("data:image/png;base64,")
        assert opened.execute_script("return arguments[0].naturalWidth", picture) > 100
