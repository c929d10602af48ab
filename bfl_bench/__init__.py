"""bfl-bench: the benchmark of Bayesian federated learning."""

from importlib.metadata import version

__version__ = version("bfl-bench")
