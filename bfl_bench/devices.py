"""Devices that torch computes on: the one place that knows what a GPU has and a CPU has not.

What is asked of a device, its module in torch (`torch.cuda`, `torch.xpu`, ...) answers; a device that has no such
answer is treated as one with room for everything.
"""

import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bfl_bench.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """Find the device of this name; auto is the GPU that CUDA has, if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        module = torch.get_device_module(device)
        known = device.type != "meta"
    except (RuntimeError, AttributeError):
        known = False
    if not known:
        raise ConfigError("device", name, "auto, cpu, or another device of torch, such as cuda, cuda:1 or xpu")
    if device.type == "cpu":
        return torch.device("cpu")
    if not module.is_available():
        raise ConfigError("device", name, f"auto or cpu; torch sees no {_describe_kind(device)} on this machine")
    if (device.index or 0) >= module.device_count():
        *others, last = (f"{device.type}:{index}" for index in range(module.device_count()))
        here = f"{others[0]} to {last}, which are" if others else f"{last}, which is"
        raise ConfigError("device", name, f"auto, cpu, or {here} here")
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        raise ConfigError("device", name, "a device with float64, in which sums are taken") from None
    return device


def _describe_kind(device: torch.device) -> str:
    return "GPU" if device.type == "cuda" else f"device of the kind {device.type}"


def describe_device(device: torch.device) -> str:
    """Name the device as its maker does, where torch knows that."""
    found = _ask(device, "get_device_name")
    return device.type if found is None else str(found)


def bring(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a tensor to the device without waiting for it.

    From pinned memory a GPU copies by itself, while this process goes on; torch keeps that memory until then.
    """
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Tell whether so much is at most half of what is free: the rest is for the network, and for others."""
    found = _ask(device, "mem_get_info")
    return found is None or num_bytes <= found[0] / 2


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak of what was allocated on the device, or on a CPU of this process's resident memory."""
    found = _ask(device, "max_memory_allocated")
    if found is not None:
        return float(found) / 1e6
    if sys.platform == "linux":  # where getrusage starts from the peak of the process that started this one
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def generators_of(device: torch.device) -> list[torch.Generator]:
    """List torch's own generators that code on the device draws from: that of the CPU, and the device's."""
    own = None if device.type == "cpu" else getattr(torch.get_device_module(device), "default_generators", None)
    return [torch.default_generator, *([own[device.index or 0]] if own else [])]


def _ask(device: torch.device, question: str) -> Any:
    """Ask the device's module in torch; None on a CPU, and where the module has no such function."""
    if device.type in ("cpu", "meta"):
        return None
    function = getattr(torch.get_device_module(device), question, None)
    return None if function is None else function(device)
