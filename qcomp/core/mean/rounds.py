"""How a large mean is cut into rounds, so that one is on its way while the next is compressed."""

import math
from collections.abc import Callable, Sequence

from qcomp.core.mean.chunks import Segment
from qcomp.core.mean.topologies.plans import Averaged, Into, MeanState, Worker
from qcomp.core.numeric.arrays import Array, concat, dtype_name, empty_like, is_mutable, itemsize

__all__ = ["ROUND_BYTES", "Kept", "Rounds", "count_rounds", "cut_rounds", "in_rounds"]

ROUND_BYTES = 16 << 20
"""The least bytes of values in a round: compressing so many takes much longer than starting an exchange."""

Chunk = tuple[Segment, ...]
Plan = Callable[[list[Array], MeanState, Worker], Averaged]
Kept = Callable[[], tuple[Sequence[Segment], Sequence[Segment]]]
Result = tuple[list[Array], MeanState]


def in_rounds(
    count: int,
    flat: list[Array],
    state: MeanState,
    how: Worker,
    *,
    plan: Plan,
    servers: int,
    kept: Kept,
) -> tuple[list[Averaged], Callable[[Sequence[Result]], Result]]:
    """Return the mean of flat tensors as so many computations, and what makes one result of theirs.

    Parameters
    ----------
    count, flat, state, how
        Of the whole mean.
    plan : callable
        What averages.
    servers : int
        The number of chunks that the whole mean has.
    kept : callable
        Returns what the residuals of the state are of, see `CompressedMean.parts`; asked if there are any.
    """
    if count == 1:
        return [plan(flat, state, how)], lambda results: results[0]
    cut_chunks = cut_rounds(how.cut_up(flat, servers), [c.traits.bucket_size for c in how.compressors], count)
    rounds = Rounds(flat, state, how, cut_chunks, kept() if state.worker else ((), ()))
    return rounds.computations(plan), rounds.joined


