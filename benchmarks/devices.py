"""The device of the GPU benchmark: a CUDA device, or the CPU for a dry run."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import baselines
import numpy as np
import torch
from timing import Timer, machine, timer

__all__ = ["Cpu", "Cuda", "Device"]

Array = Any
Context = AbstractContextManager[object]


class Device(Protocol):
    """The operations that the benchmark needs from a device."""

    libraries: dict[str, str]
    """The kernel set for the arrays of each library, "torch" or "cupy"."""
    packs: bool
    """Whether `packbits` is possible."""

    def describe(self) -> dict[str, Any]:
        """Return the description for the results."""
        ...

    def array(self, library: str, values: torch.Tensor) -> Array:
        """Return a tensor of this device as an array of a library, on the same memory."""
        ...

    def tensor(self, size: int) -> torch.Tensor:
        """Return normally distributed float32 of shape (size,)."""
        ...

    def timer(self, call: Callable[[], object], context: Callable[[], Context]) -> Timer:
        """Return a `timing.timer` that uses this device's clock."""
        ...

    def packbits(self, bits: torch.Tensor) -> Any:
        """Pack a tensor of bool."""
        ...

    def unpackbits(self, codes: Any) -> torch.Tensor:
        """Unpack the result of `packbits`."""
        ...


class Cuda:
    """The first CUDA device. All libraries use the default stream, so that torch's events time each of them."""

    def __init__(self) -> None:
        self.libraries = {"torch": "triton"}
        self.packs = importlib.util.find_spec("cupy") is not None
        if self.packs:
            self.libraries["cupy"] = "cupy"

    def describe(self) -> dict[str, Any]:
        """Return the device's name, and the versions."""
        versions = {name: str(importlib.import_module(name).__version__) for name in self.libraries}
        return (
            machine() | {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)} | versions
        )

    def array(self, library: str, values: torch.Tensor) -> Array:
        """Return the tensor, or a CuPy array on its memory."""
        return values if library == "torch" else importlib.import_module(library).from_dlpack(values)

    def tensor(self, size: int) -> torch.Tensor:
        """Return a tensor on the device."""
        return torch.randn(size, device="cuda")

    def timer(self, call: Callable[[], object], context: Callable[[], Context]) -> Timer:
        """Return a timer by CUDA events."""
        return timer(call, context, seconds=event_seconds)

    def packbits(self, bits: torch.Tensor) -> Any:
        """Pack by CuPy."""
        return baselines.packbits_cupy(bits)

    def unpackbits(self, codes: Any) -> torch.Tensor:
        """Unpack by CuPy."""
        return baselines.unpackbits_cupy(codes)


class Cpu:
    """The CPU with the pure version and the wall clock, to check that the program runs; its figures mean nothing.

    NumPy takes the place of CuPy.
    """

    def __init__(self) -> None:
        self.libraries = {"torch": "pure", "cupy": "pure"}
        self.packs = True

    def describe(self) -> dict[str, Any]:
        """Return a description that marks the results as a dry run."""
        return machine() | {"device": "none: a dry run on the CPU"}

    def array(self, library: str, values: torch.Tensor) -> Array:
        """Return the tensor, or a NumPy array on its memory."""
        return values if library == "torch" else values.numpy()

    def tensor(self, size: int) -> torch.Tensor:
        """Return a tensor in the memory of the CPU."""
        return torch.from_numpy(np.random.default_rng(0).standard_normal(size, dtype=np.float32))

    def timer(self, call: Callable[[], object], context: Callable[[], Context]) -> Timer:
        """Return a timer by the wall clock."""
        return timer(call, context, least=0)

    def packbits(self, bits: torch.Tensor) -> Any:
        """Pack by NumPy."""
        return baselines.packbits_numpy(bits)

    def unpackbits(self, codes: Any) -> torch.Tensor:
        """Unpack by NumPy."""
        return baselines.unpackbits_numpy(codes)


def event_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the seconds of one call on the device, averaged over repeats."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1000 / repeats
