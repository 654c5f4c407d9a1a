"""The random draws of a tile: `qcomp.core.numeric.random`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def draws16(
    seed: tl.tensor,
    hop: tl.tensor,
    first_block: tl.tensor,
    first: tl.tensor,
    BUCKETS: tl.constexpr,
    LENGTH: tl.constexpr,
) -> tl.tensor:
    """Return a 16-bit draw for each element of the tile that starts with bucket ``first``, as int32.

    ``seed`` holds the two key words, the first one in the low half; ``first_block`` is the counter of the vector's
    first bucket. Counters wrap around at 2**32. A column of the tile takes the eight halves of the four words of one
    block.
    """
    bucket = (first + tl.arange(0, BUCKETS))[:, None]
    lane = tl.arange(0, LENGTH // 8)[None, :]
    counter = first_block.to(tl.uint32) + (bucket * (LENGTH // 8) + lane).to(tl.uint32)
    zero = counter & 0
    a, b, c, d = tl.philox(seed, counter, zero + hop.to(tl.uint32), zero, zero)
    words = tl.join(tl.join(a, c), tl.join(b, d))  # at (i, j): word 2*i + j
    halves = tl.join(words & 0xFFFF, words >> 16)  # at (i, j, k): draw 4*i + 2*j + k
    draws = tl.permute(tl.reshape(halves, (BUCKETS, LENGTH // 8, 8)), (0, 2, 1))
    return draws.to(tl.int32)
