"""Stochastic rounding to evenly spaced levels, with feedback: `qcomp.core.compressors.qsgd`.

p = flush(flush(x) + residual); step = norm of the bucket / levels, rounded up to 17 bits;
position = min(|p| / step, levels); level = floor(position), plus 1 if draw < rint(fraction * 65536);
code = level, with the sign in the top bit; residual' = flush(p - signed level * step).

Bytes read and written per float32 element, with b bits: encode with feedback 8 and 4 + b/8, without 4 and b/8; decode
b/8 and 4, plus 4 read to accumulate. A 16-bit element takes 2 bytes less per access; a blend reads 4 more. The
encoder's arithmetic, ten rounds of Philox for eight elements and a division for each, takes almost as long as its
memory accesses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from qcomp.backends.torch_triton.packing import clear_gap, pack, unpack
from qcomp.backends.torch_triton.philox import draws16
from qcomp.backends.torch_triton.primitives import (
    STRICT,
    as_float,
    flush,
    magnitude_bits,
    negated,
    rint,
    round_up_step,
    scaled_squares,
    times_factor,
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
from qcomp.core.compressors import QSGD
from qcomp.core.kernels import Blend

__all__ = ["qsgd_decode", "qsgd_encode"]

Array = Any


def qsgd_encode(
    c: QSGD,
    factor: float | None,
    x: Array,
    blend: Blend | None,
    residual: Array | None,
    key: tuple[int, int],
    hop: int,
    first_bucket: int,
    parts: Mapping[str, Array],
    out: Array | None,
    refused: Array,
) -> None:
    """Compress x plus the residual to levels and steps, and store what is lost as the new residual.

    Parameters
    ----------
    c : QSGD
    factor : float, optional
        The factor of the decoded values, for `qcomp.Scaled`; the payload does not depend on it.
    x, blend, residual, parts, out, refused
        See `qcomp.backends.torch_triton.sign.sign_encode`.
    key : tuple of two int
        The words of the stream, from `qcomp.core.numeric.random.fold_key`.
    hop, first_bucket : int
        ``hop`` and ``bucket`` of the key.
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
        key[0] | key[1] << 32,
        hop & 0xFFFFFFFF,
        first_bucket * (c.bucket_size // 8) & 0xFFFFFFFF,
        1.0 if factor is None else factor,
        SCALED=factor is not None,
        LEVELS=c.levels,
        BITS=c.bits,
        L2=c.norm == "l2",
        BUCKETS=tiles.buckets,
        LENGTH=c.bucket_size,
        num_warps=tiles.warps,
        **STRICT,
    )


def qsgd_decode(
    c: QSGD, factor: float | None, parts: Mapping[str, Array], out: Array, *, accumulate: bool
) -> None:
    """Decompress levels and steps into a buffer, or add them to it.

    Parameters
    ----------
    c : QSGD
    factor : float, optional
        See `qsgd_encode`.
    parts, out, accumulate
        See `qcomp.backends.torch_triton.sign.sign_decode`.
    """
    tiles = cut(out.numel(), c.bucket_size)
    _decode[tiles.grid](
        parts["codes"],
        parts["step"],
        out,
        *tiles.sizes,
        1.0 if factor is None else factor,
        SCALED=factor is not None,
        BITS=c.bits,
        ADD=accumulate,
        BUCKETS=tiles.buckets,
        LENGTH=c.bucket_size,
        num_warps=tiles.warps,
        **STRICT,
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
    seed: tl.tensor,
    hop: tl.tensor,
    first_block: tl.tensor,
    factor: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    filled: tl.tensor,
    width: tl.tensor,
    SCALED: tl.constexpr,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    L2: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    offsets = offsets_in_tile(width, BUCKETS, LENGTH)
    inside = elements_inside(offsets, count, filled, width, BUCKETS, LENGTH, TAIL)
    p = compensated(x, m, keep, new, residual, first * LENGTH, offsets, inside)
    largest = tl.max(tl.max(magnitude_bits(p), axis=2), axis=1)
    refuse(refused, largest)
    if L2:
        total, power = scaled_squares(p, largest)
        step = round_up_step(tl.sqrt_rn(total) * power, LEVELS, 0x7F)
    else:
        step = round_up_step(as_float(largest), LEVELS, 0x7F)
    tl.store(steps + first + tl.arange(0, BUCKETS), step, mask=buckets_inside(count, BUCKETS))
    level = _levels(p, step, draws16(seed, hop, first_block, first, BUCKETS, LENGTH), LEVELS)
    negative = p < 0.0
    code = tl.where(negative & (level > 0), level + (1 << (BITS - 1)), level)
    pack(codes, code, first, count, width, BITS, BUCKETS, LENGTH, TAIL)
    if out is not None:
        magnitude = level.to(tl.float32) * step[:, None, None]
        if SCALED:
            magnitude = times_factor(magnitude, factor)
        tl.store(
            out + first * LENGTH + offsets,
            flush(p - tl.where(negative, negated(magnitude), magnitude)),
            mask=inside,
        )


@triton.jit(
    do_not_specialize=["full", "rest", "tail_width", "seed", "hop", "first_block"],
    do_not_specialize_on_alignment=["steps"],
)
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
    seed: tl.uint64,
    hop: tl.uint32,
    first_block: tl.uint32,
    factor: tl.float32,
    SCALED: tl.constexpr,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    L2: tl.constexpr,
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
            seed,
            hop,
            first_block,
            factor,
            first,
            full - first,
            LENGTH,
            LENGTH // 8,
            SCALED,
            LEVELS,
            BITS,
            L2,
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
            seed,
            hop,
            first_block,
            factor,
            full,
            1,
            rest,
            tail_width,
            SCALED,
            LEVELS,
            BITS,
            L2,
            1,
            LENGTH,
            True,
        )


@triton.jit
def _decode_tile(
    codes: tl.tensor,
    steps: tl.tensor,
    out: tl.tensor,
    factor: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    filled: tl.tensor,
    width: tl.tensor,
    SCALED: tl.constexpr,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    step = tl.load(steps + first + tl.arange(0, BUCKETS), mask=buckets_inside(count, BUCKETS), other=0.0)
    code = unpack(codes, first, count, width, BITS, BUCKETS, LENGTH, TAIL)
    sign = 1 << (BITS - 1)
    magnitude = (code & (sign - 1)).to(tl.float32) * step[:, None, None]
    values = tl.where(code > sign, negated(magnitude), magnitude)
    if SCALED:
        values = times_factor(values, factor)
    offsets = offsets_in_tile(width, BUCKETS, LENGTH)
    write(
        out + first * LENGTH,
        offsets,
        elements_inside(offsets, count, filled, width, BUCKETS, LENGTH, TAIL),
        values,
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
    factor: tl.float32,
    SCALED: tl.constexpr,
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
            factor,
            first,
            full - first,
            LENGTH,
            LENGTH // 8,
            SCALED,
            BITS,
            ADD,
            BUCKETS,
            LENGTH,
            False,
        )
    else:
        _decode_tile(codes, steps, out, factor, full, 1, rest, tail_width, SCALED, BITS, ADD, 1, LENGTH, True)
