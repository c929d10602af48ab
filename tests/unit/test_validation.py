"""Examples held out for validation: which, how they are saved, scored and used to choose the best round."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bfl_bench import records
from bfl_bench.data.dataset import Dataset, Split
from bfl_bench.data.digits import Digits
from bfl_bench.data.partition import File, Iid, Partition, hold_out
from bfl_bench.engines.worker import TEST, VALIDATION
from bfl_bench.errors import ConfigError
from bfl_bench.likelihood import negative_log_likelihood
from bfl_bench.rng import stream
from bfl_bench.run.recorder import write_summary
from tests.composing import SMALL, experiment, run_in
from tests.federation import predict

LABELS = np.arange(60) % 3


def partition(*sizes: int) -> Partition:
    """Clients of these sizes."""
    parts = np.split(np.random.default_rng(0).permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    return Partition.of(LABELS[: sum(sizes)], parts)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_every_client_keeps_and_gives_its_share(share: float) -> None:
    before = partition(0, 1, 2, 3, 20, 34)
    after = hold_out(before, share, seed=1)
    assert after.validation is not None
    expected = [0, 0, 1, max(1, round(3 * share)), round(20 * share), round(34 * share)]
    assert [len(part) for part in after.validation] == expected
    for whole, kept, held in zip(before.indices, after.indices, after.validation, strict=True):
        assert sorted([*kept, *held]) == sorted(whole)
        assert [i for i in whole if i in set(kept)] == list(kept)  # in the order that they had
        assert len(whole) == 0 or len(kept) > 0


def test_the_seed_decides_and_nothing_is_held_out_by_default() -> None:
    before = partition(20, 34)
    first, again, other = (hold_out(before, 0.25, seed) for seed in (1, 1, 2))
    assert first.digest() == again.digest() != other.digest()
    assert hold_out(before, 0, seed=1) is before
    assert first.digest() != before.digest()


def test_a_file_keeps_what_was_held_out(tmp_path: Path) -> None:
    path = tmp_path / "partition.npz"
    saved = hold_out(Iid("iid", "default").split(LABELS, 3, 4, seed=0), 0.2, seed=1)
    saved.save(path)
    loaded = File("file", str(path)).split(LABELS, 3, 4, seed=5)
    assert loaded.digest() == saved.digest()
    assert loaded.info["unused_samples"] == 0
    arrays = dict(np.load(path))
    arrays["validation_indices"] = arrays["validation_indices"].copy()
    arrays["validation_indices"][0] = arrays["indices"][0]  # in both parts
    np.savez(path, **arrays)
    with pytest.raises(ConfigError, match="damaged"):
        File("file", str(path)).split(LABELS, 3, 4, seed=5)


def test_without_validation_a_run_is_what_it_was(tmp_path: Path) -> None:
    options = [*SMALL, "method=fedavg", "rounds=2"]
    assert VALIDATION not in experiment(*options).worker.sets
    assert "validation" not in run_in(tmp_path, *options).splitlines()[0]
    summary = records.read_json(tmp_path / records.SUMMARY)
    assert summary is not None
    assert summary["best_by"] == {"set": "test", "column": "ga"}


def test_validation_examples_are_the_clients_own_and_train_nobody() -> None:
    plain, worker = (experiment(*SMALL, f"partition.validation={share}").worker for share in (0, 0.25))
    held = worker.sets[VALIDATION]
    assert held.own is not None
    rows = {tuple(row): i for i, row in enumerate(worker.train.x.flatten(1).tolist())}
    where = [rows[tuple(row)] for row in held.split.x.flatten(1).tolist()]
    for client, own in enumerate(held.own):
        examples = {where[i] for i in own.tolist()}
        trained = set(worker.client_indices[client].tolist())
        assert not examples & trained
        assert examples | trained == set(plain.client_indices[client].tolist())
        assert worker.task.sizes[client] == len(trained)
    assert torch.equal(held.split.y, worker.train.y[torch.tensor(where)])
    assert torch.equal(worker.sets[TEST].split.x, plain.sets[TEST].split.x)


def test_augmented_data_are_validated_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [f"data_dir={records.STAND_IN}", "dataset=mnist", "dataset.flip=true", "partition.validation=0.1"]
    worker = experiment(*options).worker
    assert worker.train.x.dtype == torch.uint8
    x = worker.sets[VALIDATION].split.x
    assert x.dtype == torch.float32
    assert worker.sets[TEST].split.x.mean().item() == pytest.approx(x.mean().item(), abs=0.1)


def test_columns_are_the_global_model_on_the_validation_set(tmp_path: Path) -> None:
    options = [*SMALL, "method=fedavg", "rounds=1", "partition.validation=0.25"]
    run_in(tmp_path, *options)
    (row,) = records.read_table(tmp_path / records.METRICS)
    worker = experiment(*options).worker
    state = worker.method.init(worker.task, stream(0, "init"))
    # The round by hand: FedAvg of all clients, then the mean NLL over all validation examples together.
    from tests.unit.test_alternatives import first_replies

    state, replies = first_replies(experiment(*options))
    new, _ = worker.method.server_update(worker.task, state, iter(replies), stream(0, "server", 1))
    split = worker.sets[VALIDATION].split
    log_probabilities = predict(worker.task.model, [new["params"]], split.x, 1000)
    assert row["validation_nll"] == pytest.approx(negative_log_likelihood(log_probabilities, split.y), rel=1e-6)
    assert row["validation_nll"] != row["nll"]
    assert {"validation_ga", "validation_ece", "validation_brier"} <= row.keys()


def test_the_best_round_is_chosen_on_validation_and_says_so(tmp_path: Path) -> None:
    rows = [
        {"round": 1, "ga": 0.9, "nll": 0.1, "validation_nll": 0.7},
        {"round": 2, "ga": 0.5, "nll": 0.9, "validation_nll": 0.4},
        {"round": 3, "ga": 0.8, "nll": 0.2, "validation_nll": 0.4},
    ]
    records.Table(tmp_path / records.METRICS, ("round",)).append(rows)
    summary = write_summary(tmp_path, "done", None, 3, {})
    assert summary["best"]["round"] == 2  # the first of the two lowest
    assert summary["best_by"] == {"set": "validation", "column": "validation_nll"}


def test_a_share_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"partition\.validation: got 1\.5, allowed: a number from 0 to 0\.9"):
        experiment(*SMALL, "partition.validation=1.5")


def test_a_run_on_validation_scores_these_examples_in_the_place_of_the_test_set(tmp_path: Path) -> None:
    options = [*SMALL, "method=fedavg", "rounds=2", "partition.validation=0.25"]
    folders = [tmp_path / name for name in ("test", "validation")]
    for folder, on in zip(folders, ("test", "validation"), strict=True):
        folder.mkdir()
        run_in(folder, *options, f"eval.scored={on}")
    both, only = (records.read_table(folder / records.METRICS) for folder in folders)
    for name in ("ga", "nll", "ece", "brier"):
        assert [row[name] for row in only] == [row[f"validation_{name}"] for row in both]
        assert [row[name] for row in only] != [row[name] for row in both]
    assert not [name for name in only[0] if name.startswith("validation_")]
    summary = records.read_json(folders[1] / records.SUMMARY)
    assert summary is not None
    assert summary["best_by"] == {"set": "validation", "column": "ga"}


def test_a_run_on_validation_has_no_test_example_and_never_depends_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*SMALL, "method=fedavg", "rounds=1", "partition.validation=0.25", "eval.scored=validation"]
    plain, scrambled = tmp_path / "plain", tmp_path / "scrambled"
    for folder in (plain, scrambled):
        folder.mkdir()
    text = run_in(plain, *options)
    test = experiment(*SMALL).worker.sets[TEST].split
    worker = experiment(*options).worker
    held = {tuple(row) for set_ in worker.sets.values() for row in set_.split.x.flatten(1).tolist()}
    assert not held & {tuple(row) for row in test.x.flatten(1).tolist()}
    load = Digits.load

    def load_other(self: Digits, data_dir: Path) -> Dataset:
        dataset = load(self, data_dir)
        return replace(dataset, test=Split(torch.rand_like(dataset.test.x), dataset.test.y.flip(0)))

    monkeypatch.setattr(Digits, "load", load_other)
    assert run_in(scrambled, *options) == text


def test_a_run_on_validation_needs_validation_examples() -> None:
    with pytest.raises(ConfigError, match=r"eval\.scored: got 'validation', allowed: test; no example is held out"):
        experiment(*SMALL, "eval.scored=validation")
