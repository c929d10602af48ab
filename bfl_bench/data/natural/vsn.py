"""Vehicle sensor network: two kinds of vehicles by what a sensor at the road heard and felt; a client per sensor."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from bfl_bench.checks import AtLeast, Between
from bfl_bench.data.dataset import Dataset
from bfl_bench.data.natural.owning import assemble, draw_test
from bfl_bench.data.sources import load_content
from bfl_bench.data.sources.federations import Examples


@dataclass(frozen=True)
class VehicleSensors:
    """50 acoustic and 50 seismic features, standardised per sensor by those who published them."""

    name: str
    test_fraction: Annotated[float, Between(0.01, 0.99)]
    split_seed: Annotated[int, AtLeast(0)]

    def load(self, data_dir: Path) -> Dataset:
        examples: Examples = load_content("vsn", data_dir)
        in_test = draw_test(examples.owner, self.test_fraction, self.split_seed, "vsn")
        x = torch.from_numpy(examples.x.astype(np.float32))
        return assemble(x, torch.from_numpy(examples.y), examples.owner, in_test, num_classes=2)
