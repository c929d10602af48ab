"""Text on the terminal, or into a pipe whose reader may have gone."""

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def say(text: str, end: str = "\n") -> None:
    """Print; where nobody reads any more, as after `| head`, what is left goes nowhere."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        drop_output()


def forgiving(main: Callable[P, int]) -> Callable[P, int]:
    """Let a command that only prints end quietly where nobody reads any more."""

    @functools.wraps(main)
    def call(*arguments: P.args, **options: P.kwargs) -> int:
        try:
            code = main(*arguments, **options)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            drop_output()
            return 0

    return call


def drop_output() -> None:
    """Let what is still printed go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
