"""How a process that trains is set up."""

import ctypes
from contextlib import suppress

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def set_up_process(threads: int) -> None:
    """So many threads for torch; memory that is freed stays with the process.

    By default glibc gives a freed vector back to the system and gets it anew, page by page, in the next step.
    """
    torch.set_num_threads(threads)
    with suppress(OSError, AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # larger blocks are given back all the same
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)
