"""The kernels of `qcomp.core.compressors.lloyd_max`: nearest rounding to the best levels for a normal distribution.

p = flush(flush(x) + residual); code = how many thresholds * (root mean p^2 of the bucket) are below |p|, with the sign
in the top bit; step = <|p|, level> / ||level||^2, cut to 17 bits; residual' = flush(p - signed level * step).

Bytes read and written per float32 element, with b bits: encode with feedback 8 and 4 + b/8, without 4 and b/8; decode
b/8 and 4, plus 4 read to accumulate. A 16-bit element takes 2 bytes less per access; a blend reads 4 more. Each
threshold takes about six instructions per element: with 4 bits the encoder has a quarter more instructions than the
encoder of `QSGD(7)`.
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
    negated,
    scaled_squares,
    tree_sum,
)
from qcomp.backends.torch_triton.tiles import refuse, store_scale
from qcomp.core.compressors import LloydMax
from qcomp.core.compressors.lloyd_max import LEVELS, THRESHOLDS


def lloyd_max(c: LloydMax) -> Family:
    """Return the functions of `LloydMax` with codes of fixed width."""
    levels = LEVELS[c.bits]
    return Family(c, _encode, _decode, encoder=(c.bits, levels, THRESHOLDS[c.bits]), decoder=(c.bits, levels))


@triton.jit
def _level(number: tl.tensor, LEVELS: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Return the levels with these numbers."""
    level = tl.full(number.shape, LEVELS[0], tl.float32)
    for k in tl.static_range((1 << (BITS - 1)) - 1):
        level += tl.where(number > k, 1.0 * (LEVELS[k + 1] - LEVELS[k]), 0.0)
    return level


@triton.jit
def _step(
    p: tl.tensor, level: tl.tensor, inside: tl.tensor, filled: tl.tensor, BITS: tl.constexpr
) -> tl.tensor:
    """Return <|p|, level> / ||level||^2 of each bucket, cut to 17 bits; with 1 bit the mean magnitude."""
    if BITS == 1:
        total = tree_sum(tl.abs(p))
        step = tl.div_rn(total, tl.full(total.shape, filled, tl.float32))
    else:
        along = tree_sum(as_float(as_bits(tl.abs(p) * level) & -2))
        squares = tree_sum(tl.where(inside, level * level, 0.0))
        # Buckets of a tile that do not exist have no element, and are not stored.
        step = tl.div_rn(along, tl.where(squares > 0.0, squares, 1.0))
        step = as_float(as_bits(step) & ~0x7F)
    return flush(step)


@triton.jit
def _encode(
    p: tl.tensor,
    inside: tl.tensor,
    codes: tl.tensor,
    steps: tl.tensor,
    others: tl.tensor,
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
    BITS: tl.constexpr = CONSTANTS[0]
    LEVELS: tl.constexpr = CONSTANTS[1]
    THRESHOLDS: tl.constexpr = CONSTANTS[2]
    largest = tl.max(tl.max(magnitude_bits(p), axis=2), axis=1)
    refuse(refused, largest)
    number = tl.zeros(p.shape, tl.int32)
    if BITS > 1:
        total, power = scaled_squares(p, largest)
        rms = tl.sqrt_rn(tl.div_rn(total, tl.full(total.shape, filled, tl.float32))) * power
        scale = flush(rms)
        for k in tl.static_range((1 << (BITS - 1)) - 1):
            threshold = flush(THRESHOLDS[k] * scale)
            number += (tl.abs(p) > threshold[:, None, None]).to(tl.int32)
    level = _level(number, LEVELS, BITS)
    step = _step(p, level, inside, filled, BITS)
    store_scale(steps, step, first, count)
    negative = p < 0.0
    code = tl.where(negative, number + (1 << (BITS - 1)), number)
    pack(codes, code, first, count, width, BITS, TAIL)
    magnitude = level * step[:, None, None]
    return tl.where(negative, negated(magnitude), magnitude)


@triton.jit
def _decode(
    code: tl.tensor, step: tl.tensor, other: tl.tensor, factor: tl.tensor, CONSTANTS: tl.constexpr
) -> tl.tensor:
    BITS: tl.constexpr = CONSTANTS[0]
    LEVELS: tl.constexpr = CONSTANTS[1]
    sign = 1 << (BITS - 1)
    magnitude = _level(code & (sign - 1), LEVELS, BITS) * step[:, None, None]
    return tl.where(code >= sign, negated(magnitude), magnitude)
