"""Ranks as MPI processes, through mpi4py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from qcomp.comm import mpi_exit
from qcomp.comm.buffers import stage_exchange, to_host
from qcomp.comm.cuda_buffers import reads_devices, stage
from qcomp.comm.host import host_name
from qcomp.comm.lifelines import SILENCE, lifelines
from qcomp.comm.mpi_exchange import MPIExchange, poll
from qcomp.comm.mpi_library import MPI
from qcomp.comm.verbs import Pending, Verbs
from qcomp.core.errors import CommunicatorError
from qcomp.core.mean.stages import Owner, communicator_error

__all__ = ["MPICommunicator"]

Array = Any


class MPICommunicator(Verbs):
    """The ranks of an mpi4py communicator.

    Creating one is collective: it duplicates `comm`, so its messages never mix with the user's. It lives as long as the
    process.

    CuPy and torch buffers on a CUDA device are passed to MPI directly, after a wait for the current stream, if MPI
    reports that it can read them (``MPIX_Query_cuda_support``, or MPI 4.1's kinds of memory); otherwise they are staged
    through page-locked host memory. The environment variable QCOMP_CUDA_AWARE_MPI overrides this with 1 or 0.

    Exchanges progress while this process is inside MPI, that is, whenever it starts or waits for any exchange. At other
    times only data in the system's socket buffers or handled by network hardware moves.

    In a world of several ranks it also handles the end of the process, so that no rank waits for a dead one under plain
    ``mpirun python script.py``: an uncaught exception is printed and aborts the job, Ctrl-C ends all ranks with status
    130, and ranks that wait for a rank that has exited (also by `sys.exit`) get an error. After a failed exchange the
    process can only end by aborting the job.

    Most launchers end the job when a rank dies. For the others, every two ranks have one more TCP connection: ranks
    that wait for a rank learn within a second that it has died, and after `silence` that it was stopped or cut off.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        For instance ``MPI.COMM_WORLD``.
    timeout : float, optional
        Seconds that a rank waits for the others in an exchange.
    silence : float, optional
        Seconds without a sign of life after which a rank counts as lost. A Python thread gives these signs four times
        in this time, so choose it longer than any other code of a rank holds Python's global lock.

    Attributes
    ----------
    rank, size : int
        As in `comm`.
    host : str
        MPI's name of the processor, or the environment variable QCOMP_HOST.
    bytes_sent : int
        Bytes that this rank has passed to MPI for other ranks.
    timeout : float
        Seconds.
    cuda_aware : bool
        Whether buffers on a CUDA device are passed to MPI directly.

    Raises
    ------
    TypeError
        If `comm` is not an intracommunicator.
    ValueError
        If `timeout` or `silence` is not positive, or QCOMP_CUDA_AWARE_MPI neither 0 nor 1.
    CommunicatorError
        If the other ranks do not create theirs in time.

    Warns
    -----
    RuntimeWarning
        If the additional connection to a rank cannot be made.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np
    >>> comm = MPICommunicator(MPI.COMM_SELF)
    >>> comm.all_gather(np.array([7], dtype=np.uint8), [1])
    [array([7], dtype=uint8)]
    """

    def __init__(self, comm: MPI.Intracomm, *, timeout: float = 300.0, silence: float = SILENCE) -> None:
        if not isinstance(comm, MPI.Intracomm):
            raise TypeError(f"comm must be an mpi4py.MPI.Intracomm, got {comm!r}")
        for name, seconds in (("timeout", timeout), ("silence", silence)):
            if not seconds > 0:
                raise ValueError(f"{name} must be a positive number of seconds, got {seconds}")
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.host = host_name(MPI.Get_processor_name())
        self.bytes_sent = 0
        self.timeout = timeout
        self.cuda_aware = reads_devices(comm)
        self._closed: str | None = None
        # In order of start, which is the same on all ranks.
        self._under_way: list[MPIExchange] = mpi_exit.kept_list()
        if self.size > 1:
            mpi_exit.guard()
        self._comm, duplication = comm.Idup()
        self._wait_at_creation(duplication)
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._lifelines = lifelines(self.rank, self.size, self._share, silence=silence)
        if self.size > 1:
            mpi_exit.take_leave_at_exit(self._comm, self._lifelines)

    def _share(self, text: bytes) -> list[bytes]:
        """Return the texts of all ranks."""
        length, lengths = np.array([len(text)], dtype="<i8"), np.empty(self.size, dtype="<i8")
        self._wait_at_creation(self._comm.Iallgather(length, lengths))
        texts = np.empty((self.size, max(1, lengths.max())), dtype=np.uint8)
        own = np.zeros_like(texts[0])
        own[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        self._wait_at_creation(self._comm.Iallgather(own, texts))
        return [row[:n].tobytes() for row, n in zip(texts, lengths, strict=True)]

    def _wait_at_creation(self, request: MPI.Request) -> None:
        if not poll(request.Test, self.timeout):
            mpi_exit.abort_at_exit()
            raise CommunicatorError(
                f"MPICommunicator: waited {self.timeout:g} s for the other {self.size - 1} ranks to create theirs"
            )

    def __repr__(self) -> str:
        return f"MPICommunicator(rank={self.rank}, size={self.size})"

    def _exchange(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None = None
    ) -> list[Array]:
        return self._start(verb, send, receive, owner).wait()

    def _start(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None = None
    ) -> Pending:
        staging = stage if self.cuda_aware else to_host
        buffers, sizes = stage_exchange(send, receive, rank=self.rank, size=self.size, stage=staging)
        self._require_open(verb)
        exchange = MPIExchange(self, verb, send, buffers, sizes, owner=owner)
        self._under_way.append(exchange)
        with self._closing_on_failure(verb):
            exchange.post(self._comm)
            self.bytes_sent += sum(buffers[peer].shape[0] for peer in exchange.peers)
            self._advance()  # advances earlier exchanges too, since MPI moves bytes only inside its calls
        return exchange

    def begin(self) -> int:
        """Return the number of a new exchange."""
        return self._lifelines.begin()

    def complete(self, exchange: MPIExchange) -> None:
        """Wait until an exchange is complete, and advance all other exchanges meanwhile."""
        verb = exchange.verb
        self._require_open(verb)

        def done() -> bool:
            self._advance()
            if not exchange.is_complete:
                problem = self._lifelines.problem(exchange.number, verb)
                if problem is not None:
                    raise CommunicatorError(problem)
            return exchange.is_complete

        def flowing() -> bool:
            return any(other.is_flowing for other in self._under_way)

        with self._closing_on_failure(verb), self._lifelines.waiting(exchange.number, exchange.owner):
            if not (exchange.is_complete or poll(done, self.timeout, flowing=flowing)):
                raise CommunicatorError(f"{verb}: waited {self.timeout:g} s: {exchange.whats_missing()}")

    def _advance(self) -> None:
        earlier: set[int] = set()
        for exchange in self._under_way:
            exchange.advance(self._comm, earlier)
            earlier |= exchange.awaited
            if exchange.is_complete:
                self._lifelines.complete(exchange.number)
        self._under_way[:] = [exchange for exchange in self._under_way if not exchange.is_complete]

    def _require_open(self, verb: str) -> None:
        if self._closed is not None:
            raise CommunicatorError(f"{verb}: this communicator is closed: {self._closed}")

    @contextlib.contextmanager
    def _closing_on_failure(self, verb: str) -> Iterator[None]:
        try:
            yield
        except CommunicatorError as error:
            self._close(str(error))
            raise communicator_error(str(error)) from error
        except MPI.Exception as error:
            self._close(f"{verb}: MPI failed: {error}")
            raise CommunicatorError(self._closed) from error
        except BaseException as error:
            self._close(f"{verb} was interrupted by {type(error).__name__}")
            raise

    def _close(self, reason: str) -> None:
        self._closed = reason
        self._lifelines.give_up(reason)
        mpi_exit.report_failure(self._comm, reason)
