"""Measures the links between the ranks of a communicator."""

import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from qcomp.core.mean.nodes import Nodes, node_stages
from qcomp.core.mean.stages import Transport, drive
from qcomp.core.numeric.arrays import Array, from_host_bytes, host_bytes
from qcomp.planning.cluster import INSIDE, Cluster, Link

Clock = Callable[[], float]

_SMALL = 8
"""Bytes of the message that is timed for the latency."""
ROUNDS = 7
BYTES = 1 << 24


class Network(NamedTuple):
    """The result of `measure_network`."""

    cluster: Cluster
    spreads: Mapping[str, tuple[float, float]]
    """The quartiles of the latency and of the large exchange's time, in seconds."""
    on_one_node: bool = False
    """Whether all ranks share a node. Then the cluster's link is the one inside the node, and none between nodes was
    measured."""


def measure_network(
    comm: Transport,
    *,
    like: Array,
    size: int = BYTES,
    rounds: int = ROUNDS,
    clock: Clock = time.perf_counter,
) -> Network:
    """Measure the links of a communicator of at least two ranks. Collective; all ranks return the same result.

    Ranks with equal ``host`` share a node; without hosts each rank is a node. Both directions are in use at once, as in
    every exchange of this package. So ``duplex`` is True, and ``bandwidth`` is the bandwidth in each direction. The
    median of ``rounds`` timings counts. Raises ValueError if there is only one rank, or nodes have different numbers of
    ranks.

    Latency: half the time of a round trip of 8 bytes between two ranks, on different nodes if there are several, minus
    the transfer time of the bytes. Further messages: the additional time per message when the first ranks of all nodes
    exchange 8 bytes. Bandwidth: from the time in which these ranks exchange ``size`` bytes, minus latencies; the
    slowest rank counts. Streams: how many times as fast a node sends if all its ranks send.
    """
    if comm.size < 2:
        raise ValueError(f"comm has {comm.size} rank; expected at least 2 to measure the links between them")
    of_rank, host = tuple(range(comm.size)), getattr(comm, "host", None)
    if hasattr(comm, "host"):
        of_rank = drive(node_stages(host, size=comm.size, like=like, topology="hierarchical"), comm)
    nodes = Nodes(of_rank)
    lanes = nodes.lanes
    if any(len(members) != lanes for members in nodes.members):
        sizes = [len(members) for members in nodes.members]
        raise ValueError(f"the nodes have {sizes} ranks; expected the same number on each")
    probe = _Probe(comm, like, rounds, clock)
    whole = tuple(range(comm.size)) if nodes.count == 1 else None
    first = whole or tuple(members[0] for members in nodes.members)
    link, latency, moved = probe.link([first], size)
    spreads = {"latency": latency.quartiles, "transfer": moved.quartiles}
    if nodes.count == 1:
        return Network(Cluster(comm.size, link), spreads, on_one_node=True)
    inside = INSIDE
    if lanes > 1:
        together = probe.transfer([nodes.team(lane) for lane in range(lanes)], size, link)
        link = replace(link, streams=max(1.0, lanes * moved.median / together.median))
        within, _, _ = probe.link(nodes.members, size)
        inside = replace(within, streams=float(lanes))
    return Network(Cluster(comm.size, link, lanes, inside), spreads)


class _Spread(NamedTuple):
    median: float
    quartiles: tuple[float, float]


def _spread(values: Sequence[float]) -> _Spread:
    if len(values) == 1:
        return _Spread(values[0], (values[0], values[0]))
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return _Spread(middle, (low, high))


