"""The kernels of `qcomp.core.compressors.minmax`: eight bits between the extremes of every bucket, with feedback.

p = flush(flush(x) + residual); step = (max - min) / 255, rounded up to 16 bits; base = a whole number of steps if the
bucket spans zero, else min; code = rint(flush(p - base) / step), clamped to 0 to 255;
residual' = flush(p - (base + code * step)).

Bytes read and written per float32 element: encode with feedback 8 and 5, without 4 and 1; decode 1 and 4, plus 4 read
to accumulate. A 16-bit element takes 2 bytes less per access; a blend reads 4 more. Memory bandwidth is the limit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qcomp.backends.torch_triton.codec import Family
from qcomp.backends.torch_triton.packing import pack
from qcomp.backends.torch_triton.primitives import (
    as_bits,
    as_float,
    flush,
    magnitude_bits,
    ordered,
    rint,
    round_up_step,
)
from qcomp.backends.torch_triton.tiles import buckets_inside, refuse, store_scale
from qcomp.core.compressors import MinMaxUInt8

LARGEST_INT = tl.constexpr(0x7FFFFFFF)


def minmax(c: MinMaxUInt8) -> Family:
    """Return the functions of `MinMaxUInt8`."""
    return Family(c, _encode, _decode)


@triton.jit
def _extremes(p: tl.tensor, inside: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the smallest and the largest value of each bucket, without padding.

    Values are compared as integers, since float comparisons with NaN are false.
    """
    places = ordered(as_bits(p))
    low = tl.min(tl.min(tl.where(inside, places, LARGEST_INT), axis=2), axis=1)
    high = tl.max(tl.max(tl.where(inside, places, -LARGEST_INT - 1), axis=2), axis=1)
    return as_float(ordered(low)), as_float(ordered(high))


@triton.jit
def _clamp(code: tl.tensor) -> tl.tensor:
    code = tl.where(code > 0.0, code, 0.0)
    return tl.where(code > 255.0, 255.0, code)


@triton.jit
def _encode(
    p: tl.tensor,
    inside: tl.tensor,
    codes: tl.tensor,
    bases: tl.tensor,
    steps: tl.tensor,
    refused: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    filled: tl.tensor,
    width: tl.tensor,
    stream: tl.tuple,
    factor: tl.tensor,
    CONSTANTS: tl.constexpr,
    TAIL: tl.constexpr,
) -> tl.tensor:
    present = buckets_inside(count, p.shape[0])
    low, high = _extremes(p, inside)
    refuse(refused, tl.where(present, tl.maximum(magnitude_bits(low), magnitude_bits(high)), 0))
    step = round_up_step(flush(high - low), 255, 0xFF)
    divisor = tl.where(step > 0.0, step, 1.0)
    zero_code = _clamp(rint(tl.div_rn(-low, divisor)))
    base = flush(tl.where((low <= 0.0) & (high >= 0.0), -(zero_code * step), low))
    store_scale(bases, base, first, count)
    store_scale(steps, step, first, count)
    above = flush(p - base[:, None, None])
    code = _clamp(rint(tl.div_rn(above, tl.broadcast_to(divisor[:, None, None], p.shape))))
    pack(codes, tl.where(inside, code, 0.0).to(tl.int32), first, count, width, 8, TAIL)
    return base[:, None, None] + code * step[:, None, None]


@triton.jit
def _decode(
    code: tl.tensor, base: tl.tensor, step: tl.tensor, factor: tl.tensor, CONSTANTS: tl.constexpr
) -> tl.tensor:
    return base[:, None, None] + code.to(tl.float32) * step[:, None, None]
