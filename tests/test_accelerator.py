"""The path through a GPU, on the pretend one of tests/accelerator.py: the CPU's bytes, and few waits for the device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bfl_bench import records
from bfl_bench.aggregators.blocks import combine
from bfl_bench.build.parts import construct
from bfl_bench.devices import bring, choose_device, describe_device, generators_of, has_room, peak_memory_mb
from bfl_bench.errors import ConfigError
from bfl_bench.evaluation import regression
from bfl_bench.inference.curvature import eigenvalues
from bfl_bench.method import Client
from bfl_bench.records import config_folder
from bfl_bench.rng import stream
from tests.accelerator import NAME, Held, count_reads, set_up
from tests.composing import choose, experiment, resolve, run_in
from tests.test_contract import METHODS

DEVICE = set_up()

WAITS = dict.fromkeys(METHODS, 1) | {
    "bayesadmm": 4,  # whether it is the first round, twice; the precision that rescales the learning rate
    "ensemble": 5,  # one for each member
    "fedbens": 2,  # one for each member of the test's mixtures
    "fedep": 3,  # the round; repaired coordinates
    "fedfisher": 2,  # the ratio of the damping, of all layers
    "fedlap_cov": 3,  # whether it is the first round, twice
    "fedlpa": 2,  # the ratio of the damping, of all layers
    "fedpa": 3,  # the round; whether a system could be solved
    "fola": 4,  # the round; two parts of the prior's loss
    "fvb": 2,  # the KL divergence
    "pfedbayes": 2,  # the KL divergence
    "virtual": 3,  # the KL divergence; improper coordinates
}
"""How often a client's local update waits for the device, however long it trains; docs/scaling.md has it too.

