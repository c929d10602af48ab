"""What a run ran on: versions, commit, device."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch


def describe_environment(device: torch.device, threads: int) -> dict[str, str | int | None]:
    return {
        "bfl_bench": version("bfl-bench"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": threads,
    }


def _commit() -> str | None:
    """The commit of the checkout, marked where files differ from it; None for an installed wheel."""
    folder = Path(__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
