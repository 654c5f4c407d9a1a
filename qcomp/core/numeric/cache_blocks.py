"""`in_blocks`: computes elementwise on large arrays, part by part, so that each part stays in the caches."""

import math
from collections.abc import Callable, Sequence

from qcomp.core.numeric.arrays import Array, is_mutable, is_on_host

_BLOCK = 1 << 15
"""Elements of a part."""


def in_blocks(
    function: Callable[..., tuple[Array, ...]], arrays: Sequence[Array], outs: Sequence[Array | None]
) -> tuple[Array, ...]:
    """Return ``function(*arrays)``, where every element of a result depends only on the same element of the arrays.

    On a CPU, a function of ten operations moves ten large arrays through the memory, and fetches new pages for each.
    `in_blocks` calls it on some rows at a time, so that only results are written to the memory.

    The function takes arrays of one shape, library and device, and returns several of that shape. ``outs`` has a buffer
    for each result, which may be one of the arrays. The results are written to the buffers, unless a buffer is None or
    immutable, or the arrays are small or not on a CPU.
    """
    shape = arrays[0].shape
    rows = shape[0] if shape else 0
    step = max(1, rows * _BLOCK // max(1, math.prod(shape)))
    buffers = [out for out in outs if out is not None and is_mutable(out)]
    if step >= rows or len(buffers) < len(outs) or not is_on_host(arrays[0]):
        return function(*arrays)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        for buffer, result in zip(buffers, function(*(x[part] for x in arrays)), strict=True):
            buffer[part] = result
    return tuple(buffers)
