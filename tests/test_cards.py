"""Cards say what the code knows: they are made of it, so that they cannot fall behind."""

import re
from pathlib import Path

import pytest

from bfl_bench.commands.cards import describe_dataset, describe_method, write_cards
from bfl_bench.commands.config_files import list_options, read_option
from bfl_bench.commands.suite import main
from bfl_bench.records import config_folder
from bfl_bench.suite.results import Result

FOLDERS = [config_folder()]


def method_card(name: str, *results: Result) -> str:
    return describe_method(read_option("method", name, FOLDERS), results)


def numbers(card: str, what: str) -> float:
    found = re.search(rf"\| {what} +\| ([\d.]+)", card)
    assert found
    return float(found[1])


@pytest.mark.parametrize(
    ("method", "received", "sent", "kept"), [("fedavg", 1, 1, 0), ("scaffold", 2, 2, 1), ("fola", 2, 2, 0)]
)
def test_messages_are_counted_in_networks(method: str, received: int, sent: int, kept: int) -> None:
    card = method_card(method)
    found = [numbers(card, what) for what in ("a client receives", "it sends", "it keeps")]
    assert found == pytest.approx([received, sent, kept], abs=0.01)


def test_a_card_has_the_words_of_files_and_modules() -> None:
    card = method_card("fola")
    assert card.startswith("# fola\n\nFOLA (Liu et al. 2023)")
    assert "Deviations: eq. 24" in card
    assert "It predicts by mean, or by draws, or by linearised" in card
    assert re.search(r"`method.batch_weight` +\| `share` +\| of a minibatch in online sums: share, \\\|b\\\|/n", card)
    assert "unlabelled examples on the server" in method_card("fedbe")


def test_the_cost_is_that_of_the_suites_runs() -> None:
    def result(method: str, seed: int, seconds: float, status: str = "done") -> Result:
        return Result(
            setting="digits",
            method=method,
            label=method,
            seed=seed,
            values={},
            status=status,
            points=8,
            run="",
            commit="",
            cpu="",
            measured={"client_seconds": seconds} if status == "done" else {},
        )

    results = [result("fedavg", s, 2.0 + s) for s in range(3)]
    results += [result("fola", s, t) for s, t in enumerate((4, 6, 90))] + [result("fola", 3, 0, "diverged")]
    assert re.search(r"\| digits +\| 2\.00 ", method_card("fola", *results))  # medians: 6 and 3
    assert "What it cost" not in method_card("fola")


def test_a_dataset_is_counted_where_it_is() -> None:
    card = describe_dataset(read_option("dataset", "digits", FOLDERS))
    assert "1,438 training and 359 test examples of shape (1, 8, 8)." in card
    assert re.search(r"\| IID +\| 10 +\| 143 / 144 / 144 +\| 10 / 10 / 10 ", card)
    assert "natural clients" not in card
    assert "Nothing has to be downloaded" in card


def test_a_dataset_that_is_not_here_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BFL_DATA_DIR", str(tmp_path))
    card = describe_dataset(read_option("dataset", "mnist_writers", FOLDERS))
    assert "Its files are not here" in card
    assert "- `mnist`: handwritten digits" in card
    assert "- `qmnist`: who wrote" in card
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_everything_has_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("BFL_DATA_DIR", str(tmp_path / "none"))
    assert main(["cards", "--to", str(tmp_path / "cards")]) == 0
    pages = {path.relative_to(tmp_path / "cards").as_posix() for path in (tmp_path / "cards").rglob("*.md")}
    named = {f"{group}s/{name}.md" for group in ("method", "dataset") for name in list_options(group, FOLDERS)}
    assert pages == named | {"index.md"}
    assert capsys.readouterr().out == f"{len(pages)} pages in {tmp_path / 'cards'}\n"
    index = (tmp_path / "cards" / "index.md").read_text()
    assert all(f"]({name}): " in index for name in named)


def test_links_of_the_index_are_relative(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bfl_bench.commands.cards.list_options", lambda group, _: {"method": ["fedavg"]}.get(group, []))
        write_cards(tmp_path)
    assert "[fedavg](methods/fedavg.md): FedAvg (McMahan" in (tmp_path / "index.md").read_text()
