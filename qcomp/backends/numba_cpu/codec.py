"""Calls a compressor family's kernels on consecutive buckets of vectors, to encode, decode or average them.

For a mean, a block is decompressed, added up, divided and compressed again while it is in the caches. Bytes read and
written per element, without the payloads: `average` 0 and 4, `compress_mean` with feedback 4 and 4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from qcomp.backends.numba_cpu import threads
from qcomp.backends.numba_cpu.drivers import Own
from qcomp.backends.numba_cpu.jit import Bytes, Floats, Kernel
from qcomp.backends.numba_cpu.primitives import FRESH, IN_PLACE, NO_RESIDUAL, OVER_INPUT
from qcomp.backends.numba_cpu.tables import (
    RESIDUAL,
    RESIDUAL_OUT,
    Decoded,
    ToEncode,
    address,
    encoded_vectors,
)
from qcomp.backends.numba_cpu.vectors import largest_sum
from qcomp.core.kernels import Blend
from qcomp.core.numeric.arrays import LIMIT
from qcomp.core.numeric.random import Key

BLOCK = 1 << 17
"""Elements of a block: few enough for a second-level cache of 1 MiB, and enough to make the cost of kernel calls
small."""

_SAFE = LIMIT / 2
"""If a sum is below this, rounding cannot raise it to the limit."""


EncodeRun = Callable[[ToEncode, int, int, int], int]
"""``run(vectors, mode, first, last)`` compresses a run of buckets of some vectors. The modes are those of
`qcomp.backends.numba_cpu.primitives`. It returns the first bucket with a value that is too large, or -1."""
DecodeRun = Callable[[Decoded, bool, bool, bool, int, int], None]
"""``run(vectors, accumulate, streams, finish, first, last)`` adds up the payloads of a run of buckets, in the order of
the ranks. With ``accumulate`` it adds them to the vectors, with ``streams`` it writes past the caches, and with
``finish`` it turns the sums into means over the ranks."""


def encode_run(
    kernel: Kernel, bucket_size: int, own: Own | Callable[[np.dtype[Any]], Own] = (), *, scratch: int = 0
) -> EncodeRun:
    """Return the function that calls a family's encoder, a kernel of `drivers`.

    ``own`` are the family's own arguments, or a function that returns them for vectors of a dtype, with scratch arrays
    that no other thread uses. ``scratch`` is how many floats the kernel needs besides those for a bucket.
    """

    def run(vectors: ToEncode, mode: int, first: int, last: int) -> int:
        rows, ends, dtype = vectors
        room, given = np.empty(bucket_size + scratch, dtype), own(dtype) if callable(own) else own
        failed: int = kernel.of(dtype).compiled(rows, ends, mode, bucket_size, given, first, last, room)
        return failed

    return run


def decode_run(kernel: Kernel, bucket_size: int, own: Own | Callable[[np.dtype[Any]], Own] = ()) -> DecodeRun:
    """Return the function that calls a family's decoder; see `encode_run`."""

    def run(vectors: Decoded, accumulate: bool, streams: bool, finish: bool, first: int, last: int) -> None:
        *table, dtype = vectors
        beside, given = np.empty(bucket_size if streams else 0, dtype), own(dtype) if callable(own) else own
        kernel.of(dtype).compiled(
            *table, bucket_size, given, accumulate, streams, finish, first, last, beside
        )

    return run


class CompressorKernels(NamedTuple):
    """The kernels of a compressor."""

    bucket_size: int
    """Elements of a vector that the kernels treat as a bucket."""
    encode: Callable[[Key | None], EncodeRun | None]
    """Returns the kernel that compresses with a key's draws; None if the pure version would draw in another way."""
    decode: DecodeRun

    @classmethod
    def without_draws(cls, bucket_size: int, encode: EncodeRun, decode: DecodeRun) -> CompressorKernels:
        """Return the kernels of a compressor that ignores the key."""
        return cls(bucket_size, lambda _: encode, decode)


