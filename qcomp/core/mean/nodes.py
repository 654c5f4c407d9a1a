"""`Nodes`: which ranks share a node; and `node_stages`: the exchange by which ranks learn this."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from qcomp.core.mean.stages import AllGather, Stages
from qcomp.core.numeric.arrays import Array, array_namespace, device, host_bytes
from qcomp.core.reporting import name_ranks

_DIGEST_BYTES = 16
_UNNAMED = bytes(_DIGEST_BYTES)


@dataclass(frozen=True)
class Nodes:
    """The nodes of a world of ranks.

    Parameters
    ----------
    of_rank : tuple of int
        The node of each rank, numbered from 0 without gaps.

    Examples
    --------
    >>> nodes = Nodes((0, 1, 0, 1, 1))
    >>> nodes.members
    ((0, 2), (1, 3, 4))
    >>> nodes.lanes, nodes.lane(3), nodes.lane(4), nodes.team(1)
    (2, 1, None, (2, 3))
    """

    of_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if set(self.of_rank) != set(range(self.count)) or not self.of_rank:
            raise ValueError(
                f"nodes is {self.of_rank}; expected a node for each rank, numbered from 0 without gaps"
            )

    @classmethod
    def of(cls, size: int, nodes: tuple[int, ...]) -> "Nodes":
        """Return the nodes of a world of ``size`` ranks; by default each rank is a separate node."""
        if nodes and len(nodes) != size:
            raise ValueError(f"nodes is {nodes}; expected the node of each of {size} ranks")
        return cls(nodes or tuple(range(size)))

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(set(self.of_rank))

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, in order."""
        return tuple(
            tuple(rank for rank, node in enumerate(self.of_rank) if node == own) for own in range(self.count)
        )

    @property
    def lanes(self) -> int:
        """Number of ranks of the smallest node: so many ranks can work in parallel in every node."""
        return min(map(len, self.members))

    def lane(self, rank: int) -> int | None:
        """Return the number of a rank within its node; None if the smallest node has no rank of this number."""
        number = self.members[self.of_rank[rank]].index(rank)
        return number if number < self.lanes else None

    def team(self, lane: int) -> tuple[int, ...]:
        """Return the ranks of a lane: one rank of each node, in the order of the nodes."""
        return tuple(members[lane] for members in self.members)


def node_stages(host: str | None, *, size: int, like: Array, topology: str) -> Stages[tuple[int, ...]]:
    """Return the node of each rank, the same on all ranks: ranks with equal ``host`` share a node.

    Every rank sends 16 bytes to every other. Nodes are numbered in the order of their first ranks. If any rank has no
    ``host``, all raise TypeError, which names the ``topology`` that needs nodes.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> from qcomp.core.mean.stages import drive
    >>> def rank_main(comm):
    ...     return drive(node_stages(comm.host, size=3, like=np.zeros(1), topology="hierarchical"), comm)
    >>> qcomp.comm.run_local(3, rank_main, hosts=["a", "b", "a"])
    [(0, 1, 0), (0, 1, 0), (0, 1, 0)]
    """
    digest = sha256(host.encode()).digest()[:_DIGEST_BYTES] if isinstance(host, str) else _UNNAMED
    xp = array_namespace(like)
    message = xp.asarray(list(digest), dtype=xp.uint8, device=device(like))
    arrived = yield AllGather(message, (_DIGEST_BYTES,) * size)
    digests = [host_bytes(part) for part in arrived]
    unnamed = [rank for rank, found in enumerate(digests) if found == _UNNAMED]
    if unnamed:
        raise TypeError(
            f"host is None on {name_ranks(unnamed)}; expected the name of the machine, as an attribute of comm or as "
            f"an argument of init_stages, since topology={topology!r} must know which ranks share a node"
        )
    return _numbered(digests)


def require_rank_in(rank: int, size: int) -> None:
    """Raise ValueError unless a world of ``size`` ranks has this rank."""
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank!r}, size is {size!r}; expected a rank from 0 to size - 1")


def _numbered(names: Sequence[bytes]) -> tuple[int, ...]:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)
