"""`Codec`: compresses chunks into messages, with feedback, and decodes or averages the messages of the ranks."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError, PayloadError
from qcomp.core.kernels import Blend, Encoded, EncodedFrame, chosen, takes_blends
from qcomp.core.mean.chunks import Chunk, Segment
from qcomp.core.mean.framing import Frame, Opened, unseal
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    concat,
    device,
    host_bytes,
    is_mutable,
    is_traced,
)
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload
from qcomp.core.reporting import name_ranks

_FINE, _NON_FINITE = 0, 1
_FRAME, _MESSAGE, _VERDICT = attrgetter("frame"), attrgetter("message"), attrgetter("verdict")


class Compressed(NamedTuple):
    """What one rank has compressed for one exchange."""

    messages: tuple[Array, ...]
    """A message for each chunk."""
    residuals: tuple[Array, ...]
    """The new residual of each tensor, flat; empty without feedback."""
    error: NonFiniteError | None
    """The error that kept this rank from compressing. The messages are then refusals, and every rank will raise."""


class Verdicts:
    """The verdicts of the ranks on their values, read once for all exchanges of a mean.

    A rank that cannot compress, because a value is not finite, sends refusals to all its peers: so no rank blocks, and
    all raise in the same stage. A verdict is part of a message on the device, and reading it makes the host wait for
    the device. So verdicts are collected, and read when the last has arrived. Until then the ranks continue even after
    a refusal, and results made from refusals are discarded.

    Parameters
    ----------
    at_once : bool
        Whether each exchange's verdicts are read as they arrive. It must be the same on all ranks. True is required for
        messages of variable length, since their refusals cannot be decoded.
    """

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self._unread: list[list[Array]] = []

    def add(self, verdicts: list[Array], error: NonFiniteError | None) -> None:
        """Take the verdicts in the messages of all ranks; see `require_accepted`."""
        self._unread.append(verdicts)
        if self.at_once:
            self.require_accepted(error)

    def require_accepted(self, error: NonFiniteError | None) -> tuple[Array, ...]:
        """Read all verdicts, and raise the same `NonFiniteError` on every rank if any rank has refused.

        The error blames the ranks that refused in the first exchange with a refusal. It is raised from ``error``, which
        kept this rank from compressing.

        Returns the verdicts that cannot be read, because a compiler is tracing; see `Averaged.verdicts`.
        """
        unread, self._unread = self._unread, []
        if not unread:
            return ()
        verdicts = concat(list(chain.from_iterable(unread)))
        if is_traced(verdicts):
            return (verdicts,)
        flags = host_bytes(verdicts)
        start = 0
        for of_exchange in unread:
            found = flags[start : start + len(of_exchange)]
            start += len(of_exchange)
            if any(found):
                raise refused_by([rank for rank, flag in enumerate(found) if flag != _FINE]) from error
        return ()


def refused_by(ranks: Sequence[int]) -> NonFiniteError:
    """Return the error that every rank raises if some ranks have refused."""
    return NonFiniteError(f"a value on {name_ranks(ranks)} is not finite, or too large to compress")


class Codec:
    """Compresses the segments of chunks into messages, and decompresses them.

    Parameters
    ----------
    tensors : sequence of arrays
        Flat arrays like the tensors that will be decoded: with their sizes, dtype, library and device.
    like : array, optional
        Gives library and device, if there may be no tensor.
    """

    def __init__(self, tensors: Sequence[Array], like: Array | None = None) -> None:
        self.tensors = tensors
        self.like = tensors[0] if like is None else like
        self._kernels = chosen(self.like) if tensors else None  # kernels read the library of the first tensor

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

        A tensor's segments come in order, and together cover the tensor. With ``donate`` the new residuals overwrite
        the tensors; the old residuals are never written to, so that they survive if any rank refuses. With ``blends``,
        the tensors are blended into momenta, which are compressed instead. ``into`` may hold a buffer for each tensor's
        new residual; with ``donate`` it is not used.
        """
        over_values = bool(residuals) and donate and all(map(is_mutable, tensors))
        buffers: Sequence[Any] = (
            tensors if over_values else residuals and (into or primitives.empty_likes(residuals))
        )
        kernel = getattr(self._kernels, "encode_frames", None)
        if kernel and not takes_blends(self._kernels, blends):
            kernel = None
        try:
            messages: list[Array] | None = kernel and kernel(
                frames, tensors, residuals, buffers, key, blends=blends
            )
            if messages is not None:
                return Compressed(tuple(messages), tuple(buffers), None)
            news = _NewResiduals(residuals, buffers, over_values=over_values)
            messages = self._encode_each(frames, tensors, news, key, blends)
        except NonFiniteError as error:
            return self.refusals(frames, error)
        return Compressed(tuple(messages), news.whole(), None)

    def _encode_each(
        self,
        frames: Sequence[Frame],
        tensors: Sequence[Array],
        news: "_NewResiduals",
        key: Key,
        blends: Sequence[Blend],
    ) -> list[Array]:
        """Compress the segments of each chunk in order, and return the message of each chunk."""
        of_chunks = [_encode_chunk(frame, tensors, news, key, blends) for frame in frames]
        verdict = self._verdict([encoded for of_chunk in of_chunks for encoded in of_chunk])
        # A message is a copy of its payloads: freeing the payloads chunk by chunk halves the memory.
        return [frame.join([encoded.data for encoded in of_chunks.pop(0)], verdict) for frame in frames]

    def encode_average(
        self,
        opened: Sequence[Opened],
        residuals: Sequence[Array],
        key: Key,
        *,
        into: Sequence[Array | None] = (),
    ) -> Compressed:
        """Compress the mean that `average` would return, with feedback if there is a residual for each segment.

        The new residuals are written to the buffers of ``into``, if there are any.
        """
        frame = opened[0].frame
        kernel = getattr(self._kernels, "compress_mean_frame", None)
        compressed: EncodedFrame | None = kernel and kernel(
            frame, list(map(_MESSAGE, opened)), self.like, residuals, key, into=into
        )
        if compressed is not None:
            return Compressed((compressed.message,), compressed.residuals, None)
        parts = []
        buffers = into or [None] * len(frame.chunk)
        try:
            for index, (compressor, of_ranks, like) in enumerate(self._by_segment(opened)):
                encoded = primitives.compress_mean(
                    compressor,
                    of_ranks,
                    like,
                    residuals[index] if residuals else None,
                    key.at(bucket=key.bucket + frame.chunk[index].bucket),
                    out=buffers[index],
                )
                parts.append(encoded)
        except NonFiniteError as error:
            return self.refusals([frame], error)
        message = frame.join([encoded.data for encoded in parts], self._verdict(parts))
        return Compressed((message,), tuple(e.residual for e in parts if e.residual is not None), None)

    def open(
        self,
        messages: Sequence[Array],
        frames: Sequence[Frame],
        verdicts: Verdicts,
        error: NonFiniteError | None,
    ) -> list[Opened]:
        """Return the contents of each rank's message, and add the verdicts of the messages to ``verdicts``.

        Raises
        ------
        PayloadError
            If a message does not have its frame.
        """
        opened: list[Opened] = []
        try:
            for message, frame in zip(messages, frames, strict=True):
                opened.append(frame.open(message))
        except PayloadError as error_of_message:
            raise PayloadError(
                f"the message from rank {len(opened)} {error_of_message}"
            ) from error_of_message
        verdicts.add(list(map(_VERDICT, opened)), error)
        return opened

    def open_from(self, rank: int, message: Array, frame: Frame) -> Opened:
        """Return the contents of a message from a rank, without reading its verdict."""
        try:
            return frame.open(message)
        except PayloadError as error_of_message:
            raise PayloadError(f"the message from rank {rank} {error_of_message}") from error_of_message

    def refuses(self, message: Array, frame: Frame, rank: int) -> bool:
        """Read the verdict of a message from a rank, and return whether the message is a refusal."""
        return int(self.open_from(rank, message, frame).verdict[0]) != _FINE

    def decode(self, opened: Opened) -> list[Array]:
        """Return the values of the segments of a chunk."""
        return self._decode(opened)

    def decode_tensors(self, opened: Sequence[Opened]) -> list[Array]:
        """Return the tensors that these chunks hold; a tensor without segments is returned as this codec has it."""
        return assemble([one.frame.chunk for one in opened], list(map(self._decode, opened)), self.tensors)

    def decode_into(self, places: Sequence[Array], opened: Sequence[Opened]) -> None:
        """Write the values of all chunks' segments into ``places``, a buffer for each tensor."""
        kernel = getattr(self._kernels, "decode_frames", None)
        if kernel and kernel(list(map(_FRAME, opened)), list(map(_MESSAGE, opened)), places):
            return
        for one in opened:
            self._decode(one, places)

    def _decode(self, opened: Opened, places: Sequence[Array] | None = None) -> list[Array]:
        frame = opened.frame
        return [
            primitives.decode(compressor, payload, self._like(segment), out=_part(places, segment))
            for compressor, payload, segment in zip(
                frame.compressors, opened.payloads, frame.chunk, strict=True
            )
        ]

    def average(
        self, opened: Sequence[Opened], places: Sequence[Array] | None = None, *, divisor: str = "ranks"
    ) -> list[Array]:
        """Return the mean over ranks of the segments of a chunk, added in rank order; see `primitives.finish_mean`.

        With ``places``, a buffer for each tensor, the means are written there; the returned list may then be empty.
        ``divisor`` is as for `CompressedMean`.
        """
        frame = opened[0].frame
        if divisor == "senders":
            return [
                primitives.average_of_senders(*of_segment, out=_part(places, segment))
                for of_segment, segment in zip(self._by_segment(opened), frame.chunk, strict=True)
            ]
        kernel = getattr(self._kernels, "average_frame", None)
        if kernel and places is not None and kernel(frame, list(map(_MESSAGE, opened)), places):
            return []
        return [
            primitives.average(*of_segment, out=_part(places, segment))
            for of_segment, segment in zip(self._by_segment(opened), frame.chunk, strict=True)
        ]

    def total(self, opened: Sequence[Opened]) -> list[Array]:
        """Return the sum over ranks of the segments of a chunk, added in rank order."""
        return [primitives.add_up(*of_segment) for of_segment in self._by_segment(opened)]

    def refusals(self, frames: Sequence[Frame], error: NonFiniteError | None) -> Compressed:
        """Return the messages of a rank that cannot compress.

        A peer may decode a message before it reads the verdict, so a refusal holds the payloads of zeros. Messages of
        variable length are only decoded if the verdict allows it, so their refusals hold the shortest buffers.
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

    def _by_segment(self, opened: Sequence[Opened]) -> Iterator[tuple[Compressor, list[Payload], Array]]:
        """Yield, for each segment, its compressor, the payload of each rank, and an array like it."""
        frame = opened[0].frame
        for index, (compressor, segment) in enumerate(zip(frame.compressors, frame.chunk, strict=True)):
            yield compressor, [one.payloads[index] for one in opened], self._like(segment)

    def _like(self, segment: Segment) -> Array:
        return self.tensors[segment.tensor][segment.start : segment.stop]

    def _verdict(self, compressed: Sequence[Encoded]) -> Array:
        """Return the byte that ends a message: the devices' verdict, without waiting for the devices."""
        flags = [encoded.refused for encoded in compressed if encoded.refused is not None]
        if not flags:
            return self._byte(_FINE)
        xp = array_namespace(flags[0])
        return xp.reshape(xp.max(concat(flags)), (1,))

    def _byte(self, value: int) -> Array:
        xp = array_namespace(self.like)
        return xp.asarray([value], dtype=xp.uint8, device=device(self.like))


