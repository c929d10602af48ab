"""Named streams: the same name gives the same numbers, another name others."""

import hashlib
import itertools

import numpy as np
import pytest
import torch

from bfl_bench.rng import derive_seed, numpy_stream, seeded_globally, stream

NAMES: list[tuple[int, tuple[str | int, ...]]] = [
    (1, ("client", 12, 3)),
    (1, ("client", 1, 23)),
    (1, ("client", 123,)),
    (1, ("client", 3, 12)),
    (11, ("client", 2, 3)),
    (1, ("client", 12, 3, "evaluate")),
    (1, ("client", 12, 3, "layers")),
    (2, ("client", 12, 3)),
    (1, ("server", 12)),
    (1, ("cohort", 12)),
    (1, ("evaluate", 12)),
    (1, ("init",)),
    (1, ()),
    (0, ("client", 12, 3)),
]  # fmt: skip


def test_same_name_same_numbers() -> None:
    for seed, names in NAMES:
        first = torch.randn(5, generator=stream(seed, *names))
        assert torch.equal(first, torch.randn(5, generator=stream(seed, *names)))
        assert np.array_equal(numpy_stream(seed, *names).random(5), numpy_stream(seed, *names).random(5))


def test_other_names_other_numbers() -> None:
    for (seed, names), (other_seed, other_names) in itertools.combinations(NAMES, 2):
        assert derive_seed(seed, *names) != derive_seed(other_seed, *other_names)
        first, second = stream(seed, *names), stream(other_seed, *other_names)
        assert not torch.equal(torch.rand(5, generator=first), torch.rand(5, generator=second))
        ours, others = numpy_stream(seed, *names), numpy_stream(other_seed, *other_names)
        assert not np.array_equal(ours.random(5), others.random(5))


def test_seeds_of_a_run_do_not_collide() -> None:
    seeds = {derive_seed(s, "client", r, c) for s in range(5) for r in range(1, 101) for c in range(50)}
    assert len(seeds) == 5 * 100 * 50


def test_seeds_fit_torch_and_stay_what_they_are() -> None:
    """Published results depend on these numbers."""
    digest = hashlib.sha256(b"1/client/12/3").digest()
    assert derive_seed(1, "client", 12, 3) == sum(byte << (8 * i) for i, byte in enumerate(digest[:8])) // 2
    assert all(0 <= derive_seed(seed, *names) < 2**63 for seed, names in NAMES)


def test_streams_leave_the_global_generators_alone() -> None:
    state, numpy_state = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002 (must stay untouched)
    torch.randn(3, generator=stream(1, "a"))
    numpy_stream(1, "a").random(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state[1])  # type: ignore[index] # noqa: NPY002


def test_seeding_globally_ends_with_the_block() -> None:
    """Also where the block fails; within it, the seed alone decides."""
    cpu = torch.device("cpu")
    undisturbed = torch.randn(3, generator=torch.Generator().set_state(torch.get_rng_state()))
    with seeded_globally(8, cpu):
        first = torch.randn(3)
    with seeded_globally(9, cpu):
        other = torch.randn(3)
    with pytest.raises(RuntimeError), seeded_globally(9, cpu):
        torch.randn(3) @ torch.randn(4)
    assert torch.equal(torch.randn(3), undisturbed)
    with seeded_globally(8, cpu):
        assert torch.equal(torch.randn(3), first)
    assert not torch.equal(first, other)
