"""PVI and FedGVI: the exact posterior after one round where there is one, products by hand, what the limits are."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bfl_bench.aggregators import eaa
from bfl_bench.inference.sites import natural
from bfl_bench.inference.train import Adjust, Trained
from bfl_bench.inference.variational import EDGE, Prior
from bfl_bench.likelihood import Categorical
from bfl_bench.method import Client, Task, Tensors
from bfl_bench.methods.fvb import Fvb
from bfl_bench.methods.virtual import Virtual
from tests.composing import resolve
from tests.federation import generator, make_clients, make_gaussian_settings, make_gaussian_task


def method(name: str = "pvi", **changes: Any) -> Virtual:
    """Take the values of conf/, but for a prior whose variance is not 1."""
    values = {key: value for key, value in resolve(f"method={name}")["method"].items() if key != "_target_"}
    return replace(Virtual(**values), prior_variance=0.7, **changes)


class Conjugate:
    """Stands in for training: examples are observations of every weight with noise of known precision."""

    def __init__(self, task: Task, num_examples: int) -> None:
        num = task.model.layout.means.stop - task.model.layout.means.start
        self.precisions = torch.rand(num_examples, num, generator=generator(4), dtype=torch.float64) * 9 + 0.1
        self.observed = torch.randn(num_examples, num, generator=generator(8), dtype=torch.float64)

    def __call__(
        self, task: Task, start: Tensor, client: Client, rng: torch.Generator, adjust: Adjust | None = None, **_: Any
    ) -> Trained:
        """Read the cavity off the pull of the prior; times the likelihood it is the client's exact posterior."""
        assert adjust is not None
        layout = task.model.layout
        gradient = torch.zeros_like(start)
        adjust(torch.zeros_like(start), gradient, start, start)
        precision = 2 * len(client) * gradient[layout.log_variances].double() + 1
        shift = -len(client) * gradient[layout.means].double()
        own = self.precisions[client.indices]
        precision, shift = precision + own.sum(0), shift + (own * self.observed[client.indices]).sum(0)
        trained = start.clone()
        trained[layout.means] = (shift / precision).float()
        trained[layout.log_variances] = -precision.log().float()
        return Trained(trained, 1, {"train_loss": 0.0, "train_acc": 0.0}, {})

    def pooled(self, prior_variance: float) -> tuple[Tensor, Tensor]:
        precision = 1 / prior_variance + self.precisions.sum(0)
        return precision, (self.precisions * self.observed).sum(0) / precision


def prepare(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> tuple[Task, list[Client], Conjugate]:
    task = make_gaussian_task(make_gaussian_settings(log_variance_init=-5.0), sizes=sizes)
    conjugate = Conjugate(task, sum(sizes))
    monkeypatch.setattr("bfl_bench.methods.virtual.train", conjugate)
    return task, make_clients(sizes), conjugate


def advance(
    pvi: Virtual, task: Task, state: Tensors, memories: dict[int, Tensors], cohort: list[Client]
) -> tuple[Tensors, list[Tensors]]:
    """Play a round; return the server's state and the clients' posteriors."""
    replies, models = [], []
    for client in cohort:
        memory = memories.get(client.id) or pvi.init_client(task, state, client.id)
        update = pvi.client_update(task, pvi.broadcast(task, state), memory, client, generator(client.id))
        memories[client.id] = update.memory
        replies.append((client.id, update.message))
        models.append(update.local)
    return pvi.server_update(task, state, iter(replies), generator())[0], models


def assert_posterior(task: Task, state: Tensors, precision: Tensor, mean: Tensor) -> None:
    """Up to float32, in which clients hold their posteriors and send changes."""
    torch.testing.assert_close(state["precision"], precision, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state["params"][task.model.layout.means].double(), mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(12,), (6, 6), (1, 2, 9), (1,) * 12])
