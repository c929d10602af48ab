"""Variances that are learnt, against conjugate posteriors, the Laplace diagonal and curvatures; the columns on them.

Every oracle is also shown with the means' steps for log variances, under which it does not hold.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bfl_bench.aggregators import Rule, eaa, gaa, rklb
from bfl_bench.data.dataset import Split
from bfl_bench.errors import ConfigError
from bfl_bench.inference.train import Adam, Sgd, train
from bfl_bench.inference.variational import NaturalVariances, choose_optimizer
from bfl_bench.likelihood import Categorical
from bfl_bench.method import Client, Task
from bfl_bench.methods.fvb import Fvb
from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import make_gaussian
from tests.composing import experiment
from tests.federation import CPU, assemble_task, generator, make_clients, make_gaussian_settings, make_gaussian_task

NOISE = 0.5  # variance of the targets of linear regression


class Regression(Categorical):
    """Targets with Gaussian noise, as far as training asks."""

    def loss(self, outputs: Tensor, labels: Tensor, reduction: Any = "mean") -> Tensor:
        return (outputs[:, 0] - labels).square().mean() / (2 * NOISE)


def make_fvb(**changes: Any) -> Fvb:
    method = Fvb("fvb", "size", rklb, 1.0, 1.0, "fixed", 1, [1e-10, 100.0], "all", 0.05)
    return replace(method, **changes)


def make_linear_task(num_inputs: int, num_outputs: int, sizes: tuple[int, ...], init: float, **local: Any) -> Task:
    settings = make_gaussian_settings(log_variance_init=init, log_variance_init_std=0.01)
    module = make_gaussian(nn.Sequential(nn.Linear(num_inputs, num_outputs, bias=False)), None, settings)
    task = assemble_task(FlatModel(module, CPU), sizes, gaussian=settings, **local)
    return replace(task, likelihood=Regression(1)) if num_outputs == 1 else task


def update(method: Fvb, task: Task, client: Client, seed: int = 5) -> Tensor:
    state = method.init(task, generator())
    return method.client_update(task, method.broadcast(task, state), {}, client, generator(seed)).message["params"]


def learn_slowly(method: Fvb, task: Task, client: Client) -> Tensor:
    """One local update, then another with small steps, which average the noise away."""
    first = update(method, task, client)
    slow = replace(method, variance_rate=None if method.variance_rate is None else 0.2 * method.variance_rate)
    state = slow.init(task, generator()) | {"params": first}
    return slow.client_update(task, slow.broadcast(task, state), {}, client, generator(6)).message["params"]


# Conjugate linear regression


def make_regression(num: int, seed: int = 3) -> Split:
    """Inputs of unequal scales, correlated; so that variances differ between weights and from the exact marginals."""
    draw = generator(seed)
    x = torch.randn(num, 4, generator=draw) * torch.tensor([0.2, 0.7, 1.5, 3.0])
    x[:, 1] += 0.3 * x[:, 2]
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.3]) + math.sqrt(NOISE) * torch.randn(num, generator=draw)
    return Split(x, y)


@pytest.mark.parametrize("init", [-6.0, 1.0])
def test_linear_regression_has_the_mean_field_optimum(init: float) -> None:
    """From far too narrow and far too wide: precision n E[x^2] / noise + 1 / prior; the mean is the exact one."""
    data = make_regression(60)
    task = make_linear_task(4, 1, (60,), init, epochs=150, batch_size=60, lr=0.02)
    client, layout = Client(0, data, torch.arange(60), None), task.model.layout
    precision = data.x.square().sum(0) / NOISE + 1 / 0.8
    exact = data.x.T @ data.x / NOISE + torch.eye(4) / 0.8
    mean = torch.linalg.solve(exact, data.x.T @ data.y / NOISE)
    method = make_fvb(prior_variance=0.8, train_samples=64)
    found = learn_slowly(method, task, client)
    torch.testing.assert_close(found[layout.log_variances].exp() * precision, torch.ones(4), rtol=0, atol=0.05)
    # Means have noise: steps of 0.02 with gradients of a minibatch of noisy outputs, against deviations 1 / sqrt(P).
    assert ((found[layout.means] - mean).abs() * precision.sqrt()).max() < 0.3
    asleep = learn_slowly(replace(method, variance_rate=None), task, client)
    assert ((asleep[layout.log_variances].exp() * precision).log().abs() > 0.5).any()


@pytest.mark.slow
@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_reverse_kl_of_clients_that_stand_for_all_examples_is_the_pooled_posterior(beta: float) -> None:
    """With inputs that are one-hot, weights are independent: mean field is exact, and unequal clients add up."""
    sizes = (40, 20, 20)
    draw = generator(9)
    chosen = torch.cat(
        [torch.randint(0, high, (size,), generator=draw) for size, high in zip(sizes, (4, 2, 3), strict=True)]
    )
    x = 2 * torch.eye(4)[chosen]
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.3]) + math.sqrt(NOISE) * torch.randn(80, generator=draw)
    task = make_linear_task(4, 1, sizes, -4.0, epochs=150, batch_size=40, lr=0.02)
    layout, method = task.model.layout, make_fvb(beta=beta, train_samples=64)
    clients = [Client(id_, Split(x, y), part, None) for id_, part in enumerate(torch.arange(80).split(sizes))]
    replies = [(client.id, {"params": learn_slowly(method, task, client)}) for client in clients]
    precision = (x.T @ x).diagonal() / (NOISE * beta) + 1
    mean = (x.T @ y) / (NOISE * beta) / precision

    def combine(rule: Rule) -> Tensor:
        changed = replace(method, aggregator=rule)
        state, _ = changed.server_update(task, changed.init(task, generator()), iter(replies), generator())
        return state["params"]

    pooled = combine(rklb)
    torch.testing.assert_close(pooled[layout.log_variances].exp() * precision, torch.ones(4), rtol=0, atol=0.05)
    assert ((pooled[layout.means] - mean).abs() * precision.sqrt()).max() < 0.4
    # A client that has seen nothing of a weight keeps the prior's variance, which arithmetic means are full of.
    assert (combine(eaa)[layout.log_variances].exp() * precision).max() > 5
    assert not torch.allclose(combine(gaa)[layout.log_variances], pooled[layout.log_variances], atol=0.5)
    own = replace(method, examples="own")
    narrow = learn_slowly(own, task, clients[1])
    counts = (x[40:60].T @ x[40:60]).diagonal() / (NOISE * beta) + 1
    torch.testing.assert_close(narrow[layout.log_variances].exp() * counts, torch.ones(4), rtol=0, atol=0.05)


# Logistic regression


def test_logistic_regression_has_the_laplace_diagonal() -> None:
    """Two classes as a softmax, many examples: curvature sum p (1 - p) x^2 at the mean, plus the prior's."""
    draw = generator(2)
    x = torch.randn(400, 3, generator=draw) * torch.tensor([0.3, 1.0, 2.0])
    y = (torch.rand(400, generator=draw) < (x @ torch.tensor([1.0, -1.0, 0.5])).sigmoid()).long()
    task = make_linear_task(3, 2, (400,), -9.0, epochs=40, batch_size=100, lr=0.1)
    client, layout = Client(0, Split(x, y), torch.arange(400), None), task.model.layout
    method = make_fvb(prior_variance=2.0, train_samples=16)
    found = learn_slowly(method, task, client)
    weight = found[layout.means].view(2, 3)
    p = (x @ weight.T).softmax(1)[:, :1]
    laplace = ((p * (1 - p)) * x.square()).sum(0).repeat(2) + 0.5
    # Averaged over the posterior, whose logits have a deviation of about 0.3, p (1 - p) is a few per cent smaller.
    torch.testing.assert_close(found[layout.log_variances].exp() * laplace, torch.ones(6), rtol=0, atol=0.1)
    asleep = learn_slowly(replace(method, variance_rate=None), task, client)
    assert (asleep[layout.log_variances].exp() * laplace).max() < 0.3


