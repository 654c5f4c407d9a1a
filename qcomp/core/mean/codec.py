"""Messages of a compressed mean: the payloads of several segments and a verdict, in one buffer."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError, PayloadError
from qcomp.core.kernels import Blend
from qcomp.core.mean.chunks import Segment
from qcomp.core.mean.lengths import join_lengths, most_bytes, split_lengths
from qcomp.core.mean.stages import join, joined_size, split
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    concat,
    device,
    dtype_name,
    empty_like,
    is_mutable,
)
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload

__all__ = ["Encoded", "SegmentCodec"]

Chunk = tuple[Segment, ...]

_FINE, _NON_FINITE = 0, 1


class Encoded(NamedTuple):
    """What a rank has compressed for one stage."""

    messages: tuple[Array, ...]
    """A message for each chunk."""
    residuals: tuple[Array, ...]
    """The new residual of each tensor, flat; empty without feedback."""
    error: NonFiniteError | None
    """What kept this rank from compressing; the messages then say so, and every rank will raise."""


class SegmentCodec:
    """Compresses the segments of chunks into messages and back.

    Every message ends with a verdict of one byte. A rank that cannot compress, because a value is not finite,
    sends refusals to all its peers instead of leaving them waiting; so all ranks raise in the same stage.

    Where the length of any payload varies, that of all messages does, and each begins with the lengths of its payloads.

    Parameters
    ----------
    compressors : sequence of Compressor
        Of each tensor.
    tensors : sequence of arrays
        Flat arrays of the sizes, dtype, library and device of what will be decoded.
    like : array, optional
        Gives dtype, library and device where there may be no tensor.
    variable_length : bool, optional
        Whether messages have lengths of their own, by default where a compressor says so.
    """

    def __init__(
        self,
        compressors: Sequence[Compressor],
        tensors: Sequence[Array],
        like: Array | None = None,
        *,
        variable_length: bool | None = None,
    ) -> None:
        self.compressors = compressors
        self.tensors = tensors
        self.like = tensors[0] if like is None else like
        self.dtype = dtype_name(self.like.dtype)
        self.variable_length = (
            any(c.variable_length for c in compressors) if variable_length is None else variable_length
        )

    def of_averages(self, averages: Sequence[Array], chunk: Chunk) -> "SegmentCodec":
        """Return the codec of the averages of the segments of a chunk, each of them a tensor of its own now."""
        compressors = [self.compressors[s.tensor] for s in chunk]
        return SegmentCodec(compressors, averages, self.like, variable_length=self.variable_length)

    def message_size(self, chunk: Chunk) -> int:
        """Return the bytes of the message of a chunk, of the longest one where the length varies."""
        bounds = self._bounds(chunk)
        return most_bytes(bounds) if self.variable_length else joined_size([most for _, most in bounds])

    def encode(
        self,
        chunks: Sequence[Chunk],
        tensors: Sequence[Array],
        residuals: Sequence[Array],
        key: Key,
        *,
        donate: bool,
        blends: Sequence[Blend] = (),
        into: Sequence[Array | None] = (),
    ) -> Encoded:
        """Compress all chunks of these tensors, with feedback if there are residuals.

        The chunks cover the tensors, each in order. With ``donate`` the new residuals take the buffers of the tensors,
        whose values are lost then; the old residuals are never written to, so that they are still there when any
        rank refuses. With ``blends``, the momentum that each tensor is blended into is what is compressed. ``into`` may
        have a buffer for the new residual of each tensor; they are not looked at with ``donate``.
        """
        parts: list[list[Array]] = [[] for _ in chunks]
        flags: list[Array] = []
        buffers = into or [None] * len(tensors)
        news = [
            _NewResidual(t, r, b, donate=donate) for t, r, b in zip(tensors, residuals, buffers, strict=False)
        ]
        try:
            for index, chunk in enumerate(chunks):
                for segment in chunk:
                    part, tensor = slice(segment.start, segment.stop), segment.tensor
                    values = tensors[tensor][part]
                    new = news[tensor] if news else None
                    encoded = primitives.encode(
                        self.compressors[tensor],
                        values,
                        None if new is None else new.old[part],
                        key.at(bucket=key.bucket + segment.bucket),
                        out=None if new is None else new.buffer(part, values),
                        blend=blends[tensor].cut(part) if blends else None,
                    )
                    if new is not None:
                        new.add(encoded.residual)
                    parts[index].append(encoded.data)
                    if encoded.refused is not None:
                        flags.append(encoded.refused)
        except NonFiniteError as error:
            return Encoded(tuple(self.refusal(chunk) for chunk in chunks), (), error)
        verdict = self._verdict(flags)
        messages = []
        for payloads in parts:
            messages.append(self._join([*payloads, verdict]))
            payloads.clear()  # a message is a copy: half of the memory, as they go
        return Encoded(tuple(messages), tuple(new.whole() for new in news), None)

    def open(
        self, messages: Sequence[Array], chunks: Sequence[Chunk], error: NonFiniteError | None
    ) -> list[list[Payload]]:
        """Return the payloads of a message from each rank.

        Raises
        ------
        NonFiniteError
            On every rank alike, if any rank has refused.
        PayloadError
            If a message is not one of these chunks.
        """
        opened, refused = [], []
        for rank, (message, chunk) in enumerate(zip(messages, chunks, strict=True)):
            *buffers, verdict = self._split_from(rank, message, chunk)
            if int(verdict[0]) != _FINE:
                refused.append(rank)
            opened.append(
                [
                    Payload(self.compressors[segment.tensor].spec, segment.size, self.dtype, buffer)
                    for segment, buffer in zip(chunk, buffers, strict=True)
                ]
            )
        if refused:
            ranks = ", ".join(map(str, refused))
            raise NonFiniteError(
                f"a value on rank {ranks} is not finite, or too large to compress"
            ) from error
        return opened

    def decode(
        self, payloads: Sequence[Payload], chunk: Chunk, buffers: Sequence[Array | None]
    ) -> list[Array]:
        """Return the values of the segments of a chunk, in buffers where they are given."""
        return [
            self.compressors[segment.tensor].decompress(payload, like=self._like(segment), out=buffer)
            for payload, segment, buffer in zip(payloads, chunk, buffers, strict=True)
        ]

    def average(
        self, payloads: Sequence[Sequence[Payload]], chunk: Chunk, *, into: Sequence[Array | None] = ()
    ) -> list[Array]:
        """Return the mean over ranks of the segments of a chunk, added in rank order; below 2^-126 it is zero.

        In the buffers of ``into``, one for each segment, if they are given.
        """
        buffers = into or [None] * len(chunk)
        segments = self._by_segment(payloads, chunk)
        return [
            primitives.average(*of_segment, out=out)
            for of_segment, out in zip(segments, buffers, strict=True)
        ]

    def total(self, payloads: Sequence[Sequence[Payload]], chunk: Chunk) -> list[Array]:
        """Return the sum over ranks of the segments of a chunk, added in rank order."""
        return [primitives.add_up(*of_segment) for of_segment in self._by_segment(payloads, chunk)]

    def encode_average(
        self,
        payloads: Sequence[Sequence[Payload]],
        chunk: Chunk,
        residuals: Sequence[Array],
        key: Key,
        *,
        into: Sequence[Array | None] = (),
    ) -> Encoded:
        """Compress what `average` returns, with feedback if there is a residual for each segment.

        The new residuals are in the buffers of ``into``, if they are given.
        """
        parts, flags, news = [], [], []
        buffers = into or [None] * len(chunk)
        try:
            for index, (compressor, of_ranks, like) in enumerate(self._by_segment(payloads, chunk)):
                encoded = primitives.compress_mean(
                    compressor,
                    of_ranks,
                    like,
                    residuals[index] if residuals else None,
                    key.at(bucket=key.bucket + chunk[index].bucket),
                    out=buffers[index],
                )
                parts.append(encoded.data)
                news += [] if encoded.residual is None else [encoded.residual]
                flags += [] if encoded.refused is None else [encoded.refused]
        except NonFiniteError as error:
            return Encoded((self.refusal(chunk),), (), error)
        return Encoded((self._join([*parts, self._verdict(flags)]),), tuple(news), None)

    def _by_segment(
        self, payloads: Sequence[Sequence[Payload]], chunk: Chunk
    ) -> Iterator[tuple[Compressor, list[Payload], Array]]:
        """Yield of each segment its compressor, the payload of each rank, and an array like it."""
        for index, segment in enumerate(chunk):
            compressor, like = self.compressors[segment.tensor], self._like(segment)
            of_ranks = [of_rank[index] for of_rank in payloads]
            for payload in of_ranks:
                compressor.require_own(payload, like, "like")
            yield compressor, of_ranks, like

    def _like(self, segment: Segment) -> Array:
        return self.tensors[segment.tensor][segment.start : segment.stop]

    def _bounds(self, chunk: Chunk) -> list[tuple[int, int]]:
        """Return the fewest and the most bytes of the payloads of a message, and of its verdict."""
        specs = [self.compressors[s.tensor].payload_spec(s.size, self.dtype) for s in chunk]
        return [*((spec.shortest, spec.nbytes) for spec in specs), (1, 1)]

    def _join(self, buffers: Sequence[Array]) -> Array:
        return join_lengths(buffers) if self.variable_length else join(buffers)

    def _split(self, message: Array, chunk: Chunk) -> list[Array]:
        """Return the payloads of a message, and its verdict."""
        bounds = self._bounds(chunk)
        if self.variable_length:
            return split_lengths(message, bounds)
        sizes = [most for _, most in bounds]
        if message.shape != (joined_size(sizes),):
            raise PayloadError(f"has shape {tuple(message.shape)}; expected ({joined_size(sizes)},)")
        return split(message, sizes)

    def _verdict(self, flags: Sequence[Array]) -> Array:
        """Return the byte that ends a message: what devices have found, without waiting for them."""
        if not flags:
            return self._byte(_FINE)
        xp = array_namespace(flags[0])
        return xp.reshape(xp.max(xp.concat(list(flags))), (1,))

    def _byte(self, value: int) -> Array:
        xp = array_namespace(self.like)
        return xp.asarray([value], dtype=xp.uint8, device=device(self.like))

    def _split_from(self, rank: int, message: Array, chunk: Chunk) -> list[Array]:
        try:
            return self._split(message, chunk)
        except PayloadError as error_of_message:
            raise PayloadError(f"the message from rank {rank} {error_of_message}") from error_of_message

    def refuses(self, message: Array, chunk: Chunk, rank: int) -> bool:
        """Return whether a message from a rank is a refusal."""
        *_, verdict = self._split_from(rank, message, chunk)
        return int(verdict[0]) != _FINE

    def refusal(self, chunk: Chunk) -> Array:
        """Return the message of a rank that cannot compress."""
        xp = array_namespace(self.like)
        buffers = [
            xp.zeros((least,), dtype=xp.uint8, device=device(self.like))
            for least, _ in self._bounds(chunk)[:-1]
        ]
        return self._join([*buffers, self._byte(_NON_FINITE)])


class _NewResidual:
    """The new residual of a tensor: a buffer that is filled part by part, or parts where arrays are immutable."""

    def __init__(self, tensor: Array, old: Array, buffer: Array | None, *, donate: bool) -> None:
        self.old = old
        self.parts: list[Array] = []
        self.given = tensor if donate and is_mutable(tensor) else None
        self.made = None if self.given is not None else empty_like(old) if buffer is None else buffer

    def buffer(self, part: slice, values: Array) -> Array | None:
        """Return where the next part goes: ``values``, which is that part of the tensor, if that was given."""
        if self.given is not None:
            return values
        return None if self.made is None else self.made[part]

    def add(self, part: Array) -> None:
        """Take the next part, which is in its buffer already if it has one."""
        if self.given is None and self.made is None:
            self.parts.append(part)

    def whole(self) -> Array:
        """Return the new residual."""
        if self.given is not None:
            return self.given
        if self.made is not None:
            return self.made
        return concat(self.parts) if self.parts else self.old
