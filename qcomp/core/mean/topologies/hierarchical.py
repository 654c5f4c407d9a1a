"""`Hierarchical`: exact sums inside each node, two compressed phases between nodes."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from qcomp.core import primitives
from qcomp.core.compressors.identity import Identity
from qcomp.core.errors import NonFiniteError, PayloadError
from qcomp.core.mean.chunks import Chunk, Chunks, Cutter, Segment, cut
from qcomp.core.mean.codec import Codec, unsealed
from qcomp.core.mean.costs import Cluster, Cost, Load, announcements, inside
from qcomp.core.mean.framing import Frame, Opened, join, joined_size, seal, sealed_size, split
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.stages import AllToAll, Stages
from qcomp.core.mean.topologies.base import Averaged, Call, Topology, decode_means
from qcomp.core.mean.topologies.two_phase import TwoPhase
from qcomp.core.numeric.arrays import Array, array_namespace, device, from_host_bytes, host_bytes
from qcomp.core.reporting import name_ranks

_WORKER, _SERVER = 0, 1
"""The hops in the keys of random draws."""
_LENGTH_BYTES = 8
_EXACT_BYTES = 4
"""Bytes of an exact element."""


@dataclass(frozen=True)
class Lanes:
    """How tensors are cut: into a lane per rank of the smallest node, and each lane into a chunk per node.

    Rank number l of a node works on lane l, together with rank number l of every other node. Each of these ranks is the
    server of the lane's chunk that has the number of its node. With nodes of one rank there is one lane, with the same
    chunks as two phases.

    Examples
    --------
    >>> lanes = Lanes(Nodes((0, 0, 1, 1)), (40, 8), (8, 8))
    >>> lanes.parts(0), lanes.parts(1)  # three buckets of 8 for the first rank of a node, three for the second
    ([(0, 24), (0, 0)], [(24, 40), (0, 8)])
    """

    nodes: Nodes
    sizes: tuple[int, ...]
    bucket_sizes: tuple[int, ...]
    cut: Cutter = cut

    @cached_property
    def cuts(self) -> Chunks:
        """The lanes, as segments of the tensors."""
        return self.cut(self.sizes, self.bucket_sizes, self.nodes.lanes)

    def parts(self, lane: int | None) -> list[tuple[int, int]]:
        """Return where the part of each tensor in a lane starts and stops; all parts are empty if the lane is None."""
        parts = [(0, 0)] * len(self.sizes)
        for segment in () if lane is None else self.cuts[lane]:
            parts[segment.tensor] = (segment.start, segment.stop)
        return parts

    def chunks(self, lane: int) -> list[Chunk]:
        """Return the chunks of a lane, as segments of the tensors."""
        parts = self.parts(lane)
        numbers = {segment.tensor: segment.bucket for segment in self.cuts[lane]}

        def whole(part: Segment) -> Segment:
            start = parts[part.tensor][0]
            bucket = numbers[part.tensor] + part.start // self.bucket_sizes[part.tensor]
            return Segment(part.tensor, start + part.start, start + part.stop, bucket)

        sizes = [stop - start for start, stop in parts]
        return [
            tuple(whole(part) for part in chunk)
            for chunk in self.cut(sizes, self.bucket_sizes, self.nodes.count)
        ]

    def residuals(self, rank: int) -> Residuals:
        """Return the ranges whose residuals a rank stores: as worker its part of each tensor, as server its chunk."""
        lane = self.nodes.lane(rank)
        worker = tuple(Segment(i, start, stop, 0) for i, (start, stop) in enumerate(self.parts(lane)))
        return Residuals(worker, () if lane is None else self.chunks(lane)[self.nodes.of_rank[rank]])

    def own_chunks(self, lane: int) -> list[Chunk]:
        """Return the chunks of a lane, as segments of its parts of the tensors."""
        starts = [start for start, _ in self.parts(lane)]
        return [
            tuple(s._replace(start=s.start - starts[s.tensor], stop=s.stop - starts[s.tensor]) for s in chunk)
            for chunk in self.chunks(lane)
        ]


@dataclass(frozen=True, eq=False)
class _LaneLayout(Layout):
    """A layout with the chunks of all lanes, in the order of the lanes."""

    lanes: Lanes

    @cached_property
    def node(self) -> int:
        """The node of this rank."""
        return self.operands.nodes.of_rank[self.rank]

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return self.operands.nodes.members[self.node]

    @cached_property
    def lane(self) -> int | None:
        """The lane on which this rank works; None if the smallest node has no rank of the same number."""
        return self.operands.nodes.lane(self.rank)

    @cached_property
    def exact_frames(self) -> tuple[Frame, ...]:
        """The frame of each lane's exact values."""
        return tuple(self.operands.frame(lane, Identity()) for lane in self.lanes.cuts)

    @cached_property
    def relayed(self) -> tuple[tuple[Frame, ...], ...]:
        """The frames of each lane's chunks, as relayed inside the node."""
        return tuple(self.frame_of(self.lanes.chunks(lane)) for lane in range(self.operands.nodes.lanes))

    @cached_property
    def own_frames(self) -> tuple[Frame, ...]:
        """The frames of the chunks of this rank's lane, as segments of its parts of the tensors."""
        return () if self.lane is None else self.frame_of(self.lanes.own_chunks(self.lane))

    def sealed_size(self, frame: Frame) -> int:
        """Return the bytes of a chunk's sealed message, or of the longest one if lengths vary."""
        return sealed_size(frame.nbytes, self.world)

    @cached_property
    def relay_sizes(self) -> tuple[int, ...]:
        """Bytes of each lane's relayed messages; of the longest, if lengths vary."""
        table = self.operands.nodes.count * _LENGTH_BYTES
        return tuple(joined_size([table, *map(self.sealed_size, of_lane)]) for of_lane in self.relayed)


