"""The documentation as a site: built without a warning, and read without a network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ATTRIBUTES = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(https?:)?//", re.IGNORECASE)


@pytest.mark.documents
def test_the_site_is_built_and_needs_no_network(tmp_path: Path) -> None:
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "concepts.html", "methods.html", "reference/configuration.html"} <= set(pages)
    for name, text in pages.items():
        assert not ATTRIBUTES.search(text), name
    for path in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text()), path
    assert "WeightPosterior" in pages["reference/python.html"]
    assert "expected calibration error" in pages["metrics.html"]
    assert "method=fedprox" in pages["reference/configuration.html"]
