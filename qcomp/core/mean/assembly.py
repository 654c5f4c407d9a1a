"""Tensors put together from the segments that messages carry, and taken apart again."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from qcomp.core.mean.chunks import Segment
from qcomp.core.mean.codec import SegmentCodec
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    compute_dtype_name,
    concat,
    device,
    dtype_name,
    empty_like,
    is_mutable,
    require_dense,
    to_compute_dtype,
)
from qcomp.core.payload import Payload

__all__ = [
    "as_list",
    "assemble",
    "cut_like",
    "decode_all",
    "flattened",
    "places_in",
    "room_for",
    "shaped_like",
    "zeros_for",
]


def as_list(x: Array | Sequence[Array]) -> list[Array]:
    """Return one or several tensors as a list; raise TypeError unless all are dense arrays."""
    several = isinstance(x, list | tuple)
    tensors = list(x) if several else [x]
    if not tensors:
        raise ValueError("x is empty; expected an array or a sequence of at least one")
    for index, tensor in enumerate(tensors):
        require_dense(tensor, f"x[{index}]" if several else "x")
    return tensors


def flattened(tensors: Sequence[Array]) -> list[Array]:
    """Return tensors as flat vectors in the dtype in which they are computed; copies only where that is another."""
    return [array_namespace(t).reshape(to_compute_dtype(t), (-1,)) for t in tensors]


def shaped_like(flat: Sequence[Array], tensors: Sequence[Array]) -> list[Array]:
    """Return flat vectors in the shapes and dtypes of tensors."""
    return [
        array_namespace(t).astype(array_namespace(t).reshape(x, t.shape), t.dtype, copy=False)
        for t, x in zip(tensors, flat, strict=True)
    ]


def zeros_for(tensor: Array, size: int) -> Array:
    """Return so many zeros in the dtype in which a tensor is computed, on its device."""
    xp = array_namespace(tensor)
    dtype = getattr(xp, compute_dtype_name(dtype_name(tensor.dtype)))
    return xp.zeros((size,), dtype=dtype, device=device(tensor))


def room_for(flat: Sequence[Array], *, overwrite: bool) -> list[Array | None]:
    """Return a buffer for each tensor, which may be its own; None where arrays are immutable."""
    return [t if overwrite and is_mutable(t) else empty_like(t) for t in flat]


def decode_all(
    codec: SegmentCodec,
    payloads: Sequence[Sequence[Payload]],
    chunks: Sequence[Sequence[Segment]],
    flat: Sequence[Array],
    means: Sequence[Array | None],
) -> list[Array]:
    """Return the tensors of which these are the payloads, in buffers where they are given."""
    values = [
        codec.decode(of_chunk, tuple(chunk), places_in(means, chunk))
        for of_chunk, chunk in zip(payloads, chunks, strict=True)
    ]
    return assemble(chunks, values, flat, means)


def places_in(tensors: Sequence[Array | None], chunk: Sequence[Segment]) -> list[Array | None]:
    """Return the part of a tensor that each segment of a chunk is, None where there is no tensor."""
    found = ((tensors[segment.tensor], segment) for segment in chunk)
    return [None if tensor is None else tensor[s.start : s.stop] for tensor, s in found]


def assemble(
    chunks: Sequence[Sequence[Segment]],
    values: Sequence[Sequence[Array]],
    flat: Sequence[Array],
    means: Sequence[Array | None],
) -> list[Array]:
    """Return the tensors whose segments these values are: their buffers, or copies where there are none."""
    filled = [mean for mean in means if mean is not None]
    if len(filled) == len(flat):
        return filled
    parts: list[list[Array]] = [[] for _ in flat]
    for chunk, of_chunk in zip(chunks, values, strict=True):
        for segment, value in zip(chunk, of_chunk, strict=True):
            parts[segment.tensor].append(value)
    return [concat(p) if p else like for p, like in zip(parts, flat, strict=True)]


def cut_like(joined: Array, tensors: Sequence[Array]) -> list[Array]:
    """Return the parts of a flat vector that belong to these tensors."""
    stops = list(accumulate(math.prod(tensor.shape) for tensor in tensors))
    return [joined[start:stop] for start, stop in pairwise([0, *stops])]
