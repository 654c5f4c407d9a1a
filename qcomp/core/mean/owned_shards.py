"""Means of sharded tensors: `ShardedMean`, whose owners send back updates, and `ExactShards`, which is exact."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, pairwise
from typing import Any, ClassVar

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.mean.chunks import Chunk, Chunks, Segment, cut
from qcomp.core.mean.codec import Codec, Compressed, refused_by
from qcomp.core.mean.compressed_mean import CompressedMean, Computation, MeanState, Terms
from qcomp.core.mean.framing import Frame, Opened
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.owned import OwnedLayout, OwnedMean, Owners, Rule, Shape
from qcomp.core.mean.sharding import Sharding
from qcomp.core.mean.stages import AllGather, AllToAll, Exchange, Stages, fuse, through
from qcomp.core.mean.topologies.base import Averaged, Call, decode_means
from qcomp.core.mean.topologies.two_phase import to_servers
from qcomp.core.numeric.arrays import (
    Array,
    all_below,
    array_namespace,
    concat,
    exact_bounds,
    flush,
    from_host_bytes,
    host_bytes,
    shaped_like,
    vectors_of,
)
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload


@dataclass(frozen=True)
class ShardedMean(OwnedMean):
    """Updates of sharded tensors, with one owner for each tensor; used like `OwnedMean`.

    A rank passes its shards, flat. It sends each shard to the owner of the tensor. The owner averages the shards that
    several replicas have sent, joins them, and makes an update from the whole mean and from a momentum that only the
    owner has. The owner cuts the update into shards, compresses them, and sends each rank its shard. Momenta and
    owners' residuals have the order of whole tensors, so they move unchanged to ranks with other shards.

    Compressors and the rule see the shapes of whole tensors, and no bucket crosses from one shard into the next.
    ``sharding`` has all parameters of an optimizer, and ``exact`` says which of these are not averaged here; an empty
    ``exact`` stands for none.

    The mean of an element is the mean over the ranks that send it. These are all ranks that hold the element, or one of
    them if their values are equal already (``Sharding.averaged``). Feedback works as in `OwnedMean`: for each element,
    the means of T steps add up to the sum of the exact means minus mean_i e_i, where i runs over the ranks that send
    the element. A rank keeps e_i for the shards that it sends. The decoded updates add up to the sum of the rule's
    updates minus e_s, which the owner keeps for the whole tensor.

    With b bytes in the payload of all tensors, c bytes in the payload of all updates, and N ranks without replicas,
    each rank sends (N - 1) / N^2 * (b + c) bytes. With R replicas of S shards, it sends about b / S + c / S bytes, or b
    / N + c / S if values are averaged already.
    """

    part_kinds: ClassVar[tuple[str, ...]] = ("momentum", "variance")

    sharding: Sharding = field(kw_only=True)
    exact: tuple[bool, ...] = field(default=(), kw_only=True)

    @cached_property
    def own(self) -> Sharding:
        """The shards of the tensors that are averaged here."""
        numbers = range(len(self.sharding.shapes))
        return self.sharding.only(
            list(compress(numbers, [not e for e in self.exact] or (True,) * len(numbers)))
        )

    @cached_property
    def resolved(self) -> "_ShardOwners":
        """The topology: two phases, with the rule between them."""
        return _ShardOwners(self.updates, self.rule, self.repaid, self.own)

    def message_sizes(self, shapes: Sequence[Shape], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the bytes of rank 0's message to each owner, and of each owner's to rank 0, for float32 tensors."""
        layout: Any = self.layout(shapes, rank=0, size=size)
        return layout.message_sizes, tuple(frame.nbytes for frame in layout.answers_arriving)

    def facts(self, tensors: Sequence[Array]) -> dict[str, Any]:
        """Return the facts on which ranks must agree, such as the shapes of whole tensors, and who holds which part."""
        return {**super().facts(tensors), "shapes": list(self.own.shapes), "sharding": str(self.sharding)}

    def starts(self, rank: int) -> tuple[str, ...]:
        """Return where a rank's part of each parameter starts, see `Sharding.key`."""
        return tuple(self.sharding.key(tensor, rank) for tensor in range(len(self.sharding.shapes)))

    def layout(
        self,
        shapes: Sequence[Shape],  # noqa: ARG002 - of shards
        *,
        rank: int,
        size: int,
        nodes: tuple[int, ...] = (),
        dtypes: tuple[str, ...] = (),
    ) -> Layout:
        """Return the layout of the mean; the shapes of shards follow from the sharding."""
        return super().layout(self.own.shapes, rank=rank, size=size, nodes=nodes, dtypes=dtypes)


