"""Building blocks of the kernels: loops over one bucket, which stays in the first-level cache between these loops.

The arithmetic equals the core's, operation by operation. Loops that read a vector from memory run straight
through it, in the order that prefetchers expect.
"""

from __future__ import annotations

import numpy as np

from qcomp.backends.numba_cpu.jit import Bytes, Floats, inline

__all__ = [
    "FRESH",
    "IN_PLACE",
    "MAGNITUDE",
    "NO_RESIDUAL",
    "OVER_INPUT",
    "ROUND",
    "ROUND_BITS",
    "SIGN",
    "SMALLEST",
    "TINY",
    "TOO_LARGE",
    "ZERO",
    "F",
    "Source",
    "U",
    "as_bits",
    "as_float",
    "bucket_length",
    "finish",
    "flush",
    "largest_bits",
    "load",
    "load_scale",
    "mix",
    "power_of_two_below",
    "scaled_squares",
    "store_scale",
    "too_large",
    "tree_sum",
]

F = np.float32
U = np.uint32
TINY = F(2.0**-126)
ZERO = F(0)
NEGLIGIBLE = F(2.0**-63)
"""Values below this fraction of a bucket's maximum have subnormal squares, and count as zero in a norm."""
SMALLEST = 0x00800000
"""The bits of 2**-126, the smallest magnitude that is not flushed."""
INFINITE = 0x7F800000
"""The bits of infinity."""
TOO_LARGE = 0x71800000
"""The bits of 2**100, the smallest magnitude that is refused; larger values and NaN have larger bits."""
MAGNITUDE = U(0x7FFFFFFF)
SIGN = U(0x80000000)

ROUND = F(1.5 * 2.0**23)
"""Adding it to a magnitude of up to 2**22 leaves the nearest integer, half to even, in the last bits."""
ROUND_BITS = np.int32(0x4B400000)

NO_RESIDUAL, IN_PLACE, FRESH, OVER_INPUT = 0, 1, 2, 3
"""The buffer of an encoder's new residual: none, the old residual's, a new one, or the buffer of x."""

Source = tuple[Floats, Floats, Floats, int, Floats, np.float32, np.float32]
"""What an encoder reads: x, the old and the new residual, the buffer of the new one, and a momentum m, keep and new."""


@inline
def as_bits(x: np.float32) -> np.uint32:
    """Return the bits of a float32."""
    return F(x).view(U)


@inline
def as_float(bits: np.uint32) -> np.float32:
    """Return the float32 with these bits."""
    return U(bits).view(F)


@inline
def flush(x: np.float32) -> np.float32:
    """Return x, or +0 if |x| is below 2**-126; NaN stays NaN."""
    return ZERO if abs(x) < TINY else x


@inline
def finish(values: Floats, ranks: np.float32) -> None:
    """Divide sums by the number of ranks; a mean below 2**-126 becomes +0.

    Multiplying by the inverse of a power of two rounds in the same way, and is faster.
    """
    if as_bits(ranks) & U(0x7FFFFF) == U(0):
        inverse = F(1) / ranks
        for i in range(values.size):
            values[i] = flush(values[i] * inverse)
    else:
        for i in range(values.size):
            values[i] = flush(values[i] / ranks)


@inline
def bucket_length(count: int) -> int:
    """Return the length of a bucket of ``count`` elements: the smallest power of two from 8 that holds them."""
    length = 8
    while length < count:
        length *= 2
    return length


@inline
def load(source: Source, start: int, stop: int, length: int, beside: Floats) -> Floats:
    """Return p = flush(flush(x) + residual) of the elements from start to stop, padded with zeros to a length.

    p is stored where the new residual will be; without a residual or with padding, it is in the scratch ``beside``. If
    m is not empty, keep * m + new * x takes the place of x.
    """
    x, residual, out, mode, m, keep, new = source
    filled = stop - start
    if m.size > 0:
        p = beside[:length] if mode == NO_RESIDUAL or length > filled else out[start:stop]
        if mode == NO_RESIDUAL:
            _blend(x[start:stop], m[start:stop], keep, new, p[:filled])
        elif mode == IN_PLACE and length == filled:
            _blend_into(x[start:stop], m[start:stop], keep, new, p)
        else:
            _blend_and_add(x[start:stop], m[start:stop], keep, new, residual[start:stop], p[:filled])
        p[filled:] = ZERO
        return p
    if mode == IN_PLACE and length == filled:
        p = out[start:stop]
        _add_into(x[start:stop], p)
        return p
    if mode == OVER_INPUT and length == filled:
        p = out[start:stop]
        _add_over(p, residual[start:stop])
        return p
    p = beside[:length] if mode == NO_RESIDUAL or length > filled else out[start:stop]
    if mode == NO_RESIDUAL:
        _copy_flushed(x[start:stop], p[:filled])
    elif mode == IN_PLACE:
        _add(x[start:stop], out[start:stop], p[:filled])
    else:
        _add(x[start:stop], residual[start:stop], p[:filled])
    p[filled:] = ZERO
    return p