class _Probe:
    """Times exchanges within teams of ranks; all other ranks take part with empty buffers."""

    def __init__(self, comm: Transport, like: Array, rounds: int, clock: Clock) -> None:
        if rounds < 1:
            raise ValueError(f"rounds is {rounds}; expected at least 1")
        self.comm, self.like, self.rounds, self.clock = comm, like, rounds, clock
        self._nothing = self._buffer(0)

    def _buffer(self, size: int) -> Array:
        return from_host_bytes(bytes(size), self.like)

    def link(self, teams: Sequence[Sequence[int]], size: int) -> tuple[Link, _Spread, _Spread]:
        """Return the link between the ranks of a team, and the spreads of its latency and its transfer time."""
        latency = self._slowest(self._round_trips([(team[0], team[1]) for team in teams]))
        peers = len(teams[0]) - 1
        further = latency.median
        if peers > 1:
            together = self._slowest(self._exchanges(teams, _SMALL))
            further = max(0.0, (together.median - latency.median) / (peers - 1))
        # The measured latency includes the transfer time of the small messages. So the large exchange does not count
        # that many bytes, and at the end their transfer time is subtracted from the latencies.
        share = self._share(size, peers)
        waiting = latency.median + (peers - 1) * further
        moved = self._moving(teams, share, waiting, size / ((share - _SMALL) * peers))
        small = _SMALL * moved.median / size
        link = Link(
            bandwidth=size / moved.median,
            latency=max(0.0, latency.median - small),
            per_message=max(0.0, further - small),
        )
        return link, latency, moved

    def transfer(self, teams: Sequence[Sequence[int]], size: int, link: Link) -> _Spread:
        """Return the seconds in which each rank sends ``size`` bytes, minus the latencies of this link."""
        peers = len(teams[0]) - 1
        share = self._share(size, peers)
        return self._moving(teams, share, link.seconds(0.0, ranks=1, messages=peers), size / (share * peers))

    @staticmethod
    def _share(size: int, peers: int) -> int:
        return max(-(-size // peers), 2 * _SMALL)

    def _moving(self, teams: Sequence[Sequence[int]], share: int, waiting: float, factor: float) -> _Spread:
        """Return ``factor`` times (t - ``waiting``), where t is the seconds that an exchange of the shares takes."""
        taken = self._slowest(self._exchanges(teams, share))
        # The bytes took some of the time, however large the measured latency: count at least a hundredth.
        middle, low, high = (factor * max(t - waiting, t / 100) for t in (taken.median, *taken.quartiles))
        return _Spread(middle, (low, high))

    def _round_trips(self, pairs: Sequence[tuple[int, int]]) -> Iterator[float]:
        """Yield half of each round trip's seconds on the first rank of each pair, and 0 on the other ranks."""
        there = dict(pairs)
        back = {second: first for first, second in pairs}
        for _ in range(self.rounds + 1):
            self._meet()
            start = self.clock()
            self._send(there, back, _SMALL)
            self._send(back, there, _SMALL)
            yield (self.clock() - start) / 2 if self.comm.rank in there else 0.0

    def _exchanges(self, teams: Sequence[Sequence[int]], share: int) -> Iterator[float]:
        """Yield the seconds in which each rank of a team sends a share to every other member."""
        own = next((team for team in teams if self.comm.rank in team), ())
        peers = {rank for rank in own if rank != self.comm.rank}
        buffer = self._buffer(share)
        send = [buffer if rank in peers else self._nothing for rank in range(self.comm.size)]
        receive = [share if rank in peers else 0 for rank in range(self.comm.size)]
        for _ in range(self.rounds + 1):
            self._meet()
            start = self.clock()
            self.comm.all_to_all(send, receive)
            yield self.clock() - start if peers else 0.0

    def _send(self, to: Mapping[int, int], come: Mapping[int, int], size: int) -> None:
        """Send ``size`` bytes to the rank that ``to`` names, and receive from the one that ``come`` names."""
        rank, ranks = self.comm.rank, range(self.comm.size)
        source = come.get(rank)
        message = self._buffer(size)
        send = [message if to.get(rank) == r else self._nothing for r in ranks]
        self.comm.all_to_all(send, [size if r == source else 0 for r in ranks])

    def _meet(self) -> None:
        self.comm.all_gather(self._buffer(1), [1] * self.comm.size)

    def _slowest(self, times: Iterator[float]) -> _Spread:
        """Return the spread over rounds of the slowest rank's time; the first round only warms up."""
        of_ranks = agreed(self.comm, list(times)[1:], self.like)
        return _spread([max(of_round) for of_round in zip(*of_ranks, strict=True)])


def agreed(comm: Transport, values: Sequence[float], like: Array) -> list[tuple[float, ...]]:
    """Return the values of every rank, the same list on all ranks."""
    layout = f"<{len(values)}d"
    message = from_host_bytes(struct.pack(layout, *values), like)
    arrived = comm.all_gather(message, [struct.calcsize(layout)] * comm.size)
    return [struct.unpack(layout, host_bytes(buffer)) for buffer in arrived]
