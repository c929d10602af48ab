"""The round loop: what is evaluated when, and what it does when numbers go wrong."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bfl_bench import records
from bfl_bench.engines.worker import Sequential
from bfl_bench.method import Method, Replies, Task, Tensors
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.run.loop import Experiment, run
from bfl_bench.run.observers import RunInfo
from tests.federation import make_eval, make_worker


def make_experiment(
    method: Method | None = None, rounds: int = 5, sizes: tuple[int, ...] = (7, 12, 4), **eval_: int
) -> Experiment:
    worker = make_worker(method or FedAvg("fedavg", "size"), sizes=sizes)
    return Experiment(
        worker=replace(worker, settings=make_eval(**eval_), rounds=rounds),
        engine=Sequential("sequential"),
        seed=3,
        cohort_size=2,
        checkpoint_every=1,
        partition_info={},
    )


def rows_of(experiment: Experiment, folder: Path) -> list[dict[str, records.Cell]]:
    run(experiment, folder)
    return records.read_table(folder / records.METRICS)


@pytest.mark.parametrize(
    ("every", "local_every", "rows", "local"),
    [(1, 0, [1, 2, 3, 4, 5], [5]), (2, 4, [2, 4, 5], [4, 5]), (7, 7, [5], [5]), (1, 2, [1, 2, 3, 4, 5], [2, 4, 5])],
)
def test_evaluated_rounds(tmp_path: Path, every: int, local_every: int, rows: list[int], local: list[int]) -> None:
    table = rows_of(make_experiment(every=every, local_every=local_every), tmp_path)
    assert [row["round"] for row in table] == rows
    assert [row["round"] for row in table if row["la"] is not None] == local
    assert [row["round"] for row in table if row["worst10"] is not None] == local
    assert sorted({row["round"] for row in records.read_table(tmp_path / records.CLIENTS)}) == local  # type: ignore[type-var]
    assert len(records.read_table(tmp_path / records.TIMING)) == 5


def test_bytes_add_up_over_all_rounds(tmp_path: Path) -> None:
    experiment = make_experiment(every=3)
    table = rows_of(experiment, tmp_path)
    per_round = 2 * 4 * experiment.worker.task.model.layout.size  # two clients, four bytes a number
    assert [row["bytes_up"] for row in table] == [3 * per_round, 5 * per_round]
    assert [row["bytes_down"] for row in table] == [3 * per_round, 5 * per_round]


def test_local_accuracy_is_weighted_by_size(tmp_path: Path) -> None:
    table = rows_of(make_experiment(), tmp_path)
    clients = [row for row in records.read_table(tmp_path / records.CLIENTS) if row["round"] == 5]
    assert len({row["size"] for row in clients}) == 2
    weighted = sum(row["size"] * row["accuracy"] for row in clients)  # type: ignore[operator]
    expected = weighted / sum(row["size"] for row in clients)  # type: ignore[misc, operator]
    assert table[-1]["la"] == pytest.approx(expected, abs=1e-12)  # the same sum, perhaps in another order
    assert table[-1]["worst10"] == min(row["accuracy"] for row in clients)  # type: ignore[type-var]


def test_the_last_checkpoint_is_kept_unless_asked_otherwise(tmp_path: Path) -> None:
    """It is dropped after the summary is there, so that a kill in between loses nothing; other files stay."""
    made = make_experiment(rounds=2)
    for keep in (True, False):
        folder = tmp_path / str(keep)
        folder.mkdir()
        experiment = replace(made, keep_checkpoint=keep)
        assert run(experiment, folder, [])["status"] == "done"
        assert (folder / records.CHECKPOINT / records.MANIFEST).exists() == keep
        assert (folder / records.CHECKPOINT).exists() == keep
        assert (folder / records.SUMMARY).exists()
    assert (tmp_path / "True" / records.METRICS).read_bytes() == (tmp_path / "False" / records.METRICS).read_bytes()


def test_a_dropped_checkpoint_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    class Adding:
        def begin(self, info: RunInfo) -> None:
            return

        def round(self, round_: int, row: Mapping[str, Any] | None) -> None:
            (tmp_path / records.CHECKPOINT / "note.txt").write_text("mine")

        def end(self, summary: Mapping[str, Any]) -> None:
            return

    run(replace(make_experiment(rounds=2), keep_checkpoint=False), tmp_path, [Adding()])
    assert [path.name for path in (tmp_path / records.CHECKPOINT).iterdir()] == ["note.txt"]


def test_clients_without_examples_are_never_drawn() -> None:
    experiment = make_experiment(sizes=(5, 0, 8, 0, 3))
    cohorts = [experiment.cohort(round_) for round_ in range(1, 60)]
    assert {client for cohort in cohorts for client in cohort} == {0, 2, 4}
    assert all(len(cohort) == 2 and cohort == sorted(cohort) for cohort in cohorts)
    assert len({tuple(cohort) for cohort in cohorts}) == 3


def test_summary_tells_final_best_and_rounds_to_accuracy(tmp_path: Path) -> None:
    table = rows_of(make_experiment(rounds=12), tmp_path)
    summary = records.read_json(tmp_path / records.SUMMARY)
    assert summary is not None
    assert summary["final"] == table[-1]
    accuracies = [row["ga"] for row in table]
    assert summary["best"]["round"] == accuracies.index(max(accuracies)) + 1  # type: ignore[type-var]
    reached = [row["round"] for row in table if row["ga"] >= 0.4]  # type: ignore[operator]
    assert summary["rounds_to_ga"]["40%"] == reached[0]
    assert summary["rounds_to_ga"]["90%"] == next((row["round"] for row in table if row["ga"] >= 0.9), None)  # type: ignore[operator]


@dataclass(frozen=True)
class Breaking(FedAvg):
    """Goes wrong in round 3, at the server."""

    what: str

    def server_update(
        self, task: Task, state: Tensors, replies: Replies, rng: torch.Generator
    ) -> tuple[Tensors, dict[str, float]]:
        new, _ = super().server_update(task, {"params": state["params"]}, replies, rng)
        new["round"] = state.get("round", torch.zeros(())) + 1
        bad = float("nan") if new["round"] == 3 else 1.0
        if self.what == "state":
            new["params"] = new["params"] * bad
        return new, {"kl": bad if self.what == "metric" else 0.0}


@pytest.mark.parametrize("what", ["state", "metric"])
def test_divergence_at_the_server_is_caught_in_its_round(tmp_path: Path, what: str) -> None:
    summary = run(make_experiment(Breaking("breaking", "size", what)), tmp_path)
    assert summary["status"] == "diverged"
    name = "params" if what == "state" else "kl"
    assert summary["reason"].startswith(f"round 3, server: {name} became NaN or infinite")
    assert [row["round"] for row in records.read_table(tmp_path / records.METRICS)] == [1, 2]
