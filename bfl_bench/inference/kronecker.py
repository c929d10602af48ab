"""Gaussians whose precision is, layer by layer, a Kronecker product A x B, and the mean of their product.

A layer's parameters are a matrix M = [W | b], (out, in + 1), a convolution's weights flattened. A (in + 1, in + 1) is
the second moment of the layer's inputs with a one appended, B (out, out) that of the gradients with respect to its
outputs (Martens and Grosse 2015; for convolutions Grosse and Martens 2016).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bfl_bench.errors import UnsuitableError
from bfl_bench.method import Client, Task
from bfl_bench.models.flat import Entry, FlatModel

Split = Literal["kfac", "released"]
"""How a convolution's scale is shared: A sums over the S positions and B averages; released: A / S^2 and B S^2."""

Labels = Literal["data", "model"]
"""Whose labels gradients are for: those of the data, the empirical Fisher; in expectation those that the network
predicts, the true Fisher, which of a softmax is a generalised Gauss-Newton matrix."""

Norm = Literal["trace", "frobenius", "one"]
"""What pi_l of the damping is the ratio of: mean eigenvalues, mean squared ones; one: no ratio, pi_l = 1."""


@dataclass(frozen=True)
class Layer:
    """A linear or convolutional layer of a network, and where its parameters lie in the flat vector."""

    name: str
    module: nn.Linear | nn.Conv2d
    weight: Entry
    bias: Entry | None

    def read(self, vector: Tensor) -> Tensor:
        """M, (out, in + 1), or (out, in) without bias."""
        matrix = self.weight.view(vector).flatten(1)
        return matrix if self.bias is None else torch.cat([matrix, self.bias.view(vector)[:, None]], dim=1)

    def write(self, vector: Tensor, matrix: Tensor) -> None:
        """Put M into its places in `vector`."""
        if self.bias is not None:
            self.bias.view(vector).copy_(matrix[:, -1])
            matrix = matrix[:, :-1]
        self.weight.view(vector).copy_(matrix.reshape(self.weight.shape))

    def rows(self, x: Tensor) -> Tensor:
        """The layer's inputs as rows (examples, positions, in + 1); a linear layer has one position."""
        if isinstance(self.module, nn.Conv2d):
            module = self.module
            padding = module.padding
            assert isinstance(padding, tuple)
            size = tuple(module.kernel_size)
            x = F.unfold(x, size, module.dilation, padding, module.stride).transpose(1, 2)
        else:
            x = x[:, None]
        return x if self.bias is None else F.pad(x, (0, 1), value=1.0)


def find_layers(model: FlatModel) -> list[Layer]:
    """Every layer that has parameters; another kind than Linear and Conv2d is an error that names it."""
    entries = {entry.name: entry for entry in model.layout.entries if entry.stop <= model.layout.num_trainable}
    layers: list[Layer] = []
    for path, module in model.module.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if not own:
            continue
        prefix = f"{path}." if path else ""
        plain = type(module) is nn.Linear or (
            type(module) is nn.Conv2d
            and module.groups == 1
            and module.padding_mode == "zeros"
            and isinstance(module.padding, tuple)
        )
        if not plain or not all(prefix + name in entries for name in own):
            found = " ".join(f"{path or 'the network'} is {module}".split())
            raise UnsuitableError(f"a network whose parameters are all in plain Linear and Conv2d layers ({found})")
        assert isinstance(module, nn.Linear | nn.Conv2d)
        layers.append(Layer(path, module, entries[f"{prefix}weight"], entries.get(f"{prefix}bias")))
    return layers


