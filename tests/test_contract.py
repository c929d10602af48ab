"""The contract of every method: pure functions, reproducible, resumable, blind to the order of clients."""

import copy
import importlib
import inspect
import pkgutil
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from bfl_bench import methods, records
from bfl_bench.engines.worker import TEST, Job
from bfl_bench.method import Client, Method, Tensors
from bfl_bench.records import config_folder
from bfl_bench.rng import stream
from bfl_bench.run.loop import run
from bfl_bench.run.observers import ProgressLines
from tests.composing import choose, experiment, run_in


def find_methods() -> list[str]:
    """The option of conf/method that has each class; of several, such as a released variant, the first file to name it.

    tests/test_conf.py runs the others.
    """
    options: dict[str, str] = {}
    for path in sorted((config_folder() / "method").glob("*.yaml"), key=lambda path: len(path.stem)):
        target = yaml.safe_load(path.read_text()).get("_target_")
        options.setdefault(target, path.stem)
    found = []
    for module_info in pkgutil.iter_modules(methods.__path__, f"{methods.__name__}."):
        module = importlib.import_module(module_info.name)
        for name, member in inspect.getmembers(module, inspect.isclass):
            if issubclass(member, Method) and member.__module__ == module.__name__:
                found.append(options[f"{module.__name__}.{name}"])  # without a file nobody could choose it
    return sorted(found)


METHODS = find_methods()
pytestmark = pytest.mark.parametrize("method", METHODS)


class Killer(ProgressLines):
    """An observer that ends the run after a round, and leaves behind what a round in flight might."""

    def __init__(self, stop: int, folder: Path) -> None:
        self._stop, self._folder = stop, folder

    def round(self, round_: int, row: object) -> None:
        if round_ == self._stop:
            with (self._folder / records.METRICS).open("a") as file:
                file.write("garbage of a round in flight")
            raise MemoryError


def clone(tensors: Tensors | None) -> Tensors | None:
    return None if tensors is None else {name: tensor.clone() for name, tensor in tensors.items()}


def equal(left: Tensors | None, right: Tensors | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_calls_leave_their_inputs_alone_and_repeat(method: str) -> None:
    worker = experiment(*choose(method)).worker
    task, algorithm = worker.task, worker.method
    state = algorithm.init(task, stream(1, "init"))
    messages: list[list[tuple[int, Tensors]]] = []
    for _ in range(2):
        broadcast = algorithm.broadcast(task, state)
        replies = []
        for id_ in (0, 2):
            memory = algorithm.init_client(task, state, id_)
            before = clone(state), clone(broadcast), clone(memory)
            client = Client(id_, worker.train, worker.client_indices[id_], worker.augment)
            update = algorithm.client_update(task, broadcast, memory, client, stream(1, "client", id_))
            assert equal(state, before[0])
            assert equal(broadcast, before[1])
            assert equal(memory, before[2])
            assert {"train_loss", "train_acc"} <= update.metrics.keys()
            replies.append((id_, update.message))
        messages.append(replies)
    for (_, first), (_, second) in zip(*messages, strict=True):
        assert equal(first, second)
    assert not equal(messages[0][0][1], messages[0][1][1])

    before_messages = copy.deepcopy(messages[0])
    before_state = clone(state)
    results = [algorithm.server_update(task, state, iter(messages[0]), stream(1, "server")) for _ in range(2)]
    assert equal(results[0][0], results[1][0])
    assert equal(state, before_state)
    assert not equal(results[0][0], state)
    for (_, kept), (_, message) in zip(before_messages, messages[0], strict=True):
        assert equal(kept, message)


@pytest.mark.slow
def test_draws_are_parameter_vectors_and_repeat(method: str) -> None:
    worker = experiment(*choose(method)).worker
    state = worker.method.init(worker.task, stream(1, "init"))
    first, second = (list(worker.method.draws(worker.task, state, 3, stream(2, "draws"))) for _ in range(2))
    assert all(draw.shape == worker.task.model.vector.shape for draw in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("participation", ["1.0", "0.5"])
def test_resuming_is_bit_equal(method: str, participation: str, tmp_path: Path) -> None:
    overrides = [*choose(method), f"participation={participation}", "rounds=4"]
    whole = run_in(tmp_path / "whole", *overrides)
    folder = tmp_path / "parts"
    folder.mkdir()
    for stop in (1, 3):  # as a killed process would: nothing is tidied up
        with pytest.raises(MemoryError):
            run(experiment(*overrides), folder, [Killer(stop, folder)])
    assert run_in(folder, *overrides) == whole
    assert (folder / records.CLIENTS).read_bytes() == (tmp_path / "whole" / records.CLIENTS).read_bytes()


@pytest.mark.slow
def test_runs_repeat_and_seeds_differ(method: str, tmp_path: Path) -> None:
    overrides = [*choose(method), "rounds=2"]
    first = run_in(tmp_path / "first", *overrides)
    shutil.rmtree(tmp_path / "first")
    assert run_in(tmp_path / "first", *overrides) == first
    assert run_in(tmp_path / "other", *overrides, "seed=1") != first


def test_order_of_clients_does_not_matter(method: str) -> None:
    """The same jobs in another order, on a worker that has just done something else, give the same replies."""
    worker = experiment(*choose(method)).worker
    state = worker.method.init(worker.task, stream(1, "init"))
    broadcast = worker.method.broadcast(worker.task, state)
    jobs = [
        Job(round=1, client_id=id_, memory=worker.method.init_client(worker.task, state, id_), evaluate_local=True)
        for id_ in (0, 1, 3)
    ]
    forward = {job.client_id: worker.run(broadcast, job) for job in jobs}
    backward = {job.client_id: worker.run(broadcast, job) for job in reversed(jobs)}
    for id_, reply in forward.items():
        assert equal(reply.message, backward[id_].message)
        assert equal(reply.memory, backward[id_].memory)
        assert reply.scores == backward[id_].scores
        assert reply.metrics == backward[id_].metrics


def test_predictions_are_normalised_and_repeat(method: str) -> None:
    worker = experiment(*choose(method)).worker
    state = worker.method.init(worker.task, stream(1, "init"))
    x = worker.sets[TEST].split.x
    first, second = (worker.predict(worker.method, state, x, 3, stream(2, "draws")) for _ in range(2))
    assert torch.equal(first.log_probabilities, second.log_probabilities)
    totals = first.log_probabilities.double().exp().sum(1)
    torch.testing.assert_close(totals, torch.ones_like(totals), rtol=1e-5, atol=1e-5)  # float32 sums of a few terms


@pytest.mark.slow
def test_what_a_method_does_not_ask_for_it_does_not_get(method: str) -> None:
    worker = experiment(*choose(method), *([] if method == "fedbe" else ["dataset.server_samples=20"])).worker
    needs, data = worker.method.needs, worker.task.server_data
    assert (data is not None) == (needs.server_data != "none")
    assert data is None or (data.y is not None) == (needs.server_data == "labelled")
    assert len(worker.task.initials) == needs.num_initials
    assert torch.equal(worker.task.initials[0], worker.task.model.initial)
