"""Federated variational Bayes against torch.distributions, torch.optim, FedAvg and formulas in NumPy."""

import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from bfl_bench import records
from bfl_bench.aggregators import eaa, ppa, rklb, wb
from bfl_bench.build import plan
from bfl_bench.inference.train import minibatches, train
from bfl_bench.method import Client, Task, Tensors, Update
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fvb import Fvb
from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import make_gaussian
from bfl_bench.models.networks import lenet
from bfl_bench.run.checkpoint import CheckpointFolder
from tests.composing import SMALL, experiment, resolve, run_in
from tests.federation import (
    CPU,
    SIZES,
    assemble_task,
    generator,
    make_clients,
    make_gaussian_settings,
    make_gaussian_task,
    make_task,
    random_start,
    run_round,
)

RANGE = [-2.0, 0.5]  # of log variances, where a test clamps: narrow, so that many lie beyond
CLAMPS = ("none", "hard", "straight_through")


def make_fvb(**changes: Any) -> Fvb:
    values: dict[str, Any] = {
        "name": "fvb",
        "aggregator": rklb,
        "weights": "size",
        "beta": 1.0,
        "prior_variance": 1.0,
        "prior": "fixed",
        "train_samples": 1,
        "alarm_variances": [1e-10, 100.0],
    }
    return Fvb(**values | changes)


def make_start(task: Task, seed: int = 6) -> Tensor:
    """Points and means as elsewhere, log variances of about -1 plus or minus 1.5: on both sides of RANGE."""
    start = random_start(task, seed)
    log_variances = start[task.model.layout.log_variances]
    log_variances.mul_(3.0).sub_(1.0)
    return start


def make_state(params: Tensor, round_: int = 0) -> Tensors:
    return {"params": params, "round": torch.tensor(float(round_))}


def update(method: Fvb, task: Task, state: Tensors, client: Client, seed: int = 5) -> Update:
    return method.client_update(task, method.broadcast(task, state), {}, client, generator(seed))


def effective(log_variance: Tensor, clamp: str) -> Tensor:
    """The log variance in effect, differentiable as the clamp wants it."""
    if clamp == "none":
        return log_variance
    clamped = log_variance.clamp(*RANGE)
    return clamped if clamp == "hard" else clamped.detach() + log_variance - log_variance.detach()


def prior_of(method: Fvb, task: Task, state: Tensors, clamp: str) -> Normal:
    """The prior over the means' part of the vector."""
    layout = task.model.layout
    means = state["params"][layout.means]
    if method.prior == "previous" and state["round"] > 0:
        log_variances = effective(state["params"][layout.log_variances], clamp)
        return Normal(means.double(), (0.5 * log_variances.double()).exp())
    return Normal(torch.zeros_like(means).double(), math.sqrt(method.prior_variance))


def posterior_of(task: Task, params: Tensor, clamp: str) -> Normal:
    layout = task.model.layout
    return Normal(params[layout.means], (0.5 * effective(params[layout.log_variances], clamp)).exp())


# The client


