"""The hierarchical mean as pure stages: exact inside a node, compressed between nodes."""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.identity import Identity
from qcomp.core.errors import NonFiniteError, PayloadError
from qcomp.core.mean.chunks import Cutter, Segment, cut
from qcomp.core.mean.codec import Encoded, SegmentCodec
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.stages import AllToAll, Stages, join, joined_size, split
from qcomp.core.mean.topologies.lanes import Lanes
from qcomp.core.mean.verdicts import seal, sealed_size, unseal
from qcomp.core.numeric.arrays import Array, array_namespace, device, from_host_bytes, host_bytes
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload
from qcomp.core.reporting import name_ranks

__all__ = ["Hierarchy", "Received"]

Chunk = tuple[Segment, ...]

_WORKER, _SERVER = 0, 1
_LENGTH_BYTES = 8


class Received(NamedTuple):
    """What a rank has after the stages."""

    payloads: list[list[Payload]]
    chunks: list[Chunk]
    """Which parts of the tensors the payloads are of."""
    worker: tuple[Array, ...]
    server: tuple[Array, ...]


class _Sums(NamedTuple):
    """What a rank has after the exchange inside its node."""

    values: list[Array]
    """Its lane's parts of the tensors: the node's sum, times nodes, divided by ranks."""
    blamed: set[int]
    """Ranks with values that are not finite; the values mean nothing then."""
    error: NonFiniteError | None = None
    """What kept this rank from sending its own."""


class _Answer(NamedTuple):
    """What a rank has after the exchanges between nodes."""

    message: Array
    """The means of its lane as they arrived from the servers, to be passed on."""
    worker: tuple[Array, ...]
    server: tuple[Array, ...]
    error: NonFiniteError | None


