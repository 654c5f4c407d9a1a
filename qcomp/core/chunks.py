"""How the tensors of a compressed mean are cut into one chunk for every rank: pure integers."""

from collections.abc import Sequence
from typing import NamedTuple

from qcomp.core.buckets import bucket_count

__all__ = ["Segment", "cut"]


class Segment(NamedTuple):
    """A run of whole buckets of one tensor within one chunk."""

    tensor: int
    """Index of the tensor."""
    start: int
    """First element within the tensor."""
    stop: int
    """Element after the last."""
    bucket: int
    """Index of the first bucket within all tensors."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def cut(sizes: Sequence[int], bucket_size: int, count: int) -> tuple[tuple[Segment, ...], ...]:
    """Cut tensors of these sizes into ``count`` chunks of ceil(buckets / count) whole buckets.

    A bucket never crosses a tensor's boundary; the last chunks are shorter or empty where it does not divide.

    Examples
    --------
    >>> cut([20, 8], 8, 2)
    ((Segment(tensor=0, start=0, stop=16, bucket=0),), (Segment(tensor=0, start=16, stop=20, bucket=2), \
Segment(tensor=1, start=0, stop=8, bucket=3)))
    """
    counts = [bucket_count(size, bucket_size) for size in sizes]
    per_chunk = max(1, -(-sum(counts) // count))
    chunks: list[list[Segment]] = [[] for _ in range(count)]
    first = 0
    for tensor, (size, buckets) in enumerate(zip(sizes, counts, strict=True)):
        bucket = first
        first += buckets
        while bucket < first:
            chunk = bucket // per_chunk
            stop_bucket = min(first, (chunk + 1) * per_chunk)
            start = (bucket - first + buckets) * bucket_size
            stop = min(size, (stop_bucket - first + buckets) * bucket_size)
            chunks[chunk].append(Segment(tensor, start, stop, bucket))
            bucket = stop_bucket
    return tuple(tuple(chunk) for chunk in chunks)