class Hierarchical(Topology):
    """Exact sums inside each node, two phases between nodes, and a relay inside the node.

    There are four exchanges. First every rank sends each rank of its node the exact values of that rank's lane, and
    each rank adds the values for its lane in rank order. Then the ranks of a lane, one of each node, exchange
    compressed messages in two phases. Finally each rank relays the messages of the second phase inside its node
    unchanged, so that all ranks decode the same bytes.

    The vector is cut into L lanes of whole buckets, where L is the number of ranks of the smallest node. Rank number l
    of each of K nodes adds lane l over its node, multiplies by K and divides by N, the number of ranks; so the mean
    over nodes is the mean over ranks, even if nodes have unequal sizes. Rank l compresses the result, and is the only
    rank of its node that stores residuals for the lane, so mean_i e_i in the sum identity is a mean over nodes. If E is
    the bytes of the exact vector and b the bytes of its payload, rank l sends (L - 1) / L * E + (n - 1) / L * b bytes
    inside its node of n ranks, and 2 (K - 1) / K * b / L to other nodes. A rank beyond the L-th of its node sends E
    inside the node. A message with a lane's exact values has 8 more bytes. A message with a chunk has up to 16 more
    bytes, and one more for each rank. All are padded to multiples of 8. With one rank per node, the result equals two
    phases, bit for bit. Source: Bagua's hierarchical communication, where one leader does the work of a node.

    A rank that finds values out of range continues with refusals instead of payloads. All ranks learn of the refusal
    from the relayed messages, and then raise errors with the same text.
    """

    name = "hierarchical"
    wants_nodes = True

    def lay_out(self, operands: Operands, chunks: Chunks | None = None) -> Layout:
        """Cut the tensors into lanes, and these into chunks."""
        assert chunks is None
        lanes = Lanes(operands.nodes, operands.sizes, operands.bucket_sizes, operands.cut)
        found = tuple(chunk for lane in range(operands.nodes.lanes) for chunk in lanes.chunks(lane))
        return _LaneLayout(operands, found, lanes.residuals(operands.rank), lanes)

    def stages(self, call: Call) -> Stages[Averaged]:
        """Run the four exchanges."""
        assert isinstance(call.layout, _LaneLayout)
        return _NodeShare(call, call.layout).stages()

    def cost(self, load: Load, cluster: Cluster) -> Cost:
        """Return by a formula what a mean costs each rank."""
        lanes, nodes, copy = cluster.ranks_per_node, cluster.nodes, load.copy
        if nodes == 1:
            exact_load = Load(
                load.size, _EXACT_BYTES * load.size, False, copy, copy, copy, copy, call=load.call
            )
            return TwoPhase().cost(exact_load, cluster)
        if lanes == 1:
            return TwoPhase().cost(load, cluster)
        exact, lane = _EXACT_BYTES * load.size / lanes, load.payload / lanes
        codec = 2 * load.size * copy + 4 * load.call  # packed, and added up over the node
        codec += load.packed * (load.encode * (1 + 1 / nodes) / lanes + load.add / lanes + load.decode)
        wire = inside(exact, cluster) + inside(lane, cluster)
        wire += 2 * cluster.link.seconds((nodes - 1) / nodes * lane, ranks=lanes, messages=nodes - 1)
        wire += announcements(load, 4, cluster)
        return Cost(codec, wire, (lanes - 1) * (exact + lane) + 2 * (nodes - 1) / nodes * lane)

    def is_exact_on(self, nodes: Nodes) -> bool:
        """Return whether there is only one node, since sums inside a node are exact."""
        return nodes.count == 1

    def suits(self, nodes: int, ranks_per_node: int) -> bool:
        """Return whether there are several nodes with several ranks each."""
        return nodes > 1 and ranks_per_node > 1


