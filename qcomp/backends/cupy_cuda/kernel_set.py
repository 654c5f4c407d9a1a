"""The kernel set for CuPy arrays."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from array_api_compat import is_cupy_array

from qcomp.backends.cupy_cuda.launches import CudaKernels, Launch
from qcomp.backends.cupy_cuda.sources import source
from qcomp.core.numeric.arrays import Array

OPTIONS = ("--std=c++17", "--fmad=false")
"""Compiler options. Results depend neither on them nor on the options that CuPy adds; see ``arithmetic.cuh``."""


class CupyRuntime:
    """CuPy, imported only when a CuPy array exists, since CuPy needs a GPU."""

    def owns(self, x: Array) -> bool:
        """Return whether x is a CuPy array."""
        return bool(is_cupy_array(x))

    def address(self, x: Any) -> int:
        """Return the address of an array's first element in device memory."""
        return int(x.data.ptr)

    def empty(self, shape: tuple[int, ...], dtype: str, *, like: Any) -> Any:
        """Return a new array on the device of ``like``."""
        with like.device:
            return _cupy().empty(shape, dtype=_dtype(dtype, like))

    def zeros(self, shape: tuple[int, ...], dtype: str, *, like: Any) -> Any:
        """Return a new array of zeros on the device of ``like``."""
        with like.device:
            return _cupy().zeros(shape, dtype=_dtype(dtype, like))

    def run(self, launch: Launch, *, like: Any) -> None:
        """Start a kernel on the current stream of the device of ``like``."""
        with like.device:
            kernel = _kernel(launch.name, like.device.id)
            kernel((launch.grid,), (launch.block,), launch.arguments)


class CupyKernels(CudaKernels):
    """Kernels for C-contiguous CuPy arrays of float32, float16 or bfloat16."""

    def __init__(self) -> None:
        super().__init__("cupy", CupyRuntime())


KERNELS = CupyKernels()


def _cupy() -> Any:
    return import_module("cupy")


def _dtype(name: str, like: Array) -> Any:
    """Return a dtype; NumPy knows the name "bfloat16" only after ml_dtypes is imported."""
    return like.dtype if like.dtype.name == name else name


@functools.cache
def _kernel(name: str, device: int) -> Any:  # noqa: ARG001 - one module per device
    return _cupy().RawModule(code=source(name), options=OPTIONS, backend="nvrtc").get_function(name)
