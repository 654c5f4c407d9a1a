"""The kernels of `qcomp.core.compressors.qsgd`: stochastic rounding to evenly spaced levels, with feedback.

p = flush(flush(x) + residual); step = norm of the bucket / levels, rounded up to 17 bits;
position = min(|p| / step, levels); level = floor(position), plus 1 if draw < rint(fraction * 65536);
code = level, with the sign in the top bit; residual' = flush(p - signed level * step).

Bytes read and written per float32 element, with b bits: encode with feedback 8 and 4 + b/8, without 4 and b/8; decode
b/8 and 4, plus 4 read to accumulate. A 16-bit element takes 2 bytes less per access; a blend reads 4 more. The
encoder's arithmetic, ten rounds of Philox for eight elements and a division for each, takes almost as long as its
memory accesses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qcomp.backends.torch_triton.codec import Family
from qcomp.backends.torch_triton.packing import pack
from qcomp.backends.torch_triton.philox import draws16
from qcomp.backends.torch_triton.primitives import (
    as_float,
    magnitude_bits,
    negated,
    rint,
    round_up_step,
    scaled_squares,
    times_factor,
)
from qcomp.backends.torch_triton.tiles import refuse, store_scale
from qcomp.core.compressors import QSGD


def qsgd(c: QSGD, factor: float | None = None) -> Family:
    """Return the functions of `QSGD`, or of a `Scaled` `QSGD`, which multiplies decoded values by a factor."""
    scaled = factor is not None
    return Family(
        c,
        _encode,
        _decode,
        encoder=(c.bits, scaled, c.levels, c.norm == "l2"),
        decoder=(c.bits, scaled),
        factor=1.0 if factor is None else factor,
    )


@triton.jit
def _levels(p: tl.tensor, step: tl.tensor, draws: tl.tensor, LEVELS: tl.constexpr) -> tl.tensor:
    """Return the level that each element is rounded to."""
    divisor = tl.where(step > 0.0, step, 1.0)
    position = tl.div_rn(tl.abs(p), tl.broadcast_to(divisor[:, None, None], p.shape))
    position = tl.where(position < LEVELS, position, LEVELS)
    level = position.to(tl.int32)
    threshold = rint((position - level.to(tl.float32)) * 65536.0).to(tl.int32)
    return level + (draws < threshold).to(tl.int32)


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
    SCALED: tl.constexpr = CONSTANTS[1]
    LEVELS: tl.constexpr = CONSTANTS[2]
    L2: tl.constexpr = CONSTANTS[3]
    largest = tl.max(tl.max(magnitude_bits(p), axis=2), axis=1)
    refuse(refused, largest)
    if L2:
        total, power = scaled_squares(p, largest)
        step = round_up_step(tl.sqrt_rn(total) * power, LEVELS, 0x7F)
    else:
        step = round_up_step(as_float(largest), LEVELS, 0x7F)
    store_scale(steps, step, first, count)
    seed, hop, first_block = stream
    draws = draws16(seed, hop, first_block, first, p.shape[0], p.shape[1] * p.shape[2])
    level = _levels(p, step, draws, LEVELS)
    negative = p < 0.0
    code = tl.where(negative & (level > 0), level + (1 << (BITS - 1)), level)
    pack(codes, code, first, count, width, BITS, TAIL)
    magnitude = level.to(tl.float32) * step[:, None, None]
    if SCALED:
        magnitude = times_factor(magnitude, factor)
    return tl.where(negative, negated(magnitude), magnitude)


@triton.jit
def _decode(
    code: tl.tensor, step: tl.tensor, other: tl.tensor, factor: tl.tensor, CONSTANTS: tl.constexpr
) -> tl.tensor:
    BITS: tl.constexpr = CONSTANTS[0]
    SCALED: tl.constexpr = CONSTANTS[1]
    sign = 1 << (BITS - 1)
    magnitude = (code & (sign - 1)).to(tl.float32) * step[:, None, None]
    values = tl.where(code > sign, negated(magnitude), magnitude)
    if SCALED:
        values = times_factor(values, factor)
    return values