def count_rounds(flat: Sequence[Array]) -> int:
    """Return in how many rounds tensors are averaged: one if they are small, or of several dtypes.

    Two of `ROUND_BYTES` and more, and more of twice as many: the second round hides half of what encoding takes, each
    further one less, and the messages of a round take the same time each.
    """
    if len({x.dtype for x in flat}) != 1:
        return 1
    nbytes: int = itemsize(dtype_name(flat[0].dtype)) * sum(math.prod(x.shape) for x in flat)
    rounds = nbytes // ROUND_BYTES
    return max(1, min(2, rounds), rounds // 2)


def cut_rounds(chunks: Sequence[Chunk], bucket_sizes: Sequence[int], count: int) -> list[tuple[Chunk, ...]]:
    """Cut each chunk into parts of whole buckets, one for each round and as long as each other.

    So all ranks send and serve in every round.

    Parameters
    ----------
    chunks : sequence of sequences of Segment
        Of each rank.
    bucket_sizes : sequence of int
        Of each tensor.
    count : int
        Number of rounds; those in which there is nothing are left out.

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


class Rounds:
    """A mean of flat tensors in several rounds, each of them a mean of parts of the tensors.

    Payloads of buckets, draws and residuals are those of the whole mean: only which of them share a payload and a
    message differs.

    Parameters
    ----------
    flat : sequence of arrays
    state : MeanState
    how : Worker
        Of the whole.
    rounds : sequence of sequences of Chunk
        From `cut_rounds`.
    kept : pair of sequences of Segment
        What the residuals of the state are of, see `CompressedMean.parts`.
    """

    def __init__(
        self,
        flat: Sequence[Array],
        state: MeanState,
        how: Worker,
        rounds: Sequence[tuple[Chunk, ...]],
        kept: tuple[Sequence[Segment], Sequence[Segment]],
    ) -> None:
        self.state = state
        self.how = how
        self.flat = flat
        self.rounds = rounds
        whole = [Segment(i, 0, x.shape[0], 0) for i, x in enumerate(flat)]
        self._given = how.donate and all(map(is_mutable, flat))
        self._worker = _Wholes(state.worker, kept[0], flat if self._given and state.worker else None)
        self._server = _Wholes(state.server, kept[1])
        self._means = _Wholes(flat, whole)

    def computations(self, plan: Plan) -> list[Averaged]:
        """Return the mean of each round, as stages."""
        return [plan(*self._round(chunks)) for chunks in self.rounds]

    def _round(self, chunks: tuple[Chunk, ...]) -> tuple[list[Array], MeanState, Worker]:
        how, state = self.how, self.state
        sent = [segment for chunk in chunks for segment in chunk]  # they are the tensors of the round
        served = chunks[state.rank] if len(chunks) > 1 else chunks[0]
        numbers = iter(range(len(sent)))
        values = [self.flat[s.tensor][s.start : s.stop] for s in sent]
        into = Into(
            self._worker.places(sent, values if self._given else None),
            self._server.places(served),
            self._means.places(sent),
        )
        worker, server = self._worker.parts(sent), self._server.parts(served)
        return (
            values,
            state._replace(worker=worker, server=server),
            how._replace(
                compressors=[how.compressors[s.tensor] for s in sent],
                blends=[how.blends[s.tensor].cut(slice(s.start, s.stop)) for s in sent] if how.blends else (),
                chunks=tuple(
                    tuple(Segment(next(numbers), 0, s.size, s.bucket) for s in chunk) for chunk in chunks
                ),
                into=into,
            ),
        )

    def joined(self, results: Sequence[Result]) -> Result:
        """Return the means of the tensors and the new state, from what the computations returned."""
        means, states = zip(*results, strict=True)
        worker = self._worker.joined([state.worker for state in states])
        server = self._server.joined([state.server for state in states])
        return list(self._means.joined(means)), self.state._replace(worker=worker, server=server)


class _Wholes:
    """Arrays of which every round has parts, and the buffers in which the new ones come about.

    Parameters
    ----------
    arrays : sequence of arrays
        The old ones, flat.
    of : sequence of Segment
        Which parts of the tensors they are.
    buffers : sequence of arrays, optional
        By default new ones, and none where arrays are immutable.
    """

    def __init__(
        self, arrays: Sequence[Array], of: Sequence[Segment], buffers: Sequence[Array] | None = None
    ) -> None:
        self._arrays = arrays
        self._number = {segment.tensor: i for i, segment in enumerate(of)} if arrays else {}
        self._first = [segment.start for segment in of]
        self._buffers = [empty_like(x) for x in arrays] if buffers is None else list(buffers)
        self._rounds: list[tuple[Sequence[Segment], Sequence[Array | None]]] = []

    def _parts(self, arrays: Sequence[Array], segments: Sequence[Segment]) -> tuple[Array, ...]:
        found = []
        for segment in segments if arrays else ():
            number = self._number[segment.tensor]
            array, first = arrays[number], self._first[number]
            found.append(None if array is None else array[segment.start - first : segment.stop - first])
        return tuple(found)

    def parts(self, segments: Sequence[Segment]) -> tuple[Array, ...]:
        """Return the old values of these parts of tensors."""
        return self._parts(self._arrays, segments)

    def places(
        self, segments: Sequence[Segment], places: Sequence[Array] | None = None
    ) -> tuple[Array | None, ...]:
        """Return where the new values of the parts of the next round go, by default to parts of the buffers."""
        chosen = self._parts(self._buffers, segments) if places is None else tuple(places)
        self._rounds.append((segments, chosen))
        return chosen

    def joined(self, results: Sequence[Sequence[Array]]) -> tuple[Array, ...]:
        """Return the new arrays: the buffers if all their parts are where they belong, and else copies."""
        found: list[list[tuple[int, Array, bool]]] = [[] for _ in self._arrays]
        for (segments, places), values in zip(self._rounds, results, strict=True):
            # Without feedback there are no values.
            for segment, place, value in zip(segments, places, values, strict=False):
                found[self._number[segment.tensor]].append((segment.start, value, value is place))
        new = []
        for old, buffer, parts in zip(self._arrays, self._buffers, found, strict=True):
            parts.sort(key=lambda part: part[0])
            in_place = all(is_there for _, _, is_there in parts)
            new.append(old if not parts else buffer if in_place else concat([value for _, value, _ in parts]))
        return tuple(new)
