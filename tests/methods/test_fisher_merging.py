"""Fisher merging: FOLA's first round without a prior, FedAvg where all are equally curved, and by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.methods.fisher_merging import FisherMerging
from bfl_bench.methods.fola import Fola
from tests.composing import SMALL, run_in
from tests.federation import generator, make_clients, make_task, random_start, run_round, train_clients

METHOD = FisherMerging("fisher_merging", "size", "model", False, 0.0)
FOLA = Fola(
    name="fola",
    weights="size",
    aggregator=None,
    prior_loss=False,
    prior_weight=1.0,
    prior_gradient=True,
    structure="diagonal",
    fisher="model",
    evaluation="offline",
    average_steps=True,
    batch_weight="share",
    round_scaling=True,
    server_mean="product",
    gamma=0.0,
    eps=0.0,
)


@pytest.mark.parametrize("fisher", ["model", "per_sample"])
def test_it_is_the_first_round_of_fola_without_a_prior(fisher: Literal["model", "per_sample"]) -> None:
    task, clients = make_task(), make_clients()
    fola = replace(FOLA, fisher=fisher)
    expected = run_round(fola, task, fola.init(task, generator()), clients)
    found = run_round(replace(METHOD, fisher=fisher), task, METHOD.init(task, generator()), clients)
    torch.testing.assert_close(found["params"], expected["params"], rtol=1e-5, atol=1e-6)  # float32 on the clients
    torch.testing.assert_close(found["precision"], expected["precision"], rtol=1e-5, atol=1e-8)


def test_the_true_fisher_is_another_than_the_empirical_one() -> None:
    task, clients = make_task(), make_clients()
    state = METHOD.init(task, generator())
    empirical = run_round(replace(METHOD, fisher="per_sample"), task, state, clients)["params"]
    assert not torch.allclose(run_round(METHOD, task, state, clients)["params"], empirical, atol=1e-3)


def test_equal_curvatures_give_fedavg() -> None:
    task, clients = make_task(), make_clients()
    state = METHOD.init(task, generator())
    replies = train_clients(METHOD, task, state, clients)
    same = [(id_, message | {"precision": torch.full_like(message["precision"], 0.3)}) for id_, message in replies]
    average = run_round(FedAvg("fedavg", "size"), task, state, clients)["params"]
    new, _ = METHOD.server_update(task, state, iter(same), generator())
    torch.testing.assert_close(new["params"], average)


def merge_by_hand(**changes: Any) -> list[float]:
    """Merge the first three parameters of two clients, of 7 and 12 examples."""
    task = make_task()
    params = [torch.zeros(task.model.layout.size) for _ in range(2)]
    precisions = [torch.zeros(task.model.layout.num_trainable) for _ in range(2)]
    params[0][:3], params[1][:3] = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2.0, 2.0, 2.0])
    precisions[0][:3], precisions[1][:3] = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    messages = [{"params": p, "precision": f} for p, f in zip(params, precisions, strict=True)]
    state = {"params": random_start(task)}
    new, _ = replace(METHOD, **changes).server_update(task, state, iter(enumerate(messages)), generator())
    return new["params"][:3].tolist()


def test_by_hand_for_two_clients() -> None:
    average = (7 * 1 + 12 * 2) / 19  # where nobody knows anything
    assert merge_by_hand() == pytest.approx([1, (7 * 4 * 1 + 12 * 1 * 2) / (7 * 4 + 12 * 1), average])
    assert merge_by_hand(weights="uniform") == pytest.approx([1, (4 + 2) / 5, 1.5])
    assert merge_by_hand(weights="uniform", normalise=True) == pytest.approx([1, (0.8 + 2) / 1.8, 1.5])
    assert merge_by_hand(weights="uniform", floor=2.0) == pytest.approx([1.5, (4 + 2) / 5, 1.5])  # (3 + 0) / 2 < 2


def test_its_posterior_predicts(tmp_path: Path) -> None:
    text = run_in(tmp_path, *SMALL, "method=fisher_merging", "rounds=1", "eval.also_predict=[draws,linearised]")
    names, values = (line.split(",") for line in text.splitlines())
    row = dict(zip(names, values, strict=True))
    assert len({row["nll"], row["nll@draws"], row["nll@linearised"]}) == 3
