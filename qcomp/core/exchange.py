"""The compressed mean over ranks as pure stages: two-phase with a residual on both sides, all-gather, hierarchical."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from qcomp.core import feedback, primitives
from qcomp.core.arrays import (
    Array,
    array_namespace,
    compute_dtype_name,
    concat,
    detached,
    device,
    dtype_name,
    to_compute_dtype,
)
from qcomp.core.assembly import assemble, cut_like, decode_all
from qcomp.core.chunks import Segment, cut
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.identity import Identity
from qcomp.core.handshake import handshake
from qcomp.core.hierarchy import Hierarchy
from qcomp.core.kernels import Blend
from qcomp.core.lanes import Lanes
from qcomp.core.lengths import announce_lengths
from qcomp.core.messages import SegmentCodec
from qcomp.core.nodes import Nodes, learn_nodes
from qcomp.core.random import Key
from qcomp.core.transport import AllGather, AllToAll, Stages, Transport, drive

__all__ = ["CompressedMean", "MeanState", "Worker"]

_WORKER, _SERVER = 0, 1


class MeanState(NamedTuple):
    """What a rank keeps between two compressed means."""

    rank: int
    size: int
    worker: tuple[Array, ...]
    """The worker residual of each tensor, flat; empty without feedback."""
    server: tuple[Array, ...]
    """The server residual of each segment of this rank's chunk, flat; empty without feedback or server."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shape of each tensor; empty without feedback."""
    nodes: tuple[int, ...] = ()
    """The node of each rank, for a hierarchical mean; empty if each rank is a node of its own."""


class Worker(NamedTuple):
    """How a worker compresses what it has."""

    compressors: Sequence[Compressor]
    """Of each tensor."""
    key: Key
    donate: bool
    blends: Sequence[Blend]
    chunks: Sequence[tuple[Segment, ...]] = ()
    """The segments of each rank's chunk, of a mean that is a part of another."""


