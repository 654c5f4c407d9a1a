"""`run_local` and its communicators: ranks are threads of one process, for tests, examples and single ranks."""

from __future__ import annotations

import platform
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from qcomp.comm.buffers import from_host, stage_exchange
from qcomp.comm.host import host_name
from qcomp.comm.verbs import Verbs
from qcomp.core.errors import CommunicatorError
from qcomp.core.mean.stages import Owner, as_mismatch, other_owners, told
from qcomp.core.numeric.arrays import Array
from qcomp.core.reporting import name_ranks

if TYPE_CHECKING:
    from qcomp.comm.buffers import HostBuffer

Result = TypeVar("Result")

_SLICE_SECONDS = 0.1


class LocalCommunicator(Verbs):
    """A rank of a world inside one process; `run_local` makes one for each rank.

    Received buffers never share memory with sent ones. The ranks may hold arrays of different libraries.

    See Also
    --------
    run_local : runs a function on several ranks.
    LocalCommunicator.alone : the world of one rank.
    """

    compares_owners = True

    def __init__(self, world: _World, rank: int, host: str | None = None) -> None:
        self.rank = rank
        self.size = world.size
        self.host = host_name(platform.node()) if host is None else host
        self.bytes_sent = 0
        self._world = world

    @classmethod
    def alone(cls) -> LocalCommunicator:
        """Return the only rank of a world of one.

        Examples
        --------
        >>> import numpy as np
        >>> comm = LocalCommunicator.alone()
        >>> comm.all_gather(np.array([7], dtype=np.uint8), [1])
        [array([7], dtype=uint8)]
        """
        return cls(_World(1, timeout=60.0), rank=0)

    def __repr__(self) -> str:
        return f"LocalCommunicator(rank={self.rank}, size={self.size})"

    def count(self, key: str, amount: int) -> int:
        """Add to a counter that all ranks share, and return its value. Not collective.

        Parameters
        ----------
        key : str
            The name of the counter, which begins at 0.
        amount : int
            What to add; 0 only reads the counter.
        """
        return self._world.count(key, amount)

    def _exchange(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None = None
    ) -> list[Array]:
        buffers, sizes = stage_exchange(send, receive, rank=self.rank, size=self.size)
        # One copy per receiver, so that no rank can change another's data.
        call = _Call(verb, [buffer.copy() for buffer in buffers], sizes, owner)
        self.bytes_sent += sum(buffer.size for peer, buffer in enumerate(buffers) if peer != self.rank)
        received = self._world.exchange(self.rank, call)
        return [from_host(buffer, like=like) for buffer, like in zip(received, send, strict=True)]


def run_local(
    n: int,
    fn: Callable[[LocalCommunicator], Result],
    *,
    timeout: float = 60.0,
    hosts: Sequence[str] | None = None,
) -> list[Result]:
    """Run a function on `n` ranks of this process, each in its own thread.

    Parameters
    ----------
    n : int
        Number of ranks, at least 1.
    fn : callable
        Called as ``fn(comm)`` on every rank.
    timeout : float, optional
        Seconds that a rank waits for the others in an exchange. After a rank has failed, the others have the same time
        to end before they are abandoned.
    hosts : sequence of str, optional
        The host name of each rank, to simulate several machines; by default all ranks are on this machine.

    Returns
    -------
    list
        The results by rank.

    Raises
    ------
    BaseException
        The exception of the first rank to fail, with a note that names the rank. The other ranks leave their exchanges
        with a `CommunicatorError`.

    Examples
    --------
    >>> import numpy as np
    >>> def gather(comm):
    ...     parts = comm.all_gather(np.array([comm.rank], dtype=np.uint8), [1] * comm.size)
    ...     return [int(part[0]) for part in parts]
    >>> run_local(3, gather)
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    if n < 1:
        raise ValueError(f"n must be at least 1 rank, got {n}")
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
    if hosts is not None and len(hosts) != n:
        raise ValueError(f"hosts must hold a name for each of {n} ranks, got {len(hosts)}")
    world = _World(n, timeout)
    results: dict[int, Result] = {}

    def run(rank: int) -> None:
        error = None
        try:
            results[rank] = fn(LocalCommunicator(world, rank, None if hosts is None else hosts[rank]))
        except BaseException as caught:
            error = caught
        world.leave(rank, error)

    threads = [
        # Daemon threads: a rank that hangs outside an exchange does not keep the process alive.
        threading.Thread(target=copy_context().run, args=(run, rank), name=f"rank {rank} of {n}", daemon=True)
        for rank in range(n)
    ]
    try:
        for thread in threads:
            thread.start()
        failure = world.wait_for_end()
    except BaseException as error:
        world.close(f"run_local was interrupted by {type(error).__name__}")
        raise
    if failure is not None:
        first, cause = failure
        cause.add_note(f"(raised on rank {first} of {n})")
        raise cause
    return [results[rank] for rank in range(n)]


@dataclass(frozen=True)
class _Call:
    """One rank's part in an exchange."""

    verb: str
    outgoing: list[HostBuffer]
    receive: list[int]
    owner: Owner | None

    @cached_property
    def digest(self) -> int:
        """The digest of the owner, or 0 if there is no owner."""
        return 0 if self.owner is None else self.owner.digest


