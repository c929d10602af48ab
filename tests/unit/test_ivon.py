"""IVON: five steps of the authors' optimizer, the curvature of quadratics, and the mean-field optimum."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from bfl_bench.inference.ivon import Ivon
from bfl_bench.inference.train import Gradient, train
from bfl_bench.method import Tensors
from tests.federation import generator, make_clients, make_task, random_start

DOUBLE = torch.float64
X = torch.tensor(
    [
        [-0.22, 0.15, 0.67, -0.51, -1.59, -0.75, 0.65],
        [0.91, 0.15, -0.81, 1.59, -0.35, 0.55, 1.15],
        [-0.12, 0.55, -0.46, 1.06, -2.22, -0.47, -1.35],
        [-0.28, 0.17, 0.76, 0.18, 0.63, -0.42, -1.19],
        [-0.04, -0.59, -1.07, -0.11, -0.46, -0.19, -0.91],
        [0.62, -0.91, -0.77, 0.97, -1.32, 0.7, 0.32],
    ],
    dtype=DOUBLE,
)
Y = torch.tensor([-0.68, 0.84, 0.61, 0.68, 0.41, 0.03], dtype=DOUBLE)
START = torch.tensor([-0.03, 1.46, 3.79, 0.27, 0.4, -0.61, 0.38], dtype=DOUBLE)
NOISE = [  # of a standard normal, one row for each gradient
    [0.738, 1.946, -0.7, -1.302, -0.513, -0.27, 0.246],
    [0.484, 0.45, -0.957, 1.501, -0.314, -0.234, -1.071],
    [0.165, 0.116, 0.383, -0.123, 0.893, -0.489, -1.447],
    [1.194, 0.546, -2.075, -0.969, -2.135, -1.043, -1.707],
    [1.39, 0.173, -0.984, -1.094, 0.132, 0.194, -0.339],
    [1.659, -0.241, -0.87, -0.039, 0.458, -1.469, 0.693],
    [-0.306, 0.203, 0.688, 0.871, 0.541, 0.556, -0.327],
    [1.323, -0.689, -0.539, -0.08, -1.043, 0.82, -1.577],
    [-0.403, 0.1, -0.921, 2.734, -1.081, -0.78, 0.286],
    [-0.295, 0.875, -1.224, -1.864, -0.671, -0.073, 1.931],
]
# Parameters, h and u after five steps of ivon-opt 0.1.3 with lr 0.3 on least squares with this noise.
RECORDED: list[tuple[dict[str, Any], list[float], list[float], list[float]]] = [
    (
        {},
        [
            0.9075574915016071,
            0.5056616741043133,
            0.36491279219123185,
            0.8939157475560695,
            -0.183612979052704,
            0.45070697238348006,
            0.12737635431350822,
        ],
        [
            0.578684650495097,
            0.8342384914642302,
            0.631556766816855,
            0.6365615701755156,
            1.503143274895949,
            0.6194453983979612,
            0.601786864439669,
        ],
        [
            0.012349031583622327,
            0.2289747101734105,
            0.17459209644188675,
            0.22568703526977235,
            -0.6084546058077336,
            -0.13105331743585263,
            0.12187961576548872,
        ],
    ),
    (
        {"clip": 1.5, "rescale": False},
        [
            1.382055393520921,
            0.05695607560375393,
            1.5399999999999996,
            1.3126814222054428,
            -0.43243718114016055,
            0.9126518593110431,
            -0.007713099730625825,
        ],
        [
            0.5469580659911062,
            0.8576220041579906,
            0.44944620174680067,
            0.5843113754262403,
            1.4921190869233687,
            0.6518297097803126,
            0.57841687688036,
        ],
        [
            -0.06891154319580914,
            0.3194772728876889,
            0.49433998575699606,
            0.09960934424757406,
            -0.500508627619461,
            -0.2153968825807881,
            0.17020545292221972,
        ],
    ),
    (
        {"samples": 2},
        [
            0.7346544929639474,
            0.4163371557854986,
            0.2956929049764533,
            1.1526552435836428,
            -0.018934299818510386,
            0.27194397662224534,
            -0.04684942901047359,
        ],
        [
            0.5009755133506669,
            0.709745420056235,
            0.4273707154646139,
            0.9141123637603417,
            1.0104189185330053,
            0.6114285701343585,
            0.7524248564653504,
        ],
        [
            0.10189453611463845,
            0.22731601070296498,
            0.20317623256071798,
            0.284513102188927,
            -0.4510945076998776,
            -0.025481809641410197,
            0.3802560519104773,
        ],
    ),
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Replayed(Ivon):
    """IVON whose noise is given."""

    rows: list[list[float]] = field(default_factory=lambda: [row.copy() for row in NOISE])

    def noise(self, like: Tensor, rng: torch.Generator) -> Tensor:
        return torch.tensor(self.rows.pop(0), dtype=like.dtype) * self.ess**-0.5


def make(kind: type[Ivon] = Ivon, **changes: Any) -> Ivon:
    values: dict[str, Any] = {"ess": 6.0, "h0": 0.7, "beta1": 0.8, "beta2": 0.95, "delta": 0.05}
    return kind(**values | changes)


def gradient_of(parameters: Tensor, x: Tensor = X, y: Tensor = Y) -> Gradient:
    """Of half the mean squared error, in the same storage at every call, as training has it."""
    storage = torch.empty_like(parameters)

    def gradient(offset: Tensor | None) -> Tensor:
        at = parameters if offset is None else parameters + offset
        return storage.copy_(x.T @ (x @ at - y) / len(y))

    return gradient


def take_steps(ivon: Ivon, num: int, lr: float = 0.3, rng: torch.Generator | None = None) -> tuple[Tensor, Tensors]:
    parameters = START.clone()
    memory, gradient = ivon.begin(parameters), gradient_of(parameters)
    for _ in range(num):
        ivon.step(parameters, gradient, memory, lr, rng or generator())
    return parameters, memory


@pytest.mark.parametrize(("options", "parameters", "hessian", "momentum"), RECORDED)
def test_steps_are_those_of_the_authors_optimizer(
    options: dict[str, Any], parameters: list[float], hessian: list[float], momentum: list[float]
) -> None:
    found, memory = take_steps(make(Replayed, **options), 5)
    tight = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(found, torch.tensor(parameters, dtype=DOUBLE), **tight)
    torch.testing.assert_close(memory["precision"] - 0.05, torch.tensor(hessian, dtype=DOUBLE), **tight)
    torch.testing.assert_close(memory["momentum"], torch.tensor(momentum, dtype=DOUBLE), **tight)


def test_vectors_change_prior_and_objective() -> None:
    """The formulas, written down once more, with a prior and linear and quadratic terms for each parameter."""
    rng = generator(1)
    delta, prior_mean, linear, quadratic = (torch.rand(7, generator=rng, dtype=DOUBLE) + 0.1 for _ in range(4))
    vectors = {"delta": delta, "prior_mean": prior_mean, "linear": linear, "quadratic": -0.05 * quadratic}
    found, memory = take_steps(make(Replayed, rescale=False, **vectors), 5)
    m, h, u = START.clone(), torch.full((7,), 0.7, dtype=DOUBLE), torch.zeros(7, dtype=DOUBLE)
    for t, row in enumerate(NOISE[:5], start=1):
        e = torch.tensor(row, dtype=DOUBLE) / (6 * (h + delta)).sqrt()
        g = X.T @ (X @ (m + e) - Y) / 6
        hhat = 6 * (h + delta) * e * g + vectors["quadratic"]
        u = 0.8 * u + 0.2 * g
        h = 0.95 * h + 0.05 * hhat + 0.5 * 0.05**2 * (h - hhat) ** 2 / (h + delta)
        top = u / (1 - 0.8**t) + linear + vectors["quadratic"] * m + delta * (m - prior_mean)
        m = m - 0.3 * top / (h + delta)
    torch.testing.assert_close(found, m, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(memory["precision"], h + delta, rtol=1e-12, atol=1e-12)


def test_a_vector_delta_cannot_rescale_the_learning_rate() -> None:
    with pytest.raises(ValueError, match="rescaled by a number delta only"):
        make(delta=torch.ones(7))


def test_many_samples_estimate_the_curvature_of_a_quadratic() -> None:
    """A step with a share of 1e-6 moves h by that share of hhat - h; the squared term is a millionth of it."""
    ivon = make(samples=20_000, beta2=1 - 1e-6)
    parameters = torch.linalg.lstsq(X, Y[:, None]).solution[:, 0]  # without the noise of a gradient that is not zero
    memory = ivon.begin(parameters)
    ivon.step(parameters, gradient_of(parameters), memory, 0.3, generator())
    hhat = 0.7 + (memory["precision"] - 0.75) / 1e-6
    # Each sample is off by about the largest entry of X'X / n, 1.6: by 0.01 in the mean of 20 000.
    torch.testing.assert_close(hhat, (X.T @ X / 6).diagonal(), rtol=0, atol=0.05)


def test_a_long_run_finds_the_mean_field_optimum_of_a_linear_model() -> None:
    """The exact mean of the posterior, and the diagonal of its precision."""
    rng = generator(2)
    x = torch.randn(20, 4, generator=rng, dtype=DOUBLE) * torch.tensor([0.5, 1.0, 1.5, 2.0])
    y = x.sum(1) + torch.randn(20, generator=rng, dtype=DOUBLE)
    ivon = make(ess=20.0, h0=1.0, beta1=0.9, beta2=0.999, delta=0.1)
    parameters = torch.zeros(4, dtype=DOUBLE)
    memory, gradient = ivon.begin(parameters), gradient_of(parameters, x, y)
    mean, precision = torch.zeros(4, dtype=DOUBLE), torch.zeros(4, dtype=DOUBLE)
    for step in range(12_000):
        ivon.step(parameters, gradient, memory, 0.02, rng)
        if step >= 6_000:
            mean += parameters / 6_000
            precision += 20 * memory["precision"] / 6_000
    posterior = x.T @ x + 2 * torch.eye(4, dtype=DOUBLE)
    torch.testing.assert_close(mean, torch.linalg.solve(posterior, x.T @ y), rtol=0.05, atol=0.0)
    torch.testing.assert_close(precision, posterior.diagonal(), rtol=0.05, atol=0.0)


def test_with_a_large_fixed_curvature_it_is_adam_without_second_moment() -> None:
    """No noise is left, and rescaling makes the steps those of the debiased running mean of gradients."""
    found, memory = take_steps(make(h0=1e14, beta2=1.0, delta=0.0), 4)
    m, u = START.clone(), torch.zeros(7, dtype=DOUBLE)
    for t in range(1, 5):
        u = 0.8 * u + 0.2 * X.T @ (X @ m - Y) / 6
        m = m - 0.3 * u / (1 - 0.8**t)
    torch.testing.assert_close(found, m, rtol=1e-6, atol=1e-6)  # the noise is 4e-8
    assert torch.equal(memory["precision"], torch.full((7,), 1e14, dtype=DOUBLE))


def test_noise_has_the_variance_of_the_posterior() -> None:
    noise = make(ess=4.0).noise(torch.empty(100_000), generator())
    assert noise.var().item() == pytest.approx(0.25, rel=0.02)  # 4 standard errors of a variance
    assert noise.dtype == torch.float32


def test_a_network_is_trained_and_the_memory_goes_on() -> None:
    task, client = make_task(epochs=3), make_clients()[1]
    start, ivon = random_start(task), make(ess=12.0, beta2=0.99, h0=5.0)
    first, again = (train(task, start, client, generator(), optimizer=ivon) for _ in range(2))
    assert torch.equal(first.vector, again.vector)
    assert torch.equal(first.memory["precision"], again.memory["precision"])
    assert not torch.equal(first.vector, train(task, start, client, generator(1), optimizer=ivon).vector)
    assert first.memory["steps"] == first.num_steps == 9
    memory = {name: value.clone() for name, value in first.memory.items()}
    longer = train(task, first.vector, client, generator(2), optimizer=ivon, memory=memory)
    assert longer.memory["steps"] == 18
    fresh = train(task, first.vector, client, generator(2), optimizer=ivon)
    assert not torch.allclose(longer.vector, fresh.vector)
