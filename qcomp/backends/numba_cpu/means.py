"""The mean of the payloads of several ranks, and its compression, a block at a time.

A block is decompressed, added up, divided and compressed again while it is in the caches. Bytes read and written per
element, without the payloads: `average` 0 and 4, `compress_mean` with feedback 4 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator

from qcomp.backends.numba_cpu import threads
from qcomp.backends.numba_cpu.codec import NO_MOMENTUM, DecodeRun, EncodeRun
from qcomp.backends.numba_cpu.tables import Decoded, ToEncode

__all__ = ["average", "compress_mean"]

BLOCK = 1 << 17
"""Elements of a block: it fits into a second-level cache of 1 MiB, yet kernel calls take little of the time."""


def average(decode: DecodeRun, bucket_size: int, vectors: Decoded) -> None:
    """Store in each vector the mean of its payloads, added in their order; a mean below 2**-126 becomes +0."""

    def work(first: int, last: int) -> None:
        for start, stop in _blocks(first, last, bucket_size):
            decode(vectors, False, False, True, start, stop)

    threads.run(work, vectors.buckets, bucket_size)


def compress_mean(
    decode: DecodeRun, encode: EncodeRun, bucket_size: int, received: Decoded, sent: ToEncode, mode: int
) -> bool:
    """Compress the means of payloads, plus the residuals if there are some.

    Parameters
    ----------
    decode, encode : callable
        Kernels of the same compressor.
    bucket_size : int
        Elements in a bucket.
    received : Decoded
        The payloads, and the vectors that receive their means.
    sent : Encoded
        The same vectors, to be compressed.
    mode : int
        With ``OVER_INPUT`` the new residuals overwrite the vectors; with ``NO_RESIDUAL`` the vectors keep the means.

    Returns
    -------
    bool
        Whether all values were in range; otherwise payloads and vectors are garbage.
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
