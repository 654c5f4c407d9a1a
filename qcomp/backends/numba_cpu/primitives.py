"""Building blocks of the kernels: loops over one bucket, which stays in the first-level cache between these loops.

The arithmetic equals the core's, operation by operation. Loops that read a vector from memory run straight
through it, in the order that prefetchers expect.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types

from qcomp.backends.numba_cpu.jit import Bytes, Floats, inline

F = np.float32
U = np.uint32
TINY = F(2.0**-126)
ZERO = F(0)
NEGLIGIBLE = F(2.0**-63)
"""Values below this fraction of a bucket's maximum have subnormal squares, and count as zero in a norm."""
LIMIT = F(2.0**100)
"""The smallest magnitude that is refused."""
EXACT_TINY, EXACT_LIMIT = (TINY, 2.0**-1022), (LIMIT, 2.0**996)
"""`TINY` and `LIMIT` for float32, and for float64 values that are sent exactly."""

NO_RESIDUAL, IN_PLACE, FRESH, OVER_INPUT = 0, 1, 2, 3
"""Where an encoder writes the new residual: nowhere, over the old residual, into a new buffer, or over x."""

Weights = tuple[np.float32, np.float32, np.float32, np.float32]
"""keep, new, before and after: with a momentum m, after * (keep * (before * m) + new * (before * x)) is compressed."""
Source = tuple[Floats, Floats, Floats, int, Floats, Weights, np.float32]
"""What an encoder gets: x, the old residual, the array for the new one, the mode (one of the four above), a momentum m,
the weights, and the least magnitude that is not flushed."""


