"""Shared by the two CuPy examples: assigns a GPU to every rank, or reports what is missing, and trains."""

import importlib
import sys
from typing import Any

import mpi_numpy
import numpy as np

import qcomp

NO_CUPY, NO_GPU, TOO_FEW_GPUS, NO_NCCL = 1, 2, 3, 4
MISSING = {
    NO_CUPY: "CuPy: pip install 'qcomp[cuda]'",
    NO_GPU: "a CUDA device that CuPy can use",
    TOO_FEW_GPUS: "a GPU of its own, which NCCL requires for every rank",
    NO_NCCL: "CuPy with NCCL: NVIDIA's nccl for it",
}


def start(*, nccl: bool) -> qcomp.comm.Communicator:
    """Return the world once each rank has its GPU; exit all ranks with status 2 if any rank lacks something."""
    comm = qcomp.comm.world()
    missing = take_gpu(local_rank(comm), nccl=nccl)
    # All ranks share the result, so that none waits for a rank that has exited.
    found = comm.all_gather(np.array([missing], dtype=np.uint8), [1] * comm.size)
    lacking = {rank: int(x[0]) for rank, x in enumerate(found) if x[0]}
    if lacking:
        if comm.rank == 0:
            first, what = next(iter(lacking.items()))
            print(
                f"{len(lacking)} of {comm.size} ranks cannot start: rank {first} lacks {MISSING[what]}",
                file=sys.stderr,
            )
        raise SystemExit(2)
    return comm


def take_gpu(number: int, *, nccl: bool) -> int:
    """Select this rank's GPU in CuPy; return the code of what is missing, or 0."""
    try:
        import cupy  # noqa: PLC0415  (it may be missing)
    except ImportError:
        return NO_CUPY
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        count = 0
    if not count:
        return NO_GPU
    if nccl and number >= count:
        return TOO_FEW_GPUS
    if nccl and not importlib.import_module("cupy.cuda.nccl").available:
        return NO_NCCL
    cupy.cuda.Device(number % count).use()
    return 0


def local_rank(comm: qcomp.comm.Communicator) -> int:
    """Return the number of this rank on its machine."""
    if comm.size == 1:
        return 0
    from mpi4py import MPI  # noqa: PLC0415  (starts MPI)

    return int(MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).Get_rank())


def run(comm: qcomp.comm.Communicator) -> None:
    """Train with the functions of mpi_numpy.py, but with CuPy in place of NumPy."""
    import cupy  # noqa: PLC0415  (it may be missing)

    mpi_numpy.xp = cupy
    weights: Any = mpi_numpy.train(*mpi_numpy.generate_data(), comm)
    mpi_numpy.check_identical(cupy.asnumpy(weights), comm)
