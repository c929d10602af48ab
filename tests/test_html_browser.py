"""The page of `bfl-report --html` in a real browser."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_html import HOSTILE, diverge, make, make_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods at two alphas, one of them not run, one diverged, and a run that has few files and a bad name."""
    runs = tmp_path_factory.mktemp("page") / "runs"
    for seed in (0, 1):
        make(runs, "fedavg", seed, 0.2, 0.5 + 0.1 * seed)
        make(runs, "fola", seed, 0.3, 0.8 + 0.06 * seed)
        make(runs, "fedavg", seed, 0.4, 0.6 + 0.1 * seed, alpha=1)
        diverge(make(runs, "fedprox", seed, 0.4, alpha=1))
    old = make(runs, "fola", 0, 0.1, 0.3, alpha=1, note=HOSTILE)
    for name in ("clients.csv", "reliability.csv", "partition.csv", "timing.csv"):
        (old / name).unlink()
    make_page(runs, "--by", "note")
    return runs.parent / "pages" / "page.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver

    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    assert all(programs), "install chromium and chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any, page: Path) -> Iterator[Any]:
    """The page as it opens at a desk; no test may leave an error on the console."""
    resize(browser, 1400)
    show(browser, page)
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def show(browser: Any, page: Path) -> None:
    """Open the page, and wait until its script has read the data."""
    browser.get(page.as_uri())
    wait_for(browser, "return document.getElementById('count').textContent !== ''")


def wait_for(browser: Any, script: str, *arguments: object) -> None:
    for _ in range(100):
        if browser.execute_script(script, *arguments):
            return
        time.sleep(0.1)
    raise AssertionError(f"never true: {script}")


def look_at(browser: Any, chart: str) -> None:
    """Scroll to a chart, and wait until it is drawn as things stand."""
    browser.execute_script("document.querySelector(arguments[0]).scrollIntoView()", chart)
    wait_for(browser, "return document.querySelector(arguments[0]).childElementCount > 0", chart)
    frames = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50)))"
    browser.execute_async_script(f"const done = arguments[0]; {frames}")


