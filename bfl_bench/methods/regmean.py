"""RegMean: linear layers merged so that their outputs change least on the clients' inputs.

Jin, Ren, Preotiuc-Pietro, Cheng: "Dataless Knowledge Fusion by Merging Weights of Language Models", ICLR 2023. Clients
train as in FedAvg; one forward pass over their data gives the second moments G_k of the inputs of every layer. The
server takes the weights W with the least squared distance to the clients' outputs, W = (sum p_k W_k G_k) (sum p_k
G_k)^-1, a least-squares problem whose data it never sees: of clients that solved linear regressions it makes the
solution of the pooled data. It is FedLPA's equation with all B_k = I. Off-diagonal entries of G_k are multiplied by
`off_diagonal`, 0.1 or 0.9 in the authors' code; at 0 it is Fisher merging with the inputs' squares.

Deviations: biases are columns of W, with the input one, where the authors average them; convolutions are linear layers
of patches, and have no place in the paper. `weights: size` makes p_k G_k a sum over examples, as in the paper. To every
G_k `damping` is added on the diagonal, so that inputs that are zero everywhere get the plain average.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from bfl_bench.checks import Above, Between
from bfl_bench.inference import kronecker
from bfl_bench.inference.merging import read_factor, read_replies
from bfl_bench.inference.point import PointMethod
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Replies, Task, Tensors, Update


@dataclass(frozen=True)
class RegMean(PointMethod):
    off_diagonal: Annotated[float, Between(0, 1)]
    damping: Annotated[float, Above(0)]

    def check(self, task: Task) -> None:
        kronecker.find_layers(task.model)

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        trained = train(task, broadcast["params"], client, rng)
        moments = kronecker.input_moments(task, trained.vector, client, rng)
        message = {f"{name}.A": kronecker.upper_triangle(moment) for name, moment in moments.items()}
        message["params"] = trained.vector
        return Update(message=message, local={"params": trained.vector}, metrics=trained.metrics)

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        messages, shares, aggregated = read_replies(task, self.weights, replies)
        for layer in kronecker.find_layers(task.model):
            a = torch.stack([self._temper(read_factor(message, layer, "A")) for message in messages])
            means = torch.stack([layer.read(message["params"].double()) for message in messages])
            b = torch.eye(means.shape[1]).to(a).expand(len(a), -1, -1)
            posteriors = kronecker.Posteriors(a, b, means, shares)
            # Exact where all B are the same.
            layer.write(aggregated, posteriors.approximate_inverse()(posteriors.right_side()))
        return task.server.move(state, aggregated), {}

    def _temper(self, moment: Tensor) -> Tensor:
        """Shrink what lies off the diagonal, and add to the diagonal."""
        return self.off_diagonal * moment + torch.diag((1 - self.off_diagonal) * moment.diagonal() + self.damping)
