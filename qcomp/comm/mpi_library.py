"""Imports mpi4py's MPI module, which starts MPI, or raises an error that says how to install it.

`require_started` checks that MPI runs.
"""

from qcomp.core.errors import CommunicatorError

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, but no MPI library
    raise ImportError(
        "an MPI communicator needs mpi4py and an MPI library: pip install 'qcomp[mpi]'"
    ) from error

__all__ = ["MPI", "require_started"]


def require_started() -> None:
    """Raise CommunicatorError if MPI has not begun, or has ended."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        ended = "has ended" if MPI.Is_finalized() else "has not begun, as after mpi4py.rc(initialize=False)"
        raise CommunicatorError(
            f"MPI {ended}: make communicators between MPI.Init_thread() and MPI.Finalize()"
        )
