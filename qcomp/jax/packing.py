"""The codec of compiled means: buckets that are compressed alike become the rows of one array.

Every operation takes compile time, and `Codec` makes several for each segment in each rank's message. Here the buckets
of all tensors with one compressor and dtype are the rows of one array, and the primitives are vectorised over rows.
Tables say where the bytes of each row are in the messages, so one operation moves the bytes of all segments. Payloads,
draws, sums and residuals have the same bits as with `Codec`. Draws depend on the number of a bucket, so each row is
given its bucket's number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.kernels import Blend, Encoded, use_kernels
from qcomp.core.mean.chunks import Segment
from qcomp.core.mean.codec import Codec, Compressed
from qcomp.core.mean.framing import Frame, Opened
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload, PayloadSpec
from qcomp.jax.kernels import TracedKernels
from qcomp.jax.moves import Array, Range, Rank, Table, as_one, at, cut, moved, slice_of

__all__ = ["PackedCodec"]

_VERDICT_BYTES = 4
"""Bytes of the verdict in every message, including the zeros behind it."""


class _Kind(NamedTuple):
    """Rows that are compressed alike."""

    compressor: Compressor
    dtype: str
    size: int
    """Elements of a row."""

    @property
    def spec(self) -> PayloadSpec:
        """The layout of the payload of a row."""
        return self.compressor.payload_spec(self.size, self.dtype)

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes of each field in a row's payload."""
        return tuple(place.stop - place.start for _, _, place in self.spec.places)


