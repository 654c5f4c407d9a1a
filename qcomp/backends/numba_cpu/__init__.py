"""Kernels for NumPy arrays on the CPU, compiled by numba; they return the bytes of the pure versions in `qcomp.core`.

They take flat, C-contiguous, aligned float32 arrays and uint8 payloads at any address, without checks. They need
``pip install qcomp[numba]``. The first call of a kernel compiles it, or reads it from numba's cache on disk.
"""

from qcomp.backends.numba_cpu.adam import frozen_adam_step
from qcomp.backends.numba_cpu.codec import decode, encode
from qcomp.backends.numba_cpu.memory import release_memory
from qcomp.backends.numba_cpu.minmax import minmax_decoder, minmax_encoder
from qcomp.backends.numba_cpu.qsgd import qsgd_encoder
from qcomp.backends.numba_cpu.qsgd_decoder import qsgd_decoder
from qcomp.backends.numba_cpu.sign import sign_decoder, sign_encoder
from qcomp.backends.numba_cpu.threads import default_threads, get_num_threads, set_num_threads
from qcomp.backends.numba_cpu.vectors import (
    descend,
    finish_mean,
    in_range,
    largest_sum,
    momentum,
    nesterov,
    scale,
)

__all__ = [
    "decode",
    "default_threads",
    "descend",
    "encode",
    "finish_mean",
    "frozen_adam_step",
    "get_num_threads",
    "in_range",
    "largest_sum",
    "minmax_decoder",
    "minmax_encoder",
    "momentum",
    "nesterov",
    "qsgd_decoder",
    "qsgd_encoder",
    "release_memory",
    "scale",
    "set_num_threads",
    "sign_decoder",
    "sign_encoder",
]
