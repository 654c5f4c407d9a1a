"""Runs the stages of the core over an axis of a mesh, inside `jax.shard_map`, as one program for all ranks.

In the core, layouts depend on the rank, so each rank runs its own program. Here the rank is the index of a device,
which is known only when the program runs. The rank matters in two places. Random draws depend on it, so their keys take
the traced index. In two phases each rank serves a chunk of its own, and the messages of each chunk have their own
layout; so in `PackedCodec.serve` each device reads its own tables. The collectives of XLA need messages of equal
length, so all messages of an exchange are padded with zeros to the length of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.chunks import Chunks, Segment
from qcomp.core.mean.codec import Codec, Compressed, Verdicts
from qcomp.core.mean.compressed_mean import CompressedMean, Computation, MeanState, Terms
from qcomp.core.mean.factors import FactorPlan, Factors, Finish, serve
from qcomp.core.mean.framing import Frame, Opened
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.owned import OwnedLayout, OwnedMean, Owners, Rule
from qcomp.core.mean.powersgd import PowerSGDMean
from qcomp.core.mean.stages import AllToAll, Exchange, Stages
from qcomp.core.mean.topologies.all_gather import GatherAll
from qcomp.core.mean.topologies.base import Averaged, Call, Topology
from qcomp.core.mean.topologies.two_phase import SERVER, TwoPhase
from qcomp.core.numeric.arrays import Array, concat
from qcomp.core.numeric.low_rank import first_factor
from qcomp.core.numeric.random import Key
from qcomp.jax.moves import cut
from qcomp.jax.packing import PackedCodec

__all__ = ["TOPOLOGIES", "SpmdMean", "SpmdOwnedMean", "SpmdPowerSGDMean", "drive"]

Result = TypeVar("Result")


def drive(stages: Stages[Result], axis_name: str) -> Result:
    """Run a computation in stages to its end, with collectives over an axis, and return its result.

    Parameters
    ----------
    stages : generator
        All messages of one exchange must have the same length, as in an `SpmdMean`.
    axis_name : str
        An axis of the mesh, inside `jax.shard_map`.
    """
    arrived: list[Array] | None = None
    while True:
        try:
            request = next(stages) if arrived is None else stages.send(arrived)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        arrived = _answer(request, axis_name)


def _answer(request: Exchange, axis_name: str) -> list[Array]:
    send: Any = request.send
    if isinstance(request, AllToAll):
        rows = jax.lax.all_to_all(jnp.stack(send), axis_name, split_axis=0, concat_axis=0)
    else:  # "invarying" values, equal on all devices, may leave a shard_map as one; jax.vmap has no such types
        in_shard_map = axis_name in jax.sharding.get_abstract_mesh().manual_axes
        rows = jax.lax.all_gather(request.send, axis_name, to="invarying" if in_shard_map else "varying")
    return [rows[rank] for rank in range(len(request.receive))]


@dataclass(frozen=True, eq=False)
class _PaddedFrame(Frame):
    """A frame whose messages have zeros after the verdict."""

    length: int

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.length

    def join(self, payloads: Sequence[Array], verdict: Array) -> Array:
        """Return the message of these payloads."""
        message: Any = super().join(payloads, verdict)
        return jnp.pad(message, (0, self.length - message.shape[0]))


@dataclass(frozen=True, eq=False)
class _SpmdLayout(Layout):
    """A layout that any rank can run, with messages of one length."""

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """The frame of each chunk's messages."""
        frames = tuple(map(self.operands.frame, self.chunks))
        longest = max(frame.nbytes for frame in frames)
        return tuple(_PaddedFrame(f.chunk, f.compressors, f.dtypes, False, longest) for f in frames)

    def at(self, rank: int) -> _SpmdLayout:
        """Return the layout of one rank."""
        return replace(self, operands=replace(self.operands, rank=rank))


class _OnAxis:
    """A topology whose rank is the index of the device on an axis, and whose programs are small."""

    axis_name: str

    def __init__(self, axis_name: str) -> None:
        self.axis_name = axis_name

    def on_axis(self, stages: Callable[[Call], Stages[Averaged]], call: Call) -> Stages[Averaged]:
        """Run stages with this device's draws, without verdicts: means are NaN if any device refuses its values."""
        averaged = yield from stages(
            call._replace(key=call.key._replace(rank=jax.lax.axis_index(self.axis_name)))
        )
        return averaged._replace(verdicts=())

    def codec(self, tensors: Sequence[Array]) -> PackedCodec:
        """Return the codec that compresses and decompresses chunks of tensors like these."""
        return PackedCodec(tensors)


