"""Cuts a large mean into rounds, so that one round travels while the next is compressed."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from qcomp.core.mean.chunks import Chunk, Chunks, Segment
from qcomp.core.mean.layout import Layout, Operands
from qcomp.core.mean.stages import Stages
from qcomp.core.mean.topologies.base import Averaged, Call, Into, Topology
from qcomp.core.numeric.arrays import Array, concat, is_mutable, itemsize
from qcomp.core.primitives import empty_like

ROUND_BYTES = 16 << 20
"""The fewest bytes of values in a round: compressing so many takes much longer than starting an exchange."""


class _Place(NamedTuple):
    """A part of one of several arrays."""

    array: int
    start: int
    stop: int


class Round(NamedTuple):
    """One round of a mean, itself a mean of parts of the tensors. Its layout counts each part as a tensor."""

    layout: Layout
    tensors: tuple[_Place, ...]
    """For each tensor of the round, its place in the whole tensors, and in the whole worker residuals."""
    server: tuple[_Place, ...]
    """For each server residual of the round, its place in the whole server residuals."""


def count_rounds(dtypes: Sequence[str], sizes: Sequence[int]) -> int:
    """Return in how many rounds tensors are averaged: one if they are small, or have several dtypes.

    There is one round below 32 MiB, two up to 96 MiB, and then one for each 32 MiB. The second round hides half of the
    encoding time, and each further round hides less, while the messages of each round add the same time.
    """
    if len(set(dtypes)) != 1:
        return 1
    rounds = itemsize(dtypes[0]) * sum(sizes) // ROUND_BYTES
    return max(1, min(2, rounds), rounds // 2)


@lru_cache(maxsize=64)
def lay_out_rounds(topology: Topology, layout: Layout, count: int) -> tuple[Round, ...]:
    """Return the nonempty rounds of a mean; they are laid out once for a layout."""
    operands = layout.operands
    return tuple(
        _round(topology, layout, chunks) for chunks in cut_rounds(layout.chunks, operands.bucket_sizes, count)
    )


def _round(topology: Topology, whole: Layout, chunks: Chunks) -> Round:
    """Return the round that averages these chunks of the whole tensors."""
    sent = [segment for chunk in chunks for segment in chunk]  # each becomes a tensor of the round
    numbers = iter(range(len(sent)))
    renumbered = tuple(tuple(Segment(next(numbers), 0, s.size, s.bucket) for s in chunk) for chunk in chunks)
    operands = Operands(
        tuple(whole.operands.compressors[s.tensor] for s in sent),
        tuple(s.size for s in sent),
        tuple(whole.operands.dtypes[s.tensor] for s in sent),
        whole.rank,
        whole.operands.nodes,
    )
    layout = topology.lay_out(operands, renumbered)
    served = []
    for segment in layout.residuals.server:
        part = sent[segment.tensor]
        number = whole.server_residuals[part.tensor]
        first = whole.residuals.server[number].start
        served.append(_Place(number, part.start - first, part.stop - first))
    return Round(layout, tuple(_Place(s.tensor, s.start, s.stop) for s in sent), tuple(served))


def cut_rounds(chunks: Chunks, bucket_sizes: Sequence[int], count: int) -> list[Chunks]:
    """Cut each chunk into parts of whole buckets and about equal length, one part for each round.

    So all ranks send and serve in every round. The rounds that would be empty are left out.

    Examples
    --------
    >>> first, second = cut_rounds([(Segment(0, 0, 40, 0), Segment(1, 0, 8, 5)), ()], [8, 8], 2)
    >>> first
    ((Segment(tensor=0, start=0, stop=24, bucket=0),), ())
    >>> second
    ((Segment(tensor=0, start=24, stop=40, bucket=3), Segment(tensor=1, start=0, stop=8, bucket=5)), ())
    """
    of_chunks = [_cut_chunk(chunk, bucket_sizes, count) for chunk in chunks]
    rounds = [tuple(parts[index] for parts in of_chunks) for index in range(count)]
    return [of_round for of_round in rounds if any(of_round)]


def _cut_chunk(chunk: Chunk, bucket_sizes: Sequence[int], count: int) -> list[Chunk]:
    size = sum(segment.size for segment in chunk)
    edges = [size * index // count for index in range(count + 1)]
    parts: list[list[Segment]] = [[] for _ in range(count)]
    before = 0
    for segment in chunk:
        length = bucket_sizes[segment.tensor]
        start = 0
        for part, edge in zip(parts, edges[1:], strict=True):
            stop = min(segment.size, -(-(edge - before) // length) * length)
            if stop > start:
                number = segment.bucket + start // length
                part.append(Segment(segment.tensor, segment.start + start, segment.start + stop, number))
                start = stop
        before += segment.size
    return [tuple(part) for part in parts]


def in_rounds(
    topology: Topology, call: Call, rounds: Sequence[Round]
) -> tuple[list[Stages[Averaged]], Callable[[Sequence[Averaged]], Averaged]]:
    """Return a computation for each round of a call's mean, and the function that joins their results.

    Codes, draws and residuals are the same as in the whole mean; only the grouping of buckets into payloads and
    messages differs.
    """
    given = call.donate and all(map(is_mutable, call.values))
    worker = _Wholes(call.worker, call.values if given and call.worker else None)
    server = _Wholes(call.server)
    means = _Wholes(call.values)
    computations = []
    for each in rounds:
        values = _parts(call.values, each.tensors)
        into = Into(
            worker.room(each.tensors, values if given else None),
            server.room(each.server),
            means.room(each.tensors),
        )
        blends = [call.blends[p.array].cut(slice(p.start, p.stop)) for p in each.tensors if call.blends]
        of_round = call._replace(
            layout=each.layout,
            values=values,
            worker=worker.parts(each.tensors),
            server=server.parts(each.server),
            blends=blends,
            into=into,
        )
        computations.append(topology.stages(of_round))

    def join(results: Sequence[Averaged]) -> Averaged:
        new_means, new_worker, new_server, verdicts = zip(*results, strict=True)
        return Averaged(
            list(means.joined(new_means)),
            worker.joined(new_worker),
            server.joined(new_server),
            tuple(verdict for of_round in verdicts for verdict in of_round),
        )

    return computations, join


def _parts(arrays: Sequence[Array], places: Sequence[_Place]) -> tuple[Array, ...]:
    return tuple(arrays[p.array][p.start : p.stop] for p in places)


class _Wholes:
    """Arrays that are cut into parts for the rounds, and the buffers for the new arrays.

    Without feedback there are no arrays. Mutable arrays get new buffers by default; immutable arrays have no buffers.
    """

    def __init__(self, arrays: Sequence[Array], buffers: Sequence[Array] | None = None) -> None:
        self._arrays = arrays
        self._buffers = [empty_like(x) for x in arrays] if buffers is None else list(buffers)
        self._rounds: list[tuple[Sequence[_Place], Sequence[Array | None]]] = []

    def parts(self, places: Sequence[_Place]) -> tuple[Array, ...]:
        """Return the old values at these places."""
        return _parts(self._arrays, places) if self._arrays else ()

    def room(
        self, places: Sequence[_Place], given: Sequence[Array] | None = None
    ) -> tuple[Array | None, ...]:
        """Return the buffers for the new values of the next round, by default parts of the whole buffers."""
        if not self._arrays:
            return ()
        found = [(self._buffers[p.array], p) for p in places]
        parts = [None if buffer is None else buffer[p.start : p.stop] for buffer, p in found]
        room = tuple(parts if given is None else given)
        self._rounds.append((places, room))
        return room

    def joined(self, results: Sequence[Sequence[Array]]) -> tuple[Array, ...]:
        """Return the new arrays: each is its buffer if the rounds wrote all its parts there, else the parts joined."""
        found: list[list[tuple[int, Array, bool]]] = [[] for _ in self._arrays]
        for (places, room), values in zip(
            self._rounds, results, strict=False
        ):  # without feedback there are no rounds
            for place, buffer, value in zip(places, room, values, strict=False):
                found[place.array].append((place.start, value, value is buffer))
        new = []
        for old, buffer, parts in zip(self._arrays, self._buffers, found, strict=True):
            parts.sort(key=lambda part: part[0])
            in_place = all(is_there for _, _, is_there in parts)
            joined = buffer if in_place else concat([value for _, value, _ in parts])
            new.append(old if joined is None or not parts else joined)
        return tuple(new)
