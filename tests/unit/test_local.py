"""Local training against torch.optim.SGD, step by step on the same batches."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bfl_bench.data.dataset import Split
from bfl_bench.inference import train as local_module
from bfl_bench.inference.train import Tally, Trained, minibatches, train
from bfl_bench.likelihood import Categorical
from bfl_bench.method import Client, Task
from tests.federation import NUM_CLASSES, generator, make_clients, make_task, random_start

# Rounding alone: both run float32, one tensor by tensor, the other on the whole vector, so that sums (a norm, a
# convolution in another memory format) and fused multiply-adds round differently: some 1e-7 a step over 8 steps.
ROUNDING = {"rtol": 1e-5, "atol": 2e-6}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9, "lr": 0.05},
    "weight_decay": {"weight_decay": 0.1},
    "clip": {"clip": 0.2},
    "clip_out_of_reach": {"clip": 1000.0},
    "all": {"momentum": 0.7, "weight_decay": 0.1, "clip": 0.3},
}


def make_convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 2 * 3, NUM_CLASSES))


def train_recorded(task: Task, start: Tensor, client: Client) -> tuple[Trained, list[tuple[Tensor, Tensor]]]:
    """Train, and note the batches that really went through the network."""
    batches: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, inputs: tuple[Tensor]) -> None:
        positions = [(client.train.x == x).flatten(1).all(1).nonzero().item() for x in inputs[0]]
        batches.append((inputs[0].clone(), client.train.y[positions]))

    handle = task.model.module.register_forward_pre_hook(note)
    trained = train(task, start, client, generator())
    handle.remove()
    return trained, batches


def train_by_torch(
    task: Task, module: nn.Module, batches: list[tuple[Tensor, Tensor]]
) -> tuple[list[float], list[int]]:
    """What PyTorch's own optimizer makes of the same batches; loss and number correct before each step."""
    local = task.local
    optimizer = torch.optim.SGD(
        module.parameters(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay, foreach=False
    )
    losses, correct = [], []
    module.train()
    for x, y in batches:
        optimizer.zero_grad()
        logits = module(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        if local.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), local.clip)
        optimizer.step()
        losses.append(loss.item())
        correct.append(int((logits.argmax(1) == y).sum()))
    return losses, correct


def clone_at(task: Task, start: Tensor) -> nn.Module:
    """The network of the task at `start`, as an ordinary module with storage of its own."""
    module = copy.deepcopy(task.model.module)
    module.load_state_dict(task.model.layout.to_state_dict(start))
    return module


@pytest.mark.parametrize("network", ["mlp", "convolutional"])
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_torch_sgd(name: str, network: str) -> None:
    """Client 0: 7 examples in batches of 3, the last of one; three epochs."""
    shape = (5,) if network == "mlp" else (1, 3, 4)
    module = None if network == "mlp" else make_convolutional()
    task = make_task(module, **{"epochs": 3, "batch_size": 3} | SETTINGS[name])
    client, start = make_clients(shape=shape)[0], random_start(task)
    trained, batches = train_recorded(task, start, client)
    assert [len(y) for _, y in batches] == [3, 3, 1] * 3
    assert trained.num_steps == 9
    module = clone_at(task, start)
    losses, correct = train_by_torch(task, module, batches)
    for tensor_name, tensor in task.model.layout.to_state_dict(trained.vector).items():
        torch.testing.assert_close(tensor, module.state_dict()[tensor_name], **ROUNDING)
    assert (trained.vector - start).abs().max() > 0.05
    # Over the last epoch, every loss taken before its step.
    expected = sum(loss * len(y) for loss, (_, y) in zip(losses[-3:], batches[-3:], strict=True)) / 7
    assert trained.metrics["train_loss"] == pytest.approx(expected, rel=1e-5)
    assert trained.metrics["train_acc"] == sum(correct[-3:]) / 7


def test_metrics_are_of_the_last_epoch_only() -> None:
    """A full batch at a large step: the loss before the only step of the epoch is that of the earlier model."""
    client = make_clients()[1]
    task = make_task(epochs=1, batch_size=100, lr=1.0)
    start = random_start(task)
    models = [start]
    for _ in range(3):
        models.append(train(task, models[-1], client, generator()).vector)
    longer = replace(task, local=replace(task.local, epochs=3))
    trained = train(longer, start, client, generator())
    x, y = client.train.x[client.indices], client.train.y[client.indices]
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(clone_at(task, model)(x), y).item() for model in models]
    assert trained.metrics["train_loss"] == pytest.approx(losses[2], rel=1e-5)  # float32, another order of examples
    assert min(abs(losses[2] - losses[i]) for i in (0, 1, 3)) > 0.01


