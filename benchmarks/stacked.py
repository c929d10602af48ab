"""A cohort's clients as one network with a further dimension, by torch.func.vmap, beside one client after the other.

Both are bare loops, so that the ratio is what an engine of this kind could gain at best. `benchmarks/benchmark.py
stacked` calls what is here.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from peers.work import Workload, make_data
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Parameters = dict[str, Tensor]

_SMALL = Workload(
    "mlp", num_clients=100, cohort=100, samples=60, epochs=2, batch_size=32, rounds=1, lr=0.05, hidden=32, side=8
)
_MIDDLE = replace(_SMALL, num_clients=10, cohort=10, samples=600, epochs=1, batch_size=20, hidden=100, side=28)
WORKS = [
    _SMALL,
    replace(_SMALL, hidden=100),
    _MIDDLE,
    replace(_MIDDLE, hidden=200, batch_size=32),
    replace(_MIDDLE, network="lenet", batch_size=32),
]


def minibatches(work: Workload) -> list[tuple[Tensor, Tensor]]:
    """Inputs (clients, batch, ...) and labels (clients, batch) of each step."""
    x, y = make_data(work)
    x, y = x.view(work.cohort, work.samples, *x.shape[1:]), y.view(work.cohort, work.samples)
    pairs = zip(torch.split(x, work.batch_size, 1), torch.split(y, work.batch_size, 1), strict=True)
    return list(pairs) * work.epochs


def one_by_one(work: Workload, network: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[Parameters]:
    """Every client's parameters after its training."""
    start = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    results = []
    for client in range(work.cohort):
        network.load_state_dict(start)
        for x, y in batches:
            network.zero_grad()
            F.cross_entropy(network(x[client]), y[client]).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for parameter in network.parameters():
                    assert parameter.grad is not None
                    parameter.add_(parameter.grad, alpha=-work.lr)
        results.append({name: parameter.detach().clone() for name, parameter in network.named_parameters()})
    network.load_state_dict(start)
    return results


def stacked(work: Workload, network: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Parameters:
    """The same, with the clients as the first dimension of every parameter."""

    def loss(parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, parameters, (x,)), y)

    gradients = vmap(grad(loss))
    parameters = {
        name: parameter.detach().expand(work.cohort, *parameter.shape).clone()
        for name, parameter in network.named_parameters()
    }
    for x, y in batches:
        for name, gradient in gradients(parameters, x, y).items():
            parameters[name].add_(gradient, alpha=-work.lr)
    return parameters
