"""The examples run from beginning to end."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "from_data_to_reliability.ipynb"


@pytest.mark.slow
def test_own_method(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "own_method.py"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert sorted(line.split()[0] for line in table[1:]) == ["fedavg", "noisy", "noisy"]
    noisiest = next(line.split() for line in table if line.split()[:2] == ["noisy", "0.10"])
    assert last == f"accuracy of the last model: {float(noisiest[2]):.4f}"
    assert len(list((tmp_path / "outputs").iterdir())) == 3


@pytest.mark.documents
@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
def test_notebook(tmp_path: Path) -> None:
    """It runs, shows its progress, and what is stored of its tables is what it makes now."""
    import nbformat
    from nbclient import NotebookClient

    stored, made = (nbformat.read(NOTEBOOK, 4) for _ in range(2))
    os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
    NotebookClient(made, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = "".join(text_of(made, "stderr"))
    assert "\rround 10/10 client 10/10 step 230/230 100%" in shown
    assert (tmp_path / "model.safetensors").stat().st_size > 200_000
    for before, now in zip(stored.cells, made.cells, strict=True):
        assert kinds_of(before) == kinds_of(now)
    assert "\r" not in "".join(text_of(stored, "stderr"))
    assert NOTEBOOK.stat().st_size < 120_000


def text_of(notebook: Any, name: str) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output["text"] for output in outputs if output.get("name") == name]


def kinds_of(cell: Any) -> list[list[str]]:
    """List what kinds of data a cell shows."""
    return [sorted(output["data"]) for output in cell.get("outputs", []) if "data" in output]
