"""Nearest rounding to the best levels for a normal distribution, with feedback: `qcomp.core.compressors.lloyd_max`.

p = flush(flush(x) + residual); code = how many thresholds * (root mean p^2 of the bucket) are below |p|, with the sign
in the top bit; step = <|p|, level> / ||level||^2, cut to 17 bits; residual' = flush(p - signed level * step).

Bytes read and written per float32 element, with b bits: encode with feedback 8 and 4 + b/8, without 4 and b/8; decode
b/8 and 4, plus 4 read to accumulate. A 16-bit element takes 2 bytes less per access; a blend reads 4 more. Each
threshold takes about six instructions per element: with 4 bits the encoder has a quarter more instructions than the
encoder of `QSGD(7)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from qcomp.backends.torch_triton.packing import clear_gap, pack, unpack
from qcomp.backends.torch_triton.primitives import (
    STRICT,
    as_bits,
    as_float,
    flush,
    magnitude_bits,
    negated,
    scaled_squares,
    tree_sum,
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
from qcomp.core.compressors import LloydMax
from qcomp.core.compressors.lloyd_max import LEVELS, THRESHOLDS
from qcomp.core.kernels import Blend

__all__ = ["lloyd_max_decode", "lloyd_max_encode"]

Array = Any


def lloyd_max_encode(
    c: LloydMax,
    x: Array,
    blend: Blend | None,
    residual: Array | None,
    parts: Mapping[str, Array],
    out: Array | None,
    refused: Array,
) -> None:
    """Compress x plus the residual to levels and steps, and store what is lost as the new residual.

    Parameters
    ----------
    c : LloydMax
        With codes of fixed width.
    x, blend, residual, parts, out, refused
        See `qcomp.backends.torch_triton.sign.sign_encode`.
    """
    tiles = cut(x.numel(), c.bucket_size)
    _encode[tiles.grid](
        x,
        *mix(blend),
        residual,
        parts["codes"],
        parts["step"],
        out,
        refused,
        *tiles.sizes,
        LEVELS=LEVELS[c.bits],
        THRESHOLDS=THRESHOLDS[c.bits],
        BITS=c.bits,
        BUCKETS=tiles.buckets,
        LENGTH=c.bucket_size,
        num_warps=tiles.warps,
        **STRICT,
    )


def lloyd_max_decode(c: LloydMax, parts: Mapping[str, Array], out: Array, *, accumulate: bool) -> None:
    """Decompress levels and steps into a buffer, or add them to it.

    Parameters
    ----------
    c : LloydMax
        With codes of fixed width.
    parts, out, accumulate
        See `qcomp.backends.torch_triton.sign.sign_decode`.
    """
    tiles = cut(out.numel(), c.bucket_size)
    _decode[tiles.grid](
        parts["codes"],
        parts["step"],
        out,
        *tiles.sizes,
        LEVELS=LEVELS[c.bits],
        BITS=c.bits,
        ADD=accumulate,
        BUCKETS=tiles.buckets,
        LENGTH=c.bucket_size,
        num_warps=tiles.warps,
        **STRICT,
    )


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
def _encode_tile(
    x: tl.tensor,
    m: tl.tensor,
    keep: tl.tensor,
    new: tl.tensor,
    residual: tl.tensor,
    codes: tl.tensor,
    steps: tl.tensor,
    out: tl.tensor,
    refused: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    filled: tl.tensor,
    width: tl.tensor,
    LEVELS: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    BITS: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    offsets = offsets_in_tile(width, BUCKETS, LENGTH)
    inside = elements_inside(offsets, count, filled, width, BUCKETS, LENGTH, TAIL)
    p = compensated(x, m, keep, new, residual, first * LENGTH, offsets, inside)
    largest = tl.max(tl.max(magnitude_bits(p), axis=2), axis=1)
    refuse(refused, largest)
    number = tl.zeros(p.shape, tl.int32)
    if BITS > 1:
        total, power = scaled_squares(p, largest)
        rms = tl.sqrt_rn(tl.div_rn(total, tl.full((BUCKETS,), filled, tl.float32))) * power
        scale = flush(rms)
        for k in tl.static_range((1 << (BITS - 1)) - 1):
            threshold = flush(THRESHOLDS[k] * scale)
            number += (tl.abs(p) > threshold[:, None, None]).to(tl.int32)
    level = _level(number, LEVELS, BITS)
    step = _step(p, level, inside, filled, BITS)
    tl.store(steps + first + tl.arange(0, BUCKETS), step, mask=buckets_inside(count, BUCKETS))
    negative = p < 0.0
    code = tl.where(negative, number + (1 << (BITS - 1)), number)
    pack(codes, code, first, count, width, BITS, BUCKETS, LENGTH, TAIL)
    if out is not None:
        magnitude = level * step[:, None, None]
        tl.store(
            out + first * LENGTH + offsets,
            flush(p - tl.where(negative, negated(magnitude), magnitude)),
            mask=inside,
        )


@triton.jit(do_not_specialize=["full", "rest", "tail_width"], do_not_specialize_on_alignment=["steps"])
def _encode(
    x: tl.tensor,
    m: tl.tensor,
    keep: tl.float32,
    new: tl.float32,
    residual: tl.tensor,
    codes: tl.tensor,
    steps: tl.tensor,
    out: tl.tensor,
    refused: tl.tensor,
    full: tl.int64,
    rest: tl.int32,
    tail_width: tl.int32,
    LEVELS: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    BITS: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
) -> None:
    clear_gap(codes, (full * (LENGTH // 8) + tail_width) * BITS)
    first = tl.program_id(0).to(tl.int64) * BUCKETS
    if first < full:
        _encode_tile(
            x,
            m,
            keep,
            new,
            residual,
            codes,
            steps,
            out,
            refused,
            first,
            full - first,
            LENGTH,
            LENGTH // 8,
            LEVELS,
            THRESHOLDS,
            BITS,
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
            steps,
            out,
            refused,
            full,
            1,
            rest,
            tail_width,
            LEVELS,
            THRESHOLDS,
            BITS,
            1,
            LENGTH,
            True,
        )


@triton.jit
def _decode_tile(
    codes: tl.tensor,
    steps: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    filled: tl.tensor,
    width: tl.tensor,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    step = tl.load(steps + first + tl.arange(0, BUCKETS), mask=buckets_inside(count, BUCKETS), other=0.0)
    code = unpack(codes, first, count, width, BITS, BUCKETS, LENGTH, TAIL)
    sign = 1 << (BITS - 1)
    magnitude = _level(code & (sign - 1), LEVELS, BITS) * step[:, None, None]
    offsets = offsets_in_tile(width, BUCKETS, LENGTH)
    write(
        out + first * LENGTH,
        offsets,
        elements_inside(offsets, count, filled, width, BUCKETS, LENGTH, TAIL),
        tl.where(code >= sign, negated(magnitude), magnitude),
        ADD,
    )


@triton.jit(do_not_specialize=["full", "rest", "tail_width"], do_not_specialize_on_alignment=["steps"])
def _decode(
    codes: tl.tensor,
    steps: tl.tensor,
    out: tl.tensor,
    full: tl.int64,
    rest: tl.int32,
    tail_width: tl.int32,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * BUCKETS
    if first < full:
        _decode_tile(
            codes,
            steps,
            out,
            first,
            full - first,
            LENGTH,
            LENGTH // 8,
            LEVELS,
            BITS,
            ADD,
            BUCKETS,
            LENGTH,
            False,
        )
    else:
        _decode_tile(codes, steps, out, full, 1, rest, tail_width, LEVELS, BITS, ADD, 1, LENGTH, True)
