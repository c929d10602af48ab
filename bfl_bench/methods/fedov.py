"""FedOV: clients learn to say "none of my classes", and the server lets them vote.

Diao, Li, He: "Towards Addressing Label Skews in One-Shot Federated Learning", ICLR 2023. Every network has one more
output for what is unknown. A client teaches it with destroyed versions of its images, and with the same moved towards
its classes (adversarial enhancement). A test example gets the sum of all clients' probabilities, without the unknown:
who does not know abstains. The global model is the ensemble: all clients' networks.

Deviations from the authors' code: it trains with Adam (learning rate 0.001), here it is `local`'s optimizer as for
every method; each client starts from an initial network of its own, here from the broadcast one; its mixing of
embeddings, with weight 0.01, is left out. It draws the place of a cut and a rotation for each image, here one for all
images of a batch that get it; it blurs with a Gaussian so wide that it is a mean, here it is one; holes are less
elongated here. An adversarial step is 0.002 for images from 0 to 1, here that share of the range, within which images
stay, while theirs may leave it. Its vote can be cut to the most certain clients; here all vote. It ends with a student
that learns the vote on the test images; here the ensemble itself is the global model. In further rounds the clients
start from the average of their models.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from bfl_bench.checks import Above, AtLeast
from bfl_bench.data.outliers import destroy, push
from bfl_bench.errors import UnsuitableError
from bfl_bench.inference.point import VotingMethod
from bfl_bench.inference.train import train
from bfl_bench.method import Client, Needs, Task, Tensors, Update


@dataclass(frozen=True)
class FedOv(VotingMethod):
    needs: ClassVar[Needs] = Needs(any_server_step=True, classes=True, extra_outputs=1)

    second: bool
    adversarial_steps: Annotated[int, AtLeast(0)]
    adversarial_step: Annotated[float, Above(0)]

    def check(self, task: Task) -> None:
        if len(task.data.input_shape) != 3:
            needed = f"images, which fedov destroys (these inputs are of shape {task.data.input_shape})"
            raise UnsuitableError(needed, "dataset")

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        data, unknown, loss_of = task.data, task.num_classes, task.likelihood.loss

        def loss_of_outliers(x: Tensor) -> Tensor:
            return loss_of(task.model(x), torch.full((len(x),), unknown, device=x.device))

        def teach_unknown(x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
            outliers = destroy(x, data.low, rng)
            loss = loss_of_outliers(outliers)
            if self.second:  # of an image's wrong answers, "unknown" is to be the best
                others = logits.scatter(1, y[:, None], float("-inf"))
                loss = loss + loss_of(others, torch.full_like(y, unknown))
            if self.adversarial_steps > 0:
                steps = self.adversarial_steps
                moved = push(outliers, data.low, data.high, loss_of_outliers, steps, self.adversarial_step)
                loss = loss + loss_of_outliers(moved)
            return loss

        trained = train(task, broadcast["params"], client, rng, extra_loss=teach_unknown)
        local = {"models": trained.vector[None]}
        return Update(message={"params": trained.vector}, local=local, metrics=trained.metrics)
