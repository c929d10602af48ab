"""How the training samples are dealt out to the clients: one file per `conf/partition/*.yaml`."""

from bfl_bench.data.partition.classes import Classes
from bfl_bench.data.partition.dirichlet import Dirichlet
from bfl_bench.data.partition.disjoint import Disjoint
from bfl_bench.data.partition.file import File
from bfl_bench.data.partition.iid import Iid
from bfl_bench.data.partition.natural import Natural, deal_test, indices_of
from bfl_bench.data.partition.partition import Partition, PartitionConfig, hold_out

__all__ = [
    "Classes",
    "Dirichlet",
    "Disjoint",
    "File",
    "Iid",
    "Natural",
    "Partition",
    "PartitionConfig",
    "deal_test",
    "hold_out",
    "indices_of",
]