class _Run(NamedTuple):
    """Consecutive buckets of a segment, stored as consecutive rows of a kind."""

    kind: _Kind
    row: int
    """Number of the first row."""
    buckets: int
    start: int
    """First element within the segment."""
    bucket: int
    """Number of the first bucket, as in keys."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.buckets * self.kind.size


class _PartOfTensor(NamedTuple):
    """A part of a tensor, stored in consecutive rows of a kind."""

    tensor: int
    kind: _Kind
    start: int
    """First element, counted in the rows."""
    size: int


class _Packing:
    """The rows that hold the segments of some frames, numbered in the order of the frames."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.frames = frames
        self.counts: dict[_Kind, int] = {}
        """The number of rows of each kind."""
        self._runs = [
            [self._take(*each) for each in zip(f.compressors, f.dtypes, f.chunk, strict=True)] for f in frames
        ]

    def _take(self, compressor: Compressor, dtype: str, segment: Segment) -> list[_Run]:
        """Give rows to a segment: one for each full bucket, and one for the tail."""
        length = compressor.traits.bucket_size if compressor.fields_by_bucket else max(1, segment.size)
        full, rest = divmod(segment.size, length)
        runs = []
        for count, size, before in ((full, length, 0), (1, rest, full)):
            if count and size:
                kind = _Kind(compressor, dtype, size)
                row = self.counts.get(kind, 0)
                self.counts[kind] = row + count
                runs.append(_Run(kind, row, count, before * length, segment.bucket + before))
        return runs

    def each(self) -> Iterator[tuple[Segment, _Run]]:
        """Yield each run, and its segment."""
        for frame, of_frame in zip(self.frames, self._runs, strict=True):
            for segment, runs in zip(frame.chunk, of_frame, strict=True):
                for run in runs:
                    yield segment, run

    def rows(self, tensors: Sequence[Array]) -> dict[_Kind, Array]:
        """Return the elements of the rows of each kind, flat."""
        parts: dict[_Kind, list[tuple[int, int, int]]] = defaultdict(list)
        for segment, run in self.each():
            tensor, start, of_kind = segment.tensor, segment.start + run.start, parts[run.kind]
            stop = start + run.elements
            if of_kind and (of_kind[-1][0], of_kind[-1][2]) == (tensor, start):
                start = of_kind.pop()[1]
            of_kind.append((tensor, start, stop))
        return {
            kind: as_one([slice_of(tensors[t], start, stop) for t, start, stop in of_kind])
            for kind, of_kind in parts.items()
        }

    def tensors(self, rows: Mapping[_Kind, Array], starts: Sequence[Array | int] = ()) -> dict[int, Array]:
        """Return the tensors, the inverse of `rows`.

        Parameters
        ----------
        rows : mapping of kinds to arrays
            Their elements, flat.
        starts : sequence of int, or of arrays of shape ()
            As in `parts`.
        """
        parts: dict[int, list[Array]] = defaultdict(list)
        for (tensor, kind, _, size), start in zip(self.parts, starts, strict=True):
            parts[tensor].append(jax.lax.dynamic_slice(rows[kind], (start,), (size,)))
        return {tensor: as_one(of_tensor) for tensor, of_tensor in parts.items()}

    @cached_property
    def parts(self) -> list[_PartOfTensor]:
        """The parts of tensors, ordered by tensor; frames must hold each tensor's segments in order."""
        found: dict[int, list[_PartOfTensor]] = defaultdict(list)
        for segment, run in self.each():
            tensor, start = segment.tensor, run.row * run.kind.size
            size = run.elements
            if found[tensor] and found[tensor][-1].kind == run.kind:
                last = found[tensor].pop()
                start, size = last.start, last.size + size
            found[tensor].append(_PartOfTensor(tensor, run.kind, start, size))
        return [part for of_tensor in found.values() for part in of_tensor]

    def numbers(self, kind: _Kind, rows: int) -> Table:
        """Return the bucket number of each row of a kind, continued up to ``rows`` rows, as int32."""
        found = [
            np.arange(run.bucket, run.bucket + run.buckets) for _, run in self.each() if run.kind == kind
        ]
        last = found[-1][-1] if found else -1
        joined = np.concatenate([*found, np.arange(last + 1, last + 1 + rows - self.counts.get(kind, 0))])
        return joined.astype(np.uint32).view(np.int32)

    def elements(self, firsts: Mapping[_Kind, int]) -> list[Range]:
        """Return the moves from one vector of all segments, in order, to one vector of all rows, kind by kind.

        Parameters
        ----------
        firsts : mapping of kinds to int
            Where the rows of each kind begin.
        """
        before, moves = 0, []
        for segment, run in self.each():
            target = firsts[run.kind] + run.row * run.kind.size
            moves.append(Range(before + run.start, target, run.elements))
            if run.start + run.elements == segment.size:
                before += segment.size
        return moves

    def payloads(self, fields: _Fields) -> list[Range]:
        """Return the moves from one vector of all messages, in order, to one vector of the fields of all rows."""
        moves = []
        starts = accumulate([frame.nbytes for frame in self.frames], initial=0)
        for frame, of_frame, start in zip(self.frames, self._runs, starts, strict=False):
            for spec, offset, runs in zip(frame.specs, frame.offsets, of_frame, strict=False):
                for field, (_, _, place) in enumerate(spec.places):
                    source = start + offset + place.start
                    for run in runs:
                        width = run.kind.widths[field]
                        target = fields.firsts[run.kind, field] + run.row * width
                        moves.append(Range(source, target, run.buckets * width))
                        source += run.buckets * width
        return moves

    def messages(self, fields: _Fields) -> list[Range]:
        """Return the moves from one vector of the fields of all rows and a verdict, to one vector of all messages."""
        verdicts = [Range(fields.nbytes, verdict, _VERDICT_BYTES) for verdict in self.verdicts]
        return [*(move.back() for move in self.payloads(fields)), *verdicts]

    @property
    def verdicts(self) -> list[int]:
        """The position of each verdict in one vector of all messages, in bytes."""
        starts = accumulate([frame.nbytes for frame in self.frames], initial=0)
        return [start + frame.offsets[-1] for start, frame in zip(starts, self.frames, strict=False)]


