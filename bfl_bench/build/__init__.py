"""From a resolved config to objects: `plan` checks what needs no data, `load` makes the experiment."""

from bfl_bench.build.loading import load, make_plain, plan_again, reload
from bfl_bench.build.planning import Plan, plan

__all__ = ["Plan", "load", "make_plain", "plan", "plan_again", "reload"]
