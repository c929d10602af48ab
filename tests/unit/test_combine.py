"""Applying a rule block by block, in float64, with weights normalised; rules as the builder makes them."""

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bfl_bench.aggregators import Combination, aalv, alpha, blocks, cf, combine, eaa, gaa, moments, ppa, rklb, wb
from bfl_bench.build import plan
from bfl_bench.errors import ConfigError
from bfl_bench.records import config_folder
from tests.composing import resolve
from tests.federation import generator

Rule = Callable[..., tuple[Tensor, Tensor]]

SIZES = (7.0, 1.0, 250.0, 33.0)
NORMALISED = torch.tensor(SIZES, dtype=torch.float64) / 291

DETERMINISTIC: list[Rule] = [eaa, gaa, aalv, moments, rklb, cf, wb, functools.partial(gaa, normalised=True)]


def make_vectors(columns: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    """What four clients send: means and variances."""
    rng = np.random.default_rng(columns)
    means = torch.from_numpy(rng.normal(size=(4, columns))).to(dtype)
    variances = torch.from_numpy(np.exp(rng.normal(-1, 0.5, size=(4, columns)))).to(dtype)
    return list(means), list(variances)


class Spy:
    """A deterministic rule that writes down what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, means: Tensor, variances: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append((means, variances, weights))
        return eaa(means, variances, weights)


def set_block(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    for name in ("_ROW", "_MATRIX"):
        monkeypatch.setattr(blocks, name, columns)


@pytest.mark.parametrize("rule", [*DETERMINISTIC, alpha])
@pytest.mark.parametrize(("columns", "block"), [(10, 3), (9, 3), (2, 3), (10, 1)])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, rule: Rule, columns: int, block: int) -> None:
    set_block(monkeypatch, block)
    means, variances = make_vectors(columns)
    result = combine(rule, means, variances, SIZES, generator())
    expected = rule(torch.stack(means), torch.stack(variances), NORMALISED)
    # The order of a sum of four; `alpha` goes on until the last column of the block has stopped, to 1e-10 or better.
    tolerance = 1e-8 if rule is alpha else 1e-14
    for one, other in zip(result, expected, strict=True):
        assert one.shape == (columns,)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_every_column_once_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    set_block(monkeypatch, 4)
    spy = Spy()
    means, variances = make_vectors(10)
    combine(spy, means, variances, SIZES, generator())
    assert [tuple(call[0].shape) for call in spy.calls] == [(4, 4), (4, 4), (4, 2)]
    assert torch.equal(torch.cat([call[0] for call in spy.calls], 1), torch.stack(means))
    assert torch.equal(torch.cat([call[1] for call in spy.calls], 1), torch.stack(variances))


def test_more_columns_than_a_block_holds() -> None:
    """At its real size: the last block of two is short."""
    columns = blocks._MATRIX + 5
    means, variances = make_vectors(columns)
    spy = Spy()
    mean, variance = combine(spy, means, variances, SIZES, generator())
    assert len(spy.calls) == 2
    np.testing.assert_allclose(mean, np.average(np.stack(means), axis=0, weights=SIZES), rtol=0, atol=1e-14)
    np.testing.assert_allclose(variance, np.average(np.stack(variances), axis=0, weights=SIZES), rtol=1e-14)


@pytest.mark.parametrize("rule", DETERMINISTIC)
def test_inputs_stay_as_they_are(rule: Rule) -> None:
    """In float64 too, where a conversion is no copy."""
    means, variances = make_vectors(5)
    kept = [vector.clone() for vector in (*means, *variances)]
    combine(rule, means, variances, SIZES, generator(), to_variance=torch.square)
    assert all(torch.equal(vector, before) for vector, before in zip((*means, *variances), kept, strict=True))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 12345.0])
@pytest.mark.parametrize("rule", DETERMINISTIC)
def test_weights_are_normalised(rule: Rule, scale: float) -> None:
    means, variances = make_vectors(5)
    result = combine(rule, means, variances, [scale * size for size in SIZES], generator())
    expected = rule(torch.stack(means), torch.stack(variances), NORMALISED)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)  # weights to a few units in the last place


def test_whole_numbers_as_weights() -> None:
    means, variances = make_vectors(3)
    spy = Spy()
    combine(spy, means, variances, [1, 1, 1, 5], generator())
    assert torch.equal(spy.calls[0][2], torch.tensor([0.125, 0.125, 0.125, 0.625], dtype=torch.float64))


def test_float32_is_upcast_before_anything() -> None:
    means, variances = make_vectors(6, torch.float32)
    kept = [vector.clone() for vector in (*means, *variances)]
    spy = Spy()
    mean, variance = combine(spy, means, [vector.double() for vector in variances], SIZES, generator())
    assert all(value.dtype == torch.float64 for value in (*spy.calls[0], mean, variance))
    as_double = np.stack(means).astype(np.float64), np.stack(variances).astype(np.float64)
    # In float64; a float32 sum would be 1e-7 off.
    np.testing.assert_allclose(mean, np.average(as_double[0], axis=0, weights=SIZES), rtol=0, atol=1e-14)
    np.testing.assert_allclose(variance, np.average(as_double[1], axis=0, weights=SIZES), rtol=1e-14)
    assert all(torch.equal(vector, before) for vector, before in zip((*means, *variances), kept, strict=True))


@pytest.mark.parametrize("rule", [eaa, alpha, ppa])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_columns(rule: Rule, dtype: torch.dtype) -> None:
    means, variances = make_vectors(0, dtype)
    for value in combine(rule, means, variances, SIZES, generator()):
        assert value.shape == (0,)
        assert value.dtype == torch.float64


def test_one_client() -> None:
    means, variances = make_vectors(5, torch.float32)
    mean, variance = combine(gaa, means[:1], variances[:1], [17.0], generator())
    assert torch.equal(mean.float(), means[0])
    assert torch.equal(variance.float(), variances[0])


# --- Clients one by one ---

RELEASED: list[Rule] = [functools.partial(rule, running_clamp=[-1.0, 0.0]) for rule in (eaa, gaa)]
"""Their clamp works on variances of about e^-1."""


def make_clients(num: int) -> list[tuple[Tensor, Tensor, float]]:
    """Mean, log variance and weight of each; the mean of the first ones is far from that of all."""
    rng = np.random.default_rng(num)
    means = torch.from_numpy(rng.normal(np.arange(num)[:, None], size=(num, 5)))
    log_variances = torch.from_numpy(rng.normal(-1, 0.5, size=(num, 5)))
    return list(zip(means, log_variances, rng.uniform(1, 9, num).tolist(), strict=True))


@pytest.mark.parametrize("num", [1, 2, 3, 6, 10])
@pytest.mark.parametrize("rule", [*DETERMINISTIC, *RELEASED, functools.partial(cf, clamp=[-1.0, 0.0]), ppa])
def test_one_by_one_as_all_at_once(monkeypatch: pytest.MonkeyPatch, rule: Rule, num: int) -> None:
    monkeypatch.setattr(blocks, "_TOGETHER", 3)
    clients = make_clients(num)
    combination = Combination(rule, generator(4), to_variance=torch.exp)
    for client in clients:
        combination.add(*client)
    means, log_variances, weights = zip(*clients, strict=True)
    expected = combine(rule, means, log_variances, weights, generator(4), to_variance=torch.exp)
    for one, other in zip(combination.result(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", [eaa, gaa, aalv, moments, rklb, wb, functools.partial(gaa, normalised=False)])
def test_only_a_few_clients_are_held(monkeypatch: pytest.MonkeyPatch, rule: Rule) -> None:
    monkeypatch.setattr(blocks, "_TOGETHER", 3)
    combination = Combination(rule, generator())
    sent: list[weakref.ref[Tensor]] = []
    for _ in range(20):
        mean, variance = torch.rand(5), torch.rand(5)
        sent += [weakref.ref(mean), weakref.ref(variance)]
        combination.add(mean, variance, 1.0)
        del mean, variance
        assert sum(vector() is not None for vector in sent) <= 2 * 2


def test_no_clients() -> None:
    with pytest.raises(ValueError, match="no clients"):
        Combination(eaa, generator()).result()


# --- Randomness ---


@pytest.mark.parametrize("rule", [*DETERMINISTIC, alpha])
def test_a_deterministic_rule_draws_nothing(rule: Rule) -> None:
    means, variances = make_vectors(5)
    rng = generator()
    before = rng.get_state()
    combine(rule, means, variances, SIZES, rng)
    assert torch.equal(rng.get_state(), before)


@pytest.mark.parametrize("rule", [ppa, functools.partial(ppa, num_samples=50, unbiased=True)])
def test_a_random_rule_draws_from_the_generator(monkeypatch: pytest.MonkeyPatch, rule: Rule) -> None:
    set_block(monkeypatch, 2)
    means, variances = make_vectors(5)
    rng = generator(1)
    first = combine(rule, means, variances, SIZES, rng)
    second = combine(rule, means, variances, SIZES, rng)
    again = combine(rule, means, variances, SIZES, generator(1))
    for one, two, three in zip(first, second, again, strict=True):
        assert torch.equal(one, three)
        assert (one != two).all()


def test_blocks_have_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One generator goes on from block to block, in order."""
    set_block(monkeypatch, 2)
    means, variances = make_vectors(2)
    doubled = [vector.repeat(2) for vector in means], [vector.repeat(2) for vector in variances]
    mean, _ = combine(ppa, *doubled, SIZES, generator(1))
    assert (mean[:2] != mean[2:]).all()
    rng = generator(1)
    stacked = torch.stack(means), torch.stack(variances)
    torch.testing.assert_close(mean[:2], ppa(*stacked, NORMALISED, rng)[0], rtol=0, atol=1e-14)  # a sum of four
    torch.testing.assert_close(mean[2:], ppa(*stacked, NORMALISED, rng)[0], rtol=0, atol=1e-14)


def test_a_users_own_random_rule() -> None:
    """`generator` may stand anywhere in the signature, keyword-only too."""
    given: list[Any] = []

    def own(means: Tensor, variances: Tensor, weights: Tensor, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        given.append(generator)
        return eaa(means, variances, weights)

    rng = generator()
    combine(own, *make_vectors(3), SIZES, rng)
    assert given[0] is rng


# --- As the builder makes them ---

CLAMP = [-8.0, 8.0]
AS_CONFIGURED: dict[str, tuple[Rule, dict[str, Any]]] = {
    "aalv": (aalv, {}),
    "alpha": (alpha, {"alpha": 0.5, "tolerance": 1e-10, "max_iterations": 500}),
    "cf": (cf, {"clamp": None}),
    "cf_released": (cf, {"clamp": CLAMP}),
    "eaa": (eaa, {"running_clamp": None}),
    "eaa_released": (eaa, {"running_clamp": CLAMP}),
    "gaa": (gaa, {"normalised": False, "running_clamp": None}),
    "gaa_normalised": (gaa, {"normalised": True, "running_clamp": None}),
    "gaa_released": (gaa, {"normalised": False, "running_clamp": CLAMP}),
    "moments": (moments, {}),
    "ppa": (ppa, {"num_samples": 1000, "unbiased": False, "clamp": None}),
    "ppa_released": (ppa, {"num_samples": 1000, "unbiased": True, "clamp": CLAMP}),
    "rklb": (rklb, {}),
    "wb": (wb, {}),
}


def build(*overrides: str) -> Any:
    return plan(resolve("dataset=synthetic", "method=fvb", *overrides)).method.aggregator


def test_the_list_is_complete() -> None:
    assert {path.stem for path in (config_folder() / "aggregator").glob("*.yaml")} == {*AS_CONFIGURED, "none"}


@pytest.mark.slow
@pytest.mark.parametrize("name", AS_CONFIGURED)
def test_built_rules(name: str) -> None:
    """The right function with the right options, and it works as it is: clients at the floor, and below it."""
    target, options = AS_CONFIGURED[name]
    rule = build(f"aggregator={name}")
    assert isinstance(rule, functools.partial)
    assert rule.func is target
    assert rule.keywords == options
    assert not rule.args
    means, _ = make_vectors(3, torch.float32)
    variances = [torch.full((3,), math.exp(-9.0)), *[torch.full((3,), math.exp(-8.0))] * 3]
    result = combine(rule, means, variances, SIZES, generator(3))
    seed = {"generator": generator(3)} if target is ppa else {}
    stacked = torch.stack(means).double(), torch.stack(variances).double()
    for one, other in zip(result, target(*stacked, NORMALISED, **seed, **options), strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)  # weights may differ in the last place
    assert (result[1] > 0).all()


def test_overrides_reach_the_rule() -> None:
    """Ten clients, whose weights are sizes, at log variance -9: fact 4 through the builder."""
    means, variances = [torch.zeros(2)] * 10, [torch.full((2,), -9.0).double().exp()] * 10
    by_name = combine(build("aggregator=gaa_released"), means, variances, [600] * 10, generator())
    assert by_name[1].log().tolist() == pytest.approx([-7.914] * 2, abs=5e-4)  # as printed
    changed = build("aggregator=gaa", "aggregator.running_clamp=[-6,6]")
    by_override = combine(changed, means, variances, [600] * 10, generator())
    assert by_override[1].log().tolist() == pytest.approx([-6 + math.log(1.09)] * 2, rel=1e-13)


@pytest.mark.parametrize(
    "overrides",
    [
        ("aggregator=ppa", "aggregator.num_samples=many"),
        ("aggregator=alpha", "aggregator.tolerance=0"),
        ("aggregator=cf", "+aggregator.running_clamp=[-8,8]"),
        ("aggregator=eaa", "aggregator.running_clamp=8"),
        ("aggregator=ppa", "+aggregator.generator=1"),
    ],
)
def test_wrong_options_are_refused(overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^aggregator\."):
        build(*overrides)