class _Fields(NamedTuple):
    """The layout of a vector with the payloads of all rows, field by field."""

    counts: Mapping[_Kind, int]
    firsts: dict[tuple[_Kind, int], int]
    nbytes: int

    @classmethod
    def of(cls, counts: Mapping[_Kind, int]) -> _Fields:
        """Return the layout for these numbers of rows."""
        firsts, end = {}, 0
        for kind, count in counts.items():
            for field, width in enumerate(kind.widths):
                firsts[kind, field] = end
                end += count * width
        return cls(counts, firsts, end)

    def joined(self, encoded: Mapping[_Kind, Any], verdict: Array) -> Array:
        """Return the bytes of all fields, followed by a verdict."""
        parts = [
            jnp.ravel(encoded[kind].data[:, place])
            for kind in self.counts
            for _, _, place in kind.spec.places
        ]
        return as_one([*parts, verdict, jnp.zeros(_VERDICT_BYTES - 1, jnp.uint8)])

    def payloads(self, data: Array) -> dict[_Kind, Array]:
        """Return the payloads of all rows from the bytes of all fields; ``data`` may have a leading axis."""
        found, before = {}, data.shape[:-1]
        for kind, rows in self.counts.items():
            pieces, end = [], 0
            for field, (_, _, place) in enumerate(kind.spec.places):
                first, width = self.firsts[kind, field], place.stop - place.start
                bytes_of_rows = jax.lax.slice_in_dim(data, first, first + rows * width, axis=len(before))
                pieces.append(jnp.zeros((*before, rows, place.start - end), data.dtype))
                pieces.append(jnp.reshape(bytes_of_rows, (*before, rows, width)))
                end = place.stop
            found[kind] = jnp.concatenate(pieces, axis=-1)
        return found


