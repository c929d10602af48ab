"""What environment.json says of the code."""

import hashlib
import subprocess
from pathlib import Path

import pytest
import torch

import bfl_bench
from bfl_bench.run import environment
from bfl_bench.run.environment import describe_environment, digest_own_code, join_code


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(home: Path, **sources: str) -> None:
    for name, text in sources.items():
        path = home / f"{name.replace('__', '/').replace('/init', '/__init__')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def digests(*targets: str) -> dict[str, str]:
    return digest_own_code({"method": {"_target_": targets[0]}, "more": [{"deeper": {"_target_": targets[-1]}}]})


def test_parts_of_our_own_have_no_digest() -> None:
    assert digest_own_code({"method": {"_target_": "bfl_bench.methods.fola.Fola", "name": "x"}, "seed": 0}) == {}
    assert digest_own_code({"method": {"_target_": "gone_module.Thing"}, "model": {"_target_": "math.sqrt"}}) == {}


def test_the_digest_is_that_of_the_file(home: Path) -> None:
    write(home, alone_a="x = 1\n")
    expected = hashlib.sha256(b"alone_a\nx = 1\n").hexdigest()
    assert digests("alone_a.Thing") == {"alone_a": expected}
    write(home, alone_a="x = 2\n")
    assert digests("alone_a.Thing")["alone_a"] != expected
    write(home, alone_a="x = 1\n", beside_a="never imported")
    assert digests("alone_a.Thing") == {"alone_a": expected}


def test_what_a_module_imports_from_beside_it_counts(home: Path) -> None:
    sources = {
        "top_b": "import json\nimport torch\nfrom helper_b import f\n",
        "helper_b": "import last_b\nimport top_b\n",  # in a circle
        "last_b": "",
    }
    write(home, **sources)
    before = digests("top_b.Thing")
    for name, text in sources.items():
        write(home, **{name: text + "# changed\n"})
        assert digests("top_b.Thing") != before, name
        write(home, **{name: text})
    assert digests("top_b.Thing") == before


def test_packages_with_relative_imports(home: Path) -> None:
    write(home, pack_c__init="", pack_c__part="from . import other\nfrom .third import g\n", pack_c__other="")
    write(home, pack_c__third="g = 1\n")
    before = digests("pack_c.part.Thing")
    assert list(before) == ["pack_c.part"]
    for name in ("other", "third"):
        write(home, **{f"pack_c__{name}": "g = 2\n"})
        now = digests("pack_c.part.Thing")
        assert now != before, name
        before = now


def test_a_continued_run_keeps_the_code_that_it_had() -> None:
    first, second = ({"bfl_bench": "1", "commit": commit, "own_code": {}} for commit in ("a", "b"))
    assert join_code({**first, "torch": "2"}, {**first, "torch": "1"}) == {**first, "torch": "2"}
    joined = join_code(second, first)
    assert joined == {**second, "earlier_code": [first]}
    assert join_code(second, joined) == joined
    assert join_code(first, joined) == {**first, "earlier_code": [second]}


def test_the_commit_of_the_checkout_is_found_and_changes_mark_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(environment.__file__).relative_to(Path(bfl_bench.__file__).parents[1])
    monkeypatch.setattr(environment, "__file__", str(tmp_path / place))

    def commit() -> str | None:
        found: str | None = describe_environment(torch.device("cpu"), 1, {})["commit"]
        return found

    assert commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    (tmp_path / "file").write_text("one")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert commit() == head
    (tmp_path / "file").write_text("two")
    assert commit() == f"{head}-dirty"
