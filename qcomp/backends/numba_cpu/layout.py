"""What the launchers of all families share: where a payload's parts lie, and the guard before a buffer is donated."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from qcomp.backends.numba_cpu import threads
from qcomp.backends.numba_cpu.jit import Floats
from qcomp.backends.numba_cpu.primitives import FRESH, IN_PLACE, NO_RESIDUAL, OVER_INPUT
from qcomp.backends.numba_cpu.vectors import largest_sum
from qcomp.core.arrays import LIMIT
from qcomp.core.buckets import bucket_count, padded_size

__all__ = ["EMPTY", "Mix", "code_bytes", "encode", "mix"]

EMPTY: Floats = np.empty(0, dtype=np.float32)
"""Stands for an array that there is none of."""

Mix = tuple[Floats, float, float]
"""m, keep and new: keep * m + new * x is what is compressed."""

_SAFE = LIMIT / 2
"""Rounding cannot bring what is below this to the limit."""
_TINY = 2.0**-126


def code_bytes(size: int, bucket_size: int, bits: int) -> int:
    """Return the bytes of the packed codes of ``size`` elements."""
    return padded_size(size, bucket_size) * bits // 8


def encode(
    work: Callable[[Floats, Floats, int, int, int], tuple[int, int]],
    x: Floats,
    residual: Floats | None,
    residual_out: Floats | None,
    bucket_size: int,
    limit: float | None,
    *,
    blended: bool,
    largest_error: float,
) -> float | None:
    """Run an encoder's kernel over all buckets.

    Parameters
    ----------
    work : callable
        ``work(residual, out, mode, first, last)`` encodes a run of buckets, and returns the first bucket with a value
        that is too large, or -1, and the bits of the largest scale.
    x, residual, residual_out, bucket_size, limit
        Those of the encoder.
    blended : bool
        Whether something else than x is compressed.
    largest_error : float
        No element of the new residual is larger than this times the largest scale, or times 2**-126 if that is larger.

    Returns
    -------
    float or None
        See `qcomp.backends.numba_cpu.sign.sign_encode`.
    """
    if residual is None or residual_out is None:
        old, new, mode = EMPTY, EMPTY, NO_RESIDUAL
    elif residual_out is x:
        assert not blended
        old, new, mode = residual, x, OVER_INPUT
    elif residual_out is not residual:
        old, new, mode = residual, residual_out, FRESH
    else:
        if limit is None and not blended:
            limit = largest_sum(x, residual)
        if limit is None or not limit < _SAFE:  # also for a NaN
            # Something may be too large: find out beside the residual, which must then stay as it is.
            beside = np.empty_like(residual)
            rest = encode(
                work, x, residual, beside, bucket_size, None, blended=blended, largest_error=largest_error
            )
            if rest is not None:
                residual[...] = beside
            return rest
        old, new, mode = residual, residual, IN_PLACE
    results = threads.run(
        lambda first, last: work(old, new, mode, first, last), bucket_count(x.size, bucket_size), bucket_size
    )
    if any(failed >= 0 for failed, _ in results):
        return None
    scale: float = struct.unpack("<f", struct.pack("<I", max(bits for _, bits in results)))[0]
    return largest_error * max(scale, _TINY)


def mix(blend: Mix | None) -> tuple[Floats, np.float32, np.float32]:
    """Return a mix as the kernels take it: an empty m for none."""
    if blend is None:
        return EMPTY, np.float32(0), np.float32(0)
    return blend[0], np.float32(blend[1]), np.float32(blend[2])