# Networks on real data


def count_ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort().double()


@pytest.mark.parametrize(
    ("dataset", "num_clients"), [("digits", 1), pytest.param("mnist", 20, marks=pytest.mark.real_data)]
)
def test_precisions_follow_curvature_and_weights_without_data_keep_the_prior(dataset: str, num_clients: int) -> None:
    """Of one client; inputs are not normalised, so that pixels that are 0 in all images say nothing."""
    setting = [f"dataset={dataset}", "model.hidden=[20]", "dataset.mean=[0]", "dataset.std=[1]", "partition=iid"]
    training = ["local.epochs=12", "local.lr=0.2", "method=fvb", "method.examples=own", f"num_clients={num_clients}"]
    worker = experiment(*setting, *training).worker
    task, method = worker.task, worker.method
    assert isinstance(method, Fvb)
    client, layout = Client(0, worker.train, worker.client_indices[0], None), task.model.layout
    pixels, _ = client.gather(torch.arange(len(client)), generator())
    pixels = pixels.flatten(1)
    dead = (pixels == 0).all(0).repeat(20)  # by weights of the first layer
    assert dead.sum() >= 40

    def look(method: Fvb) -> tuple[float, Tensor]:
        """Rank correlation of precision and curvature at the mean, of weights that see data; ratios to the prior."""
        params = update(method, task, client)
        curvature = curvature_at(task, params, pixels)
        log_variance = params[layout.log_variances][: len(curvature)]
        ranks = torch.stack([count_ranks(values[~dead]) for values in (-log_variance, curvature)])
        return torch.corrcoef(ranks)[0, 1].item(), log_variance[dead].exp() / method.prior_variance

    correlation, ratios = look(method)
    assert correlation > 0.5
    torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0, atol=0.05)
    correlation, ratios = look(replace(method, variance_rate=None))
    assert correlation < 0.5
    assert ratios.max() < 0.5


