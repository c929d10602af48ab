"""A workload of the benchmark with BlazeFL (its `contrib.fedavg`), client after client in one process.

    python -m peers.blazefl_peer '{"network": "mlp", ...}'

Prints a line of JSON. Its other trainers spread clients over threads, which want a Python without a global lock, or
over processes. Log variances are averaged as they are.
"""

import time
from typing import Any

import torch
import torch.nn.functional as F
from blazefl.contrib.fedavg import FedAvgBaseClientTrainer, FedAvgBaseServerHandler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from peers.work import (
    Result,
    Workload,
    accuracy_of,
    client_data,
    divergence_of,
    make_network,
    print_result,
    read_workload,
)


class Data:
    """What clients hold, as BlazeFL asks for it."""

    def __init__(self, work: Workload) -> None:
        self.parts = [TensorDataset(x, y) for x, y in client_data(work)]

    def get_dataloader(self, type_: Any, cid: int, batch_size: int, generator: torch.Generator) -> DataLoader[Any]:
        return DataLoader(self.parts[cid], batch_size=batch_size, shuffle=True, generator=generator)


class Networks:
    def __init__(self, work: Workload) -> None:
        self.work = work

    def select_model(self, name: str) -> nn.Module:
        return make_network(self.work)


def run(work: Workload) -> Result:
    torch.set_num_threads(1)
    data, networks, steps, rounds = Data(work), Networks(work), 0, []
    share = work.cohort / work.num_clients
    handler = FedAvgBaseServerHandler(
        networks, work.network, data, work.rounds, work.num_clients, share, "cpu", work.batch_size, work.seed
    )
    trainer = FedAvgBaseClientTrainer(
        networks, work.network, data, "cpu", work.num_clients, work.epochs, work.batch_size, work.lr, work.seed
    )

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        found = F.cross_entropy(outputs, y)
        return found + divergence_of(work, trainer.model) if work.bayesian else found

    trainer.criterion = loss
    while not handler.if_stop():
        before = time.perf_counter()
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        for package in trainer.uplink_package():
            handler.load(package)
        rounds.append(time.perf_counter() - before)
    parts = client_data(work)[: 5000 // work.samples + 1]
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Result(rounds, steps, accuracy_of(handler.model, x, y), [])


if __name__ == "__main__":
    print_result(run(read_workload()))
