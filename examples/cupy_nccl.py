"""The task of mpi_numpy.py on GPUs: CuPy arrays over NCCL, with MPI to set up the ranks.

Start it with ``mpirun -n 2 python -m mpi4py examples/cupy_nccl.py`` and a GPU for each rank of a machine.
"""

import cupy_ranks

import qcomp


def main() -> None:
    """Train over NCCL."""
    comm = cupy_ranks.start(nccl=True)
    cupy_ranks.run(qcomp.comm.NCCLCommunicator(comm))


if __name__ == "__main__":
    main()
