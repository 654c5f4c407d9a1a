"""Packs the codes of a tile into bytes, and unpacks them, by the planes of `qcomp.core.numeric.bitplanes`.

The elements of a bucket form eight planes of W, and a code has b bits. If b divides 8, code q of byte (r, j) is at
plane q*b + r, lane j. Otherwise bit p of byte (q, j) is bit q of the code at (p, j). So packing is a sum of planes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qcomp.backends.torch_triton.tiles import buckets_inside


@triton.jit
def _places(
    width: tl.tensor,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
) -> tl.tensor:
    """Return the offsets of the bytes in the first PLANES planes of a tile's codes, of shape (buckets, PLANES, W)."""
    bucket = tl.arange(0, BUCKETS)[:, None, None]
    plane = tl.arange(0, PLANES)[None, :, None]
    lane = tl.arange(0, LENGTH // 8)[None, None, :]
    return bucket * (LENGTH // 8 * BITS) + plane * width + lane


@triton.jit
def _inside(
    count: tl.tensor, width: tl.tensor, BUCKETS: tl.constexpr, LENGTH: tl.constexpr, TAIL: tl.constexpr
) -> tl.tensor:
    """Return the mask of a tile's bytes that exist."""
    if TAIL:
        inside = (tl.arange(0, LENGTH // 8) < width)[None, None, :]
    else:
        inside = buckets_inside(count, BUCKETS)[:, None, None]
    return inside


@triton.jit
def pack(
    codes: tl.tensor,
    tile: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    BITS: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    """Store the codes of a tile, integers below 2**BITS, as bytes; padding must have code 0."""
    BUCKETS: tl.constexpr = tile.shape[0]
    LENGTH: tl.constexpr = tile.shape[1] * tile.shape[2]
    inside = _inside(count, width, BUCKETS, LENGTH, TAIL)
    codes += first * (LENGTH // 8 * BITS)
    if 8 % BITS == 0:
        places = _places(width, BITS, BITS, BUCKETS, LENGTH)
        parts = tl.reshape(tile, (BUCKETS, 8 // BITS, BITS, LENGTH // 8))
        shifts = (tl.arange(0, 8 // BITS) * BITS)[None, :, None, None]
        tl.store(codes + places, tl.sum(parts << shifts, axis=1).to(tl.uint8), mask=inside)
    else:
        places = _places(width, BITS, 1, BUCKETS, LENGTH)
        shifts = tl.arange(0, 8)[None, :, None]
        for bit in tl.static_range(BITS):
            plane = tl.sum(((tile >> bit) & 1) << shifts, axis=1, keep_dims=True)
            tl.store(codes + bit * width + places, plane.to(tl.uint8), mask=inside)


@triton.jit
def unpack(
    codes: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    BITS: tl.constexpr,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAIL: tl.constexpr,
) -> tl.tensor:
    """Return the codes of a tile as int32."""
    inside = _inside(count, width, BUCKETS, LENGTH, TAIL)
    codes += first * (LENGTH // 8 * BITS)
    if 8 % BITS == 0:
        places = _places(width, BITS, BITS, BUCKETS, LENGTH)
        packed = tl.load(codes + places, mask=inside, other=0).to(tl.int32)
        shifts = (tl.arange(0, 8 // BITS) * BITS)[None, :, None, None]
        parts = (packed[:, None, :, :] >> shifts) & ((1 << BITS) - 1)
        tile = tl.reshape(parts, (BUCKETS, 8, LENGTH // 8))
    else:
        places = _places(width, BITS, 1, BUCKETS, LENGTH)
        shifts = tl.arange(0, 8)[None, :, None]
        tile = tl.zeros((BUCKETS, 8, LENGTH // 8), tl.int32)
        for bit in tl.static_range(BITS):
            plane = tl.load(codes + bit * width + places, mask=inside, other=0).to(tl.int32)
            tile |= ((plane >> shifts) & 1) << bit
    return tile


@triton.jit
def clear_gap(codes: tl.tensor, end: tl.tensor) -> None:
    """Zero the bytes between ``end``, the end of the codes, and the scales, which are aligned."""
    if tl.program_id(0) == 0:
        gap = tl.arange(0, 4)
        tl.store(codes + end + gap, 0, mask=gap < (-end & 3))
