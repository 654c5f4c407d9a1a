"""Which rows of which tensors each rank holds, where tensors are cut into shards: pure integers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from qcomp.core.mean.owned import Shape

__all__ = ["Sharding"]


@dataclass(frozen=True)
class Sharding:
    """Tensors that are cut by rows into one shard for each of several ranks, perhaps in several replicas.

    A row is a slice along the first axis. With S shards, a tensor of n rows has shards of ceil(n / S) rows; the last
    ones are shorter or empty. ``torch.chunk`` and ``Shard(0)`` of torch cut in the same places.

    Parameters
    ----------
    shapes : tuple of tuple of int
        The shape of each whole tensor.
    ranks : tuple of tuple of int
        For each replica, the rank that holds each shard.
    averaged : bool, default True
        Whether the ranks with the same shard are given the same values, because these have been averaged over the
        replicas already.

    Examples
    --------
    >>> sharding = Sharding(shapes=((5, 2), (1,)), ranks=((0, 1),))
    >>> [sharding.part(tensor, rank) for tensor in (0, 1) for rank in (0, 1)]
    [(0, 6), (6, 10), (0, 1), (1, 1)]
    """

    shapes: tuple[Shape, ...]
    ranks: tuple[tuple[int, ...], ...]
    averaged: bool = True

    def __post_init__(self) -> None:
        every = sorted(rank for replica in self.ranks for rank in replica)
        if len({len(replica) for replica in self.ranks}) != 1 or every != list(range(len(every))):
            raise ValueError(
                f"ranks is {self.ranks!r}; expected replicas of equal length that have each rank from 0 once"
            )

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
        shape = self.shapes[tensor]
        rows = shape[0] if shape else 1
        most, width = -(-rows // self.shards), math.prod(shape[1:])
        return tuple(min(shard * most, rows) * width for shard in range(self.shards + 1))

    def part(self, tensor: int, rank: int) -> tuple[int, int]:
        """Return the first element of a rank's shard of a tensor, and the element after its last."""
        _, shard = self.places[rank]
        bounds = self.bounds(tensor)
        return bounds[shard], bounds[shard + 1]

    def only(self, tensors: Sequence[int]) -> "Sharding":
        """Return the same cut of some of the tensors."""
        return Sharding(tuple(self.shapes[i] for i in tensors), self.ranks, self.averaged)
