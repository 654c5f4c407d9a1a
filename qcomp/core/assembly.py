"""Tensors put together from the segments that messages carry, and taken apart again."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from qcomp.core.arrays import Array, concat, empty_like
from qcomp.core.chunks import Segment
from qcomp.core.messages import SegmentCodec
from qcomp.core.payload import Payload

__all__ = ["assemble", "cut_like", "decode_all"]


def decode_all(
    codec: SegmentCodec,
    payloads: Sequence[Sequence[Payload]],
    chunks: Sequence[Sequence[Segment]],
    flat: Sequence[Array],
) -> list[Array]:
    """Return the tensors of which these are the payloads."""
    means = [empty_like(t) for t in flat]
    values = []
    for of_chunk, chunk in zip(payloads, chunks, strict=True):
        buffers = [_part(means[segment.tensor], segment) for segment in chunk]
        values.append(codec.decode(of_chunk, tuple(chunk), buffers))
    filled = [mean for mean in means if mean is not None]
    return filled if len(filled) == len(flat) else assemble(chunks, values, flat)


def _part(tensor: Array | None, segment: Segment) -> Array | None:
    return None if tensor is None else tensor[segment.start : segment.stop]


def assemble(
    chunks: Sequence[Sequence[Segment]], values: Sequence[Sequence[Array]], flat: Sequence[Array]
) -> list[Array]:
    """Return the tensors whose segments these values are."""
    parts: list[list[Array]] = [[] for _ in flat]
    for chunk, of_chunk in zip(chunks, values, strict=True):
        for segment, value in zip(chunk, of_chunk, strict=True):
            parts[segment.tensor].append(value)
    return [concat(p) if p else like for p, like in zip(parts, flat, strict=True)]


def cut_like(joined: Array, tensors: Sequence[Array]) -> list[Array]:
    """Return the parts of a flat vector that belong to these tensors."""
    stops = list(accumulate(math.prod(tensor.shape) for tensor in tensors))
    return [joined[start:stop] for start, stop in pairwise([0, *stops])]