@dataclass(frozen=True, eq=False)
class _ShardLayout(OwnedLayout):
    """The layout of messages with shards. Their segments count elements in the order of the shards.

    ``residuals.worker`` gives the part of each tensor that this rank sends.
    """

    sharding: Sharding

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """The frame of this rank's message to each owner, as ranges of this rank's own shards."""
        return tuple(
            self._frame(self.operands, self._sent(self.rank, owner), _as_shard) for owner in range(self.world)
        )

    @cached_property
    def arriving(self) -> tuple[Frame, ...]:
        """The frame of each rank's message to this rank, numbered by the tensors that this rank owns."""
        return tuple(
            self._frame(self.operands, self._sent(rank, self.rank), self._as_owned)
            for rank in range(self.world)
        )

    @cached_property
    def answers(self) -> tuple[Frame, ...]:
        """The frame of the updates that this rank sends for each shard, numbered by the tensors that it owns."""
        return tuple(
            self._frame(self.updates.operands, self._answered(self.rank, shard), self._as_owned)
            for shard in range(self.sharding.shards)
        )

    @cached_property
    def answers_arriving(self) -> tuple[Frame, ...]:
        """The frame of each owner's message to this rank, as ranges of this rank's own shards."""
        _, shard = self.sharding.places[self.rank]
        return tuple(
            self._frame(self.updates.operands, self._answered(owner, shard), _as_shard)
            for owner in range(self.world)
        )

    def _sent(self, rank: int, owner: int) -> Chunk:
        """Return the parts of an owner's tensors that a rank sends."""
        _, shard = self.sharding.places[rank]
        return _parts(self._cells, self.chunks[owner], shard) if self.sharding.sends(rank, owner) else ()

    def _answered(self, owner: int, shard: int) -> Chunk:
        """Return the parts of an owner's tensors that lie in a shard."""
        return _parts(self._cells_of_updates, self.chunks[owner], shard)

    @cached_property
    def _cells(self) -> dict[tuple[int, int], Segment]:
        return _cells(self.operands, self.sharding)

    @cached_property
    def _cells_of_updates(self) -> dict[tuple[int, int], Segment]:
        return _cells(self.updates.operands, self.sharding)

    @cached_property
    def _owned(self) -> dict[int, int]:
        """The place of each tensor in the list of tensors that this rank owns."""
        return {segment.tensor: place for place, segment in enumerate(self.chunks[self.rank])}

    def _as_owned(self, cell: Segment) -> Segment:
        return cell._replace(tensor=self._owned[cell.tensor])

    @staticmethod
    def _frame(operands: Operands, cells: Chunk, place: Callable[[Segment], Segment]) -> Frame:
        return replace(operands.frame(cells), chunk=tuple(map(place, cells)))


def _as_shard(cell: Segment) -> Segment:
    """Return where a part lies in the array of the rank that holds it."""
    return cell._replace(start=0, stop=cell.size)