class Encoder(NamedTuple):
    """Compresses one given array into a payload."""

    run: EncodeRun
    bucket_size: int
    """Elements of x in a bucket."""
    x: Floats
    vectors: ToEncode
    blends: bool
    """Whether x is blended into a momentum."""


def encoder_of(
    run: EncodeRun,
    bucket_size: int,
    x: Floats,
    data_out: Bytes,
    blend: tuple[Floats, Blend] | None,
    bucket: int = 0,
) -> Encoder:
    """Return the encoder of one array, whose draws begin at bucket ``bucket``; ``blend`` has a flat view of its m."""
    vectors = encoded_vectors(x, bucket_size, data_out, blend, bucket)
    return Encoder(run, bucket_size, x, vectors, blend is not None)


def run_encoder(run: EncodeRun, bucket_size: int, vectors: ToEncode, mode: int) -> bool:
    """Compress vectors in as many threads as are worthwhile; return whether no value was too large."""
    work = partial(run, vectors, mode)
    return max(threads.run(work, int(vectors.ends[-1]), bucket_size)) < 0


def run_decoder(
    run: DecodeRun, bucket_size: int, vectors: Decoded, *, accumulate: bool, streams: bool
) -> None:
    """Decompress vectors in as many threads as are worthwhile."""
    threads.run(partial(run, vectors, accumulate, streams, False), int(vectors.ends[-1]), bucket_size)


def encode(encoder: Encoder, residual: Floats | None, residual_out: Floats | None) -> bool:
    """Compress x plus the residual, and store what is lost as the new residual.

    Without a residual it compresses x alone. ``residual_out`` gets the new residual. It may be the old residual; or x,
    unless x is blended; or an array that shares memory with neither. Returns False if x plus the residual holds a NaN
    or a magnitude of at least 2**100. Then the payload is garbage, the old residual is unchanged, and x is lost if it
    is ``residual_out``.
    """
    if residual is None or residual_out is None:
        return run_encoder(encoder.run, encoder.bucket_size, encoder.vectors, NO_RESIDUAL)
    if residual_out is encoder.x:
        assert not encoder.blends
        mode = OVER_INPUT
    elif residual_out is not residual:
        mode = FRESH
    else:
        if encoder.blends or not largest_sum(encoder.x, residual) < _SAFE:  # also for a NaN
            # A value may be too large, and then the residual must not change. So try with another buffer.
            beside = np.empty_like(residual)
            accepted = encode(encoder, residual, beside)
            if accepted:
                residual[...] = beside
            return accepted
        mode = IN_PLACE
    encoder.vectors.rows[0, RESIDUAL] = address(residual)
    encoder.vectors.rows[0, RESIDUAL_OUT] = address(residual_out)
    return run_encoder(encoder.run, encoder.bucket_size, encoder.vectors, mode)


def average(decode: DecodeRun, bucket_size: int, vectors: Decoded) -> None:
    """Store in each vector the mean of its payloads, added in their order; a mean below 2**-126 becomes +0."""
    block = max(1, BLOCK // bucket_size)

    def work(first: int, last: int) -> None:
        for start in range(first, last, block):
            decode(vectors, False, False, True, start, min(start + block, last))

    threads.run(work, int(vectors.ends[-1]), bucket_size)


def compress_mean(
    decode: DecodeRun, encode: EncodeRun, bucket_size: int, received: Decoded, sent: ToEncode, mode: int
) -> bool:
    """Compress the means of payloads, plus the residuals if there are some.

    ``received`` has the payloads and the vectors for their means, ``sent`` the same vectors, to be compressed. In the
    mode ``OVER_INPUT`` the new residuals overwrite the vectors; with ``NO_RESIDUAL`` the vectors keep the means.
    Returns whether all values were in range; otherwise payloads and vectors are garbage.
    """
    block = max(1, BLOCK // bucket_size)

    def work(first: int, last: int) -> bool:
        for start in range(first, last, block):
            stop = min(start + block, last)
            decode(received, False, False, True, start, stop)
            if encode(sent, mode, start, stop) >= 0:
                return False
        return True

    return all(threads.run(work, int(sent.ends[-1]), bucket_size))
