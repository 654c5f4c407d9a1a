"""What a pure stage asks of the outside world, and the loop that answers it over a communicator."""

from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from qcomp.core.arrays import Array, array_namespace, concat, device

__all__ = ["AllGather", "AllToAll", "Exchange", "Stages", "Transport", "drive", "fuse", "join", "split"]

Result = TypeVar("Result")

_ALIGNMENT = 8
"""Every buffer within a message starts at a multiple of this, so that any dtype can be read in place."""


class AllToAll(NamedTuple):
    """Buffer r goes to rank r; ``receive[r]`` bytes come from rank r."""

    send: tuple[Array, ...]
    receive: tuple[int, ...]


class AllGather(NamedTuple):
    """One buffer goes to every rank; ``receive[r]`` bytes come from rank r."""

    send: Array
    receive: tuple[int, ...]


Exchange = AllToAll | AllGather
Stages = Generator[Exchange, list[Array], Result]
"""A computation in stages: it yields what must be exchanged, and is sent one uint8 buffer from each rank."""


class Transport(Protocol):
    """The part of a communicator that the core needs; see `qcomp.comm.Communicator`."""

    @property
    def rank(self) -> int:
        """Number of the process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_to_all(self, send: Sequence[Array], receive: Sequence[int]) -> list[Array]:
        """Send ``send[r]`` to rank r; return what each rank sent here."""
        ...

    def all_gather(self, send: Array, receive: Sequence[int]) -> list[Array]:
        """Send ``send`` to every rank; return what each rank sent."""
        ...


def drive(stages: "Stages[Result]", comm: Transport) -> Result:
    """Run a computation in stages to its end over a communicator and return its result."""
    arrived: list[Array] | None = None
    while True:
        try:
            request = next(stages) if arrived is None else stages.send(arrived)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        if isinstance(request, AllToAll):
            arrived = comm.all_to_all(request.send, request.receive)
        else:
            arrived = comm.all_gather(request.send, request.receive)


def fuse(computations: "Sequence[Stages[Result]]") -> "Stages[list[Result]]":
    """Run several computations side by side, with one message a peer and stage for all of them.

    They may have different kinds and numbers of exchanges, the same on all ranks.
    """
    results: dict[int, Result] = {}
    arrived: dict[int, list[Array] | None] = dict.fromkeys(range(len(computations)))
    while True:
        requests: dict[int, Exchange] = {}
        for index, buffers in arrived.items():
            stages = computations[index]
            try:
                requests[index] = next(stages) if buffers is None else stages.send(buffers)
            except StopIteration as stop:
                results[index] = stop.value
        if not requests:
            return [results[index] for index in range(len(computations))]
        received = yield _merge(list(requests.values()))
        parts: dict[int, list[Array]] = {index: [] for index in requests}
        for rank, message in enumerate(received):
            sizes = [request.receive[rank] for request in requests.values()]
            for index, buffer in zip(requests, split(message, sizes), strict=True):
                parts[index].append(buffer)
        arrived = {**parts}


def _merge(requests: list[Exchange]) -> Exchange:
    """Return one exchange with the buffers of several."""
    if len(requests) == 1:
        return requests[0]
    ranks = range(len(requests[0].receive))
    receive = tuple(joined_size([request.receive[rank] for request in requests]) for rank in ranks)
    to_all = [request.send for request in requests if isinstance(request, AllGather)]
    if len(to_all) == len(requests):
        return AllGather(join(to_all), receive)

    def share(request: Exchange, rank: int) -> Array:
        return request.send[rank] if isinstance(request, AllToAll) else request.send

    return AllToAll(tuple(join([share(request, rank) for request in requests]) for rank in ranks), receive)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def joined_size(sizes: Sequence[int]) -> int:
    """Return the bytes of a message of buffers of these sizes."""
    return sum(map(_aligned, sizes))


def join(buffers: Sequence[Array]) -> Array:
    """Join one or more uint8 buffers into one message, each padded with zeros to a multiple of 8 bytes."""
    xp = array_namespace(*buffers)
    parts = []
    for buffer in buffers:
        parts.append(buffer)
        padding = _aligned(buffer.shape[0]) - buffer.shape[0]
        if padding:
            parts.append(xp.zeros((padding,), dtype=xp.uint8, device=device(buffer)))
    return concat(parts)


def split(message: Array, sizes: Sequence[int]) -> list[Array]:
    """Return the buffers of a message, the inverse of `join`."""
    buffers, start = [], 0
    for size in sizes:
        buffers.append(message[start : start + size])
        start += _aligned(size)
    return buffers
