"""What the cost of a mean is made of: links, clusters, loads and messages; see docs/planning/README.md."""

import math
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["INSIDE", "Cluster", "Cost", "Link", "Load", "announcements", "around", "inside", "to_all"]

_LENGTH = 16
"""Bytes that tell a rank the length of a message."""


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; expected {expected}")


@dataclass(frozen=True)
class Link:
    """What carries messages between ranks.

    Parameters
    ----------
    bandwidth : float
        Bytes a second that one rank sends, in each direction.
    latency : float
        Seconds that a message of no bytes takes.
    duplex : bool
        Whether both directions have the bandwidth at once; otherwise they share it.
    streams : float
        How many ranks of a node have this bandwidth at once. 1 where one rank can fill what the node has; more where a
        single connection cannot, as with TCP on fast Ethernet; infinite for lanes of each rank's own.
    per_message : float, optional
        Seconds that each further message of the same exchange takes; by default the latency, as if they went out one
        after the other.

    Examples
    --------
    >>> Link(bandwidth=1.25e9, latency=25e-6).seconds(1.25e9, ranks=1, messages=1)
    1.000025
    """

    bandwidth: float
    latency: float = 50e-6
    duplex: bool = True
    streams: float = 1.0
    per_message: float | None = None

    def __post_init__(self) -> None:
        _require("bandwidth", self.bandwidth, self.bandwidth > 0, "bytes a second, above 0")
        _require("latency", self.latency, 0 <= self.latency < math.inf, "seconds, at least 0")
        _require("streams", self.streams, self.streams >= 1, "a number of ranks, at least 1")
        if self.per_message is not None:
            _require("per_message", self.per_message, 0 <= self.per_message < math.inf, "seconds, at least 0")

    def seconds(self, sent: float, *, ranks: int, messages: int) -> float:
        """Return how long an exchange takes in which each rank of a node sends and receives so many bytes.

        Parameters
        ----------
        sent : float
            Bytes that each of these ranks sends, and receives.
        ranks : int
            How many of the node take part at once.
        messages : int
            How many messages the bytes are in; none take no time.
        """
        if messages == 0:
            return 0.0
        further = self.latency if self.per_message is None else self.per_message
        return self.latency + (messages - 1) * further + self.transfer(sent, ranks=ranks)

    def transfer(self, sent: float, *, ranks: int) -> float:
        """Return how long the bytes alone take."""
        each_way = 1 if self.duplex else 2
        return each_way * sent * max(1.0, ranks / self.streams) / self.bandwidth


INSIDE = Link(bandwidth=10e9, latency=10e-6, streams=math.inf)
"""Between ranks of a node, where nothing better is known: 10 GB/s each, as over PCIe or through memory."""


@dataclass(frozen=True)
class Cluster:
    """The ranks, and what is between them.

    Parameters
    ----------
    ranks : int
    link : Link
        Between nodes; between all ranks if there is one rank on each node.
    ranks_per_node : int
        Divides the number of ranks.
    inside : Link
        Between the ranks of a node.
    """

    ranks: int
    link: Link
    ranks_per_node: int = 1
    inside: Link = INSIDE

    def __post_init__(self) -> None:
        _require("ranks", self.ranks, self.ranks >= 1, "at least 1")
        fits = self.ranks_per_node >= 1 and self.ranks % self.ranks_per_node == 0
        _require("ranks_per_node", self.ranks_per_node, fits, f"a divisor of {self.ranks} ranks")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // self.ranks_per_node


class Load(NamedTuple):
    """What is averaged, and how fast a rank compresses it."""

    size: int
    """Number of elements."""
    payload: int
    """Bytes that they are compressed to, at most."""
    variable_length: bool
    """Whether the lengths of messages are told before these are sent."""
    encode: float
    """Seconds an element: compress with a residual."""
    decode: float
    """Seconds an element: decompress."""
    add: float
    """Seconds an element: decompress and add to a sum."""
    copy: float
    """Seconds an element: copy float32."""
    exact: int = 0
    """How many of the elements are not compressed; they take no time but on the wire."""
    call: float = 0.0
    """Seconds an exchange: what starting it and putting its messages together takes, whatever is in them."""

    @property
    def packed(self) -> int:
        """Number of elements that are compressed."""
        return self.size - self.exact


class Cost(NamedTuple):
    """What a rank spends on a mean."""

    codec: float
    """Seconds of encoding and decoding, and of calls."""
    wire: float
    """Seconds of sending."""
    sent: float
    """Bytes."""

    @property
    def seconds(self) -> float:
        """All of it, one after the other."""
        return self.codec + self.wire


def around(sent: float, cluster: Cluster) -> float:
    """Return how long it takes that each rank sends so many bytes to its neighbour, in 2 (N - 1) steps."""
    # One rank of each node sends to the next node, the others to their neighbours, all in step.
    links = [cluster.link] * (cluster.nodes > 1) + [cluster.inside] * (cluster.ranks_per_node > 1)
    if not links:
        return 0.0
    steps = 2 * (cluster.ranks - 1)
    return steps * max(link.latency for link in links) + max(link.transfer(sent, ranks=1) for link in links)


def to_all(share: float, cluster: Cluster) -> float:
    """Return how long it takes that each rank sends so many bytes to each other rank."""
    lanes, others = cluster.ranks_per_node, cluster.ranks - cluster.ranks_per_node
    between = cluster.link.seconds(others * share, ranks=lanes, messages=others)
    return max(between, inside(share, cluster))


def inside(share: float, cluster: Cluster) -> float:
    """Return how long it takes that each rank sends so many bytes to each other rank of its node."""
    lanes = cluster.ranks_per_node
    return cluster.inside.seconds((lanes - 1) * share, ranks=lanes, messages=lanes - 1)


def announcements(load: Load, exchanges: int, cluster: Cluster) -> float:
    """Return how long telling the lengths of messages takes, where they vary."""
    return exchanges * to_all(_LENGTH * cluster.ranks, cluster) if load.variable_length else 0.0
