"""What a step is computed on and sent over: the job, the link, the ranks."""

import math
from dataclasses import dataclass

__all__ = ["INSIDE", "Cluster", "Job", "Link"]


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


@dataclass(frozen=True)
class Job:
    """What a step computes, and what it must average.

    Parameters
    ----------
    params : int
        Number of parameters that are averaged.
    compute : float
        Seconds of a step without any communication: forward, backward and update.
    gradient_bytes : {4, 2}
        Of an element as plain training sends it.
    overlap : float
        The share of `compute` during which gradients become ready one after the other and plain training sends
        already, as DistributedDataParallel does; 0 where sending starts when all are there. The backward pass is
        about 0.6 of a step.
    buckets : int
        How many pieces are sent one after the other where sending overlaps.
    overlap_compressed : bool
        Whether compressed messages overlap too. Not with the optimizers of this package, whose step starts when all
        gradients are there.
    exact : int
        How many of the parameters are in tensors that stay exact, small ones, norms and biases; they are sent with
        the compressed ones, as float32.
    """

    params: int
    compute: float
    gradient_bytes: int = 4
    overlap: float = 0.0
    buckets: int = 1
    overlap_compressed: bool = False
    exact: int = 0

    def __post_init__(self) -> None:
        _require("params", self.params, self.params >= 1, "at least 1")
        _require("compute", self.compute, 0 <= self.compute < math.inf, "seconds, at least 0")
        _require("gradient_bytes", self.gradient_bytes, self.gradient_bytes in (2, 4), "2 or 4")
        _require("exact", self.exact, 0 <= self.exact <= self.params, f"0 to {self.params}, all parameters")
        _require("overlap", self.overlap, 0 <= self.overlap <= 1, "a share from 0 to 1")
        _require("buckets", self.buckets, self.buckets >= 1, "at least 1")
