"""Cuts the tensors of a compressed mean, given by their sizes, into one chunk for every server."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from qcomp.core.numeric.buckets import bucket_count


class Segment(NamedTuple):
    """A run of whole buckets of one tensor within one chunk."""

    tensor: int
    """Index of the tensor."""
    start: int
    """First element within the tensor."""
    stop: int
    """The element after the last element within the tensor."""
    bucket: int
    """The segment's first bucket number, as in keys. No two tensors share a bucket number, so none share draws."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


Chunk = tuple[Segment, ...]
"""The segments that one server averages, in the order of the tensors."""
Chunks = tuple[Chunk, ...]
"""All chunks of the tensors, in the order of their servers."""
Cutter = Callable[[Sequence[int], Sequence[int], int], Chunks]
"""A function like `cut`, of the sizes of tensors, their bucket sizes and the number of chunks."""


def cut(sizes: Sequence[int], bucket_size: int | Sequence[int], count: int) -> Chunks:
    """Cut tensors of these sizes into ``count`` chunks of ceil(buckets / count) whole buckets.

    A bucket never crosses a tensor's boundary. The last chunks are shorter or empty if the number of buckets is no
    multiple of the count. The bucket size is the same for all tensors, or given for each. The number of a tensor's
    first bucket is the number of elements before it, in units of its bucket size. For these numbers, every bucket size
    is rounded up to a power of two, since a compressor may pad a bucket to that size and draw for the padding.

    Examples
    --------
    >>> cut([20, 8], 8, 2)
    ((Segment(tensor=0, start=0, stop=16, bucket=0),), (Segment(tensor=0, start=16, stop=20, bucket=2), \
Segment(tensor=1, start=0, stop=8, bucket=3)))
    """
    lengths = (bucket_size,) * len(sizes) if isinstance(bucket_size, int) else tuple(bucket_size)
    return _cut(tuple(sizes), lengths, count)


@lru_cache(maxsize=4096)  # every step cuts the same tensors
def _cut(sizes: tuple[int, ...], lengths: tuple[int, ...], count: int) -> Chunks:
    counts = [bucket_count(size, length) for size, length in zip(sizes, lengths, strict=True)]
    per_chunk = max(1, -(-sum(counts) // count))
    chunks: list[list[Segment]] = [[] for _ in range(count)]
    before = elements = 0  # whole buckets, and their elements with sizes rounded up
    for tensor, (size, length, buckets) in enumerate(zip(sizes, lengths, counts, strict=True)):
        drawn = 1 << (length - 1).bit_length()
        first = -(-elements // drawn)
        elements = (first + buckets) * drawn
        done = 0
        while done < buckets:
            chunk, within = divmod(before, per_chunk)
            taken = min(buckets - done, per_chunk - within)
            stop = min(size, (done + taken) * length)
            chunks[chunk].append(Segment(tensor, done * length, stop, first + done))
            done += taken
            before += taken
    return tuple(tuple(chunk) for chunk in chunks)


def cut_each(
    sizes: Sequence[int], bucket_sizes: Sequence[int], count: int, *, numbers: Sequence[int]
) -> Chunks:
    """Cut every tensor separately into ``count`` chunks, as `cut` does with a single tensor.

    ``numbers`` holds the number of each tensor's first bucket.

    Examples
    --------
    >>> cut_each([20, 8], [8, 8], 2, numbers=[0, 3])
    ((Segment(tensor=0, start=0, stop=16, bucket=0), Segment(tensor=1, start=0, stop=8, bucket=3)), \
(Segment(tensor=0, start=16, stop=20, bucket=2),))
    """
    return _cut_each(tuple(sizes), tuple(bucket_sizes), count, tuple(numbers))


@lru_cache(maxsize=4096)
def _cut_each(
    sizes: tuple[int, ...], lengths: tuple[int, ...], count: int, numbers: tuple[int, ...]
) -> Chunks:
    chunks: list[list[Segment]] = [[] for _ in range(count)]
    for tensor, (size, length, number) in enumerate(zip(sizes, lengths, numbers, strict=True)):
        for chunk, own in zip(chunks, cut([size], length, count), strict=True):
            chunk += [s._replace(tensor=tensor, bucket=number + s.bucket) for s in own]
    return tuple(map(tuple, chunks))


def deal(sizes: Sequence[int], bucket_sizes: Sequence[int], count: int, *, costs: Sequence[int]) -> Chunks:
    """Give every whole tensor to one of ``count`` chunks: the costliest first, to the chunk with the least cost so far.

    No chunk costs more than the mean of all chunks plus the cost of one tensor. Buckets are numbered as by `cut`.

    Examples
    --------
    >>> [[s.tensor for s in chunk] for chunk in deal([8, 16, 8, 8], [8] * 4, 2, costs=[2, 5, 2, 2])]
    [[1], [0, 2, 3]]
    """
    (whole,) = cut(sizes, bucket_sizes, 1)
    chunks: list[list[Segment]] = [[] for _ in range(count)]
    spent = [0] * count
    for segment in sorted(whole, key=lambda s: (-costs[s.tensor], s.tensor)):
        least = spent.index(min(spent))
        chunks[least].append(segment)
        spent[least] += costs[segment.tensor]
    return tuple(tuple(sorted(chunk)) for chunk in chunks)