def curvature_at(task: Task, params: Tensor, x: Tensor) -> Tensor:
    """The first layer's diagonal of the Gauss-Newton matrix of an example's loss, at the means, written out."""
    tensors = task.model.layout.to_state_dict(params)
    bias, first, last, second = (tensors[name] for name in sorted(tensors) if not name.endswith("log_variance"))
    hidden = (x @ first.T + bias).relu()
    p = (hidden @ second.T + last).softmax(1)
    spread = p @ second.square() - (p @ second).square()  # (n, hidden), second' (diag p - p p') second
    return (((hidden > 0) * spread).T @ x.square() / len(x)).flatten()


# The step itself


def test_the_step_is_the_printed_one() -> None:
    """Gradients of log variances times 2 rate / scale, clipped at 1; points and means take their own optimizer's."""
    step = NaturalVariances(others=Sgd(momentum=0.5, weight_decay=0.1), first=2, rate=0.1, scale=0.01)
    parameters = torch.tensor([1.0, -1.0, -3.0, -3.0, -3.0])
    gradient = torch.tensor([0.2, 0.4, 0.02, -0.9, 0.9])
    memory = step.begin(parameters)
    step.step(parameters, lambda offset: gradient.clone(), memory, 0.5, generator())
    expected = torch.tensor([1 - 0.5 * 0.3, -1 - 0.5 * 0.3, -3 - 20 * 0.02, -2.0, -4.0])
    torch.testing.assert_close(parameters, expected)
    assert memory["velocity"].shape == (2,)


def test_adam_is_for_points_and_means_alone() -> None:
    task, client = make_gaussian_task(optimizer="adam"), make_clients()[1]
    optimizer = choose_optimizer(task, 0.1, 0.01)
    assert isinstance(optimizer, NaturalVariances)
    assert isinstance(optimizer.others, Adam)
    assert isinstance(choose_optimizer(task, None, 0.01), Adam)
    trained = train(task, task.model.initial, client, generator(), optimizer=optimizer)
    assert trained.memory["first"].shape == (task.model.layout.log_variances.start,)
    assert (trained.vector != task.model.initial).all()


def test_a_scale_free_step_needs_a_scale() -> None:
    task = make_gaussian_task()
    with pytest.raises(ConfigError, match=r"method\.variance_rate: got 0\.05, allowed: null"):
        make_fvb(beta=0.0).check(task)
    make_fvb(beta=0.0, variance_rate=None).check(task)


def test_warm_up_lets_beta_rise_over_the_rounds() -> None:
    task, client = make_gaussian_task(), make_clients()[0]

    def trained(method: Fvb, round_: int) -> Tensor:
        state = {"params": task.model.initial, "round": torch.tensor(float(round_))}
        return method.client_update(task, state, {}, client, generator()).message["params"]

    warm, betas = make_fvb(beta=2.0, warm_up=4), {0: 0.5, 2: 1.5, 3: 2.0, 9: 2.0}
    for round_, beta in betas.items():
        assert torch.equal(trained(warm, round_), trained(make_fvb(beta=beta), round_))
    assert not torch.equal(trained(warm, 0), trained(warm, 2))


@pytest.mark.parametrize(("key", "value"), [("examples", "own"), ("variance_rate", 0.2), ("variance_rate", None)])
def test_every_key_does_something(key: str, value: object) -> None:
    task, client = make_gaussian_task(), make_clients()[0]
    changed: Callable[..., Fvb] = make_fvb
    one, other = update(make_fvb(), task, client), update(changed(**{key: value}), task, client)
    layout = task.model.layout
    assert (one - other)[layout.log_variances].abs().max() > 1e-3
