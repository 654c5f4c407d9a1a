"""Messages of a compressed mean: the payloads of several segments and a verdict, in one buffer."""

from collections.abc import Sequence
from typing import NamedTuple

from qcomp.core import feedback
from qcomp.core.arrays import Array, array_namespace, device, divide, dtype_name, flush
from qcomp.core.chunks import Segment
from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError, PayloadError
from qcomp.core.payload import Payload
from qcomp.core.random import Key
from qcomp.core.transport import join, joined_size, split

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

    Parameters
    ----------
    compressor : Compressor
        Of every segment.
    tensors : sequence of arrays
        Flat arrays of the sizes, dtype, library and device of what will be decoded.
    """

    def __init__(self, compressor: Compressor, tensors: Sequence[Array]) -> None:
        self.compressor = compressor
        self.tensors = tensors
        self.dtype = dtype_name(tensors[0].dtype)

    def message_size(self, chunk: Chunk) -> int:
        """Return the bytes of the message of a chunk."""
        return joined_size(self._buffer_sizes(chunk))

    def encode(
        self, chunks: Sequence[Chunk], tensors: Sequence[Array], residuals: Sequence[Array], key: Key
    ) -> Encoded:
        """Compress all chunks of these tensors, with feedback if there are residuals."""
        lost: list[list[Array]] = [[] for _ in residuals]
        messages = []
        try:
            for chunk in chunks:
                buffers = []
                for segment in chunk:
                    part = slice(segment.start, segment.stop)
                    values, own_key = tensors[segment.tensor][part], key.at(bucket=segment.bucket)
                    if residuals:
                        residual = residuals[segment.tensor][part]
                        payload, rest = feedback.compress(self.compressor, values, residual, key=own_key)
                        lost[segment.tensor].append(rest)
                    else:
                        payload = self.compressor.compress(values, key=own_key)
                    buffers.append(payload.data)
                messages.append(join([*buffers, self._verdict(_FINE)]))
        except NonFiniteError as error:
            return Encoded(tuple(self._refusal(chunk) for chunk in chunks), (), error)
        return Encoded(tuple(messages), tuple(map(_concat, lost, residuals)), None)

    def open(
        self, messages: Sequence[Array], chunks: Sequence[Chunk], error: NonFiniteError | None
    ) -> list[list[Payload]]:
        """Return the payloads of a message from each rank.

        Raises
        ------
        NonFiniteError
            On every rank alike, if any rank has refused.
        """
        opened, refused = [], []
        for rank, (message, chunk) in enumerate(zip(messages, chunks, strict=True)):
            if message.shape != (self.message_size(chunk),):
                raise PayloadError(
                    f"the message from rank {rank} has shape {tuple(message.shape)}; "
                    f"expected ({self.message_size(chunk)},)"
                )
            *buffers, verdict = split(message, self._buffer_sizes(chunk))
            if int(verdict[0]) != _FINE:
                refused.append(rank)
            opened.append(
                [
                    Payload(self.compressor.spec, segment.size, self.dtype, buffer)
                    for segment, buffer in zip(chunk, buffers, strict=True)
                ]
            )
        if refused:
            ranks = ", ".join(map(str, refused))
            raise NonFiniteError(
                f"a value on rank {ranks} is not finite, or too large to compress"
            ) from error
        return opened

    def decode(self, payloads: Sequence[Payload], chunk: Chunk) -> list[Array]:
        """Return the values of the segments of a chunk."""
        return [
            self.compressor.decompress(payload, like=self._like(segment))
            for payload, segment in zip(payloads, chunk, strict=True)
        ]

    def average(self, payloads: Sequence[Sequence[Payload]], chunk: Chunk) -> list[Array]:
        """Return the mean over ranks of the segments of a chunk, added in rank order; below 2^-126 it is zero."""
        total = self.decode(payloads[0], chunk)
        for of_rank in payloads[1:]:
            total = [self.compressor.add(payload, t) for payload, t in zip(of_rank, total, strict=True)]
        return [flush(divide(values, len(payloads))) for values in total]

    def _like(self, segment: Segment) -> Array:
        return self.tensors[segment.tensor][segment.start : segment.stop]

    def _buffer_sizes(self, chunk: Chunk) -> list[int]:
        return [*(self.compressor.payload_spec(s.size, self.dtype).nbytes for s in chunk), 1]

    def _verdict(self, value: int) -> Array:
        like = self.tensors[0]
        xp = array_namespace(like)
        return xp.asarray([value], dtype=xp.uint8, device=device(like))

    def _refusal(self, chunk: Chunk) -> Array:
        like = self.tensors[0]
        xp = array_namespace(like)
        *sizes, _ = self._buffer_sizes(chunk)
        buffers = [xp.zeros((size,), dtype=xp.uint8, device=device(like)) for size in sizes]
        return join([*buffers, self._verdict(_NON_FINITE)])


def _concat(parts: list[Array], like: Array) -> Array:
    if not parts:
        return like
    return parts[0] if len(parts) == 1 else array_namespace(like).concat(parts)
