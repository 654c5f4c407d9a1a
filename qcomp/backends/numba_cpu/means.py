"""The mean of what several ranks have sent, and its compression, a block at a time.

A block is decompressed, added up, divided and compressed again while it is in the caches. Bytes read and written per
element: `average` 0 and 4, `compress_mean` with feedback 4 and 4, and those of the payloads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qcomp.backends.numba_cpu import threads
from qcomp.backends.numba_cpu.codec import EMPTY, Decoder, Encoder
from qcomp.backends.numba_cpu.jit import Floats
from qcomp.backends.numba_cpu.primitives import NO_RESIDUAL, OVER_INPUT
from qcomp.core.numeric.buckets import bucket_count

__all__ = ["average", "compress_mean"]

BLOCK = 1 << 17
"""Elements of a block: it fits into a second-level cache of 1 MiB, and calling the kernels takes little of the time."""


def average(decoders: Sequence[Decoder]) -> None:
    """Put the mean of payloads into the array that all their decoders are for, added in their order.

    Below 2**-126 it is +0.
    """
    out, bucket_size = decoders[0].out, decoders[0].bucket_size

    def work(first: int, last: int) -> None:
        for start, stop in _blocks(first, last, bucket_size):
            _average_block(decoders, start, stop)

    threads.run(work, bucket_count(out.size, bucket_size), bucket_size)


def compress_mean(decoders: Sequence[Decoder], encoder: Encoder, residual: Floats | None) -> bool:
    """Compress the mean of payloads, plus the residual if there is one.

    Parameters
    ----------
    decoders : sequence of Decoder
        All for one array x.
    encoder : Encoder
        Of x, which gets the new residual if there is one, and holds the mean otherwise.
    residual : array of float32, shape (n,), or None
        Not written to.

    Returns
    -------
    bool
        Whether nothing was out of range; payload and x are garbage otherwise.
    """
    old, new, mode = (EMPTY, EMPTY, NO_RESIDUAL) if residual is None else (residual, encoder.x, OVER_INPUT)

    def work(first: int, last: int) -> bool:
        for start, stop in _blocks(first, last, encoder.bucket_size):
            _average_block(decoders, start, stop)
            if encoder.run(old, new, mode, start, stop) >= 0:
                return False
        return True

    count = bucket_count(encoder.x.size, encoder.bucket_size)
    return all(threads.run(work, count, encoder.bucket_size))


def _blocks(first: int, last: int, bucket_size: int) -> Iterator[tuple[int, int]]:
    """Cut a run of buckets into blocks; a run without a bucket is one, for what ends a payload."""
    step = max(1, BLOCK // bucket_size)
    for start in range(first, max(last, first + 1), step):
        yield start, min(start + step, last)


def _average_block(decoders: Sequence[Decoder], first: int, last: int) -> None:
    ranks = len(decoders)
    for rank, decoder in enumerate(decoders):
        decoder.run(rank > 0, False, ranks if rank == ranks - 1 else 0, first, last)
