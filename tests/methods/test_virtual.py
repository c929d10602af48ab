"""VIRTUAL: the exact pooled posterior where there is one, variational inference for one client, no dead switch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bfl_bench.aggregators import eaa
from bfl_bench.errors import ConfigError, UnsuitableError
from bfl_bench.inference.sites import (
    NaturalSgd,
    hidden_weights,
    natural,
    project_gates,
    prune,
    read_private,
    unprune,
    write_private,
)
from bfl_bench.inference.train import Adjust, Trained
from bfl_bench.inference.variational import Prior
from bfl_bench.method import Client, Task, Tensors
from bfl_bench.methods.fvb import Fvb
from bfl_bench.methods.virtual import Virtual
from bfl_bench.models import networks
from bfl_bench.models.flat import FlatModel, Layout
from bfl_bench.models.gaussian import make_gaussian
from bfl_bench.models.lateral import Lateral, count_shared
from bfl_bench.run.recorder import num_bytes
from tests.federation import (
    CPU,
    SIZES,
    assemble_task,
    generator,
    make_clients,
    make_gaussian_settings,
    make_gaussian_task,
    make_local,
    make_module,
    make_server,
)


def method(**changes: Any) -> Virtual:
    default = Virtual(
        name="virtual",
        weights="size",
        private="none",
        beta=0.3,
        prior_variance=0.7,
        prior_power="equal",
        damping=0.5,
        init_from="own",
        prune=0.0,
        min_precision=1e-6,
        kl="exact",
        evaluation_variance=1.0,
        natural_lr=None,
        own_model="trained",
    )
    return replace(default, **changes)


def lateral_task(gate_per_unit: bool = False, **local: Any) -> Task:
    settings = make_gaussian_settings()
    torch.manual_seed(0)
    pair = [make_gaussian(make_module(), None, settings) for _ in range(2)]
    model = FlatModel(Lateral(*pair, gate_per_unit=gate_per_unit), CPU)
    return assemble_task(model, SIZES, gaussian=settings, **local)


def turn(virtual: Virtual, task: Task, state: Tensors, memory: Tensors, client: Client, seed: int = 50) -> Any:
    memory = memory or virtual.init_client(task, state, client.id)
    return virtual.client_update(task, virtual.broadcast(task, state), memory, client, generator(seed))


def named(task: Task, vector: Tensor) -> dict[str, Tensor]:
    return {entry.name: entry.view(vector) for entry in task.model.layout.entries}


def named_gradient(task: Task, gradient: Tensor) -> list[tuple[str, Tensor]]:
    entries = [entry for entry in task.model.layout.entries if entry.stop <= task.model.layout.num_trainable]
    return [(entry.name, entry.view(gradient)) for entry in entries]


# A federation in which everything is Gaussian, so that a turn can be taken exactly


class Conjugate:
    """Stands in for training: clients observe every weight directly, with noise of known precision."""

    def __init__(self, task: Task, beta: float) -> None:
        num = task.model.layout.means.stop - task.model.layout.means.start
        draw = generator(4)
        self.beta = beta
        self.precisions = torch.rand(len(task.sizes), num, generator=draw, dtype=torch.float64) * 50 + 1
        self.observed = torch.randn(len(task.sizes), num, generator=draw, dtype=torch.float64)

    def __call__(
        self, task: Task, start: Tensor, client: Client, rng: torch.Generator, adjust: Adjust | None = None, **_: Any
    ) -> Trained:
        """The cavity is read off the pull of the prior; times the likelihood it is the client's exact posterior."""
        assert adjust is not None
        layout, scale = task.model.layout, self.beta / len(client)
        probe, gradient = torch.zeros_like(start), torch.zeros_like(start)
        adjust(probe, gradient, start, start)
        precision = 2 * gradient[layout.log_variances].double() / scale + 1
        shift = -gradient[layout.means].double() / scale
        precision, shift = precision + self.precisions[client.id], shift + (self.precisions * self.observed)[client.id]
        trained = start.clone()
        trained[layout.means] = (shift / precision).float()
        trained[layout.log_variances] = -precision.log().float()
        return Trained(trained, 1, {"train_loss": 0.0, "train_acc": 0.0}, {})

    def pooled(self, prior_variance: float) -> tuple[Tensor, Tensor]:
        precision = 1 / prior_variance + self.precisions.sum(0)
        return precision, (self.precisions * self.observed).sum(0) / precision


