"""Where training data lie: on the device, or beside it where it has no room for them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bfl_bench import devices, records
from bfl_bench import method as method_module
from bfl_bench.data import dataset
from bfl_bench.inference.train import minibatches
from bfl_bench.method import Client
from tests.composing import choose, run_in
from tests.federation import CPU, NUM_FEATURES, make_local, make_split

ELSEWHERE = torch.device("meta")  # holds no numbers, but a tensor knows that it is there


def test_examples_that_are_taken_are_those_of_the_indices() -> None:
    split, indices = make_split(7), torch.tensor([5, 0, 5])
    x, y = Client(0, split, indices, None).gather(torch.arange(3), torch.Generator())
    assert torch.equal(x, split.x[indices])
    assert torch.equal(y, split.y[indices])


def test_data_that_fit_lie_on_the_device() -> None:
    split = make_split(7).to(ELSEWHERE)
    assert (split.x.device, split.y.device, split.target) == (ELSEWHERE, ELSEWHERE, None)


def test_data_that_do_not_fit_stay_and_minibatches_go_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(dataset, "has_room", lambda device, num_bytes: asked.append(num_bytes))
    split = make_split(7).to(ELSEWHERE)
    assert asked == [7 * NUM_FEATURES * 4 + 7 * 8]
    assert (split.x.device, split.y.device) == (CPU, CPU)
    client = Client(0, split, torch.tensor([6, 2, 3]), None)
    taken = list(minibatches(client, make_local(epochs=2, batch_size=2), torch.Generator()))
    assert [(x.device, y.device, len(y)) for x, y, *_ in taken] == [(ELSEWHERE, ELSEWHERE, n) for n in (2, 1, 2, 1)]


@pytest.mark.parametrize(("needed", "fits"), [(50, True), (51, False)])
def test_data_take_at_most_half_of_what_is_free_on_a_gpu(
    needed: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    assert devices.has_room(torch.device("cuda"), needed) is fits
    assert devices.has_room(CPU, needed)


@pytest.mark.parametrize("method", ["fola", "fedlpa", "scaffold"])
def test_runs_do_not_depend_on_where_the_data_lie(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brought: list[Tensor] = []
    bring = devices.bring

    def note(tensor: Tensor, device: torch.device) -> Tensor:
        brought.append(tensor)
        return bring(tensor, device)

    monkeypatch.setattr(method_module, "bring", note)
    run_in(tmp_path / "on", *choose(method))
    assert not brought
    monkeypatch.setattr(dataset, "has_room", lambda device, num_bytes: False)
    run_in(tmp_path / "beside", *choose(method))
    assert brought
    first, second = ((tmp_path / name / records.METRICS).read_bytes() for name in ("on", "beside"))
    assert first == second
