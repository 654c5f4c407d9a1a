"""Kernels for NumPy arrays on the CPU, compiled by numba.

Their results have the same bytes as those of the pure versions in `qcomp.core`. They take flat, C-contiguous, aligned
arrays of float32 or float64, and uint8 payloads at any address, without checks. They need ``pip install qcomp[numba]``.
The first call of a kernel compiles it, or reads it from numba's cache on disk.
"""

from qcomp.backends.numba_cpu.memory import release_memory
from qcomp.backends.numba_cpu.threads import default_threads, get_num_threads, set_num_threads

__all__ = ["default_threads", "get_num_threads", "release_memory", "set_num_threads"]