The one that all have is the loss and accuracy of the last epoch.
"""
QUICK = {"fedavg", "fedlpa", "fola"}
SLOW = pytest.mark.slow


def both(folder: Path, *overrides: str) -> tuple[bytes, bytes]:
    """All tables of a run on the CPU and of the same on the pretend accelerator, but that of times."""
    found = []
    for device in ("cpu", NAME):
        run_in(folder / device, *overrides, f"device={device}")
        tables = sorted(path for path in (folder / device).glob("*.csv") if path.name != records.TIMING)
        assert tables
        found.append(b"".join(path.read_bytes() for path in tables))
    return found[0], found[1]


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m in QUICK else SLOW) for m in METHODS])
def test_every_method_gives_the_bytes_of_the_cpu(method: str, tmp_path: Path) -> None:
    here, there = both(tmp_path, *choose(method), "rounds=2")
    assert here == there


OPTIONS = [
    "method=fola method.structure=full eval.also_predict=[draws,linearised] partition.validation=0.2",
    "method=fola method.fisher=model",
    "method=fola method.gamma=0.1 aggregator=alpha",
    "method=fedlpa method.solver=gd method.descent_steps=3",
    "method=fedlpa eval.also_predict=[draws,linearised] partition.validation=0.2",
    "method=fedlpa eval.predictive=linearised eval.prior_precision=evidence eval.laplace_layers=last",
    "method=fedep method.moments=laplace method.burn_in_rounds=0",
    "method=fedep method.moments=sample method.burn_in_rounds=0",
    "method=fvb eval.predictive=mean eval.posterior=true eval.also_aggregate=[alpha,ppa,wb,cf]",
    "method=fvb local.optimizer=adam local.clip=0.5 server.lr=0.7",
    "method=fedavg server.rule=yogi server.momentum=0.9 local.momentum=0.9 local.weight_decay=0.01",
    "method=swag method.iterates=clients",
    "method=virtual_released server.lr=0.3",
    "method=virtual_published",
    "method=fedavg dataset.shape=[3,16,16] model=cnn",
    "method=fvb dataset.shape=[1,28,28] model=lenet model.bayesian_layers=2",
    "method=fedavg dataset.shape=[3,8,8] model=resnet8",
    "method=fedavg eval.local_share=0.5 partition.test=per_client partition.validation=0.2 eval.uncertainty=true",
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_options_give_the_bytes_of_the_cpu(options: str, tmp_path: Path) -> None:
    small = [word for word in choose("fedavg")[:-1] if "model=" not in options or not word.startswith("model.")]
    here, there = both(tmp_path, *small, *options.split(), "rounds=2")
    assert here == there


def test_eigenvalues_alone_are_those_of_the_cpu_but_for_rounding() -> None:
    """Of a tensor subclass torch computes the eigenvectors as well, by another algorithm."""
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    here, there = eigenvalues(rows @ rows.T), eigenvalues((rows @ rows.T).to(DEVICE)).cpu()
    assert here[0] == there[0] == 0
    assert torch.allclose(here, there, rtol=1e-12)


def test_measures_of_uncertainty_give_the_bytes_of_the_cpu(tmp_path: Path) -> None:
    words = (
        "method=fedavg dataset=digits model.hidden=[4] rounds=1 num_clients=3 local.epochs=1 partition.validation=0.1"
    )
    also = "eval.uncertainty=true eval.shift=[gaussian_noise,shot_noise,rotation] eval.severities=[3]"
    here, there = both(tmp_path, *words.split(), *also.split())
    assert here == there


def test_measures_of_regression_give_the_numbers_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(1)
    means, targets = torch.randn(4, 30, generator=generator), torch.randn(30, generator=generator)
    variances = torch.rand(4, 30, generator=generator) + 0.1
    there = [tensor.to(DEVICE) for tensor in (means, variances, targets)]
    assert regression.root_mean_squared_error(there[0], there[2]) == regression.root_mean_squared_error(means, targets)
    for function in (regression.mixture_nll, regression.crps, regression.central_intervals):
        assert function(*there) == function(means, variances, targets)
    error = regression.quantile_calibration_error
    assert error(*there, 9) == error(means, variances, targets, 9)


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m in QUICK else SLOW) for m in METHODS])
def test_no_local_step_waits_for_the_device(method: str) -> None:
    worker = experiment(*choose(method), f"device={NAME}").worker
    algorithm = worker.method
    for epochs in (2, 4):
        task = replace(worker.task, local=replace(worker.task.local, epochs=epochs))
        state = algorithm.init(task, stream(0, "init"))
        client = Client(0, worker.train, worker.client_indices[0], worker.augment)
        memory = algorithm.init_client(task, state, 0)
        broadcast = algorithm.broadcast(task, state)
        with count_reads() as waits:
            algorithm.client_update(task, broadcast, memory, client, stream(0, "client"))
        assert len(waits) == WAITS[method], waits


def options_of(group: str) -> list[str]:
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml") if path.stem != "none")


@pytest.mark.parametrize("rule", options_of("aggregator"))
def test_every_rule_gives_the_numbers_of_the_cpu(rule: str) -> None:
    node = resolve("method=fvb", f"aggregator={rule}")["aggregator"]
    chosen = construct("aggregator", {"aggregator": node}, supplied=("means", "variances", "weights", "generator"))
    generator = torch.Generator().manual_seed(1)
    means = list(torch.randn(3, 40, generator=generator))
    variances = list(torch.rand(3, 40, generator=generator) + 0.1)
    found = []
    for device in ("cpu", NAME):
        sent = [[vector.to(device) for vector in vectors] for vectors in (means, variances)]
        with count_reads() as waits:
            combined = combine(chosen, *sent, [1.0, 3.0, 2.0], torch.Generator().manual_seed(2))
        found.append([part.cpu() for part in combined])
    assert all(torch.equal(here, there) for here, there in zip(*found, strict=True))
    assert len(waits) <= 12, waits


def test_the_table_in_the_docs_is_the_tests() -> None:
    text = (Path(__file__).parent.parent / "docs/scaling.md").read_text()
    for method, waits in WAITS.items():
        if waits > 1:
            assert f"| `{method}` | {waits} |" in text


# The pretend accelerator itself.


def test_tensors_of_two_devices_do_not_mix() -> None:
    there = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3)
    assert (there + torch.ones(())).sum().item() == 6  # a number may lie on the host
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


def test_waits_are_counted() -> None:
    there = torch.ones(3, device=DEVICE)
    for wait in (
        lambda: there.cpu(),
        lambda: there.tolist(),
        lambda: there.sum().item(),
        lambda: bool(there.sum() > 0),
        lambda: there.nonzero(),
        lambda: there[there > 0],
        lambda: torch.equal(there, there),
        lambda: torch.ones(3).to(DEVICE),
        lambda: torch.ones(3).copy_(there),
        lambda: torch.linalg.cholesky(torch.eye(2, device=DEVICE)),
    ):
        with count_reads() as waits:
            wait()
        assert len(waits) == 1
    with count_reads() as waits:
        bring(torch.ones(3), DEVICE) @ there + torch.zeros(3, device=DEVICE)[torch.arange(2, device=DEVICE)].sum()
    assert not waits


def test_gradients_flow_into_parameters_on_the_device() -> None:
    layer = torch.nn.Linear(2, 1).to(DEVICE)
    layer(torch.ones(3, 2, device=DEVICE)).sum().backward()
    assert isinstance(layer.weight.grad, Held)
    assert layer.weight.grad.cpu().tolist() == [[3, 3]]


# bfl_bench/devices.py


def test_names_of_devices() -> None:
    assert choose_device("cpu") == choose_device("cpu:0") == torch.device("cpu")
    assert choose_device(NAME) == torch.device(NAME)
    assert choose_device(f"{NAME}:0") == DEVICE
    assert describe_device(DEVICE) == NAME
    assert describe_device(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("tpu", "auto, cpu, or another device of torch, such as cuda, cuda:1 or xpu"),
        ("meta", "auto, cpu, or another device of torch, such as cuda, cuda:1 or xpu"),
        ("cuda:x", "auto, cpu, or another device of torch, such as cuda, cuda:1 or xpu"),
        ("xpu", "auto or cpu; torch sees no device of the kind xpu on this machine"),
        (f"{NAME}:1", f"auto, cpu, or {NAME}:0, which is here"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_a_sentence(name: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_device(name)
    assert str(caught.value) == f"device: got {name!r}, allowed: {allowed}"


def test_a_device_without_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*size: int, dtype: torch.dtype, device: torch.device) -> None:
        raise TypeError("the framework doesn't support float64")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(ConfigError, match="a device with float64, in which sums are taken"):
        choose_device(NAME)


def test_a_device_that_cannot_say_has_room_and_shares_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_room(DEVICE, 1 << 60)
    assert peak_memory_mb(DEVICE) == peak_memory_mb(torch.device("cpu")) > 10
    assert generators_of(DEVICE) == [torch.default_generator]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5_000_000)
    assert peak_memory_mb(torch.device("cuda")) == 5
