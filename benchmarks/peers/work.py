"""The work that every program of the benchmark does: the data, the networks, the loss. Torch only.

Flower, pfl, BlazeFL, the bare loop and bfl-bench all take the data from here; all but bfl-bench take the networks too.
"""

import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CLASSES = 10
LOG_VARIANCE = "_log_variance"  # the end of the names of parameters that hold log variances
LOG_VARIANCE_INIT, LOG_VARIANCE_INIT_STD = -9.0, 0.001


@dataclass(frozen=True)
class Workload:
    network: str  # mlp or lenet
    num_clients: int
    cohort: int  # clients per round
    samples: int  # per client
    epochs: int
    batch_size: int
    rounds: int
    lr: float
    bayesian: bool = False  # the linear layers have Gaussian weights
    hidden: int = 200  # width of the two hidden layers of the mlp
    side: int = 28  # of the images, which have one channel
    signal: float = 0.3  # how far the classes lie apart, where the noise of a pixel is 1
    seed: int = 0

    @property
    def steps(self) -> int:
        """SGD steps of all rounds."""
        return self.rounds * self.cohort * self.epochs * math.ceil(self.samples / self.batch_size)


@dataclass(frozen=True)
class Result:
    rounds: list[float]  # seconds of each round; the first holds what has to be started, the last an evaluation
    steps: int  # that were taken
    accuracy: float  # of the final global model on training data
    peaks: list[float]  # MB: the peak resident memory of this process after each round, where it was asked for

    @property
    def warm(self) -> list[float]:
        """Seconds of the rounds when everything is warm and nothing but training is done."""
        return self.rounds[1:-1]

    @property
    def seconds(self) -> float:
        """Per such round."""
        return statistics.mean(self.warm)

    @property
    def start_up(self) -> float:
        """What the first round takes longer than the others."""
        return self.rounds[0] - self.seconds


def make_data(work: Workload) -> tuple[Tensor, Tensor]:
    """Images (n, 1, side, side) and labels (n,); client k has the k-th `samples` of them."""
    generator = torch.Generator().manual_seed(work.seed)
    num, shape = work.num_clients * work.samples, (1, work.side, work.side)
    y = torch.randint(0, NUM_CLASSES, (num,), generator=generator)
    centres = work.signal * torch.randn(NUM_CLASSES, *shape, generator=generator)
    return torch.randn(num, *shape, generator=generator).add_(centres[y]), y


@cache
def client_data(work: Workload) -> list[tuple[Tensor, Tensor]]:
    """Images and labels of each client; made once per process."""
    x, y = make_data(work)
    return list(zip(torch.split(x, work.samples), torch.split(y, work.samples), strict=True))


class BayesianLinear(nn.Module):
    """Independent Gaussian weights; the outputs are sampled, given the inputs (local reparametrisation)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        noise = LOG_VARIANCE_INIT_STD * torch.randn_like(layer.weight)
        self.weight_log_variance = nn.Parameter(noise + LOG_VARIANCE_INIT)

    def forward(self, x: Tensor) -> Tensor:
        mean = F.linear(x, self.weight, self.bias)
        if not self.training:
            return mean
        variance = F.linear(x.square(), self.weight_log_variance.exp())
        return mean + (variance + 1e-8).sqrt() * torch.randn_like(mean)

    def kl(self) -> Tensor:
        """From the standard normal."""
        log_variance = self.weight_log_variance
        return 0.5 * (self.weight.square() + log_variance.exp() - 1 - log_variance).sum()


def make_network(work: Workload) -> nn.Module:
    """The same initial parameters wherever it is made."""
    torch.manual_seed(work.seed)
    network = nn.Sequential(*(_mlp(work) if work.network == "mlp" else _lenet()))
    if work.bayesian:
        for i, layer in enumerate(network):
            if isinstance(layer, nn.Linear):
                network[i] = BayesianLinear(layer)
    return network


def _mlp(work: Workload) -> list[nn.Module]:
    first = [nn.Flatten(), nn.Linear(work.side**2, work.hidden), nn.ReLU()]
    return [*first, nn.Linear(work.hidden, work.hidden), nn.ReLU(), nn.Linear(work.hidden, NUM_CLASSES)]


def _lenet() -> list[nn.Module]:
    convolutions = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    linear = [nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, NUM_CLASSES)]
    return [*convolutions, nn.Flatten(), *linear]


def loss_of(work: Workload, network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy, and for Bayesian layers their KL divergence per sample of the client."""
    loss = F.cross_entropy(network(x), y)
    return loss + divergence_of(work, network) if work.bayesian else loss


def divergence_of(work: Workload, network: nn.Module) -> Tensor:
    """The KL divergence of all Bayesian layers, per sample of the client."""
    divergences = [layer.kl() for layer in network.children() if isinstance(layer, BayesianLinear)]
    return torch.stack(divergences).sum() / work.samples


@torch.inference_mode()
def accuracy_of(network: nn.Module, x: Tensor, y: Tensor) -> float:
    """On the first 5000 examples; Gaussian weights at their means."""
    network.eval()
    right: Tensor = network(x[:5000]).argmax(1) == y[:5000]
    return right.float().mean().item()


def peak_mb() -> float:
    """The peak resident memory of this process; not a number but on Linux.

    Not from getrusage: there a process inherits the peak of the one that started it.
    """
    if sys.platform != "linux":
        return math.nan
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def forget_peak() -> None:
    """From now on the peak is counted anew."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def read_workload() -> Workload:
    """From the command line."""
    return Workload(**json.loads(sys.argv[1]))


def print_result(result: Result) -> None:
    print(json.dumps(asdict(result)), flush=True)
