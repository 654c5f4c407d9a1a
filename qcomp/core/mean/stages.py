"""Computations in stages: the exchanges that they request, and `drive`, which makes these over a communicator."""

import contextlib
import itertools
import struct
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeVar, overload
from weakref import WeakKeyDictionary

from qcomp.core.errors import CommunicatorError, MismatchError, PayloadError
from qcomp.core.mean.framing import join, joined_size, split
from qcomp.core.numeric.arrays import Array, from_host_bytes, host_bytes
from qcomp.core.reporting import name_ranks

Result = TypeVar("Result")

_DIFFERENT = "the ranks exchange for different optimizers or steps"
_SAME_STEPS = (
    "all ranks must make the same steps of the same optimizers in the same order, and continue from states of the same "
    "step; an optimizer in a thread of its own needs a communicator of its own"
)
_DIGEST_BYTES = 8
_NAMED = 3
"""How many names of parameters an error lists."""


_numbers: "WeakKeyDictionary[Transport, itertools.count[int]]" = WeakKeyDictionary()


class StartNumber(int):
    """The number of an `Owner` over a communicator. All numbers compare equal, so comparisons of states ignore them."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    def __hash__(self) -> int:
        return 0


class Owner(NamedTuple):
    """The computation to which an exchange belongs, such as a step of an optimizer; not the owner of a tensor.

    Communicators refuse an exchange for which the ranks have different owners. Otherwise two ranks that step two
    optimizers in different orders would average gradients of different models.
    """

    kind: str
    """The kind of owner, such as "OneBitAdam"."""
    number: int
    """Number of the owner among all optimizers and means that started over its communicator; 0 if unknown."""
    names: tuple[str, ...]
    """The names of the owner's parameters."""
    stream: int
    """A digest of the parameters' names and shapes."""
    doing: str
    """What the owner does, such as "step 5 (warmup)"."""
    advice: str = _SAME_STEPS
    """The advice in the error that is raised if other ranks do something else."""

    @property
    def digest(self) -> int:
        """A number below 2^63 that differs between owners, and between steps."""
        text = f"{self.kind} {self.number} {self.stream} {self.doing}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def __str__(self) -> str:
        number = f" number {self.number}" if self.number else ""
        shown = ", ".join(map(repr, self.names[:_NAMED]))
        more = f" and {len(self.names) - _NAMED} more" if len(self.names) > _NAMED else ""
        return f"{self.doing} of {self.kind}{number}" + (f" with {shown}{more}" if shown else "")


class AllToAll(NamedTuple):
    """Buffer r goes to rank r; ``receive[r]`` bytes come from rank r."""

    send: tuple[Array, ...]
    receive: tuple[int, ...]
    later: bool = False
    """Whether the computation starts more exchanges before it reads what arrives; see `pipeline`."""
    owner: Owner | None = None
    """The owner of the exchange, if ranks must compare it; see `owned`."""


class AllGather(NamedTuple):
    """One buffer goes to every rank; ``receive[r]`` bytes come from rank r."""

    send: Array
    receive: tuple[int, ...]
    later: bool = False
    """As for `AllToAll`."""
    owner: Owner | None = None
    """As for `AllToAll`."""


Exchange = AllToAll | AllGather
"""What a computation in stages asks for: one exchange between all ranks."""

Stages = Generator[Exchange, Sequence[Array], Result]
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


def require_communicator(comm: object) -> None:
    """Raise TypeError unless an argument is a communicator."""
    if not hasattr(comm, "all_gather"):
        raise TypeError(
            f"comm is {comm!r}; expected a communicator of qcomp: qcomp.comm.world(), or for instance "
            "qcomp.comm.MPICommunicator(MPI.COMM_WORLD) or qcomp.comm.TorchCommunicator(process_group)"
        )


def require_rank(state: Any, comm: Transport) -> None:
    """Raise ValueError unless a communicator has the rank and size of a state."""
    require_communicator(comm)
    if (comm.rank, comm.size) != (state.rank, state.size):
        raise ValueError(
            f"comm is rank {comm.rank} of {comm.size}; state belongs to rank {state.rank} of {state.size}"
        )


class _Pending(Protocol):
    def wait(self) -> list[Array]: ...