def test_every_example_once_per_epoch_in_an_order_of_its_own() -> None:
    client = make_clients()[1]
    task = make_task(epochs=3, batch_size=5)
    task.model.load(random_start(task))
    batches = list(minibatches(client, task.local, generator()))
    assert [len(batch.y) for batch in batches] == [5, 5, 2] * 3
    assert [batch.in_last_epoch for batch in batches] == [False] * 6 + [True] * 3
    assert [batch.ends_epoch for batch in batches] == [False, False, True] * 3
    own = client.train.x[client.indices]
    orders = []
    for epoch in range(3):
        x = torch.cat([x for x, *_ in batches[3 * epoch : 3 * epoch + 3]])
        y = torch.cat([y for _, y, *_ in batches[3 * epoch : 3 * epoch + 3]])
        order = [(own == row).all(1).nonzero().item() for row in x]
        assert sorted(order) == list(range(12))
        assert torch.equal(y, client.train.y[client.indices[torch.tensor(order)]])
        orders.append(order)
    assert len({tuple(order) for order in orders}) == 3
    other = next(iter(minibatches(client, task.local, generator(99))))[0]
    assert not torch.equal(other, batches[0][0])


def test_start_is_not_modified_and_results_have_storage_of_their_own() -> None:
    task, client = make_task(momentum=0.5, weight_decay=0.1, clip=0.5), make_clients()[0]
    start = random_start(task)
    kept = start.clone()
    trained = train(task, start, client, generator())
    assert torch.equal(start, kept)
    result = trained.vector.clone()
    task.model.vector.zero_()
    assert torch.equal(trained.vector, result)


def test_independent_of_what_was_in_the_model() -> None:
    """Nothing of an earlier client survives: parameters, gradient, velocity, mode, the global generator."""
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, NUM_CLASSES))
    task = make_task(module, momentum=0.9, weight_decay=0.1, clip=1.0, batch_size=2)
    _, client, earlier = make_clients((7, 12, 4))
    start = random_start(task)
    first = train(task, start, client, generator())
    train(task, random_start(task, seed=50), earlier, generator(51))
    task.model.gradient.fill_(7.0)
    task.model.vector.fill_(float("nan"))
    task.model.module.eval()
    torch.manual_seed(52)
    second = train(task, start, client, generator())
    assert torch.equal(first.vector, second.vector)
    assert first.metrics == second.metrics
    statistics = first.vector[task.model.layout.num_trainable :]
    assert not torch.allclose(statistics, start[task.model.layout.num_trainable :])