class PackedCodec(Codec):
    """A `Codec` for traced arrays that keeps programs small; the module's docstring says how.

    Frames must hold the segments of a tensor in their order.
    """

    def encode(
        self,
        frames: Sequence[Frame],
        tensors: Sequence[Array],
        residuals: Sequence[Array],
        key: Key,
        *,
        donate: bool,  # noqa: ARG002 - traced arrays have no buffers
        blends: Sequence[Blend] = (),
        into: Sequence[Array | None] = (),  # noqa: ARG002
    ) -> Compressed:
        """Compress all chunks of these tensors; see `Codec.encode`. All blends must have the same numbers."""
        packing = _Packing(frames)
        values, owed = packing.rows(tensors), packing.rows(residuals) if residuals else {}
        if blends:
            momenta = packing.rows([b.m for b in blends])
            values = {
                kind: primitives.blended(blends[0]._replace(m=momenta[kind]), x) for kind, x in values.items()
            }
        numbers = {kind: _numbers(kind, [packing]) for kind in values}

        def encode() -> dict[_Kind, Encoded]:
            return {kind: _encoded(kind, x, owed.get(kind), key, numbers[kind]) for kind, x in values.items()}

        encoded, starts = self._apart(
            encode, packing.parts if residuals else (), next(iter(values.values()), None)
        )
        fields, sizes = _Fields.of(packing.counts), [frame.nbytes for frame in frames]
        data = fields.joined(encoded, self._verdict_of(encoded.values()))
        messages = cut(moved(data, [packing.messages(fields)], sum(sizes)), sizes)
        new = packing.tensors(_residuals(encoded), starts) if residuals else {}
        return Compressed(tuple(messages), tuple(new.get(i, old) for i, old in enumerate(residuals)), None)

    def decode_tensors(self, opened: Sequence[Opened]) -> list[Array]:
        """Return the tensors whose segments are in some chunks; see `Codec.decode_tensors`."""
        packing = _Packing([one.frame for one in opened])
        fields = _Fields.of(packing.counts)
        messages = as_one([one.message for one in opened])
        data = moved(messages, [packing.payloads(fields)], fields.nbytes)

        def decode() -> dict[_Kind, Array]:
            return {kind: _decoded(kind, rows) for kind, rows in fields.payloads(data).items()}

        return self._tensors(packing, decode, opened)

    def average(
        self,
        opened: Sequence[Opened],
        places: Sequence[Array] | None = None,  # noqa: ARG002 - traced arrays have no buffers
        *,
        divisor: str = "ranks",
    ) -> list[Array]:
        """Return the mean over ranks of the segments of a chunk with all tensors; see `Codec.average`."""
        packing = _Packing([opened[0].frame])
        fields = _Fields.of(packing.counts)
        of_ranks: list[Any] = [one.message for one in opened]
        messages = jnp.stack(of_ranks)
        data = moved(messages, [packing.payloads(fields)], fields.nbytes)

        def average() -> dict[_Kind, Array]:
            return {kind: _mean(kind, rows, divisor) for kind, rows in fields.payloads(data).items()}

        return self._tensors(packing, average, opened)

    def _tensors(
        self, packing: _Packing, compute: Callable[[], dict[_Kind, Array]], opened: Sequence[Opened]
    ) -> list[Array]:
        """Return tensors from computed rows: NaN if any device has refused."""
        refused = jnp.max(as_one([one.verdict for one in opened])) > 0

        def rows() -> dict[_Kind, Array]:
            return {kind: jnp.where(refused, jnp.nan, jnp.ravel(x)) for kind, x in compute().items()}

        found, starts = self._apart(rows, packing.parts, opened[0].message)
        tensors = packing.tensors(found, starts)
        return [tensors.get(i, x) for i, x in enumerate(self.tensors)]

    def _apart(
        self, compute: Callable[[], dict[_Kind, Any]], parts: Sequence[_PartOfTensor], like: Array | None
    ) -> tuple[dict[_Kind, Any], list[Any]]:
        """Return a function's results for each kind, and the starts of the parts of tensors.

        See `TracedKernels.apart`.
        """
        starts = [part.start for part in parts]
        if not isinstance(self._kernels, TracedKernels):
            return compute(), starts
        kinds: list[_Kind] = []

        def arrays() -> list[Any]:  # kinds have no order, so they cannot be keys of a pytree
            by_kind = compute()
            kinds[:] = by_kind
            return list(by_kind.values())

        known = self._hidden.get(tuple(starts))
        found, hidden = self._kernels.apart(arrays, () if known else starts, like)
        return dict(zip(kinds, found, strict=True)), self._hidden.setdefault(tuple(starts), known or hidden)

    @cached_property
    def _hidden(self) -> dict[tuple[int, ...], list[Array]]:
        """A cache of numbers hidden from the compiler, since hiding each takes compile time."""
        return {}

    def serve(
        self,
        rank: Rank,
        frames: Sequence[Frame],
        arrived: Sequence[Array],
        residuals: Sequence[Array],
        key: Key,
    ) -> Compressed:
        """Average the messages for this device's chunk, and compress the average for all.

        The program is the same for all devices: each kind has as many rows as the device with the most needs, and each
        device reads its own tables.

        Parameters
        ----------
        rank : traced int
            The number of this device.
        frames : sequence of Frame
            The frame of each device's chunk; their messages have one length.
        arrived : sequence of arrays
            The message of each device for this device's chunk.
        residuals : sequence of arrays
            At most one array: the residuals of the chunk's segments, padded with zeros to the size of the largest
            chunk.
        key : Key
            The key of this device's draws.
        """
        packings = [_Packing([frame]) for frame in frames]
        kinds = dict.fromkeys(kind for packing in packings for kind in packing.counts)
        counts = {kind: max(packing.counts.get(kind, 0) for packing in packings) for kind in kinds}
        fields, messages = _Fields.of(counts), jnp.stack(arrived)
        verdict = at(np.asarray([packing.verdicts[0] for packing in packings], np.int32), rank)
        told = jnp.max(jax.lax.dynamic_slice_in_dim(messages, verdict, 1, axis=1), axis=0)
        data = moved(messages, [packing.payloads(fields) for packing in packings], fields.nbytes, rank)
        owed = _chunk_to_rows(residuals, packings, counts, rank)
        encoded = {}
        for kind, rows in fields.payloads(data).items():
            mean = _mean(kind, rows)
            own = np.asarray([packing.counts.get(kind, 0) for packing in packings], np.int32)
            if own.min() < counts[kind]:
                mean = jnp.where((jnp.arange(counts[kind]) < at(own, rank))[:, None], mean, 0)
            encoded[kind] = _encoded(kind, mean, owed.get(kind), key, _numbers(kind, packings, rank))
        data = fields.joined(encoded, jnp.maximum(self._verdict_of(encoded.values()), told))
        moves = [packing.messages(fields) for packing in packings]
        message = moved(data, moves, frames[0].nbytes, rank)
        new = _rows_to_chunk(_residuals(encoded), residuals, packings, counts, rank)
        return Compressed((message,), new, None)

    def _verdict_of(self, encoded: Iterable[Any]) -> Array:
        """Return the verdict on all rows, uint8 of shape (1,)."""
        found = [e._replace(refused=jnp.ravel(e.refused)) for e in encoded if e.refused is not None]
        return self._verdict(found)