class Hierarchy:
    """One rank's share in a hierarchical mean.

    Four exchanges: every rank sends its exact values to the ranks of its node, to each those of its lane, which adds
    them in rank order; the ranks of a lane, one of each node, exchange compressed messages in two phases; what arrives
    in the second one is passed on inside the node as it is, so that all ranks decode the same bytes.

    The vector is cut into L lanes of whole buckets, L being
    the ranks of the smallest node. Rank number l of every node sums lane l over its node, times K nodes, divided by N
    ranks: so nodes of unequal sizes give the mean over ranks too. It compresses that, and it alone has residuals of
    it: in the sum identity mean_i e_i is over nodes. With E bytes in the exact vector it sends (L - 1) / L * E +
    (n - 1) / L * b bytes to the n ranks of its node, and 2 (K - 1) / K * b / L to other nodes; a rank beyond the L-th
    of its node sends E inside it. Every message of a lane has 8 more bytes, every chunk of a lane up to 16 and one for
    each rank, all padded to multiples of 8. With several nodes of one rank it is two phases, bit for bit. Source:
    Bagua's hierarchical communication, where one leader does the work of a node.

    A rank that finds values out of range goes on with refusals in place of payloads: all ranks of all nodes learn it
    from what is passed on last, and raise then, with the same words.

    Parameters
    ----------
    compressors : sequence of Compressor
        Of each tensor, for what is sent between nodes.
    flat : sequence of arrays
        This rank's values, flat, in the dtype in which they are computed. They are not written to.
    nodes : Nodes
    key : Key
        Of this rank.
    cut : callable
        Cuts tensors into chunks.
    """

    def __init__(
        self,
        compressors: Sequence[Compressor],
        flat: Sequence[Array],
        nodes: Nodes,
        key: Key,
        cut: Cutter = cut,
    ) -> None:
        self.compressors = compressors
        self.flat = flat
        self.nodes = nodes
        self.rank: int = key.rank
        self.key = key
        self.node = nodes.of_rank[self.rank]
        self.members = nodes.members[self.node]
        self.lane = nodes.lane(self.rank)
        self.lanes = Lanes(
            nodes, tuple(x.shape[0] for x in flat), tuple(c.traits.bucket_size for c in compressors), cut
        )

    def stages(self, worker: Sequence[Array], server: Sequence[Array]) -> Stages[Received]:
        """Run the four exchanges, with this rank's residuals, which are not written to."""
        sums = yield from self._inside_node()
        if self.lane is None:  # the smallest node has no partner for this rank
            for _ in range(2):
                yield self._exchange({}, {})
            answer = _Answer(self._bytes([]), tuple(worker), (), None)
        else:
            answer = yield from self._between_nodes(self.lane, sums, worker, server)
        codec = SegmentCodec(self.compressors, self.flat)
        chunks = [self.lanes.chunks(lane) for lane in range(self.nodes.lanes)]
        sizes = [self._relay_size(codec, of_lane) for of_lane in chunks]
        arrived = yield self._exchange(
            dict.fromkeys(self.members, answer.message), dict(zip(self.members, sizes, strict=False))
        )
        messages, blamed = [], set()
        for lane, leader in enumerate(self.members[: self.nodes.lanes]):
            opened, accused = self._unseal(codec, self._unpacked(arrived[leader], leader), chunks[lane], lane)
            messages += opened
            blamed |= accused
        if blamed:
            raise NonFiniteError(
                f"a value on {name_ranks(blamed)} is not finite, or too large to compress"
            ) from (sums.error or answer.error)
        all_chunks = [chunk for of_lane in chunks for chunk in of_lane]
        return Received(codec.open(messages, all_chunks, None), all_chunks, answer.worker, answer.server)

    def _inside_node(self) -> Stages[_Sums]:
        """Add up this rank's lane over the node. The exact values are not held any longer than this takes."""
        exact = SegmentCodec([Identity()] * len(self.flat), self.flat)
        mine = exact.encode(self.lanes.cuts, self.flat, (), self.key, donate=False)
        size = 0 if self.lane is None else exact.message_size(self.lanes.cuts[self.lane])
        arrived = yield self._exchange(
            dict(zip(self.members, mine.messages, strict=False)), dict.fromkeys(self.members, size)
        )
        if self.lane is None:
            return _Sums([], set(), mine.error)
        messages = [arrived[rank] for rank in self.members]
        return self._add(exact, messages, self.lanes.cuts[self.lane])._replace(error=mine.error)

    def _add(self, exact: SegmentCodec, messages: Sequence[Array], lane: Chunk) -> _Sums:
        """Return this node's share of the mean: the sum over its ranks, times nodes, divided by ranks."""
        blamed = {
            rank
            for rank, message in zip(self.members, messages, strict=True)
            if exact.refuses(message, lane, rank)
        }
        values = [_empty(x) for x in self.flat]
        if blamed:
            return _Sums(values, blamed)
        sums = exact.total(exact.open(messages, [lane] * len(messages), None), lane)
        # In lowest terms: with nodes of the same size, and for nodes of one rank, nothing is rounded twice.
        weight = math.gcd(self.nodes.count, len(self.nodes.of_rank))
        factor, divisor = self.nodes.count // weight, len(self.nodes.of_rank) // weight
        for segment, total in zip(lane, sums, strict=True):
            scaled = total if factor == 1 else total * factor
            values[segment.tensor] = scaled if divisor == 1 else primitives.finish_mean(scaled, divisor)
        return _Sums(values, set())

    def _between_nodes(
        self, lane: int, sums: _Sums, worker: Sequence[Array], server: Sequence[Array]
    ) -> Stages[_Answer]:
        """Average over nodes in two phases; what is out of range travels on as refusals."""
        team, chunks = self.nodes.team(lane), self.lanes.own_chunks(lane)
        own = chunks[self.node]
        parts = [x[start:stop] for x, (start, stop) in zip(self.flat, self.lanes.parts(lane), strict=True)]
        codec = SegmentCodec(self.compressors, parts)
        asked = self._refusals(codec, chunks)
        if not sums.blamed:
            asked = codec.encode(chunks, sums.values, worker, self.key.at(hop=_WORKER), donate=True)
        arrived = yield self._exchange(
            {rank: self._seal(m, sums.blamed) for rank, m in zip(team, asked.messages, strict=True)},
            dict.fromkeys(team, self._sealed_size(codec, own)),
        )
        messages, blamed = self._unseal(codec, [arrived[rank] for rank in team], [own] * len(team), lane)
        answered = self._refusals(codec, [own])
        if not blamed:
            opened = codec.open(messages, [own] * len(team), None)
            answered = codec.encode_average(opened, own, server, self.key.at(hop=_SERVER))
        sealed = self._seal(answered.messages[0], blamed)
        arrived = yield self._exchange(
            dict.fromkeys(team, sealed),
            {rank: self._sealed_size(codec, chunk) for rank, chunk in zip(team, chunks, strict=True)},
        )
        message = self._packed([arrived[rank] for rank in team])
        return _Answer(message, asked.residuals, answered.residuals, asked.error or answered.error)

    def _exchange(self, send: dict[int, Array], receive: dict[int, int]) -> AllToAll:
        """Return an exchange with some ranks, in which all the others take part with nothing."""
        ranks, nothing = range(len(self.nodes.of_rank)), self._bytes([])
        return AllToAll(
            tuple(send.get(rank, nothing) for rank in ranks), tuple(receive.get(rank, 0) for rank in ranks)
        )

    @staticmethod
    def _refusals(codec: SegmentCodec, chunks: Sequence[Chunk]) -> Encoded:
        return Encoded(tuple(codec.refusal(chunk) for chunk in chunks), (), None)

    def _seal(self, message: Array, blamed: set[int]) -> Array:
        return seal(message, blamed, len(self.nodes.of_rank))

    def _sealed_size(self, codec: SegmentCodec, chunk: Chunk) -> int:
        return sealed_size(codec.message_size(chunk), len(self.nodes.of_rank))

    def _unseal(
        self, codec: SegmentCodec, sealed: Sequence[Array], chunks: Sequence[Chunk], lane: int
    ) -> tuple[list[Array], set[int]]:
        """Return the messages of the ranks of a lane, and who is to blame for refusals: by default their senders."""
        messages, blamed = [], set()
        for sender, buffer, chunk in zip(self.nodes.team(lane), sealed, chunks, strict=True):
            message, accused = unseal(buffer, len(self.nodes.of_rank))
            if codec.refuses(message, chunk, sender):
                blamed |= accused or {sender}
            messages.append(message)
        return messages, blamed

    def _packed(self, messages: Sequence[Array]) -> Array:
        """Return several messages as one: their lengths, which may depend on the values, and then themselves."""
        lengths = struct.pack(f"<{len(messages)}Q", *(message.shape[0] for message in messages))
        return join([from_host_bytes(lengths, self.flat[0]), *messages])

    def _unpacked(self, packed: Array, sender: int) -> list[Array]:
        table, size = self.nodes.count * _LENGTH_BYTES, packed.shape[0]
        lengths = struct.unpack(f"<{self.nodes.count}Q", host_bytes(packed[:table])) if size >= table else ()
        if size < table or size != joined_size([table, *lengths]):
            raise PayloadError(
                f"the message from rank {sender} has {size} bytes; expected {table} with the lengths of "
                f"{self.nodes.count} messages, and these"
            )
        return split(packed[table:], lengths)

    def _relay_size(self, codec: SegmentCodec, chunks: Sequence[Chunk]) -> int:
        """Return the bytes of the messages of a lane as they are passed on, of the longest ones."""
        table = self.nodes.count * _LENGTH_BYTES
        return joined_size([table, *(self._sealed_size(codec, chunk) for chunk in chunks)])

    def _bytes(self, values: Sequence[int]) -> Array:
        return from_host_bytes(bytes(values), self.flat[0])


def _empty(like: Array) -> Array:
    return array_namespace(like).zeros((0,), dtype=like.dtype, device=device(like))