@dataclass(frozen=True)
class CompressedMean:
    """The mean over all ranks, with compressed messages.

    Parameters
    ----------
    compressor : Compressor or sequence of Compressor
        Of the workers and of the servers: of all tensors, or one for each; a tensor has what this is `for_shape` of it.
    topology : {"two_phase", "all_gather", "hierarchical"}
        ``"two_phase"``: the vector is cut into a chunk for every rank; each rank is the server of its chunk,
        receives that part of every rank's payload, averages, compresses the average again and sends it to all.
        ``"all_gather"``: every rank sends its payload to every other; one compression, N times the bytes.
        ``"hierarchical"``: exact sums inside each node, two phases between nodes, and what arrives is passed on inside
        the node. On one node nothing is compressed: it is the exact mean.
    feedback : bool
        Whether what compression loses is kept and added to the next vector, on workers and servers.

    Notes
    -----
    With b bytes in the payload of the whole vector, a rank of N sends 2 (N - 1) / N * b bytes in two phases and
    (N - 1) * b by all-gather, and a few bytes of status and padding. If the length of payloads varies, an
    exchange of 16 N bytes to every rank, which tells the lengths, comes before each. All ranks decode the same bytes
    and add in rank order, so they hold the same mean bit for bit. Sum identity: the means of T steps add up to the sum
    of the exact means, minus mean_i e_i + e_s after the last. Source: Tang et al. (DoubleSqueeze), ICML 2019.

    In a hierarchical mean the ranks of a node share its work. The vector is cut into L lanes of whole buckets, L being
    the ranks of the smallest node. Rank number l of every node sums lane l over its node, times K nodes, divided by N
    ranks: so nodes of unequal sizes give the mean over ranks too. It compresses that, and it alone has residuals of
    it: in the sum identity mean_i e_i is over nodes. With E bytes in the exact vector it sends (L - 1) / L * E +
    (n - 1) / L * b bytes to the n ranks of its node, and 2 (K - 1) / K * b / L to other nodes; a rank beyond the L-th
    of its node sends E inside it. Every message of a lane has 8 more bytes, every chunk of a lane up to 16 and one for
    each rank, all padded to multiples of 8. With several nodes of one rank it is two phases, bit for bit. Source:
    Bagua's hierarchical communication, where one leader does the work of a node.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> allreduce = qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=8))
    >>> def rank_main(comm):
    ...     x = np.full(16, float(comm.rank), dtype=np.float32)
    ...     state = allreduce.init(x, comm)
    ...     mean, state = allreduce(x, state, comm)
    ...     return float(mean[0])
    >>> qcomp.comm.run_local(2, rank_main)
    [0.5, 0.5]
    """

    kinds: ClassVar[tuple[str, str]] = ("worker_residual", "server_residual")
    """How checkpoints call what a state holds as ``worker`` and as ``server``."""

    compressor: Compressor | Sequence[Compressor]
    topology: Literal["two_phase", "all_gather", "hierarchical"] = "two_phase"
    feedback: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.compressor, list):
            object.__setattr__(self, "compressor", tuple(self.compressor))
        if not self.compressors or not all(isinstance(c, Compressor) for c in self.compressors):
            raise TypeError(
                f"compressor is {self.compressor!r}; expected a qcomp.Compressor, or a sequence of them"
            )
        if self.topology not in ("two_phase", "all_gather", "hierarchical"):
            raise ValueError(
                f"topology is {self.topology!r}; expected 'two_phase', 'all_gather' or 'hierarchical'"
            )
        if self.feedback:
            for compressor in self.compressors:
                feedback.require_contraction(compressor)

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """The one compressor of all tensors, or the compressor of each."""
        return self.compressor if isinstance(self.compressor, tuple) else (self.compressor,)

    @property
    def lossless(self) -> bool:
        """Whether the mean is exact."""
        return all(c.traits.lossless for c in self.compressors)

    def compressors_of(self, shapes: Sequence[tuple[int, ...]]) -> list[Compressor]:
        """Return the compressor of each of the tensors of these shapes."""
        chosen = self.compressors
        if not isinstance(self.compressor, tuple):
            chosen *= len(shapes)
        if len(chosen) != len(shapes):
            raise ValueError(f"x has {len(shapes)} arrays; compressor has {len(chosen)} entries")
        return [c.for_shape(shape) for c, shape in zip(chosen, shapes, strict=True)]

    def init(self, x: Array | Sequence[Array], comm: Transport) -> MeanState:
        """Return the first state, with residuals of zero, after all ranks agreed that they were started alike.

        Parameters
        ----------
        x : array or sequence of arrays
            Anything of the shapes and dtypes that will be averaged.
        comm : Communicator
            Only its rank and size are kept, and for a hierarchical mean which ranks have the same ``host``.

        Raises
        ------
        MismatchError
            On every rank, if the ranks differ in version, compressor, topology or shapes.
        TypeError
            On every rank, if the mean is hierarchical and the communicator of any rank has no ``host``.
        """
        tensors = _as_list(x)
        handshake(
            comm,
            {
                "compressor": [c.spec for c in self.compressors],
                "topology": self.topology,
                "feedback": self.feedback,
                "shapes": [list(t.shape) for t in tensors],
                "dtypes": [compute_dtype_name(dtype_name(t.dtype)) for t in tensors],
            },
            like=tensors[0],
        )
        nodes = self.learn_nodes(comm, like=tensors[0])
        return self.zeros(tensors, rank=comm.rank, size=comm.size, nodes=nodes)

    def learn_nodes(self, comm: Transport, *, like: Array) -> tuple[int, ...]:
        """Return the node of each rank, the same on all ranks; empty, without an exchange, unless hierarchical."""
        return learn_nodes(comm, like=like) if self.topology == "hierarchical" else ()

    def zeros(
        self, tensors: Sequence[Array], *, rank: int, size: int, nodes: tuple[int, ...] = ()
    ) -> MeanState:
        """Return the first state of a rank, without an exchange.

        ``nodes`` has the node of each rank, for a hierarchical mean; by default each rank is a node of its own.
        """
        if not self._keeps_residuals or self._is_one_node(size, nodes):
            return MeanState(rank, size, (), (), nodes=nodes)
        shapes = tuple(tuple(t.shape) for t in tensors)
        worker, server = (
            tuple(_zeros(tensors[s.tensor], s.size) for s in parts)
            for parts in self.parts(shapes, rank=rank, size=size, nodes=nodes)
        )
        return MeanState(rank, size, worker, server, shapes, nodes)

    def parts(
        self, shapes: Sequence[tuple[int, ...]], *, rank: int, size: int, nodes: tuple[int, ...] = ()
    ) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
        """Return what a rank's residuals are of: a part of each tensor as worker, and what it is the server of."""
        if self.topology == "hierarchical":
            compressors = self.compressors_of(shapes)
            buckets = tuple(c.traits.bucket_size for c in compressors)
            return Lanes(_nodes(size, nodes), tuple(map(math.prod, shapes)), buckets).kept(rank)
        whole = tuple(Segment(i, 0, math.prod(shape), 0) for i, shape in enumerate(shapes))
        return whole, self.segments_of_shapes(shapes, size)[rank] if self.topology == "two_phase" else ()

    def _is_one_node(self, size: int, nodes: tuple[int, ...]) -> bool:
        return self.topology == "hierarchical" and _nodes(size, nodes).count == 1

    def segments(self, tensors: Sequence[Array], size: int) -> tuple[tuple[Segment, ...], ...]:
        """Return the segments of each rank's chunk."""
        return self.segments_of_shapes([tuple(t.shape) for t in tensors], size)

    def segments_of_shapes(
        self, shapes: Sequence[tuple[int, ...]], size: int
    ) -> tuple[tuple[Segment, ...], ...]:
        """Return the segments of each rank's chunk of tensors of these shapes."""
        compressors = self.compressors_of(shapes)
        return _segments(compressors, list(map(math.prod, shapes)), size)

    def __call__(
        self, x: Any, state: MeanState, comm: Transport, *, key: Key | None = None, donate: bool = False
    ) -> tuple[Any, MeanState]:
        """Average x over the ranks of a communicator; see `stages`."""
        if (comm.rank, comm.size) != (state.rank, state.size):
            raise ValueError(
                f"comm is rank {comm.rank} of {comm.size}; state is of rank {state.rank} of {state.size}"
            )
        return drive(self.stages(x, state, key=key, donate=donate), comm)

    def stages(
        self,
        x: Any,
        state: MeanState,
        *,
        key: Key | None = None,
        donate: bool = False,
        blends: Sequence[Blend] = (),
        chunks: Sequence[tuple[Segment, ...]] = (),
    ) -> Stages[tuple[Any, MeanState]]:
        """Average x over the ranks, as a generator of pure stages.

        Parameters
        ----------
        x : array or sequence of arrays
            This rank's values. A bucket never crosses from one array to the next.
        state : MeanState
            From `init` or from the last call.
        key : Key, optional
            For compressors that draw: seed, step and tensor; rank and hop are put in here.
        donate : bool
            Whether x is yours to give away: new residuals then take its buffers, and its values are lost, also if this
            raises. Besides the mean and the new residuals, a mean needs memory for the payloads and for the float32
            values of one chunk; a hierarchical one, which leaves x as it is, for a copy of x, what its node sends, and
            the sum.
        blends : sequence of Blend
            One for each array of x, to average the momenta that the arrays are blended into, on the way.
        chunks : sequence of sequences of Segment
            What each rank serves, for a part of the arrays of a larger mean; by default x is cut evenly.

        Yields
        ------
        AllToAll or AllGather
            What to exchange; send back the list of the buffers that arrived.

        Returns
        -------
        mean : array or list of arrays
            Of the shapes and dtypes of x, or of the momenta; the same on all ranks.
        state : MeanState

        Raises
        ------
        NonFiniteError
            On every rank, if a value on any rank is not finite; the state passed in is still the valid one.
        """
        tensors = [detached(t) for t in _as_list(x)]
        drawing = [c.spec for c in self.compressors if c.traits.random]
        if drawing and key is None:
            raise ValueError(f"key is None; {drawing[0]} draws random numbers and needs a qcomp.Key")
        if self._is_one_node(state.size, state.nodes):
            exact = replace(self, compressor=Identity(), topology="two_phase", feedback=False)
            return (yield from exact.stages(x, state, donate=donate, blends=blends))
        if self._keeps_residuals and [math.prod(s) for s in state.shapes] != [_size(t) for t in tensors]:
            raise ValueError(
                f"x has arrays of {[_size(t) for t in tensors]} elements; state is for "
                f"{[math.prod(s) for s in state.shapes]}"
            )
        flat = [array_namespace(t).reshape(to_compute_dtype(t), (-1,)) for t in tensors]
        # What was converted is a copy, and nobody else's.
        donate = donate or all(t.dtype != f.dtype for t, f in zip(tensors, flat, strict=True))
        if blends and len(blends) != len(tensors):
            raise ValueError(f"blends has {len(blends)} entries; x has {len(tensors)} arrays")
        targets = [b.m for b in blends] or tensors  # of half-precision gradients, the momenta are float32
        blends = [b._replace(m=array_namespace(b.m).reshape(b.m, (-1,))) for b in blends]
        if blends and (self.lossless or self.topology == "hierarchical"):
            flat = [primitives.momentum(b.m, g, b.beta1, b.scale) for g, b in zip(flat, blends, strict=True)]
            blends = ()
        compressors = self.compressors_of([tuple(t.shape) for t in tensors])
        if self.lossless:
            flat = [concat(flat)]  # nothing depends on the boundaries, and one vector is faster than many
            compressors = compressors[:1]
        own_key = (key or Key())._replace(rank=state.rank)
        rounds = {
            "two_phase": self._two_phase,
            "all_gather": self._all_gather,
            "hierarchical": self._hierarchical,
        }[self.topology]
        running = rounds(flat, state, Worker(compressors, own_key, donate and not blends, blends, chunks))
        if any(c.variable_length for c in compressors):
            running = announce_lengths(running, state.rank)
        means, new_state = yield from running
        if self.lossless:
            means = cut_like(means[0], tensors)
        shaped = [
            array_namespace(t).astype(array_namespace(t).reshape(m, t.shape), t.dtype, copy=False)
            for t, m in zip(targets, means, strict=True)
        ]
        return (shaped if isinstance(x, list | tuple) else shaped[0]), new_state

    @property
    def _keeps_residuals(self) -> bool:
        return self.feedback and not self.lossless

    def _two_phase(
        self, flat: list[Array], state: MeanState, how: Worker
    ) -> Stages[tuple[list[Array], MeanState]]:
        codec = SegmentCodec(how.compressors, flat)
        chunks = how.chunks or _segments(how.compressors, list(map(_size, flat)), state.size)
        own = chunks[state.rank]
        worker = codec.encode(
            chunks, flat, state.worker, how.key.at(hop=_WORKER), donate=how.donate, blends=how.blends
        )
        arrived = yield AllToAll(worker.messages, (codec.message_size(own),) * state.size)
        averages = codec.average(codec.open(arrived, [own] * state.size, worker.error), own)
        # The averages are tensors of their own now, whole but numbered by the buckets of the segments.
        served = tuple(Segment(index, 0, segment.size, segment.bucket) for index, segment in enumerate(own))
        server = codec.of_averages(averages, own).encode(
            [served], averages, state.server, how.key.at(hop=_SERVER), donate=True
        )
        arrived = yield AllGather(server.messages[0], tuple(map(codec.message_size, chunks)))
        opened = codec.open(arrived, chunks, server.error)
        new_state = state._replace(worker=worker.residuals, server=server.residuals)
        return decode_all(codec, opened, chunks, flat), new_state

    def _all_gather(
        self, flat: list[Array], state: MeanState, how: Worker
    ) -> Stages[tuple[list[Array], MeanState]]:
        codec = SegmentCodec(how.compressors, flat)
        (whole,) = how.chunks or _segments(how.compressors, list(map(_size, flat)), 1)
        worker = codec.encode(
            [whole], flat, state.worker, how.key.at(hop=_WORKER), donate=how.donate, blends=how.blends
        )
        arrived = yield AllGather(worker.messages[0], (codec.message_size(whole),) * state.size)
        means = codec.average(codec.open(arrived, [whole] * state.size, worker.error), whole)
        return assemble([whole], [means], flat), state._replace(worker=worker.residuals)

    def _hierarchical(
        self, flat: list[Array], state: MeanState, how: Worker
    ) -> Stages[tuple[list[Array], MeanState]]:
        hierarchy = Hierarchy(how.compressors, flat, _nodes(state.size, state.nodes), how.key)
        received = yield from hierarchy.stages(state.worker, state.server)
        codec = SegmentCodec(how.compressors, flat)
        means = decode_all(codec, received.payloads, received.chunks, flat)
        return means, state._replace(worker=received.worker, server=received.server)


def _as_list(x: Array | Sequence[Array]) -> list[Array]:
    tensors = list(x) if isinstance(x, list | tuple) else [x]
    if not tensors:
        raise ValueError("x is empty; expected an array or a sequence of at least one")
    return tensors


def _nodes(size: int, nodes: tuple[int, ...]) -> Nodes:
    if nodes and len(nodes) != size:
        raise ValueError(f"nodes is {nodes}; expected the node of each of {size} ranks")
    return Nodes(nodes or tuple(range(size)))


def _size(x: Array) -> int:
    return math.prod(x.shape)


def _segments(
    compressors: Sequence[Compressor], sizes: Sequence[int], size: int
) -> tuple[tuple[Segment, ...], ...]:
    return cut(sizes, [c.traits.bucket_size for c in compressors], size)


def _zeros(like: Array, size: int) -> Array:
    xp = array_namespace(like)
    dtype = getattr(xp, compute_dtype_name(dtype_name(like.dtype)))
    return xp.zeros((size,), dtype=dtype, device=device(like))