class _AllGatherOnAxis(_OnAxis, GatherAll):
    allows_rounds: ClassVar[bool] = False

    def stages(self, call: Call) -> Stages[Averaged]:
        """Send everything to all."""
        return (yield from self.on_axis(super().stages, call))


class _TwoPhaseOnAxis(_OnAxis, TwoPhase):
    """Two phases on an axis; each rank's server residuals are one vector, as large as the largest chunk."""

    allows_rounds: ClassVar[bool] = False

    def lay_out(self, operands: Operands, chunks: Chunks | None = None) -> Layout:
        """Cut the tensors into a chunk for every rank."""
        found = operands.chunks(operands.world) if chunks is None else chunks
        most = max(sum(segment.size for segment in chunk) for chunk in found)
        room = (Segment(0, 0, most, 0),) if most else ()
        return _SpmdLayout(operands, found, Residuals(operands.whole, room))

    def stages(self, call: Call) -> Stages[Averaged]:
        """Send each chunk to its server, and its average to all."""
        return (yield from self.on_axis(super().stages, call))

    def serve(
        self,
        codec: Codec,
        call: Call,
        arrived: Sequence[Array],
        verdicts: Verdicts,  # noqa: ARG002 - the server tells all ranks what it was told
        error: NonFiniteError | None,  # noqa: ARG002 - nothing is raised in a program
    ) -> Compressed:
        """Average what has arrived for this device's chunk, and compress the average for all."""
        assert isinstance(codec, PackedCodec)
        _require_no_axis_of_the_compiler(self.axis_name)
        rank = jax.lax.axis_index(self.axis_name)
        return codec.serve(rank, call.layout.frames, arrived, call.server, call.key.at(hop=SERVER))


def _with_verdicts(compressed: Compressed, own: Frame, verdicts: Verdicts) -> Array:
    """Return a server's message; its verdict refuses if any message that the server received refuses."""
    told: Any = concat(list(verdicts.require_accepted(compressed.error)))
    message: Any = compressed.messages[0]
    joined: Array = message.at[own.offsets[-1]].max(jnp.max(told))
    return joined


def _require_no_axis_of_the_compiler(axis_name: str) -> None:
    """Raise ValueError if the compiler may cut tensors along an axis.

    The compiler would exchange parts of tensors inside a switch in which each device runs a branch of its own, and all
    devices would wait forever.
    """
    mesh = jax.sharding.get_abstract_mesh()
    left = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in mesh.manual_axes]
    if mesh.manual_axes and left:
        raise ValueError(
            f"axis_name is {axis_name!r}, but jax.shard_map leaves axes of this mesh to the compiler: "
            f"{', '.join(map(repr, left))}; expected all axes of the mesh in the axis_names of jax.shard_map. Without "
            'that, a mean with topology="all_gather" works, but onebit_adam does not, since its warm-up has two phases'
        )


TOPOLOGIES: dict[str, Callable[[str], Topology]] = {
    TwoPhase.name: _TwoPhaseOnAxis,
    GatherAll.name: _AllGatherOnAxis,
}
"""The topologies that run on an axis of a mesh, made from its name."""


@dataclass(frozen=True)
class SpmdMean(CompressedMean):
    """A `CompressedMean` over an axis of a mesh, for `drive`; the rank in its states is 0 on all devices.

    Parameters
    ----------
    compressor, topology, feedback, link
        See `CompressedMean`. Payloads must have a fixed length.
    axis_name : str
        The axis.
    """

    axis_name: str = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topology not in TOPOLOGIES:
            expected = " or ".join(map(repr, TOPOLOGIES))
            raise ValueError(f"topology is {self.topology!r}; expected {expected} on an axis of a mesh")
        _require_fixed_lengths(self.compressors)

    @cached_property
    def resolved(self) -> Topology:
        """The topology of this mean's name, on its axis."""
        return TOPOLOGIES[self.topology](self.axis_name)

    def cut(self, joined: Array, sizes: Sequence[int]) -> list[Array]:
        """Return the parts of a flat vector that consists of tensors of these sizes."""
        return cut(joined, sizes)

    @cached_property
    def _of_one_vector(self) -> CompressedMean:
        return replace(self, compressor=self.compressors[0])


