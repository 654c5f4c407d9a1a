"""Eight bits between the extremes of every bucket, with feedback: `qcomp.core.compressors.minmax`.

p = flush(flush(x) + residual); step = (max - min) / 255, rounded up to 16 bits; base = a whole number of steps if the
bucket spans zero, else min; code = rint(flush(p - base) / step), clamped to 0 to 255;
residual' = flush(p - (base + code * step)).

Bytes read and written per float32 element: encode with feedback 8 and 5, without 4 and 1; decode 1 and 4, plus 4 read
to accumulate. A 16-bit element takes 2 bytes less per access; a blend reads 4 more. Memory bandwidth is the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from qcomp.backends.torch_triton.packing import pack, unpack
from qcomp.backends.torch_triton.primitives import (
    STRICT,
    as_bits,
    as_float,
    flush,
    magnitude_bits,
    ordered,
    rint,
    round_up_step,
)
from qcomp.backends.torch_triton.tiles import (
    buckets_inside,
    compensated,
    cut,
    elements_inside,
    mix,
    offsets_in_tile,
    refuse,
    write,
)
from qcomp.core.compressors import MinMaxUInt8
from qcomp.core.kernels import Blend

__all__ = ["minmax_decode", "minmax_encode"]

Array = Any

LARGEST_INT = tl.constexpr(0x7FFFFFFF)


def minmax_encode(
    c: MinMaxUInt8,
    x: Array,
    blend: Blend | None,
    residual: Array | None,
    parts: Mapping[str, Array],
    out: Array | None,
    refused: Array,
) -> None:
    """Compress x plus the residual to bytes, bases and steps, and store what is lost as the new residual.

    Parameters
    ----------
    c : MinMaxUInt8
    x, blend, residual, parts, out, refused
        See `qcomp.backends.torch_triton.sign.sign_encode`.
    """
    tiles = cut(x.numel(), c.bucket_size)
    _encode[tiles.grid](
        x,
        *mix(blend),
        residual,
        parts["codes"],
        parts["base"],
        parts["step"],
        out,
        refused,
        *tiles.sizes,
        BUCKETS=tiles.buckets,
        LENGTH=c.bucket_size,
        num_warps=tiles.warps,
        **STRICT,
    )


def minmax_decode(c: MinMaxUInt8, parts: Mapping[str, Array], out: Array, *, accumulate: bool) -> None:
    """Decompress bytes, bases and steps into a buffer, or add them to it.

    Parameters
    ----------
    c : MinMaxUInt8
    parts, out, accumulate
        See `qcomp.backends.torch_triton.sign.sign_decode`.
    """
    tiles = cut(out.numel(), c.bucket_size)
    _decode[tiles.grid](
        parts["codes"],
        parts["base"],
        parts["step"],
        out,
        *tiles.sizes,
        ADD=accumulate,
        BUCKETS=tiles.buckets,
        LENGTH=c.bucket_size,
        num_warps=tiles.warps,
        **STRICT,
    )


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
def _encode_tile(
    x: tl.tensor,
    m: tl.tensor,
    keep: tl.tensor,
    new: tl.tensor,
    residual: tl.tensor,
    codes: tl.tensor,
    bases: tl.tensor,
    steps: tl.tensor,
    out: tl.tensor,
    refused: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    filled: tl.tensor,
    width: tl.tensor,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    offsets = offsets_in_tile(width, BUCKETS, LENGTH)
    inside = elements_inside(offsets, count, filled, width, BUCKETS, LENGTH, TAIL)
    p = compensated(x, m, keep, new, residual, first * LENGTH, offsets, inside)
    present = buckets_inside(count, BUCKETS)
    low, high = _extremes(p, inside)
    refuse(refused, tl.where(present, tl.maximum(magnitude_bits(low), magnitude_bits(high)), 0))
    step = round_up_step(flush(high - low), 255, 0xFF)
    divisor = tl.where(step > 0.0, step, 1.0)
    zero_code = _clamp(rint(tl.div_rn(-low, divisor)))
    base = flush(tl.where((low <= 0.0) & (high >= 0.0), -(zero_code * step), low))
    bucket = first + tl.arange(0, BUCKETS)
    tl.store(bases + bucket, base, mask=present)
    tl.store(steps + bucket, step, mask=present)
    above = flush(p - base[:, None, None])
    code = _clamp(rint(tl.div_rn(above, tl.broadcast_to(divisor[:, None, None], p.shape))))
    pack(codes, tl.where(inside, code, 0.0).to(tl.int32), first, count, width, 8, BUCKETS, LENGTH, TAIL)
    if out is not None:
        decoded = base[:, None, None] + code * step[:, None, None]
        tl.store(out + first * LENGTH + offsets, flush(p - decoded), mask=inside)


@triton.jit(
    do_not_specialize=["full", "rest", "tail_width"], do_not_specialize_on_alignment=["bases", "steps"]
)
def _encode(
    x: tl.tensor,
    m: tl.tensor,
    keep: tl.float32,
    new: tl.float32,
    residual: tl.tensor,
    codes: tl.tensor,
    bases: tl.tensor,
    steps: tl.tensor,
    out: tl.tensor,
    refused: tl.tensor,
    full: tl.int64,
    rest: tl.int32,
    tail_width: tl.int32,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * BUCKETS
    if first < full:
        _encode_tile(
            x,
            m,
            keep,
            new,
            residual,
            codes,
            bases,
            steps,
            out,
            refused,
            first,
            full - first,
            LENGTH,
            LENGTH // 8,
            BUCKETS,
            LENGTH,
            False,
        )
    else:
        _encode_tile(
            x,
            m,
            keep,
            new,
            residual,
            codes,
            bases,
            steps,
            out,
            refused,
            full,
            1,
            rest,
            tail_width,
            1,
            LENGTH,
            True,
        )


@triton.jit
def _decode_tile(
    codes: tl.tensor,
    bases: tl.tensor,
    steps: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    filled: tl.tensor,
    width: tl.tensor,
    ADD: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    bucket = first + tl.arange(0, BUCKETS)
    present = buckets_inside(count, BUCKETS)
    base = tl.load(bases + bucket, mask=present, other=0.0)
    step = tl.load(steps + bucket, mask=present, other=0.0)
    code = unpack(codes, first, count, width, 8, BUCKETS, LENGTH, TAIL)
    values = base[:, None, None] + code.to(tl.float32) * step[:, None, None]
    offsets = offsets_in_tile(width, BUCKETS, LENGTH)
    write(
        out + first * LENGTH,
        offsets,
        elements_inside(offsets, count, filled, width, BUCKETS, LENGTH, TAIL),
        values,
        ADD,
    )


@triton.jit(
    do_not_specialize=["full", "rest", "tail_width"], do_not_specialize_on_alignment=["bases", "steps"]
)
def _decode(
    codes: tl.tensor,
    bases: tl.tensor,
    steps: tl.tensor,
    out: tl.tensor,
    full: tl.int64,
    rest: tl.int32,
    tail_width: tl.int32,
    ADD: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * BUCKETS
    if first < full:
        _decode_tile(
            codes, bases, steps, out, first, full - first, LENGTH, LENGTH // 8, ADD, BUCKETS, LENGTH, False
        )
    else:
        _decode_tile(codes, bases, steps, out, full, 1, rest, tail_width, ADD, 1, LENGTH, True)
