"""The ways in which the ranks average: for each topology its exchanges, as pure stages."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from qcomp.core.compressor import Compressor
from qcomp.core.kernels import Blend
from qcomp.core.mean.assembly import assemble, decode_all, places_in, room_for
from qcomp.core.mean.chunks import Chunks, Cutter, Segment, cut
from qcomp.core.mean.codec import Encoded, SegmentCodec
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.stages import AllGather, AllToAll, Stages
from qcomp.core.mean.topologies.choice import Topology
from qcomp.core.mean.topologies.hierarchical import Hierarchy
from qcomp.core.mean.topologies.lanes import Lanes
from qcomp.core.mean.topologies.ring import Ring, kept
from qcomp.core.numeric.arrays import Array, flush
from qcomp.core.numeric.random import Key

__all__ = ["PLANS", "Averaged", "Into", "MeanState", "Worker", "kept_in", "nodes_of"]

_WORKER, _SERVER = 0, 1


class MeanState(NamedTuple):
    """What a rank keeps between two compressed means."""

    rank: int
    size: int
    worker: tuple[Array, ...]
    """The worker residual of each part of a tensor that `CompressedMean.parts` names, flat; empty without feedback."""
    server: tuple[Array, ...]
    """The server residual of each segment of this rank's chunk, flat; empty without feedback or server."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shape of each tensor; empty without feedback."""
    nodes: tuple[int, ...] = ()
    """The node of each rank, where the topology asks for it; empty if each rank is a node of its own."""
    topology: Topology = "auto"
    """In which these residuals are kept, never "auto" after `CompressedMean.init`."""

    def rescaled(self, factor: float) -> "MeanState":
        """Return the state with residuals in other units, multiplied by a factor."""
        worker, server = (tuple(flush(factor * e) for e in owed) for owed in (self.worker, self.server))
        return self._replace(worker=worker, server=server)


class Into(NamedTuple):
    """Buffers for what a mean makes anew, each empty if it finds its own; None where arrays are immutable."""

    worker: Sequence[Array | None] = ()
    """For the worker residual of each tensor."""
    server: Sequence[Array | None] = ()
    """For the server residual of each segment of this rank's chunk."""
    means: Sequence[Array | None] = ()
    """For the mean of each tensor."""


class Worker(NamedTuple):
    """How a worker compresses what it has."""

    compressors: Sequence[Compressor]
    """Of each tensor."""
    key: Key
    donate: bool
    blends: Sequence[Blend]
    chunks: Chunks = ()
    """Of each rank, of a mean that is a part of another."""
    overwrite: bool = False
    """Whether the means may take the buffers of the tensors."""
    into: Into = Into()
    cut: Cutter = cut
    """Cuts the tensors, where there are no chunks yet."""

    def cut_up(self, flat: Sequence[Array], count: int) -> Chunks:
        """Return so many chunks of whole buckets of these tensors."""
        lengths = [c.traits.bucket_size for c in self.compressors]
        return self.chunks or self.cut([x.shape[0] for x in flat], lengths, count)


Averaged = Stages[tuple[list[Array], MeanState]]
"""The means of the tensors, and the state after that."""


def two_phase(flat: list[Array], state: MeanState, how: Worker) -> Averaged:
    """Send each chunk to its server, and its average to all."""
    codec = SegmentCodec(how.compressors, flat)
    chunks = how.cut_up(flat, state.size)
    own = chunks[state.rank]
    worker = _encode(codec, chunks, flat, state, how)
    arrived = yield AllToAll(worker.messages, (codec.message_size(own),) * state.size)
    opened = codec.open(arrived, [own] * state.size, worker.error)
    server = codec.encode_average(opened, own, state.server, how.key.at(hop=_SERVER), into=how.into.server)
    arrived = yield AllGather(server.messages[0], tuple(map(codec.message_size, chunks)))
    opened = codec.open(arrived, chunks, server.error)
    new_state = state._replace(worker=worker.residuals, server=server.residuals)
    means = how.into.means or room_for(flat, overwrite=how.overwrite)
    return decode_all(codec, opened, chunks, flat, means), new_state


def all_gather(flat: list[Array], state: MeanState, how: Worker) -> Averaged:
    """Send everything to all."""
    codec = SegmentCodec(how.compressors, flat)
    (whole,) = how.cut_up(flat, 1)
    worker = _encode(codec, [whole], flat, state, how)
    arrived = yield AllGather(worker.messages[0], (codec.message_size(whole),) * state.size)
    opened = codec.open(arrived, [whole] * state.size, worker.error)
    means = how.into.means or room_for(flat, overwrite=how.overwrite)
    values = codec.average(opened, whole, into=places_in(means, whole))
    return assemble([whole], [values], flat, means), state._replace(worker=worker.residuals)


def _encode(
    codec: SegmentCodec, chunks: Sequence[Sequence[Segment]], flat: list[Array], state: MeanState, how: Worker
) -> Encoded:
    key = how.key.at(hop=_WORKER)
    return codec.encode(
        [tuple(chunk) for chunk in chunks],
        flat,
        state.worker,
        key,
        donate=how.donate,
        blends=how.blends,
        into=how.into.worker,
    )


def hierarchical(flat: list[Array], state: MeanState, how: Worker) -> Averaged:
    """Add up exactly inside each node, and average in two phases between nodes."""
    hierarchy = Hierarchy(how.compressors, flat, nodes_of(state.size, state.nodes), how.key, how.cut)
    received = yield from hierarchy.stages(state.worker, state.server)
    codec = SegmentCodec(how.compressors, flat)
    room = room_for(flat, overwrite=how.overwrite)
    means = decode_all(codec, received.payloads, received.chunks, flat, room)
    return means, state._replace(worker=received.worker, server=received.server)


def around(flat: list[Array], state: MeanState, how: Worker) -> Averaged:
    """Add up around a ring, and send the means around it."""
    ring = Ring(how.compressors, flat, how.cut_up(flat, state.size), how.key)
    received = yield from ring.stages(state.worker, state.server)
    room = room_for(flat, overwrite=how.overwrite)
    means = decode_all(ring.codec, received.payloads, received.chunks, flat, room)
    return means, state._replace(worker=received.worker, server=received.server)


PLANS: Mapping[str, Callable[[list[Array], MeanState, Worker], Averaged]] = {
    "two_phase": two_phase,
    "all_gather": all_gather,
    "hierarchical": hierarchical,
    "ring": around,
}
"""By topology: from flat tensors, which may be used up if they were donated."""


def kept_in(
    topology: str,
    compressors: Sequence[Compressor],
    sizes: Sequence[int],
    *,
    rank: int,
    nodes: Nodes,
    cut: Cutter,
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """Return what a rank's residuals are of in a topology: parts of each tensor as worker, segments as server."""
    lengths = tuple(c.traits.bucket_size for c in compressors)
    if topology == "hierarchical":
        return Lanes(nodes, tuple(sizes), lengths, cut).kept(rank)
    chunks = cut(sizes, lengths, len(nodes.of_rank))
    if topology == "ring":
        return kept(chunks, rank, len(sizes))
    whole = tuple(Segment(i, 0, size, 0) for i, size in enumerate(sizes))
    return whole, chunks[rank] if topology == "two_phase" else ()


def nodes_of(size: int, nodes: tuple[int, ...]) -> Nodes:
    """Return the nodes of a world; by default each rank is one."""
    if nodes and len(nodes) != size:
        raise ValueError(f"nodes is {nodes}; expected the node of each of {size} ranks")
    return Nodes(nodes or tuple(range(size)))