@dataclass(frozen=True)
class SpmdPowerSGDMean(PowerSGDMean):
    """A `PowerSGDMean` over an axis of a mesh, for `drive`; the rank in its states is 0 on all devices.

    A row of zeros in a right factor stands for the same row of the initial factor, so that states may begin with zeros.

    Parameters
    ----------
    compressor, rank, min_compression, numbers
        See `PowerSGDMean`. Payloads must have a fixed length.
    axis_name : str
        The axis.
    """

    axis_name: str = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_fixed_lengths(self.compressors)

    def begin(self, tensors: Sequence[Array], state: MeanState, terms: Terms) -> Computation:
        """Return the one round of a call."""
        begun = []
        kept: Any
        for matrix, kept in zip(self._matrices(state.shapes), state.server, strict=True):
            rows = jnp.reshape(kept, (matrix.rank, matrix.columns))
            first: Any = first_factor(matrix.rank, matrix.columns, kept)
            begun.append(jnp.ravel(jnp.where(jnp.any(rows != 0, axis=-1, keepdims=True), rows, first)))
        return super().begin(tensors, state._replace(server=tuple(begun)), terms)

    def _has_owners(self, size: int) -> bool:
        """Return whether factors have owners: for JAX, all devices hold equal values only if one sent them."""
        return size > 1

    def _number(self, state: MeanState) -> Any:  # noqa: ARG002 - known when the program runs
        return jax.lax.axis_index(self.axis_name)

    def _plan(
        self, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], state: MeanState
    ) -> FactorPlan:
        """Return a plan that any rank can run."""
        plan = super()._plan(shapes, dtypes, state)
        return plan._replace(left=_on_axis(plan.left), right=_on_axis(plan.right))

    def _server(self, finish: Finish | None) -> Callable[..., Compressed]:
        """Return the function that serves the factors that arrive, with a branch for each device."""
        _require_no_axis_of_the_compiler(self.axis_name)

        def served(
            factors: Factors,
            packs: Sequence[Array],
            arrived: Sequence[Array],
            verdicts: Verdicts,  # noqa: ARG001 - the owner tells all ranks what it was told
            *,
            error: NonFiniteError | None,
            key: Key,
        ) -> Compressed:
            def branch(rank: int) -> Callable[[list[Array]], Array]:
                layout = factors.layout
                assert isinstance(layout, _SpmdLayout)
                own = factors._replace(layout=layout.at(rank))

                def message(arrived: list[Array]) -> Array:
                    told = Verdicts(at_once=False)
                    compressed = serve(own, packs, arrived, told, error=error, key=key, finish=finish)
                    return _with_verdicts(compressed, own.layout.own, told)

                return message

            rank = jax.lax.axis_index(self.axis_name)
            branches = [branch(r) for r in range(factors.layout.world)]
            return Compressed((jax.lax.switch(rank, branches, list(arrived)),), (), None)

        return served


@dataclass(frozen=True, eq=False)
class _SpmdOwnedLayout(_SpmdLayout, OwnedLayout):
    """An `OwnedLayout` that any rank can run, with messages of one length."""

    def at(self, rank: int) -> _SpmdOwnedLayout:
        """Return the layout of one rank."""
        assert isinstance(self.updates, _SpmdLayout)
        operands = replace(self.operands, rank=rank)
        return replace(self, operands=operands, updates=self.updates.at(rank))


class _CodecOfOwner(PackedCodec):
    """A codec that averages the whole tensors of a chunk, and returns only these."""

    def average(
        self, opened: Sequence[Opened], places: Sequence[Array] | None = None, *, divisor: str = "ranks"
    ) -> list[Array]:
        """Return the mean over ranks of each tensor of a chunk."""
        means = super().average(opened, places, divisor=divisor)
        return [means[segment.tensor] for segment in opened[0].frame.chunk]


