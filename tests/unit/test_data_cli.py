import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bfl_bench.commands.data import main
from bfl_bench.data import sources
from bfl_bench.data.sources import SOURCES, Arrays
from bfl_bench.data.sources.federations import CheckedFiles
from bfl_bench.data.sources.fetching import Way
from bfl_bench.data.sources.files import File, PublishedFiles

CONTENT = b"the published bytes"


def parse_nothing(data_dir: Path) -> Arrays:
    raise AssertionError("bfl-data never parses")


def fetch(staging: Path) -> None:
    (staging / "MNIST").mkdir()
    (staging / "MNIST/file").write_bytes(CONTENT)


@pytest.fixture(autouse=True)
def small_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    """MNIST as one small file; no test here needs the network, or torchvision with its long import."""
    file = File("MNIST/file", len(CONTENT), "sha256", hashlib.sha256(CONTENT).hexdigest())
    layout = PublishedFiles((file,), parse_nothing)
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], layouts=(layout,), ways=(Way("test", fetch),)))
    monkeypatch.setattr(sources, "import_torchvision_datasets", lambda: None)


def list_states(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: line.split()[1] for line in lines[2:]}


def test_list_shows_every_dataset_and_its_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BFL_DATA_DIR", str(tmp_path))
    assert main(["list"]) == 0
    states = dict.fromkeys([*SOURCES, "pmnist", "mnist_writers"], "missing")
    embedded = "digits synthetic diabetes breast_cancer cultivars pooled_digits linear sine".split()
    states |= dict.fromkeys(embedded, "embedded")
    assert list_states(capsys) == states
    fetch(tmp_path)
    main(["list"])
    assert list_states(capsys) == states | {"mnist": "present", "pmnist": "present"}  # the writers need qmnist too
    (tmp_path / "MNIST/file").write_bytes(CONTENT[1:])
    main(["list"])
    assert list_states(capsys) == states | dict.fromkeys(("mnist", "pmnist", "mnist_writers"), "altered")


def test_list_is_quick_as_it_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; from bfl_bench.commands.data import main; main(['list', '--data-dir', sys.argv[1]]); "
    code += "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fashion_mnist  missing" in done.stdout


def test_get_then_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--data-dir", str(tmp_path)]
    assert main(["verify", "mnist", *place]) == 1
    assert f"bfl-data: {tmp_path}/MNIST/file is missing" in capsys.readouterr().err
    assert main(["get", "mnist", *place]) == 0
    assert (tmp_path / "MNIST/file").read_bytes() == CONTENT
    assert main(["verify", "mnist", *place]) == 0
    (tmp_path / "MNIST/file").write_bytes(CONTENT[::-1])
    capsys.readouterr()
    assert main(["verify", "mnist", *place]) == 1
    assert f"bfl-data: {tmp_path}/MNIST/file is truncated or altered: its sha256" in capsys.readouterr().err
    assert main(["get", "mnist", *place]) == 0
    assert (tmp_path / "MNIST/file").read_bytes() == CONTENT


def test_one_failure_does_not_keep_other_datasets_from_their_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(tmp_path)
    assert main(["verify", "svhn", "mnist", "--data-dir", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "mnist: every file is as published" in captured.out
    assert captured.err.startswith(f"bfl-data: {tmp_path}/svhn/train_32x32.mat is missing")


def test_datasets_made_of_others_get_and_verify_these(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--data-dir", str(tmp_path)]
    assert main(["get", "pmnist", "mnist", *place]) == 0
    assert capsys.readouterr().out == f"mnist: present, every file is as published, in {tmp_path}/MNIST\n"  # once
    assert main(["verify", "mnist_writers", *place]) == 1
    captured = capsys.readouterr()
    assert "mnist: every file is as published" in captured.out
    assert "qmnist-train-labels-idx2-int.gz is missing" in captured.err


@pytest.mark.parametrize("command", ["get", "verify"])
def test_embedded_datasets_need_nothing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "digits", "synthetic"]) == 0
    assert f"digits: embedded, there is nothing to {command}" in capsys.readouterr().out


def test_unknown_name_is_one_sentence_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["get", "mnist", "minst", "--data-dir", str(tmp_path)]) == 2
    allowed = "mnist, fashion_mnist, kmnist, emnist, cifar10, cifar100, svhn, qmnist, femnist, har, har_raw, vsn, "
    allowed += "shakespeare, abalone, auto_mpg, wine, bike, kin8nm, pmnist, mnist_writers, digits, diabetes, "
    allowed += "breast_cancer, cultivars, pooled_digits, linear, sine, synthetic"
    assert capsys.readouterr().err == f"bfl-data: dataset: got 'minst', allowed: {allowed}\n"
    assert list(tmp_path.iterdir()) == []


def test_interrupt_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(staging: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], ways=(Way("test", interrupt),)))
    assert main(["get", "mnist", "--data-dir", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "bfl-data: interrupted\n"
    assert not (tmp_path / "MNIST").exists()


def test_what_has_no_published_sum_is_called_plausible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LEAF's files; a part that nobody publishes is no published file either, although its sum is known."""
    fetch(tmp_path)
    checked = CheckedFiles(("MNIST/file",), lambda data_dir: None)
    known = SOURCES["mnist"].layouts[0]
    sentences = {
        "every file is as published": {"layouts": (known,)},
        "plausible, no published sum": {"layouts": (checked,), "ways": ()},
        "every file has its known sum; it is a part": {"layouts": (known,), "ways": (), "not_offered": (known,)},
    }
    for sentence, changes in sentences.items():
        monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], **changes))
        for command in ("verify", "get"):
            assert main([command, "mnist", "--data-dir", str(tmp_path)]) == 0
            assert sentence in capsys.readouterr().out
    assert [name for name, source in SOURCES.items() if not all(layout.has_sums for layout in source.layouts)] == [
        *("kmnist", "emnist"),
        *("femnist", "har", "vsn"),
        *("wine", "bike", "kin8nm"),
    ]