def _cells(operands: Operands, sharding: Sharding) -> dict[tuple[int, int], Segment]:
    """Return the nonempty parts of all tensors, by tensor and shard. No two parts share the draws of a bucket."""
    bounds = [sharding.bounds(tensor) for tensor in range(len(operands.sizes))]
    sizes = [stop - start for of_tensor in bounds for start, stop in pairwise(of_tensor)]
    lengths = [size for size in operands.bucket_sizes for _ in range(sharding.shards)]
    (found,) = cut(sizes, lengths, 1)
    cells = {}
    for cell in found:
        tensor, shard = divmod(cell.tensor, sharding.shards)
        start = bounds[tensor][shard]
        cells[tensor, shard] = Segment(tensor, start, start + cell.size, cell.bucket)
    return cells


def _parts(cells: dict[tuple[int, int], Segment], owned: Chunk, shard: int) -> Chunk:
    """Return the nonempty parts of some tensors that lie in a shard."""
    return tuple(cells[s.tensor, shard] for s in owned if (s.tensor, shard) in cells)


class _ShardOwners(Owners):
    """Two phases in which ranks send and get shards; see `ShardedMean`. ``server`` is as in `Owners`."""

    def __init__(self, updates: Compressor, rule: Rule, repaid: float, sharding: Sharding) -> None:
        super().__init__(updates, rule, repaid)
        self._sharding = sharding

    def lay_out(self, operands: Operands, chunks: Chunks | None = None) -> Layout:
        """Give every tensor to an owner, and record which part of it this rank sends to the owner."""
        layout: Any = super().lay_out(operands, chunks)
        owners = {segment.tensor: owner for owner, chunk in enumerate(layout.chunks) for segment in chunk}
        parts = []
        for tensor in range(len(operands.sizes)):
            start, stop = self._sharding.part(tensor, operands.rank)
            sends = tensor in owners and self._sharding.sends(operands.rank, owners[tensor])
            parts.append(Segment(tensor, start, stop if sends else start, 0))
        residuals = Residuals(tuple(parts) if layout.residuals.worker else (), layout.residuals.server)
        return _ShardLayout(operands, layout.chunks, residuals, layout.updates, self._sharding)

    def exchange(self, call: Call) -> Stages[Averaged]:
        """Send each shard to the tensor's owner, and each shard of an update to all ranks that hold that shard."""
        layout: Any = call.layout
        codec, kept = self.codec(call.values), layout.residuals.worker
        values = (
            [x if s.size else x[:0] for x, s in zip(call.values, kept, strict=True)] if kept else call.values
        )
        worker, arrived, verdicts = yield from to_servers(
            codec, layout, values, call.worker, call.key.at(hop=0), donate=call.donate, into=call.into.worker
        )
        server = self.serve(codec, call, arrived, verdicts, worker.error)
        messages = tuple(server.messages[shard] for _, shard in self._sharding.places)
        arrived = yield AllToAll(messages, tuple(frame.nbytes for frame in layout.answers_arriving))
        opened = codec.open(arrived, layout.answers_arriving, verdicts, server.error)
        unread = verdicts.require_accepted(worker.error or server.error)
        return Averaged(decode_means(codec, opened, call), worker.residuals, server.residuals, unread)

    def means(
        self,
        codec: Codec,  # noqa: ARG002
        layout: OwnedLayout,
        opened: Sequence[Opened],
        momenta: Sequence[Array],
    ) -> Sequence[Array]:
        """Return the means, joined from their shards."""
        tensors = [segment.tensor for segment in layout.chunks[layout.rank]]
        joined = _joined(opened, [layout.operands.compressors[i] for i in tensors], momenta)
        return list(map(self._sharding.from_shards, tensors, joined))

    def answered(
        self, codec: Codec, layout: OwnedLayout, updates: Sequence[Array], owed: Sequence[Array], key: Key
    ) -> Compressed:
        """Compress each shard of the updates."""
        tensors = [segment.tensor for segment in layout.chunks[layout.rank]]
        updates, owed = (list(map(self._sharding.in_shards, tensors, each)) for each in (updates, owed))
        sent = super().answered(codec, layout, updates, owed, key)
        return sent._replace(residuals=tuple(map(self._sharding.from_shards, tensors, sent.residuals)))


