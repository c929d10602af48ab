"""Imports point down: a module may import only modules of lower layers, or its own package."""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "bfl_bench"
LAYERS = [  # from the bottom
    {"errors", "groups", "meter"},
    {"devices"},
    {"checks", "rng", "reading"},
    {"records"},
    {"identity"},
    {"aggregators", "models"},
    {"likelihood"},
    {"evaluation"},
    {"data"},
    {"method"},
    {"inference"},
    {"methods", "engines"},
    {"run", "report"},
    {"build"},
    {"papers"},
    {"suite"},
    {"commands"},
    {"api"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def imported(path: Path) -> set[str]:
    """Dotted names below bfl_bench that a file imports, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def part_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "bfl_bench" and len(parts) > 1 and parts[1] in RANK else None


def test_every_module_has_a_layer() -> None:
    found = {path.stem for path in PACKAGE.glob("*.py")} | {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert found - {"__init__"} == set(RANK)


def test_imports_point_down() -> None:
    for path in PACKAGE.rglob("*.py"):
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        for other in filter(None, map(part_of, imported(path))):
            assert other == here or RANK[other] < RANK[here], f"{path.name} ({here}) imports {other}"


def test_methods_do_not_import_one_another() -> None:
    for path in (PACKAGE / "methods").glob("*.py"):
        assert not [name for name in imported(path) if name.startswith("bfl_bench.methods")], path


def test_records_and_show_know_no_torch() -> None:
    names = ("reading", "records", "identity", "groups", "run/observers", "commands/summary", "errors", "checks")
    files = [PACKAGE / f"{name}.py" for name in names]
    for path in (*files, *(PACKAGE / "report").glob("*.py")):
        assert not [module for module in imported(path) if module.split(".")[0] == "torch"], path


def test_the_registry_of_columns_needs_nothing_but_python() -> None:
    """So that reports may import it; and importing its package loads nothing else."""
    for name in imported(PACKAGE / "evaluation/columns.py"):
        assert name.split(".")[0] in sys.stdlib_module_names, name
    assert (PACKAGE / "evaluation/__init__.py").read_text() == ""


def test_only_the_command_line_knows_hydra() -> None:
    knowing = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if any(module.split(".")[0] in ("hydra", "omegaconf") for module in imported(path))
    }
    assert knowing <= {"commands", "api.py"}
