"""Imports mpi4py's MPI module, or raises an error that says how to install it. Importing it starts MPI."""

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, but no MPI library
    raise ImportError(
        "an MPI communicator needs mpi4py and an MPI library: pip install 'qcomp[mpi]'"
    ) from error

__all__ = ["MPI"]
