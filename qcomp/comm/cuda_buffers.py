"""Buffers in the memory of a CUDA device that MPI itself reads and writes, where it can."""

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

__all__ = ["copy_of", "empty", "finish_queued", "is_on_device", "reads_devices", "stage", "to_library"]

Array = Any

_VARIABLE = "QCOMP_CUDA_AWARE_MPI"


def reads_devices(comm: MPI.Intracomm) -> bool:
    """Return whether MPI reads and writes the memory of CUDA devices: what it says itself, or the environment.

    Raises
    ------
    ValueError
        If QCOMP_CUDA_AWARE_MPI is neither 0 nor 1.
    """
    chosen = os.environ.get(_VARIABLE, "")
    if chosen:
        if chosen not in ("0", "1"):
            raise ValueError(f"{_VARIABLE} is {chosen!r}; expected '0' or '1'")
        return chosen == "1"
    # MPI 4.1 has a list such as "system,mpi,cuda:device". Open MPI and MPICH have a function besides.
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
    """Return whether an array is in the memory of a CUDA device and of a library whose buffers MPI can be given."""
    if array_api_compat.is_torch_array(x):
        return bool(x.is_cuda)
    return bool(array_api_compat.is_cupy_array(x))


def stage(x: Array, *, name: str) -> Array:
    """Return a buffer where MPI reads it: as it is on a CUDA device, otherwise in host memory."""
    if not is_on_device(x):
        return to_host(x, name=name)
    check_buffer(x, name=name)
    if array_api_compat.is_torch_array(x):
        return x.detach().contiguous()
    return sys.modules["cupy"].ascontiguousarray(x)


def empty(size: int, *, like: Array, staged: Array) -> Array:
    """Return where MPI writes so many bytes: in memory as that of a staged buffer, on the way to that of ``like``."""
    if array_api_compat.is_torch_array(staged):
        return staged.new_empty((size,))
    if array_api_compat.is_cupy_array(staged):
        with staged.device:
            return sys.modules["cupy"].empty((size,), dtype=np.uint8)
    if array_api_compat.is_torch_array(like) and like.is_cuda:
        return like.new_empty((size,), device="cpu", pin_memory=True).numpy()
    return np.empty(size, dtype=np.uint8)


def finish_queued(buffers: Iterable[Array]) -> None:
    """Wait until what is queued on the current streams of these buffers is done: MPI knows nothing of streams."""
    for x in {id(x): x for x in buffers}.values():
        if array_api_compat.is_torch_array(x):
            sys.modules["torch"].cuda.current_stream(x.device).synchronize()
        elif array_api_compat.is_cupy_array(x):
            with x.device:
                sys.modules["cupy"].cuda.get_current_stream().synchronize()


def copy_of(x: Array) -> Array:
    """Return a copy of a staged buffer."""
    return x.clone() if array_api_compat.is_torch_array(x) else x.copy()


def to_library(x: Array, like: Array) -> Array:
    """Return what has arrived as an array of another array's library, on its device."""
    return x if is_on_device(x) else from_host(x, like=like)
