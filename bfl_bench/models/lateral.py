"""A shared network and a private one side by side: the private one's outputs flow into the shared one."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from bfl_bench.errors import UnsuitableError
from bfl_bench.models.flat import Layout
from bfl_bench.models.gaussian import GaussianEmbedding

SHARED, GATES = "shared.", "gates."  # how the names of parameters begin


class Lateral(nn.Module):
    """After every layer with parameters: shared + gate x private, with one gate per layer or one per unit of it.

    Both start from the input; the private network hears nothing of the shared one. With all gates at zero the shared
    one is alone. Who trains it keeps gates from becoming negative: a clamp in here would take a closed gate's gradient.
    """

    def __init__(self, shared: nn.Module, private: nn.Module, gate_per_unit: bool = False) -> None:
        super().__init__()
        if not isinstance(shared, nn.Sequential) or not isinstance(private, nn.Sequential):
            raise UnsuitableError(
                "a sequence of layers, to which a private network can be coupled, or method.private=none"
            )
        self.shared, self.private = shared, private
        self._gated = [any(True for _ in layer.parameters()) for layer in shared]
        layers = [layer for layer, gated in zip(shared, self._gated, strict=True) if gated]
        self.gates = nn.ParameterList([0.1 * torch.rand(_units(layer) if gate_per_unit else ()) for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        shared = private = x
        gates = iter(self.gates)
        for layer, own, gated in zip(self.shared, self.private, self._gated, strict=True):
            shared, private = layer(shared), own(private)
            if gated:
                shared = shared + next(gates) * private
        return shared


def _units(layer: nn.Module) -> tuple[int, ...]:
    """Find the shape of one number per unit, which broadcasts over a layer's outputs."""
    weights = dict(layer.named_parameters())
    recurrent = [weight for name, weight in weights.items() if name.endswith("weight_hh_l0")]
    if recurrent:
        return (recurrent[0].shape[1],)
    if "weight" not in weights:
        raise UnsuitableError("a sequence of layers with weights, or another value of method.private")
    weight = weights["weight"]
    if isinstance(layer, nn.Embedding | GaussianEmbedding):
        return (weight.shape[1],)
    return (len(weight), *[1] * (weight.dim() - 2))


def count_shared(layout: Layout) -> tuple[int, int]:
    """How many points and how many means are shared: all, in a network without a private part.

    The vector has, of each kind, the shared ones first, then the private ones in the same order; then the gates.
    """
    entries = [entry for entry in layout.entries if entry.stop <= layout.means.stop]
    if not any(entry.name.startswith(SHARED) for entry in entries):
        return layout.points.stop, layout.means.stop - layout.means.start
    shared = [entry for entry in entries if entry.name.startswith(SHARED)]
    points = sum(entry.shape.numel() for entry in shared if entry.stop <= layout.points.stop)
    return points, sum(entry.shape.numel() for entry in shared) - points


def name_plainly(plain: Sequence[str], names: Iterable[str]) -> dict[str, str]:
    """Say which tensor of a network made of a plain one is which of the plain one's, by its name there.

    The names differ in that a shared network's begin with `shared.`, and those of Gaussian LSTMs lack `lstm.`.
    """
    known = set(names)
    prefix = SHARED if any(name.startswith(SHARED) for name in known) else ""
    candidates = {name: (f"{prefix}{name}", f"{prefix}{name.replace('lstm.', '')}") for name in plain}
    return {name: own for name, pair in candidates.items() for own in dict.fromkeys(pair) if own in known}


def load_plain(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a plain network the parameters of one that was made of it, with Gaussian layers or a private part."""
    initial = module.state_dict()  # integer buffers, which count batches, stay
    module.load_state_dict(initial | {name: tensors[own] for name, own in name_plainly([*initial], tensors).items()})