class _NodeSums(NamedTuple):
    """The result of the exchange inside a node, on one rank."""

    values: list[Array]
    """This rank's lane of each tensor, summed over the node, times (number of nodes) / (number of ranks)."""
    blamed: set[int]
    """Ranks with values that are not finite; if there are any, ``values`` is meaningless."""
    error: NonFiniteError | None = None
    """The error that kept this rank from sending its values."""


class _Answer(NamedTuple):
    """The result of the exchanges between nodes, on one rank."""

    message: Array
    """The means of this rank's lane, as the servers have sent them, to be relayed."""
    worker: tuple[Array, ...]
    server: tuple[Array, ...]
    error: NonFiniteError | None


class _NodeShare:
    """The work of one rank in a hierarchical mean."""

    def __init__(self, call: Call, layout: _LaneLayout) -> None:
        self.call = call
        self.layout = layout
        self.nodes = layout.operands.nodes

    def stages(self) -> Stages[Averaged]:
        """Run the four exchanges."""
        layout, members = self.layout, self.layout.members
        sums = yield from self._inside_node()
        if layout.lane is None:
            for _ in range(2):
                yield self._exchange({}, {})
            answer = _Answer(self._bytes([]), tuple(self.call.worker), (), None)
        else:
            answer = yield from self._between_nodes(layout.lane, sums)
        arrived = yield self._exchange(
            dict.fromkeys(members, answer.message), dict(zip(members, layout.relay_sizes, strict=False))
        )
        codec = Codec(self.call.values)
        messages, blamed = [], set()
        for lane, (frames, leader) in enumerate(zip(layout.relayed, members, strict=False)):
            unsealed, accused = self._unseal(codec, self._unpacked(arrived[leader], leader), frames, lane)
            messages += unsealed
            blamed |= accused
        if blamed:
            raise NonFiniteError(
                f"a value on {name_ranks(blamed)} is not finite, or too large to compress"
            ) from (sums.error or answer.error)
        opened = self._opened(codec, messages, layout.frames)
        return Averaged(decode_means(codec, opened, self.call), answer.worker, answer.server)

    def _inside_node(self) -> Stages[_NodeSums]:
        """Add up this rank's lane over the node. The exact values are freed when this returns."""
        layout, members, codec = self.layout, self.layout.members, Codec(self.call.values)
        frame = None if layout.lane is None else layout.exact_frames[layout.lane]
        mine = codec.encode(layout.exact_frames, self.call.values, (), self.call.key, donate=False)
        arrived = yield self._exchange(
            dict(zip(members, mine.messages, strict=False)),
            dict.fromkeys(members, 0 if frame is None else frame.nbytes),
        )
        if frame is None:
            return _NodeSums([], set(), mine.error)
        messages = [arrived[rank] for rank in members]
        return self._add(codec, messages, frame)._replace(error=mine.error)

    def _add(self, codec: Codec, messages: Sequence[Array], lane: Frame) -> _NodeSums:
        """Return the sum over the ranks of the node, times the number of nodes, divided by the number of all ranks."""
        blamed = {
            rank
            for rank, message in zip(self.layout.members, messages, strict=True)
            if codec.refuses(message, lane, rank)
        }
        values = [_empty(x) for x in self.call.values]
        if blamed:
            return _NodeSums(values, blamed)
        sums = codec.total(self._opened(codec, messages, [lane] * len(messages)))
        # In lowest terms, so that with nodes of equal size nothing is rounded twice.
        weight = math.gcd(self.nodes.count, self.layout.world)
        factor, divisor = self.nodes.count // weight, self.layout.world // weight
        for segment, total in zip(lane.chunk, sums, strict=True):
            scaled = total if factor == 1 else total * factor
            values[segment.tensor] = scaled if divisor == 1 else primitives.finish_mean(scaled, divisor)
        return _NodeSums(values, set())

    def _between_nodes(self, lane: int, sums: _NodeSums) -> Stages[_Answer]:
        """Average over nodes in two phases; send refusals if a value is out of range."""
        layout, key = self.layout, self.call.key
        team, frames = self.nodes.team(lane), layout.own_frames
        own = frames[layout.node]
        ranges = layout.lanes.parts(lane)
        codec = Codec([x[start:stop] for x, (start, stop) in zip(self.call.values, ranges, strict=True)])
        if sums.blamed:
            asked = codec.refusals(frames, None)
        else:
            asked = codec.encode(frames, sums.values, self.call.worker, key.at(hop=_WORKER), donate=True)
        arrived = yield self._exchange(
            {rank: self._seal(m, sums.blamed) for rank, m in zip(team, asked.messages, strict=True)},
            dict.fromkeys(team, layout.sealed_size(own)),
        )
        of_team = [own] * len(team)
        messages, blamed = self._unseal(codec, [arrived[rank] for rank in team], of_team, lane)
        if blamed:
            answered = codec.refusals([own], None)
        else:
            opened = self._opened(codec, messages, of_team)
            answered = codec.encode_average(opened, self.call.server, key.at(hop=_SERVER))
        sealed = self._seal(answered.messages[0], blamed)
        arrived = yield self._exchange(
            dict.fromkeys(team, sealed), dict(zip(team, map(layout.sealed_size, frames), strict=True))
        )
        message = self._packed([arrived[rank] for rank in team])
        return _Answer(message, asked.residuals, answered.residuals, asked.error or answered.error)

    def _exchange(self, send: dict[int, Array], receive: dict[int, int]) -> AllToAll:
        """Return an exchange with some ranks; messages to and from all others are empty."""
        ranks, nothing = range(self.layout.world), self._bytes([])
        return AllToAll(
            tuple(send.get(rank, nothing) for rank in ranks), tuple(receive.get(rank, 0) for rank in ranks)
        )

    @staticmethod
    def _opened(codec: Codec, messages: Sequence[Array], frames: Sequence[Frame]) -> list[Opened]:
        """Return the contents of messages that are not refusals."""
        return [
            codec.open_from(number, message, frame)
            for number, (message, frame) in enumerate(zip(messages, frames, strict=True))
        ]

    def _seal(self, message: Array, blamed: set[int]) -> Array:
        return seal(message, blamed, self.layout.world)

    def _unseal(
        self, codec: Codec, sealed: Sequence[Array], frames: Sequence[Frame], lane: int
    ) -> tuple[list[Array], set[int]]:
        """Return the messages of a lane's ranks, and the ranks to blame; the sender, if a refusal blames nobody."""
        messages, blamed = [], set()
        for sender, buffer, frame in zip(self.nodes.team(lane), sealed, frames, strict=True):
            message, accused = unsealed(codec, buffer, frame, sender, self.layout.world)
            blamed |= accused
            messages.append(message)
        return messages, blamed

    def _packed(self, messages: Sequence[Array]) -> Array:
        """Return several messages as one: first their lengths, which may depend on the values, then the messages."""
        lengths = struct.pack(f"<{len(messages)}Q", *(message.shape[0] for message in messages))
        return join([from_host_bytes(lengths, self.call.values[0]), *messages])

    def _unpacked(self, packed: Array, sender: int) -> list[Array]:
        table, size = self.nodes.count * _LENGTH_BYTES, packed.shape[0]
        lengths = struct.unpack(f"<{self.nodes.count}Q", host_bytes(packed[:table])) if size >= table else ()
        if size < table or size != joined_size([table, *lengths]):
            raise PayloadError(
                f"the message from rank {sender} has {size} bytes; expected {table} bytes with the lengths of "
                f"{self.nodes.count} messages, and then these messages"
            )
        return split(packed[table:], lengths)

    def _bytes(self, values: Sequence[int]) -> Array:
        return from_host_bytes(bytes(values), self.call.values[0])


def _empty(like: Array) -> Array:
    return array_namespace(like).zeros((0,), dtype=like.dtype, device=device(like))
