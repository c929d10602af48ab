"""Named random streams: results depend on the seed and on names, never on the order in which things happen."""

import hashlib

import numpy as np
import torch

Name = str | int


def derive_seed(seed: int, *names: Name) -> int:
    """A 63-bit seed for the stream of this name."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def stream(seed: int, *names: Name) -> torch.Generator:
    """A fresh generator on the CPU, e.g. `stream(seed, "client", round, client_id)`."""
    return torch.Generator().manual_seed(derive_seed(seed, *names))


def numpy_stream(seed: int, *names: Name) -> np.random.Generator:
    return np.random.default_rng(derive_seed(seed, *names))
