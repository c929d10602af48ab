"""What a run ran on: versions, commit, a user's own code, device."""

import ast
import hashlib
import importlib.util
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bfl_bench.devices import describe_device

CODE = ("bfl_bench", "commit", "own_code")
"""Keys of an environment that say with which code a run was made."""


def describe_environment(device: torch.device, threads: int, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bfl_bench": version("bfl-bench"),
        "commit": _commit(),
        "own_code": digest_own_code(config),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "platform": platform.platform(),
        "cpu": describe_cpu(),
        "device": describe_device(device),
        "threads": threads,
    }


def describe_cpu() -> dict[str, str]:
    """Name the processor and the instructions that torch uses on it: others round differently."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {"name": next(names, platform.processor()), "instructions": torch.backends.cpu.get_cpu_capability()}


def join_cpus(environment: Mapping[str, Any], earlier: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Add the processors that a continued run was on before, and write a sentence where the last was another one."""
    now, last = environment["cpu"], earlier.get("cpu")
    before = [*earlier.get("earlier_cpus", []), *([last] if last else [])]
    kept = [cpu for i, cpu in enumerate(before) if cpu != now and cpu not in before[:i]]
    sentence = None
    if last and last != now:
        names = [f"{cpu.get('name')} ({cpu.get('instructions')})" for cpu in (last, now)]
        sentence = f"begun on {names[0]}, continued on {names[1]}: the result is that of neither alone"
    return {**environment, **({"earlier_cpus": kept} if kept else {})}, sentence


def _commit() -> str | None:
    """The commit of the checkout, marked where files differ from it; None for an installed wheel."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def join_code(environment: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Add to the environment of a run that is continued the code it was made with before, where that was another."""
    before = [*earlier.get("earlier_code", []), {key: earlier.get(key) for key in CODE}]
    now = {key: environment.get(key) for key in CODE}
    kept = [code for i, code in enumerate(before) if code != now and code not in before[:i]]
    return {**environment, **({"earlier_code": kept} if kept else {})}


def digest_own_code(config: Mapping[str, Any]) -> dict[str, str]:
    """Compute the sha256 of the source of each module that a `_target_` names and that is not ours, by module.

    What such a module imports from beside it, in its own folder or package, counts with it.
    """
    modules = sorted({target.rpartition(".")[0] for target in _targets(config)})
    found: dict[str, str] = {}
    for module in modules:
        if _is_foreign(module) and (files := _sources(module)):
            digest = hashlib.sha256()
            for name in sorted(files):
                digest.update(f"{name}\n".encode() + files[name])
            found[module] = digest.hexdigest()
    return found


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(target := node.get("_target_"), str):
            yield target
        for value in node.values():
            yield from _targets(value)


def _is_foreign(module: str) -> bool:
    return bool(module) and module.split(".")[0] != "bfl_bench"


def _sources(module: str) -> dict[str, bytes]:
    """Read the source of a module, and of those it imports from the same folder, by their names."""
    first = _find(module)
    if first is None:
        return {}
    home = first.parents[module.count(".") + (first.name == "__init__.py")]
    found: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _find(name)
        if name in found or not _is_foreign(name) or path is None or home not in path.parents:
            continue
        found[name] = path.read_bytes()
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        waiting += _imported(found[name], package)
    return found


def _find(module: str) -> Path | None:
    """Find the Python file of a module; None where there is none, as for what is compiled."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    path = Path(spec.origin).resolve() if spec is not None and spec.has_location and spec.origin else None
    return path if path is not None and path.suffix == ".py" else None


def _imported(source: bytes, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(name, package) if node.level else name
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
