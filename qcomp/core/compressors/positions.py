"""Wire format of positions in a bucket, in one or two bytes; for compressors that keep a few elements."""

from qcomp.core.numeric.arrays import Array, array_namespace, device
from qcomp.core.numeric.buckets import validate_bucket_size

__all__ = ["join_bytes", "split_bytes", "validate_sparsity"]


def validate_sparsity(k: int, bucket_size: int) -> None:
    """Raise ValueError unless a bucket has a legal size and k of its elements can be kept."""
    validate_bucket_size(bucket_size)
    if bucket_size > 65536:
        raise ValueError(f"bucket_size is {bucket_size}; expected at most 65536")
    if type(k) is not int or not 1 <= k <= bucket_size:
        raise ValueError(f"k is {k!r}; expected an integer from 1 to {bucket_size}, the bucket_size")


def split_bytes(positions: Array, *, two: bool) -> tuple[Array, Array]:
    """Return the low and the high bytes of positions below 65536; without ``two`` there are no high bytes."""
    xp = array_namespace(positions)
    if not two:
        return xp.astype(positions, xp.uint8), xp.zeros((0,), dtype=xp.uint8, device=device(positions))
    wide = xp.astype(positions, xp.int32)
    low = xp.bitwise_and(wide, xp.full_like(wide, 255))
    high = xp.bitwise_right_shift(wide, xp.full_like(wide, 8))
    return xp.astype(low, xp.uint8), xp.astype(high, xp.uint8)


def join_bytes(low: Array, high: Array) -> Array:
    """Return the positions, int32, from their bytes."""
    xp = array_namespace(low)
    positions = xp.astype(low, xp.int32)
    return positions + xp.astype(high, xp.int32) * 256 if high.shape[0] else positions
