"""Copying the tensors of one rank to all ranks, as pure stages."""

import math
from collections.abc import Sequence
from itertools import pairwise

from qcomp.core.mean.framing import join, joined_size, split
from qcomp.core.mean.stages import AllGather, AllToAll, Stages
from qcomp.core.numeric.arrays import Array, array_namespace, bytes_of, concat, dtype_name, from_bytes_of

__all__ = ["broadcast_stages"]

_MESSAGE_BYTES = 16 << 20


def broadcast_stages(tensors: Sequence[Array], *, root: int, rank: int, size: int) -> Stages[list[Array]]:
    """Return copies of the root's tensors on all ranks.

    The root cuts each message into a part for every rank, and each rank forwards its part. So each rank sends at most
    about twice the size of the message, whatever the number of ranks.
    """
    copies = [array_namespace(t).asarray(t, copy=True) for t in tensors]
    for numbers in _groups(tensors):
        raw = [bytes_of(tensors[number]) for number in numbers]
        sizes = [buffer.shape[0] for buffer in raw]
        edges = [joined_size(sizes) * index // size for index in range(size + 1)]
        lengths = tuple(stop - start for start, stop in pairwise(edges))
        send = (raw[0][:0],) * size
        if rank == root:
            message = join(raw)
            send = tuple(message[start:stop] for start, stop in pairwise(edges))
        arrived = yield AllToAll(
            send, tuple(lengths[rank] if source == root else 0 for source in range(size))
        )
        parts = yield AllGather(arrived[root], lengths)
        for number, buffer in zip(numbers, split(concat(list(parts)), sizes), strict=True):
            like = tensors[number]
            values = from_bytes_of(buffer, dtype_name(like.dtype))
            copies[number] = array_namespace(like).reshape(values, tuple(like.shape))
    return copies


def _groups(tensors: Sequence[Array]) -> list[list[int]]:
    """Group the indices of non-empty tensors, so that small ones share a message."""
    groups: list[list[int]] = []
    filled = _MESSAGE_BYTES
    for number, tensor in enumerate(tensors):
        elements = math.prod(tensor.shape)
        if elements:
            if filled >= _MESSAGE_BYTES:
                groups.append([])
                filled = 0
            groups[-1].append(number)
            filled += 8 * elements
    return groups
