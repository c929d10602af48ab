"""Curvature of a network's loss on a client's data, on the flat vector."""

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.func import functional_call, grad, vmap

from bfl_bench.flat import FlatModel
from bfl_bench.method import Client, Task

Fisher = Literal["batch_gradient", "per_sample"]
"""Squares of the gradients of minibatch means, or of single examples (the diagonal of the empirical Fisher)."""


def mean_squared_gradient(model: FlatModel, x: Tensor, y: Tensor, chunk_size: int = 16) -> Tensor:
    """Mean over examples of the squared gradient of the cross-entropy at the parameters the model holds, (P,)."""
    trainable = {name: value.detach() for name, value in model.module.named_parameters() if value.requires_grad}

    def loss(parameters: dict[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model.module, parameters, (example[None],))
        return F.cross_entropy(logits, label[None])

    per_example = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    total = torch.zeros_like(model.gradient)
    entries = [entry for entry in model.layout.entries if entry.stop <= model.layout.num_trainable]
    for part_x, part_y in zip(torch.split(x, chunk_size), torch.split(y, chunk_size), strict=True):
        gradients = per_example(trainable, part_x, part_y)
        for entry in entries:
            entry.view(total).add_(gradients[entry.name].square().sum(0))
    return total / len(y)


def diagonal_fisher(task: Task, vector: Tensor, client: Client, rng: torch.Generator, kind: Fisher) -> Tensor:
    """One pass over the client's data at `vector`, as it trains: the mean of squared gradients, (P,).

    For `batch_gradient`, sum_b |b|/n g_b^2 with g_b the gradient of the mean over minibatch b, of `local.batch_size`.
    """
    model = task.model
    model.load(vector)
    model.module.eval()
    total = torch.zeros_like(model.gradient)
    for positions in torch.split(torch.arange(len(client), device=vector.device), task.local.batch_size):
        x, y = client.gather(positions, rng)
        if kind == "per_sample":
            total.add_(mean_squared_gradient(model, x, y), alpha=len(y) / len(client))
        else:
            gradient = model.backward(F.cross_entropy(model(x), y))
            total.addcmul_(gradient, gradient, value=len(y) / len(client))
    return total
