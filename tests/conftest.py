"""What all tests share: one thread, as in a run, and a global generator that is the same before every test."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed_torch() -> None:
    """Networks take their initial parameters from the global generator."""
    torch.manual_seed(20250101)
