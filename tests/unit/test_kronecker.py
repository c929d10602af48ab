"""Kronecker factors against loops over examples and curvlinops, solvers against dense matrices."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bfl_bench.errors import UnsuitableError
from bfl_bench.inference import kronecker
from bfl_bench.inference.kronecker import Posteriors
from tests.federation import generator, make_clients, make_task, random_start

SHAPE = (2, 6, 5)


def network() -> nn.Module:
    """Stride, padding and a layer without bias."""
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 4, 2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )


def random_posteriors(num: int = 3, outputs: int = 3, inputs: int = 4, seed: int = 0) -> Posteriors:
    draw = generator(seed)

    def positive(size: int) -> Tensor:
        root = torch.randn(num, size, size, generator=draw, dtype=torch.float64)
        return root @ root.mT + 0.3 * torch.eye(size)

    means = torch.randn(num, outputs, inputs, generator=draw, dtype=torch.float64)
    weights = torch.rand(num, generator=draw, dtype=torch.float64) + 0.1
    return Posteriors(positive(inputs), positive(outputs), means, weights / weights.sum())


def dense(posteriors: Posteriors) -> tuple[Tensor, Tensor]:
    """The precision sum_k p_k A_k x B_k and sum_k p_k (A_k x B_k) vec(M_k), vec column by column as in the paper."""
    precision = sum(
        p * torch.kron(a, b) for p, a, b in zip(posteriors.weights, posteriors.a, posteriors.b, strict=True)
    )
    right = sum(
        p * torch.kron(a, b) @ mean.T.flatten()
        for p, a, b, mean in zip(posteriors.weights, posteriors.a, posteriors.b, posteriors.means, strict=True)
    )
    assert isinstance(precision, Tensor)
    assert isinstance(right, Tensor)
    return precision, right


def test_products_equal_those_with_dense_kronecker_matrices() -> None:
    posteriors = random_posteriors()
    precision, right = dense(posteriors)
    matrix = torch.randn(3, 4, generator=generator(9), dtype=torch.float64)
    torch.testing.assert_close(posteriors.apply(matrix).T.flatten(), precision @ matrix.T.flatten())
    torch.testing.assert_close(posteriors.right_side().T.flatten(), right)


def test_conjugate_gradients_equal_the_dense_solution() -> None:
    posteriors = random_posteriors()
    expected = torch.linalg.solve(*dense(posteriors)).view(4, 3).T
    start = torch.zeros(3, 4, dtype=torch.float64)
    found, steps = posteriors.conjugate_gradients(start, 1e-12, 100)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert 1 < steps <= 20  # 12 unknowns
    assert posteriors.residual(found) <= 1e-11
    assert posteriors.conjugate_gradients(found, 1e-8, 100)[1] == 0  # nothing left to do


def test_conjugate_gradients_stop_at_the_tolerance_or_the_limit() -> None:
    posteriors, start = random_posteriors(), torch.zeros(3, 4, dtype=torch.float64)
    loose, tight = (posteriors.conjugate_gradients(start, tolerance, 100) for tolerance in (1e-2, 1e-10))
    assert loose[1] < tight[1]
    assert 1e-10 < posteriors.residual(loose[0]) <= 1e-2
    assert posteriors.conjugate_gradients(start, 1e-10, 2)[1] == 2


def test_expectation_approximation_is_equation_35() -> None:
    posteriors = random_posteriors()
    mean_a = (posteriors.weights[:, None, None] * posteriors.a).sum(0)
    mean_b = (posteriors.weights[:, None, None] * posteriors.b).sum(0)
    expected = torch.linalg.inv(mean_b) @ posteriors.right_side() @ torch.linalg.inv(mean_a)
    found = posteriors.approximate_inverse()(posteriors.right_side())
    torch.testing.assert_close(found, expected)
    assert posteriors.residual(found) > 1e-2  # it is an approximation


def test_equal_clients_give_their_mean_under_every_solver() -> None:
    """With weights that do not sum to one, eq. 35 as printed, it would be M / K."""
    one = random_posteriors(num=1)
    same = Posteriors(*(t.expand(4, -1, -1) for t in (one.a, one.b, one.means)), torch.full((4,), 0.25).double())
    start = same.approximate_inverse()(same.right_side())
    for found in (start, same.descend(start, 3, 0.01), same.conjugate_gradients(0 * start, 1e-12, 100)[0]):
        torch.testing.assert_close(found, one.means[0], rtol=1e-8, atol=1e-9)


def test_descent_approaches_the_solution_as_steps_grow() -> None:
    posteriors = random_posteriors()
    exact = posteriors.conjugate_gradients(posteriors.means[0], 1e-13, 100)[0]
    largest = torch.linalg.eigvalsh(dense(posteriors)[0])[-1].item()
    start = posteriors.approximate_inverse()(posteriors.right_side())
    lr = 0.9 * start.numel() / largest**2  # the loss has curvature 2 / n times the squared precision
    distances = [(posteriors.descend(start, steps, lr) - exact).norm().item() for steps in (0, 10, 100, 1000, 10_000)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.2 * distances[0]


def test_descent_follows_the_gradient_of_the_mean_squared_error() -> None:
    posteriors = random_posteriors()
    start = torch.randn(3, 4, generator=generator(9), dtype=torch.float64, requires_grad=True)
    F.mse_loss(posteriors.apply(start), posteriors.right_side()).backward()  # type: ignore[no-untyped-call]
    assert start.grad is not None
    torch.testing.assert_close(posteriors.descend(start.detach(), 1, 0.3), start.detach() - 0.3 * start.grad)


def test_exact_posterior_mean_where_curvature_truly_factors() -> None:
    """Linear regression with independent outputs: the Hessian is X^T X x I, so the mean is that of the pooled data."""
    draw = generator(3)
    designs = [torch.randn(n, 4, generator=draw, dtype=torch.float64) for n in (9, 14, 30)]
    targets = [torch.randn(len(x), 2, generator=draw, dtype=torch.float64) for x in designs]
    means = torch.stack([torch.linalg.lstsq(x, y).solution.T for x, y in zip(designs, targets, strict=True)])
    a = torch.stack([x.T @ x / len(x) for x in designs])
    b = torch.eye(2, dtype=torch.float64).expand(3, 2, 2)
    sizes = torch.tensor([float(len(x)) for x in designs], dtype=torch.float64)
    posteriors = Posteriors(a, b, means, sizes / sizes.sum())
    pooled = torch.linalg.lstsq(torch.cat(designs), torch.cat(targets)).solution.T
    start = posteriors.approximate_inverse()(posteriors.right_side())  # exact here too: B is the same for all
    torch.testing.assert_close(start, pooled)
    torch.testing.assert_close(posteriors.conjugate_gradients(0 * start, 1e-12, 100)[0], pooled)


def test_upper_triangles_are_all_that_is_sent() -> None:
    matrix = random_posteriors().a[0]
    entries = kronecker.upper_triangle(matrix)
    assert entries.shape == (10,)
    assert torch.equal(kronecker.from_upper_triangle(entries), matrix.triu() + matrix.triu(1).T)


@pytest.mark.parametrize("norm", ["trace", "frobenius", "one"])
def test_damping(norm: kronecker.Norm) -> None:
    a, b = random_posteriors().a[0], random_posteriors().b[0]
    left, right = torch.kron(a, torch.eye(3)), torch.kron(torch.eye(4), b)
    ratio = {"trace": left.trace() / right.trace(), "frobenius": left.norm() / right.norm(), "one": torch.tensor(1.0)}
    pi = ratio[norm].sqrt().item()
    ((damped_a, damped_b),) = kronecker.damp([(a, b)], 0.04, norm)
    torch.testing.assert_close(damped_a - a, pi * 0.2 * torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(damped_b - b, 0.2 / pi * torch.eye(3, dtype=torch.float64))
    assert norm == "one" or abs(pi - 1) > 0.01


def test_damping_of_a_layer_without_gradients_is_finite() -> None:
    ((a, b),) = kronecker.damp([(torch.ones(2, 2), torch.zeros(2, 2))], 0.01, "trace")
    assert torch.equal(b, 0.1 * torch.eye(2))
    assert torch.equal(a, torch.ones(2, 2) + 0.1 * torch.eye(2))


@pytest.mark.parametrize("split", ["kfac", "released"])
def test_factors_equal_a_loop_over_examples(split: kronecker.Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer that sees an example at S positions: A adds them up, B averages them; released: S^2 changes sides."""
    monkeypatch.setattr("bfl_bench.inference.kronecker._EXAMPLES_AT_ONCE", 5)
    task, client = make_task(network()), make_clients((12, 3), shape=SHAPE)[0]
    start = random_start(task)
    found = kronecker.factors(task, start, client, generator(), split)
    x, y = client.gather(torch.arange(12), generator())
    module = task.model.module
    assert isinstance(module, nn.Sequential)
    expected_a: dict[str, Tensor] = {}
    expected_b: dict[str, Tensor] = {}
    for example, label in zip(x, y, strict=True):
        values = example[None]
        outputs: list[tuple[str, nn.Module, Tensor, Tensor]] = []
        for name, layer in module.named_children():
            inputs, values = values, layer(values)
            if isinstance(layer, nn.Conv2d | nn.Linear):
                outputs.append((name, layer, inputs, values))
        gradients = torch.autograd.grad(F.cross_entropy(values, label[None]), [value for *_, value in outputs])
        for (name, layer, inputs, _), gradient in zip(outputs, gradients, strict=True):
            if isinstance(layer, nn.Conv2d):
                patches = F.unfold(inputs, tuple(layer.kernel_size), padding=layer.padding, stride=layer.stride)[0]
            else:
                patches = inputs.T
            if layer.bias is not None:
                patches = torch.cat([patches, torch.ones(1, patches.shape[1])])
            slopes = gradient[0].flatten(1) if gradient.dim() == 4 else gradient.T
            positions = patches.shape[1]
            scale = positions**2 if split == "released" else 1
            expected_a[name] = expected_a.get(name, 0) + patches @ patches.T / 12 / scale
            expected_b[name] = expected_b.get(name, 0) + slopes @ slopes.T / 12 / positions * scale
    assert found.keys() == expected_a.keys()
    for name, (a, b) in found.items():
        torch.testing.assert_close(a, expected_a[name], rtol=1e-4, atol=1e-6)  # float32
        torch.testing.assert_close(b, expected_b[name], rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore")
def test_products_of_factors_equal_those_of_curvlinops() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports a deprecated part of torch
        import curvlinops

    task, client = make_task(network()), make_clients((12, 3), shape=SHAPE)[0]
    start = random_start(task)
    found = kronecker.factors(task, start, client, generator(), "kfac")
    module = task.model.module
    data = [client.gather(torch.arange(12), generator())]
    for layer in kronecker.find_layers(task.model):
        names = [f"{layer.name}.weight"] + ([f"{layer.name}.bias"] if layer.bias else [])
        operator = curvlinops.KFACLinearOperator(
            module,
            nn.CrossEntropyLoss(),
            [dict(module.named_parameters())[name] for name in names],
            data,
            fisher_type="empirical",
            kfac_approx="expand",
            separate_weight_and_bias=False,
            check_deterministic=False,
        )
        theirs = operator @ torch.eye(operator.shape[1])
        a, b = found[layer.name]
        num_weights = layer.weight.shape.numel()
        ours = torch.kron(b, a)  # vec row by row: [W | b] with the bias as the last column
        columns = a.shape[0]
        is_bias = torch.arange(len(ours)) % columns == columns - 1 if layer.bias else torch.zeros(len(ours)).bool()
        order = torch.cat([(~is_bias).nonzero()[:, 0], is_bias.nonzero()[:, 0]])  # theirs: weights, then biases
        ours = ours[order][:, order]
        assert len(ours) == num_weights + int(is_bias.sum())
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert theirs.abs().max() > 1e-4


def test_reading_and_writing_a_layer() -> None:
    task = make_task(network())
    vector = random_start(task)
    copy = torch.zeros_like(vector)
    for layer in kronecker.find_layers(task.model):
        matrix = layer.read(vector)
        state = task.model.layout.to_state_dict(vector)
        assert torch.equal(matrix[:, : layer.weight.shape[1:].numel()], state[f"{layer.name}.weight"].flatten(1))
        layer.write(copy, matrix)
    assert torch.equal(copy, vector)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1, groups=2), nn.Conv2d(2, 2, 3, padding_mode="circular", padding=1)]
)
def test_another_layer_is_named(layer: nn.Module) -> None:
    task = make_task(nn.Sequential(layer))
    with pytest.raises(UnsuitableError, match=type(layer).__name__):
        kronecker.find_layers(task.model)


