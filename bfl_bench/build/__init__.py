"""From a resolved config to objects: `plan` checks what needs no data, `load` makes the experiment."""

from bfl_bench.build.loading import load, reload
from bfl_bench.build.planning import Plan, plan

__all__ = ["Plan", "load", "plan", "reload"]
