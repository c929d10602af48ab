"""What `bfl-report` says around its numbers: captions, stand-ins, code, wrong words; LaTeX, lists and differences."""

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from bfl_bench import records
from bfl_bench.commands.report import main
from bfl_bench.identity import folder_name
from bfl_bench.report.html import unpack
from bfl_bench.report.listing import describe_age, list_runs
from tests.composing import resolve, write_run
from tests.test_html import Reader, diverge


@cache
def composed(*overrides: str) -> dict[str, Any]:
    return resolve(*overrides)


def make(
    out: Path, method: str, seed: int, *overrides: str, code: dict[str, Any] | None = None, **values: float
) -> Path:
    config = composed(f"method={method}", *overrides) | {"seed": seed}
    folder = write_run(out, config, {"round": config["rounds"], "ga": 0.5, "nll": 1.0, **values})
    if code is not None:
        records.write_json(folder / records.ENVIRONMENT, {"bfl_bench": "0.1.0", **code})
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Call bfl-report; its output without repeated spaces, or with `refused` its error."""

    def report(*words: object, code: int = 0) -> str:
        assert main([str(word) for word in words]) == code
        done = capsys.readouterr()
        return " ".join((done.err if code else done.out).split())

    return report


# The caption


def test_how_a_method_predicts_is_its_own(tmp_path: Path, call: Any) -> None:
    for seed in range(3):
        make(
            tmp_path,
            "fola",
            seed,
            "eval.also_predict=[mean,draws]",
            "eval.predictive=linearised",
            ga=0.8 + 0.011 * seed,
        )
        make(tmp_path, "mcdropout", seed, "model.dropout=0.3", ga=0.7 + 0.01 * seed)
        make(tmp_path, "fvb", seed, "eval.posterior=true", "eval.also_aggregate=[eaa,wb]", ga=0.6 + 0.01 * seed)
    text = call(tmp_path, "--metrics", "ga")
    assert "Tested: the best of 3 rows against the other 2, paired over 3 seeds" in text


def test_the_caption_says_what_was_tested_against_what(tmp_path: Path, call: Any) -> None:
    for alpha in (0.1, 1):
        for seed in range(3):
            make(tmp_path, "fola", seed, f"partition.alpha={alpha}", "local.lr=0.01", ga=0.8 + 0.011 * seed)
            make(tmp_path, "fedavg", seed, f"partition.alpha={alpha}", ga=0.6 + 0.01 * seed)
    text = call(tmp_path, "--metrics", "ga")
    assert "All rows: dataset digits, partition dirichlet, num_clients 10, model mlp, rounds 20." in text
    assert "Each row's own, as one tunes a method: local.lr." in text
    assert (
        "Tested: in each of 2 settings (partition.alpha) the best of 2 rows against the other 1, paired over 3 seeds, "
        "with Holm over 1 test per metric."
    ) in text
    assert "No test" not in text
    assert "not run" not in text
    assert (
        "| 0.1 | fola | 0.01 | 0.8110 +- 0.0110 * | 3 | 0 | | 0.1 | fedavg | 0.1 | 0.6100 +- 0.0100 | 3 | 0 |" in text
    )
    make(tmp_path, "fedprox", 0, "partition.alpha=1", ga=0.9)
    make(tmp_path, "fednova", 0, "partition.alpha=10", ga=0.9)
    make(tmp_path, "fedprox", 0, "partition.alpha=10", ga=0.7)
    text = call(tmp_path, "--metrics", "ga")
    assert "Not tested, having one seed: fedprox at alpha 1." in text
    assert "No test at alpha 10: one seed per row." in text
    assert "| 1 | fedprox | 0.1 | 0.9000 _ | 1 | 0 | | 1 | fola | 0.01 | 0.8110 +- 0.0110 * | 3 | 0 |" in text
    assert "| 10 | fola | - | - | not run | |" in text


def test_methods_that_train_on_different_examples_are_named(tmp_path: Path, call: Any) -> None:
    make(tmp_path, "fedbe", 0)
    make(tmp_path, "fedavg", 0)
    sentence = "dataset.server_samples, which no client trains on, differs (0: fedavg; 200: fedbe"
    assert sentence in call(tmp_path, "--metrics", "ga")
    fair = tmp_path / "fair"
    make(fair, "fedbe", 0)
    make(fair, "fedavg", 0, "dataset.server_samples=200")
    assert "Not on equal terms" not in call(fair, "--metrics", "ga")


def test_nothing_to_compare_is_said(tmp_path: Path, call: Any) -> None:
    make(tmp_path, "fola", 0, "partition.alpha=0.1")
    assert "compared" not in call(tmp_path)
    make(tmp_path, "fola", 0, "partition.alpha=1")
    assert "Nothing is compared: no two rows have the same setting." in call(tmp_path)


# Stand-ins


def test_runs_on_stand_in_data_are_left_out_unless_asked_for(tmp_path: Path, call: Any) -> None:
    make(tmp_path, "fola", 0, "dataset=mnist", ga=0.25)
    for seed in (0, 1):
        made = make(tmp_path, "fola", seed, "dataset=mnist", "data_dir=stand-in", ga=0.75)
        assert made.name.startswith("stand-in-mnist_dirichlet")
    text = call(tmp_path, "--metrics", "ga")
    assert "0.2500" in text
    assert "0.75" not in text
    assert "- 2 runs on random stand-in data; --stand-in shows them" in text
    page = tmp_path / "page.html"
    for words in (["--stand-in"], ["--where", "data_dir=stand-in"], ["--where", "data_dir=made-up"]):
        text = call(tmp_path, "--metrics", "ga", "--html", page, *words)
        assert "| stand-in mnist |" in text
        assert "left out" not in text.lower()
        assert "stand-in mnist" in {row[1] for row in Reader(page.read_text()).rows if len(row) > 2}
    assert "All rows are of random stand-in data: these numbers say nothing about the datasets." in text
    assert "All rows are of random stand-in data" in page.read_text()
    assert unpack(page.read_text())["rows"][0]["name"] == "stand-in mnist"
    for kind in ("latex", "markdown"):
        assert "random stand-in data" in call(tmp_path, "--stand-in", "--format", kind, "--metrics", "ga")
    assert "stand-in mnist," in call(tmp_path, "--stand-in", "--format", "csv", "--metrics", "ga")
    for folder in tmp_path.glob("mnist_*"):
        folder.rename(tmp_path.with_name("elsewhere"))
    assert "2 runs on random stand-in data" in call(tmp_path, code=1)


def test_only_data_from_files_can_be_stood_in_for() -> None:
    for dataset in ("digits", "synthetic"):
        assert folder_name(composed(f"dataset={dataset}", "data_dir=stand-in")).startswith(dataset)
    for dataset in ("cifar10", "femnist", "har"):
        options = ["partition=natural", "num_clients=null"] if dataset != "cifar10" else []
        assert folder_name(composed(f"dataset={dataset}", "data_dir=stand-in", *options)).startswith(
            f"stand-in-{dataset}"
        )
        assert folder_name(composed(f"dataset={dataset}", "data_dir=/data", *options)).startswith(f"{dataset}_")


# Wrong words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--metrics", "gaa"], r"--metrics: got 'gaa', allowed: ga, .*\(did you mean ga\?\)"),
        (["--metrics", "ga", "nll@eaaa"], r"--metrics: got 'nll@eaaa', .*\(did you mean nll@eaa\?\)"),
        (["--by", "local.lrr"], r"--by: got 'local.lrr', allowed: .*local.lr, .*\(did you mean local.lr\?\)"),
        (["--compare", "metod"], r"--compare: got 'metod', .*\(did you mean method\?\)"),
        (["--compare", "seed"], "--compare: got 'seed', allowed: any other key"),
        (["--where", "metod=fola"], r"--where: got 'metod', .*\(did you mean method\?\)"),
        (["--where", "method=fola_"], r"--where method: got 'fola_', allowed: fedavg, fola \(did you mean fola\?\)"),
        (["--where", "seed=["], r"--where seed: got '\[', allowed: a number"),
        (["--where", "seed"], "--where: got 'seed', allowed: KEY=VALUE"),
        (["--to", "."], "--to: got '.', allowed: the name of a file"),
        (["--html", "."], "--html: got '.', allowed: the name of a file"),
        (["--to", f"{__file__}/x"], "--to: got .*, allowed: a file that can be written"),
    ],
)
def test_unknown_names_are_refused(tmp_path: Path, call: Any, words: list[str], sentence: str) -> None:
    make(tmp_path, "fola", 0, **{"nll@eaa": 1.0, "gap": 2.0})
    make(tmp_path, "fedavg", 0)
    assert re.match(f"bfl-report: {sentence}", call(tmp_path, *words, code=2))


def test_known_names_are_taken(tmp_path: Path, call: Any) -> None:
    make(tmp_path, "fola", 0, ga=0.25, **{"nll@eaa": 1.0, "gap": 2.0})
    make(tmp_path, "fedavg", 0, ga=0.75)
    text = call(
        tmp_path, "--metrics", "ga", "gap", "nll@eaa", "kl", "--where", "method=fola", "--by", "model", "local.lr"
    )
    assert "| mlp | 0.1 | 0.2500 | 2.0000 | 1.0000 | - | 1 | 0 |" in text
    assert "0.7500" not in text


# Code


def test_means_over_different_code_are_named(tmp_path: Path, call: Any) -> None:
    one, other = "1" * 40, "2" * 40
    for seed in (0, 1):
        make(tmp_path, "fola", seed, code={"commit": one, "own_code": {"mine": "a" * 64}})
        make(tmp_path, "fedavg", seed, code={"commit": one, "own_code": {"mine": "a" * 64}})
    diverge(make(tmp_path, "fola", 3, code={"commit": other}))  # in no mean
    assert "code" not in call(tmp_path)
    make(tmp_path, "fola", 2, code={"commit": other, "own_code": {"mine": "a" * 64}})
    make(tmp_path, "fedavg", 2, code={"commit": one, "own_code": {"mine": "b" * 64}})
    text = call(tmp_path, "--html", tmp_path / "page.html", "--metrics", "ga")
    mixed = "averages over runs of different code: seeds 0, 1: commit 11111111, mine aaaaaaaa; seed 2: commit"
    assert f"fola {mixed} 22222222, mine aaaaaaaa." in text
    assert f"fedavg {mixed} 11111111, mine bbbbbbbb." in text
    assert "The rows were made with 3 different versions of the code" in text
    assert f"fola {mixed} 22222222" in (tmp_path / "page.html").read_text()
    assert f"fola {mixed} 22222222" in call(tmp_path, "--format", "latex")
    assert call(tmp_path, "--format", "csv", "--metrics", "ga").count(",2 ") == 1  # the last line has no space behind


def test_rows_of_different_code_are_named_and_a_continued_run_has_both(tmp_path: Path, call: Any) -> None:
    before = {"bfl_bench": "0.1.0", "commit": "2" * 40, "own_code": {}}
    make(tmp_path, "fola", 0, code={"commit": "1" * 40, "own_code": {}, "earlier_code": [before]}, ga=0.9)
    make(tmp_path, "fedavg", 0, code={"commit": None})
    text = call(tmp_path)
    assert "averages" not in text
    assert "2 different versions of the code: commit 22222222 and commit 11111111; bfl-bench 0.1.0." in text


def test_repaired_splits_are_named(tmp_path: Path, call: Any) -> None:
    folder = make(tmp_path, "fola", 0)
    make(tmp_path, "fedavg", 0)
    assert "repaired" not in call(tmp_path)
    path = folder / records.SUMMARY
    path.write_text(json.dumps(json.loads(path.read_text()) | {"partition": {"path": "repaired", "moved": 90}}))
    sentence = f"The splits of 1 of 2 runs were repaired, as no draw sufficed ({folder.name}: 90 examples moved)."
    assert sentence in call(tmp_path)


# LaTeX


def test_latex_is_a_table_of_methods_and_settings(tmp_path: Path, call: Any) -> None:
    """Each number in its column: the method's and the setting's, percent for shares alone."""
    for alpha, values in {0.1: (0.9, 0.8, 0.3), 1: (0.5, 0.7, 0.2)}.items():
        for (method, lr), ga in zip((("fola", 0.1), ("fedavg", 0.01), ("fedprox", 0.01)), values, strict=True):
            if (method, alpha) != ("fedprox", 1):
                for seed in range(3):
                    own = 0.5 if (method, alpha) == ("fola", 1) else lr
                    options = [f"partition.alpha={alpha}", f"local.lr={own}"]
                    make(tmp_path, method, seed, *options, ga=ga + 0.001 * seed, nll=1 - ga)
    call(tmp_path, "--metrics", "ga", "nll", "--format", "latex", "--to", tmp_path / "t.tex")
    text = (tmp_path / "t.tex").read_text()
    lines = text.splitlines()
    start = lines.index(r"\toprule")
    assert lines[start + 1 : start + 4] == [
        r" &  & \multicolumn{2}{c}{global accuracy (\%) $\uparrow$} & "
        r"\multicolumn{2}{c}{negative log-likelihood $\downarrow$} \\",
        r"\cmidrule(lr){3-4} \cmidrule(lr){5-6}",
        r" & local.lr & alpha 0.1 & alpha 1 & alpha 0.1 & alpha 1 \\",
    ]
    assert lines[start + 4 : start + 9] == [
        r"\midrule",
        r"fola & 0.1 / 0.5 & \textbf{90.10 $\pm$ 0.10} & 50.10 $\pm$ 0.10 & \textbf{0.1000 $\pm$ 0.0000} & "
        r"0.5000 $\pm$ 0.0000 \\",
        r"fedavg & 0.01 & 80.10 $\pm$ 0.10 & \textbf{70.10 $\pm$ 0.10} & 0.2000 $\pm$ 0.0000 & "
        r"\textbf{0.3000 $\pm$ 0.0000} \\",
        r"fedprox & 0.01 & 30.10 $\pm$ 0.10 & -- & 0.7000 $\pm$ 0.0000 & -- \\",
        r"\bottomrule",
    ]
    assert r"\begin{tabular}{llrrrr}" in lines
    assert text.count("{") == text.count("}")


def test_latex_underlines_and_escapes_and_parts_what_is_too_wide(tmp_path: Path, call: Any) -> None:
    for alpha in (0.1, 1):
        make(tmp_path, "fola", 0, f"partition.alpha={alpha}", ga=0.9)
        make(tmp_path, "fola_released", 0, f"partition.alpha={alpha}", ga=0.25)
    call(tmp_path, "--format", "latex", "--to", tmp_path / "t.tex")
    text = (tmp_path / "t.tex").read_text()
    assert r"\underline{90.00}" in text
    assert r"fola\_released & 25.00" in text
    assert r"Parameters: fola: average\_steps True, eps 0, " in text
    assert r"; fola\_released: average\_steps False, eps 1e-05, " in text
    assert text.count(r"\begin{table}") == 5  # two alphas and five metrics: a table each
    assert r"\caption{As Table~\ref{tab:report}.}" in text
    assert len(set(re.findall(r"\\label{(.*?)}", text))) == 5
    assert not re.search(r"(?<!\\)[_#%](?! needs)", re.sub(r"\\(label|ref){.*?}", "", text))


# Lists and differences


def test_list_shows_every_run(tmp_path: Path, call: Any) -> None:
    done, wild, half, fresh = (make(tmp_path, "fola", seed, "rounds=7") for seed in range(4))
    summary = records.read_json(wild / records.SUMMARY) or {}
    records.write_json(wild / records.SUMMARY, {**summary, "status": "diverged"})
    for folder in (half, fresh):
        (folder / records.SUMMARY).unlink()
    (half / records.CHECKPOINT).mkdir()
    records.write_json(half / records.CHECKPOINT / records.MANIFEST, {"round": 3})
    (half / records.CHECKPOINT / "server-3.safetensors").write_bytes(bytes(5_000_000))
    for path in done.iterdir():
        os.utime(path, (1000, 1000))
    (tmp_path / "no_run").mkdir()
    with FileLock(fresh / records.LOCK):
        text = list_runs([tmp_path], now=1000 + 3 * 86400)
    lines = {
        line[0]: line[1:4] for line in ([c.strip() for c in row.strip("|").split("|")] for row in text.splitlines())
    }
    assert lines[str(done)] == ["done", "7 of 7", "3 days"]
    assert lines[str(wild)][:2] == ["diverged", "7 of 7"]
    assert lines[str(half)][:2] == ["unfinished", "3 of 7"]
    assert lines[str(fresh)][:2] == ["running", "0 of 7"]
    assert re.search(f"{half}.* 5.0. MB", text)
    assert "4 runs" in call(tmp_path, "--list")
    (done / records.SUMMARY).write_text("{")
    assert "| damaged |" in call(tmp_path, "--list")
    assert "no run below" in call(tmp_path / "no_run", "--list", code=1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 seconds"), (119, "119 seconds"), (120, "2 minutes"), (7200, "2 hours"), (400_000, "5 days")],
)
def test_ages(seconds: float, text: str) -> None:
    assert describe_age(seconds) == text


def test_diff_shows_what_differs_and_nothing_else(tmp_path: Path, call: Any) -> None:
    one = make(tmp_path, "fola", 0, "engine=processes", code={"commit": "a", "own_code": {"mine": "x"}}, ga=0.5)
    other = make(tmp_path, "fola", 1, "local.lr=0.01", code={"commit": "a", "own_code": {"mine": "y"}}, ga=0.75)
    text = call("--diff", one, other)
    assert f"A: {one} B: {other}" in text
    assert "| seed | 0 | 1 |" in text
    assert "| local.lr | 0.1 | 0.01 |" in text
    assert "| own_code.mine | x | y |" in text
    assert "| global accuracy ↑ | 0.5 | 0.75 | +0.25 |" in text
    for same in ("rounds", "engine", "commit", "negative", "schema"):
        assert same not in text
    assert "Config: the same Environment: the same Last round: the same" in call("--diff", one, one)
    assert "is not the folder of a run" in call("--diff", one, tmp_path, code=1)


def test_no_argument_means_outputs(tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("outputs"), "fola", 0, ga=0.25)
    assert "| 0.2500 | - | - | - | 1.0000 | 1 | 0 |" in call()
    assert json.loads((next(Path("outputs").iterdir()) / records.SUMMARY).read_text())["status"] == "done"


DAMAGED = {
    "cut": b'{"schema_version": 2, "status": "done", "fin',
    "binary": b"\x89PNG\xff\xfe",
    "a list": b"[]",
    "no status": b'{"schema_version": 2, "final": {"ga": 0.5}}',
    "other types": b'{"schema_version": 2, "status": "done", "final": {"ga": "high"}}',
    "a final that is a number": b'{"schema_version": 2, "status": "done", "final": 7}',
    "deep": b"[" * 100_000,
    "of the future": b'{"schema_version": 99, "status": "done", "final": {"ga": 0.5}}',
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_summaries_are_left_out_with_a_sentence_and_counted(kind: str, tmp_path: Path, call: Any) -> None:
    make(tmp_path, "fola", 0, ga=0.75)
    damaged = [make(tmp_path, "fedavg", seed, ga=0.25) for seed in (0, 1)]
    for folder in damaged:
        (folder / records.SUMMARY).write_bytes(DAMAGED[kind])
    text = call(tmp_path, "--metrics", "ga", "--html", tmp_path / "page.html")
    assert "0.7500" in text
    assert "0.25" not in text
    for folder in damaged:
        (sentence,) = [part for part in text.split(" - ") if str(folder / records.SUMMARY) in part]
        assert sentence.endswith("left out")
    assert text.endswith("- 2 damaged runs in all")
    assert "2 damaged runs in all" in (tmp_path / "page.html").read_text()
    listed = call(tmp_path, "--list")
    assert listed.count("| damaged |") == 2


def test_damaged_configs_environments_and_tables(tmp_path: Path, call: Any) -> None:
    good = make(tmp_path, "fola", 0, ga=0.75, code={"commit": "abc"})
    bad = make(tmp_path, "fedavg", 0, ga=0.25)
    (bad / records.CONFIG).write_bytes(b"\xff: [")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / records.CONFIG).write_text("something: else\n")  # no run's
    text = call(tmp_path, "--metrics", "ga")
    assert f"- {bad / records.CONFIG} is damaged; left out" in text
    assert "other" not in text
    (good / records.ENVIRONMENT).write_text("[]")
    assert "0.7500" in call(tmp_path, "--metrics", "ga")
    (good / records.METRICS).write_text("round,ga\n1,0.5,7\n")
    assert "metrics.csv is damaged" in call(tmp_path, "--html", tmp_path / "page.html", code=1)


@pytest.mark.parametrize("kind", ["binary", "other columns", "no number", "shorter", "a pipe"])
def test_damaged_tables_of_a_page(kind: str, tmp_path: Path, call: Any) -> None:
    path = make(tmp_path, "fola", 0, ga=0.75) / records.CLIENTS
    content = {
        "binary": b"\xff\xfe\0",
        "other columns": b"round,client,akkuracy\n1,0,0.5\n",
        "no number": b"round,client,accuracy\n1,0,x\n",
        "shorter": b"round,client,accuracy\n1,0\n",
    }
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(content[kind])
    said = call(tmp_path, "--metrics", "ga", "--html", tmp_path / "page.html", code=1)
    assert f"{path} is damaged: " in said
    path.unlink()
    path.touch()
    call(tmp_path, "--metrics", "ga", "--html", tmp_path / "page.html")


def test_runs_behind_links_are_found_once(tmp_path: Path, call: Any) -> None:
    run = make(tmp_path / "elsewhere", "fola", 0, ga=0.75)
    there = tmp_path / "runs"
    (there / "deep").mkdir(parents=True)
    (there / "deep" / "linked").symlink_to(run.parent)
    (there / "again").symlink_to(run)
    (there / "round").symlink_to(there)
    (there / "nowhere").symlink_to("nothing")
    listed = call(there, "--list")
    assert listed.count("| done |") == 1
    assert str(there / "again") in listed
    assert "0.7500" in call(there, "--metrics", "ga")
    assert call(there, tmp_path / "elsewhere", "--list").count("| done |") == 1


def test_what_lies_behind_a_link_is_not_removed(tmp_path: Path, call: Any) -> None:
    run = make(tmp_path / "elsewhere", "fola", 0, ga=0.75)
    (run / records.SUMMARY).unlink()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(run.parent)
    assert "nothing to remove" in call(tmp_path / "runs", "--clean", "unfinished", "--yes")
    assert "removed 1 of 1" in call(tmp_path / "elsewhere", "--clean", "unfinished", "--yes")


@pytest.mark.parametrize("value", ["1" * 5000, "2020-13-45"])
def test_values_that_cannot_be_made(value: str, tmp_path: Path, call: Any) -> None:
    make(tmp_path, "fola", 0, ga=0.75)
    assert "--where seed: got " in call(tmp_path, "--where", f"seed={value}", code=2)


@pytest.mark.parametrize("days", ["nan", "inf", "-1"])
def test_an_age_is_a_number(days: str, tmp_path: Path, call: Any) -> None:
    assert "--older-than: got " in call(tmp_path, "--clean", "stale", "--older-than", days, code=2)
