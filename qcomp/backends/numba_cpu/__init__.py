"""Kernels for NumPy arrays on the CPU, compiled by numba; they return the bytes of the pure versions in `qcomp.core`.

All take flat, C-contiguous, aligned float32 arrays, and uint8 payloads at any address; they check none of this. Needs
``pip install qcomp[numba]``. The first call of a kernel compiles it, or reads it from numba's cache on disk.
"""

from qcomp.backends.numba_cpu.adam import frozen_adam_step
from qcomp.backends.numba_cpu.minmax import minmax_decode, minmax_encode
from qcomp.backends.numba_cpu.qsgd import qsgd_encode
from qcomp.backends.numba_cpu.qsgd_decoder import qsgd_decode
from qcomp.backends.numba_cpu.sign import sign_decode, sign_encode
from qcomp.backends.numba_cpu.threads import default_threads, get_num_threads, set_num_threads
from qcomp.backends.numba_cpu.vectors import finish_mean, largest, largest_sum, momentum

__all__ = [
    "default_threads",
    "finish_mean",
    "frozen_adam_step",
    "get_num_threads",
    "largest",
    "largest_sum",
    "minmax_decode",
    "minmax_encode",
    "momentum",
    "qsgd_decode",
    "qsgd_encode",
    "set_num_threads",
    "sign_decode",
    "sign_encode",
]
