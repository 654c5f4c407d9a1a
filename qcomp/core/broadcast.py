"""`broadcast_stages`: copies the tensors of one rank to all ranks, as pure stages."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise

from qcomp.core.handshake import gather_texts
from qcomp.core.mean.framing import join, joined_size, split
from qcomp.core.mean.stages import AllGather, AllToAll, Owner, Stages, owned
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    bytes_of,
    concat,
    digest,
    dtype_name,
    from_bytes_of,
)

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


def first_values(
    tensors: Sequence[Array], names: tuple[str, ...], *, rank: int, size: int
) -> Stages[dict[int, Array]]:
    """Return rank 0's values of the parameters that differ between the ranks, by their numbers, as copies.

    If the ranks differ in names, shapes or dtypes, this returns no copies; the start of the optimizer then raises a
    more detailed error. Each rank sends a digest of each parameter to all others. Parameters that differ are sent as by
    `broadcast_stages`.
    """
    found = _first_values(tensors, names, rank, size)
    return (yield from owned(found, Owner("optimizer", 0, names, 0, "init")))


def _first_values(
    tensors: Sequence[Array], names: tuple[str, ...], rank: int, size: int
) -> Stages[dict[int, Array]]:
    own = [
        [name, dtype_name(x.dtype), tuple(x.shape), digest(x)] for name, x in zip(names, tensors, strict=True)
    ]
    held = [json.loads(text) for text in (yield from gather_texts(json.dumps(own), size, tensors[0]))]
    layouts = [[told[:-1] for told in of_rank] for of_rank in held]
    if any(layout != layouts[0] for layout in layouts):
        return {}
    differing = [i for i, told in enumerate(zip(*held, strict=True)) if any(one != told[0] for one in told)]
    chosen = [tensors[i] for i in differing]
    copies = yield from broadcast_stages(chosen, root=0, rank=rank, size=size)
    return dict(zip(differing, copies, strict=True))


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
