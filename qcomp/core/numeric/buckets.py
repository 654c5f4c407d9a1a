"""`blocks` cuts a vector of a given size into buckets, and a `Block` views their elements as rows.

A bucket is a run of elements that share a scale. All buckets of a vector have ``bucket_size`` elements except the last,
the tail. The *length* of the tail is the smallest power of two, at least 8, that holds the remaining elements. The
difference between a tail's length and its element count is padding: zero bits on the wire that never enter a scale, a
norm or a residual. A compressor whose bucket sizes are not powers of two has its own rule for the length, and may pad
every bucket.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from qcomp.core.numeric.arrays import Array, array_namespace, concat, device


class Block(NamedTuple):
    """A run of buckets of equal length: the full buckets of a vector, or its tail."""

    start: int
    """Index of the first element."""
    rows: int
    """Number of buckets."""
    length: int
    """Elements of a bucket, including padding."""
    filled: int
    """Elements of a bucket without padding; if bucket sizes are powers of two, ``length`` except in the tail."""
    first_bucket: int
    """Index of the first bucket."""

    def read(self, x: Array) -> Array:
        """Return this block of a flat vector as an array of shape (rows, length), zeros as padding."""
        xp = array_namespace(x)
        rows = xp.reshape(x[self.start : self.start + self.rows * self.filled], (self.rows, self.filled))
        if self.filled < self.length:
            padding = xp.zeros((self.rows, self.length - self.filled), dtype=x.dtype, device=device(x))
            rows = xp.concat([rows, padding], axis=1)
        return rows

    def flat(self, rows: Array) -> Array:
        """Return the elements of an array of shape (rows, length) without the padding, the inverse of `read`."""
        return array_namespace(rows).reshape(rows[:, : self.filled], (-1,))


def validate_bucket_size(bucket_size: int) -> None:
    """Raise ValueError unless the size is a power of two from 8 to 2**20."""
    if (
        type(bucket_size) is not int
        or bucket_size < 8
        or bucket_size > 1 << 20
        or bucket_size & (bucket_size - 1)
    ):
        raise ValueError(f"bucket_size is {bucket_size!r}; expected a power of two from 8 to {1 << 20}")


def bucket_count(size: int, bucket_size: int) -> int:
    """Return the number of buckets of a vector of ``size`` elements."""
    return -(-size // bucket_size)


def bytes_below(end: int) -> int:
    """Return the bytes needed for numbers from 0 to ``end - 1``, at least 1.

    Examples
    --------
    >>> bytes_below(1), bytes_below(256), bytes_below(257)
    (1, 1, 2)
    """
    return max(1, -(-(end - 1).bit_length() // 8))


def tail_length(count: int) -> int:
    """Return the length of a bucket of ``count`` elements: the smallest power of two from 8 that holds them."""
    return max(8, 1 << (count - 1).bit_length())


@lru_cache(1024)  # every kernel call needs this number
def padded_size(size: int, bucket_size: int, length_of: Callable[[int], int] = tail_length) -> int:
    """Return the number of elements including padding."""
    return sum(block.rows * block.length for block in blocks(size, bucket_size, length_of))


@lru_cache(1024)  # every pure call needs them
def blocks(size: int, bucket_size: int, length_of: Callable[[int], int] = tail_length) -> tuple[Block, ...]:
    """Return the full buckets, if there are any, as one block, then the tail, if there is one, as a second block.

    ``length_of`` gives the length of a bucket from its element count.
    """
    full, rest = divmod(size, bucket_size)
    whole = (Block(0, full, length_of(bucket_size), bucket_size, 0),) if full else ()
    tail = (Block(full * bucket_size, 1, length_of(rest), rest, full),) if rest else ()
    return whole + tail


def join_blocks(parts: Sequence[Array], *, dtype: Any, like: Array) -> Array:
    """Concatenate the flat results of the blocks of one vector; an empty vector has no blocks."""
    if parts:
        return concat(list(parts))
    return array_namespace(like).zeros((0,), dtype=dtype, device=device(like))