class _OwnersOnAxis(_OnAxis, Owners):
    """Owners on an axis; a rank's momenta are one vector, as large as the largest chunk, and so are its residuals."""

    shortens = False

    def __init__(self, updates: Compressor, rule: Rule, repaid: float, axis_name: str) -> None:
        Owners.__init__(self, updates, rule, repaid)
        self.axis_name = axis_name

    def lay_out(self, operands: Operands, chunks: Chunks | None = None) -> Layout:
        """Give every tensor to an owner."""
        found = super().lay_out(operands, chunks)
        assert isinstance(found, OwnedLayout)
        most = max(sum(segment.size for segment in chunk) for chunk in found.chunks)
        room = (Segment(0, 0, most, 0),) if most else ()
        updates = _SpmdLayout(found.updates.operands, found.updates.chunks, found.updates.residuals)
        residuals = Residuals(found.residuals.worker, room)
        return _SpmdOwnedLayout(operands, found.chunks, residuals, updates)

    def stages(self, call: Call) -> Stages[Averaged]:
        """Send each tensor to its owner, and its update to all."""
        return (yield from self.on_axis(super().stages, call))

    def serve(
        self,
        codec: Codec,
        call: Call,
        arrived: Sequence[Array],
        verdicts: Verdicts,  # noqa: ARG002 - the owner tells all ranks what it was told
        error: NonFiniteError | None,
    ) -> Compressed:
        """Make the updates of this device's tensors, in a branch for each device."""
        _require_no_axis_of_the_compiler(self.axis_name)
        layout = call.layout
        assert isinstance(layout, _SpmdOwnedLayout)
        frames, server = layout.updates.frames, list[Any](call.server)

        def branch(rank: int) -> Callable[[list[Array]], tuple[Array, ...]]:
            own = layout.at(rank)
            chunk = own.chunks[rank]
            sizes = [segment.size for segment in chunk]

            def served(arrived: list[Array]) -> tuple[Array, ...]:
                momenta, owed = (cut(kept[: sum(sizes)], sizes) if sizes else [] for kept in server)
                told = Verdicts(at_once=False)
                of_rank = call._replace(layout=own, server=(*momenta, *owed))
                packed = _CodecOfOwner(codec.tensors)
                compressed = Owners.serve(self, packed, of_rank, arrived, told, error)
                message: Any = _with_verdicts(compressed, own.updates.own.as_tensors, told)
                new: Any = compressed.residuals
                halves = new[: len(sizes)], new[len(sizes) :]
                kept = [
                    jnp.concatenate([*half, before[sum(sizes) :]])
                    for half, before in zip(halves, server, strict=True)
                ]
                return jnp.pad(message, (0, frames[rank].nbytes - message.shape[0])), *kept

            return served

        rank = jax.lax.axis_index(self.axis_name)
        message, *kept = jax.lax.switch(rank, list(map(branch, range(layout.world))), list(arrived))
        return Compressed((message,), tuple(kept), None)


@dataclass(frozen=True)
class SpmdOwnedMean(OwnedMean):
    """An `OwnedMean` over an axis of a mesh, for `drive`; the rank in its states is 0 on all devices.

    Parameters
    ----------
    compressor, updates, rule, repaid
        See `OwnedMean`. Payloads must have a fixed length.
    axis_name : str
        The axis.
    """

    axis_name: str = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_fixed_lengths(self.sends)

    @cached_property
    def resolved(self) -> Owners:
        """Two phases on the axis, with the rule between them."""
        return _OwnersOnAxis(self.updates, self.rule, self.repaid, self.axis_name)

    def cut(self, joined: Array, sizes: Sequence[int]) -> list[Array]:
        """Return the parts of a flat vector that consists of tensors of these sizes."""
        return cut(joined, sizes)


def _on_axis(factors: Factors) -> Factors:
    """Return factors with a layout that any rank can run."""
    layout = factors.layout
    return factors._replace(layout=_SpmdLayout(layout.operands, layout.chunks, layout.residuals))


def _require_fixed_lengths(compressors: Sequence[Compressor]) -> None:
    for compressor in compressors:
        if compressor.variable_length:
            raise ValueError(
                f"compressor is {compressor.spec}, whose payloads vary in length; expected one with payloads of fixed "
                "length inside jax.jit, such as the same compressor without coding, or a TopK with coding='fixed'"
            )
