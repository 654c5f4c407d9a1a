"""Gathers the saved dicts of all ranks on one rank, and selects what each rank later loads from the gathered dicts."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qcomp.core.checkpoint.manifest import ArrayEntry
from qcomp.core.handshake import gather_texts
from qcomp.core.mean.framing import join, joined_size, split
from qcomp.core.mean.stages import AllToAll, Stages
from qcomp.core.numeric.arrays import Array, array_namespace, bytes_of, device, dtype_name

_OF_RANK = re.compile(r"rank (\d{1,10}) of (\d{1,10})")


def of_rank(rank: int, size: int) -> str:
    """Return the key of one rank's entry."""
    return f"rank {rank} of {size}"


def rank_of(key: Any) -> tuple[int, int] | None:
    """Return the rank and the number of ranks in a key of `of_rank`; None for other keys."""
    found = _OF_RANK.fullmatch(str(key))
    return None if found is None else (int(found[1]), int(found[2]))


def states_in(saved: Any, rank: int, size: int) -> Any:
    """Return the states to load from a dict of ranks' states under keys of `of_rank`, or from a list of such dicts.

    If the dict has a state of this rank, return it. If its only state is of another rank of ``size``, return that
    state, since it may fit every rank. Otherwise return a list of all states. The values of the dict are tuples with
    one state. Objects that are not such dicts are returned unchanged.
    """
    if isinstance(saved, Sequence) and not isinstance(saved, str | bytes):
        of_each = [states_in(one, 0, 0) for one in saved]
        return [state for found in of_each for state in (found if isinstance(found, list) else [found])]
    if not isinstance(saved, Mapping) or not all(map(rank_of, saved)):
        return saved
    if not all(isinstance(value, list | tuple) and len(value) == 1 for value in saved.values()):
        return saved  # loading refuses it on every rank
    states = {rank_of(key): value[0] for key, value in saved.items()}
    if (rank, size) in states:
        return states[rank, size]
    found = list(states.values())
    return found[0] if [of for _, of in filter(None, states)] == [size] else found


def gather_dicts(
    own: Mapping[str, Any], *, rank: int, size: int, like: Array, root: int = 0
) -> Stages[list[dict[str, Any]]]:
    """Return the dicts of all ranks, in rank order, on the root, and an empty list on the other ranks.

    ``like`` gives the library and the device of the exchanged buffers, and of the arrays on the root.
    """
    xp = array_namespace(like)
    arrays = {key: xp.asarray(x, device=device(like)) for key, x in own.items() if hasattr(x, "shape")}
    scalars = {key: value for key, value in own.items() if key not in arrays}
    told = [scalars, {key: ArrayEntry(tuple(x.shape), dtype_name(x.dtype), "") for key, x in arrays.items()}]
    texts = yield from gather_texts(json.dumps(told), size, like)
    facts = [
        (of_rank, {key: ArrayEntry(tuple(entry[0]), *entry[1:]) for key, entry in entries.items()})
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
