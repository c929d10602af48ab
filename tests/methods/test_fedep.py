"""FedEP: sites that multiply to the server's Gaussian, the exact posterior of conjugate models, moments, burning in."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bfl_bench.errors import ConfigError
from bfl_bench.inference.curvature import clip_outliers, diagonal_fisher
from bfl_bench.inference.train import train
from bfl_bench.methods import fedep
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fedep import FedEp
from tests.composing import SMALL, experiment
from tests.federation import generator, make_clients, make_task, random_start, run_round
from tests.quadratics import SIZES, Course, Quadratics, make_quadratic_task, make_quadratics

N, TOTAL = len(SIZES), sum(SIZES)
PRIOR = 0.05  # per example


def method(**changes: Any) -> FedEp:
    default = FedEp(
        name="fedep",
        weights="size",
        sites="ep",
        moments="identity",
        burn_in_rounds=0,
        burn_in_epochs=0,
        scale=2.0,
        prior_precision=PRIOR,
        shrinkage=0.4,
        clip=None,
        min_precision=1e-6,
        draws_from="mean",
    )
    return replace(default, **changes)


@pytest.fixture
def solved_exactly(monkeypatch: pytest.MonkeyPatch) -> Quadratics:
    problem = make_quadratics(diagonal=True)
    monkeypatch.setattr(fedep, "train", problem.exact_train())
    monkeypatch.setattr(fedep, "diagonal_fisher", problem.exact_fisher())
    monkeypatch.setattr(fedep, "clip_outliers", lambda values: values)
    return problem


@pytest.mark.parametrize("sites", ["ep", "sep"])
def test_exact_moments_lead_to_the_exact_posterior(solved_exactly: Quadratics, sites: Any) -> None:
    """Undamped EP in one round, as partitioned variational inference; SEP in the limit."""
    server_lr = float(N) if sites == "ep" else 1.0
    course = Course(method(moments="laplace", scale=1.0, sites=sites), make_quadratic_task(server_lr))
    mean, precision = solved_exactly.posterior(TOTAL * PRIOR)
    for _ in range(2 if sites == "ep" else 400):
        course.play()
    # The first precision of the server is rounded to float32.
    torch.testing.assert_close(course.state["precision"], precision.diagonal(), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(course.state["params"], mean, rtol=1e-7, atol=1e-7)
    assert course.metrics == {"server_improper": 0.0}
    assert all(bool(memory) == (sites == "ep") for memory in course.memories.values())


def test_adf_counts_the_data_again_in_every_round(solved_exactly: Quadratics) -> None:
    course = Course(method(moments="laplace", scale=1.0, sites="adf"), make_quadratic_task())
    added = (solved_exactly.curvatures.diagonal(dim1=1, dim2=2).sum(0) + TOTAL * PRIOR) / N
    for round_ in range(1, 4):
        torch.testing.assert_close(course.play()["precision"], TOTAL * PRIOR + round_ * added, rtol=1e-7, atol=1e-7)


def product(course: Course, task: Any) -> tuple[Tensor, Tensor]:
    """Of the sites of all clients, those not yet visited as well."""
    memories = [course.memories.get(id_) or course.method.init_client(task, course.state, id_) for id_ in range(N)]
    precision = torch.stack([memory["precision"] for memory in memories]).sum(0)
    return torch.stack([memory["shift"] for memory in memories]).sum(0) / precision, precision


@pytest.mark.parametrize(("burn_in", "clip"), [(0, None), (2, 3.0)])
def test_the_product_of_the_sites_is_the_servers_gaussian(burn_in: int, clip: float | None) -> None:
    """At any participation, after rounds of FedAvg, and where changes are clipped."""
    task = make_task(sizes=SIZES, server_lr=0.7)
    course = Course(method(moments="laplace", burn_in_rounds=burn_in, clip=clip), task)
    course.state |= {"params": random_start(task).double()}  # of an earlier run, say
    for cohort in [(0, 1, 2, 3)] * burn_in + [(1,), (0, 2), (1, 2), (2,)]:
        course.play(cohort)
        if course.state["round"] > burn_in:
            mean, precision = product(course, task)
            torch.testing.assert_close(course.state["precision"], precision, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(course.state["params"], mean, rtol=1e-5, atol=1e-5)  # sent in float32
    assert (course.state["precision"] - TOTAL * 2 * PRIOR).abs().max() > 0.01


def test_with_one_client_sep_is_plain_training() -> None:
    """Nothing is left of the server's Gaussian but the mean, where training starts; the prior is weight decay."""
    task = make_task(sizes=(12,), weight_decay=0.0)
    client = make_clients((12,))[0]
    sep = method(sites="sep", burn_in_epochs=1)
    state = sep.init(task, generator()) | {"params": random_start(task)}
    update = sep.client_update(task, sep.broadcast(task, state), {}, client, generator())
    plain = train(make_task(sizes=(12,), weight_decay=PRIOR), state["params"], client, generator())
    torch.testing.assert_close(update.message["params"], plain.vector, rtol=1e-5, atol=1e-6)
    assert update.metrics["improper"] == 0
    torch.testing.assert_close(update.message["precision"], torch.full_like(plain.vector, 12 * 2 * PRIOR))


