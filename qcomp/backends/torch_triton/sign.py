"""The kernels of `qcomp.core.compressors.sign`: the sign of every element and a scale for every bucket, with feedback.

p = flush(flush(x) + residual); scale = mean |p| or root mean p^2 of the bucket; code = 1 where p < 0;
residual' = flush(p - (scale or -scale)).

Bytes read and written per float32 element: encode with feedback 8 and 4.125, without 4 and 0.125; decode 0.125 and 4,
plus 4 read to accumulate. A 16-bit element takes 2 bytes less per access; a blend reads 4 more. Memory bandwidth is
the limit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qcomp.backends.torch_triton.codec import Family
from qcomp.backends.torch_triton.packing import pack
from qcomp.backends.torch_triton.primitives import (
    TOO_LARGE,
    flush,
    magnitude_bits,
    negated,
    scaled_squares,
    tree_sum,
)
from qcomp.backends.torch_triton.tiles import refuse, store_scale
from qcomp.core.compressors import ScaledSign

_REGISTERS = {} if torch.version.hip else {"maxnreg": 64}
"""Without this limit, code for the rare tail takes more registers, so that fewer warps keep memory busy. Almost nothing
is spilled."""


def sign(c: ScaledSign) -> Family:
    """Return the functions of `ScaledSign`."""
    return Family(c, _encode, _decode, encoder=(c.scale == "rms",), options=_REGISTERS)


@triton.jit
def _encode(
    p: tl.tensor,
    inside: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
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
    RMS: tl.constexpr = CONSTANTS[0]
    if RMS:
        largest = tl.max(tl.max(magnitude_bits(p), axis=2), axis=1)
        refuse(refused, largest)
        total, power = scaled_squares(p, largest)
        scale = tl.sqrt_rn(tl.div_rn(total, tl.full(total.shape, filled, tl.float32))) * power
    else:
        total = tree_sum(tl.abs(p))
        # No magnitude exceeds the sum, so the elements are checked only if the sum is too large.
        if tl.max(magnitude_bits(total), axis=0) >= TOO_LARGE:
            refuse(refused, magnitude_bits(p))
        scale = tl.div_rn(total, tl.full(total.shape, filled, tl.float32))
    scale = flush(scale)
    negative = p < 0.0
    pack(codes, negative.to(tl.int32), first, count, width, 1, TAIL)
    store_scale(scales, scale, first, count)
    return tl.where(negative, negated(scale)[:, None, None], scale[:, None, None])


@triton.jit
def _decode(
    code: tl.tensor, scale: tl.tensor, other: tl.tensor, factor: tl.tensor, CONSTANTS: tl.constexpr
) -> tl.tensor:
    return tl.where(code == 1, negated(scale)[:, None, None], scale[:, None, None])
