"""Chunks to messages and back: compressed with feedback, averaged over ranks, decoded."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError, PayloadError
from qcomp.core.kernels import Blend
from qcomp.core.mean.chunks import Segment
from qcomp.core.mean.framing import Frame
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    concat,
    device,
    host_bytes,
    is_mutable,
)
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload
from qcomp.core.primitives import empty_like

__all__ = ["Codec", "Compressed", "Verdicts"]

_FINE, _NON_FINITE = 0, 1


class Compressed(NamedTuple):
    """What a rank has compressed for one exchange."""

    messages: tuple[Array, ...]
    """A message for each chunk."""
    residuals: tuple[Array, ...]
    """The new residual of each tensor, flat; empty without feedback."""
    error: NonFiniteError | None
    """What kept this rank from compressing; the messages then say so, and every rank will raise."""


class Verdicts:
    """What the ranks say of their values, read once for all exchanges of a mean.

    A rank that cannot compress, because a value is not finite, sends refusals to all its peers: so no rank blocks,
    and all raise in the same stage. A verdict lies in the memory of its message, and reading it stalls a device; so
    the verdicts are collected, and read when the last has arrived. Until then the ranks go on with what they have,
    whose result is thrown away.

    Parameters
    ----------
    at_once : bool
        Whether each exchange's verdicts are read as they arrive. It must be the same on all ranks. Messages of variable
        length need it: a refusal cannot be decoded there.
    """

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self._unread: list[list[Array]] = []

    def add(self, verdicts: list[Array], error: NonFiniteError | None) -> None:
        """Take the verdict of each rank's message; see `require_accepted`."""
        self._unread.append(verdicts)
        if self.at_once:
            self.require_accepted(error)

    def require_accepted(self, error: NonFiniteError | None) -> None:
        """Read all verdicts, and raise `NonFiniteError` on every rank alike if any rank has refused.

        The ranks to blame are those that refused in the first exchange with a refusal. The error is raised from
        ``error``, what kept this rank from compressing.
        """
        unread, self._unread = self._unread, []
        if not unread:
            return
        flags = host_bytes(concat([verdict for of_exchange in unread for verdict in of_exchange]))
        start = 0
        for of_exchange in unread:
            found = flags[start : start + len(of_exchange)]
            start += len(of_exchange)
            if any(found):
                ranks = ", ".join(str(rank) for rank, flag in enumerate(found) if flag != _FINE)
                raise NonFiniteError(
                    f"a value on rank {ranks} is not finite, or too large to compress"
                ) from error