@pytest.mark.parametrize("moments", ["identity", "laplace", "sample"])
def test_moments_of_the_tilted_distribution(moments: Any) -> None:
    """The pull to cavity and prior against a loop of SGD, the mean of epoch ends, and the precision by its formula."""
    task, client = make_task(epochs=3), make_clients()[1]
    ep = method(moments=moments, burn_in_epochs=1)
    size = len(task.model.gradient)
    server, site, shift = (torch.rand(size, generator=generator(seed)).double() for seed in (1, 2, 3))
    start, server = random_start(task), (server + 2).float()
    broadcast = {"params": start, "precision": server, "round": torch.tensor(0.0)}
    update = ep.client_update(task, broadcast, {"precision": site, "shift": shift}, client, generator())
    cavity = server.double() - site
    centre = (server.double() * start - shift) / cavity
    ends = []

    def pull(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
        gradient += (cavity * (parameters - centre) / 12 + PRIOR * parameters).float()

    def note(parameters: Tensor, epoch_ends: bool) -> None:
        if epoch_ends:
            ends.append(parameters.clone())

    train(task, start, client, generator(), adjust=pull, after_step=note)
    mean = torch.stack(ends[1:]).mean(0)
    torch.testing.assert_close(update.message["params"], mean, rtol=1e-4, atol=1e-5)
    expected = cavity + 2 * 12 * PRIOR
    if moments == "laplace":
        fisher = diagonal_fisher(task, mean, client, generator(), "per_sample").double()
        expected = expected + 2 * 12 * fisher.clamp(max=fisher.mean() + 2 * fisher.std(correction=0))
    if moments == "sample":
        variance = torch.stack(ends[1:]).double().var(0, correction=0)
        sampled = 1 / (0.4 + 0.6 * variance)
        low, high = (sampled.mean() + sign * 2 * sampled.std(correction=0) for sign in (-1, 1))
        sampled = sampled.clamp(low, high)
        expected = sampled * expected.norm() / sampled.norm()
    torch.testing.assert_close(update.message["precision"], expected.float(), rtol=1e-4, atol=1e-5)
    step = 1 / 3
    changed = site + step * (update.message["precision"].double() - server)
    torch.testing.assert_close(update.memory["precision"], changed, rtol=1e-6, atol=1e-8)


def test_outliers_are_clipped_on_both_sides() -> None:
    values = torch.cat([torch.zeros(50), torch.tensor([9.0, -9.0])])
    bound = 2 * values.std(correction=0)
    assert bound < 9
    torch.testing.assert_close(clip_outliers(values)[-2:], torch.stack([bound, -bound]))
    assert torch.equal(clip_outliers(values)[:50], values[:50])


def test_improper_cavities_are_repaired_and_counted() -> None:
    task, client, ep = make_task(), make_clients()[1], method()
    state = ep.init(task, generator())
    memory = ep.init_client(task, state, 1)
    memory["precision"][3] = 1e6
    update = ep.client_update(task, ep.broadcast(task, state), memory, client, generator())
    assert update.metrics["improper"] == 1
    assert update.message["precision"][3].item() == pytest.approx(1e-6 + 2 * 12 * PRIOR, rel=1e-5)


def test_an_improper_server_keeps_its_mean() -> None:
    task, ep = make_task(), method()
    state = ep.init(task, generator()) | {"params": random_start(task)}
    precision = state["precision"].clone()
    precision[3] = -1e6
    replies = [(0, {"params": random_start(task, 9), "precision": precision})]
    new, metrics = ep.server_update(task, state, iter(replies), generator())
    assert metrics == {"server_improper": 1.0}
    assert new["precision"][3].item() == pytest.approx(1e-6)
    assert new["params"][3] == state["params"][3]


def test_burning_in_is_fedavg_bit_for_bit() -> None:
    task, clients = make_task(momentum=0.5), make_clients()
    ep, fedavg = method(burn_in_rounds=2), FedAvg("fedavg", "size")
    ours, theirs = ep.init(task, generator()), fedavg.init(task, generator())
    for _ in range(2):
        ours, theirs = run_round(ep, task, ours, clients), run_round(fedavg, task, theirs, clients)
        assert torch.equal(ours["params"], theirs["params"])
    assert "precision" in ep.broadcast(task, ours)
    ours, theirs = run_round(ep, task, ours, clients), run_round(fedavg, task, theirs, clients)
    assert not torch.allclose(ours["params"], theirs["params"], atol=1e-4)


def test_draws() -> None:
    task, ep = make_task(), method(draws_from="posterior", burn_in_rounds=1)
    state = ep.init(task, generator()) | {"params": random_start(task)}
    assert len(list(ep.draws(task, state, 5, generator()))) == 1  # no posterior yet
    state["round"] += 1
    draws = torch.stack(list(ep.draws(task, state, 4000, generator())))
    torch.testing.assert_close(draws.var(0), 1 / state["precision"], rtol=0.15, atol=0.0)  # 6 standard errors
    assert len(list(method().draws(task, state, 5, generator()))) == 1


def test_an_epoch_has_to_be_left() -> None:
    with pytest.raises(ConfigError, match=r"method\.burn_in_epochs: got 2, allowed: less than local\.epochs=2"):
        experiment(*SMALL, "method=fedep", "method.burn_in_epochs=2")