def train_by_hand(method: Fvb, task: Task, state: Tensors, client: Client, clamp: str, noise: Tensor) -> Tensor:
    """torch.optim.SGD on mean NLL + beta KL / n, written out for the network of two linear layers."""
    layout, local = task.model.layout, task.local
    names = [entry.name for entry in layout.entries]
    tensors = {name: tensor.requires_grad_() for name, tensor in layout.to_state_dict(state["params"].clone()).items()}
    prior = prior_of(method, task, state, clamp)
    optimizer = torch.optim.SGD(
        tensors.values(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay, foreach=False
    )
    torch.set_rng_state(noise)

    def layer(name: str, x: Tensor) -> Tensor:
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        if f"{name}.weight_log_variance" not in names:
            return x @ weight.T + bias
        variance = effective(tensors[f"{name}.weight_log_variance"], clamp).exp()
        return x @ weight.T + bias + (x**2 @ variance.T).sqrt() * torch.randn(len(x), len(weight))

    for x, y, *_ in minibatches(client, local, generator(5)):
        many = x.repeat(method.train_samples, 1)
        log_p = layer("2", layer("0", many).tanh()).log_softmax(1).view(method.train_samples, len(x), -1)
        nll = -log_p[:, torch.arange(len(x)), y].mean()
        flat = torch.cat([tensors[name].flatten() for name in names])
        kl = kl_divergence(posterior_of(task, flat, clamp), prior).sum()
        optimizer.zero_grad()
        (nll + method.beta * kl / len(client)).backward()
        if local.clip is not None:
            nn.utils.clip_grad_norm_(tensors.values(), local.clip)
        optimizer.step()
    return torch.cat([tensors[name].detach().flatten() for name in names])


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize(
    ("changes", "num_layers", "local"),
    [
        ({}, None, {}),
        ({"beta": 0.3, "prior_variance": 0.4}, None, {"momentum": 0.8, "weight_decay": 0.05, "lr": 0.05}),
        ({"beta": 2.0, "prior": "previous"}, None, {"momentum": 0.5, "clip": 0.7}),
        ({"train_samples": 3, "prior_variance": 2.0}, 1, {"weight_decay": 0.1}),
    ],
)
def test_a_client_minimises_the_printed_objective(
    changes: dict[str, Any], num_layers: int | None, local: dict[str, Any], clamp: str
) -> None:
    """Two epochs of minibatches with the same noise: every step of the bound, by PyTorch alone."""
    settings = make_gaussian_settings(log_variance_clamp=clamp, log_variance_range=RANGE)
    task, client = make_gaussian_task(settings, num_layers, **local), make_clients()[1]
    method = make_fvb(**changes)
    state = make_state(make_start(task), round_=1)
    state["params"][: task.model.layout.means.stop] += 0.1
    noise: list[Tensor] = []
    handle = task.model.module.register_forward_pre_hook(lambda *_: noise.append(torch.get_rng_state()))
    got = update(method, task, state, client).message["params"]
    handle.remove()
    expected = train_by_hand(method, task, state, client, clamp, noise[0])
    assert (got - state["params"]).abs().max() > 0.05
    # Six steps in float32 with sums in another order, and 1e-8 added to variances of 0.01 and more.
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize("prior", ["fixed", "previous"])
@pytest.mark.parametrize("prior_variance", [1.0, 0.3])
def test_gradient_of_the_divergence(clamp: str, prior: str, prior_variance: float) -> None:
    """What it adds to the gradient of the last step, by autograd of torch.distributions."""
    settings = make_gaussian_settings(log_variance_clamp=clamp, log_variance_range=RANGE)
    task, client = make_gaussian_task(settings, epochs=3, lr=0.3), make_clients()[0]
    method = make_fvb(prior=prior, prior_variance=prior_variance, beta=0.5)
    layout = task.model.layout
    start = make_state(make_start(task), round_=1)
    seen: list[tuple[Tensor, Tensor]] = []
    original = train

    def spy(task: Task, start: Tensor, client: Client, rng: torch.Generator, adjust: Any, **others: Any) -> Any:
        def watched(parameters: Tensor, gradient: Tensor, *batch: Any) -> None:
            before = gradient.clone()
            adjust(parameters, gradient, *batch)
            seen.append((parameters.clone(), gradient - before))

        return original(task, start, client, rng, adjust=watched, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bfl_bench.methods.fvb.train", spy)
        update(method, task, start, client)
    parameters, difference = seen[-1]
    parameters.requires_grad_()
    divergence = kl_divergence(posterior_of(task, parameters, clamp), prior_of(method, task, start, clamp)).sum()
    divergence.backward()
    assert parameters.grad is not None
    assert parameters.grad[layout.means].abs().max() > 0.01
    assert parameters.grad[layout.log_variances].abs().max() > 0.01
    # A difference of two float32 numbers of order 1 or less.
    torch.testing.assert_close(difference, parameters.grad * 0.5 / 7, rtol=1e-5, atol=5e-7)
    if clamp == "hard":
        beyond = parameters[layout.log_variances].detach()
        beyond = (beyond < RANGE[0]) | (beyond > RANGE[1])
        assert 5 < beyond.sum() < len(beyond) - 5
        assert (difference[layout.log_variances][beyond] == 0).all()


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize("changes", [{}, {"prior_variance": 0.3}, {"prior": "previous", "prior_variance": 0.3}])
@pytest.mark.parametrize("round_", [0, 1])
def test_recorded_divergence(clamp: str, changes: dict[str, Any], round_: int) -> None:
    """Of the trained posterior from the prior; in the first round that is N(0, prior_variance) in any case."""
    settings = make_gaussian_settings(log_variance_clamp=clamp, log_variance_range=RANGE)
    task, client = make_gaussian_task(settings), make_clients()[1]
    method = make_fvb(**changes)
    state = make_state(make_start(task), round_)
    result = update(method, task, state, client)
    assert result.metrics.keys() == {"train_loss", "train_acc", "kl"}
    assert torch.equal(result.message["params"], result.local["params"])
    posterior = posterior_of(task, result.message["params"].double(), clamp)
    expected = kl_divergence(posterior, prior_of(method, task, state, clamp)).sum().item()
    assert expected > 0.1
    assert result.metrics["kl"] == pytest.approx(expected, rel=2e-5)  # a float32 sum of 48 terms, some of them small


def test_previous_prior_takes_over_in_the_second_round() -> None:
    """With a huge beta the posterior is the prior: N(0, 0.5) in round 1, what was broadcast in round 2."""
    task, clients = make_gaussian_task(epochs=100, lr=1e-4), make_clients()
    layout = task.model.layout
    method = make_fvb(prior="previous", prior_variance=0.5, beta=12_000.0)
    start = make_start(task)
    start[layout.log_variances].clamp_(min=-1.0)  # a narrower prior would make these steps unstable
    first = update(method, task, make_state(start), clients[1]).message["params"]
    second = update(method, task, make_state(start, 1), clients[1]).message["params"]
    # In 300 steps of 1e-4 under a pull of 1000 m / 0.5 a mean shrinks by 0.8^300; the distance of a log variance by
    # about 0.95^300. What remains is the likelihood's gradient, about 1, over the stiffness: 1000 / 0.5 and 500.
    assert first[layout.means].abs().max() < 2e-3
    assert (first[layout.log_variances] - math.log(0.5)).abs().max() < 5e-3
    assert (second - start)[layout.means].abs().max() < 5e-3
    assert (second - start)[layout.log_variances].abs().max() < 5e-3
    assert start[layout.means].abs().max() > 0.5
    fixed = update(replace(method, prior="fixed"), task, make_state(start, 1), clients[1]).message["params"]
    assert torch.equal(fixed, first)


@pytest.mark.parametrize("prior_variance", [1.0, 0.2])
def test_a_huge_beta_gives_the_prior(prior_variance: float) -> None:
    task, client = make_gaussian_task(epochs=100, lr=1e-4), make_clients()[1]
    method = make_fvb(beta=12_000.0, prior_variance=prior_variance)
    params = update(method, task, make_state(make_start(task)), client).message["params"]
    layout = task.model.layout
    # As above, with factors of 0.9 and 0.5 for the mean; and a log variance of -5 first rises by 0.05 a step.
    assert params[layout.means].abs().max() < 2e-3
    assert (params[layout.log_variances].exp() / prior_variance - 1).abs().max() < 5e-3


def test_without_the_divergence_variances_shrink() -> None:
    """Noise in the weights costs likelihood once the means fit the data."""
    task, client = make_gaussian_task(make_gaussian_settings(log_variance_init=-1.0), epochs=60), make_clients()[1]
    layout = task.model.layout
    state = make_fvb().init(task, generator())
    params = update(make_fvb(beta=0.0), task, state, client).message["params"]
    change = (params - state["params"])[layout.log_variances]
    assert change.mean() < -0.2
    # And with it they do not: the prior is wider than where they start.
    kept = update(make_fvb(beta=20.0), task, state, client).message["params"]
    assert (kept - state["params"])[layout.log_variances].mean() > 0


def test_more_samples_make_gradients_less_noisy() -> None:
    task, client = make_gaussian_task(epochs=1, batch_size=12, lr=1.0), make_clients()[1]
    layout = task.model.layout
    state = make_state(make_start(task))
    num = 300
    spread = {}
    for samples in (1, 8):
        method = make_fvb(train_samples=samples)
        steps = torch.stack(
            [update(method, task, state, client, seed=1000 + i).message["params"] for i in range(num)]
        ).double()
        spread[samples] = steps.var(0)
    for part in (layout.points, layout.means, layout.log_variances):
        ratio = (spread[1][part].sum() / spread[8][part].sum()).item()
        # A variance of `num` draws has the relative standard error sqrt(2 / num) = 8 %; of a ratio, 12 %; of the sum
        # over many coordinates less. Gradients with heavier tails than a Gaussian's have more: allow three times that.
        assert 8 / 1.4 < ratio < 8 * 1.4


@pytest.mark.parametrize("samples", [1, 4])
def test_training_metrics_count_every_example_once(samples: int) -> None:
    """At a tiny step and tiny variances they are those of the start, whatever the number of samples."""
    settings = make_gaussian_settings(log_variance_init=-30.0, log_variance_init_std=0.0)
    task, client = make_gaussian_task(settings, lr=1e-9), make_clients()[0]
    state = make_fvb().init(task, generator())
    result = update(make_fvb(train_samples=samples), task, state, client)
    task.model.load(state["params"])
    task.model.module.eval()
    x, y = client.train.x[client.indices], client.train.y[client.indices]
    with torch.no_grad():
        logits = task.model(x)
    # The layers' noise has deviations of about 1e-4.
    assert result.metrics["train_loss"] == pytest.approx(nn.functional.cross_entropy(logits, y).item(), abs=1e-3)
    assert result.metrics["train_acc"] == pytest.approx((logits.argmax(1) == y).double().mean().item())


def test_noise_of_its_own_for_every_sample() -> None:
    """Three samples are not one sample thrice: else the gradient would be that of one."""
    task, client = make_gaussian_task(epochs=1, batch_size=12), make_clients()[1]
    state = make_state(make_start(task))
    one, three = (update(make_fvb(train_samples=n), task, state, client).metrics["train_loss"] for n in (1, 3))
    assert abs(one - three) > 1e-4


# The released code's clamp


@pytest.mark.parametrize(("clamp", "weight_decay"), [("hard", 0.0), ("hard", 0.01), ("straight_through", 0.0)])
def test_below_a_hard_clamp_only_weight_decay_moves_log_variances(clamp: str, weight_decay: float) -> None:
    settings = make_gaussian_settings(log_variance_init=-9.0, log_variance_init_std=0.001, log_variance_clamp=clamp)
    task, client = make_gaussian_task(settings, weight_decay=weight_decay), make_clients()[1]
    layout, method = task.model.layout, make_fvb()
    state = method.init(task, generator())
    params = update(method, task, state, client).message["params"]
    before, after = (p[layout.log_variances] for p in (state["params"], params))
    assert (params - state["params"])[layout.means].abs().max() > 0.05
    if clamp == "straight_through":
        assert ((after - before).abs() > 1e-4).all()
    elif weight_decay == 0:
        assert torch.equal(after, before)
    else:
        # Six steps of factor 1 - lr * decay; float32 near 9 is exact to 5e-7 a step.
        torch.testing.assert_close(after, before * (1 - 0.2 * 0.01) ** 6, rtol=0, atol=6e-6)


def test_weight_decay_of_the_released_code() -> None:
    """From -9 with lr 0.01, momentum 0.9 and decay 1e-5, which restarts every round, against a loop over one number."""
    settings = make_gaussian_settings(
        log_variance_init=-9.0, log_variance_init_std=0.001, log_variance_clamp="hard", mean_init="normal"
    )
    local = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "epochs": 100}
    task, client = make_gaussian_task(settings, **local), make_clients()[1]
    layout, method = task.model.layout, make_fvb()
    state = method.init(task, generator())
    initial = state["params"][layout.log_variances].numpy().copy()
    single, double = initial.copy(), initial.astype(np.float64)
    for _ in range(2):
        state = make_state(update(method, task, state, client).message["params"], 1)
        single = decay(single, 300)
        double = decay(double, 300)
    result = state["params"][layout.log_variances].numpy()
    assert (result - initial).min() > 0.004
    # In float32 a step of some 9e-6 is rounded to multiples of 9.5e-7, always alike: a few per cent of the way.
    np.testing.assert_allclose(result, double, rtol=0, atol=4e-4)
    # In the same precision only a fused multiply-add can differ, by one rounding of 1e-6 now and then; momentum that
    # went on from round to round would move them by 8e-5 more.
    np.testing.assert_allclose(result, single, rtol=0, atol=3e-5)


def decay(values: np.ndarray, num_steps: int) -> np.ndarray:
    lr, momentum, weight_decay = (values.dtype.type(v) for v in (0.01, 0.9, 1e-5))
    velocity = np.zeros_like(values)
    for _ in range(num_steps):
        velocity = momentum * velocity + weight_decay * values
        values = values - lr * velocity
    return values


def test_norm_of_deviations_after_fifty_rounds_of_weight_decay() -> None:
    """FACTS, fact 3: ten clients of 6000, LeNet on Fashion-MNIST, AALV: weight decay alone predicts 2.78."""
    log_variance = np.array([-9.0])
    for _ in range(50):
        log_variance = decay(log_variance, 10 * 94)
    settings = make_gaussian_settings(log_variance_clamp="hard")
    module = make_gaussian(lenet((1, 28, 28), 10), None, settings)
    task = assemble_task(FlatModel(module, CPU), (6000,) * 2, gaussian=settings)
    params = task.model.vector.clone()
    params[task.model.layout.log_variances] = float(log_variance[0])
    _, metrics = make_fvb().server_update(
        task, make_state(params), iter([(0, {"params": params}), (1, {"params": params})]), generator()
    )
    assert metrics["std_norm"] == pytest.approx(2.78, abs=0.005)
    assert metrics["clamped"] == 1


# Without Gaussian layers


def test_without_gaussian_layers_it_is_fedavg_bit_for_bit() -> None:
    local = {"momentum": 0.9, "weight_decay": 0.01, "clip": 1.0, "lr": 0.05}
    clients = make_clients()
    states = []
    for method in (make_fvb(), FedAvg("fedavg", "size")):
        task = make_task(server_lr=0.7, **local)
        task = replace(task, gaussian=make_gaussian_settings())
        state = method.init(task, generator()) | {"params": random_start(task)}
        for _ in range(4):
            state = run_round(method, task, state, clients)
        states.append(state)
    assert torch.equal(states[0]["params"], states[1]["params"])
    assert states[0]["round"] == 4
    (draw,) = make_fvb().draws(task, states[0], 10, generator())
    assert torch.equal(draw, states[0]["params"])


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_runs_without_gaussian_layers_are_runs_of_fedavg(weights: str, tmp_path: Path) -> None:
    shared = [*SMALL, "local.momentum=0.9", "local.weight_decay=1e-3", f"method.weights={weights}", "participation=3"]
    rows, params = {}, {}
    for name, overrides in (
        ("fedavg", ["method=fedavg"]),
        ("fvb", ["method=fvb", "model.bayesian_layers=0", "model.mean_init=normal"]),
    ):
        run_in(tmp_path / name, *shared, *overrides)
        rows[name] = records.read_table(tmp_path / name / records.METRICS)
        saved = CheckpointFolder(tmp_path / name / records.CHECKPOINT).load(CPU)
        assert saved is not None
        params[name] = saved.state["params"]
    assert torch.equal(params["fedavg"], params["fvb"])
    assert len(rows["fvb"]) == 3
    for ours, theirs in zip(rows["fvb"], rows["fedavg"], strict=True):
        # A scalar more is broadcast: the number of the round.
        assert {key: ours[key] for key in theirs if key != "bytes_down"} | {
            "bytes_down": theirs["bytes_down"]
        } == theirs
        assert ours["kl"] == 0


# The server


def replies_of(task: Task, num: int = 3) -> list[tuple[int, Tensors]]:
    return [(id_, {"params": make_start(task, seed=20 + id_)}) for id_ in range(num)]


def rule_in_numpy(rule: Any, means: np.ndarray, variances: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """BA-BFL's two barycenters, by their equations 8 and 9."""
    if rule is wb:
        return np.einsum("k,kd->d", w, means), np.einsum("k,kd->d", w, np.sqrt(variances)) ** 2
    assert rule is rklb
    precision = np.einsum("k,kd->d", w, 1 / variances)
    return np.einsum("k,kd->d", w, means / variances) / precision, 1 / precision


def aggregate_in_numpy(task: Task, rule: Any, weights: list[float], replies: list[tuple[int, Tensors]]) -> np.ndarray:
    layout, w = task.model.layout, np.array(weights) / np.sum(weights)
    vectors = np.stack([message["params"].double().numpy() for _, message in replies])
    expected = np.einsum("k,kd->d", w, vectors)
    mean, variance = rule_in_numpy(rule, vectors[:, layout.means], np.exp(vectors[:, layout.log_variances]), w)
    expected[layout.means], expected[layout.log_variances] = mean, np.log(variance)
    return expected


@pytest.mark.parametrize("clamp", ["none", "hard"])
@pytest.mark.parametrize("num_layers", [None, 1])
@pytest.mark.parametrize("rule", [rklb, wb])
@pytest.mark.parametrize(("weights", "by_hand"), [("size", list(SIZES)), ("uniform", [1, 1, 1])])
def test_aggregation(rule: Any, weights: str, by_hand: list[float], num_layers: int | None, clamp: str) -> None:
    """FVBWA and FVBA: points averaged, Gaussians combined by the rule; a clamp does not touch what is sent."""
    settings = make_gaussian_settings(log_variance_clamp=clamp, log_variance_range=RANGE)
    task = make_gaussian_task(settings, num_layers)
    replies, state = replies_of(task), make_state(make_start(task), 3)
    kept = state["params"].clone()
    new, _ = make_fvb(aggregator=rule, weights=weights).server_update(task, state, iter(replies), generator())
    expected = aggregate_in_numpy(task, rule, by_hand, replies)
    assert new["params"].dtype == torch.float32
    # One rounding to float32 at the end.
    np.testing.assert_allclose(new["params"].numpy(), expected, rtol=1e-7, atol=1e-8)
    assert new["round"] == 4
    assert torch.equal(state["params"], kept)
    assert state["round"] == 3


def test_rules_and_weights_differ() -> None:
    task = make_gaussian_task()
    replies, state = replies_of(task), make_state(make_start(task))
    results = [
        make_fvb(aggregator=rule, weights=weights).server_update(task, state, iter(replies), generator())[0]["params"]
        for rule in (rklb, wb, eaa)
        for weights in ("size", "uniform")
    ]
    for i, first in enumerate(results):
        for second in results[:i]:
            assert (first - second)[task.model.layout.log_variances].abs().max() > 0.01


def test_partial_cohort_weighs_by_its_own_clients() -> None:
    task = make_gaussian_task()
    replies = replies_of(task)[1:]
    new, _ = make_fvb().server_update(task, make_state(make_start(task)), iter(replies), generator())
    expected = aggregate_in_numpy(task, rklb, [SIZES[1], SIZES[2]], replies)
    np.testing.assert_allclose(new["params"].numpy(), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("server_lr", [0.5, 1.3])
def test_server_step_moves_means_and_log_variances(server_lr: float) -> None:
    task = make_gaussian_task(server_lr=server_lr)
    replies, state = replies_of(task), make_state(make_start(task))
    new, metrics = make_fvb().server_update(task, state, iter(replies), generator())
    old = state["params"].double().numpy()
    expected = old + server_lr * (aggregate_in_numpy(task, rklb, list(SIZES), replies) - old)
    np.testing.assert_allclose(new["params"].numpy(), expected, rtol=2e-7, atol=1e-8)
    by_hand = math.sqrt(np.exp(expected[task.model.layout.log_variances]).sum())
    assert metrics["std_norm"] == pytest.approx(by_hand, rel=1e-6)


def test_a_random_rule_draws_from_the_servers_stream() -> None:
    task = make_gaussian_task()
    replies, state = replies_of(task), make_state(make_start(task))
    method = make_fvb(aggregator=ppa)
    first, second, other = (
        method.server_update(task, state, iter(replies), generator(seed))[0]["params"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_messages_of_a_large_cohort_are_not_held() -> None:
    task = make_gaussian_task()
    state = make_state(make_start(task))
    sent: list[weakref.ref[Tensor]] = []
    most = 0

    def replies() -> Iterator[tuple[int, Tensors]]:
        nonlocal most
        for client_id in range(200):
            params = make_start(task, client_id)
            sent.append(weakref.ref(params))
            yield client_id, {"params": params}
            del params
            most = max(most, sum(vector() is not None for vector in sent))

    make_fvb(aggregator=rklb, weights="uniform").server_update(task, state, replies(), generator())
    assert len(sent) == 200
    assert most <= 50


def test_one_client_comes_back_as_it_is() -> None:
    task = make_gaussian_task()
    ((_, message), *_) = replies_of(task)
    new, _ = make_fvb().server_update(task, make_state(make_start(task)), iter([(0, message)]), generator())
    # exp, 1/x twice and log in float64, then one rounding to float32.
    torch.testing.assert_close(new["params"], message["params"], rtol=1.2e-7, atol=1e-9)


def test_init_is_the_network_in_round_zero() -> None:
    task = make_gaussian_task()
    fresh = task.model.vector.clone()
    task.model.load(make_start(task))  # whatever was loaded since does not matter
    state = make_fvb().init(task, generator())
    assert torch.equal(state["params"], fresh)
    assert state["round"] == 0
    task.model.vector.zero_()
    assert state["params"].any()
    assert make_fvb().init_client(task, state, 1) == {}
    assert make_fvb().broadcast(task, state).keys() == state.keys()


# Draws


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize("num_layers", [None, 1])
def test_draws_have_the_moments_of_the_posterior(clamp: str, num_layers: int | None) -> None:
    settings = make_gaussian_settings(log_variance_clamp=clamp, log_variance_range=RANGE)
    task = make_gaussian_task(settings, num_layers)
    layout, params = task.model.layout, make_start(task)
    num = 4000
    draws = torch.stack(list(make_fvb().draws(task, {"params": params}, num, generator()))).double()
    assert draws.shape == (num, layout.size)
    log_variance = params[layout.log_variances].double()
    variance = (log_variance if clamp == "none" else log_variance.clamp(*RANGE)).exp()
    means = draws[:, layout.means]
    # Five standard errors of a Gaussian's sample mean and sample variance.
    assert ((means.mean(0) - params[layout.means]).abs() < 5 * (variance / num).sqrt()).all()
    assert ((means.var(0) / variance - 1).abs() < 5 * math.sqrt(2 / num)).all()
    correlation = torch.corrcoef(means.T) - torch.eye(means.shape[1])
    assert correlation.abs().max() < 5 / math.sqrt(num)
    still = torch.ones(layout.size, dtype=torch.bool)
    still[layout.means] = False
    assert still.sum() > 0
    assert (draws[:, still] == params[still].double()).all()


def test_draws_repeat_with_the_generator_and_leave_the_model_alone() -> None:
    task = make_gaussian_task()
    params = make_start(task)
    kept = params.clone()
    first, second, other = (
        torch.stack(list(make_fvb().draws(task, {"params": params}, 3, generator(seed)))) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(params, kept)
    assert len({tuple(draw.tolist()) for draw in first}) == 3


# Diagnostics


def diagnose(task: Task, log_variances: Tensor, method: Fvb | None = None) -> dict[str, float]:
    params = make_start(task)
    params[task.model.layout.log_variances] = log_variances
    state = make_state(make_start(task, seed=9))
    return (method or make_fvb()).server_update(task, state, iter([(0, {"params": params})]), generator())[1]


@pytest.mark.parametrize(("clamp", "clamped"), [("none", 0.0), ("hard", 5 / 48), ("straight_through", 5 / 48)])
def test_diagnostics_by_hand(clamp: str, clamped: float) -> None:
    task = make_gaussian_task(make_gaussian_settings(log_variance_clamp=clamp, log_variance_range=RANGE))
    log_variances = torch.full((48,), -1.0)
    log_variances[[0, 7, 20]] = -5.0
    log_variances[[3, 47]] = 3.0
    metrics = diagnose(task, log_variances)
    assert metrics.keys() == {"std_norm", "clamped", "alarm"}
    # Log variances come back from the server rounded to float32, to 1e-7.
    norm = math.sqrt(43 * math.exp(-1) + 3 * math.exp(-5) + 2 * math.exp(3))
    assert metrics["std_norm"] == pytest.approx(norm, rel=1e-6)
    assert metrics["clamped"] == pytest.approx(clamped, abs=1e-12)
    assert metrics["alarm"] == 0


@pytest.mark.parametrize(("typical", "alarm"), [(1e-11, -1), (1e-9, 0), (1.0, 0), (99.0, 0), (101.0, 1)])
def test_alarm_looks_at_the_geometric_mean(typical: float, alarm: int) -> None:
    spread = torch.linspace(-3, 3, 48)  # the arithmetic mean of the variances would be four times the geometric one
    metrics = diagnose(make_gaussian_task(), spread + math.log(typical))
    assert metrics["alarm"] == alarm


def test_alarm_at_other_variances() -> None:
    method = make_fvb(alarm_variances=[0.1, 0.5])
    alarms = [diagnose(make_gaussian_task(), torch.full((48,), v), method)["alarm"] for v in (-3.0, -1.0, -0.5)]
    assert alarms == [-1, 0, 1]


# Presets


BFL_P_LOCAL = {"epochs": 10, "batch_size": 64, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "clip": None}
BFL_P_LOCAL |= {"optimizer": "sgd", "betas": [0.9, 0.999], "schedule": "constant"}


@pytest.mark.parametrize(
    ("name", "epochs", "layers", "released"),
    [
        ("bfl_p", 10, "auto", False),
        ("bfl_p_released", 10, "auto", True),
        ("ba_bfl", 50, 3, False),
        ("ba_bfl_released", 50, 3, True),
    ],
)
def test_presets(name: str, epochs: int, layers: int | str, released: bool) -> None:
    """FACTS 2.1-2.6 and 3.1-3.3. `clamp: none` is what lets variances be trained."""
    config = resolve(f"experiment={name}")
    assert (config["dataset"]["name"], config["dataset"]["mean"], config["dataset"]["std"]) == (
        "fashion_mnist",
        [0.0],
        [1.0],
    )
    assert (config["num_clients"], config["rounds"], config["participation"]) == (10, 50, 1.0)
    assert config["local"] == BFL_P_LOCAL | {"epochs": epochs}
    partition = config["partition"]
    assert (partition["name"], partition["alpha"], partition["min_size"], partition["balance"], partition["rng"]) == (
        "niid_bench", 0.5, 10, True, "numpy_legacy"
    )  # fmt: skip
    assert config["model"] == {
        "_target_": "bfl_bench.models.networks.lenet",
        "name": "lenet",
        "dropout": 0.0,
        "bayesian_layers": layers,
        "mean_init": "normal" if released else "network",
        "log_variance_init": -9.0,
        "log_variance_init_std": 0.001,
        "log_variance_clamp": "hard" if released else "none",
        "log_variance_range": [-8.0, 8.0],
        "sampling": "outputs",
        "noise": 1.0,
    }
    evaluation = config["eval"]
    assert (evaluation["ece_bins"], evaluation["nll_epsilon"]) == ((100, 1e-8) if released else (15, 0.0))
    assert evaluation["draws"] == 10
    method = plan(config).method
    assert isinstance(method, Fvb)
    assert (method.beta, method.prior_variance, method.prior, method.train_samples) == (1.0, 1.0, "fixed", 1)
    assert config["server"]["lr"] == 1.0


@pytest.mark.parametrize("rule", ["eaa_released", "gaa_released", "aalv", "ppa_released", "cf_released"])
def test_presets_take_every_rule_of_the_paper(rule: str) -> None:
    config = resolve("experiment=bfl_p_released", f"aggregator={rule}", "method.weights=uniform")
    assert config["aggregator"]["name"] == rule
    method: Any = plan(config).method
    assert (method.weights, method.aggregator.func.__name__) == ("uniform", rule.removesuffix("_released"))


@pytest.mark.parametrize("name", ["bfl_p", "bfl_p_released"])
def test_fedavg_under_the_presets(name: str) -> None:
    config = resolve(f"experiment={name}", "method=fedavg")
    assert (config["method"]["name"], config["aggregator"]["name"]) == ("fedavg", "none")
    assert config["local"] == BFL_P_LOCAL
    planned = plan(config)
    assert isinstance(planned.method, FedAvg)
    assert planned.alternatives == {}


def test_fvb_brings_a_rule_and_the_command_line_wins() -> None:
    assert resolve("method=fvb")["aggregator"]["name"] == "rklb"
    assert resolve("method=fvb", "aggregator=wb")["aggregator"]["name"] == "wb"


# How a run is built


@pytest.mark.parametrize(("layers", "gaussian"), [("auto", 152), ("all", 152), ("1", 24), ("0", 0)])
def test_layers_of_a_run(layers: str, gaussian: int) -> None:
    task = experiment(*SMALL, "method=fvb", f"model.bayesian_layers={layers}").worker.task
    layout = task.model.layout
    assert layout.means.stop - layout.means.start == gaussian
    assert layout.size == 16 * 8 + 8 + 8 * 3 + 3 + gaussian
    assert task.gaussian is not None


def test_a_run_of_fedavg_has_no_gaussian_layers_and_the_same_initial_weights() -> None:
    fedavg, fvb = (experiment(*SMALL, f"method={name}").worker.task.model for name in ("fedavg", "fvb"))
    assert fedavg.layout.means.stop == fedavg.layout.means.start
    theirs, ours = (model.layout.to_state_dict(model.vector) for model in (fedavg, fvb))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert len(ours) == len(theirs) + 2


def test_training_noise_depends_on_round_and_client_only(tmp_path: Path) -> None:
    """Also when the global generator was elsewhere."""
    overrides = [*SMALL, "method=fvb", "rounds=2"]
    first = run_in(tmp_path / "first", *overrides)
    torch.manual_seed(1)
    torch.randn(77)
    assert run_in(tmp_path / "second", *overrides) == first
