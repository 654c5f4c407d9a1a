"""The kernels that compress and decompress vectors tile by tile, with the functions of a family of compressors.

A kernel takes the functions of a family as constants, so each family and choice of constants is compiled separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from qcomp.backends.torch_triton.packing import clear_gap, unpack
from qcomp.backends.torch_triton.primitives import STRICT, flush
from qcomp.backends.torch_triton.tiles import (
    compensated,
    cut,
    elements_inside,
    load_scale,
    offsets_in_tile,
    write,
)
from qcomp.core.compressors.bucketed import BucketedCompressor
from qcomp.core.kernels import Blend

NO_DRAWS = (0, 0, 0)
"""The stream of a compressor that draws nothing."""


class Family(NamedTuple):
    """How a compressor encodes and decodes a tile of buckets: jit functions and their constants.

    Tiles have shape (buckets, 8, W), as `qcomp.backends.torch_triton.tiles` describes; scales have shape (buckets,).
    """

    compressor: BucketedCompressor
    encode: Any
    """Stores the codes and scales of a tile p, and returns the values that they stand for.

    It has the parameters of ``_encode`` in the families. The tile holds ``count`` buckets from bucket ``first`` on,
    each with ``filled`` elements in planes of ``width`` lanes; ``inside`` is the mask of its elements. The second scale
    is None if the payload has only one. ``stream`` holds the first three arguments of
    `qcomp.backends.torch_triton.philox.draws16`.
    """
    decode: Any
    """``decode(code, scale, other, factor, CONSTANTS)`` returns the values of codes. ``other`` is the second scale, or
    ``scale`` again."""
    encoder: tuple[Any, ...] = ()
    """The constants of ``encode``."""
    decoder: tuple[Any, ...] = ()
    """The constants of ``decode``."""
    factor: float = 1.0
    """The factor that multiplies decoded values, for `qcomp.Scaled`."""
    options: Mapping[str, int] = {}
    """Options of the encoder's launch."""


def encode(
    family: Family,
    x: Tensor,
    blend: Blend | None,
    residual: Tensor | None,
    stream: tuple[int, int, int],
    parts: Mapping[str, Any],
    out: Tensor | None,
    refused: Tensor,
) -> None:
    """Compress x plus the residual, and store what is lost as the new residual.

    ``stream`` is ``seed``, ``hop`` and ``first_block`` of `qcomp.backends.torch_triton.philox.draws16`, or `NO_DRAWS`.
    The fields in ``parts``, codes first, are filled, and so is the gap between codes and scales. ``out`` gets the new
    residual: x, the old residual, or a tensor that overlaps with neither. ``refused`` becomes 1 if a value is out of
    range.
    """
    c = family.compressor
    tiles = cut(x.numel(), c.traits.bucket_size)
    m, keep, new = None, 0.0, 0.0
    if blend is not None:
        m, keep, new = blend.m, float(blend.beta1), float((1 - blend.beta1) * blend.scale)
    _encode[tiles.grid](
        x,
        m,
        keep,
        new,
        residual,
        *_fields(parts),
        out,
        refused,
        *tiles.sizes,
        *stream,
        family.factor,
        ENCODE=family.encode,
        CONSTANTS=family.encoder,
        BITS=c.bits,
        BUCKETS=tiles.buckets,
        LENGTH=c.traits.bucket_size,
        num_warps=tiles.warps,
        **family.options,
        **STRICT,
    )


def decode(family: Family, parts: Mapping[str, Any], out: Tensor, *, accumulate: bool) -> None:
    """Decompress codes into a buffer, or add their values to it."""
    c = family.compressor
    tiles = cut(out.numel(), c.traits.bucket_size)
    _decode[tiles.grid](
        *_fields(parts),
        out,
        *tiles.sizes,
        family.factor,
        DECODE=family.decode,
        CONSTANTS=family.decoder,
        BITS=c.bits,
        ADD=accumulate,
        BUCKETS=tiles.buckets,
        LENGTH=c.traits.bucket_size,
        num_warps=tiles.warps,
        **STRICT,
    )