class Codec:
    """Compresses the segments of chunks into messages and back.

    Parameters
    ----------
    tensors : sequence of arrays
        Flat arrays of the sizes, dtype, library and device of what will be decoded.
    like : array, optional
        Gives library and device where there may be no tensor.
    """

    def __init__(self, tensors: Sequence[Array], like: Array | None = None) -> None:
        self.tensors = tensors
        self.like = tensors[0] if like is None else like

    def encode(
        self,
        frames: Sequence[Frame],
        tensors: Sequence[Array],
        residuals: Sequence[Array],
        key: Key,
        *,
        donate: bool,
        blends: Sequence[Blend] = (),
        into: Sequence[Array | None] = (),
    ) -> Compressed:
        """Compress all chunks of these tensors, with feedback if there are residuals.

        The chunks cover the tensors, each in order. With ``donate`` the new residuals take the buffers of the tensors,
        whose values are lost then; the old residuals are never written to, so that they are still there when any
        rank refuses. With ``blends``, the momentum that each tensor is blended into is what is compressed. ``into`` may
        have a buffer for the new residual of each tensor; it is ignored with ``donate``.
        """
        flags: list[Array] = []
        buffers = into or [None] * len(tensors)
        news = [
            _NewResidual(t, r, b, donate=donate) for t, r, b in zip(tensors, residuals, buffers, strict=False)
        ]
        payloads: list[list[Array]] = []
        try:
            for frame in frames:
                of_chunk = []
                for compressor, (tensor, start, stop, bucket) in zip(
                    frame.compressors, frame.chunk, strict=True
                ):
                    part = slice(start, stop)
                    values = tensors[tensor][part]
                    new = news[tensor] if news else None
                    encoded = primitives.encode(
                        compressor,
                        values,
                        None if new is None else new.old[part],
                        key.at(bucket=key.bucket + bucket),
                        out=None if new is None else new.buffer(part, values),
                        blend=blends[tensor].cut(part) if blends else None,
                    )
                    if new is not None:
                        new.add(encoded.residual)
                    of_chunk.append(encoded.data)
                    if encoded.refused is not None:
                        flags.append(encoded.refused)
                payloads.append(of_chunk)
        except NonFiniteError as error:
            return self.refusals(frames, error)
        verdict = self._verdict(flags)
        messages = []
        for frame, of_chunk in zip(frames, payloads, strict=True):
            messages.append(frame.join(of_chunk, verdict))
            of_chunk.clear()  # a message is a copy: half of the memory, as they go
        return Compressed(tuple(messages), tuple(new.whole() for new in news), None)

    def encode_average(
        self,
        payloads: Sequence[Sequence[Payload]],
        frame: Frame,
        residuals: Sequence[Array],
        key: Key,
        *,
        into: Sequence[Array | None] = (),
    ) -> Compressed:
        """Compress what `average` returns, with feedback if there is a residual for each segment.

        The new residuals are in the buffers of ``into``, if they are given.
        """
        parts, flags, news = [], [], []
        buffers = into or [None] * len(frame.chunk)
        try:
            for index, (compressor, of_ranks, like) in enumerate(self._by_segment(payloads, frame)):
                encoded = primitives.compress_mean(
                    compressor,
                    of_ranks,
                    like,
                    residuals[index] if residuals else None,
                    key.at(bucket=key.bucket + frame.chunk[index].bucket),
                    out=buffers[index],
                )
                parts.append(encoded.data)
                if encoded.residual is not None:
                    news.append(encoded.residual)
                if encoded.refused is not None:
                    flags.append(encoded.refused)
        except NonFiniteError as error:
            return self.refusals([frame], error)
        return Compressed((frame.join(parts, self._verdict(flags)),), tuple(news), None)

    def open(
        self,
        messages: Sequence[Array],
        frames: Sequence[Frame],
        verdicts: Verdicts,
        error: NonFiniteError | None,
    ) -> list[list[Payload]]:
        """Return the payloads of a message from each rank, and hand over its verdict.

        Raises
        ------
        PayloadError
            If a message does not have its frame.
        """
        opened = [
            self._split(rank, message, frame)
            for rank, (message, frame) in enumerate(zip(messages, frames, strict=True))
        ]
        verdicts.add([verdict for _, verdict in opened], error)
        return [payloads for payloads, _ in opened]

    def payloads(self, message: Array, frame: Frame, rank: int) -> list[Payload]:
        """Return the payloads of a message from a rank that is known not to be a refusal."""
        return self._split(rank, message, frame)[0]

    def refuses(self, message: Array, frame: Frame, rank: int) -> bool:
        """Return whether a message from a rank is a refusal; reads its verdict."""
        _, verdict = self._split(rank, message, frame)
        return int(verdict[0]) != _FINE

    def decode(
        self, payloads: Sequence[Payload], frame: Frame, buffers: Sequence[Array | None]
    ) -> list[Array]:
        """Return the values of the segments of a chunk, in buffers where they are given."""
        return [
            primitives.decode(compressor, payload, self._like(segment), out=buffer)
            for compressor, payload, segment, buffer in zip(
                frame.compressors, payloads, frame.chunk, buffers, strict=True
            )
        ]

    def average(
        self, payloads: Sequence[Sequence[Payload]], frame: Frame, *, into: Sequence[Array | None] = ()
    ) -> list[Array]:
        """Return the mean over ranks of the segments of a chunk, added in rank order; below 2^-126 it is zero.

        In the buffers of ``into``, one for each segment, if they are given.
        """
        buffers = into or [None] * len(frame.chunk)
        segments = self._by_segment(payloads, frame)
        return [
            primitives.average(*of_segment, out=out)
            for of_segment, out in zip(segments, buffers, strict=True)
        ]

    def total(self, payloads: Sequence[Sequence[Payload]], frame: Frame) -> list[Array]:
        """Return the sum over ranks of the segments of a chunk, added in rank order."""
        return [primitives.add_up(*of_segment) for of_segment in self._by_segment(payloads, frame)]

    def refusals(self, frames: Sequence[Frame], error: NonFiniteError | None) -> Compressed:
        """Return what a rank sends that cannot compress.

        A peer may decode a message before it reads the verdict, so a refusal holds the payloads of zeros. Messages of
        variable length are only decoded if the verdict allows it, and hold the shortest buffers.
        """
        return Compressed(tuple(map(self._refusal, frames)), (), error)

    def _refusal(self, frame: Frame) -> Array:
        xp = array_namespace(self.like)
        payloads = []
        for compressor, spec, segment, dtype in zip(
            frame.compressors, frame.specs, frame.chunk, frame.dtypes, strict=True
        ):
            if frame.variable_length:
                data = xp.zeros((spec.shortest,), dtype=xp.uint8, device=device(self.like))
            else:
                zeros = xp.zeros((segment.size,), dtype=getattr(xp, dtype), device=device(self.like))
                data = primitives.encode(compressor, zeros, None, Key()).data
            payloads.append(data)
        return frame.join(payloads, self._byte(_NON_FINITE))

    def _by_segment(
        self, payloads: Sequence[Sequence[Payload]], frame: Frame
    ) -> Iterator[tuple[Compressor, list[Payload], Array]]:
        """Yield of each segment its compressor, the payload of each rank, and an array like it."""
        for index, (compressor, segment) in enumerate(zip(frame.compressors, frame.chunk, strict=True)):
            yield compressor, [of_rank[index] for of_rank in payloads], self._like(segment)

    def _like(self, segment: Segment) -> Array:
        return self.tensors[segment.tensor][segment.start : segment.stop]

    def _split(self, rank: int, message: Array, frame: Frame) -> tuple[list[Payload], Array]:
        try:
            return frame.split(message)
        except PayloadError as error_of_message:
            raise PayloadError(f"the message from rank {rank} {error_of_message}") from error_of_message

    def _verdict(self, flags: Sequence[Array]) -> Array:
        """Return the byte that ends a message: what devices have found, without waiting for them."""
        if not flags:
            return self._byte(_FINE)
        xp = array_namespace(flags[0])
        return xp.reshape(xp.max(concat(list(flags))), (1,))

    def _byte(self, value: int) -> Array:
        xp = array_namespace(self.like)
        return xp.asarray([value], dtype=xp.uint8, device=device(self.like))


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

    def add(self, part: Array | None) -> None:
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
