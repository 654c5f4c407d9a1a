"""The few levels to which a sparse compressor rounds the magnitudes that it keeps.

The levels of a bucket are ``lowest + j * step`` for j below 2^(b - 1), with b bits for a level and a sign. ``lowest``
and ``step`` are short: float32 with 4 significant bits, so that ``j * step`` is exact, the sum rounds once, and both
numbers can be sent in a few bits. Each magnitude takes the nearest level, the higher one at a tie.

- b = 1: the level is the mean magnitude.
- b = 2: the mean of the magnitudes below the mean of all, and the mean of the others.
- b > 2: evenly spaced from the smallest to the largest magnitude.
"""

from qcomp.core.numeric.arrays import TINY, Array, array_namespace, bitcast, device, divide, flush
from qcomp.core.numeric.sums import pad_to_power_of_two, tree_sum

MOST_BITS = 4
DROPPED_BITS = 20
"""How many of the last bits of a short number are zero."""
_HALF = 1 << DROPPED_BITS - 1


def kept_delta(k: int, bucket_size: int, bits: int) -> float:
    """Return the delta of a contraction that rounds k kept magnitudes to these levels.

    Notes
    -----
    Let a_1 >= ... >= a_k be the kept magnitudes, and e_i the error of a_i. The captured part is sum (a_i^2 - e_i^2).
    The lost part is sum e_i^2 plus the squares of the dropped elements, at most (n - k) a_k^2. A short number has a
    relative error of at most 2^-4.

    With up to two bits, let S = sum a_i. The errors are at most as large as with one level at the mean, so at least
    (1 - 2^-8) S^2 / k is captured. S^2 / (k ||v||^2) is smallest where v has j equal elements and zeros:
    j / k up to j = k, and k / j from there on. So delta is min(1 / k, k / n), apart from rounding.

    With m > 2 levels, let X = a_1 - a_k. Of the largest square, and of a_k^2 for each element, all but 2^-8 is
    captured: together at least (1 - 2^-8) (X^2 + k a_k^2). The other elements lose at most half a step, X / (2 (m -
    1)), plus the rounding of the two scales. With q = 4 (m - 1)^2, the sum of e_i^2 is at most 1.2 k X^2 / q + 0.006 k
    a_k^2. A quotient of sums is at least the smallest quotient of the terms: 1 / (1 + 1.21 k / q) for the terms with
    X^2, and (k / n) (1 - 2^-7) for the terms with a_k^2.
    """
    equal = k / bucket_size * (1 - 2**-7)
    if bits <= 2:
        return min(equal, (1 - 2**-7) / k)
    q = 4 * ((1 << bits - 1) - 1) ** 2
    return min(equal, q / (q + 1.25 * k))


def scales_of(magnitudes: Array, bits: int) -> tuple[Array, Array]:
    """Return the lowest level and the step for each row of magnitudes, in float32; zeros count as absent."""
    xp = array_namespace(magnitudes)
    dtype = magnitudes.dtype
    present = magnitudes > 0
    if bits <= 2:
        mean = _mean_where(magnitudes, present)
        if bits == 1:
            lowest = _short(mean)
            return lowest, xp.zeros_like(lowest)
        upper = present & (magnitudes >= mean[:, None])
        low, high = _mean_where(magnitudes, present & ~upper), _mean_where(magnitudes, upper)
        # If all magnitudes are equal, one part is empty; rounding decides which.
        low, high = xp.where(low > 0, low, high), xp.where(high > 0, high, low)
    else:
        high = xp.max(magnitudes, axis=1)
        low = xp.min(xp.where(present, magnitudes, xp.broadcast_to(high[:, None], magnitudes.shape)), axis=1)
    lowest = _short(low)
    spread = flush(high - xp.astype(lowest, dtype, copy=False))
    spread = xp.where(spread > 0, spread, xp.zeros_like(spread))
    return lowest, _short(flush(divide(spread, (1 << bits - 1) - 1)))


def levels_of(magnitudes: Array, lowest: Array, step: Array, bits: int) -> Array:
    """Return the number of the level nearest to each magnitude, int32 of the shape of the magnitudes."""
    xp = array_namespace(magnitudes)
    lowest, step = (xp.astype(scale, magnitudes.dtype, copy=False)[:, None] for scale in (lowest, step))
    level = xp.zeros(magnitudes.shape, dtype=xp.int32, device=device(magnitudes))
    for j in range((1 << bits - 1) - 1):
        level = level + xp.astype(magnitudes >= lowest + step * (j + 0.5), xp.int32)
    return level


def values_of(level: Array, negative: Array, lowest: Array, step: Array) -> Array:
    """Return the signed values of levels; all arrays have one shape, and the scales have the dtype of the result."""
    xp = array_namespace(lowest)
    magnitude = lowest + step * xp.astype(level, lowest.dtype)
    return flush(xp.where(negative, -magnitude, magnitude))


def _mean_where(magnitudes: Array, chosen: Array) -> Array:
    """Return the mean of the chosen magnitudes of each row, 0 if none is chosen."""
    xp = array_namespace(magnitudes)
    count = xp.sum(xp.astype(chosen, xp.int32), axis=1, dtype=xp.int32)
    total = tree_sum(pad_to_power_of_two(xp.where(chosen, magnitudes, xp.zeros_like(magnitudes))))
    return divide(total, xp.astype(xp.where(count > 0, count, xp.ones_like(count)), magnitudes.dtype))


def _short(x: Array) -> Array:
    """Return non-negative numbers as float32, rounded to 4 significant bits, half up; only 0 is below 2^-126."""
    xp = array_namespace(x)
    single = xp.astype(x, xp.float32, copy=False)
    single = xp.where((x > 0) & (single < TINY), xp.full_like(single, TINY), single)
    bits = bitcast(single, xp.int32)
    half, mask = (
        xp.asarray([word], dtype=xp.int32, device=device(x)) for word in (_HALF, -1 << DROPPED_BITS)
    )
    return bitcast(xp.bitwise_and(bits + half, mask), xp.float32)
