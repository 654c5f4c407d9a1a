"""The sign of every element and a scale for every bucket, with feedback: `qcomp.core.compressors.sign`.

p = flush(flush(x) + residual); scale = mean |p| or root mean p^2 of the bucket; code = 1 where p < 0;
residual' = flush(p - (scale or -scale)).

Bytes read and written per float32 element: encode with feedback 8 and 4.125, without 4 and 0.125; decode 0.125 and 4,
plus 4 read to accumulate. A 16-bit element takes 2 bytes less per access; a blend reads 4 more. Memory bandwidth is
the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from qcomp.backends.torch_triton.packing import clear_gap, pack, unpack
from qcomp.backends.torch_triton.primitives import (
    STRICT,
    TOO_LARGE,
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
from qcomp.core.compressors import ScaledSign
from qcomp.core.kernels import Blend

__all__ = ["sign_decode", "sign_encode"]

Array = Any

_REGISTERS = {} if torch.version.hip else {"maxnreg": 64}
"""Without this limit, code for the rare tail takes more registers, so that fewer warps keep memory busy. Almost nothing
is spilled."""


def sign_encode(
    c: ScaledSign,
    x: Array,
    blend: Blend | None,
    residual: Array | None,
    parts: Mapping[str, Array],
    out: Array | None,
    refused: Array,
) -> None:
    """Compress x plus the residual to signs and scales, and store what is lost as the new residual.

    Parameters
    ----------
    c : ScaledSign
    x : tensor of float32, float16 or bfloat16
    blend : Blend, optional
        Compress the momentum that x is blended into.
    residual : tensor of float32, or None
        None compresses x alone.
    parts : mapping of tensors
        The fields of the payload, to be filled; the gap between them is filled too.
    out : tensor of float32, or None
        The buffer for the new residual: x, the old residual, or a tensor that overlaps with neither. None without a
        residual.
    refused : tensor of uint8, shape (1,)
        Becomes 1 if a value is out of range.
    """
    tiles = cut(x.numel(), c.bucket_size)
    _encode[tiles.grid](
        x,
        *mix(blend),
        residual,
        parts["codes"],
        parts["scale"],
        out,
        refused,
        *tiles.sizes,
        RMS=c.scale == "rms",
        BUCKETS=tiles.buckets,
        LENGTH=c.bucket_size,
        num_warps=tiles.warps,
        **_REGISTERS,
        **STRICT,
    )


def sign_decode(c: ScaledSign, parts: Mapping[str, Array], out: Array, *, accumulate: bool) -> None:
    """Decompress signs and scales into a buffer, or add them to it.

    Parameters
    ----------
    c : ScaledSign
    parts : mapping of tensors
        The fields of the payload.
    out : tensor of float32, float16 or bfloat16
        Receives the values.
    accumulate : bool
        Whether to add the values to it.
    """
    tiles = cut(out.numel(), c.bucket_size)
    _decode[tiles.grid](
        parts["codes"],
        parts["scale"],
        out,
        *tiles.sizes,
        ADD=accumulate,
        BUCKETS=tiles.buckets,
        LENGTH=c.bucket_size,
        num_warps=tiles.warps,
        **STRICT,
    )


@triton.jit
def _encode_tile(
    x: tl.tensor,
    m: tl.tensor,
    keep: tl.tensor,
    new: tl.tensor,
    residual: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    refused: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    filled: tl.tensor,
    width: tl.tensor,
    RMS: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    offsets = offsets_in_tile(width, BUCKETS, LENGTH)
    inside = elements_inside(offsets, count, filled, width, BUCKETS, LENGTH, TAIL)
    p = compensated(x, m, keep, new, residual, first * LENGTH, offsets, inside)
    if RMS:
        largest = tl.max(tl.max(magnitude_bits(p), axis=2), axis=1)
        refuse(refused, largest)
        total, power = scaled_squares(p, largest)
        scale = tl.sqrt_rn(tl.div_rn(total, tl.full((BUCKETS,), filled, tl.float32))) * power
    else:
        total = tree_sum(tl.abs(p))
        # No magnitude exceeds the sum, so the elements are checked only if the sum is too large.
        if tl.max(magnitude_bits(total), axis=0) >= TOO_LARGE:
            refuse(refused, magnitude_bits(p))
        scale = tl.div_rn(total, tl.full((BUCKETS,), filled, tl.float32))
    scale = flush(scale)
    negative = p < 0.0
    pack(codes, negative.to(tl.int32), first, count, width, 1, BUCKETS, LENGTH, TAIL)
    tl.store(scales + first + tl.arange(0, BUCKETS), scale, mask=buckets_inside(count, BUCKETS))
    if out is not None:
        decoded = tl.where(negative, negated(scale)[:, None, None], scale[:, None, None])
        tl.store(out + first * LENGTH + offsets, flush(p - decoded), mask=inside)


@triton.jit(do_not_specialize=["full", "rest", "tail_width"], do_not_specialize_on_alignment=["scales"])
def _encode(
    x: tl.tensor,
    m: tl.tensor,
    keep: tl.float32,
    new: tl.float32,
    residual: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    refused: tl.tensor,
    full: tl.int64,
    rest: tl.int32,
    tail_width: tl.int32,
    RMS: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
) -> None:
    clear_gap(codes, full * (LENGTH // 8) + tail_width)
    first = tl.program_id(0).to(tl.int64) * BUCKETS
    if first < full:
        count = full - first
        _encode_tile(
            x,
            m,
            keep,
            new,
            residual,
            codes,
            scales,
            out,
            refused,
            first,
            count,
            LENGTH,
            LENGTH // 8,
            RMS,
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
            scales,
            out,
            refused,
            full,
            1,
            rest,
            tail_width,
            RMS,
            1,
            LENGTH,
            True,
        )


@triton.jit
def _decode_tile(
    codes: tl.tensor,
    scales: tl.tensor,
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
    scale = tl.load(scales + first + tl.arange(0, BUCKETS), mask=buckets_inside(count, BUCKETS), other=0.0)
    negative = unpack(codes, first, count, width, 1, BUCKETS, LENGTH, TAIL)
    values = tl.where(negative == 1, negated(scale)[:, None, None], scale[:, None, None])
    offsets = offsets_in_tile(width, BUCKETS, LENGTH)
    write(
        out + first * LENGTH,
        offsets,
        elements_inside(offsets, count, filled, width, BUCKETS, LENGTH, TAIL),
        values,
        ADD,
    )


@triton.jit(do_not_specialize=["full", "rest", "tail_width"], do_not_specialize_on_alignment=["scales"])
def _decode(
    codes: tl.tensor,
    scales: tl.tensor,
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
            codes, scales, out, first, full - first, LENGTH, LENGTH // 8, ADD, BUCKETS, LENGTH, False
        )
    else:
        _decode_tile(codes, scales, out, full, 1, rest, tail_width, ADD, 1, LENGTH, True)