def unsealed(codec: Codec, sealed: Array, frame: Frame, sender: int, ranks: int) -> tuple[Array, set[int]]:
    """Return a sealed message without its seal, and the ranks to blame: none, unless the message is a refusal."""
    message, accused = unseal(sealed, ranks)
    return message, (accused or {sender}) if codec.refuses(message, frame, sender) else set()


class _NewResiduals:
    """The new residuals of tensors: buffers that are filled part by part, or, for immutable arrays, a list of parts."""

    def __init__(self, old: Sequence[Array], buffers: Sequence[Array | None], *, over_values: bool) -> None:
        self.old = old
        self.buffers = buffers
        self._over_values = over_values
        self._parts: list[list[Array]] = [[] for _ in old]

    def buffer(self, tensor: int, part: slice, values: Array) -> Array | None:
        """Return the buffer for a part of a residual: with ``over_values``, it is ``values``, that part of a tensor."""
        if not self.old:
            return None
        if self._over_values:
            return values
        buffer = self.buffers[tensor]
        return None if buffer is None else buffer[part]

    def add(self, tensor: int, part: Array | None) -> None:
        """Take the next part of a residual; it is already in its buffer if it has one."""
        if part is not None and self.buffers[tensor] is None:
            self._parts[tensor].append(part)

    def whole(self) -> tuple[Array, ...]:
        """Return the new residuals."""
        return tuple(
            [
                buffer if buffer is not None else concat(parts) if parts else old
                for buffer, parts, old in zip(self.buffers, self._parts, self.old, strict=True)
            ]
        )


