"""The server's step: FedAvg, FedAvgM, FedAdagrad, FedAdam and FedYogi against torch and closed forms."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bfl_bench.aggregators import step_towards
from bfl_bench.errors import ConfigError
from bfl_bench.method import Tensors
from tests.composing import SMALL, experiment, resolve, run_in
from tests.federation import generator, make_server

SIZE = 7
ROUNDS = 6
# Sums of a few float64 terms, then rounded to float32 like the parameters themselves.
ROUNDING = {"rtol": 1e-6, "atol": 1e-7}


def vectors(num: int, size: int = SIZE, seed: int = 1) -> list[Tensor]:
    return [torch.randn(size, generator=generator(seed + i)) for i in range(num)]


def play(targets: list[Tensor], **changes: Any) -> list[Tensors]:
    """The states after each round in which the aggregated model is the target."""
    server = make_server(**changes)
    start = torch.linspace(-1, 1, len(targets[0]))
    states: list[Tensors] = [{"params": start} | server.begin(start)]
    for target in targets:
        states.append(server.move(states[-1], target))
    return states


def by_torch(targets: list[Tensor], make: Callable[[list[Tensor]], torch.optim.Optimizer], tau: float) -> list[Tensor]:
    """The same by an optimizer of torch's, in float64, whose gradient is the negative change.

    Torch adds eps to the corrected root, the authors to the uncorrected one: eps is tau divided by the correction.
    """
    params = torch.linspace(-1, 1, len(targets[0])).double().requires_grad_()
    optimizer = make([params])
    found = []
    for round_, target in enumerate(targets, start=1):
        for group in optimizer.param_groups:
            if "betas" in group:
                group["eps"] = tau / (1 - group["betas"][1] ** round_) ** 0.5
        params.grad = params.detach() - target.double()
        optimizer.step()
        found.append(params.detach().float())
        params.data.copy_(params.detach().float())  # the server's model is float32
    return found


@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_plain_is_the_step_it_always_was_and_remembers_nothing(lr: float) -> None:
    targets = vectors(3)
    states = play(targets, lr=lr)
    expected = states[0]["params"]
    for state, target in zip(states[1:], targets, strict=True):
        expected = step_towards(expected, target, lr)
        assert state.keys() == {"params"}
        assert torch.equal(state["params"], expected)


def test_momentum_is_that_of_torch() -> None:
    targets = vectors(ROUNDS)
    expected = by_torch(targets, lambda p: torch.optim.SGD(p, lr=0.4, momentum=0.8), 0.0)
    for state, params in zip(play(targets, lr=0.4, momentum=0.8)[1:], expected, strict=True):
        torch.testing.assert_close(state["params"], params, **ROUNDING)


def test_adam_with_bias_correction_is_that_of_torch_fed_with_the_negative_change() -> None:
    targets = vectors(ROUNDS)
    expected = by_torch(targets, lambda p: torch.optim.Adam(p, lr=0.2, betas=(0.8, 0.9)), tau=0.05)
    options: dict[str, Any] = {"rule": "adam", "momentum": 0.8, "beta2": 0.9, "tau": 0.05, "bias_correction": True}
    for state, params in zip(play(targets, lr=0.2, **options)[1:], expected, strict=True):
        torch.testing.assert_close(state["params"], params, **ROUNDING)


def test_adagrad_is_that_of_torch() -> None:
    targets = vectors(ROUNDS)
    expected = by_torch(targets, lambda p: torch.optim.Adagrad(p, lr=0.2, eps=0.05), 0.0)
    for state, params in zip(play(targets, lr=0.2, rule="adagrad", tau=0.05)[1:], expected, strict=True):
        torch.testing.assert_close(state["params"], params, **ROUNDING)


@pytest.mark.parametrize("bias_correction", [False, True])
def test_adam_and_yogi_agree_in_the_first_round_only(bias_correction: bool) -> None:
    options = {"momentum": 0.5, "beta2": 0.9, "tau": 0.1, "bias_correction": bias_correction}
    adam, yogi = (play(vectors(3), rule=rule, **options) for rule in ("adam", "yogi"))
    torch.testing.assert_close(adam[1]["params"], yogi[1]["params"], **ROUNDING)
    assert not torch.allclose(adam[3]["params"], yogi[3]["params"], rtol=1e-3)


def test_yogis_second_moment_moves_by_a_bounded_amount() -> None:
    """v - (1 - b2) D^2 sign(v - D^2), for a change that grows and one that shrinks."""
    server = make_server(rule="yogi", beta2=0.9)
    state = (
        {"params": torch.zeros(2)} | server.begin(torch.zeros(2)) | {"server_second": torch.tensor([0.5, 5.0]).double()}
    )
    after = server.move(state, torch.tensor([2.0, 2.0]))["server_second"]
    torch.testing.assert_close(after, torch.tensor([0.5 + 0.4, 5.0 - 0.4], dtype=torch.float64))


def test_a_large_tau_makes_adam_momentum() -> None:
    """sqrt(v) vanishes beside tau: step lr / tau times the running mean, which is FedAvgM's times 1 - b1."""
    tau, targets = 1e9, vectors(ROUNDS)
    adam = play(targets, rule="adam", lr=0.3 * tau, momentum=0.6, tau=tau)
    momentum = play(targets, lr=0.3 * (1 - 0.6), momentum=0.6)
    for left, right in zip(adam, momentum, strict=True):
        torch.testing.assert_close(left["params"], right["params"], **ROUNDING)


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_statistics_become_the_aggregated_ones(rule: str) -> None:
    server = make_server(rule=rule, momentum=0.9, lr=0.1)
    state = {"params": torch.zeros(5)} | server.begin(torch.zeros(3))
    moved = server.move(state, torch.arange(1.0, 6.0))
    assert torch.equal(moved["params"][3:], torch.tensor([4.0, 5.0]))
    assert not torch.equal(moved["params"][:3], torch.tensor([1.0, 2.0, 3.0]))


def test_inputs_stay_as_they_are() -> None:
    server, target = make_server(rule="yogi", momentum=0.9), torch.ones(SIZE)
    state = {"params": torch.zeros(SIZE)} | server.begin(target)
    before = {name: value.clone() for name, value in state.items()}
    server.move(state, target)
    assert torch.equal(target, torch.ones(SIZE))
    assert all(torch.equal(state[name], before[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "fednova", "fedcurv", "fedlpa", "fedov"])
def test_every_point_method_takes_any_step_and_resumes(method: str, tmp_path: Path) -> None:
    options = [*SMALL, f"method={method}", "rounds=2", "server.rule=adam", "server.momentum=0.9", "server.lr=0.01"]
    adam = run_in(tmp_path / "adam", *options)
    assert adam != run_in(tmp_path / "plain", *options, "server.rule=sgd", "server.momentum=0", "server.lr=1")
    state = experiment(*options).worker.method.init(experiment(*options).worker.task, generator())
    assert {"params", "server_first", "server_second", "server_steps"} <= state.keys()


@pytest.mark.parametrize("method", ["fola", "fvb", "virtual"])
def test_a_state_that_is_no_point_takes_the_plain_step_alone(method: str) -> None:
    for overrides, key in ((["server.rule=adam"], "server.rule"), (["server.momentum=0.9"], "server.momentum")):
        with pytest.raises(ConfigError, match=f"{key}: got .*the state of method {method} is not a point"):
            experiment(*SMALL, f"method={method}", *overrides)


def test_plain_is_the_default() -> None:
    assert make_server(**resolve()["server"]).is_plain
