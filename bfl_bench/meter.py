"""How far the local updates of this process are: counted in plain numbers, at no cost, for who shows progress."""

from dataclasses import dataclass


@dataclass
class Meter:
    steps: int = 0  # local steps since the process started


METER = Meter()
"""Of this process. Nothing that a run computes reads it."""
