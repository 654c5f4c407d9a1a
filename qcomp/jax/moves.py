"""Moves of elements between vectors in compiled programs, in few operations, since each takes compile time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qcomp.core.kernels import chosen
from qcomp.jax.kernels import TracedKernels

__all__ = ["Array", "Range", "Rank", "Table", "as_one", "at", "cut", "moved", "slice_of"]

Array = Any  # as the functions of JAX take it
Rank = jax.Array
"""The index of a device, as a traced integer."""
Table = np.ndarray[Any, Any]

_WINDOWS = 1 << 16, 512, 4, 1
"""The possible numbers of elements that move at once. Each move uses the largest that fits, so that tables stay
small."""
_MOST_INT32 = 2**31 - 1


class Range(NamedTuple):
    """A move of consecutive elements from one vector to another."""

    source: int
    target: int
    length: int

    def back(self) -> Range:
        """Return the opposite move."""
        return Range(self.target, self.source, self.length)


def cut(joined: Array, sizes: Sequence[int]) -> list[Array]:
    """Cut a flat vector into parts of these sizes, as `cut_like` does.

    If XLA knows the places of the parts, it compiles a slice for each part; if they are hidden from it, a slice for
    each size.
    """
    ends = list(accumulate(sizes))
    return _slices(joined, [(end - size, end) for size, end in zip(sizes, ends, strict=True)])


def _slices(x: jax.Array, places: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """Return slices of a vector, from pairs of start and stop."""
    kernels = chosen(x)
    if len(places) == 1 or not isinstance(kernels, TracedKernels):
        return [slice_of(x, start, stop) for start, stop in places]
    _, starts = kernels.apart(lambda: (), [start for start, _ in places])
    return [
        jax.lax.dynamic_slice(x, (hidden,), (stop - start,))
        for hidden, (start, stop) in zip(starts, places, strict=True)
    ]


def slice_of(x: jax.Array, start: int, stop: int) -> jax.Array:
    """Return a slice of a vector, or the vector itself if the slice is all of it."""
    return x if (start, stop) == (0, x.shape[0]) else jax.lax.slice_in_dim(x, start, stop)


def as_one(parts: Sequence[Array]) -> jax.Array:
    """Return vectors joined into one."""
    return parts[0] if len(parts) == 1 else jax.lax.concatenate(list(parts), 0)


def moved(
    source: jax.Array, moves: Sequence[Sequence[Range]], size: int, rank: Rank | None = None
) -> jax.Array:
    """Return a vector into which elements of another vector were moved, with zeros elsewhere.

    Parameters
    ----------
    source : array, shape (length,) or (ranks, length)
        With two axes, the vector of each rank.
    moves : sequence of sequences of Range
        The moves of each device, or one sequence for all.
    size : int
        The length of the result.
    rank : traced int, optional
        The number of this device, if each has its own moves.
    """
    tables: dict[int, list[list[tuple[int, int]]]] = defaultdict(lambda: [[] for _ in moves])
    for number, of_device in enumerate(moves):
        for first, target, length in of_device:
            if length:
                # The last window may overlap with the one before: both move the same elements.
                window = next(window for window in _WINDOWS if window <= length)
                steps = [*range(0, length - window, window), length - window]
                tables[window][number] += [(first + step, target + step) for step in steps]
    result = jnp.zeros((*source.shape[:-1], size), source.dtype)
    wide = max(size, source.shape[-1]) > _MOST_INT32
    for window, of_devices in tables.items():
        # Elements that are moved beyond the end are dropped.
        table = np.full((len(moves), max(map(len, of_devices)), 2), (0, size))
        for places, found in zip(table, of_devices, strict=True):
            places[: len(found)] = np.asarray(found, table.dtype).reshape(-1, 2)
        with jax.enable_x64(True) if wide else nullcontext():
            own = jnp.asarray(table[0]) if rank is None else at(table, rank)
            result = _move_windows(source, result, own, window)
    return result


def _move_windows(source: jax.Array, target: jax.Array, places: jax.Array, window: int) -> jax.Array:
    """Copy windows of the source into the target; ``places`` has the start of each window in both."""
    if source.ndim > 1:
        each: jax.Array = jax.vmap(lambda s, t: _move_windows(s, t, places, window))(source, target)
        return each
    taken = jax.lax.gather(
        source,
        places[:, :1],
        jax.lax.GatherDimensionNumbers((1,), (), (0,)),
        (window,),
        mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    written: jax.Array = jax.lax.scatter(
        target,
        places[:, 1:],
        taken,
        jax.lax.ScatterDimensionNumbers((1,), (), (0,)),
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )
    return written


def at(table: Table, rank: Rank) -> jax.Array:
    """Return this device's entry of a table."""
    found: jax.Array = jax.lax.dynamic_index_in_dim(jnp.asarray(table), rank, keepdims=False)
    return found