def factors(
    task: Task, vector: Tensor, client: Client, rng: torch.Generator, split: Split, labels: Labels = "data"
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of every layer, over all of the client's data at `vector`; gradients of single examples."""
    model = task.model
    layers = find_layers(model)
    model.load(vector)
    model.module.eval()
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    num_examples = len(client)
    for positions in torch.split(torch.arange(num_examples, device=client.indices.device), _EXAMPLES_AT_ONCE):
        x, y = client.gather(positions, rng)
        passed = (
            inputs_and_slopes(task, layers, x, y) if labels == "data" else inputs_and_expected_slopes(task, layers, x)
        )
        for layer, inputs, slopes in passed:
            num_positions = inputs.shape[1]
            inputs, slopes = inputs.flatten(0, 1), slopes.flatten(0, 1)
            a, b = inputs.T @ inputs / num_examples, slopes.T @ slopes / (num_examples * num_positions)
            if split == "released":
                a, b = a / num_positions**2, b * num_positions**2
            old_a, old_b = sums.get(layer.name, (torch.zeros_like(a), torch.zeros_like(b)))
            sums[layer.name] = (old_a.add_(a), old_b.add_(b))
    return sums


_EXAMPLES_AT_ONCE = 256


def input_moments(task: Task, vector: Tensor, client: Client, rng: torch.Generator) -> dict[str, Tensor]:
    """A of every layer alone, over all of the client's data at `vector`; nothing is differentiated."""
    model = task.model
    layers = find_layers(model)
    model.load(vector)
    model.module.eval()
    sums = {layer.name: torch.zeros((), device=vector.device) for layer in layers}
    for positions in torch.split(torch.arange(len(client), device=client.indices.device), _EXAMPLES_AT_ONCE):
        x, _ = client.gather(positions, rng)
        with torch.no_grad(), _recorded(layers) as recorded:
            model(x)
        for layer in layers:
            inputs = layer.rows(recorded[layer.name][0]).flatten(0, 1)
            sums[layer.name] = sums[layer.name] + inputs.T @ inputs / len(client)
    return sums


def inputs_and_slopes(task: Task, layers: list[Layer], x: Tensor, y: Tensor) -> Iterator[tuple[Layer, Tensor, Tensor]]:
    """Of every layer its inputs (n, positions, in + 1), and each example's gradient at its outputs (n, positions, out).

    The gradient of example i with respect to M is the sum over positions of slopes[i] inputs[i]^T.
    """
    with _recorded(layers) as recorded:
        loss = task.likelihood.loss(task.model(x), y, "sum")  # so that examples do not share a 1/n
        gradients = torch.autograd.grad(loss, [recorded[layer.name][1] for layer in layers])
    for layer, gradient in zip(layers, gradients, strict=True):
        slopes = gradient.flatten(2).transpose(1, 2) if gradient.dim() == 4 else gradient[:, None]
        yield layer, layer.rows(recorded[layer.name][0]), slopes


def inputs_and_expected_slopes(task: Task, layers: list[Layer], x: Tensor) -> Iterator[tuple[Layer, Tensor, Tensor]]:
    """The same for each label c in turn, times sqrt(p(c)), (n C, positions, out): squares add up to an expectation."""
    outputs, found = inputs_and_jacobians(task.model, layers, x)
    probabilities = outputs.softmax(1)
    distances = torch.eye(outputs.shape[1], device=x.device) - probabilities[:, None]  # (n, C, C): of labels
    roots = probabilities.sqrt()[:, :, None] * distances
    for layer, inputs, derivatives in found:
        yield layer, inputs, torch.einsum("ncj,njpo->ncpo", roots, derivatives).flatten(0, 1)


def inputs_and_jacobians(
    model: FlatModel, layers: list[Layer], x: Tensor
) -> tuple[Tensor, list[tuple[Layer, Tensor, Tensor]]]:
    """Compute the network's outputs (n, C), and of each layer its inputs and the outputs' derivatives by its own.

    Inputs are (n, positions, in + 1), derivatives (n, C, positions, out): that of output c of example i with respect to
    M is the sum over positions of derivatives[i, c] inputs[i]^T.
    """
    with _recorded(layers) as recorded:
        outputs = model(x)
        own = [recorded[layer.name][1] for layer in layers]
        rows = [torch.autograd.grad(outputs[:, c].sum(), own, retain_graph=True) for c in range(outputs.shape[1])]
    found = []
    for number, layer in enumerate(layers):
        derivatives = torch.stack([row[number] for row in rows], dim=1)  # (n, C, out) or (n, C, out, height, width)
        derivatives = derivatives[:, :, None] if derivatives.dim() == 3 else derivatives.flatten(3).transpose(2, 3)
        found.append((layer, layer.rows(recorded[layer.name][0]), derivatives))
    return outputs.detach(), found


@contextmanager
def _recorded(layers: list[Layer]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """While it lasts, a forward pass leaves here the inputs and the outputs of each layer."""
    recorded: dict[str, tuple[Tensor, Tensor]] = {}
    names: dict[nn.Module, str] = {layer.module: layer.name for layer in layers}

    def on_forward(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if names[module] in recorded:
            raise UnsuitableError(f"a network that uses each of its layers once ({names[module]} is used again)")
        recorded[names[module]] = (arguments[0].detach(), output)
        return output.clone()  # what follows may work in place

    handles = [layer.module.register_forward_hook(on_forward) for layer in layers]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def damp(pairs: Sequence[tuple[Tensor, Tensor]], strength: float, norm: Norm) -> list[tuple[Tensor, Tensor]]:
    """(A + pi sqrt(strength) I, B + sqrt(strength) / pi I) of each layer, eqs. 30-31 of FedLPA.

    pi is 1 where A or B is zero. The layers' ratios are read together: a read waits for the device.
    """
    ratios = [1.0] * len(pairs)
    if norm == "trace":
        ratios = torch.stack([(a.trace() / len(a)) / (b.trace() / len(b)) for a, b in pairs]).tolist()
    elif norm == "frobenius":
        ratios = torch.stack([(a.norm() / len(a) ** 0.5) / (b.norm() / len(b) ** 0.5) for a, b in pairs]).tolist()
    return [_damp(a, b, strength, ratio) for (a, b), ratio in zip(pairs, ratios, strict=True)]


def _damp(a: Tensor, b: Tensor, strength: float, ratio: float) -> tuple[Tensor, Tensor]:
    pi = ratio**0.5 if 0 < ratio < float("inf") else 1.0
    root = strength**0.5
    return a + pi * root * _eye(a), b + root / pi * _eye(b)


def _eye(like: Tensor) -> Tensor:
    return torch.eye(len(like), dtype=like.dtype, device=like.device)


def upper_triangle(symmetric: Tensor) -> Tensor:
    """The entries on and above the diagonal, (n (n + 1) / 2,): all that needs to be sent."""
    rows, columns = torch.triu_indices(*symmetric.shape, device=symmetric.device)
    return symmetric[rows, columns]


def from_upper_triangle(entries: Tensor) -> Tensor:
    size = int(((8 * len(entries) + 1) ** 0.5 - 1) / 2)
    rows, columns = torch.triu_indices(size, size, device=entries.device)
    symmetric = entries.new_zeros(size, size)
    symmetric[rows, columns] = entries
    symmetric[columns, rows] = entries
    return symmetric


_STEPS_PER_LOOK = 8


@dataclass(frozen=True)
class Posteriors:
    """One layer's Gaussians: means M_k, precisions A_k x B_k and weights p_k that sum to one, all in float64."""

    a: Tensor  # (K, in + 1, in + 1)
    b: Tensor  # (K, out, out)
    means: Tensor  # (K, out, in + 1)
    weights: Tensor  # (K,)

    @cached_property
    def _stacked(self) -> tuple[Tensor, Tensor]:
        """All p_k B_k, (out K, out), row by row of the matrices, and all A_k, (K in, in), one below the other."""
        weighted = self.weights[:, None, None] * self.b
        return weighted.transpose(0, 1).flatten(0, 1), self.a.flatten(0, 1)

    def apply(self, matrix: Tensor) -> Tensor:
        """sum_k p_k B_k M A_k: the precision of the product, applied to M; two large products for all clients."""
        stacked_b, stacked_a = self._stacked
        return (stacked_b @ matrix).view(len(matrix), -1) @ stacked_a

    def mean_factor(self, factors: Tensor) -> Tensor:
        """sum_k p_k A_k, or of B_k."""
        return torch.einsum("k,kij->ij", self.weights, factors)

    def right_side(self) -> Tensor:
        """sum_k p_k B_k M_k A_k."""
        return torch.einsum("k,kij->ij", self.weights, self.b @ self.means @ self.a)

    def residual(self, matrix: Tensor) -> float:
        """How far M is from solving eq. 13, relative to the right side."""
        right = self.right_side()
        return float((self.apply(matrix) - right).norm() / right.norm().clamp(min=torch.finfo(right.dtype).tiny))

    def approximate_inverse(self) -> Callable[[Tensor], Tensor]:
        """R -> (sum p B)^-1 R (sum p A)^-1, as if A and B were independent: eq. 35 with weights that sum to one."""
        mean_a, mean_b = self.mean_factor(self.a), self.mean_factor(self.b)
        root_a, root_b = torch.linalg.cholesky(mean_a), torch.linalg.cholesky(mean_b)
        return lambda right: torch.cholesky_solve(torch.cholesky_solve(right, root_b).T, root_a).T

    def descend(self, start: Tensor, num_steps: int, lr: float) -> Tensor:
        """Gradient descent on the mean squared error of eq. 14: a fixed number of steps, nothing checked."""
        right = self.right_side()
        matrix = start.clone()
        for _ in range(num_steps):
            matrix -= 2 * lr / matrix.numel() * self.apply(self.apply(matrix) - right)
        return matrix

    def conjugate_gradients(self, start: Tensor, tolerance: float, max_steps: int) -> tuple[Tensor, int]:
        """Solve eq. 13 to a relative residual, and say in how many steps. The approximate inverse preconditions.

        A look at the residual waits for the device: on a GPU several steps are taken before the next one.
        """
        steps_per_look = 1 if start.device.type == "cpu" else _STEPS_PER_LOOK
        seen: list[tuple[Tensor, Tensor]] = []  # matrices, and whether they solve it
        right, precondition = self.right_side(), self.approximate_inverse()
        target = tolerance * right.norm()
        matrix = start.clone()
        residual = right - self.apply(matrix)
        direction = conditioned = precondition(residual)
        product = (residual * conditioned).sum()
        for step in range(max_steps):
            seen.append((matrix, residual.norm() <= target))
            if len(seen) == steps_per_look or step == max_steps - 1:
                solved = torch.stack([flag for _, flag in seen]).tolist()
                if True in solved:
                    first = solved.index(True)
                    return seen[first][0], step + 1 - len(seen) + first
                seen = []
            image = self.apply(direction)
            length = product / (direction * image).sum()
            matrix = matrix + length * direction
            residual = residual - length * image
            conditioned = precondition(residual)
            product, before = (residual * conditioned).sum(), product
            direction = conditioned + product / before * direction
        return matrix, max_steps