def _encode_chunk(
    frame: Frame, tensors: Sequence[Array], news: _NewResiduals, key: Key, blends: Sequence[Blend]
) -> list[Encoded]:
    """Compress the segments of a chunk in order."""
    found = []
    for compressor, (tensor, start, stop, bucket) in zip(frame.compressors, frame.chunk, strict=True):
        part = slice(start, stop)
        values = tensors[tensor][part]
        encoded = primitives.encode(
            compressor,
            values,
            news.old[tensor][part] if news.old else None,
            key.at(bucket=key.bucket + bucket),
            out=news.buffer(tensor, part, values),
            blend=blends[tensor].cut(part) if blends else None,
        )
        news.add(tensor, encoded.residual)
        found.append(encoded)
    return found


def _part(places: Sequence[Array] | None, segment: Segment) -> Array | None:
    return None if places is None else places[segment.tensor][segment.start : segment.stop]


def assemble(
    chunks: Sequence[Chunk], values: Sequence[Sequence[Array]], like: Sequence[Array]
) -> list[Array]:
    """Return the tensors that consist of these segments; a tensor without segments is taken from ``like``."""
    parts: list[list[Array]] = [[] for _ in like]
    for chunk, of_chunk in zip(chunks, values, strict=True):
        for segment, value in zip(chunk, of_chunk, strict=True):
            parts[segment.tensor].append(value)
    return [concat(p) if p else x for p, x in zip(parts, like, strict=True)]


def unless_refused(means: Sequence[Array], verdicts: Sequence[Array]) -> Sequence[Array]:
    """Return the means, or NaN if a traced verdict is a refusal, since compiled programs cannot raise errors."""
    if not verdicts:
        return means
    xp = array_namespace(verdicts[0])
    refused = xp.max(concat(list(verdicts))) > 0
    return [xp.where(refused, xp.asarray(math.nan, dtype=mean.dtype), mean) for mean in means]
