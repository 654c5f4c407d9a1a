"""A thread that runs several staged computations at once, and interleaves their exchanges on one communicator."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from qcomp.comm.verbs import Pending, Verbs
from qcomp.core.errors import CommunicatorError, NonFiniteError
from qcomp.core.mean.stages import AllToAll, Exchange, Stages, fuse, owned

_JOINED_BYTES = 1 << 20
"""Jobs with ``joins`` wait for more such jobs until their first messages have this many bytes together. At 1 Gbit/s
these bytes take longer than the latency of an exchange."""

_END_SECONDS = 1.0
"""How long the process, when it ends, waits for jobs that are still running."""

_busy: weakref.WeakSet[ExchangeThread] = weakref.WeakSet()
"""The threads that have called `ExchangeThread.occupy` and not yet `ExchangeThread.release`."""
_claims = threading.RLock()


@dataclass(eq=False)
class ThreadJob:
    """A computation in stages and its callbacks, which run in the exchange thread."""

    stages: Stages[Any]
    done: Callable[[Any], None]
    failed: Callable[[BaseException], None]
    context: Callable[[], AbstractContextManager[Any]]
    """Returns a context in which the job runs."""
    joins: bool = False
    """Whether to combine its exchanges with the exchanges of later jobs, because its messages are short."""
    pending: Pending | None = field(default=None, init=False)


class ExchangeThread:
    """Runs jobs in order of arrival, and keeps each job one exchange ahead of the next job.

    When jobs arrive, it starts their first exchanges, then moves each earlier job one exchange further, the oldest
    first. After the last jobs it continues in the same order until all are done. So some jobs encode while the bytes of
    others travel, and early data is decoded while the last bytes travel. The order of exchanges depends only on the
    order of the jobs and not on when bytes arrive, so it is the same on all ranks.

    Jobs with ``joins`` compute up to their first exchange when they arrive. There they wait until their messages are
    long enough, or the last jobs have arrived. Then they continue as one job.

    A non-finite value makes its job fail, on all ranks in the same stage. Any other error belongs to this rank alone or
    to the communicator. It makes every job fail, now and later, because the ranks no longer agree on the order of
    exchanges.

    Nobody else may use the communicator while jobs are running. Several exchange threads may share a communicator if
    they use it in turn, see `occupy`. A new thread takes it from earlier threads whose passes were interrupted.
    """

    def __init__(self, comm: Verbs) -> None:
        self.comm = comm
        with _claims:  # an interrupted backward pass never releases it
            for other in [each for each in _busy if each.comm is comm]:
                _busy.discard(other)
        self._queue: SimpleQueue[tuple[Sequence[ThreadJob], bool] | None] = SimpleQueue()
        self._under_way: deque[ThreadJob] = deque()
        self._waiting: list[tuple[ThreadJob, Exchange]] = []
        self._broken: BaseException | None = None
        self._thread: threading.Thread | None = None

    def occupy(self) -> None:
        """Keep other exchange threads from the communicator until `release`; raise RuntimeError if one occupies it."""
        with _claims:
            require_unoccupied(self.comm, by_others_than=self)
            _busy.add(self)

    def release(self) -> None:
        """Let other exchange threads use the communicator; there are no more exchanges to start."""
        with _claims:
            _busy.discard(self)

    def put(self, jobs: Sequence[ThreadJob], *, last: bool) -> None:
        """Add some jobs, and return at once. After jobs with ``last``, put no more until they are done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="qcomp-ddp", daemon=True)
            self._thread.start()
            weakref.finalize(self, _end, self._queue, self._thread)
        self._queue.put((jobs, last))

    def close(self) -> None:
        """End the thread, once all jobs are done; no job may follow."""
        self.release()
        self._queue.put(None)

    def _run(self) -> None:
        while (found := self._queue.get()) is not None:
            arrived, last = found
            jobs = [job for job in arrived if not job.joins]
            for job in arrived:
                if job.joins:
                    self._begin(job)
            if self._waiting and (last or sum(_size(x) for _, x in self._waiting) >= _JOINED_BYTES):
                jobs.append(_joined(self._waiting))
                self._waiting = []
            turn = (*jobs, *self._under_way)
            self._under_way.extend(jobs)
            for job in turn:
                self._advance(job)
            while last and self._under_way:
                for job in turn:  # oldest first: its bytes have travelled longest
                    if job in self._under_way:
                        self._advance(job)

    def _begin(self, job: ThreadJob) -> None:
        """Let a job compute up to its first exchange, and wait."""
        self._run_job(job, lambda: self._waiting.append((job, next(job.stages))))

    def _advance(self, job: ThreadJob) -> None:
        """Move a job to its next exchange, or to its end."""

        def advance() -> None:
            arrived: Any = None if job.pending is None else job.pending.wait()
            job.pending = self.comm.start(job.stages.send(arrived))

        if not self._run_job(job, advance):
            self._under_way.remove(job)

    def _run_job(self, job: ThreadJob, work: Callable[[], None]) -> bool:
        """Do some work of a job. Return whether it goes on; otherwise report its outcome to its callbacks."""
        with job.context():
            try:
                if self._broken is not None:
                    raise CommunicatorError(f"an earlier exchange failed: {self._broken}") from self._broken
                work()
                return True
            except StopIteration as stop:
                outcome, result = job.done, stop.value
            except BaseException as error:
                if not isinstance(error, NonFiniteError):
                    self._broken = self._broken or error
                outcome, result = job.failed, error
            outcome(result)
            return False


def require_unoccupied(comm: Verbs, *, by_others_than: ExchangeThread | None = None) -> None:
    """Raise RuntimeError if an exchange thread occupies a communicator: ranks could order exchanges differently."""
    with _claims:
        others = [each for each in _busy if each.comm is comm and each is not by_others_than]
    if others:
        raise RuntimeError(
            f"comm is {comm!r}, over which the backward pass of another model still averages: leave out comm, or make "
            "a communicator for each model"
        )


def _end(queue: SimpleQueue[Any], thread: threading.Thread) -> None:
    """End the thread, since a thread that returns from torch's code while Python shuts down aborts the process."""
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_SECONDS)


def _joined(waiting: Sequence[tuple[ThreadJob, Exchange]]) -> ThreadJob:
    """Return one job that continues several jobs, which wait before their first exchanges."""
    jobs = [job for job, _ in waiting]

    def done(results: Sequence[Any]) -> None:
        for job, result in zip(jobs, results, strict=True):
            job.done(result)

    def failed(error: BaseException) -> None:
        for job in jobs:
            job.failed(error)

    stages = fuse([_resumed(job.stages, first) for job, first in waiting])
    owner = waiting[0][1].owner
    return ThreadJob(stages if owner is None else owned(stages, owner), done, failed, jobs[-1].context)


def _resumed(stages: Stages[Any], request: Exchange) -> Stages[Any]:
    """Continue a computation that waits before an exchange."""
    while True:
        arrived = yield request
        try:
            request = stages.send(arrived)
        except StopIteration as stop:
            return stop.value


def _size(request: Exchange) -> int:
    """Return the bytes of an exchange, the same on all ranks."""
    if isinstance(request, AllToAll):
        return sum(message.shape[0] for message in request.send)
    return sum(request.receive)