def test_an_activation_that_works_in_place_changes_nothing() -> None:
    client = make_clients((12, 3), shape=SHAPE)[0]
    found = []
    for inplace in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(inplace), nn.Flatten(), nn.Linear(60, 3))
        task = make_task(module)
        found.append(kronecker.factors(task, task.model.initial, client, generator(), "kfac"))
    for name, pair in found[0].items():
        assert all(torch.equal(one, other) for one, other in zip(pair, found[1][name], strict=True))


def test_factors_for_predicted_labels_equal_a_loop_over_examples_and_classes() -> None:
    """B in expectation over the network's own labels; A does not depend on labels."""
    task = make_task(network())
    client, start = make_clients((9, 4), shape=SHAPE)[0], random_start(task)
    ours = kronecker.factors(task, start, client, generator(), "kfac", "model")
    task.model.load(start)
    x, _ = client.gather(torch.arange(9), generator())
    layers = kronecker.find_layers(task.model)
    expected = {layer.name: torch.zeros(()) for layer in layers}
    for example in x.split(1):
        probabilities = task.model(example).detach().softmax(1)[0]
        for label, probability in enumerate(probabilities):
            for layer, _, slopes in kronecker.inputs_and_slopes(task, layers, example, torch.tensor([label])):
                rows = slopes[0]  # (positions, out)
                expected[layer.name] = expected[layer.name] + probability * rows.T @ rows / len(rows) / 9
    plain = kronecker.factors(task, start, client, generator(), "kfac")
    for name, (a, b) in ours.items():
        torch.testing.assert_close(b, expected[name], rtol=1e-4, atol=1e-7)  # float32
        torch.testing.assert_close(a, plain[name][0])
        assert not torch.allclose(b, plain[name][1], rtol=0.1)


