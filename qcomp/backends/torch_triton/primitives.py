"""Building blocks of the kernels: IEEE arithmetic, the same operations in the same order as in `qcomp.core`."""

from __future__ import annotations

import triton
import triton.language as tl

STRICT = {"enable_fp_fusion": False}
"""Options of every launch: do not fuse multiplications with additions."""

TINY = tl.constexpr(2.0**-126)
NEGLIGIBLE = tl.constexpr(2.0**-63)
"""Values below this fraction of a bucket's maximum have subnormal squares, and count as zero in a norm."""
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-0x80000000)
EXPONENT = tl.constexpr(0x7F800000)
TOO_LARGE = tl.constexpr(0x71800000)
"""The bits of 2**100, the smallest magnitude that is refused; larger values and NaN have larger bits."""
NO_FRACTION = tl.constexpr(1.5 * 2**23)
"""Float32 numbers of this size are integers."""
MAX_HALVINGS = tl.constexpr(15)
"""How many halvings reduce the longest bucket to one element."""


@triton.jit
def as_bits(x: tl.tensor) -> tl.tensor:
    """Return the bits of float32 numbers as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits: tl.tensor) -> tl.tensor:
    """Return the float32 numbers with these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """Return the bits of |x|: integers ordered as the magnitudes, with NaN above infinity."""
    return as_bits(x) & MAGNITUDE


@triton.jit
def negated(x: tl.tensor) -> tl.tensor:
    """Return -x; older versions of Triton compute ``-x`` as 0 - x, which makes +0 of +0."""
    return as_float(as_bits(x) ^ SIGN)


@triton.jit
def ordered(bits: tl.tensor) -> tl.tensor:
    """Map the bits of numbers to integers in the same order, and back; NaN lies beyond the infinities."""
    return bits ^ ((bits >> 31) & MAGNITUDE)


@triton.jit
def flush(x: tl.tensor) -> tl.tensor:
    """Return x, or +0 if |x| is below 2**-126; NaN stays NaN."""
    return tl.where(tl.abs(x) < TINY, 0.0, x)


@triton.jit
def rint(x: tl.tensor) -> tl.tensor:
    """Return x rounded to an integer, half to even, for |x| below 2**22; zeros come out positive."""
    return (x + NO_FRACTION) - NO_FRACTION


@triton.jit
def times_factor(x: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Return x times the factor, rounded as in `qcomp.Scaled`."""
    return flush(as_float(as_bits(x * factor) & -2))


@triton.jit
def tree_sum(tile: tl.tensor) -> tl.tensor:
    """Return the sum of each bucket of a tile (`tiles`), by adding halves until one element is left.

    Lanes beyond the width of a tail hold zeros, which are added first and change nothing.
    """
    BUCKETS: tl.constexpr = tile.shape[0]
    sums = tl.reshape(tile, (BUCKETS, tile.shape[1] * tile.shape[2]))
    for _ in tl.static_range(MAX_HALVINGS):
        if sums.shape[1] > 1:
            # A sum of two is one addition, so its order cannot differ.
            sums = tl.sum(tl.reshape(sums, (BUCKETS, 2, sums.shape[1] // 2)), axis=1)
    return tl.reshape(sums, (BUCKETS,))


@triton.jit
def scaled_squares(p: tl.tensor, largest: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return each bucket's sum of squares divided by the square of a power of two, and that power.

    ``largest`` has the bits of each bucket's largest magnitude. Multiplying by the reciprocal of a power of two rounds
    exactly as dividing by the power does.
    """
    power = as_float(largest & EXPONENT)
    power = tl.where(power > 0.0, power, 1.0)
    inverse = tl.div_rn(tl.full(power.shape, 1.0, tl.float32), power)
    scaled = tl.abs(p) * inverse[:, None, None]
    scaled = tl.where(scaled < NEGLIGIBLE, 0.0, scaled)
    return tree_sum(as_float(as_bits(scaled * scaled) & -2)), power


@triton.jit
def round_up_step(norm: tl.tensor, levels: tl.constexpr, low: tl.constexpr) -> tl.tensor:
    """Return norm / levels, rounded up until the bits of ``low`` are 0; see `qcomp.core.compressors.qsgd`."""
    exact = tl.div_rn(norm, tl.full(norm.shape, levels, tl.float32))
    step = as_float((as_bits(exact) + low) & ~low)
    step = tl.where(step < TINY, TINY, step)
    return tl.where(norm > 0.0, step, norm)
