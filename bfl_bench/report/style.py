"""How figures look: one style file, in effect while a figure is made and not beyond."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

STYLE = Path(__file__).with_name("bfl.mplstyle")


@contextmanager
def style() -> Iterator[None]:
    """Make what is drawn meanwhile look as all figures here; a notebook's own style is left alone."""
    import matplotlib

    with matplotlib.rc_context(fname=STYLE):
        yield


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Let a function that draws do so in the common style."""

    @functools.wraps(draw)
    def drawing(*args: P.args, **kwargs: P.kwargs) -> T:
        with style():
            return draw(*args, **kwargs)

    return drawing
