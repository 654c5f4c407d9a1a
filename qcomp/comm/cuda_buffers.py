"""Buffers on a CUDA device, which a CUDA-aware MPI reads and writes directly."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from typing import Any

import array_api_compat
import numpy as np

from qcomp.comm.buffers import check_buffer, from_host, to_host
from qcomp.comm.mpi_library import MPI
from qcomp.core.numeric.arrays import Array

_VARIABLE = "QCOMP_CUDA_AWARE_MPI"


def reads_devices(comm: MPI.Intracomm) -> bool:
    """Return whether MPI accesses the memory of CUDA devices: QCOMP_CUDA_AWARE_MPI if set, else what MPI reports."""
    chosen = os.environ.get(_VARIABLE, "")
    if chosen:
        if chosen not in ("0", "1"):
            raise ValueError(f"{_VARIABLE} is {chosen!r}; expected '0' or '1'")
        return chosen == "1"
    # MPI 4.1 reports a list such as "system,mpi,cuda:device". Open MPI and MPICH also have a query function.
    info = comm.Get_info()
    kinds = (info.Get("mpi_memory_alloc_kinds") or "").split(",")
    info.Free()
    if any(kind.strip().partition(":")[0] == "cuda" for kind in kinds):
        return True
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return False


def is_on_device(x: Array) -> bool:
    """Return whether an array is on a CUDA device and of a library whose buffers MPI accepts."""
    if array_api_compat.is_torch_array(x):
        return bool(x.is_cuda)
    return bool(array_api_compat.is_cupy_array(x))


def stage(x: Any, *, name: str) -> Any:
    """Return a buffer that MPI can read: unchanged on a CUDA device, otherwise in host memory."""
    if not is_on_device(x):
        return to_host(x, name=name)
    check_buffer(x, name=name)
    if array_api_compat.is_torch_array(x):
        return x.detach().contiguous()
    return sys.modules["cupy"].ascontiguousarray(x)


def empty(size: int, *, like: Any, staged: Any) -> Any:
    """Return a receive buffer for MPI on the device of ``staged``, for data that will go to the library of ``like``."""
    if array_api_compat.is_torch_array(staged):
        return staged.new_empty((size,))
    if array_api_compat.is_cupy_array(staged):
        with staged.device:
            return sys.modules["cupy"].empty((size,), dtype=np.uint8)
    if array_api_compat.is_torch_array(like) and like.is_cuda:
        return like.new_empty((size,), device="cpu", pin_memory=True).numpy()
    return np.empty(size, dtype=np.uint8)


def finish_queued(buffers: Iterable[Any]) -> None:
    """Wait for the current streams of the devices of these buffers, since MPI ignores streams."""
    for x in {id(x): x for x in buffers}.values():
        if array_api_compat.is_torch_array(x):
            sys.modules["torch"].cuda.current_stream(x.device).synchronize()
        elif array_api_compat.is_cupy_array(x):
            with x.device:
                sys.modules["cupy"].cuda.get_current_stream().synchronize()


def copy_of(x: Any) -> Any:
    """Return a copy of a staged buffer."""
    return x.clone() if array_api_compat.is_torch_array(x) else x.copy()


def to_library(x: Any, like: Array) -> Array:
    """Return received bytes as an array in the library and on the device of ``like``."""
    return x if is_on_device(x) else from_host(x, like=like)
