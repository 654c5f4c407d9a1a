"""Communicators: they move byte buffers between ranks, and know nothing of compression."""

from typing import TYPE_CHECKING, Any

from qcomp.comm.base import Communicator
from qcomp.comm.launch import world
from qcomp.comm.local import LocalCommunicator, run_local

if TYPE_CHECKING:
    from qcomp.comm.mpi import MPICommunicator

__all__ = ["Communicator", "LocalCommunicator", "MPICommunicator", "run_local", "world"]


def __getattr__(name: str) -> Any:
    # Importing mpi4py starts MPI, so that waits until somebody asks for it.
    if name == "MPICommunicator":
        from qcomp.comm.mpi import MPICommunicator  # noqa: PLC0415

        return MPICommunicator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
