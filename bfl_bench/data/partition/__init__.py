"""How the training samples are dealt out to the clients: one file per `conf/partition/*.yaml`."""

from bfl_bench.data.partition.base import Partition, PartitionConfig
from bfl_bench.data.partition.classes import Classes
from bfl_bench.data.partition.dirichlet import Dirichlet
from bfl_bench.data.partition.disjoint import Disjoint
from bfl_bench.data.partition.file import File
from bfl_bench.data.partition.iid import Iid

__all__ = ["Classes", "Dirichlet", "Disjoint", "File", "Iid", "Partition", "PartitionConfig"]
