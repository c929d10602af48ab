"""The process that worker processes are forked from: it imports what they need once, so that each starts at once.

This module knows no torch. Whoever calls `open_fork_server` before importing torch has both done at the same time.
"""

import multiprocessing
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext

Context = ForkServerContext | SpawnContext


def open_fork_server() -> Context:
    """Where worker processes come from; elsewhere than on Linux forking is not safe, and each starts from nothing."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "bfl_bench.engines.processes"])
    forkserver.ensure_running()  # it ends with this process
    return context