def test_block_boundaries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    task, client = make_task(epochs=2, batch_size=3, momentum=0.5), make_clients((25,))[0]
    start = random_start(task)
    whole, batches = train_recorded(task, start, client)
    for gathered in (1, 3, 7, 12, 24):
        monkeypatch.setattr(local_module, "_GATHERED_EXAMPLES", gathered)
        sizes: list[int] = []
        gather = Client.gather

        def counting(self: Client, positions: Tensor, rng: torch.Generator) -> Any:
            sizes.append(len(positions))  # noqa: B023
            return gather(self, positions, rng)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(Client, "gather", counting)
            parts, parts_batches = train_recorded(task, start, client)
        assert max(sizes) == max(1, gathered // 3) * 3
        assert [len(y) for _, y in batches] == ([3] * 8 + [1]) * 2
        for (x, y), (part_x, part_y) in zip(batches, parts_batches, strict=True):
            assert torch.equal(part_x, x)
            assert torch.equal(part_y, y)
        # Float32: on some CPUs a matrix product rounds otherwise where its operand begins at another kind of address.
        torch.testing.assert_close(parts.vector, whole.vector, rtol=1e-5, atol=1e-6)
        assert parts.metrics == pytest.approx(whole.metrics, rel=1e-6)


def test_augment_sees_the_clients_examples_and_generator() -> None:
    calls: list[tuple[Tensor, torch.Generator]] = []

    def augment(x: Tensor, rng: torch.Generator) -> Tensor:
        calls.append((x, rng))
        return x + torch.randn(x.shape, generator=rng)

    task, rng = make_task(epochs=2, batch_size=4), generator()
    client = make_clients(augment=augment)[0]
    start = random_start(task)
    first = train(task, start, client, rng)
    assert calls
    assert all(used is rng for _, used in calls)
    seen = torch.cat([x for x, _ in calls])
    own = client.train.x[client.indices]
    assert len(seen) == 2 * len(client)
    assert torch.equal(seen.sum(1).sort().values, own.sum(1).repeat(2).sort().values)
    assert torch.equal(train(task, start, client, generator()).vector, first.vector)
    plain = Client(client.id, client.train, client.indices, None)
    assert not torch.allclose(train(task, start, plain, generator()).vector, first.vector)


def test_adjust_comes_before_clipping_and_weight_decay() -> None:
    """A replaced gradient is clipped; decay of the parameters comes on top, unclipped."""
    task = make_task(epochs=1, batch_size=100, lr=0.5, clip=2.0, weight_decay=0.1)
    client, start = make_clients()[2], random_start(task)
    seen: list[tuple[Tensor, int]] = []

    def adjust(parameters: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
        seen.append((parameters.clone(), len(y)))
        gradient.zero_()
        gradient[:2] = torch.tensor([30.0, -40.0])

    trained = train(task, start, client, generator(), adjust=adjust)
    assert len(seen) == 1
    assert torch.equal(seen[0][0], start)
    assert seen[0][1] == 4
    expected = start.clone()
    expected[:2] -= 0.5 * torch.tensor([1.2, -1.6])  # of norm 50, clipped to 2
    expected -= 0.5 * 0.1 * start
    torch.testing.assert_close(trained.vector, expected, rtol=1e-6, atol=1e-6)  # three float32 operations


def test_adjust_sees_every_batch_and_the_last_partial_one() -> None:
    task, client = make_task(epochs=2, batch_size=3), make_clients()[0]
    sizes: list[int] = []
    train(task, random_start(task), client, generator(), adjust=lambda p, g, x, y: sizes.append(len(y)))
    assert sizes == [3, 3, 1, 3, 3, 1]


def test_sequences_train_as_their_positions_would() -> None:
    """Labels (n, positions): the loss is the mean over all positions, and so are the recorded loss and accuracy."""
    x = torch.randint(4, (6, 3), generator=generator())
    y = torch.randint(4, (6, 3), generator=generator(1))
    torch.manual_seed(0)
    table = nn.Embedding(4, 4)  # logits of the next token, by token

    class Next(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.table(tokens)
            return logits.transpose(1, 2)

    task = make_task(Next(), sizes=(6,), epochs=1, batch_size=6, lr=0.5)
    start = task.model.initial.clone()
    trained = train(task, start, Client(0, Split(x, y), torch.arange(6), None), generator())
    weight = start.view(4, 4).clone().requires_grad_(True)
    loss = torch.nn.functional.cross_entropy(weight[x.flatten()], y.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    torch.testing.assert_close(trained.vector, (weight - 0.5 * weight.grad).detach().flatten())
    assert trained.metrics["train_loss"] == pytest.approx(loss.item(), rel=1e-5)
    right = weight.detach()[x.flatten()].argmax(1) == y.flatten()
    assert trained.metrics["train_acc"] == pytest.approx(right.double().mean().item())


def test_training_metrics_are_means_over_all_examples_however_many_minibatches() -> None:
    """They are counted 64 minibatches at a time; the last one is smaller."""
    tally = Tally(Categorical(3), torch.device("cpu"))
    torch.manual_seed(0)
    logits, y = torch.randn(131, 3), torch.randint(0, 3, (131,))
    sizes = [1] * 129 + [2]
    for part, labels in zip(logits.split(sizes), y.split(sizes), strict=True):
        tally.add(nn.functional.cross_entropy(part, labels), part, labels)
    assert tally.result() == {
        "train_loss": pytest.approx(nn.functional.cross_entropy(logits.double(), y).item(), rel=1e-6),
        "train_acc": (logits.argmax(1) == y).double().mean().item(),
    }


@pytest.mark.parametrize(("steps", "epochs"), [(2, 1), (6, 3)])
def test_steps_count_whatever_the_number_of_epochs(steps: int, epochs: int) -> None:
    """A client of 7 examples has two minibatches of 4 an epoch."""
    task, client = make_task(epochs=5), make_clients()[0]
    start = random_start(task)
    found = train(task, start, client, generator(), steps=steps)
    whole = train(make_task(epochs=epochs), start, client, generator())
    assert found.num_steps == steps
    assert torch.equal(found.vector, whole.vector)
    assert found.metrics == whole.metrics


def test_steps_may_end_within_an_epoch() -> None:
    task, client = make_task(), make_clients()[0]
    start = random_start(task)
    vectors = []
    train(task, start, client, generator(), after_step=lambda parameters, _: vectors.append(parameters.clone()))
    found = train(task, start, client, generator(), steps=3)
    assert torch.equal(found.vector, vectors[2])
    assert found.metrics["train_loss"] > 0
