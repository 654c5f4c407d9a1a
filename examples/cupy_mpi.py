"""The task of mpi_numpy.py on GPUs: CuPy arrays over MPI, which reads them on the device if it can.

Start it with ``mpirun -n 2 python -m mpi4py examples/cupy_mpi.py``; ranks may share a GPU. qcomp detects
Open MPI and MPICH built for CUDA; QCOMP_CUDA_AWARE_MPI=0 stages all buffers through page-locked host memory.
"""

import cupy_ranks


def main() -> None:
    """Train, and print how MPI transfers the buffers."""
    comm = cupy_ranks.start(nccl=False)
    if comm.rank == 0:
        aware = getattr(comm, "cuda_aware", False)
        print("MPI reads the GPU's memory" if aware else "buffers are staged through page-locked host memory")
    cupy_ranks.run(comm)


if __name__ == "__main__":
    main()
