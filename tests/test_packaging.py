"""What the package says of itself agrees with what it has."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_have_an_allowed_version_of_every_dependency(project: dict[str, Any]) -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert len(pinned) == len(lines)
    for dependency in map(Requirement, project["dependencies"]):
        assert pinned[normalise(dependency.name)] in dependency.specifier, dependency


def test_declared_pythons_are_allowed(project: dict[str, Any]) -> None:
    declared = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert declared == ["3.11", "3.12", "3.13"]
    assert all(python in SpecifierSet(project["requires-python"]) for python in declared)
    assert "3.10" not in SpecifierSet(project["requires-python"])


def test_extras_that_sentences_name_exist(project: dict[str, Any]) -> None:
    extras = set(project["optional-dependencies"])
    named: set[str] = set()
    for folder, suffix in (("bfl_bench", "*.py"), ("conf", "*.yaml"), ("docs", "*.md"), (".", "*.md")):
        paths = (ROOT / folder).rglob(suffix) if folder != "." else (ROOT).glob(suffix)
        for path in paths:
            named |= set(re.findall(r"bfl-bench\[(\w+)\]", path.read_text()))
            named |= {name for found in re.findall(r"'\.\[([\w,]+)\]'", path.read_text()) for name in found.split(",")}
    assert {"dev", "ray", "tensorboard", "mlflow", "wandb"} <= named
    assert named <= extras


def test_everybody_calls_the_same_script() -> None:
    for path in ("Dockerfile", ".github/workflows/ci.yml", "CONTRIBUTING.md"):
        assert ".ci/run" in (ROOT / path).read_text(), path


def test_the_address_is_the_same_everywhere(project: dict[str, Any]) -> None:
    (address,) = {re.match(r"https://[^/]+/[\w-]+", url).group() for url in project["urls"].values()}  # type: ignore[union-attr]
    for path in ("README.md", "scripts/site_hooks.py", "CITATION.cff"):
        assert address in (ROOT / path).read_text(), path
