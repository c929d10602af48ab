"""Curvature against curvlinops, a library that computes it in other ways."""

import warnings

import pytest
import torch
from torch import nn

from bfl_bench.inference.curvature import mean_hessian
from tests.federation import generator, make_clients, make_task, random_start

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it imports a deprecated part of torch
    import curvlinops

pytestmark = pytest.mark.filterwarnings("ignore")


def test_hessian_of_the_softmax_network() -> None:
    """The order of both: weights row by row, then biases."""
    task = make_task(nn.Sequential(nn.Flatten(), nn.Linear(24, 3)))
    client, start = make_clients((70, 5), shape=(2, 3, 4))[0], random_start(task)
    ours, _ = mean_hessian(task, start, client, generator())
    module = task.model.module
    data = [client.gather(torch.arange(70), generator())]
    operator = curvlinops.HessianLinearOperator(module, nn.CrossEntropyLoss(), list(module.parameters()), data)
    theirs = operator @ torch.eye(75)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)  # float32
    assert theirs.abs().max() > 0.05
