"""A workload of the benchmark with pfl (Granqvist et al. 2024), in one process.

    python -m peers.pfl_peer '{"network": "mlp", ...}'

Prints a line of JSON. Users are drawn as pfl's guide advises, so that none comes again before all have come. pfl takes
a user's minibatches in the same order every time, and has no shuffling to pay for. Log variances are averaged as they
are.
"""

import time

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from peers.work import Result, Workload, accuracy_of, client_data, loss_of, make_network, print_result, read_workload


class Network(nn.Module):
    """The network as pfl wants it: with its loss and its metrics."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.network = make_network(work)
        self.work = work
        self.steps = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        return loss_of(self.work, self.network, x, y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, object]:
        return {}


class Clock(TrainingProcessCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.rounds: list[float] = []
        self._before = time.perf_counter()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        now = time.perf_counter()
        self.rounds.append(now - self._before)
        self._before = now
        return False, Metrics()


def run(work: Workload) -> Result:
    torch.set_num_threads(1)
    data = client_data(work)
    network = Network(work)
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    users = FederatedDataset(
        lambda user: Dataset(raw_data=data[user]), get_user_sampler("minimize_reuse", list(range(work.num_clients)))
    )
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=work.rounds,
            evaluation_frequency=work.rounds + 1,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=work.epochs, local_learning_rate=work.lr, local_batch_size=work.batch_size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,  # which prints them
    )
    x, y = (torch.cat(parts) for parts in zip(*data[: 5000 // work.samples + 1], strict=True))
    return Result(clock.rounds, network.steps, accuracy_of(network.network, x, y), [])


if __name__ == "__main__":
    print_result(run(read_workload()))
