"""Cuts a vector into tiles, one for each program, and reads and writes tiles.

A tile has the shape (buckets, 8, W), where W is the length of a bucket over 8: element p*W + j of a bucket is at
(p, j). The eight elements of a column share a byte of every bit plane and a block of random words. Each program works
on some full buckets; the last one works on the tail. The tail's tile is as wide as the others, but only the first
``width`` lanes of each plane count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qcomp.backends.torch_triton.primitives import TOO_LARGE, flush
from qcomp.core.numeric.buckets import padded_size

MAX_BUCKET_SIZE = 1 << 15
"""A program keeps its tile in registers, which hold at most this many elements."""
_TILE = 512
"""Elements of a tile of small buckets, and of a warp: four 16-byte loads per thread."""
_MAX_WARPS = 16 if torch.version.hip else 32
"""The most warps, for at most 1024 threads; a warp of an AMD GPU may have 64."""


class Cut(NamedTuple):
    """A vector cut into tiles."""

    full: int
    """Full buckets."""
    rest: int
    """Elements of the tail."""
    width: int
    """Lanes of the tail: its padded length over 8."""
    buckets: int
    """Buckets of a tile."""
    warps: int
    """Warps of a program."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes that kernels take as arguments."""
        return self.full, self.rest, self.width

    @property
    def grid(self) -> tuple[int]:
        """The number of tiles, as Triton's grid."""
        return (-(-self.full // self.buckets) + (self.rest > 0),)


def cut(size: int, bucket_size: int) -> Cut:
    """Return how a vector is cut."""
    full, rest = divmod(size, bucket_size)
    tile = max(bucket_size, _TILE)
    return Cut(
        full,
        rest,
        width=(padded_size(size, bucket_size) - full * bucket_size) // 8,
        buckets=tile // bucket_size,
        warps=min(tile // _TILE, _MAX_WARPS),
    )


@triton.jit
def offsets_in_tile(width: tl.tensor, BUCKETS: tl.constexpr, LENGTH: tl.constexpr) -> tl.tensor:
    """Return the offsets of a tile's elements from its first."""
    bucket = tl.arange(0, BUCKETS)[:, None, None]
    plane = tl.arange(0, 8)[None, :, None]
    lane = tl.arange(0, LENGTH // 8)[None, None, :]
    return bucket * LENGTH + plane * width + lane


@triton.jit
def buckets_inside(count: tl.tensor, BUCKETS: tl.constexpr) -> tl.tensor:
    """Return the mask of a tile's buckets that exist: the first ``count``."""
    return tl.arange(0, BUCKETS) < count


@triton.jit
def elements_inside(
    offsets: tl.tensor,
    count: tl.tensor,
    filled: tl.tensor,
    width: tl.tensor,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAIL: tl.constexpr,
) -> tl.tensor:
    """Return the mask of a tile's elements that exist: all of ``count`` buckets, or the tail's first ``filled``."""
    if TAIL:
        inside = (tl.arange(0, LENGTH // 8)[None, None, :] < width) & (offsets < filled)
    else:
        inside = buckets_inside(count, BUCKETS)[:, None, None]
    return inside


@triton.jit
def compensated(inputs: tl.tuple, start: tl.tensor, offsets: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return p = flush(flush(x) + residual) of the tile at ``start``, with 0 for padding.

    The inputs are x, m, keep, new and the residual. With m, the momentum keep * m + new * x takes the place of x.
    Without a residual, nothing is added.
    """
    x, m, keep, new, residual = inputs
    p = tl.load(x + start + offsets, mask=inside, other=0.0).to(tl.float32)
    if m is not None:
        p = keep * tl.load(m + start + offsets, mask=inside, other=0.0) + new * p
    p = flush(p)
    if residual is not None:
        p = flush(p + tl.load(residual + start + offsets, mask=inside, other=0.0))
    return p


@triton.jit
def refuse(refused: tl.tensor, largest: tl.tensor) -> None:
    """Set the flag if any of these magnitude bits encode 2**100 or more, infinity or NaN."""
    if tl.max(tl.ravel(largest), axis=0) >= TOO_LARGE:
        tl.store(refused, 1)


@triton.jit
def load_scale(scales: tl.tensor, first: tl.tensor, count: tl.tensor, BUCKETS: tl.constexpr) -> tl.tensor:
    """Return the scales of a tile that starts with bucket ``first``, 0 for buckets that do not exist."""
    mask = buckets_inside(count, BUCKETS)
    return tl.load(scales + first + tl.arange(0, BUCKETS), mask=mask, other=0.0)


@triton.jit
def store_scale(scales: tl.tensor, scale: tl.tensor, first: tl.tensor, count: tl.tensor) -> None:
    """Store the scales of a tile that starts with bucket ``first``."""
    BUCKETS: tl.constexpr = scale.shape[0]
    tl.store(scales + first + tl.arange(0, BUCKETS), scale, mask=buckets_inside(count, BUCKETS))


@triton.jit
def write(
    out: tl.tensor, offsets: tl.tensor, inside: tl.tensor, values: tl.tensor, ADD: tl.constexpr
) -> None:
    """Store values in a buffer, or add them to it. Values are rounded to the buffer's dtype, and so are sums."""
    rounded = values.to(out.dtype.element_ty)
    if ADD:
        old = tl.load(out + offsets, mask=inside, other=0.0)
        rounded = (old.to(tl.float32) + rounded.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + offsets, rounded, mask=inside)
