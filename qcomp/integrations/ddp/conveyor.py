"""A thread that runs several computations in stages over a communicator."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from qcomp.comm.verbs import Pending, Verbs
from qcomp.core.errors import CommunicatorError, NonFiniteError
from qcomp.core.mean.stages import Stages

__all__ = ["Conveyor", "Job"]


@dataclass(eq=False)
class Job:
    """A computation in stages and its callbacks, which run in the conveyor's thread."""

    stages: Stages[Any]
    done: Callable[[Any], None]
    failed: Callable[[BaseException], None]
    context: Callable[[], AbstractContextManager[Any]]
    """Entered whenever the job runs."""
    pending: Pending | None = field(default=None, init=False)


class Conveyor:
    """Runs jobs in order of arrival, each one exchange further than the next.

    When jobs arrive, it starts their first exchanges, then moves each earlier job one exchange further, the oldest
    first. After the last jobs it continues in the same order until all are done. So some jobs encode while the bytes of
    others travel, and early data is decoded while the last bytes travel. The order of exchanges depends on the order of
    the jobs alone, not on when bytes arrive, so it is the same on all ranks.

    A non-finite value fails its job, on all ranks in the same stage. Any other error belongs to this rank alone or to
    the communicator. It fails every job, now and later, because the order is lost.

    Parameters
    ----------
    comm : Verbs
        A communicator with ``start``; nobody else may use it while jobs are running.
    """

    def __init__(self, comm: Verbs) -> None:
        self._comm = comm
        self._queue: SimpleQueue[tuple[Sequence[Job], bool] | None] = SimpleQueue()
        self._under_way: deque[Job] = deque()
        self._broken: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, jobs: Sequence[Job], *, last: bool) -> None:
        """Add some jobs, and return at once. No jobs follow the ``last`` ones before these are done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="qcomp-ddp", daemon=True)
            self._thread.start()
        self._queue.put((jobs, last))

    def close(self) -> None:
        """End the thread, once all jobs are done; there must be no more jobs."""
        self._queue.put(None)

    def _run(self) -> None:
        while (found := self._queue.get()) is not None:
            jobs, last = found
            turn = (*jobs, *self._under_way)
            self._under_way.extend(jobs)
            for job in turn:
                self._advance(job)
            while last and self._under_way:
                for job in turn:  # oldest first: its bytes have travelled longest
                    if job in self._under_way:
                        self._advance(job)

    def _advance(self, job: Job) -> None:
        """Move a job to its next exchange, or to its end."""
        with job.context():
            try:
                if self._broken is not None:
                    raise CommunicatorError(f"an earlier exchange failed: {self._broken}") from self._broken
                arrived: Any = None if job.pending is None else job.pending.wait()
                job.pending = self._comm.start(job.stages.send(arrived))
                return
            except StopIteration as stop:
                outcome, result = job.done, stop.value
            except BaseException as error:
                if not isinstance(error, NonFiniteError):
                    self._broken = self._broken or error
                outcome, result = job.failed, error
            self._under_way.remove(job)
            outcome(result)
