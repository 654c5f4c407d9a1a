"""Messages whose lengths depend on what is in them: announced, checked, and taken apart again."""

import struct
from collections.abc import Sequence
from typing import TypeVar

from qcomp.core.errors import PayloadError
from qcomp.core.mean.stages import AllGather, AllToAll, Stages, joined_size
from qcomp.core.numeric.arrays import Array, from_host_bytes, host_bytes

__all__ = ["Bounds", "announce_lengths", "join_lengths", "most_bytes", "split_lengths"]

Result = TypeVar("Result")

Bounds = tuple[int, int]
"""The fewest and the most bytes that a buffer may have."""

_NUMBER = 8


def announce_lengths(stages: "Stages[Result]", rank: int) -> "Stages[Result]":
    """Run a computation whose messages may be shorter than the receivers are ready for.

    Before each of its exchanges all ranks tell each other how long their messages are, and how long they may be.

    Parameters
    ----------
    stages : generator
        What it yields has the bytes of the longest message in ``receive``.
    rank : int
        Number of this rank.

    Raises
    ------
    PayloadError
        On every rank alike, if any message is longer than its receiver allows: before that is received, or memory for
        it is taken, and with nobody left waiting.

    Notes
    -----
    Sends 16 bytes a rank to each of the others in a stage of its own. Every rank is told about all messages,
    and not only about its own, because all must come to the same verdict.
    """
    arrived: Sequence[Array] | None = None
    while True:
        try:
            request = next(stages) if arrived is None else stages.send(arrived)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        ranks = range(len(request.receive))
        send = request.send if isinstance(request, AllToAll) else (request.send,) * len(ranks)
        numbers = *(buffer.shape[0] for buffer in send), *request.receive
        layout = f"<{len(numbers)}Q"
        tables = yield AllGather(
            from_host_bytes(struct.pack(layout, *numbers), send[0]), (struct.calcsize(layout),) * len(ranks)
        )
        told = [struct.unpack(layout, host_bytes(table)) for table in tables]
        for source in ranks:
            for target in ranks:
                length, most = told[source][target], told[target][len(ranks) + source]
                if length > most:
                    raise PayloadError(
                        f"rank {source} has a message of {length} bytes for rank {target}; expected at most {most}"
                    )
        arrived = yield request._replace(receive=tuple(told[source][rank] for source in ranks))


def most_bytes(bounds: Sequence[Bounds]) -> int:
    """Return the bytes of the longest message of buffers within these bounds."""
    return joined_size([_NUMBER * len(bounds), *(most for _, most in bounds)])


def join_lengths(buffers: Sequence[Array]) -> Array:
    """Join one or more buffers into one message, after a table of their lengths.

    On the host: a library that compiles for every shape would do so for every message.
    """
    parts = [host_bytes(buffer) for buffer in buffers]
    parts.insert(0, struct.pack(f"<{len(parts)}Q", *map(len, parts)))
    padded = (part + bytes(joined_size([len(part)]) - len(part)) for part in parts)
    return from_host_bytes(b"".join(padded), buffers[0])


def split_lengths(message: Array, bounds: Sequence[Bounds]) -> list[Array]:
    """Return the buffers of a message, the inverse of `join_lengths`.

    Raises
    ------
    PayloadError
        If the message is not one of buffers within these bounds.
    """
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
    buffers = []
    for length in lengths:
        buffers.append(from_host_bytes(raw[start : start + length], message))
        start += joined_size([length])
    return buffers
