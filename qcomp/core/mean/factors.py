"""Which tensors are averaged by two factors, who owns each factor, and how its mean gets to all ranks."""

import heapq
import math
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.chunks import Segment
from qcomp.core.mean.codec import Codec, Verdicts
from qcomp.core.mean.compressed_mean import MeanState
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.stages import AllGather, AllToAll, Stages
from qcomp.core.mean.topologies.base import assemble
from qcomp.core.numeric.arrays import Array
from qcomp.core.numeric.random import Key

__all__ = ["Matrix", "Plan", "by_owners", "make_plan", "matrices_of"]


class Matrix(NamedTuple):
    """A tensor of which two factors are sent."""

    tensor: int
    rows: int
    columns: int
    rank: int


class Plan(NamedTuple):
    """What a mean of tensors of these shapes needs to know, for one rank."""

    matrices: tuple[Matrix, ...]
    rest: tuple[int, ...]
    """The tensors that are averaged exactly."""
    left: Layout
    right: Layout


def matrices_of(shapes: Sequence[tuple[int, ...]], rank: int, min_compression: float) -> tuple[Matrix, ...]:
    """Return how the tensors of these shapes are approximated that do not stay exact, see `PowerSGDMean`."""
    found = []
    for tensor, shape in enumerate(shapes):
        size = math.prod(shape)
        if len(shape) < 2 or not size:
            continue
        rows, columns = shape[0], size // shape[0]
        most = min(rank, rows, columns)
        if most * (rows + columns) * min_compression < size:
            found.append(Matrix(tensor, rows, columns, most))
    return tuple(found)


def make_plan(
    matrices: tuple[Matrix, ...],
    compressors: Sequence[Compressor],
    dtypes: Sequence[str],
    numbers: Sequence[int],
    state: MeanState,
) -> Plan:
    """Return the plan of a mean.

    Parameters
    ----------
    matrices : tuple of Matrix
    compressors, dtypes : sequence
        Of each tensor: what compresses its factors, and the name of the dtype in which it is computed.
    numbers : sequence of int
        The number of each tensor's first bucket, for draws.
    state : MeanState
        Of this rank.
    """
    low_rank = {m.tensor for m in matrices}
    rest = tuple(i for i in range(len(dtypes)) if i not in low_rank)

    def layout(lengths: Sequence[int], shift: int) -> Layout:
        """Return the layout of the messages of a factor with rows of these lengths."""
        pairs = list(zip(matrices, lengths, strict=True))
        sizes = tuple(m.rank * length for m, length in pairs)
        operands = Operands(
            tuple(compressors[m.tensor].for_shape((m.rank, length)) for m, length in pairs),
            sizes,
            tuple(dtypes[m.tensor] for m in matrices),
            state.rank,
            Nodes.of(state.size, ()),
        )
        owners = _owners(sizes, state.size, shift)
        chunks = tuple(
            tuple(
                Segment(index, 0, sizes[index], numbers[m.tensor])
                for index, m in enumerate(matrices)
                if owners[index] == owner
            )
            for owner in range(state.size)
        )
        return Layout(operands, chunks, Residuals((), ()))

    # So means of single tensors, as of the parts of a model, share the work too.
    first = zlib.crc32(repr(numbers[:1]).encode())
    right = first + (state.size + 1) // 2
    return Plan(
        matrices,
        rest,
        layout([m.rows for m in matrices], first),
        layout([m.columns for m in matrices], right),
    )


def _owners(sizes: Sequence[int], ranks: int, shift: int) -> list[int]:
    """Return the owner of each factor: the largest first, each to the rank with the least."""
    loads = [(0, index, (index + shift) % ranks) for index in range(ranks)]
    owners = [0] * len(sizes)
    for size, number in sorted(
        zip(sizes, range(len(sizes)), strict=True), key=lambda each: (-each[0], each[1])
    ):
        load, index, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + size, index, rank))
    return owners


def by_owners(
    layout: Layout,
    values: Sequence[Array],
    verdicts: Verdicts,
    error: NonFiniteError | None,
    key: Key,
    *,
    finish: Callable[[int, Array], Array],
) -> Stages[tuple[list[Array], NonFiniteError | None]]:
    """Return what all ranks decode of the mean of each vector, after its owner has finished it.

    ``error`` is what kept this rank from computing the values; also returned is what has by now.
    """
    codec = Codec(values)
    if error is None:
        sent = codec.encode(layout.frames, values, (), key, donate=False)
    else:
        sent = codec.refusals(layout.frames, error)
    error = error or sent.error
    arrived = yield AllToAll(sent.messages, (layout.own.nbytes,) * layout.world)
    opened = codec.open(arrived, (layout.own,) * layout.world, verdicts, error)
    finished = list(values)
    for segment, mean in zip(layout.own.chunk, codec.average(opened), strict=True):
        finished[segment.tensor] = finish(segment.tensor, mean)
    served = codec.encode([layout.own], finished, (), key.at(hop=key.hop + 1), donate=False)
    error = error or served.error
    arrived = yield AllGather(served.messages[0], layout.message_sizes)
    opened = codec.open(arrived, layout.frames, verdicts, error)
    return assemble(layout.chunks, [codec.decode(one) for one in opened], values), error
