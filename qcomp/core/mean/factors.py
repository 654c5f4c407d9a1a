"""Plans which tensors PowerSGD sends as two factors, and which rank owns each factor; then averages the factors."""

import heapq
import math
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.chunks import Segment
from qcomp.core.mean.codec import Codec, Compressed, Verdicts
from qcomp.core.mean.compressed_mean import MeanState
from qcomp.core.mean.framing import Frame
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.stages import AllGather, AllToAll, Stages
from qcomp.core.numeric.arrays import Array, array_namespace, concat, cut_like, flat
from qcomp.core.numeric.low_rank import without_small
from qcomp.core.numeric.random import Key

Finish = Callable[[Sequence[Array]], Sequence[Array]]
"""A function that is applied to the means of factors, and returns the same bits on every rank."""
Server = Callable[..., Compressed]
"""`serve`, for factors that arrive at their owner, with ``finish`` already given."""


class Matrix(NamedTuple):
    """A tensor that is sent as two factors."""

    tensor: int
    rows: int
    columns: int
    rank: int


class Factors(NamedTuple):
    """How the left factors, or the right factors, of all matrices get to all ranks."""

    layout: Layout
    """The layout of the packs as vectors: one chunk for each owner, or a single chunk if there are no owners."""
    packs: tuple[tuple[int, ...], ...]
    """The numbers of the factors in each pack, which all have one owner.

    Factors share a pack only if their compressor treats each element on its own.
    """
    shapes: tuple[tuple[int, int], ...]
    """The shape of each factor: its number of rows, which is the rank of the approximation, and their length."""

    def joined(self, factors: Sequence[Array]) -> list[Array]:
        """Return the packs of factors."""
        return [concat([flat(factors[i]) for i in pack]) for pack in self.packs]

    def split(self, number: int, pack: Array) -> dict[int, Array]:
        """Return the factors in a pack, by their numbers."""
        xp, indexes = array_namespace(pack), self.packs[number]
        parts = cut_like(pack, [math.prod(self.shapes[i]) for i in indexes])
        return {i: xp.reshape(part, self.shapes[i]) for i, part in zip(indexes, parts, strict=True)}


class FactorPlan(NamedTuple):
    """The facts about a mean that one rank needs, as far as they do not depend on the values of tensors."""

    matrices: tuple[Matrix, ...]
    rest: tuple[int, ...]
    """The tensors that are averaged exactly."""
    left: Factors
    right: Factors


@lru_cache(256)  # called several times in every step
def matrices_of(shapes: tuple[tuple[int, ...], ...], rank: int, min_compression: float) -> tuple[Matrix, ...]:
    """Return, as matrices, the tensors that do not stay exact; see `PowerSGDMean`."""
    found = []
    for tensor, shape in enumerate(shapes):
        size = math.prod(shape)
        if len(shape) < 2 or not size:
            continue
        rows, columns = _rows_and_columns(shape)
        most = min(rank, rows, columns)
        if most * (rows + columns) * min_compression < size:
            found.append(Matrix(tensor, rows, columns, most))
    return tuple(found)


def _rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows (first axes) and columns (other axes) of a tensor, cut where rows + columns is smallest."""
    size = math.prod(shape)
    return min(((rows, size // rows) for rows in accumulate(shape[:-1], mul)), key=sum)


def make_plan(
    matrices: tuple[Matrix, ...],
    compressors: Sequence[Compressor],
    dtypes: Sequence[str],
    numbers: Sequence[int],
    state: MeanState,
    *,
    owners: int,
) -> FactorPlan:
    """Return one rank's plan of a mean.

    ``numbers`` has the number of each tensor's first bucket, for draws; ``dtypes`` the names of the compute dtypes.
    ``owners`` is how many ranks own factors: all, or 1 if no factor needs an owner.
    """
    low_rank = {m.tensor for m in matrices}
    rest = tuple(i for i in range(len(dtypes)) if i not in low_rank)

    def factors(lengths: Sequence[int], shift: int) -> Factors:
        """Return how one factor of each matrix gets to all ranks; ``lengths`` are the lengths of the factors' rows."""
        shapes = tuple((m.rank, length) for m, length in zip(matrices, lengths, strict=True))
        chosen = [compressors[m.tensor].for_shape(s) for m, s in zip(matrices, shapes, strict=True)]
        owner_of = _owners([math.prod(shape) for shape in shapes], owners, shift)
        packs: dict[Any, list[int]] = {}
        for index, (m, compressor) in enumerate(zip(matrices, chosen, strict=True)):
            traits = compressor.traits
            alone = traits.random or traits.bucket_size > 1 or compressor.variable_length
            packs.setdefault(
                (owner_of[index], index if alone else (compressor, dtypes[m.tensor])), []
            ).append(index)
        firsts = [pack[0] for pack in packs.values()]
        sizes = tuple(sum(math.prod(shapes[i]) for i in pack) for pack in packs.values())
        operands = Operands(
            tuple(chosen[first] for first in firsts),
            sizes,
            tuple(dtypes[matrices[first].tensor] for first in firsts),
            state.rank,
            Nodes.of(state.size, ()),
        )
        chunks = tuple(
            tuple(
                Segment(number, 0, sizes[number], numbers[matrices[first].tensor])
                for number, first in enumerate(firsts)
                if owner_of[first] == owner
            )
            for owner in range(owners)
        )
        return Factors(Layout(operands, chunks, Residuals((), ())), tuple(map(tuple, packs.values())), shapes)

    # Bucket numbers shift the owners: so owners are spread over the ranks even if each tensor has a mean of its own.
    first = zlib.crc32(repr(numbers[:1]).encode())
    right = first + (owners + 1) // 2
    return FactorPlan(
        matrices,
        rest,
        factors([m.rows for m in matrices], first),
        factors([m.columns for m in matrices], right),
    )


