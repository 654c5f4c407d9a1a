"""The laws of communicators, each a collective function that raises AssertionError on ranks that notice a violation."""

import socket
import uuid
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from qcomp.comm.base import Communicator
from qcomp.core.errors import CommunicatorError, MismatchError
from qcomp.core.mean.stages import AllGather, AllToAll, Owner, Stages, drive, owned, pipeline
from qcomp.testing.libraries import Namespace, Vector, to_library, to_numpy

_SCALES = (0, 1, 333, 333, 1_250_003)
"""Factors for message sizes: nothing, a few bytes, the same messages again, and 5 MB, which travel in many pieces."""


def _share(sender: int, receiver: int, size: int) -> Vector:
    """Return what a rank sends another rank: bytes that identify the sender and the receiver."""
    return np.tile(np.array([sender, receiver, 255, 0, 17], dtype=np.uint8), size // 5 + 1)[:size]


def _size(sender: int, receiver: int, scale: int) -> int:
    """Return a message's size, which differs for most pairs and is 0 for some; most ranks also send to themselves."""
    return (sender * 7 + receiver * 4 + 1) % 5 * scale


def _require_buffers(found: Sequence[Any], expected: Sequence[Vector], like: Any, verb: str) -> None:
    assert len(found) == len(expected), f"{verb} returns {len(found)} buffers for {len(expected)} ranks"
    for rank, (x, wanted) in enumerate(zip(found, expected, strict=True)):
        assert type(x) is type(like), f"{verb} returns a {type(x).__name__} for a {type(like).__name__}"
        values = to_numpy(x)
        assert values.dtype == np.uint8, f"{verb} returns {values.dtype} from rank {rank}; expected uint8"
        assert values.shape == wanted.shape, (
            f"{verb} returns shape {values.shape} from rank {rank}, which sent {wanted.shape}"
        )
        assert np.array_equal(values, wanted), f"{verb} returns other bytes than rank {rank} sent"


def has_a_place(comm: Communicator, xp: Namespace) -> None:
    """Each rank has its own number, by which all-gathers order results, and the name of its machine."""
    assert 0 <= comm.rank < comm.size, f"rank is {comm.rank}, size is {comm.size}"
    mine = to_library(xp, np.array([comm.rank], dtype=np.uint8))
    found = [int(to_numpy(x)[0]) for x in comm.all_gather(mine, [1] * comm.size)]
    assert found == list(range(comm.size)), f"all_gather returns the ranks in the order {found}"
    assert isinstance(comm.host, str), f"host is {comm.host!r}; expected the name of the machine"
    assert comm.host, "host is empty; expected the name of the machine"
    hosts, machines = (
        _texts(comm, xp, text) for text in (comm.host, f"{socket.gethostname()} {uuid.getnode()}")
    )
    alike = [rank for rank in range(comm.size) if machines[rank] == machines[comm.rank]]
    own = {hosts[rank] for rank in alike}
    # Ranks on one machine may have several names, to simulate nodes.
    assert len(alike) == 1 or len(own) < len(alike), (
        f"ranks {alike} run on one machine, and each has a host of its own: {sorted(own)}; give them the machine's name"
    )


def _texts(comm: Communicator, xp: Namespace, text: str) -> list[str]:
    """Return the texts of all ranks, up to 200 bytes each."""
    data = np.frombuffer(text.encode()[:200].ljust(200), dtype=np.uint8)
    found = comm.all_gather(to_library(xp, data), [200] * comm.size)
    return [to_numpy(x).tobytes().decode(errors="replace").rstrip() for x in found]


def all_to_all_delivers(comm: Communicator, xp: Namespace) -> None:
    """`all_to_all` delivers to each rank what each other rank sent it, in uneven sizes, and counts the bytes."""
    me, ranks = comm.rank, range(comm.size)
    for scale in _SCALES:
        before = comm.bytes_sent
        shares = [_share(me, r, _size(me, r, scale)) for r in ranks]
        whole, ends = to_library(xp, np.concatenate(shares)), accumulate((x.size for x in shares), initial=0)
        send = [whole[start:stop] for start, stop in pairwise(ends)]  # parts of one array, as chunks are
        received = comm.all_to_all(send, [_size(r, me, scale) for r in ranks])
        _require_buffers(received, [_share(r, me, _size(r, me, scale)) for r in ranks], send[0], "all_to_all")
        _require_counted(comm, before, [shares[r].size for r in ranks if r != me], "all_to_all")


def all_gather_delivers(comm: Communicator, xp: Namespace) -> None:
    """`all_gather` delivers to each rank what every rank sent, in uneven sizes, and counts the bytes."""
    me, ranks = comm.rank, range(comm.size)
    for scale in _SCALES:
        before, sizes = comm.bytes_sent, [_size(r, 1, scale) for r in ranks]
        send = to_library(xp, np.pad(_share(me, 9, sizes[me]), 3))[3:-3]
        received = comm.all_gather(send, sizes)
        _require_buffers(received, [_share(r, 9, sizes[r]) for r in ranks], send, "all_gather")
        _require_counted(comm, before, [sizes[me]] * (comm.size - 1), "all_gather")


def _require_counted(comm: Communicator, before: int, sizes: Sequence[int], verb: str) -> None:
    expected = sum(sizes) + getattr(comm, "tag_bytes", 0) * len(sizes)
    found = comm.bytes_sent - before
    assert found == expected, f"{verb} sends {expected} bytes to other ranks; bytes_sent grows by {found}"


def exchanges_keep_their_order(comm: Communicator, xp: Namespace) -> None:
    """In many small exchanges, in which some ranks run ahead of others, each exchange delivers its own bytes."""
    me, ranks = comm.rank, range(comm.size)
    for i in range(130):  # in all more than 256 exchanges
        mine = to_library(xp, np.full(5, (i + me) % 251, dtype=np.uint8))
        found = [int(to_numpy(x)[0]) for x in comm.all_gather(mine, [5] * comm.size)]
        assert found == [(i + r) % 251 for r in ranks], (
            f"all_gather number {i} delivers the bytes of another exchange"
        )
        send = [to_library(xp, np.full(r, i % 251, dtype=np.uint8)) for r in ranks]
        received = comm.all_to_all(send, [me] * comm.size)
        _require_buffers(received, [np.full(me, i % 251, dtype=np.uint8)] * comm.size, send[0], "all_to_all")


def memory_is_its_own(comm: Communicator, xp: Namespace) -> None:
    """Received buffers share no memory with sent ones, or with each other, on any rank."""
    n = comm.size
    for size in (64, 1_100_003):  # large buffers may be sent without a copy
        mine = to_library(xp, np.full(size, comm.rank, dtype=np.uint8))
        received = comm.all_gather(mine, [size] * n)
        if not _write(mine, 99):
            return  # the library is immutable
        wrote = _write(received[0], 77, comm.rank)  # what arrives may be read-only
        comm.all_gather(mine[:0], [0] * n)  # now all ranks have written
        expected = np.repeat(np.arange(n, dtype=np.uint8), size).reshape(n, size)
        if wrote:
            expected[0, comm.rank] = 77
        same = np.array_equal(np.stack([to_numpy(x) for x in received]), expected)
        assert same, (
            f"a buffer of {size} bytes from all_gather shares memory with another received or sent one"
        )
        to_all = comm.all_to_all([mine] * n, [size] * n)
        comm.all_gather(mine[:0], [0] * n)  # now all ranks have what was sent
        _write(mine, 98)
        comm.all_gather(mine[:0], [0] * n)
        same = all(np.all(to_numpy(x) == 99) for x in to_all)
        assert same, f"a buffer of {size} bytes from all_to_all changes if the sent buffer changes"
        for x in to_all:
            _write(x, 1)
        assert np.all(to_numpy(mine) == 98), (
            f"a buffer of {size} bytes from all_to_all shares memory with the sent buffer"
        )


def _write(x: Any, value: int, index: int | None = None) -> bool:
    """Write a value into a buffer, at an index or everywhere; return False if the library is immutable."""
    try:
        if index is None:
            x[:] = value
        else:
            x[index] = value
    except (TypeError, ValueError):
        return False
    return True


def _sums(comm: Communicator, xp: Namespace, number: int) -> Stages[list[int]]:
    """Yield one exchange of each kind."""
    send = tuple(to_library(xp, np.array([comm.rank + number, r], dtype=np.uint8)) for r in range(comm.size))
    arrived = yield AllToAll(send, (2,) * comm.size)
    first = [int(x) for buffer in arrived for x in to_numpy(buffer)]
    arrived = yield AllGather(to_library(xp, np.array([number], dtype=np.uint8)), (1,) * comm.size)
    return first + [int(to_numpy(buffer)[0]) for buffer in arrived]


def stages_run_over_it(comm: Communicator, xp: Namespace) -> None:
    """Computations in stages, a single one or several interleaved ones, each receive their own bytes."""

    def expected(number: int) -> list[int]:
        pairs = [x for r in range(comm.size) for x in (r + number, comm.rank)]
        return pairs + [number] * comm.size

    assert drive(_sums(comm, xp, 5), comm) == expected(5), "a computation in stages gets wrong bytes"
    found = drive(pipeline([_sums(comm, xp, number) for number in range(4)]), comm)
    assert found == [expected(number) for number in range(4)], (
        "interleaved computations get each other's bytes"
    )


def starts_wait_in_any_order(comm: Communicator, xp: Namespace) -> None:
    """With `start`, concurrent exchanges do not mix, whatever the order of waiting, and all bytes are counted."""
    start = getattr(comm, "start", None)
    if start is None:
        return
    sizes = (3, 100_000, 0, 7)
    for forwards in (
        set(),
        {r for r in range(comm.size) if r % 2},
    ):  # ranks that wait in the order of the starts
        pending, before = [], comm.bytes_sent
        for number, size in enumerate(sizes):
            mine = to_library(xp, np.full(size, 10 * number + comm.rank, dtype=np.uint8))
            pending.append((number, size, start(AllGather(mine, (size,) * comm.size))))
        for number, size, each in pending if comm.rank in forwards else reversed(pending):
            for rank, x in enumerate(each.wait()):
                same = np.array_equal(to_numpy(x), np.full(size, 10 * number + rank, dtype=np.uint8))
                assert same, (
                    f"of {len(sizes)} exchanges in flight, number {number} delivers wrong bytes from rank {rank}"
                )
        _require_counted(comm, before, sizes * (comm.size - 1), "start")


def another_size_closes_it(comm: Communicator, xp: Namespace) -> None:
    """A message of another size than the receiver announces raises CommunicatorError, and so do all later calls."""
    if comm.size == 1:
        return
    last = comm.size - 1
    send = [
        to_library(xp, np.zeros(4 + (comm.rank == last and r == 0), dtype=np.uint8)) for r in range(comm.size)
    ]
    errors = []
    for _ in range(2):
        try:
            comm.all_to_all(send, [4] * comm.size)
        except CommunicatorError as error:
            errors.append(error)
    wanted = 2 if comm.rank == 0 else 1
    assert len(errors) >= wanted, (
        f"rank {last} sends rank 0 a byte more than announced, twice; rank {comm.rank} gets {len(errors)} errors, "
        f"expected at least {wanted}"
    )


def other_owners_are_a_mismatch(comm: Communicator, xp: Namespace) -> None:
    """Ranks that exchange for one owner get their bytes; if owners differ, each rank's error names its own owner."""
    if comm.size == 1:
        return
    one, other = (Owner(kind, 1, (), 0, "the check") for kind in ("OneOptimizer", "OtherOptimizer"))
    drive(owned(_sums(comm, xp, 5), one), comm)
    mine = other if comm.rank == comm.size - 1 else one
    told = ""
    try:
        drive(owned(_sums(comm, xp, 6), mine), comm)
    except MismatchError as error:
        told = str(error)
    assert told, (
        f"rank {comm.size - 1} exchanges for {other}, the others for {one}, and rank {comm.rank} raises nothing"
    )
    assert str(mine) in told, f"the error does not name {mine}: {told}"


CommunicatorLaw = Callable[[Communicator, Namespace], None]

COMMUNICATOR_LAWS: tuple[CommunicatorLaw, ...] = (
    has_a_place,
    all_to_all_delivers,
    all_gather_delivers,
    exchanges_keep_their_order,
    memory_is_its_own,
    stages_run_over_it,
    starts_wait_in_any_order,
)
"""The laws whose checks leave the communicator open."""