class Arriving(Sequence[Array]):
    """The buffers that the ranks send to this rank; reading one waits for the arrival of all."""

    def __init__(self, pending: _Pending) -> None:
        self._pending: _Pending | None = pending
        self._received: list[Array] = []

    @property
    def is_over(self) -> bool:
        """Whether this rank has waited for the exchange."""
        return self._pending is None

    def wait(self) -> list[Array]:
        """Return the buffers; if the exchange fails, this raises once, and the communicator is closed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._received = pending.wait()
        return self._received

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Array]: ...
    def __getitem__(self, index: int | slice) -> Array | Sequence[Array]:
        return self.wait()[index]

    def __len__(self) -> int:
        return len(self.wait())


def drive(stages: "Stages[Result]", comm: Transport) -> Result:
    """Run a computation in stages to its end over a communicator and return its result.

    If the communicator has a ``start``, an exchange with ``later`` is only started, and the computation continues.
    Every other exchange completes before the computation continues.
    """
    arrived: Sequence[Array] | None = None
    under_way: list[Arriving] = []
    try:
        while True:
            try:
                request = next(stages) if arrived is None else stages.send(arrived)
            except StopIteration as stop:
                result: Result = stop.value
                break
            if under_way:
                under_way = [exchange for exchange in under_way if not exchange.is_over]
            arrived = answer(request, comm)
            if isinstance(arrived, Arriving):
                under_way.append(arrived)
        for exchange in under_way:
            exchange.wait()
    except Exception:
        # All ranks start the same exchanges, now or later; completing them leaves the communicator usable.
        for exchange in under_way:
            with contextlib.suppress(CommunicatorError):
                exchange.wait()
        raise
    return result


def answer(request: Exchange, comm: Transport) -> Sequence[Array]:
    """Make an exchange over a communicator, compare its owner between the ranks, and return what arrives."""
    if request.later and hasattr(comm, "start"):
        return begun(request, comm)
    arrived: Sequence[Array]
    compares = getattr(comm, "compares_owners", False)
    if compares and (run := getattr(comm, "run", None)) is not None:
        arrived = run(request)
        return arrived
    require_communicator(comm)
    sent = request if compares or request.owner is None else _with_digests(request)
    if isinstance(sent, AllToAll):
        arrived = comm.all_to_all(sent.send, sent.receive)
    else:
        arrived = comm.all_gather(sent.send, sent.receive)
    return arrived if sent is request else _without_digests(arrived, request, comm.rank)


def begun(request: Exchange, comm: Any) -> Arriving:
    """Start an exchange over a communicator that has ``start``, and compare its owner between the ranks."""
    if request.owner is None or getattr(comm, "compares_owners", False):
        return Arriving(comm.start(request))
    return Arriving(_Compared(comm.start(_with_digests(request)), request, comm.rank))


class _Compared(NamedTuple):
    """A started exchange whose messages end with digests."""

    pending: _Pending
    request: Exchange
    rank: int

    def wait(self) -> list[Array]:
        return _without_digests(self.pending.wait(), self.request, self.rank)


def _with_digests(request: Exchange) -> Exchange:
    """Return the exchange of messages that end with a digest of their owner."""
    assert request.owner is not None
    own = request.owner.digest.to_bytes(_DIGEST_BYTES, "little")
    receive = tuple(joined_size([size, _DIGEST_BYTES]) for size in request.receive)

    def sealed(buffer: Array) -> Array:
        return join([buffer, from_host_bytes(own, buffer)])

    if isinstance(request, AllToAll):
        return request._replace(send=tuple(map(sealed, request.send)), receive=receive)
    return request._replace(send=sealed(request.send), receive=receive)


def _without_digests(arrived: Sequence[Array], request: Exchange, rank: int) -> list[Array]:
    """Return the messages that have arrived; raise if one has another owner."""
    parts = [split(x, [size, _DIGEST_BYTES]) for x, size in zip(arrived, request.receive, strict=True)]
    digests = [host_bytes(digest) for _, digest in parts]
    others = [peer for peer, digest in enumerate(digests) if digest != digests[rank]]
    if others:
        texts = {rank: told(request.owner)} | dict.fromkeys(others, "something else")
        raise MismatchError(other_owners(texts, request.owner))
    return [buffer for buffer, _ in parts]


def told(owner: Owner | None) -> str:
    """Return what a rank tells the others about the owner of its exchange."""
    return "no optimizer" if owner is None else str(owner)


def other_owners(texts: "Mapping[int, str]", own: Owner | None, how: str = "at the same time") -> str:
    """Return the error text for ranks that exchange for different owners, from the text that each rank `told`."""
    ranks_of = defaultdict(list)
    for rank, owner in sorted(texts.items()):
        ranks_of[owner].append(rank)
    named = "; ".join(f"{name_ranks(ranks)}: {owner}" for owner, ranks in ranks_of.items())
    advice = _SAME_STEPS if own is None else own.advice
    return f"{_DIFFERENT} {how} ({named}): {advice}"


def as_mismatch(error: CommunicatorError) -> CommunicatorError:
    """Convert an error about different owners, perhaps from other ranks, to a MismatchError; keep any other error."""
    text = str(error)
    return MismatchError(text) if _DIFFERENT in text and not isinstance(error, MismatchError) else error


def through(
    stages: "Stages[Result]", ask: "Callable[[Exchange], Stages[Sequence[Array]]]"
) -> "Stages[Result]":
    """Run a computation in stages; ``ask`` makes each of its exchanges, perhaps changed, or together with others."""
    arrived: Sequence[Array] | None = None
    while True:
        try:
            request = next(stages) if arrived is None else stages.send(arrived)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        arrived = yield from ask(request)


def owned(stages: "Stages[Result]", owner: Owner) -> "Stages[Result]":
    """Run a computation in stages, and give an owner to each of its exchanges that has none.

    `through` could do the same, but would make one more generator for each exchange of every step.
    """
    arrived: Sequence[Array] | None = None
    while True:
        try:
            request = next(stages) if arrived is None else stages.send(arrived)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        if request.owner is None:
            make: Any = type(request)  # twice as fast as `_replace`
            request = make(*request[:-1], owner)
        arrived = yield request


def number_of(comm: Transport) -> "StartNumber":
    """Return the next number, from 1, for an `Owner` that starts over a communicator; all ranks call this alike."""
    try:
        count = _numbers.setdefault(comm, itertools.count(1))
    except TypeError:  # another package's communicator need not be hashable
        return StartNumber(0)
    return StartNumber(next(count))


def place_in(comm: Transport) -> dict[str, Any]:
    """Return what stages need to start over a communicator: rank, size, host and a new number; see `number_of`."""
    require_communicator(comm)
    host = getattr(comm, "host", None)
    return {"rank": comm.rank, "size": comm.size, "host": host, "number": number_of(comm)}


def pipeline(computations: "Sequence[Stages[Result]]") -> "Stages[list[Result]]":
    """Run several computations in turns, so that the exchanges of one continue while the others compute.

    In each turn, every computation in order runs up to its next exchange. In the next turn, it continues with the
    buffers that have arrived for it. So all ranks start all exchanges in the same order, however long these take. The
    computations may differ in the kinds and numbers of their exchanges, but must be the same on all ranks. If one
    raises, the others are abandoned.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> def sum_of(x, comm):
    ...     arrived = yield AllGather(np.asarray([x], dtype=np.uint8), (1,) * comm.size)
    ...     return sum(int(part[0]) for part in arrived)
    >>> def rank_main(comm):
    ...     return drive(pipeline([sum_of(comm.rank, comm), sum_of(10, comm)]), comm)
    >>> qcomp.comm.run_local(2, rank_main)
    [[1, 20], [1, 20]]
    """
    if len(computations) == 1:
        return [(yield from computations[0])]
    results: dict[int, Result] = {}
    arrived: dict[int, Sequence[Array] | None] = dict.fromkeys(range(len(computations)))
    while arrived:
        answers: dict[int, Sequence[Array] | None] = {}
        for index, buffers in arrived.items():
            stages = computations[index]
            try:
                request = next(stages) if buffers is None else stages.send(buffers)
            except StopIteration as stop:
                results[index] = stop.value
            else:
                answers[index] = yield request._replace(later=True)
        arrived = answers
    return [results[index] for index in range(len(computations))]


def fuse(computations: "Sequence[Stages[Result]]") -> "Stages[list[Result]]":
    """Run several computations together: the messages that they send to a peer at the same time are joined into one.

    The computations may differ in the kinds and numbers of their exchanges, but must be the same on all ranks.
    """
    if len(computations) == 1:
        return [(yield from computations[0])]
    results: dict[int, Result] = {}
    arrived: dict[int, Sequence[Array] | None] = dict.fromkeys(range(len(computations)))
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
    """Return one exchange with the buffers of several exchanges."""
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


def announce_lengths(stages: "Stages[Result]", rank: int) -> "Stages[Result]":
    """Run a computation whose messages may be shorter than the receivers expect.

    Before each of its exchanges all ranks tell each other how long their messages are, and how long they may be.

    Parameters
    ----------
    stages : generator
        Yields exchanges with the bytes of the longest possible message in ``receive``.
    rank : int
        Number of this rank.

    Raises
    ------
    PayloadError
        On every rank alike, if any message is longer than its receiver allows. The message is not received in that
        case, no memory is allocated for it, and no rank blocks.

    Notes
    -----
    Before each exchange, every rank sends 16 bytes per rank to every other rank. Every rank learns the lengths of all
    messages, not only of its own, because all ranks must make the same decision.
    """

    def ask(request: Exchange) -> Stages[Sequence[Array]]:
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
        return (yield request._replace(receive=tuple(told[source][rank] for source in ranks)))

    return through(stages, ask)