@inline
def _copy_flushed(x: Floats, p: Floats) -> None:
    for i in range(p.size):
        p[i] = flush(x[i])


@inline
def mix(m: Floats, g: Floats, keep: np.float32, new: np.float32, out: Floats) -> None:
    """Let out = keep * m + new * g; out must overlap neither m nor g."""
    for i in range(out.size):
        out[i] = keep * m[i] + new * g[i]


@inline
def _add(x: Floats, residual: Floats, p: Floats) -> None:
    for i in range(p.size):
        p[i] = flush(flush(x[i]) + residual[i])


@inline
def _add_into(x: Floats, p: Floats) -> None:
    """Add x to p, the old residual; `_add` would run as scalar code here, since LLVM would assume an overlap."""
    for i in range(p.size):
        p[i] = flush(flush(x[i]) + p[i])


@inline
def _add_over(p: Floats, residual: Floats) -> None:
    """Add the residual to p, which holds x."""
    for i in range(p.size):
        p[i] = flush(flush(p[i]) + residual[i])


@inline
def _blend(x: Floats, m: Floats, keep: np.float32, new: np.float32, p: Floats) -> None:
    for i in range(p.size):
        p[i] = flush(keep * m[i] + new * x[i])


@inline
def _blend_into(x: Floats, m: Floats, keep: np.float32, new: np.float32, p: Floats) -> None:
    for i in range(p.size):
        p[i] = flush(flush(keep * m[i] + new * x[i]) + p[i])


@inline
def _blend_and_add(
    x: Floats, m: Floats, keep: np.float32, new: np.float32, residual: Floats, p: Floats
) -> None:
    for i in range(p.size):
        p[i] = flush(flush(keep * m[i] + new * x[i]) + residual[i])


@inline
def largest_bits(p: Floats) -> np.uint32:
    """Return the bits of the largest magnitude.

    Comparing integers puts NaN above infinity, and vectorises. They are signed, because numba compares unsigned ones in
    64 bits.
    """
    largest = np.int32(0)
    for i in range(p.size):
        largest = max(largest, np.int32(as_bits(p[i]) & MAGNITUDE))
    return U(largest)


@inline
def too_large(bits: np.uint32) -> bool:
    """Return whether these bits encode a magnitude of at least 2**100, an infinity or NaN, of any sign."""
    return bool(np.int64(bits & MAGNITUDE) >= TOO_LARGE)


@inline
def _halve(sums: Floats, half: int) -> None:
    for i in range(half):
        sums[i] += sums[i + half]


@inline
def tree_sum(sums: Floats) -> np.float32:
    """Return the sum of an array by adding halves; its length is a power of two, and it is overwritten."""
    half = sums.size // 2
    while half >= 1:
        _halve(sums, half)
        half //= 2
    result: np.float32 = sums[0]
    return result


@inline
def power_of_two_below(bits: np.uint32) -> np.float32:
    """Return the largest power of two up to the finite value with these bits; 1 for zero."""
    exponent = np.int64(bits) & INFINITE
    return as_float(U(exponent)) if exponent > 0 else F(1)


@inline
def _square(x: np.float32, inverse: np.float32) -> np.float32:
    scaled = abs(x) * inverse
    if scaled < NEGLIGIBLE:
        scaled = ZERO
    return as_float(as_bits(scaled * scaled) & U(0xFFFFFFFE))


@inline
def _fold_squares(p: Floats, inverse: np.float32, sums: Floats) -> None:
    """Store the first level of the halving tree over the squares in ``sums``."""
    lower = p[: sums.size]
    upper = p[sums.size :]
    for i in range(sums.size):
        sums[i] = _square(lower[i], inverse) + _square(upper[i], inverse)


@inline
def scaled_squares(p: Floats, largest: np.uint32, sums: Floats) -> tuple[np.float32, np.float32]:
    """Return the sum of squares of p divided by the square of a power of two, and that power.

    ``largest`` has the bits of the largest magnitude, and ``sums`` is scratch of half the length of p. Multiplying by
    the reciprocal of a power of two rounds exactly as dividing by the power does.
    """
    power = power_of_two_below(largest)
    _fold_squares(p, F(1) / power, sums)
    return tree_sum(sums), power


@inline
def load_scale(data: Bytes, at: int) -> np.float32:
    """Return the float32 at any byte of a payload."""
    bits = U(data[at]) | U(data[at + 1]) << U(8) | U(data[at + 2]) << U(16) | U(data[at + 3]) << U(24)
    return as_float(U(bits))


@inline
def store_scale(data: Bytes, at: int, scale: np.float32) -> None:
    """Store a float32 at any byte of a payload."""
    bits = as_bits(scale)
    for i in range(4):
        data[at + i] = np.uint8(bits >> U(8 * i) & U(0xFF))
