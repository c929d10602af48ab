"""Named random streams: results depend on the seed and on names, never on the order in which things happen."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from bfl_bench.devices import generators_of

Name = str | int


def derive_seed(seed: int, *names: Name) -> int:
    """A 63-bit seed for the stream of this name."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def stream(seed: int, *names: Name) -> torch.Generator:
    """A fresh generator on the CPU, e.g. `stream(seed, "client", round, client_id)`.

    Torch's generator keeps 32 bits of its seed: among very many streams two may coincide, which does no harm.
    """
    return torch.Generator().manual_seed(derive_seed(seed, *names))


def numpy_stream(seed: int, *names: Name) -> np.random.Generator:
    return np.random.default_rng(derive_seed(seed, *names))


@contextmanager
def seeded_globally(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's own generators seeded within, and as they were afterwards: for code that knows no other, as layers do.

    Not `torch.manual_seed`: without a GPU in use it queues a call, with a formatted stack, every time.
    """
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
