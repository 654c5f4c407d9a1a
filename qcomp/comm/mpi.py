"""`MPICommunicator`: a communicator whose ranks are MPI processes, through mpi4py."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from qcomp.comm import mpi_exit
from qcomp.comm.buffers import stage_exchange, to_host
from qcomp.comm.cuda_buffers import reads_devices, stage
from qcomp.comm.host import host_name
from qcomp.comm.lifelines import lifelines
from qcomp.comm.mpi_exchange import MPIExchange, poll
from qcomp.comm.mpi_library import MPI, require_started
from qcomp.comm.patience import patience
from qcomp.comm.verbs import Pending, Verbs, described
from qcomp.core.errors import CommunicatorError
from qcomp.core.mean.stages import Owner, as_mismatch
from qcomp.core.numeric.arrays import Array

_CHECK_SECONDS = 0.1


class MPICommunicator(Verbs):
    """The ranks of an mpi4py communicator.

    Creating one is collective: it duplicates `comm`, so its messages never mix with the user's. Its threads and
    connections end with `close`, or when the last reference to it goes. The duplicate stays until the end of the
    process, since ranks can free it only together. MPI libraries have room for about two thousand duplicates.

    CuPy and torch buffers on a CUDA device are passed to MPI directly, after a wait for the current stream, if MPI
    reports that it can read them (``MPIX_Query_cuda_support``, or MPI 4.1's kinds of memory); otherwise they are staged
    through page-locked host memory. The environment variable QCOMP_CUDA_AWARE_MPI overrides this with 1 or 0.

    Exchanges progress while this process is inside MPI, that is, whenever it starts or waits for any exchange. At other
    times only data in the system's socket buffers or handled by network hardware moves.

    In a world of several ranks it also handles the end of the process, so that no rank waits for a dead one under plain
    ``mpirun python script.py``: an uncaught exception is printed and aborts the job, Ctrl-C ends all ranks with status
    130, and ranks that wait for a rank that has exited (also by `sys.exit`) get an error. After a failed exchange the
    process can only end by aborting the job.

    Most launchers end the job when a rank dies. Some do not, so every two ranks have one more TCP connection. Ranks
    that wait for a rank learn within a second that its process has died, and within 20 seconds that its machine is cut
    off. A process that is silent for as long holds Python's lock or is stopped: the ranks that wait for it warn, and
    wait until the timeout. If a rank ends without an exception before it has created its first communicator, the others
    notice only after the timeout, since MPI does not report it.

    A forked child, such as a data loader's worker, must not use its parent's communicator; every verb raises there.
    Children of multiprocessing end by `os._exit`. If any other child reaches the normal exit of Python, qcomp prints a
    message and calls `os._exit` with status 1: mpi4py would finalize MPI in the child, which breaks the whole job.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        For instance ``MPI.COMM_WORLD``.
    timeout : float, optional
        Seconds that a rank waits for the others in an exchange. By default the value that `qcomp.comm.world` was given,
        else the environment variable QCOMP_TIMEOUT, else 300.
    silence : float, optional
        Seconds without a sign of life after which a rank counts as lost. A Python thread gives four such signs in this
        time, so the time must be longer than any code of a rank holds Python's lock. By default the value that
        `qcomp.comm.world` was given, else the environment variable QCOMP_SILENCE; without either, a silent rank is only
        reported.

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
    silence : float or None
        Seconds; None: a silent rank is only reported.
    cuda_aware : bool
        Whether buffers on a CUDA device are passed to MPI directly.

    Raises
    ------
    TypeError
        If `comm` is not an intracommunicator.
    ValueError
        If `timeout` or `silence` is not positive, or QCOMP_CUDA_AWARE_MPI neither 0 nor 1.
    CommunicatorError
        If another rank ends or does not create its communicator in time, this process is a forked child of a rank, or
        MPI has not begun.

    Warns
    -----
    RuntimeWarning
        If the additional connection to a rank cannot be made, or a rank is silent.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np
    >>> comm = MPICommunicator(MPI.COMM_SELF)
    >>> comm.all_gather(np.array([7], dtype=np.uint8), [1])
    [array([7], dtype=uint8)]
    """

    compares_owners = True

    def __init__(
        self, comm: MPI.Intracomm, *, timeout: float | None = None, silence: float | None = None
    ) -> None:
        if not isinstance(comm, MPI.Intracomm):
            raise TypeError(f"comm must be an mpi4py.MPI.Intracomm, got {comm!r}")
        self.timeout, self.silence = patience(timeout=timeout, silence=silence)
        require_started()
        mpi_exit.require_rank()
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.host = host_name(MPI.Get_processor_name())
        self.bytes_sent = 0
        self.cuda_aware = reads_devices(comm)
        self._closed: str | None = None
        # In order of start, which is the same on all ranks.
        self._under_way: list[MPIExchange] = mpi_exit.kept_list()
        if self.size > 1:
            mpi_exit.guard()
        ranks = comm.Get_group()
        try:
            self._comm, duplication = comm.Idup()
            self._await_ranks(ranks, duplication)
            self._comm.Set_errhandler(MPI.ERRORS_RETURN)
            self._lifelines = lifelines(
                self.rank,
                self.size,
                functools.partial(self._share, ranks),
                silence=self.silence,
                look_for=lambda _: mpi_exit.require_alive(ranks),
            )
        except BaseException:
            if self.size > 1:
                mpi_exit.abort_at_exit()
            raise
        finally:
            ranks.Free()
        self._leave = mpi_exit.take_leave_at_exit(self, self._comm, self._lifelines)

    def _share(self, ranks: MPI.Group, text: str, check: Callable[[], None]) -> Iterator[tuple[int, str]]:
        """Give a text to all ranks, and yield every rank with its text."""
        data = text.encode()
        length, lengths = np.array([len(data)], dtype="<i8"), np.empty(self.size, dtype="<i8")
        self._await_ranks(ranks, self._comm.Iallgather(length, lengths), check)
        texts = np.empty((self.size, max(1, lengths.max())), dtype=np.uint8)
        own = np.zeros_like(texts[0])
        own[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._await_ranks(ranks, self._comm.Iallgather(own, texts), check)
        for rank, (row, n) in enumerate(zip(texts, lengths, strict=True)):
            yield rank, row[:n].tobytes().decode()

    def _await_ranks(
        self, ranks: MPI.Group, request: MPI.Request, check: Callable[[], None] = lambda: None
    ) -> None:
        """Wait at creation until all ranks have come."""
        next_check = time.monotonic()

        def done() -> bool:
            nonlocal next_check
            if request.Test():
                return True
            if time.monotonic() >= next_check:
                check()
                mpi_exit.require_alive(ranks)
                next_check = time.monotonic() + _CHECK_SECONDS
            return False

        try:
            if not poll(done, self.timeout):
                raise CommunicatorError(
                    f"MPICommunicator: waited {self.timeout:g} s for the other {self.size - 1} ranks to create theirs"
                )
        except BaseException:
            mpi_exit.keep(request)
            raise

    def __repr__(self) -> str:
        return f"MPICommunicator(rank={self.rank}, size={self.size})"

    def close(self) -> None:
        """End the threads and connections of this rank. Not collective.

        Exchanges that other ranks have not completed fail there, and all later ones fail here. MPI's own duplicate of
        the communicator stays until the end of the process.
        """
        self._closed = self._closed or "close was called"
        self._leave()

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
            if self._lifelines.has_news:
                self._lifelines.report()
            if not exchange.is_complete:
                problem = self._lifelines.problem(exchange.number, verb)
                if problem is not None:
                    raise CommunicatorError(problem)
            return exchange.is_complete

        def flowing() -> bool:
            return any(other.is_flowing for other in self._under_way)

        with self._closing_on_failure(verb), self._lifelines.waiting(exchange.number, exchange.owner):
            if not (exchange.is_complete or poll(done, self.timeout, flowing=flowing)):
                raise CommunicatorError(
                    f"{verb}: waited {self.timeout:g} s: {exchange.whats_missing()}{self._lifelines.silent()}"
                )

    def _advance(self) -> None:
        earlier: set[int] = set()
        for exchange in self._under_way:
            exchange.advance(self._comm, earlier)
            earlier |= exchange.awaited
            if exchange.is_complete:
                self._lifelines.complete(exchange.number)
        self._under_way[:] = [exchange for exchange in self._under_way if not exchange.is_complete]

    @contextlib.contextmanager
    def _closing_on_failure(self, verb: str) -> Iterator[None]:
        try:
            yield
        except CommunicatorError as error:
            self._close(str(error))
            raise as_mismatch(error) from error.__cause__
        except MPI.Exception as error:
            self._close(f"{verb}: MPI failed: {error}")
            raise CommunicatorError(self._closed) from error
        except BaseException as error:
            self._close(f"{verb} was interrupted by {described(error)}")
            raise

    def _close(self, reason: str) -> None:
        self._closed = reason
        self._lifelines.give_up(reason)
        mpi_exit.report_failure(self._comm, reason)


if MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() > 1:
    mpi_exit.guard()  # already now, since other ranks may wait for this one to create a communicator
