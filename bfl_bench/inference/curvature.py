"""Curvature of a network's loss on a client's data, on the flat vector."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

from bfl_bench.aggregators.algebra import project
from bfl_bench.devices import bring
from bfl_bench.errors import UnsuitableError
from bfl_bench.inference.kronecker import find_layers, inputs_and_slopes
from bfl_bench.likelihood import Categorical
from bfl_bench.method import Client, Task

Fisher = Literal["batch_gradient", "per_sample", "model"]
"""Squares of the gradients of minibatch means; of single examples, the diagonal of the empirical Fisher; of these the
expectation over labels as the network predicts them, that of the true Fisher, a generalised Gauss-Newton matrix."""


def mean_squared_gradient(task: Task, x: Tensor, y: Tensor, chunk_size: int = 32) -> Tensor:
    """Average over examples the squared gradient of the loss at the parameters the model holds, (P,)."""
    model = task.model
    try:
        layers = find_layers(model)
        total = torch.zeros_like(model.gradient)
        for part_x, part_y in zip(torch.split(x, chunk_size), torch.split(y, chunk_size), strict=True):
            for layer, inputs, slopes in inputs_and_slopes(task, layers, part_x, part_y):
                layer.write(total, layer.read(total) + _sum_of_squares(inputs, slopes))
        return total / len(y)
    except UnsuitableError:  # other layers than linear and convolutional ones, or one used twice
        return _differentiate_singly(task, x, y, chunk_size)


def _sum_of_squares(inputs: Tensor, slopes: Tensor) -> Tensor:
    """Over examples: of the entries of their gradients (out, in + 1)."""
    if inputs.shape[1] == 1:  # one position: an outer product, whose square is that of the squares
        return slopes[:, 0].square().T @ inputs[:, 0].square()
    return (slopes.mT @ inputs).square().sum(0)


def _differentiate_singly(task: Task, x: Tensor, y: Tensor, chunk_size: int) -> Tensor:
    """Do the same for any network: a gradient of its own for every example."""
    model = task.model
    trainable = {name: value.detach() for name, value in model.module.named_parameters() if value.requires_grad}

    def loss(parameters: dict[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model.module, parameters, (example[None],))
        return task.likelihood.loss(logits, label[None])

    per_example = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    total = torch.zeros_like(model.gradient)
    entries = [entry for entry in model.layout.entries if entry.stop <= model.layout.num_trainable]
    for part_x, part_y in zip(torch.split(x, chunk_size), torch.split(y, chunk_size), strict=True):
        gradients = per_example(trainable, part_x, part_y)
        for entry in entries:
            entry.view(total).add_(gradients[entry.name].square().sum(0))
    return total / len(y)


def expected_squared_gradient(task: Task, x: Tensor) -> Tensor:
    """Average over examples the squared gradient of the loss, in expectation over labels as the network predicts, (P,).

    Every example comes once for each label that the likelihood makes for it.
    """
    with torch.no_grad():
        labels, factor = task.likelihood.expected_labels(task.model(x))
    repeated = x.repeat_interleave(len(labels) // len(x), dim=0)
    return factor * mean_squared_gradient(task, repeated, labels, chunk_size=256)


def check_expected_gradient(task: Task) -> None:
    """Refuse a network that predicts something else than one class, or one number, for an example."""
    task.model.module.eval()
    with torch.no_grad():
        outputs = task.model(task.data.low.expand(task.data.input_shape)[None])
    if outputs.dim() != 2:
        raise UnsuitableError("a network that predicts one class for an example, for its expected gradients")


def squared_gradient(task: Task, x: Tensor, y: Tensor, kind: Fisher) -> Tensor:
    """Average the squared gradients of single examples, for the labels of `model` or for their own, (P,)."""
    return expected_squared_gradient(task, x) if kind == "model" else mean_squared_gradient(task, x, y)


def diagonal_fisher(task: Task, vector: Tensor, client: Client, rng: torch.Generator, kind: Fisher) -> Tensor:
    """One pass over the client's data at `vector`, as it trains: the mean of squared gradients, (P,).

    For `batch_gradient`, sum_b |b|/n g_b^2 with g_b the gradient of the mean over minibatch b, of `local.batch_size`.
    Minibatches are shuffled, as in training: of examples stored class by class, each would be of one class, and its
    gradient many times as large.
    """
    model = task.model
    model.load(vector)
    model.module.eval()
    total = torch.zeros_like(model.gradient)
    shuffled = kind == "batch_gradient"
    order = torch.randperm(len(client), generator=rng) if shuffled else torch.arange(len(client))
    for positions in torch.split(bring(order, client.indices.device), task.local.batch_size):
        x, y = client.gather(positions, rng)
        if kind == "batch_gradient":
            gradient = model.backward(task.likelihood.loss(model(x), y))
            total.addcmul_(gradient, gradient, value=len(y) / len(client))
        else:
            total.add_(squared_gradient(task, x, y, kind), alpha=len(y) / len(client))
    return total


def clip_outliers(values: Tensor) -> Tensor:
    """Clip to two standard deviations from the mean."""
    mean, deviation = values.mean(), values.std(correction=0)
    return values.clamp(mean - 2 * deviation, mean + 2 * deviation)


LARGEST_DENSE = 3000  # parameters of a network whose Hessian is computed by automatic differentiation


def mean_hessian(task: Task, vector: Tensor, client: Client, rng: torch.Generator) -> tuple[Tensor, int]:
    """Compute the Hessian of the client's mean loss at `vector`, (P, P), and how many of its eigenvalues were repaired.

    In closed form for a single linear layer, where it is the generalised Gauss-Newton matrix: block by block for pairs
    of classes. By automatic differentiation for other networks, if they are small; there it can have negative
    eigenvalues, which a precision cannot, and these are set to zero.
    """
    model = task.model
    model.load(vector)
    model.module.eval()
    x, y = client.gather(torch.arange(len(client), device=client.indices.device), rng)
    if _is_softmax_regression(task, x):
        with torch.no_grad():
            return _softmax_hessian(x.flatten(1), model(x).softmax(1)), 0
    size = model.layout.num_trainable

    def loss(parameters: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        named = {entry.name: entry.view(parameters) for entry in model.layout.entries if entry.stop <= size}
        return task.likelihood.loss(functional_call(model.module, named, (inputs,)), labels)

    total = torch.zeros(size, size, device=vector.device)
    for part_x, part_y in zip(torch.split(x, 64), torch.split(y, 64), strict=True):
        part = jacrev(grad(loss))(vector[:size], part_x, part_y)
        total.add_(part, alpha=len(part_y) / len(y))
    return project(total)


def eigenvalues(hessian: Tensor) -> Tensor:
    """In ascending order; those that cannot be told from zero are zero.

    A softmax network has many that are zero, and rounding would give each a value of its own. Rounded entries move an
    eigenvalue by at most eps times the Frobenius norm; ten times that leaves room for sums and the algorithm.
    """
    values: Tensor = torch.linalg.eigvalsh(hessian)
    values[values < 10 * torch.finfo(values.dtype).eps * torch.linalg.matrix_norm(hessian)] = 0
    return values


def check_hessian(task: Task) -> None:
    """Refuse a network whose Hessian would be too large to compute."""
    x = torch.rand((8, *task.data.input_shape), generator=torch.Generator().manual_seed(0))
    size = task.model.layout.num_trainable
    if size > LARGEST_DENSE and not _is_softmax_regression(task, x.to(task.model.vector.device)):
        needed = f"a network of at most {LARGEST_DENSE} parameters, or of one linear layer, for its Hessian"
        raise UnsuitableError(f"{needed} (this one has {size})")


def _is_softmax_regression(task: Task, x: Tensor) -> bool:
    """Try out whether the network is a linear layer with bias on flattened inputs, before classes, and nothing else."""
    model = task.model
    tensors = list(model.module.parameters())
    if [tensor.dim() for tensor in tensors] != [2, 1] or x[0].numel() != tensors[0].shape[1]:
        return False
    if not isinstance(task.likelihood, Categorical):
        return False
    with torch.no_grad():
        return torch.allclose(model(x[:8]), F.linear(x[:8].flatten(1), *tensors))


def _softmax_hessian(x: Tensor, probabilities: Tensor) -> Tensor:
    """Mean over examples of (diag(p) - p p^T) kron [x 1][x 1]^T, in the order [weights row by row | biases], (P, P)."""
    (num_examples, num_features), num_classes = x.shape, probabilities.shape[1]
    inputs = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    hessian = torch.zeros(num_classes * (num_features + 1), num_classes * (num_features + 1), device=x.device)
    biases = num_classes * num_features
    for row in range(num_classes):
        for column in range(row + 1):
            curvature = probabilities[:, row] * (float(row == column) - probabilities[:, column])
            block = inputs.T @ (inputs * (curvature / num_examples)[:, None])  # (features + 1, features + 1)
            rows = slice(row * num_features, (row + 1) * num_features)
            columns = slice(column * num_features, (column + 1) * num_features)
            hessian[rows, columns] = block[:-1, :-1]
            hessian[columns, rows] = block[:-1, :-1].T
            hessian[rows, biases + column] = hessian[biases + column, rows] = block[:-1, -1]
            hessian[columns, biases + row] = hessian[biases + row, columns] = block[:-1, -1]
            hessian[biases + row, biases + column] = hessian[biases + column, biases + row] = block[-1, -1]
    return hessian