@pytest.mark.parametrize("changes", [{}, {"prior_power": "size"}, {"init_from": "server"}])
def test_the_server_reaches_the_exact_pooled_posterior(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At damping 0.5, half participation and unequal clients; and the sites multiply to the server's posterior."""
    task = make_gaussian_task(make_gaussian_settings(log_variance_init=-1.0), sizes=(7, 12, 4, 9))
    clients = make_clients((7, 12, 4, 9))
    virtual = method(beta=1.0, **changes)
    conjugate = Conjugate(task, beta=1.0)
    monkeypatch.setattr("bfl_bench.methods.virtual.train", conjugate)
    state = virtual.init(task, generator())
    memories: dict[int, Tensors] = {}
    for round_ in range(120):
        cohort = torch.randperm(4, generator=generator(round_))[:2].sort().values.tolist()
        replies = []
        for id_ in cohort:
            update = turn(virtual, task, state, memories.get(id_), clients[id_])
            assert update.metrics["improper"] == 0
            memories[id_] = update.memory
            replies.append((id_, update.message))
        state, metrics = virtual.server_update(task, state, iter(replies), generator())
        assert metrics["server_improper"] == 0
        sites = [memories.get(i) or virtual.init_client(task, state, i) for i in range(4)]
        for name in ("precision", "shift"):
            product = sum(site[name] for site in sites if site is not None)
            assert isinstance(product, Tensor)
            torch.testing.assert_close(product, state[name], rtol=1e-9, atol=1e-7)
    precision, mean = conjugate.pooled(0.7)
    # turns are taken in float32
    torch.testing.assert_close(state["precision"], precision, rtol=1e-4, atol=1e-4)
    layout = task.model.layout
    torch.testing.assert_close(state["params"][layout.means].double(), mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state["params"][layout.log_variances].double(), -precision.log(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rate", [None, 0.05])
def test_one_client_is_plain_variational_inference(rate: float | None) -> None:
    """Over three rounds: the cavity of the only client is the prior itself; with either step of log variances."""
    task = make_gaussian_task(sizes=(12,))
    (client,) = make_clients((12,))
    virtual = method(damping=1.0, init_from="server", variance_rate=rate)
    fvb = Fvb("fvb", "size", eaa, 0.3, 0.7, "fixed", 1, [1e-10, 100.0], variance_rate=rate)
    ours, theirs, memory = virtual.init(task, generator()), fvb.init(task, generator()), None
    for round_ in range(3):
        update = turn(virtual, task, ours, memory, client, seed=round_)
        memory = update.memory
        ours, _ = virtual.server_update(task, ours, iter([(0, update.message)]), generator())
        reply = fvb.client_update(task, fvb.broadcast(task, theirs), {}, client, generator(round_)).message
        theirs, _ = fvb.server_update(task, theirs, iter([(0, reply)]), generator())
        torch.testing.assert_close(ours["params"], theirs["params"], rtol=1e-4, atol=1e-5)  # float32 naturals
    assert not torch.allclose(ours["params"], task.model.initial, atol=0.05)


def test_variances_have_a_step_of_their_own() -> None:
    """Six steps of at most 0.05 from far too narrow variances; the means' steps do not move them."""
    task, client = make_gaussian_task(make_gaussian_settings(log_variance_init=-12.0)), make_clients()[1]
    layout = task.model.layout
    moved = {}
    for rate in (None, 0.05):
        virtual = method(variance_rate=rate, damping=1.0)
        state = virtual.init(task, generator())
        params = turn(virtual, task, state, {}, client).local["params"]
        moved[rate] = (params - task.model.initial)[layout.log_variances]
    assert moved[None].abs().max() < 0.02
    assert moved[0.05].abs().mean() > 0.05
    with pytest.raises(ConfigError, match=r"method\.variance_rate: got 0\.05, allowed: null with method\.beta=0"):
        method(variance_rate=0.05, beta=0.0).check(task)


def test_an_improper_cavity_is_repaired_and_counted() -> None:
    task, client = make_gaussian_task(), make_clients()[1]
    virtual = method()
    state = virtual.init(task, generator())
    memory = virtual.init_client(task, state, 1)
    memory["precision"][:5] = state["precision"][:5] + 9.0  # the client's own factor is sharper than the whole
    update = turn(virtual, task, state, memory, client)
    assert update.metrics["improper"] == 5
    assert all(torch.isfinite(tensor).all() for tensor in (*update.message.values(), *update.memory.values()))
    assert torch.isfinite(update.local["params"]).all()


@pytest.mark.parametrize("bound", [{"min_precision": 2.0}, {"min_precision": "prior", "prior_variance": 0.5}])
def test_a_repaired_cavity_is_as_wide_as_allowed_around_the_servers_mean(
    bound: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, client = make_gaussian_task(), make_clients()[1]
    layout = task.model.layout
    seen: list[Tensor] = []

    def probe(task: Task, start: Tensor, client: Client, rng: torch.Generator, adjust: Adjust, **_: Any) -> Trained:
        gradient = torch.zeros_like(start)
        adjust(torch.zeros_like(start), gradient, start, start)
        seen.append(gradient * len(client) / 0.3)
        return Trained(start, 1, {}, {})

    monkeypatch.setattr("bfl_bench.methods.virtual.train", probe)
    virtual = method(**bound)
    state = virtual.init(task, generator())
    memory = virtual.init_client(task, state, 1)
    memory["precision"][:5] = state["precision"][:5] + 9.0
    turn(virtual, task, state, memory, client)
    precision = 2 * seen[0][layout.log_variances] + 1
    mean = -seen[0][layout.means] / precision
    torch.testing.assert_close(precision[:5], torch.full((5,), 2.0))
    torch.testing.assert_close(mean[:5], state["params"][layout.means][:5])
    assert (precision[5:] > 5).all()


def test_an_improper_server_is_repaired_and_counted() -> None:
    task = make_gaussian_task()
    virtual = method()
    state = virtual.init(task, generator())
    num = len(state["precision"])
    changes = torch.zeros(2, num)
    changes[0, :3] = -2 * state["precision"][:3].float()
    points = state["params"][task.model.layout.points]
    new, metrics = virtual.server_update(task, state, iter([(0, {"changes": changes, "points": points})]), generator())
    assert metrics["server_improper"] == 3
    assert (new["precision"] >= 1e-6).all()
    means = task.model.layout.means
    torch.testing.assert_close(new["params"][means], state["params"][means])  # of the broken ones too


def test_pruning_keeps_the_strongest_of_each_layer_and_counts_what_is_sent() -> None:
    """By the change of the shift over the root of the factor's precision; the change of the precision is no matter."""
    changes = torch.tensor([[1e-9, 5.0, 0.0, 7.0, 2.0, 3.0], [6.0, 1.0, -25.0, 0.4, 0.3, 0.1]])
    precision = torch.tensor([4.0, 1.0, 100.0, -0.25, 0.01, 9.0], dtype=torch.float64)
    layers = [slice(0, 2), slice(2, 4)]  # strengths 3, 1 | 2.5, 0.8; the last two entries are the output layer's
    assert torch.equal(unprune(prune(changes, precision, 0.0, layers), 6), changes.double())
    half = prune(changes, precision, 50.0, layers)
    assert half["kept"].tolist() == [0, 2, 4, 5]
    assert torch.equal(unprune(half, 6), (changes * torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])).double())
    assert num_bytes(half) == 4 * (4 + 4 + 4)
    assert num_bytes(prune(changes, precision, 0.0, layers)) == 6 * (4 + 4)
    assert prune(changes, precision, 90.0, [slice(0, 6)])["kept"].tolist() == [4]  # 0.3 / 0.1, of 3, 1, 2.5, 0.8, 3, ..


def test_a_client_keeps_all_that_it_learns_and_the_server_gets_what_is_sent() -> None:
    task, client = make_gaussian_task(), make_clients()[1]
    state = method().init(task, generator())
    whole, pruned = (turn(method(prune=percent), task, state, {}, client) for percent in (0.0, 75.0))
    for name in ("precision", "shift"):
        assert torch.equal(whole.memory[name], pruned.memory[name])
    num_hidden, num_outputs = 5 * 6, 6 * 3
    assert hidden_weights(task) == [slice(0, num_hidden)]
    kept = pruned.message["kept"]
    assert (kept < num_hidden).sum() == num_hidden - round(0.75 * num_hidden)
    assert (kept >= num_hidden).sum() == num_outputs
    torch.testing.assert_close(pruned.message["changes"], whole.message["changes"][:, kept.long()])
    strength = (whole.message["changes"][1] / whole.memory["precision"].sqrt()).abs()[:num_hidden]
    assert strength[kept[kept < num_hidden].long()].min() >= strength.sort().values[round(0.75 * num_hidden)]


def test_what_cannot_be_pruned_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.prune: got 50\.0, allowed: 0 with one Gaussian layer"):
        method(prune=50.0).check(make_gaussian_task(num_layers=1))
    method(prune=50.0).check(make_gaussian_task())


def test_a_private_network_is_no_part_of_what_is_pruned() -> None:
    assert hidden_weights(lateral_task()) == [slice(0, 30)]


def test_the_default_damping_is_what_the_server_leaves() -> None:
    task = make_gaussian_task(server_lr=0.4)
    client = make_clients()[1]
    state = method().init(task, generator())
    default, given = (turn(method(damping=d), task, state, {}, client).message for d in (None, 0.6))
    assert torch.equal(default["changes"], given["changes"])
    whole = turn(method(damping=1.0), replace(task, server=make_server()), state, {}, client).message
    torch.testing.assert_close(given["changes"], 0.4 * 0.6 * whole["changes"])
    for server_lr in (1.0, 1.5):
        with pytest.raises(ConfigError, match=r"method\.damping: got null, .* no factor moves forward"):
            method(damping=None).check(make_gaussian_task(server_lr=server_lr))


def test_a_client_goes_on_with_its_own_factor_or_starts_from_the_servers_share() -> None:
    """With nothing to learn it stays where it started: s, because s_i s / s_i is s; or s times s^(1/K) / s_i."""
    task, client = lateral_task(lr=1e-12), make_clients()[1]
    layout = task.model.layout
    num_points, num_means = count_shared(layout)
    for init_from in ("own", "server"):
        virtual = method(init_from=init_from, private="lateral")
        state = virtual.init(task, generator())
        memory = virtual.init_client(task, state, 1)
        site = memory["precision"] * 1.5, memory["shift"] * 0.5 + 3.0
        memory |= {"precision": site[0], "shift": site[1], "private": memory["private"] + 0.25}
        ended = turn(virtual, task, state, memory, client).local["params"]
        if init_from == "own":
            expected = state["precision"], state["shift"]
            private = memory["private"]
        else:
            expected = tuple(
                state[n] * (1 + 1 / 3) - part for n, part in zip(("precision", "shift"), site, strict=True)
            )
            gates = memory["private"][num_points : num_points + 2]
            shared = [ended[layout.means][:num_means], ended[layout.log_variances][:num_means]]
            private = torch.cat([state["params"][layout.points][:num_points], gates, *shared])
        for ours, theirs in zip(natural(task, ended), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(read_private(task, ended), private)


def test_an_improper_start_is_the_servers() -> None:
    task, client = make_gaussian_task(lr=1e-12), make_clients()[1]
    virtual = method(init_from="server")
    state = virtual.init(task, generator())
    memory = virtual.init_client(task, state, 1)
    memory["precision"][:4] = 5 * state["precision"][:4]
    ended = turn(virtual, task, state, memory, client).local["params"]
    torch.testing.assert_close(natural(task, ended)[0][:4], state["precision"][:4], rtol=1e-5, atol=1e-5)


def test_lateral_network_with_closed_gates_is_the_shared_one() -> None:
    task = lateral_task()
    module = task.model.module.eval()
    assert isinstance(module, Lateral)
    x = torch.randn(3, 5, generator=generator())
    vector = task.model.initial.clone()
    state = method(private="lateral").init(task, generator())
    task.model.load(state["params"])
    alone = module(x)
    torch.testing.assert_close(alone, module.shared(x))
    task.model.load(vector)
    assert not torch.allclose(module(x), alone)
    hidden = module.shared[0](x) + module.gates[0] * module.private[0](x)
    own = module.private[2](torch.tanh(module.private[0](x)))
    expected = module.shared[2](torch.tanh(hidden)) + module.gates[1] * own
    torch.testing.assert_close(module(x), expected)


def test_a_gate_that_would_be_negative_is_closed_and_can_open_again() -> None:
    """A step of 1 against a positive gradient; then one from zero against a negative gradient."""
    task = lateral_task()
    project = project_gates(task)
    assert project is not None
    assert project_gates(make_gaussian_task()) is None
    vector = task.model.initial.clone()
    before = named(task, vector.clone())
    for name, value in named(task, vector).items():
        if name.startswith("gates"):
            value.fill_(-0.5)
    project(vector, False)
    for name, value in named(task, vector).items():
        assert torch.equal(value, torch.zeros_like(value) if name.startswith("gates") else before[name]), name
    task.model.load(vector)
    x, y = torch.randn(20, 5, generator=generator()), torch.arange(20) % 3
    gradient = task.model.backward(nn.functional.cross_entropy(task.model(x), y))
    assert all(part.abs() > 1e-4 for name, part in named_gradient(task, gradient) if name.startswith("gates"))


def test_gates_stay_open_or_closed_through_training() -> None:
    """With large steps some would be negative."""
    task, clients = lateral_task(lr=2.0), make_clients()
    virtual = method(private="lateral", beta=0.0)
    state, memory = virtual.init(task, generator()), {}
    seen: list[Tensor] = []
    for seed in range(4):
        update = turn(virtual, task, state, memory, clients[1], seed=seed)
        memory = update.memory
        parts = named(task, update.local["params"])
        seen.append(torch.stack([part for name, part in parts.items() if name.startswith("gates")]))
    gates = torch.stack(seen)
    assert (gates >= 0).all()
    assert (gates == 0).any()


def test_a_gate_per_unit_weighs_every_unit_by_itself() -> None:
    task = lateral_task(gate_per_unit=True)
    module = task.model.module.eval()
    assert isinstance(module, Lateral)
    assert [tuple(gate.shape) for gate in module.gates] == [(6,), (3,)]
    x = torch.randn(4, 5, generator=generator())
    hidden = module.shared[0](x) + torch.einsum("u,nu->nu", module.gates[0], module.private[0](x))
    own = module.private[2](torch.tanh(module.private[0](x)))
    torch.testing.assert_close(module(x), module.shared[2](torch.tanh(hidden)) + own * module.gates[1].view(1, 3))


@pytest.mark.parametrize(("name", "shape"), [("conv", (1, 8, 8)), ("lstm", (12,))])
def test_gates_per_unit_fit_every_kind_of_layer(name: str, shape: tuple[int, ...]) -> None:
    make = {
        "conv": lambda: networks.conv(shape, 5, hidden=[7]),
        "lstm": lambda: networks.lstm(shape, 5, embedding=3, units=4, layers=2),
    }[name]
    for settings in (None, make_gaussian_settings()):
        pair = [
            make() if settings is None else make_gaussian(make(), 9 if name == "lstm" else 4, settings) for _ in "ab"
        ]
        module = Lateral(*pair, gate_per_unit=True)
        x = torch.randint(5, (2, *shape)) if name == "lstm" else torch.randn(2, *shape)
        expected = {"conv": [(32, 1, 1), (64, 1, 1), (7,), (5,)], "lstm": [(3,), (4,), (5,)]}[name]
        assert [tuple(gate.shape) for gate in module.gates] == expected
        assert module(x).shape == pair[0](x).shape


def test_what_is_private_stays_with_the_client() -> None:
    task, client = lateral_task(), make_clients()[1]
    virtual = method(private="lateral")
    state = virtual.init(task, generator())
    update = turn(virtual, task, state, {}, client)
    num_points, num_means = count_shared(task.model.layout)
    assert (num_points, num_means) == (6 + 3, 5 * 6 + 6 * 3)
    assert update.message["changes"].shape == (2, num_means)
    assert update.message["points"].shape == (num_points,)
    assert len(update.memory["private"]) == num_points + 2 + 2 * num_means  # biases, gates, means, log variances
    new, _ = virtual.server_update(task, state, iter([(1, update.message)]), generator())
    torch.testing.assert_close(read_private(task, new["params"]), read_private(task, state["params"]))
    assert not torch.allclose(update.memory["private"], read_private(task, task.model.initial), atol=1e-3)
    still = replace(task, local=make_local(lr=1e-9))
    again = turn(virtual, still, new, update.memory, client, seed=51)
    torch.testing.assert_close(again.memory["private"], update.memory["private"])  # it goes on from there


def test_a_clients_private_network_takes_part() -> None:
    """Its gates are open from the first turn on, and what it predicts depends on its own weights."""
    task, client = lateral_task(), make_clients()[1]
    virtual = method(private="lateral")
    state = virtual.init(task, generator())
    start = named(task, task.model.initial)
    trained = turn(virtual, task, state, {}, client).local["params"]
    after = named(task, trained)
    for name in after:
        if name.startswith("gates"):
            assert (start[name] > 0).all()
            assert (after[name] != start[name]).all()
            assert not named(task, state["params"])[name].any()
        if name.startswith("private"):
            assert not torch.equal(after[name], start[name])
    x = torch.randn(3, 5, generator=generator())
    module = task.model.module.eval()
    task.model.load(trained)
    before = module(x)
    with torch.no_grad():
        after["private.0.weight"].mul_(100)
    task.model.load(trained)
    assert not torch.allclose(module(x), before)


def test_the_server_averages_every_shared_bias_and_nothing_private() -> None:
    task = replace(lateral_task(), server=make_server(lr=0.5))
    virtual = method(private="lateral", weights="uniform", damping=0.5)
    state = virtual.init(task, generator())
    updates = [turn(virtual, task, state, {}, client) for client in make_clients()[:2]]
    new, _ = virtual.server_update(task, state, ((i, update.message) for i, update in enumerate(updates)), generator())
    clients = [named(task, update.local["params"]) for update in updates]
    for name, value in named(task, new["params"]).items():
        old = named(task, state["params"])[name]
        if name.startswith("shared") and name.endswith("bias"):
            torch.testing.assert_close(value, 0.5 * old + 0.25 * (clients[0][name] + clients[1][name]))
        elif not name.startswith("shared"):
            assert torch.equal(value, old), name


def test_a_start_from_the_server_copies_layer_by_layer() -> None:
    task, client = lateral_task(lr=1e-12), make_clients()[1]
    virtual = method(private="lateral", init_from="server")
    state = virtual.init(task, generator())
    state["params"] += 0.1 * torch.randn(len(state["params"]), generator=generator(8))
    memory = virtual.init_client(task, state, 1)
    ended = named(task, turn(virtual, task, state, memory, client).local["params"])
    for name, value in ended.items():
        if name.startswith("private"):
            torch.testing.assert_close(value, ended[name.replace("private", "shared")], rtol=0, atol=1e-6)
        if name.startswith("gates"):
            assert (value > 0).all()


def test_private_parts_read_and_write() -> None:
    task = lateral_task()
    vector, private = task.model.initial.clone(), torch.arange(9 + 2 + 2 * 48.0)
    shared = natural(task, vector)
    write_private(task, vector, private)
    assert torch.equal(read_private(task, vector), private)
    assert all(torch.equal(a, b) for a, b in zip(natural(task, vector), shared, strict=True))


@pytest.mark.parametrize("kl", ["exact", "released"])
def test_the_pull_is_the_gradient_of_the_divergence(kl: str) -> None:
    """Against autograd; the released one divides the prior's shift by the posterior's precision."""
    from bfl_bench.inference.sites import pull_as_released

    task = make_gaussian_task()
    layout = task.model.layout
    num = layout.means.stop - layout.means.start
    prior = Prior(torch.randn(num, generator=generator(1)), torch.randn(num, generator=generator(2)))
    vector = (torch.randn(layout.size, generator=generator(3)) * 0.3).requires_grad_(True)
    mean, log_variance, precision = vector[layout.means], vector[layout.log_variances], prior.log_precision.exp()
    prior_mean = prior.mean if kl == "exact" else prior.mean * precision * log_variance.exp()
    ratio = log_variance + prior.log_precision
    divergence = 0.5 * (precision * (mean - prior_mean).square() + ratio.exp() - 1 - ratio).sum()
    divergence.backward()  # type: ignore[no-untyped-call]
    gradient = torch.zeros(layout.num_trainable)
    pull = prior.pull(task, 0.7) if kl == "exact" else pull_as_released(prior, task, 0.7)
    pull(vector.detach()[: layout.num_trainable], gradient, vector, vector)
    assert vector.grad is not None
    torch.testing.assert_close(gradient, 0.7 * vector.grad[: layout.num_trainable], rtol=1e-4, atol=1e-5)
    if kl == "exact":
        assert prior.kl(task, vector.detach()) == pytest.approx(divergence.item(), rel=1e-4)


def test_a_step_on_natural_parameters_is_that_of_autograd() -> None:
    """Of a loss written in shift and precision, in float64; the second weight's precision ends at its floor."""
    layout = Layout((), slice(0, 1), slice(1, 4), slice(4, 7))
    point, mean, log_variance = torch.tensor([0.4]), torch.tensor([0.3, -0.2, 0.1]), torch.tensor([-1.0, -0.5, 0.2])
    target, rate = torch.tensor([0.1, 0.9, -0.6], dtype=torch.float64), 0.7

    def loss(mean: Tensor, log_variance: Tensor, point: Tensor) -> Tensor:
        return ((mean - target).square() * (1 + log_variance.exp())).sum() + (2 * log_variance).sum() + 3 * point.sum()

    precision = (-log_variance.double()).exp().requires_grad_(True)
    shift = (precision.detach() * mean).requires_grad_(True)
    loss(shift / precision, -precision.log(), point.double()).backward()  # type: ignore[no-untyped-call]
    assert precision.grad is not None
    assert shift.grad is not None
    stepped = precision.detach() - rate * precision.grad
    floor = torch.tensor([0.1, stepped[1] + 0.25, 0.1])
    new_precision = torch.maximum(stepped, floor.double())
    new_mean = (shift.detach() - rate * shift.grad) / new_precision

    parameters = torch.cat([point, mean, log_variance])

    def gradient(offset: Tensor | None) -> Tensor:
        at = parameters.double().requires_grad_(True)
        loss(at[layout.means], at[layout.log_variances], at[layout.points]).backward()  # type: ignore[no-untyped-call]
        assert at.grad is not None
        return at.grad.float()

    NaturalSgd(layout, rate, floor).step(parameters, gradient, {}, 0.01, generator())
    expected = torch.cat([point.double() - 0.03, new_mean, -new_precision.log()])
    torch.testing.assert_close(parameters.double(), expected, rtol=1e-5, atol=1e-6)


def test_with_steps_on_natural_parameters_no_factor_loses_its_precision() -> None:
    """As large as they are: the posterior's precision stays at least that of all others' factors together."""
    task, client = lateral_task(), make_clients()[1]
    virtual = method(private="lateral", natural_lr=800.0)
    state = virtual.init(task, generator())
    before = virtual.init_client(task, state, 1)
    before = before | {"precision": 1e-3 * before["precision"]}  # a factor with little to lose
    update = turn(virtual, task, state, before, client)
    precision, _ = natural(task, update.local["params"])
    floor = state["precision"] - before["precision"]
    assert (precision >= floor * (1 - 1e-5)).all()  # float32
    assert (precision < floor * (1 + 1e-5)).any()
    num_means = len(precision)
    own = update.local["params"][task.model.layout.log_variances][num_means:]
    assert ((-own).exp() >= 1 / 0.7 * (1 - 1e-5)).all()


def test_steps_on_natural_parameters_are_plain() -> None:
    assert method(natural_lr=1.0).needs.sgd
    assert not method().needs.sgd
    for local in ({"momentum": 0.5}, {"weight_decay": 0.1}):
        with pytest.raises(ConfigError, match=r"method\.natural_lr: got 5\.0, allowed: null"):
            method(natural_lr=5.0).check(make_gaussian_task(**local))


def test_a_damped_model_is_the_servers_and_a_part_of_what_was_learnt() -> None:
    """The message is the same; natural parameters and biases lie between the server's and the trained ones."""
    task, client = replace(lateral_task(), server=make_server(lr=0.4)), make_clients()[1]
    trained, damped = (method(private="lateral", own_model=kind, damping=0.25) for kind in ("trained", "damped"))
    state = trained.init(task, generator())
    whole, part = (turn(virtual, task, state, {}, client) for virtual in (trained, damped))
    assert torch.equal(whole.message["changes"], part.message["changes"])
    assert torch.equal(whole.memory["private"], part.memory["private"])
    new, found = (natural(task, update.local["params"]) for update in (whole, part))
    for name, there, here in zip(("precision", "shift"), new, found, strict=True):
        torch.testing.assert_close(here, 0.75 * state[name] + 0.25 * there, rtol=1e-5, atol=1e-5)
    points, (num, _) = task.model.layout.points, count_shared(task.model.layout)
    old, learnt, here = (v[points][:num] for v in (state["params"], whole.local["params"], part.local["params"]))
    torch.testing.assert_close(here, 0.75 * old + 0.25 * learnt)
    torch.testing.assert_close(read_private(task, part.local["params"]), read_private(task, whole.local["params"]))


@pytest.mark.parametrize(
    "changes",
    [
        {"natural_lr": 30.0},
        {"beta": 3.0},
        {"prior_variance": 0.1},
        {"prior_power": "size"},
        {"damping": 0.9},
        {"init_from": "server"},
        {"prune": 50.0},
        {"kl": "released"},
        {"weights": "uniform"},
    ],
)
def test_every_option_changes_the_second_round(changes: dict[str, Any]) -> None:
    def run(virtual: Virtual) -> Tensor:
        task, clients = make_gaussian_task(), make_clients()
        state, memories = virtual.init(task, generator()), {}
        for round_ in range(2):
            updates = [turn(virtual, task, state, memories.get(c.id), c, seed=10 * round_ + c.id) for c in clients]
            memories = {client.id: update.memory for client, update in zip(clients, updates, strict=True)}
            replies = [(client.id, update.message) for client, update in zip(clients, updates, strict=True)]
            state, _ = virtual.server_update(task, state, iter(replies), generator())
        return state["params"]

    assert not torch.allclose(run(method(**changes)), run(method()), atol=1e-6)


def test_evaluation_variance_is_the_servers_alone() -> None:
    task = make_gaussian_task()
    virtual = method(evaluation_variance=0.25)
    state = virtual.init(task, generator())
    means = task.model.layout.means
    noise = [
        next(virtual.draws(task, model, 1, generator()))[means] - state["params"][means]
        for model in (state, {"params": state["params"]})
    ]
    torch.testing.assert_close(noise[0], 0.5 * noise[1])


def test_a_network_without_gaussian_layers_is_refused() -> None:
    task = replace(make_gaussian_task(num_layers=0))
    with pytest.raises(ConfigError, match="bayesian_layers"):
        method().check(task)


def test_lateral_needs_a_sequence_of_layers() -> None:
    with pytest.raises(UnsuitableError, match="a sequence of layers"):
        Lateral(nn.Linear(2, 2), nn.Linear(2, 2))


def test_what_private_asks_of_the_network() -> None:
    asked = {kind: method(private=kind).needs for kind in ("none", "lateral", "lateral_units")}
    assert [needs.lateral for needs in asked.values()] == [False, True, True]
    assert [needs.gate_per_unit for needs in asked.values()] == [False, False, True]
