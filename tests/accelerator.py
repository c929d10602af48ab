"""A pretend accelerator: tensors on a device of their own that are computed on the CPU.

It behaves as a GPU does where that matters to a program: tensors of two devices do not mix, a tensor has no NumPy
array, and every place where the host has to wait for the device is noted with its line. So the path through a GPU is
run, and its waiting counted, on a machine that has none. The numbers are those of the CPU.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
aten = torch.ops.aten

# Functions whose result's shape depends on values, or that look at values: the host waits for them.
_WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten._linalg_check_errors.default,
    aten._linalg_eigh.default,
}
_INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}


class Held(Tensor):
    """A tensor on the pretend device; `held` is the CPU tensor that has its numbers."""

    held: Tensor
    reads: ClassVar[list[str] | None] = None  # where the host waited, while somebody counts

    @staticmethod
    def __new__(cls, held: Tensor) -> "Held":
        with torch.inference_mode(False):  # a wrapper made in inference mode has no views
            made: Held = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=torch.device(NAME, 0),
            )
        made.held = held
        return made

    def __init__(self, held: Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Sequence[type], arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        return _compute(function, arguments, options or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Held({self.held!r})"

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy")

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: "Held") -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held


def _note(what: str) -> None:
    if Held.reads is None:
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and f"{'bfl_bench'}/" not in frame.f_code.co_filename:
        frame = frame.f_back
    where = frame.f_code.co_filename.rpartition("bfl_bench/")[2]
    Held.reads.append(f"{where}:{frame.f_code.co_name}: {what}")


def _compute(function: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    name = str(function).removeprefix("aten.")
    tensors = [leaf for leaf in tree_iter((arguments, options)) if isinstance(leaf, Tensor)]
    target = options.pop("device", None)
    if function in (aten._to_copy.default, aten.copy_.default):
        source = tensors[-1]
        if function is aten.copy_.default:
            to_device, waits = isinstance(tensors[0], Held), not (len(arguments) > 2 and arguments[2])
        else:
            to_device, waits = torch.device(target or NAME).type == NAME, not options.get("non_blocking")
        if isinstance(source, Held) and not to_device:
            _note(f"{name} to the host")
        elif to_device and not isinstance(source, Held) and waits:
            _note(f"{name} to the device")
    else:
        for tensor in tensors:
            if not isinstance(tensor, Held) and tensor.dim():  # a number may lie on the host, as with CUDA
                raise RuntimeError(f"Expected all tensors to be on the same device, found {NAME}:0 and cpu! ({name})")
        if function in _WAITING:
            _note(name)
        if function in _INDEXING and any(
            leaf.dtype in (torch.bool, torch.uint8) for leaf in arguments[1] if leaf is not None
        ):
            _note(f"{name} by a mask")
    given, named = tree_map(_unwrap, (tuple(arguments), options))
    result = function(*given, **named)
    if target is not None and torch.device(target).type == "cpu":
        return result
    if function is aten.copy_.default and not isinstance(arguments[0], Held):
        return arguments[0]
    changed = {id(leaf.held): leaf for leaf in tensors if isinstance(leaf, Held)}
    for leaf in changed.values():
        if leaf.shape != leaf.held.shape:  # resized in place
            Tensor.data.__set__(leaf, Held(leaf.held))  # type: ignore[attr-defined]

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return changed[id(leaf)] if id(leaf) in changed else Held(leaf)

    return tree_map(wrap, result)


def _unwrap(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, Held) else leaf


def _fall_back(function: Any, *arguments: Any, **options: Any) -> Any:
    return _compute(function, arguments, options)


def _empty(size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return Held(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any) -> Tensor:
    return Held(torch.empty_strided(size, stride, dtype=dtype))


_kept: list[object] = []  # registrations last as long as these objects


def set_up() -> torch.device:
    """Make the device known to torch, once in a process; return it."""
    if not _kept:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_DummyBackendModule())
        fallback = torch.library.Library("_", "IMPL")
        fallback.fallback(_fall_back, "PrivateUse1")
        kernels = torch.library.Library("aten", "IMPL")
        kernels.impl("empty.memory_format", _empty, "PrivateUse1")
        kernels.impl("empty_strided", _empty_strided, "PrivateUse1")
        _kept.extend([fallback, kernels])
        make: Callable[..., Tensor] = torch.tensor

        def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
            made = make(data, **options)
            return made if device is None else made.to(device)

        torch.tensor = tensor  # torch's own goes below the Python dispatch
    return torch.device(NAME, 0)


@contextmanager
def count_reads() -> Iterator[list[str]]:
    """Note every wait for the device within, as `file:function: operation`."""
    before, Held.reads = Held.reads, []
    try:
        yield Held.reads
    finally:
        Held.reads = before
