"""Messages: a `Frame` joins a chunk's payloads and verdict, and a seal adds the ranks to blame for a refusal."""

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from qcomp.core.compressor import Compressor
from qcomp.core.errors import PayloadError
from qcomp.core.mean.chunks import Chunk, Segment
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    concat,
    device,
    from_host_bytes,
    host_bytes,
)
from qcomp.core.payload import Payload, PayloadSpec

_ALIGNMENT = 8
"""Every buffer within a message starts at a multiple of this many bytes, so that any dtype can be read in place."""
_NUMBER = 8
"""Bytes of a length within a message."""
_VERDICT_BYTES = 1

Bounds = tuple[int, int]
"""The fewest and the most bytes that a buffer may have."""


def joined_size(sizes: Sequence[int]) -> int:
    """Return the bytes of a message that holds buffers of these sizes."""
    return sum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes])


def join(buffers: Sequence[Array]) -> Array:
    """Join one or more uint8 buffers into one message, each padded with zeros to a multiple of 8 bytes."""
    parts = []
    for buffer in buffers:
        parts.append(buffer)
        padding = -buffer.shape[0] % _ALIGNMENT
        if padding:
            xp = array_namespace(buffer)
            parts.append(xp.zeros((padding,), dtype=xp.uint8, device=device(buffer)))
    return concat(parts)


def split(message: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the buffers of a message, the inverse of `join`."""
    buffers, start = [], 0
    for size in sizes:
        buffers.append(message[start : start + size])
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return buffers


@dataclass(frozen=True, eq=False)
class Frame:
    """How the payloads of a chunk lie in a message: a payload for each segment, then a verdict of one byte.

    If the length of any payload of the mean varies, every message begins with the lengths of its buffers.

    Parameters
    ----------
    chunk : tuple of Segment
    compressors : tuple of Compressor
        The compressor of each segment.
    dtypes : tuple of str
        The name of the dtype in which each segment is computed.
    variable_length : bool
        Whether the length of any payload of the mean varies.
    """

    chunk: Chunk
    compressors: tuple[Compressor, ...]
    dtypes: tuple[str, ...]
    variable_length: bool

    @cached_property
    def specs(self) -> tuple[PayloadSpec, ...]:
        """The layout of each payload."""
        pairs = zip(self.chunk, self.compressors, self.dtypes, strict=True)
        return tuple(compressor.payload_spec(s.size, dtype) for s, compressor, dtype in pairs)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each payload (of the longest, if its length varies) and of the verdict."""
        return (*(spec.nbytes for spec in self.specs), _VERDICT_BYTES)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each payload and the verdict start in a message without lengths."""
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in self.sizes]
        return tuple(accumulate(padded[:-1], initial=0))

    @cached_property
    def bounds(self) -> tuple[Bounds, ...]:
        """The fewest and the most bytes of each payload and of the verdict."""
        return (*((spec.shortest, spec.nbytes) for spec in self.specs), (_VERDICT_BYTES, _VERDICT_BYTES))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the message; if its length varies, of the longest message."""
        return most_bytes(self.bounds) if self.variable_length else joined_size(self.sizes)

    @cached_property
    def as_tensors(self) -> "Frame":
        """The frame of the same payloads with each segment as a whole tensor, which keeps its bucket number."""
        chunk = tuple(Segment(index, 0, s.size, s.bucket) for index, s in enumerate(self.chunk))
        return Frame(chunk, self.compressors, self.dtypes, self.variable_length)

    def join(self, payloads: Sequence[Array], verdict: Array) -> Array:
        """Return the message that consists of payloads and a verdict."""
        buffers = [*payloads, verdict]
        return join_lengths(buffers) if self.variable_length else join(buffers)

    def open(self, message: Array) -> "Opened":
        """Return the contents of a message, the inverse of `join`.

        Raises
        ------
        PayloadError
            If the message does not have this frame.
        """
        if self.variable_length:
            *buffers, verdict = split_lengths(message, self.bounds)
            return Opened(self, message, verdict, buffers)
        if message.shape != (self.nbytes,):
            raise PayloadError(f"has shape {tuple(message.shape)}; expected ({self.nbytes},)")
        return Opened(self, message, message[self.offsets[-1] :][:_VERDICT_BYTES])


class Opened:
    """A message whose frame has been checked.

    ``verdict`` is 0 unless the sender could not compress. ``buffers`` has the data of each payload if the message
    begins with the lengths of its buffers.
    """

    def __init__(
        self, frame: Frame, message: Array, verdict: Array, buffers: list[Array] | None = None
    ) -> None:
        self.frame = frame
        self.message = message
        self.verdict = verdict
        self._buffers = buffers

    @cached_property
    def payloads(self) -> list[Payload]:
        """The payload of each segment."""
        frame, buffers = self.frame, self._buffers
        if buffers is None:
            *buffers, _ = split(self.message, frame.sizes)
        parts = zip(frame.compressors, frame.chunk, frame.dtypes, buffers, strict=True)
        return [Payload(c.spec, s.stop - s.start, dtype, data) for c, s, dtype, data in parts]


def most_bytes(bounds: Sequence[Bounds]) -> int:
    """Return the bytes of the longest message whose buffers are within these bounds."""
    return joined_size([_NUMBER * len(bounds), *(most for _, most in bounds)])


def join_lengths(buffers: Sequence[Array]) -> Array:
    """Join one or more buffers into one message, after a table of their lengths.

    This runs on the host, since a library that compiles for every shape would compile for every message.
    """
    parts = [host_bytes(buffer) for buffer in buffers]
    parts.insert(0, struct.pack(f"<{len(parts)}Q", *map(len, parts)))
    padded = (part + bytes(-len(part) % _ALIGNMENT) for part in parts)
    return from_host_bytes(b"".join(padded), buffers[0])


def split_lengths(message: Array, bounds: Sequence[Bounds]) -> list[Array]:
    """Return the buffers of a message, the inverse of `join_lengths`; PayloadError if a length is out of bounds."""
    raw = host_bytes(message)
    start = _NUMBER * len(bounds)
    if len(raw) < start:
        raise PayloadError(f"has {len(raw)} bytes; expected {start} for the lengths of {len(bounds)} buffers")
    lengths = struct.unpack_from(f"<{len(bounds)}Q", raw)
    for length, (least, most) in zip(lengths, bounds, strict=True):
        if not least <= length <= most:
            raise PayloadError(f"announces a buffer of {length} bytes; expected {least} to {most}")
    expected = joined_size([start, *lengths])
    if len(raw) != expected:
        raise PayloadError(f"has {len(raw)} bytes; expected {expected} for buffers of {lengths} bytes")
    return [from_host_bytes(part, message) for part in split(raw[start:], lengths)]


def seal(message: Array, blamed: Collection[int], ranks: int) -> Array:
    """Return a message with a byte added for each rank, which is 1 if that rank is to blame for a refusal."""
    flags = from_host_bytes(bytes(rank in blamed for rank in range(ranks)), message)
    return join([message, flags])


def sealed_size(size: int, ranks: int) -> int:
    """Return the bytes of a sealed message that has ``size`` bytes without the seal."""
    return joined_size([size, ranks])


def unseal(sealed: Array, ranks: int) -> tuple[Array, set[int]]:
    """Return a message without its seal, and the ranks to blame if it is a refusal; an empty set blames the sender."""
    end = sealed.shape[0] - joined_size([ranks])
    flags = host_bytes(sealed[end : end + ranks])
    return sealed[:end], {rank for rank, flag in enumerate(flags) if flag}