def _owners(sizes: Sequence[int], ranks: int, shift: int) -> list[int]:
    """Return the owner of each factor: the largest factor first, each to the rank with the fewest elements so far."""
    loads = [(0, index, (index + shift) % ranks) for index in range(ranks)]
    owners = [0] * len(sizes)
    for size, number in sorted(
        zip(sizes, range(len(sizes)), strict=True), key=lambda each: (-each[0], each[1])
    ):
        load, index, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + size, index, rank))
    return owners


def average(
    factors: Factors,
    values: Sequence[Array],
    verdicts: Verdicts,
    error: NonFiniteError | None,
    key: Key,
    *,
    least: float,
    finish: Finish | None,
    server: Callable[[Finish | None], Server],
) -> Stages[tuple[list[Array], NonFiniteError | None]]:
    """Return the finished mean of each factor, the same on all ranks, and this rank's first error, or None.

    The owner of a factor averages it, applies ``finish`` unless that is None, and sends the result to all. With two
    ranks, factors have no owners: the ranks send each other all factors, and each rank averages all of them itself.

    ``error`` is what kept this rank from computing the values, or None. Magnitudes below ``least`` are replaced by
    zero. ``server`` takes ``finish``, and returns what an owner applies to arriving factors, such as `serve` with this
    ``finish``.
    """
    layout, packs = factors.layout, factors.joined(values)
    codec = Codec(packs)
    if error is None:
        sent = codec.encode(layout.frames, packs, (), key, donate=False)
    else:
        sent = codec.refusals(layout.frames, error)
    error = error or sent.error
    means: list[tuple[int, Array]] = []
    if len(layout.frames) == 1:
        (whole,) = layout.frames
        arrived = yield AllGather(sent.messages[0], (whole.nbytes,) * layout.world)
        opened = codec.open(arrived, (whole,) * layout.world, verdicts, error)
        means = _finished(factors, whole, codec.average(opened), finish)
    else:
        arrived = yield AllToAll(sent.messages, (layout.own.nbytes,) * layout.world)
        answer = server(finish)(factors, packs, arrived, verdicts, error=error, key=key.at(hop=key.hop + 1))
        error = error or answer.error
        arrived = yield AllGather(answer.messages[0], layout.message_sizes)
        for one in codec.open(arrived, layout.frames, verdicts, error):
            means += zip([segment.tensor for segment in one.frame.chunk], codec.decode(one), strict=True)
    found: dict[int, Array] = {}
    for number, pack in means:
        found |= factors.split(number, without_small(pack, least))
    return [found[i] for i in range(len(values))], error


def serve(
    factors: Factors,
    packs: Sequence[Array],
    arrived: Sequence[Array],
    verdicts: Verdicts,
    *,
    error: NonFiniteError | None,
    key: Key,
    finish: Finish | None,
) -> Compressed:
    """Average the arrived factors that this rank owns, apply ``finish`` to the means, and compress them."""
    own, codec, packs = factors.layout.own, Codec(packs), list(packs)
    opened = codec.open(arrived, (own,) * factors.layout.world, verdicts, error)
    for number, pack in _finished(factors, own, codec.average(opened), finish):
        packs[number] = pack
    return codec.encode([own], packs, (), key, donate=False)


def _finished(
    factors: Factors, frame: Frame, means: Sequence[Array], finish: Finish | None
) -> list[tuple[int, Array]]:
    """Return the number and the mean of each pack of a frame, with ``finish`` applied to its factors."""
    numbers = [segment.tensor for segment in frame.chunk]
    if finish is not None:
        split = [factors.split(number, pack) for number, pack in zip(numbers, means, strict=True)]
        finished = iter(finish([factor for parts in split for factor in parts.values()]))
        means = [concat([flat(next(finished)) for _ in parts]) for parts in split]
    return list(zip(numbers, means, strict=True))
