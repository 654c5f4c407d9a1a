"""Ranks that are MPI processes, through mpi4py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qcomp.comm import mpi_exit
from qcomp.comm.buffers import from_host, stage_exchange
from qcomp.comm.host import host_name
from qcomp.comm.mpi_exit import FAILED_TAG, FINISHED_TAG
from qcomp.comm.mpi_library import MPI
from qcomp.comm.verbs import Verbs
from qcomp.core.errors import CommunicatorError
from qcomp.core.naming import name_ranks

if TYPE_CHECKING:
    from qcomp.comm.buffers import HostBuffer

__all__ = ["MPICommunicator"]

Array = Any

# A message's tag says what it is, so that a rank that is somewhere else in the program is told apart.
_TAGS = {"all_to_all": 1, "all_gather": 2}
_VERBS = {tag: verb for verb, tag in _TAGS.items()}

_SPIN_SECONDS = 100e-6
_LONGEST_PAUSE = 1e-3
# A sleep of 0 seconds takes up to 100 us. Where there is no sched_yield (Windows), spinning must do.
_let_others_run: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class MPICommunicator(Verbs):
    """The ranks of an mpi4py communicator.

    Buffers on a device are staged through host memory. Creating one is collective: it duplicates `comm`, so
    its messages never meet the user's. It lasts as long as the process.

    In a world of several ranks it also sees to the end of the process, so that no rank waits for one that is
    gone under plain ``mpirun python script.py``: an uncaught exception is printed and aborts the job, Ctrl-C
    ends all ranks with status 130, and a rank that leaves (also by `sys.exit`) while others wait for it is
    reported to them. After a failed exchange the process can only end by aborting the job.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        For instance ``MPI.COMM_WORLD``.
    timeout : float, optional
        Seconds that a rank waits for the others in one exchange.

    Attributes
    ----------
    rank, size : int
        As in `comm`.
    host : str
        MPI's name of the processor, or the environment variable QCOMP_HOST.
    bytes_sent : int
        Bytes that this rank has handed to MPI for other ranks.
    timeout : float
        Seconds.

    Raises
    ------
    TypeError
        If `comm` is not an intracommunicator.
    ValueError
        If `timeout` is not positive.
    CommunicatorError
        If the other ranks do not create theirs in time.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> comm = MPICommunicator(MPI.COMM_SELF)
    >>> comm.all_gather(np.array([7], dtype=np.uint8), [1])
    [array([7], dtype=uint8)]
    """

    def __init__(self, comm: MPI.Intracomm, *, timeout: float = 300.0) -> None:
        if not isinstance(comm, MPI.Intracomm):
            raise TypeError(f"comm must be an mpi4py.MPI.Intracomm, got {comm!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.host = host_name(MPI.Get_processor_name())
        self.bytes_sent = 0
        self.timeout = timeout
        self._closed: str | None = None
        if self.size > 1:
            mpi_exit.guard()
        self._comm, duplication = comm.Idup()
        if not _poll(duplication.Test, timeout):
            mpi_exit.abort_at_exit()
            raise CommunicatorError(
                f"MPICommunicator: waited {timeout:g} s for the other {self.size - 1} ranks to create theirs"
            )
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        if self.size > 1:
            mpi_exit.take_leave_at_exit(self._comm)

    def __repr__(self) -> str:
        return f"MPICommunicator(rank={self.rank}, size={self.size})"

    def _exchange(self, verb: str, send: Sequence[Array], receive: Sequence[int]) -> list[Array]:
        buffers, sizes = stage_exchange(send, receive, rank=self.rank, size=self.size)
        if self._closed is not None:
            raise CommunicatorError(f"{verb}: this communicator is closed: {self._closed}")
        exchange = _Exchange(self._comm, self.rank, verb, sizes)
        try:
            exchange.start(buffers)
            self.bytes_sent += sum(buffers[peer].size for peer in exchange.peers)
            if not _poll(exchange.advance, self.timeout, flowing=exchange.is_flowing):
                raise CommunicatorError(f"{verb}: waited {self.timeout:g} s: {exchange.whats_missing()}")
        except CommunicatorError as error:
            self._close(str(error), exchange)
            raise
        except MPI.Exception as error:
            self._close(f"{verb}: MPI failed: {error}", exchange)
            raise CommunicatorError(self._closed) from error
        except BaseException as error:
            self._close(f"{verb} was interrupted by {type(error).__name__}", exchange)
            raise
        # One's own share is a copy too: nothing that arrives shares memory with what was sent.
        received = exchange.received | {self.rank: buffers[self.rank].copy()}
        return [from_host(received[peer], like=like) for peer, like in enumerate(send)]

    def _close(self, reason: str, exchange: _Exchange) -> None:
        self._closed = reason
        mpi_exit.report_failure(self._comm, reason, unfinished=exchange)


class _Exchange:
    """One exchange under way.

    An arriving message is looked at before it is received (MPI's matched probe), because that is how a
    message of another size or verb can be named instead of truncated. In MPICH this is as fast as receives
    posted in advance, from 0 bytes to 50 MB.
    """

    def __init__(self, comm: MPI.Intracomm, rank: int, verb: str, sizes: list[int]) -> None:
        self._comm = comm
        self._rank = rank
        self._verb = verb
        n = len(sizes)
        # Each rank starts with its right neighbour, so that they do not all send to rank 0 first.
        self.peers = [(rank + k) % n for k in range(1, n)]
        self.received = {peer: np.empty(sizes[peer], dtype=np.uint8) for peer in self.peers}
        self._awaited = set(self.peers)
        self._receiving: dict[int, MPI.Request] = {}
        self._sending: dict[int, MPI.Request] = {}

    def start(self, buffers: list[HostBuffer]) -> None:
        """Hand every peer's share to MPI; also an empty one, for the peer must learn its size."""
        for peer in self.peers:
            self._sending[peer] = self._comm.Isend(
                [buffers[peer], MPI.BYTE], dest=peer, tag=_TAGS[self._verb]
            )

    def advance(self) -> bool:
        """Do what can be done now; return whether the exchange is complete."""
        status = MPI.Status()
        for peer in tuple(self._awaited):
            message = self._comm.Improbe(source=peer, tag=MPI.ANY_TAG, status=status)
            if message is not None:
                self._check(peer, message, status)
                self._receiving[peer] = message.Irecv([self.received[peer], MPI.BYTE])
                self._awaited.remove(peer)
        self._receiving = _incomplete(self._receiving)
        self._sending = _incomplete(self._sending)
        for peer in self._sending:
            # This peer's message came, but a failed peer never takes what was sent to it.
            message = self._comm.Improbe(source=peer, tag=FAILED_TAG, status=status)
            if message is not None:
                self._check(peer, message, status)
        return not (self._awaited or self._receiving or self._sending)

    def _check(self, peer: int, message: MPI.Message, status: MPI.Status) -> None:
        tag, size = status.Get_tag(), status.Get_count(MPI.BYTE)
        if tag == FINISHED_TAG:
            raise CommunicatorError(f"{self._verb}: rank {peer} has finished without calling it")
        if tag == FAILED_TAG:
            reason = np.empty(size, dtype=np.uint8)
            message.Recv([reason, MPI.BYTE])
            text = reason.tobytes().decode(errors="replace")
            raise CommunicatorError(f"{self._verb}: rank {peer} failed: {text}")
        if tag != _TAGS[self._verb]:
            raise CommunicatorError(
                f"rank {self._rank} called {self._verb} where rank {peer} called {_VERBS[tag]}"
            )
        if size != self.received[peer].size:
            raise CommunicatorError(
                f"{self._verb}: rank {peer} sent {size} bytes to rank {self._rank}, "
                f"which expected {self.received[peer].size} bytes"
            )

    def is_flowing(self) -> bool:
        """Return whether some peer and this rank have met, so that bytes are on their way."""
        return bool(self._receiving) or not self._sending.keys() <= self._awaited

    def whats_missing(self) -> str:
        """Name the peers that keep the exchange from being complete."""
        missing = []
        if self._awaited:
            missing.append(f"nothing came from {name_ranks(self._awaited)}")
        if self._receiving:
            missing.append(f"only a part came from {name_ranks(self._receiving)}")
        silent = self._sending.keys() - self._awaited
        if silent:
            missing.append(f"{name_ranks(silent)} did not take what was sent")
        return ", ".join(missing)


def _incomplete(requests: dict[int, MPI.Request]) -> dict[int, MPI.Request]:
    return {peer: request for peer, request in requests.items() if not request.Test()}


def _poll(done: Callable[[], bool], timeout: float, *, flowing: Callable[[], bool] = lambda: False) -> bool:
    """Call `done` until it returns true, at most for `timeout` seconds; return what it returned last.

    While `flowing` returns true MPI moves bytes, which it does only inside its calls: then there is no pause.
    """
    start = time.monotonic()
    while not done():
        waited = time.monotonic() - start
        if waited > timeout:
            return False
        # MPI's own waiting burns a core, which a rank that still computes may need. Pauses of a tenth of
        # the time waited so far delay an exchange by a tenth at most.
        if waited < _SPIN_SECONDS or flowing():
            _let_others_run()
        else:
            time.sleep(min(waited / 10, _LONGEST_PAUSE))
    return True