def _disagreement(one: tuple[int, _Call], other: tuple[int, _Call]) -> str | None:
    """Describe a contradiction between the calls of two ranks, if there is one."""
    (rank, call), (peer, peer_call) = sorted((one, other), key=lambda pair: pair[0])
    if call.digest != peer_call.digest:
        return other_owners({rank: told(call.owner), peer: told(peer_call.owner)}, call.owner)
    if call.verb != peer_call.verb:
        return f"rank {rank} called {call.verb} where rank {peer} called {peer_call.verb}"
    for sender, sent, receiver, announced in (
        (rank, call.outgoing[peer].size, peer, peer_call.receive[rank]),
        (peer, peer_call.outgoing[rank].size, rank, call.receive[peer]),
    ):
        if sent != announced:
            return (
                f"{call.verb}: rank {sender} sent {sent} bytes to rank {receiver}, "
                f"which expected {announced} bytes"
            )
    return None


class _World:
    """The shared state of all ranks: current calls, ranks that have left, and the reason for closing."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self._changed = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._counters: Counter[str] = Counter()
        self._left: set[int] = set()
        self._failure: tuple[int, BaseException] | None = None
        self._closed: str | None = None

    def count(self, key: str, amount: int) -> int:
        """Add to a counter, and return its value."""
        with self._changed:
            self._counters[key] += amount
            return self._counters[key]

    def exchange(self, rank: int, call: _Call) -> list[HostBuffer]:
        """Add one rank's call, wait for all others, and return what was sent to this rank."""
        with self._changed:
            if self._closed is not None:
                raise as_mismatch(
                    CommunicatorError(f"{call.verb}: this communicator is closed: {self._closed}")
                )
            calls = self._calls
            for earlier in calls.items():
                problem = _disagreement(earlier, (rank, call))
                if problem is not None:
                    self._close(problem)
                    raise as_mismatch(CommunicatorError(problem))
            calls[rank] = call
            if len(calls) == self.size:
                self._calls = {}  # for the next exchange; waiting ranks hold this one's
            self._changed.notify_all()

            def settled() -> bool:
                return len(calls) == self.size or self._closed is not None or bool(self._left - calls.keys())

            in_time = self._changed.wait_for(settled, self.timeout)
            # A complete exchange counts even if a rank has failed since: all ranks see the same history.
            if len(calls) < self.size:
                if self._closed is None:
                    self._close(self._why_incomplete(call.verb, calls, in_time=in_time))
                raise as_mismatch(CommunicatorError(str(self._closed)))
            return [calls[sender].outgoing[rank] for sender in range(self.size)]

    def _why_incomplete(self, verb: str, calls: dict[int, _Call], *, in_time: bool) -> str:
        if in_time:
            return f"{verb}: {name_ranks(self._left - calls.keys())} finished without calling it"
        absent = set(range(self.size)) - calls.keys()
        return f"{verb}: waited {self.timeout:g} s for {name_ranks(absent)}"

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Record that a rank has returned, or failed."""
        with self._changed:
            self._left.add(rank)
            if error is not None:
                self._failure = self._failure or (rank, error)
                self._close(f"rank {rank} failed with {type(error).__name__}: {error}")
            self._changed.notify_all()

    def wait_for_end(self) -> tuple[int, BaseException] | None:
        """Wait until all ranks have left; return the first failure."""
        with self._changed:
            # In slices, since a Ctrl-C just before the wait does not interrupt it.
            while len(self._left) < self.size and self._failure is None:
                self._changed.wait(_SLICE_SECONDS)
            self._changed.wait_for(lambda: len(self._left) == self.size, self.timeout)
            return self._failure

    def close(self, reason: str) -> None:
        """Release every waiting rank; the first reason is reported."""
        with self._changed:
            self._close(reason)

    def _close(self, reason: str) -> None:
        self._closed = self._closed or reason
        self._changed.notify_all()