def resize(browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def find(browser: Any, selector: str) -> list[Any]:
    return [element for element in browser.find_elements("css selector", selector) if element.is_displayed()]


def column(browser: Any, number: int) -> list[str]:
    """Texts of the visible cells; the columns are swatch, note, alpha, method, ga, ..."""
    rows = [row.find_elements("css selector", "td") for row in find(browser, "#table tbody tr")]
    return [cells[number].text.split(" ")[0] for cells in rows]


def drawn(browser: Any, chart: str) -> set[str]:
    script = "return [...document.querySelectorAll(arguments[0] + ' [data-row]')].map((mark) => mark.dataset.row)"
    look_at(browser, chart)
    items = "[...document.querySelectorAll('#groups li')].map((item) => [item.dataset.row, item.textContent])"
    names = browser.execute_script(f"return Object.fromEntries({items})")
    return {names[index] for index in browser.execute_script(script, chart)}


def test_a_head_sorts_and_reverses(opened: Any) -> None:
    before = column(opened, 4)
    assert "not" in before  # fedprox at 0.1 was not run
    (head,) = [head for head in find(opened, "#table th") if head.text.startswith("global accuracy")]
    assert head.get_attribute("aria-sort") == "none"
    button = head.find_element("css selector", "button")
    button.click()
    assert head.get_attribute("aria-sort") == "ascending"
    numbers = [text for text in before if text[0].isdigit()]
    assert column(opened, 4) == sorted(numbers) + [text for text in before if not text[0].isdigit()]
    assert column(opened, 4) != before
    button.send_keys("\n")  # the keyboard does the same
    assert head.get_attribute("aria-sort") == "descending"
    assert column(opened, 4) == sorted(numbers, reverse=True) + [text for text in before if not text[0].isdigit()]
    (other,) = [head for head in find(opened, "#table th") if head.text.startswith("partition.alpha")]
    other.find_element("css selector", "button").click()
    assert (head.get_attribute("aria-sort"), other.get_attribute("aria-sort")) == ("none", "ascending")
    assert column(opened, 2) == sorted(column(opened, 2))


def test_the_filter_and_the_legend_choose_rows(opened: Any) -> None:
    everything = drawn(opened, "#curves")
    assert len(everything) == 4  # all that was run and did not diverge
    (box,) = find(opened, "#filter")
    box.send_keys("FOLA alpha=0.1")
    assert column(opened, 3) == ["fola"]
    for chart in ("#curves", "#reliability", "#clients", "#cost"):
        assert drawn(opened, chart) == {"alpha 0.1 · fola"}, chart
    look_at(opened, "#partitions")
    assert len(find(opened, "#partitions figure")) == 1
    assert len(find(opened, "#groups li")) == 1
    box.clear()
    box.send_keys("nothing like it")
    assert column(opened, 3) == []
    assert drawn(opened, "#curves") == set()
    assert "No row to show" in opened.find_element("id", "curves").text
    for _ in "nothing like it":
        box.send_keys("\b")
    assert drawn(opened, "#curves") == everything
    (item,) = [item for item in find(opened, "#groups label") if item.text == "alpha 0.1 · fedavg"]
    item.click()  # the legend hides in the charts alone
    assert drawn(opened, "#curves") == everything - {"alpha 0.1 · fedavg"}
    assert "alpha 0.1 · fedavg" not in drawn(opened, "#cost") | drawn(opened, "#clients")
    assert len(column(opened, 3)) == len(find(opened, "#table tbody tr")) == 7
    find(opened, "#none")[0].click()
    assert drawn(opened, "#curves") == set()
    find(opened, "#all")[0].click()
    assert drawn(opened, "#curves") == everything


def test_the_metric_selector_redraws(opened: Any) -> None:
    def lines() -> list[str]:
        return [line.get_attribute("points") for line in opened.find_elements("css selector", "#curves polyline")]

    look_at(opened, "#curves")
    before = lines()
    select = opened.find_element("id", "metric")
    assert select.get_attribute("value") == "ga"
    select.find_element("css selector", "option[value=nll]").click()
    assert len(lines()) == len(before)
    assert lines() != before
    assert (
        opened.find_element("css selector", "#curves svg").get_attribute("aria-label")
        == "negative log-likelihood over the rounds"
    )
    assert "-log p(label)" in opened.find_element("id", "defined").text
    assert [option.text for option in select.find_elements("css selector", "option")][:2] == [
        "global accuracy",
        "negative log-likelihood",
    ]
    linear = lines()
    opened.find_element("id", "log").click()
    assert lines() != linear
    titles = [title.get_attribute("textContent") for title in opened.find_elements("css selector", "#curves title")]
    assert "alpha 0.1 · fola\nround 2: negative log-likelihood 1.17 (1.128 to 1.212), seeds: 2" in titles


def test_labels_stay_text_and_lacking_files_are_named(opened: Any) -> None:
    assert HOSTILE in opened.find_element("id", "table").text
    assert opened.find_elements("css selector", "b") == []
    for chart, name in {
        "#reliability": "reliability.csv",
        "#clients": "clients.csv",
        "#partitions": "partition.csv",
    }.items():
        look_at(opened, chart)
        text = opened.find_element("css selector", chart).text
        assert f"runs without {name}" in text
        assert HOSTILE in text


@pytest.mark.parametrize("width", [400, 700, 1400])
def test_the_page_does_not_scroll_sideways(opened: Any, page: Path, width: int) -> None:
    resize(opened, width)
    show(opened, page)
    for chart in ("#curves", "#reliability", "#uncertainty", "#clients", "#cost", "#partitions"):
        look_at(opened, chart)
    wide = opened.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width
    ends = "return [...document.querySelectorAll(arguments[0])].map((part) => part.getBoundingClientRect().right)"
    assert max(opened.execute_script(ends, "section, figure, .chart svg")) <= width


def test_a_page_of_many_rows_draws_what_is_seen(browser: Any, tmp_path: Path) -> None:
    """Charts further down come when one scrolls there, strips after the first fifty when one asks, all for print."""
    for i in range(60):
        make(tmp_path / "runs", "fedavg", 0, 0.2, 0.5 + i / 1000, alpha=0.1 + i)
    make_page(tmp_path / "runs")
    resize(browser, 1400)
    show(browser, tmp_path / "pages" / "page.html")
    children = "return document.querySelector('#partitions').childElementCount"
    assert browser.execute_script(children) == 0
    look_at(browser, "#partitions")
    assert len(find(browser, "#partitions figure")) == 12
    assert len(drawn(browser, "#clients")) == 50
    (button,) = find(browser, "#clients button")
    assert button.text == "show all 60"
    button.click()
    assert len(drawn(browser, "#clients")) == 60
    (box,) = find(browser, "#filter")
    box.send_keys("alpha=0.1")
    for chart in ("#cost", "#clients", "#curves"):  # from the last to the first
        assert drawn(browser, chart) == {"alpha 0.1"}, chart
    show(browser, tmp_path / "pages" / "page.html")
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(children) > 0