@pytest.mark.parametrize("changes", [{}, {"prior_power": "size"}, {"prior_power": "size", "sites_start": "none"}])
def test_one_undamped_round_gives_the_exact_pooled_posterior(
    sizes: tuple[int, ...], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the examples are split; a second round changes nothing."""
    task, clients, conjugate = prepare(sizes, monkeypatch)
    pvi = method(damping=1.0, **changes)
    state, memories = pvi.init(task, generator()), dict[int, Tensors]()
    for _ in range(2):
        state, _ = advance(pvi, task, state, memories, clients)
        assert_posterior(task, state, *conjugate.pooled(0.7))


@pytest.mark.parametrize(("start", "others"), [("prior", 0), ("network", 2 / 3)])
def test_the_first_cavities_are_the_prior_unless_sites_start_as_the_network(
    start: str, others: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then they hold the other clients' sites, which are narrow around the initial weights."""
    task, clients, conjugate = prepare((1, 2, 9), monkeypatch)
    pvi = method(damping=1.0, sites_start=start)
    _, models = advance(pvi, task, pvi.init(task, generator()), {}, clients)
    prior = 1 / 0.7 if start == "prior" else 1 / 0.7 / 3 + others * natural(task, task.model.initial)[0]
    for client, model in zip(clients, models, strict=True):
        expected = prior + conjugate.precisions[client.indices].sum(0)
        torch.testing.assert_close(natural(task, model["params"])[0], expected, rtol=1e-5, atol=1e-5)


def test_one_client_after_the_other_gives_it_after_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    task, clients, conjugate = prepare((1, 2, 9), monkeypatch)
    pvi = method("pvi_sequential")
    state, memories = pvi.init(task, generator()), dict[int, Tensors]()
    for client in clients:
        state, _ = advance(pvi, task, state, memories, [client])
    assert_posterior(task, state, *conjugate.pooled(0.7))


def test_what_damped_sites_lack_shrinks_by_the_damping(monkeypatch: pytest.MonkeyPatch) -> None:
    """By 1 - 1/3 a round with three clients; and the prior times the sites is the server's at any participation."""
    task, clients, conjugate = prepare((1, 2, 9), monkeypatch)
    pvi = method()
    state, memories = pvi.init(task, generator()), dict[int, Tensors]()
    for _ in range(4):
        state, _ = advance(pvi, task, state, memories, clients)
    learnt = (1 - (2 / 3) ** 4) * conjugate.precisions.sum(0)
    torch.testing.assert_close(state["precision"], 1 / 0.7 + learnt, rtol=1e-5, atol=1e-5)
    for cohort in ([0], [1, 2], [2]):
        state, _ = advance(pvi, task, state, memories, [clients[i] for i in cohort])
        product = sum((memory["precision"] for memory in memories.values()), torch.zeros(()))
        torch.testing.assert_close(product, state["precision"], rtol=1e-9, atol=1e-7)


def test_one_client_is_plain_variational_inference() -> None:
    """From the network's initial Gaussian, under the prior."""
    task, (client,) = make_gaussian_task(sizes=(12,)), make_clients((12,))
    pvi = method(damping=1.0)
    fvb = Fvb("fvb", "size", eaa, 1.0, 0.7, "fixed", 1, [1e-10, 100.0], variance_rate=0.03)
    _, (local,) = advance(pvi, task, pvi.init(task, generator()), {}, [client])
    start = fvb.init(task, generator())
    trained = fvb.client_update(task, fvb.broadcast(task, start), {}, client, generator(0)).local["params"]
    torch.testing.assert_close(local["params"], trained, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(trained, start["params"], atol=0.05)


@pytest.mark.parametrize("name", ["bcm_same", "bcm_split"])
def test_products_of_posteriors_by_hand(name: str) -> None:
    """Of networks as they are trained; the split prior has gone into the clients' posteriors."""
    task, clients = make_gaussian_task(), make_clients()
    bcm = method(name)
    state, models = advance(bcm, task, bcm.init(task, generator()), {}, clients)
    posteriors = [natural(task, model["params"]) for model in models]
    precision = sum((each[0] for each in posteriors), torch.zeros(()))
    shift = sum((each[1] for each in posteriors), torch.zeros(()))
    if name == "bcm_same":
        precision = precision - 2 / 0.7
    torch.testing.assert_close(state["precision"], precision, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state["shift"], shift, rtol=1e-5, atol=1e-5)


def test_a_split_prior_is_as_strong_as_the_clients_share_of_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    task, clients, conjugate = prepare((1, 2, 9), monkeypatch)
    bcm = method("bcm_split")
    _, models = advance(bcm, task, bcm.init(task, generator()), {}, clients)
    for client, model in zip(clients, models, strict=True):
        expected = len(client) / 12 / 0.7 + conjugate.precisions[client.indices].sum(0)
        torch.testing.assert_close(natural(task, model["params"])[0], expected, rtol=1e-5, atol=1e-5)


# FedGVI


def renyi_by_quadrature(mean: Tensor, log_variance: Tensor, prior: tuple[float, float], alpha: float) -> Tensor:
    """ln of the integral of q^alpha p^(1-alpha), over alpha (alpha - 1)."""
    x = torch.linspace(-40, 40, 400_001, dtype=torch.float64)

    def log_density(centre: Tensor, log_variance: Tensor) -> Tensor:
        return -0.5 * ((x - centre) ** 2 * (-log_variance).exp() + log_variance + math.log(2 * math.pi))

    prior_mean, prior_variance = (torch.tensor(value, dtype=torch.float64) for value in prior)
    values = alpha * log_density(mean, log_variance) + (1 - alpha) * log_density(prior_mean, prior_variance.log())
    return (values.logsumexp(0) + math.log(80 / 400_000)) / (alpha * (alpha - 1))


def pull_of(task: Task, prior: tuple[float, float], mean: float, variance: float, alpha: float) -> tuple[float, float]:
    """The slopes along the first mean and the first log variance."""
    layout = task.model.layout
    num = layout.means.stop - layout.means.start
    both = Prior(torch.full((num,), prior[0]), torch.full((num,), -math.log(prior[1])))
    parameters, gradient = torch.zeros_like(task.model.initial), torch.zeros_like(task.model.initial)
    parameters[layout.means], parameters[layout.log_variances] = mean, math.log(variance)
    both.pull(task, 0.25, alpha)(parameters, gradient, parameters, parameters)
    return gradient[layout.means][0].item() / 0.25, gradient[layout.log_variances][0].item() / 0.25


@pytest.mark.parametrize("alpha", [0.001, 0.5, 0.999, 1.001, 1.5, 2.5])
def test_the_pull_is_the_gradient_of_renyis_divergence(alpha: float) -> None:
    mean, log_variance = (
        torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.4, math.log(0.8))
    )
    divergence = renyi_by_quadrature(mean, log_variance, (-0.3, 0.7), alpha)
    expected = torch.autograd.grad(divergence, (mean, log_variance))
    found = pull_of(make_gaussian_task(), (-0.3, 0.7), 0.4, 0.8, alpha)
    assert found == pytest.approx([slope.item() for slope in expected], rel=1e-4)


def test_the_limits_of_renyis_divergence_are_the_two_kl_divergences() -> None:
    """KL(q || p) near alpha = 1, as `pull` has it there, and KL(p || q) at alpha = 0, differentiated by hand."""
    task, p, (mean, variance) = make_gaussian_task(), (-0.3, 0.7), (0.4, 0.5)
    kl = ((mean - p[0]) / p[1], 0.5 * (variance / p[1] - 1))
    reverse = ((mean - p[0]) / variance, 0.5 * (1 - (p[1] + (mean - p[0]) ** 2) / variance))
    assert pull_of(task, p, mean, variance, 1.0) == pytest.approx(kl, rel=1e-5)
    assert pull_of(task, p, mean, variance, 1 + 1e-6) == pytest.approx(kl, rel=1e-4)
    assert pull_of(task, p, mean, variance, 0.0) == pytest.approx(reverse, rel=1e-5)


def test_where_the_divergence_is_infinite_the_variance_is_pulled_back() -> None:
    """Above v = alpha c / (alpha - 1), 5/3 of the prior's; the pull is finite."""
    for variance in (1.7, 3.0, 1e4):
        slopes = pull_of(make_gaussian_task(), (0.0, 1.0), 0.2, variance, 2.5)
        assert slopes[0] == pytest.approx(0.2 / EDGE)
        assert (variance - 1) / (2 * EDGE) < slopes[1] < math.inf


def test_the_generalised_cross_entropy_by_hand_and_at_its_ends() -> None:
    logits, labels = torch.randn(6, 3, generator=generator()) * 2, torch.tensor([0, 2, 1, 1, 0, 2])
    right = logits.double().softmax(1)[torch.arange(6), labels]
    likelihood = Categorical(3)
    for power in (0.3, 0.8, 1.0):
        expected = ((1 - right**power) / power).mean().item()
        assert likelihood.generalised_loss(logits, labels, power).item() == pytest.approx(expected, rel=1e-5)
    # (1 - exp(-c x)) / c = x - c x^2 / 2 + ..., losses x being below 10 here
    nll = likelihood.loss(logits, labels).item()
    assert likelihood.generalised_loss(logits, labels, 1e-6).item() == pytest.approx(nll, rel=1e-5)


def test_fedgvi_near_its_limits_is_pvi() -> None:
    task, clients = make_gaussian_task(), make_clients()
    states = []
    near = method("fedgvi", loss_power=1e-6, alpha=1 + 1e-6)
    for gvi in (method("pvi"), near, method("fedgvi", loss_power=0.0), method("fedgvi", alpha=1.0)):
        state, memories = gvi.init(task, generator()), dict[int, Tensors]()
        for _ in range(2):
            state, _ = advance(gvi, task, state, memories, clients)
        states.append(state["params"])
    torch.testing.assert_close(states[1], states[0], rtol=1e-3, atol=1e-4)  # 12 steps, each off by about 1e-6
    assert not torch.allclose(states[2], states[0], atol=1e-2)  # by the divergence alone
    assert not torch.allclose(states[3], states[0], atol=1e-2)  # by the loss alone


def test_a_loss_that_is_added_up_over_samples_is_a_lower_beta(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the released code has it, with ten samples; Adam does not see a factor of the whole objective."""
    task, (client, *_) = make_gaussian_task(optimizer="adam", lr=0.01), make_clients()
    released = method("fedgvi_released")
    assert (released.beta, released.train_samples) == (0.1, 10)
    results = [advance(released, task, released.init(task, generator()), {}, [client])[1][0]["params"]]
    averaged = Categorical.generalised_loss
    monkeypatch.setattr(Categorical, "generalised_loss", lambda *arguments: 10 * averaged(*arguments))
    summed = replace(released, beta=1.0)
    results.append(advance(summed, task, summed.init(task, generator()), {}, [client])[1][0]["params"])
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)  # Adam's eps, and float32
    assert not torch.allclose(results[0], task.model.initial, atol=0.02)
