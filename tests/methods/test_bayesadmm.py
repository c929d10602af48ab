"""BayesADMM and FedLap-Cov: partitioned variational inference, the exact posterior in one round, sums of sites."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bfl_bench.errors import ConfigError, UnsuitableError
from bfl_bench.inference.curvature import diagonal_fisher
from bfl_bench.inference.duals import DualMethod
from bfl_bench.inference.ivon import Ivon
from bfl_bench.inference.train import train
from bfl_bench.methods.bayesadmm import BayesAdmm
from bfl_bench.methods.fedlap_cov import FedLapCov
from tests.composing import SMALL, experiment, resolve
from tests.federation import generator, make_clients, make_task, random_start
from tests.quadratics import SIZES, Course, Quadratics, make_quadratic_task, make_quadratics

N = len(SIZES)
PRIOR = 1.5


def bayesadmm(**changes: Any) -> BayesAdmm:
    default = BayesAdmm(
        name="bayesadmm",
        weights="uniform",
        prior_precision=PRIOR,
        damping=1.0,
        min_precision=1e-6,
        draws_from="posterior",
        server="admm",
        rho=1 / N,
        temperature=1.0,
        h0=2.0,
        beta1=0.9,
        beta2=0.99,
        samples=1,
        clip=None,
        rescale=False,
    )
    return replace(default, **changes)


def fedlap_cov(**changes: Any) -> FedLapCov:
    return replace(FedLapCov("fedlap_cov", "uniform", PRIOR, 1.0, 1e-6, "model", "mean"), **changes)


@pytest.fixture
def solved_exactly(monkeypatch: pytest.MonkeyPatch) -> Quadratics:
    """Curvatures are diagonal, so that a diagonal Gaussian is exact."""
    problem = make_quadratics(diagonal=True)
    monkeypatch.setattr("bfl_bench.methods.bayesadmm.train", problem.exact_train())
    monkeypatch.setattr("bfl_bench.methods.fedlap_cov.train", problem.exact_train())
    monkeypatch.setattr("bfl_bench.methods.fedlap_cov.diagonal_fisher", problem.exact_fisher())
    return problem


def assert_gaussian(state: dict[str, Tensor], mean: Tensor, precision: Tensor) -> None:
    torch.testing.assert_close(state["precision"], precision, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["params"], mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("damping", [1.0, 0.3])
@pytest.mark.parametrize("method", [fedlap_cov(), bayesadmm(rho=1.0, server="sites")])
def test_it_is_partitioned_variational_inference(
    solved_exactly: Quadratics, method: DualMethod, damping: float
) -> None:
    """Sites t_k in natural parameters: cavity q / t_k, times the exact likelihood, less q, damped."""
    course = Course(replace(method, damping=damping), make_quadratic_task())
    curvatures = solved_exactly.curvatures.diagonal(dim1=1, dim2=2)
    likelihoods = torch.stack([curvatures, curvatures * solved_exactly.optima], dim=1)  # (N, 2, D)
    sites = torch.zeros_like(likelihoods)
    prior = torch.tensor([[PRIOR], [0.0]], dtype=torch.float64)
    for _ in range(4):
        q = prior + sites.sum(0)
        sites = sites + damping * ((q - sites + likelihoods) - q)
        q = prior + sites.sum(0)
        assert_gaussian(course.play(), q[1] / q[0], q[0])
        if damping == 1.0:
            mean, precision = solved_exactly.posterior(PRIOR)
            assert_gaussian(course.state, mean, precision.diagonal())
    assert course.metrics == {"server_improper": 0.0}


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_bayesadmm_is_exact_after_one_round_and_stays(solved_exactly: Quadratics, temperature: float) -> None:
    """With rho = 1/N: the mean and the precision of the pooled posterior, of the losses over the temperature."""
    course = Course(bayesadmm(temperature=temperature), make_quadratic_task())
    tempered = Quadratics(solved_exactly.curvatures / temperature, solved_exactly.optima)
    mean, precision = tempered.posterior(PRIOR)
    for _ in range(3):
        assert_gaussian(course.play(), mean, precision.diagonal())


def test_with_another_rho_it_converges(solved_exactly: Quadratics) -> None:
    """The table of the algorithm for rho = 1, which is not there in three rounds: another share would show."""
    course, rho, share = Course(bayesadmm(rho=1.0), make_quadratic_task()), 1.0, 1 / (1 + N)
    curvatures = solved_exactly.curvatures.diagonal(dim1=1, dim2=2)
    likelihoods = torch.stack([curvatures, curvatures * solved_exactly.optima], dim=1)
    sites = torch.zeros_like(likelihoods)
    prior = q = torch.tensor([[PRIOR], [0.0]], dtype=torch.float64).expand(2, 4)
    mean, precision = solved_exactly.posterior(PRIOR)
    for round_ in range(100):
        own = (likelihoods - sites) / rho + q  # (N, 2, D)
        sites = sites + rho * (own - q)
        q = (1 - share) * own.mean(0) + share * (prior + sites.sum(0))
        assert_gaussian(course.play(), q[1] / q[0], q[0])
        if round_ == 2:
            assert 1e-4 < (course.state["params"] - mean).abs().max() < 0.1
    torch.testing.assert_close(course.state["params"], mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(course.state["precision"], precision.diagonal(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", [fedlap_cov(damping=0.4), bayesadmm(rho=1.0, server="sites", damping=0.4)])
def test_at_partial_participation_the_server_is_the_prior_times_the_sites(
    solved_exactly: Quadratics, method: DualMethod
) -> None:
    course = Course(method, make_quadratic_task())
    for round_ in range(120):
        course.play(((0, 1), (2,), (1, 2, 3), (0, 3))[round_ % 4])
        precision = PRIOR + torch.stack([memory["precision"] for memory in course.memories.values()]).sum(0)
        shift = torch.stack([memory["shift"] for memory in course.memories.values()]).sum(0)
        assert_gaussian(course.state, shift / precision, precision)
    mean, exact = solved_exactly.posterior(PRIOR)
    assert_gaussian(course.state, mean, exact.diagonal())  # 0.6^60 is 5e-14


@pytest.mark.parametrize("method", [fedlap_cov(damping=None), bayesadmm(rho=0.3, damping=0.5, temperature=0.1)])
def test_sums_of_sites_are_over_all_clients(method: DualMethod) -> None:
    """A network that is trained: what clients remember adds up to what the server does."""
    task = make_task(sizes=SIZES, lr=0.02)
    course = Course(method, task)
    course.state = method.init(task, generator())
    for cohort in [(1,), (0, 2), (1, 2), (2,)]:
        course.play(cohort)
    for ours, theirs in (("precisions", "precision"), ("shifts", "shift")):
        total = torch.stack([memory[theirs] for memory in course.memories.values()]).sum(0)
        torch.testing.assert_close(course.state[ours], total, rtol=1e-9, atol=1e-9)  # float64 on both sides
        assert total.abs().max() > 0.01
    assert course.state["precision"].dtype == torch.float32


def test_a_client_of_fedlap_cov_takes_its_curvature_at_the_end() -> None:
    """S_k = H_k - V_k + S, H_k the sum over examples of the generalised Gauss-Newton matrix's diagonal."""
    task, client, method = make_task(), make_clients()[1], fedlap_cov()
    size = len(task.model.gradient)
    site = torch.rand(size, generator=generator(1), dtype=torch.float64)
    broadcast = {"params": random_start(task), "precision": torch.full((size,), 2.0), "round": torch.tensor(1.0)}
    update = method.client_update(
        task, broadcast, {"precision": site, "shift": torch.zeros_like(site)}, client, generator()
    )
    curvature = 12 * diagonal_fisher(task, update.message["params"], client, generator(), "model")
    torch.testing.assert_close(update.message["precision"], (curvature - site + 2).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(update.memory["precision"], curvature.double(), rtol=1e-4, atol=1e-5)


def test_a_client_of_bayesadmm_is_ivon_from_the_servers_gaussian() -> None:
    task, client = make_task(), make_clients()[1]
    method = bayesadmm(rho=0.5, temperature=0.2, samples=2, clip=3.0)
    size = len(task.model.gradient)
    site, shift = (torch.rand(size, generator=generator(seed), dtype=torch.float64) for seed in (1, 2))
    start, precision = random_start(task), torch.rand(size, generator=generator(3)) * 90 + 40
    broadcast = {"params": start, "precision": precision, "round": torch.tensor(1.0)}
    memory = {"precision": site, "shift": shift}
    update = method.client_update(task, broadcast, memory, client, generator())
    ess = 12 / (0.2 * 0.5)
    ivon = Ivon(
        ess=ess,
        h0=0.0,
        beta1=0.9,
        beta2=0.99,
        delta=precision / ess,
        samples=2,
        clip=3.0,
        rescale=False,
        prior_mean=start,
        linear=(0.2 / 12 * shift).float(),
        quadratic=(-0.2 / 12 * site).float(),
    )
    expected = train(task, start, client, generator(), optimizer=ivon)
    torch.testing.assert_close(update.message["params"], expected.vector, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(update.message["precision"], ess * expected.memory["precision"], rtol=1e-5, atol=1e-4)


def test_the_first_round_begins_at_h0_with_the_prior_at_zero() -> None:
    task, client, method = make_task(), make_clients()[1], bayesadmm(rho=0.5, temperature=0.2, h0=3.0)
    state = method.init(task, generator())
    memory = method.init_client(task, state, 1)
    update = method.client_update(task, method.broadcast(task, state), memory, client, generator())
    ess, zeros = 12 / (0.2 * 0.5), torch.zeros_like(task.model.gradient)
    delta = torch.full_like(zeros, PRIOR / ess)
    ivon = Ivon(ess=ess, h0=3.0, beta1=0.9, beta2=0.99, delta=delta, rescale=False, prior_mean=zeros)
    expected = train(task, state["params"], client, generator(), optimizer=ivon)
    torch.testing.assert_close(update.message["params"], expected.vector, rtol=1e-5, atol=1e-6)


def test_rescaled_steps_are_longer_by_the_mean_precision() -> None:
    task, client, method = make_task(epochs=1, batch_size=100), make_clients()[1], bayesadmm(h0=3.0, beta2=1.0)
    moved = []
    for rescale in (False, True):
        changed = replace(method, rescale=rescale)
        state = changed.init(task, generator())
        memory = changed.init_client(task, state, 1)
        update = changed.client_update(task, changed.broadcast(task, state), memory, client, generator())
        moved.append(update.message["params"] - state["params"])
    torch.testing.assert_close(moved[1], (3 + PRIOR / (12 * N)) * moved[0], rtol=1e-4, atol=1e-6)


def test_an_improper_server_is_repaired_and_counted(solved_exactly: Quadratics) -> None:
    method = bayesadmm(rho=1.0, server="sites", min_precision=1e-3)
    course = Course(method, make_quadratic_task())
    before = course.state["params"]
    course.state["precisions"][2] = -1e4
    course.play()
    assert course.metrics == {"server_improper": 1.0}
    assert course.state["precision"][2] == 1e-3
    assert course.state["params"][2] == before[2]


@pytest.mark.parametrize("method", [bayesadmm(), fedlap_cov(draws_from="posterior"), bayesadmm(draws_from="initial")])
def test_draws(method: DualMethod) -> None:
    task = make_task()
    precision = torch.rand(len(task.model.gradient), generator=generator(8)) * 50 + 20
    state = method.init(task, generator()) | {"params": random_start(task), "precision": precision}
    draws = torch.stack(list(method.draws(task, state, 4000, generator())))
    expected = 1 / precision
    if isinstance(method, BayesAdmm) and method.draws_from == "initial":
        expected = torch.full_like(precision, 1 / (23 * 2.0 * N + PRIOR))
    torch.testing.assert_close(draws.var(0), expected, rtol=0.15, atol=0.0)  # 6 standard errors of a variance
    torch.testing.assert_close(draws.mean(0), state["params"], rtol=0.0, atol=0.02)
    own = {"params": state["params"], "precision": precision}
    local = torch.stack(list(method.draws(task, own, 4000, generator())))
    torch.testing.assert_close(local.var(0), 1 / precision, rtol=0.15, atol=0.0)


def test_fedlap_cov_refuses_sequences_before_it_trains() -> None:
    task = make_task(nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (3, 2))))
    with pytest.raises(UnsuitableError, match="one class for an example"):
        fedlap_cov().check(task)
    fedlap_cov(fisher="per_sample").check(task)


def test_fedlap_cov_predicts_with_its_mean() -> None:
    task = make_task()
    state = fedlap_cov().init(task, generator())
    (only,) = fedlap_cov().draws(task, state, 10, generator())
    assert torch.equal(only, state["params"])


@pytest.mark.parametrize("key", ["momentum", "weight_decay"])
def test_what_ivon_has_itself_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"local\.{key}: got 0\.5, allowed: 0; method bayesadmm has method\."):
        experiment(*SMALL, "method=bayesadmm", f"local.{key}=0.5")


def test_presets() -> None:
    paper, released = (resolve(f"method={name}")["method"] for name in ("bayesadmm", "bayesadmm_released"))
    assert {key for key in paper if paper[key] != released[key]} == {"name", "draws_from"}
