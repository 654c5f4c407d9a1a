"""Communicators, which move byte buffers between ranks, independent of compression."""

import importlib
from typing import TYPE_CHECKING, Any

from qcomp.comm.base import Communicator
from qcomp.comm.broadcasting import broadcast
from qcomp.comm.launch import world
from qcomp.comm.local import LocalCommunicator, run_local

if TYPE_CHECKING:
    from qcomp.comm.authenticated import AuthenticatedCommunicator
    from qcomp.comm.folder import FolderCommunicator
    from qcomp.comm.mailbox import FolderMailbox
    from qcomp.comm.mpi import MPICommunicator
    from qcomp.comm.nccl import NCCLCommunicator
    from qcomp.comm.torch_dist import TorchCommunicator

__all__ = [
    "AuthenticatedCommunicator",
    "Communicator",
    "FolderCommunicator",
    "FolderMailbox",
    "LocalCommunicator",
    "MPICommunicator",
    "NCCLCommunicator",
    "TorchCommunicator",
    "broadcast",
    "run_local",
    "world",
]

# Importing mpi4py starts MPI, and importing torch is slow, so both wait for first use, as do modules that need NumPy.
_MODULES = {
    "AuthenticatedCommunicator": "authenticated",
    "FolderCommunicator": "folder",
    "FolderMailbox": "mailbox",
    "MPICommunicator": "mpi",
    "NCCLCommunicator": "nccl",
    "TorchCommunicator": "torch_dist",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"qcomp.comm.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
