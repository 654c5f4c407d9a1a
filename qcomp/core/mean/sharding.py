"""`Sharding`: which part of each tensor a rank holds, if tensors are cut into shards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from qcomp.core.mean.owned import Shape
from qcomp.core.numeric.arrays import Array, array_namespace, concat


@dataclass(frozen=True)
class Sharding:
    """Tensors that are cut into shards, with one rank for each shard, perhaps in several replicas.

    A tensor is cut along one of its axes. With S shards, n slices along this axis become shards of ceil(n / S) slices;
    the last shards are shorter or empty. ``torch.chunk`` and ``Shard`` of torch cut in the same places. Take a tensor
    as a matrix whose rows are the axes before the cut axis, and whose columns are the cut axis and the later axes. Then
    each shard consists of whole columns. Elements are counted in the order of the shards: first all elements of the
    first shard.

    ``shapes`` are the shapes of whole tensors, and for each replica ``ranks`` has the rank that holds each shard.
    Unless ``averaged`` is False, the ranks with the same shard have equal values, which are already averaged over the
    replicas. ``axes`` has the axis along which each tensor is cut; it is empty if all are cut along their first axis.

    Examples
    --------
    >>> sharding = Sharding(shapes=((5, 2), (1,)), ranks=((0, 1),))
    >>> [sharding.part(tensor, rank) for tensor in (0, 1) for rank in (0, 1)]
    [(0, 6), (6, 10), (0, 1), (1, 1)]
    """

    shapes: tuple[Shape, ...]
    ranks: tuple[tuple[int, ...], ...]
    averaged: bool = True
    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        every = sorted(rank for replica in self.ranks for rank in replica)
        if len({len(replica) for replica in self.ranks}) != 1 or every != list(range(len(every))):
            raise ValueError(
                f"ranks is {self.ranks!r}; expected replicas of equal length that together contain each rank from 0 "
                "on once"
            )
        pairs = zip(self.axes, self.shapes, strict=False)
        fits = all(0 <= axis < max(1, len(shape)) for axis, shape in pairs)
        if self.axes and not (fits and len(self.axes) == len(self.shapes)):
            raise ValueError(f"axes is {self.axes!r}; expected an axis of each of the shapes {self.shapes!r}")

    @cached_property
    def shards(self) -> int:
        """The number of shards of a tensor."""
        return len(self.ranks[0])

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The replica and the shard of each rank."""
        found = {rank: (r, s) for r, replica in enumerate(self.ranks) for s, rank in enumerate(replica)}
        return tuple(found[rank] for rank in range(len(found)))

    def holders(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same shard as a rank, in the order of the replicas."""
        _, shard = self.places[rank]
        return tuple(replica[shard] for replica in self.ranks)

    def sends(self, rank: int, owner: int) -> bool:
        """Return whether a rank sends its shard to an owner: if replicas are equal, only the owner's replica sends."""
        return not self.averaged or self.places[rank][0] == self.places[owner][0]

    def bounds(self, tensor: int) -> tuple[int, ...]:
        """Return the first element of each shard of a tensor, and the number of all elements."""
        shape, axis = self.shapes[tensor] or (1,), self._axis(tensor)
        most, others = -(-shape[axis] // self.shards), math.prod((*shape[:axis], *shape[axis + 1 :]))
        return tuple(min(shard * most, shape[axis]) * others for shard in range(self.shards + 1))

    def rows(self, tensor: int) -> int:
        """Return the number of rows of a tensor, seen as a matrix; 1 if its shards are ranges of its elements."""
        return math.prod(self.shapes[tensor][: self._axis(tensor)]) or 1

    def _axis(self, tensor: int) -> int:
        return self.axes[tensor] if self.axes else 0

    def part(self, tensor: int, rank: int) -> tuple[int, int]:
        """Return the first element of a rank's shard of a tensor, and the element after the shard's last."""
        _, shard = self.places[rank]
        bounds = self.bounds(tensor)
        return bounds[shard], bounds[shard + 1]

    def key(self, tensor: int, rank: int) -> str:
        """Return, as text, the first element of a rank's shard and, if there are several rows, "*" and their number."""
        start, rows = self.part(tensor, rank)[0], self.rows(tensor)
        return f"{start}*{rows}" if rows > 1 else str(start)

    def in_shards(self, tensor: int, whole: Array) -> Array:
        """Return the elements of a whole tensor, flat, in the order of its shards."""
        rows = self.rows(tensor)
        if rows == 1:
            return whole
        return concat([columns(whole, rows, *part) for part in pairwise(self.bounds(tensor))])

    def from_shards(self, tensor: int, x: Array) -> Array:
        """Return a whole tensor, flat, from its elements in the order of its shards."""
        rows = self.rows(tensor)
        if rows == 1:
            return x
        return from_columns([x[start:stop] for start, stop in pairwise(self.bounds(tensor))], rows)

    def only(self, tensors: Sequence[int]) -> "Sharding":
        """Return the sharding of only some of the tensors."""
        axes = tuple(self.axes[i] for i in tensors) if self.axes else ()
        return Sharding(tuple(self.shapes[i] for i in tensors), self.ranks, self.averaged, axes)


def columns(x: Array, rows: int, start: int, stop: int) -> Array:
    """Return some columns of a flat matrix, flat; ``start`` and ``stop`` count the elements of whole columns."""
    if rows == 1:
        return x[start:stop]
    xp = array_namespace(x)
    matrix = xp.reshape(x, (rows, x.shape[0] // rows))
    return xp.reshape(matrix[:, start // rows : stop // rows], (-1,))


def from_columns(parts: Sequence[Array], rows: int) -> Array:
    """Return a flat matrix from consecutive parts of its columns, each flat."""
    if rows == 1:
        return concat([*parts])
    xp = array_namespace(parts[0])
    return xp.reshape(xp.concat([xp.reshape(x, (rows, x.shape[0] // rows)) for x in parts], axis=1), (-1,))