def test_of_one_example_factors_for_predicted_labels_are_the_gauss_newton_matrix() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports a deprecated part of torch
        import curvlinops

        task = make_task()
        client, start = make_clients((1, 4))[0], random_start(task)
        ours = kronecker.factors(task, start, client, generator(), "kfac", "model")
        module = task.model.module
        data = [client.gather(torch.arange(1), generator())]
        last = list(module.parameters())[-2:]  # weights row by row, then biases
        theirs = curvlinops.GGNLinearOperator(module, nn.CrossEntropyLoss(), last, data) @ torch.eye(21)
    (layer,) = (layer for layer in kronecker.find_layers(task.model) if layer.name == "2")
    a, b = ours["2"]
    order = torch.cat([torch.arange(18).view(3, 6), torch.arange(18, 21)[:, None]], dim=1).flatten()
    expected = torch.zeros(21, 21)
    expected[order[:, None], order] = torch.kron(b, a)
    assert layer.bias is not None
    torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-6)
    assert theirs.abs().max() > 0.01


def test_moments_of_inputs_are_the_factors_a(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kronecker, "_EXAMPLES_AT_ONCE", 4)
    task = make_task(network())
    client, start = make_clients((9, 4), shape=SHAPE)[0], random_start(task)
    moments = kronecker.input_moments(task, start, client, generator())
    for name, (a, _) in kronecker.factors(task, start, client, generator(), "kfac").items():
        torch.testing.assert_close(moments[name], a)
