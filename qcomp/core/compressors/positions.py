"""The wire format of integers in sparse payloads, such as positions in a bucket: one to three bytes each."""

from collections.abc import Sequence

from qcomp.core.numeric.arrays import Array, array_namespace, concat
from qcomp.core.numeric.buckets import validate_bucket_size


def validate_sparsity(k: int, bucket_size: int) -> None:
    """Raise ValueError unless a bucket has a legal size and k of its elements can be kept."""
    validate_bucket_size(bucket_size)
    if bucket_size > 65536:
        raise ValueError(f"bucket_size is {bucket_size}; expected at most 65536")
    if type(k) is not int or not 1 <= k <= bucket_size:
        raise ValueError(f"k is {k!r}; expected an integer from 1 to {bucket_size}, the bucket_size")


def split_bytes(numbers: Array, width: int) -> Array:
    """Return the bytes of numbers, uint8 of shape (width * n,): all low bytes, then all second bytes, and so on."""
    xp = array_namespace(numbers)
    if width == 1:
        return xp.astype(numbers, xp.uint8)
    wide = xp.astype(numbers, xp.int32)
    planes = [xp.bitwise_right_shift(wide, xp.full_like(wide, 8 * i)) for i in range(width)]
    return concat([xp.astype(xp.bitwise_and(plane, xp.full_like(wide, 255)), xp.uint8) for plane in planes])


def join_bytes(data: Array, width: int) -> Array:
    """Return the numbers, int32, from their bytes."""
    xp = array_namespace(data)
    count = data.shape[0] // width
    planes: Sequence[Array] = [
        xp.astype(data[i * count : (i + 1) * count], xp.int32) * (1 << 8 * i) for i in range(width)
    ]
    return sum(planes[1:], start=planes[0])
