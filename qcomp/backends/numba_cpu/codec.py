"""What the kernels of all families are to their callers: encoders and decoders of runs of buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qcomp.backends.numba_cpu import threads
from qcomp.backends.numba_cpu.jit import Floats
from qcomp.backends.numba_cpu.primitives import FRESH, IN_PLACE, NO_RESIDUAL, OVER_INPUT
from qcomp.backends.numba_cpu.stream import pays
from qcomp.backends.numba_cpu.vectors import largest_sum
from qcomp.core.numeric.arrays import LIMIT
from qcomp.core.numeric.buckets import bucket_count

__all__ = ["EMPTY", "Decoder", "Encoder", "Mix", "decode", "encode", "mix"]

EMPTY: Floats = np.empty(0, dtype=np.float32)
"""Stands for an array that there is none of."""

Mix = tuple[Floats, float, float]
"""m, keep and new: keep * m + new * x is what is compressed, m of the shape of x."""

_SAFE = LIMIT / 2
"""Rounding cannot bring what is below this to the limit."""


class Encoder(NamedTuple):
    """Compresses the buckets of an array, of which it is made, into a payload."""

    run: Callable[[Floats, Floats, int, int, int], int]
    """``run(residual, out, mode, first, last)`` does a run of buckets; the modes are those of
    `qcomp.backends.numba_cpu.primitives`. Returns the first bucket with a value that is too large, or -1."""
    x: Floats
    bucket_size: int
    """Elements of x in a bucket."""
    blended: bool
    """Whether it is not x that is compressed, but what x is blended into."""


class Decoder(NamedTuple):
    """Decompresses the buckets of a payload into an array, for which it is made."""

    run: Callable[[bool, bool, int, int, int], None]
    """``run(accumulate, streams, ranks, first, last)`` does a run of buckets: adds them to the array, or writes them,
    past the caches if asked to. Unless ``ranks`` is 0, what is there then is the sum over so many, and becomes the
    mean."""
    out: Floats
    bucket_size: int
    """Elements of the array in a bucket."""


def encode(encoder: Encoder, residual: Floats | None, residual_out: Floats | None) -> bool:
    """Compress x plus the residual, and put what that lost into the new residual.

    Parameters
    ----------
    encoder : Encoder
        Of an array x of float32, shape (n,).
    residual : array of float32, shape (n,), or None
        None compresses x alone.
    residual_out : array of float32, shape (n,), or None
        For the new residual: the residual itself, x unless it is blended, an array that shares memory with neither, or
        None if the residual is None.

    Returns
    -------
    bool
        False if x plus the residual holds a NaN or a magnitude from 2**100 on. Then the payload is garbage, and a
        residual that is donated is as it was; an x that is donated is lost.
    """
    if residual is None or residual_out is None:
        old, new, mode = EMPTY, EMPTY, NO_RESIDUAL
    elif residual_out is encoder.x:
        assert not encoder.blended
        old, new, mode = residual, residual_out, OVER_INPUT
    elif residual_out is not residual:
        old, new, mode = residual, residual_out, FRESH
    else:
        if encoder.blended or not largest_sum(encoder.x, residual) < _SAFE:  # also for a NaN
            # Something may be too large: find out beside the residual, which must then stay as it is.
            beside = np.empty_like(residual)
            accepted = encode(encoder, residual, beside)
            if accepted:
                residual[...] = beside
            return accepted
        old, new, mode = residual, residual, IN_PLACE
    results = threads.run(
        lambda first, last: encoder.run(old, new, mode, first, last),
        bucket_count(encoder.x.size, encoder.bucket_size),
        encoder.bucket_size,
    )
    return all(failed < 0 for failed in results)


def decode(decoder: Decoder, *, accumulate: bool = False) -> None:
    """Decompress a payload into an array, or add it to what is there."""
    streams = not accumulate and pays(decoder.out.size)
    threads.run(
        lambda first, last: decoder.run(accumulate, streams, 0, first, last),
        bucket_count(decoder.out.size, decoder.bucket_size),
        decoder.bucket_size,
    )


def mix(blend: Mix | None) -> tuple[Floats, np.float32, np.float32]:
    """Return a mix as the kernels take it: an empty m for none."""
    if blend is None:
        return EMPTY, np.float32(0), np.float32(0)
    return blend[0], np.float32(blend[1]), np.float32(blend[2])