def _chunk_to_rows(
    residuals: Sequence[Array], packings: Sequence[_Packing], counts: Mapping[_Kind, int], rank: Rank
) -> dict[_Kind, Array]:
    """Return the residuals of the rows of each kind, flat, from the residuals of this device's chunk, if any."""
    if not residuals or len(counts) == 1:
        return dict(zip(counts, residuals, strict=False))
    sizes = [count * kind.size for kind, count in counts.items()]
    firsts = dict(zip(counts, accumulate(sizes, initial=0), strict=False))
    moves = [packing.elements(firsts) for packing in packings]
    return dict(zip(counts, jax.lax.split(moved(residuals[0], moves, sum(sizes), rank), sizes), strict=True))


def _rows_to_chunk(
    rows: Mapping[_Kind, Array],
    residuals: Sequence[Array],
    packings: Sequence[_Packing],
    counts: Mapping[_Kind, int],
    rank: Rank,
) -> tuple[Array, ...]:
    """Return the residuals of a chunk from the residuals of rows, the inverse of `_chunk_to_rows`."""
    if not residuals or len(counts) == 1:
        return tuple(rows.values()) if residuals else ()
    sizes = [count * kind.size for kind, count in counts.items()]
    firsts = dict(zip(counts, accumulate(sizes, initial=0), strict=False))
    moves = [[move.back() for move in packing.elements(firsts)] for packing in packings]
    return (moved(as_one([rows[kind] for kind in counts]), moves, residuals[0].shape[0], rank),)


def _numbers(kind: _Kind, packings: Sequence[_Packing], rank: Rank | None = None) -> Array | None:
    """Return the bucket number of each row of a kind, in the packing of this device; None if nothing is drawn."""
    if not kind.compressor.traits.random:
        return None
    rows = max(packing.counts.get(kind, 0) for packing in packings)
    table = np.stack([packing.numbers(kind, rows) for packing in packings])
    if (np.diff(table, axis=1) == 1).all():  # keeps a table of all buckets out of the program
        first = table[0, 0] if rank is None else at(table[:, 0], rank)
        return first + jnp.arange(rows, dtype=jnp.int32)
    return jnp.asarray(table[0]) if rank is None else at(table, rank)


def _encoded(kind: _Kind, values: Array, residual: Array | None, key: Key, numbers: Array | None) -> Encoded:
    """Return `primitives.encode` of each row, given the elements of all rows."""

    def encode(x: Array, residual: Array | None, number: Array | None) -> Encoded:
        own = key if number is None else key.at(bucket=key.bucket + number)
        return primitives.encode(kind.compressor, x, residual, own)

    rows, owed = (None if x is None else jnp.reshape(x, (-1, kind.size)) for x in (values, residual))
    with use_kernels(None):  # kernels would be traced for a single row
        encoded: Encoded = jax.vmap(encode)(rows, owed, numbers)
    return encoded


def _residuals(encoded: Mapping[_Kind, Any]) -> dict[_Kind, Array]:
    """Return the new residuals of the rows of each kind, flat."""
    return {kind: jnp.ravel(e.residual) for kind, e in encoded.items() if e.residual is not None}


def _decoded(kind: _Kind, data: Array) -> Array:
    """Return the values of rows from their payloads."""
    like = jnp.zeros((kind.size,), kind.dtype)

    def decode(data: Array) -> Array:
        payload = Payload(kind.compressor.spec, kind.size, kind.dtype, data)
        return primitives.decode(kind.compressor, payload, like)

    with use_kernels(None):
        decoded: Array = jax.vmap(decode)(data)
    return decoded


def _mean(kind: _Kind, data: Array, divisor: str = "ranks") -> Array:
    """Return the mean of rows over the ranks, added in their order, from the payloads of each rank."""
    counts = divisor == "senders" and kind.compressor.traits.kept is not None

    def add(sums: tuple[Array, ...], data: Array) -> tuple[tuple[Array, ...], None]:
        value = _decoded(kind, data)
        if counts:
            return primitives.add_sender(sums[0], sums[1], value), None
        return (sums[0] + value,), None

    # For JAX, these zeros differ between devices if the payloads do. `finish_mean` drops the sign of a zero sum.
    zero = jnp.broadcast_to((data[0, 0, :1] * 0).astype(kind.dtype), (data.shape[1], kind.size))
    sums, _ = jax.lax.scan(add, (zero,) * (1 + counts), data)
    if counts:
        return primitives.finish_senders(sums[0], sums[1])
    return primitives.finish_mean(sums[0], data.shape[0])
