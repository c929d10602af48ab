"""What an aggregation rule costs: its time against that of reading its inputs once, and its memory beyond them.

    python benchmarks/aggregation.py eaa CLIENTS COLUMNS REPEATS

prints a line of JSON. A process does one rule, so that the peak of its memory is the rule's. The inputs are what K
clients send: means, and for a rule of Gaussians variances, in float32. `fvb_eaa` is the whole server step of `fvb` with
`eaa`, from messages with log variances to the next state. Reading is `Tensor.sum` of every input, on one thread as all
the rest. `convert`, `sqrt` and `log` are no rules but what is in them: torch's conversion of the inputs to float64, and
with it a square root or a logarithm of the variances.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from peers.work import forget_peak, peak_mb
from torch import Tensor, nn
from workloads import CPU, GAUSSIAN, compare, divide, make_task

from bfl_bench import aggregators
from bfl_bench.aggregators import WeightedMean, combine, eaa
from bfl_bench.engines.process_setup import set_up_process
from bfl_bench.methods.fvb import Fvb
from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import make_gaussian

RULES = ["mean", "eaa", "gaa", "aalv", "wb", "rklb", "cf", "moments", "ppa", "alpha", "fvb_eaa"]
PARTS: dict[str, Callable[[Tensor], object]] = {
    "convert": lambda variances: None,
    "sqrt": torch.sqrt_,
    "log": torch.log_,
}
PIECE = 1 << 18  # numbers that are converted at a time
SHARES = {"ppa": 10, "alpha": 100}  # rules that draw or iterate are measured on a tenth, a hundredth of the columns
SIZES = [(100, 1_000_000), (1000, 100_000)]  # clients, columns
FULL_SIZES = [(100, 1_000_000), (1000, 1_000_000)]


@dataclass(frozen=True)
class Cost:
    rule: str
    clients: int
    columns: int
    input_mb: float
    ratios: list[float]  # time / time to read the inputs once
    gigabytes_per_second: list[float]  # of reading
    extra_mb: float  # peak memory beyond the inputs


def make_inputs(rule: str, clients: int, columns: int) -> list[Tensor]:
    """Per client one vector: means, and behind them variances, or log variances."""
    inputs = torch.empty(clients, columns if rule == "mean" else 2 * columns)
    inputs[:, :columns].uniform_(-1, 1)
    if rule != "mean":
        inputs[:, columns:].uniform_(0.5, 1.5)
    return list(inputs)


def prepare(rule: str, inputs: list[Tensor]) -> Callable[[], object]:
    """The rule, ready to be called; preparing it makes no copy of the inputs."""
    weights = [1.0 + i % 3 for i in range(len(inputs))]
    if rule == "mean":
        return partial(_mean, inputs, weights)
    columns = len(inputs[0]) // 2
    if rule == "fvb_eaa":
        return _server_step(inputs, columns)
    if rule in PARTS:
        return partial(_convert, inputs, columns, PARTS[rule])
    means, variances = ([vector[part] for vector in inputs] for part in (slice(columns), slice(columns, None)))
    return lambda: combine(getattr(aggregators, rule), means, variances, weights, torch.Generator().manual_seed(0))


def _mean(inputs: list[Tensor], weights: list[float]) -> Tensor:
    mean = WeightedMean()
    for vector, weight in zip(inputs, weights, strict=True):
        mean.add(vector, weight)
    return mean.result()


def _convert(inputs: list[Tensor], columns: int, change: Callable[[Tensor], object]) -> None:
    """Every input to float64, piece by piece into the same memory, and `change` on the variances."""
    copy = torch.empty(min(PIECE, columns), dtype=torch.float64)
    for vector in inputs:
        for i, half in enumerate(torch.split(vector, columns)):
            for piece in torch.split(half, PIECE):
                converted = copy[: len(piece)].copy_(piece)
                if i == 1:
                    change(converted)


def _server_step(inputs: list[Tensor], columns: int) -> Callable[[], object]:
    model = FlatModel(make_gaussian(nn.Linear(columns // 10, 10, bias=False), None, GAUSSIAN), CPU)
    task = make_task(model, (1,) * len(inputs), epochs=1, batch_size=1, lr=0.1)
    fvb = Fvb("fvb", "size", eaa, 1.0, 1.0, "fixed", 1, [1e-10, 100.0])
    state = fvb.init(task, torch.Generator())
    replies = [(client, {"params": vector}) for client, vector in enumerate(inputs)]
    return lambda: fvb.server_update(task, state, iter(replies), torch.Generator())


def measure(rule: str, clients: int, columns: int, repeats: int) -> Cost:
    columns = max(columns // SHARES.get(rule, 1), 10)
    prepare(rule, make_inputs(rule, 2, 100))()  # loads what has to be loaded
    inputs = make_inputs(rule, clients, columns)
    call = prepare(rule, inputs)
    forget_peak()
    before = peak_mb()
    call()
    extra = peak_mb() - before
    seconds = compare({"rule": call, "read": lambda: [vector.sum() for vector in inputs]}, repeats)
    size = sum(vector.nbytes for vector in inputs)
    speeds = [size / 1e9 / second for second in seconds["read"]]
    return Cost(rule, clients, columns, size / 1e6, divide(seconds["rule"], seconds["read"]), speeds, extra)


def main() -> None:
    set_up_process(threads=1)
    rule, *numbers = sys.argv[1:]
    print(json.dumps(asdict(measure(rule, *map(int, numbers)))))


if __name__ == "__main__":
    main()
