"""Sums in one fixed order, the halving tree, so that every library returns the same bits."""

import math
from collections.abc import Sequence

from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    bitcast,
    concat,
    device,
    divide,
    dtype_name,
    host_numbers,
    sqrt,
    truncate_last_bit,
)


def tree_sum(rows: Array) -> Array:
    """Sum each row of an array of shape (rows, length) by adding its halves until one element is left.

    The length must be a power of two. These are plain IEEE additions in a fixed order, which a CPU can vectorise and a
    GPU block can compute in shared memory.
    """
    while (length := rows.shape[1]) > 1:
        half = length // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def pad_to_power_of_two(rows: Array) -> Array:
    """Pad the rows of an array with zeros up to a power of two, as `tree_sum` needs them."""
    xp = array_namespace(rows)
    count, length = rows.shape
    padded = 1 << max(0, length - 1).bit_length()
    if padded == length:
        return rows
    return xp.concat(
        [rows, xp.zeros((count, padded - length), dtype=rows.dtype, device=device(rows))], axis=1
    )


def mean_abs(rows: Array, count: int) -> Array:
    """Return the sum of the magnitudes of each row, divided by ``count``."""
    return divide(tree_sum(array_namespace(rows).abs(rows)), count)


def _scaled_squares(rows: Array) -> tuple[Array, Array]:
    """Return the sum of squares of each row, divided by the square of a power of two, and that power.

    The power of two is the largest that is at most the row's largest magnitude, so that no square overflows. Divided
    magnitudes below 2^-63 would have subnormal squares, and count as zero. The last bit of every square is cleared, so
    that no compiler can fuse the square and the addition.
    """
    xp = array_namespace(rows)
    largest = xp.max(xp.abs(rows), axis=1)
    power = power_of_two_below(largest)
    scaled = divide(xp.abs(rows), power[:, None])
    scaled = xp.where(scaled < 2.0**-63, xp.zeros_like(scaled), scaled)
    return tree_sum(truncate_last_bit(scaled * scaled)), power


def power_of_two_below(x: Array) -> Array:
    """Return the largest power of two that is at most x, and 1 for zero, infinity and NaN."""
    xp = array_namespace(x)
    if dtype_name(x.dtype) == "float64":
        integer, exponent = xp.int64, 0x7FF << 52
    else:
        integer, exponent = xp.int32, 0xFF << 23
    mask = xp.asarray(exponent, dtype=integer, device=device(x))
    power = bitcast(xp.bitwise_and(bitcast(x, integer), mask), x.dtype)
    usable = xp.isfinite(power) & (power > 0)
    return xp.where(usable, power, xp.ones_like(power))


def rms(rows: Array, count: int) -> Array:
    """Return the root of each row's sum of squares divided by ``count``."""
    squares, power = _scaled_squares(rows)
    return sqrt(divide(squares, count)) * power


def norm2(rows: Array) -> Array:
    """Return the Euclidean norm of each row."""
    squares, power = _scaled_squares(rows)
    return sqrt(squares) * power


def total(x: Array) -> Array:
    """Return the sum of all elements of an array of any shape, as an array of shape (), by the halving tree."""
    xp = array_namespace(x)
    flat = xp.reshape(x, (-1,))
    if flat.shape[0] == 0:
        return xp.sum(flat)
    while (length := flat.shape[0]) > 1:
        half = (length + 1) // 2
        low, high = flat[:half], flat[half:]
        flat = low + (high if length % 2 == 0 else xp.concat([high, xp.zeros_like(low[:1])]))
    return flat[0]


def totals(arrays: Sequence[Array]) -> list[float]:
    """Return the `total` of each array, in one read if all have one dtype."""
    sums = [array_namespace(x).reshape(total(x), (1,)) for x in arrays]
    if len({x.dtype for x in sums}) > 1:
        return [float(x[0]) for x in sums]
    return host_numbers(concat(sums)) if sums else []


def sum_of_squares(x: Array) -> float:
    """Return the sum of the squares of all elements, without overflow; infinity if an element is not finite."""
    xp = array_namespace(x)
    flat = xp.reshape(x, (-1,))
    if flat.shape[0] == 0:
        return 0.0
    largest = float(xp.max(xp.abs(flat)))
    if not math.isfinite(largest):
        return math.inf
    power = math.ldexp(1.0, math.frexp(largest)[1] - 1)
    found = float(total(xp.square(divide(flat, power)))) * power * power
    return math.inf if math.isnan(found) else found  # on the CPU, XLA's maximum of a long vector drops NaN