def _joined(
    opened: Sequence[Opened], compressors: Sequence[Compressor], likes: Sequence[Array]
) -> list[Array]:
    """Return means, in the order of the shards, from the messages of all ranks; replicas are added in rank order."""
    sent = defaultdict[Segment, list[Payload]](list)
    for one in opened:
        for cell, payload in zip(one.frame.chunk, one.payloads, strict=True):
            sent[cell].append(payload)
    rooms = primitives.empty_likes(likes)
    parts: list[list[Array]] = [[] for _ in likes]
    for cell, payloads in sorted(sent.items(), key=lambda item: item[0]):
        part, room = slice(cell.start, cell.stop), rooms[cell.tensor]
        out = None if room is None else room[part]
        compressor, like = compressors[cell.tensor], likes[cell.tensor][part]
        parts[cell.tensor].append(primitives.average(compressor, payloads, like, out=out))
    return [concat(own) if room is None else room for room, own in zip(rooms, parts, strict=True)]


@dataclass(frozen=True)
class ExactShards(CompressedMean):
    """The exact mean of each shard over the replicas; used like `CompressedMean`.

    Without replicas, or if replicas are already averaged, shards are their own means, and a rank only tells every other
    rank, in one byte, whether its values are finite. Otherwise it also sends 2 (R - 1) / R * 32 bits per element of its
    shards, to the R - 1 other ranks that hold the same shards.
    """

    sharding: Sharding = field(kw_only=True)

    def begin(self, tensors: Sequence[Array], state: MeanState, terms: Terms) -> Computation:
        """Return a computation of a single round."""
        holders = self.sharding.holders(state.rank)
        apart = not self.sharding.averaged and len(holders) > 1

        def stages() -> Stages[Any]:
            values = vectors_of(tensors)
            accepted = _require_finite(values, state)
            if not apart:
                yield from accepted
                return [flush(x, exact=True) for x in values]
            inner = CompressedMean(self.compressors[0], feedback=False).begin(
                values,
                MeanState(holders.index(state.rank), len(holders), (), ()),
                Terms(terms.key, at_once=True),
            )
            _, result = yield from fuse([accepted, _among(inner.rounds[0], holders, state.size)])
            return inner.finish([result])[0]

        def finish(results: Sequence[Any]) -> tuple[list[Array], MeanState]:
            return shaped_like(results[0], tensors), state

        return Computation([stages()], finish)


def _require_finite(values: Sequence[Array], state: MeanState) -> Stages[Any]:
    """Raise NonFiniteError on every rank if some value of any rank is not finite, or too large to send."""
    refuses = not all(bool(all_below(x, exact_bounds(x)[1])) for x in values if x.shape[0])
    arrived = yield AllGather(from_host_bytes(bytes([refuses]), values[0]), (1,) * state.size)
    refusing = [rank for rank, flag in enumerate(arrived) if any(host_bytes(flag))]
    if refusing:
        raise refused_by(refusing)


def _among(stages: Stages[Any], ranks: Sequence[int], world: int) -> Stages[Any]:
    """Run a computation of some ranks in exchanges of all ranks, in which the other ranks run their computations."""

    def ask(request: Exchange) -> Stages[Sequence[Array]]:
        send = request.send if isinstance(request, AllToAll) else (request.send,) * len(ranks)
        nothing = array_namespace(send[0]).zeros_like(send[0][:0])
        sent, receive = [nothing] * world, [0] * world
        for rank, buffer, size in zip(ranks, send, request.receive, strict=True):
            sent[rank], receive[rank] = buffer, size
        arrived = yield AllToAll(tuple(sent), tuple(receive))
        return [arrived[rank] for rank in ranks]

    return through(stages, ask)