@extending.intrinsic
def by_width(typing_context: Any, x: Any, narrow: Any, wide: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Return ``narrow`` if x is float32 and ``wide`` if it is float64; x is a float or an array."""
    numbers = tuple(map(types.unliteral, (narrow, wide)))
    place = int(getattr(x, "dtype", x).bitwidth == 64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return arguments[1 + place]

    return numbers[place](x, *numbers), generate


@extending.intrinsic
def as_bits(typing_context: Any, x: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Return the bits of a float as an unsigned integer of its width."""
    return (types.uint32 if x.bitwidth == 32 else types.uint64)(x), _as_other_type


@extending.intrinsic
def as_float(typing_context: Any, bits: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Return the float with the bits of an integer of its width."""
    return (types.float32 if bits.bitwidth == 32 else types.float64)(bits), _as_other_type


@extending.intrinsic
def as_signed(typing_context: Any, x: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Return the bits of a float as a signed integer of its width."""
    return (types.int32 if x.bitwidth == 32 else types.int64)(x), _as_other_type


def _as_other_type(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))


def _masking(name: str, masks: dict[int, int]) -> Any:
    """Return a function that keeps some bits of a float."""

    def keep(typing_context: Any, x: Any) -> Any:  # noqa: ARG001 - numba's protocol
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            integer = ir.IntType(x.bitwidth)
            kept = builder.and_(builder.bitcast(arguments[0], integer), integer(masks[x.bitwidth]))
            return builder.bitcast(kept, arguments[0].type)

        return x(x), generate

    keep.__name__ = name
    return extending.intrinsic(keep)


truncate_last_bit = _masking("truncate_last_bit", {32: 0xFFFFFFFE, 64: 0xFFFFFFFFFFFFFFFE})
"""Returns a float whose last bit is cleared."""
_exponent = _masking("_exponent", {32: 0x7F800000, 64: 0x7FF0000000000000})


@extending.intrinsic
def with_sign(typing_context: Any, magnitude: Any, x: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Return a magnitude with the sign of x; `math.copysign` is slower, since it accepts negative magnitudes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        integer = ir.IntType(x.bitwidth)
        bits, of_x = (builder.bitcast(argument, integer) for argument in arguments)
        sign = builder.and_(of_x, integer(1 << x.bitwidth - 1))
        return builder.bitcast(builder.or_(bits, sign), arguments[1].type)

    return x(x, x), generate


@inline
def magnitude_bits(x: np.float32) -> int:
    """Return the bits of a magnitude as a signed integer. A larger magnitude gives a larger integer, NaN the largest.

    Loops over integers vectorise. They are signed, because numba compares unsigned ones in 64 bits.
    """
    found: int = as_signed(abs(x))
    return found


@inline
def top_bit(x: np.float32) -> np.uint32:
    """Return the sign bit."""
    bits: np.uint32 = as_bits(x) >> by_width(x, U(31), np.uint64(63))
    return bits


@inline
def rounding(x: np.float32) -> np.float32:
    """Return the addend that leaves the nearest integer, half to even, in the last bits of a magnitude up to 2**22."""
    found: np.float32 = by_width(x, F(1.5 * 2.0**23), 1.5 * 2.0**52)
    return found


@inline
def flush(x: np.float32, tiny: np.float32 = TINY) -> np.float32:
    """Return x, or +0 if |x| is below ``tiny``, by default 2**-126; NaN stays NaN."""
    return ZERO if abs(x) < tiny else x


@inline
def power_of_two_below(x: np.float32) -> np.float32:
    """Return the largest power of two up to a finite value; 1 for zero."""
    power: np.float32 = _exponent(x)
    return power if power > ZERO else F(1)


@inline
def finish(values: Floats, ranks: np.float32) -> None:
    """Divide sums by the number of ranks; a mean below 2**-126, in float64 below 2**-1022, becomes +0.

    Multiplying by the inverse of a power of two rounds in the same way, and is faster.
    """
    tiny = by_width(values, *EXACT_TINY)
    if power_of_two_below(ranks) == ranks:
        inverse = F(1) / ranks
        for i in range(values.size):
            values[i] = flush(values[i] * inverse, tiny)
    else:
        for i in range(values.size):
            values[i] = flush(values[i] / ranks, tiny)


@inline
def bucket_length(count: int) -> int:
    """Return the padded length of a bucket of ``count`` elements: the smallest sufficient power of two, at least 8."""
    length = 8
    while length < count:
        length *= 2
    return length


@inline
def load(source: Source, start: int, stop: int, length: int, beside: Floats) -> Floats:
    """Return p = flush(flush(x) + residual) of the elements from start to stop, padded with zeros to a length.

    p is stored where the new residual will be; without a residual or with padding, it is in the scratch ``beside``. If
    m is not empty, the blend of m and x takes the place of x.
    """
    x, residual, out, mode, m, weights, tiny = source
    filled = stop - start
    if m.size > 0:
        p = beside[:length] if mode == NO_RESIDUAL or length > filled else out[start:stop]
        if mode == NO_RESIDUAL:
            blend(x[start:stop], m[start:stop], weights, p[:filled], tiny)
        elif mode == IN_PLACE and length == filled:
            _blend_into(x[start:stop], m[start:stop], weights, p, tiny)
        else:
            _blend_and_add(x[start:stop], m[start:stop], weights, residual[start:stop], p[:filled], tiny)
        p[filled:] = ZERO
        return p
    if mode == IN_PLACE and length == filled:
        p = out[start:stop]
        _add_into(x[start:stop], p, tiny)
        return p
    if mode == OVER_INPUT and length == filled:
        p = out[start:stop]
        _add_over(p, residual[start:stop], tiny)
        return p
    p = beside[:length] if mode == NO_RESIDUAL or length > filled else out[start:stop]
    if mode == NO_RESIDUAL:
        _copy_flushed(x[start:stop], p[:filled], tiny)
    elif mode == IN_PLACE:
        _add(x[start:stop], out[start:stop], p[:filled], tiny)
    else:
        _add(x[start:stop], residual[start:stop], p[:filled], tiny)
    p[filled:] = ZERO
    return p


@inline
def _copy_flushed(x: Floats, p: Floats, tiny: np.float32) -> None:
    for i in range(p.size):
        p[i] = flush(x[i], tiny)


@inline
def mix(m: Floats, g: Floats, keep: np.float32, new: np.float32, out: Floats) -> None:
    """Let out = keep * m + new * g; out must overlap neither m nor g."""
    for i in range(out.size):
        out[i] = keep * m[i] + new * g[i]


@inline
def mix_into(m: Floats, g: Floats, keep: np.float32, new: np.float32) -> None:
    """Let m = keep * m + new * g; `mix` would run as scalar code here, since LLVM would assume an overlap."""
    for i in range(m.size):
        m[i] = keep * m[i] + new * g[i]


@inline
def _add(x: Floats, residual: Floats, p: Floats, tiny: np.float32) -> None:
    for i in range(p.size):
        p[i] = flush(flush(x[i], tiny) + residual[i], tiny)


@inline
def _add_into(x: Floats, p: Floats, tiny: np.float32) -> None:
    """Add x to p, the old residual; `_add` would run as scalar code here, since LLVM would assume an overlap."""
    for i in range(p.size):
        p[i] = flush(flush(x[i], tiny) + p[i], tiny)


@inline
def _add_over(p: Floats, residual: Floats, tiny: np.float32) -> None:
    """Add the residual to p, which holds x."""
    for i in range(p.size):
        p[i] = flush(flush(p[i], tiny) + residual[i], tiny)


@inline
def blend(x: Floats, m: Floats, weights: Weights, p: Floats, tiny: np.float32) -> None:
    """Let p be the blend of m and x, flushed below ``tiny``; p must overlap neither."""
    keep, new, before, after = weights
    for i in range(p.size):
        p[i] = flush(after * (keep * (before * m[i]) + new * (before * x[i])), tiny)


@inline
def _blend_into(x: Floats, m: Floats, weights: Weights, p: Floats, tiny: np.float32) -> None:
    keep, new, before, after = weights
    for i in range(p.size):
        mixed = after * (keep * (before * m[i]) + new * (before * x[i]))
        p[i] = flush(flush(mixed, tiny) + p[i], tiny)


@inline
def _blend_and_add(
    x: Floats, m: Floats, weights: Weights, residual: Floats, p: Floats, tiny: np.float32
) -> None:
    keep, new, before, after = weights
    for i in range(p.size):
        mixed = after * (keep * (before * m[i]) + new * (before * x[i]))
        p[i] = flush(flush(mixed, tiny) + residual[i], tiny)


@inline
def largest(p: Floats) -> np.float32:
    """Return the largest magnitude, or NaN if there is one."""
    bits = magnitude_bits(p.dtype.type(0))
    for i in range(p.size):
        bits = max(bits, magnitude_bits(p[i]))
    found: np.float32 = as_float(bits)
    return found


@inline
def too_large(x: np.float32) -> bool:
    """Return whether a magnitude is at least 2**100, an infinity or NaN."""
    return not abs(x) < LIMIT


@inline
def _halve(sums: Floats, half: int) -> None:
    for i in range(half):
        sums[i] += sums[i + half]


@inline
def tree_sum(sums: Floats) -> np.float32:
    """Return the sum of an array by adding halves. The length is a power of two, and the array is overwritten."""
    half = sums.size // 2
    while half >= 1:
        _halve(sums, half)
        half //= 2
    result: np.float32 = sums[0]
    return result


@inline
def _square(x: np.float32, inverse: np.float32) -> np.float32:
    scaled = abs(x) * inverse
    if scaled < NEGLIGIBLE:
        scaled = ZERO
    square: np.float32 = truncate_last_bit(scaled * scaled)
    return square


@inline
def _fold_squares(p: Floats, inverse: np.float32, sums: Floats) -> None:
    """Store the first level of the halving tree over the squares in ``sums``."""
    lower = p[: sums.size]
    upper = p[sums.size :]
    for i in range(sums.size):
        sums[i] = _square(lower[i], inverse) + _square(upper[i], inverse)


@inline
def scaled_squares(p: Floats, peak: np.float32, sums: Floats) -> tuple[np.float32, np.float32]:
    """Return the sum of squares of p divided by the square of a power of two, and that power.

    ``peak`` is the largest magnitude, and ``sums`` is scratch of half the length of p. Multiplying by the reciprocal of
    a power of two rounds exactly as dividing by the power does.
    """
    power = power_of_two_below(peak)
    _fold_squares(p, F(1) / power, sums)
    return tree_sum(sums), power


@inline
def load_scale(data: Bytes, at: int) -> np.float32:
    """Return the float32 at any byte of a payload."""
    bits = U(data[at]) | U(data[at + 1]) << U(8) | U(data[at + 2]) << U(16) | U(data[at + 3]) << U(24)
    scale: np.float32 = as_float(U(bits))
    return scale


@inline
def store_scale(data: Bytes, at: int, scale: np.float32) -> None:
    """Store a float32 at any byte of a payload."""
    bits = as_bits(F(scale))
    for i in range(4):
        data[at + i] = np.uint8(bits >> U(8 * i) & U(0xFF))
