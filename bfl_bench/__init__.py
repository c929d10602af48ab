"""bfl-bench: the benchmark of Bayesian federated learning.

    import bfl_bench as bfl

    run = bfl.run(["method=fola", "rounds=5"])       # what `bfl-run method=fola rounds=5` runs, or has run
    run.metrics                                      # metrics.csv as a DataFrame
    model = bfl.load(run.folder)
    model.predict(x)                                 # probabilities of the classes
    bfl.compare(["outputs"])                         # what `bfl-report outputs` compares

Nothing but Python's own library is imported before one of these is used.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bfl_bench.api import Model, Run, WeightPosterior, compare, load
    from bfl_bench.api import run as run

__all__ = ["Model", "Run", "WeightPosterior", "__version__", "compare", "load", "run"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("bfl-bench")
    if name == "run":
        return importlib.import_module("bfl_bench.run")
    if name in __all__:
        return getattr(importlib.import_module("bfl_bench.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Module(ModuleType):
    """A module that travels between processes by its name, as modules of the plain type do."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return importlib.import_module, (self.__name__,)


class _CallableModule(_Module):
    """The subpackage `run`, which can be called as well, because a function of that name stands in the same place."""

    def __call__(self, *arguments: Any, **options: Any) -> "Run":
        from bfl_bench.api import run

        return run(*arguments, **options)


class _Package(_Module):
    """This package: when Python binds the subpackage `run` to it, that becomes callable."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "run" and type(value) is ModuleType:
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
