"""The mean of what several ranks have sent, and its compression, a block at a time.

A block is decompressed, added up, divided and compressed again while it is in the caches. Bytes read and written per
element: `average` 0 and 4, `compress_mean` with feedback 4 and 4, and those of the payloads.
"""

from __future__ import annotations

from collections.abc import Iterator

from qcomp.backends.numba_cpu import threads
from qcomp.backends.numba_cpu.codec import NO_MOMENTUM, DecodeRun, EncodeRun
from qcomp.backends.numba_cpu.tables import Decoded, Encoded

__all__ = ["average", "compress_mean"]

BLOCK = 1 << 17
"""Elements of a block: it fits into a second-level cache of 1 MiB, and calling the kernels takes little of the time."""


def average(decode: DecodeRun, bucket_size: int, vectors: Decoded) -> None:
    """Put the mean of the payloads of each vector into it, added in their order.

    Below 2**-126 it is +0.
    """

    def work(first: int, last: int) -> None:
        for start, stop in _blocks(first, last, bucket_size):
            decode(vectors, False, False, True, start, stop)

    threads.run(work, vectors.buckets, bucket_size)


def compress_mean(
    decode: DecodeRun, encode: EncodeRun, bucket_size: int, received: Decoded, sent: Encoded, mode: int
) -> bool:
    """Compress the means of payloads, plus the residuals if there are some.

    Parameters
    ----------
    decode, encode : callable
        Of the same compressor.
    bucket_size : int
        Elements in a bucket.
    received : Decoded
        The payloads, and where their means go.
    sent : Encoded
        The same vectors, to be compressed.
    mode : int
        ``OVER_INPUT``, and the vectors get the new residuals; or ``NO_RESIDUAL``, and they hold the means.

    Returns
    -------
    bool
        Whether nothing was out of range; payloads and vectors are garbage otherwise.
    """

    def work(first: int, last: int) -> bool:
        for start, stop in _blocks(first, last, bucket_size):
            decode(received, False, False, True, start, stop)
            if encode(sent, mode, NO_MOMENTUM, start, stop) >= 0:
                return False
        return True

    return all(threads.run(work, sent.buckets, bucket_size))


def _blocks(first: int, last: int, bucket_size: int) -> Iterator[tuple[int, int]]:
    """Cut a run of buckets into blocks."""
    step = max(1, BLOCK // bucket_size)
    for start in range(first, last, step):
        yield start, min(start + step, last)
