"""Sending the saved dicts of all ranks to one rank, as pure stages."""

import json
import math
from collections.abc import Mapping
from typing import Any

from qcomp.core.checkpoint.manifest import Entry
from qcomp.core.handshake import gather_texts
from qcomp.core.mean.framing import join, joined_size, split
from qcomp.core.mean.stages import AllToAll, Stages
from qcomp.core.numeric.arrays import Array, array_namespace, bytes_of, device, dtype_name

__all__ = ["gather_dicts"]


def gather_dicts(
    own: Mapping[str, Any], *, rank: int, size: int, like: Array, root: int = 0
) -> Stages[list[dict[str, Any]]]:
    """Return the dicts of all ranks on the root, in rank order, and nothing on the others.

    Parameters
    ----------
    own : mapping of str to array or scalar
        This rank's dict.
    rank, size : int
        This rank, and the number of ranks.
    like : array
        Gives the library and the device of the exchanged buffers, and of the arrays on the root.
    root : int
        The rank that gets all.
    """
    xp = array_namespace(like)
    arrays = {key: xp.asarray(x, device=device(like)) for key, x in own.items() if hasattr(x, "shape")}
    scalars = {key: value for key, value in own.items() if key not in arrays}
    told = [scalars, {key: Entry(tuple(x.shape), dtype_name(x.dtype), "") for key, x in arrays.items()}]
    texts = yield from gather_texts(json.dumps(told), size, like)
    facts = [
        (of_rank, {key: Entry(tuple(entry[0]), *entry[1:]) for key, entry in entries.items()})
        for of_rank, entries in map(json.loads, texts)
    ]
    sizes = [[entry.nbytes for entry in entries.values()] for _, entries in facts]
    nothing = xp.zeros((0,), dtype=xp.uint8, device=device(like))
    message = join([nothing, *(bytes_of(x) for x in arrays.values() if math.prod(x.shape))])
    arrived = yield AllToAll(
        tuple(message if to == root else nothing for to in range(size)),
        tuple(joined_size(of_rank) if rank == root else 0 for of_rank in sizes),
    )
    if rank != root:
        return []
    found = []
    for (of_rank, entries), buffer, of_arrays in zip(facts, arrived, sizes, strict=True):
        parts = zip(entries.items(), split(buffer, of_arrays), strict=True)
        found.append(of_rank | {key: entry.read(part) for (key, entry), part in parts})
    return found