def _fields(parts: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the codes, the first scales, and the second scales or None."""
    codes, scales, *others = parts.values()
    return codes, scales, others[0] if others else None


@triton.jit
def _encode_tile(
    inputs: tl.tuple,
    codes: tl.tensor,
    scales: tl.tensor,
    others: tl.tensor,
    out: tl.tensor,
    refused: tl.tensor,
    stream: tl.tuple,
    factor: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    filled: tl.tensor,
    width: tl.tensor,
    ENCODE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    offsets = offsets_in_tile(width, BUCKETS, LENGTH)
    inside = elements_inside(offsets, count, filled, width, BUCKETS, LENGTH, TAIL)
    p = compensated(inputs, first * LENGTH, offsets, inside)
    decoded = ENCODE(
        p,
        inside,
        codes,
        scales,
        others,
        refused,
        first,
        count,
        filled,
        width,
        stream,
        factor,
        CONSTANTS,
        TAIL,
    )
    if out is not None:
        tl.store(out + first * LENGTH + offsets, flush(p - decoded), mask=inside)


@triton.jit(
    do_not_specialize=["full", "rest", "tail_width", "seed", "hop", "first_block"],
    do_not_specialize_on_alignment=["scales", "others"],
)
def _encode(
    x: tl.tensor,
    m: tl.tensor,
    keep: tl.float32,
    new: tl.float32,
    residual: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    others: tl.tensor,
    out: tl.tensor,
    refused: tl.tensor,
    full: tl.int64,
    rest: tl.int32,
    tail_width: tl.int32,
    seed: tl.uint64,
    hop: tl.uint32,
    first_block: tl.uint32,
    factor: tl.float32,
    ENCODE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    BITS: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
) -> None:
    if BITS < 8:
        clear_gap(codes, (full * (LENGTH // 8) + tail_width) * BITS)
    first = tl.program_id(0).to(tl.int64) * BUCKETS
    if first < full:
        _encode_tile(
            (x, m, keep, new, residual),
            codes,
            scales,
            others,
            out,
            refused,
            (seed, hop, first_block),
            factor,
            first,
            full - first,
            LENGTH,
            LENGTH // 8,
            ENCODE,
            CONSTANTS,
            BUCKETS,
            LENGTH,
            False,
        )
    else:
        _encode_tile(
            (x, m, keep, new, residual),
            codes,
            scales,
            others,
            out,
            refused,
            (seed, hop, first_block),
            factor,
            full,
            1,
            rest,
            tail_width,
            ENCODE,
            CONSTANTS,
            1,
            LENGTH,
            True,
        )


@triton.jit
def _decode_tile(
    payload: tl.tuple,
    out: tl.tensor,
    factor: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    filled: tl.tensor,
    width: tl.tensor,
    DECODE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    codes, scales, others = payload
    scale = load_scale(scales, first, count, BUCKETS)
    other = scale
    if others is not None:
        other = load_scale(others, first, count, BUCKETS)
    code = unpack(codes, first, count, width, BITS, BUCKETS, LENGTH, TAIL)
    values = DECODE(code, scale, other, factor, CONSTANTS)
    offsets = offsets_in_tile(width, BUCKETS, LENGTH)
    write(
        out + first * LENGTH,
        offsets,
        elements_inside(offsets, count, filled, width, BUCKETS, LENGTH, TAIL),
        values,
        ADD,
    )


@triton.jit(
    do_not_specialize=["full", "rest", "tail_width"], do_not_specialize_on_alignment=["scales", "others"]
)
def _decode(
    codes: tl.tensor,
    scales: tl.tensor,
    others: tl.tensor,
    out: tl.tensor,
    full: tl.int64,
    rest: tl.int32,
    tail_width: tl.int32,
    factor: tl.float32,
    DECODE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * BUCKETS
    if first < full:
        _decode_tile(
            (codes, scales, others),
            out,
            factor,
            first,
            full - first,
            LENGTH,
            LENGTH // 8,
            DECODE,
            CONSTANTS,
            BITS,
            ADD,
            BUCKETS,
            LENGTH,
            False,
        )
    else:
        _decode_tile(
            (codes, scales, others),
            out,
            factor,
            full,
            1,
            rest,
            tail_width,
            DECODE,
            CONSTANTS,
            BITS,
            ADD,
            1,
            LENGTH,
            True,
        )
