"""The cost model of means: a `Link`, a `Cluster` and a `Load` give a `Cost`; see docs/planning/README.md."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from qcomp.core.settings import require

_LENGTH = 16
"""Bytes that announce the length of a message to a rank."""


@dataclass(frozen=True)
class Link:
    """A connection that carries messages between ranks.

    Parameters
    ----------
    bandwidth : float
        Bytes per second that one rank sends, in each direction.
    latency : float
        Seconds that an empty message takes.
    duplex : bool
        Whether both directions have the full bandwidth at once; otherwise they share it.
    streams : float
        Number of ranks of a node that reach this bandwidth at once. 1 if one rank can use the node's whole bandwidth.
        More than 1 if a single connection cannot, as with TCP on fast Ethernet. Infinite if each rank has its own link.
    per_message : float, optional
        Seconds that each message of an exchange takes after the first. The default is the latency, as if each message
        waited for the previous one.

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
        require("bandwidth", self.bandwidth, self.bandwidth > 0, "bytes per second, above 0")
        require("latency", self.latency, 0 <= self.latency < math.inf, "seconds, at least 0")
        require("streams", self.streams, self.streams >= 1, "a number of ranks, at least 1")
        if self.per_message is not None:
            require("per_message", self.per_message, 0 <= self.per_message < math.inf, "seconds, at least 0")

    def seconds(self, sent: float, *, ranks: int, messages: int) -> float:
        """Return the seconds that an exchange takes if ranks of a node each send and receive ``sent`` bytes.

        Parameters
        ----------
        sent : float
            Bytes that each of these ranks sends and receives.
        ranks : int
            Number of the node's ranks that take part at once.
        messages : int
            Number of messages that carry the bytes. With 0 messages, the exchange takes no time.
        """
        if messages == 0:
            return 0.0
        further = self.latency if self.per_message is None else self.per_message
        return self.latency + (messages - 1) * further + self.transfer(sent, ranks=ranks)

    def transfer(self, sent: float, *, ranks: int) -> float:
        """Return how many seconds the bytes alone take, without latencies."""
        each_way = 1 if self.duplex else 2
        return each_way * sent * max(1.0, ranks / self.streams) / self.bandwidth


INSIDE = Link(bandwidth=10e9, latency=10e-6, streams=math.inf)
"""The default link between ranks of a node: 10 GB/s each, as over PCIe or through memory."""


@dataclass(frozen=True)
class Cluster:
    """The ranks and the links between them.

    Parameters
    ----------
    ranks : int
    link : Link
        The link between nodes, and so between all ranks if each node has one rank.
    ranks_per_node : int
        A divisor of the number of ranks.
    inside : Link
        The link between the ranks of a node.
    """

    ranks: int
    link: Link
    ranks_per_node: int = 1
    inside: Link = INSIDE

    def __post_init__(self) -> None:
        require("ranks", self.ranks, self.ranks >= 1, "at least 1")
        fits = self.ranks_per_node >= 1 and self.ranks % self.ranks_per_node == 0
        require("ranks_per_node", self.ranks_per_node, fits, f"a divisor of {self.ranks} ranks")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // self.ranks_per_node


class Load(NamedTuple):
    """The size of the averaged vector, and the speed at which a rank compresses it."""

    size: int
    """Number of elements."""
    payload: int
    """Bytes of the longest payload."""
    variable_length: bool
    """Whether message lengths vary, and are announced before the messages."""
    encode: float
    """Seconds per element to compress with a residual."""
    decode: float
    """Seconds per element to decompress."""
    add: float
    """Seconds per element to decompress and add to a sum."""
    copy: float
    """Seconds per element to copy float32."""
    exact: int = 0
    """Number of elements that are not compressed. They only cost time on the wire."""
    call: float = 0.0
    """Fixed seconds per exchange, to start it and assemble its messages."""

    @property
    def packed(self) -> int:
        """Number of elements that are compressed."""
        return self.size - self.exact


class Cost(NamedTuple):
    """The time and bytes that a mean costs a rank."""

    codec: float
    """Seconds of encoding, decoding and calls."""
    wire: float
    """Seconds of sending."""
    sent: float
    """Bytes that the rank sends."""

    @property
    def seconds(self) -> float:
        """Total seconds, without overlap."""
        return self.codec + self.wire


def around(sent: float, cluster: Cluster) -> float:
    """Return how many seconds each rank takes to send ``sent`` bytes to its neighbour, in 2 (N - 1) steps."""
    # One rank of each node sends to the next node, its other ranks to ranks of their node, all in the same steps.
    links = [cluster.link] * (cluster.nodes > 1) + [cluster.inside] * (cluster.ranks_per_node > 1)
    if not links:
        return 0.0
    steps = 2 * (cluster.ranks - 1)
    return steps * max(link.latency for link in links) + max(link.transfer(sent, ranks=1) for link in links)


def to_all(share: float, cluster: Cluster) -> float:
    """Return how many seconds each rank takes to send ``share`` bytes to every other rank."""
    lanes, others = cluster.ranks_per_node, cluster.ranks - cluster.ranks_per_node
    between = cluster.link.seconds(others * share, ranks=lanes, messages=others)
    return max(between, inside(share, cluster))


def inside(share: float, cluster: Cluster) -> float:
    """Return how many seconds each rank takes to send ``share`` bytes to every other rank of its node."""
    lanes = cluster.ranks_per_node
    return cluster.inside.seconds((lanes - 1) * share, ranks=lanes, messages=lanes - 1)


def announcements(load: Load, exchanges: int, cluster: Cluster) -> float:
    """Return how many seconds the announcements of message lengths take; 0 if the lengths do not vary."""
    return exchanges * to_all(_LENGTH * cluster.ranks, cluster) if load.variable_length else 0.0
