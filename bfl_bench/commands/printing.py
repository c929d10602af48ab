"""Text on the terminal, or into a pipe whose reader may have gone."""

import os
import sys


def say(text: str) -> None:
    """Print; where nobody reads any more, as after `| head`, what is left goes nowhere."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
