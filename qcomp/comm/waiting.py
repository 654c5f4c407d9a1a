"""Waits that cannot be interrupted, on a thread of their own, so that the caller of them can be."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from qcomp.core.errors import CommunicatorError

__all__ = ["Waiter", "Waiting"]

Result = TypeVar("Result")


class Waiting(Generic[Result]):
    """A wait under way.

    Parameters
    ----------
    job : callable
        Waits, and returns a result.
    changed : threading.Condition
        Notified when the wait is over, and by others when it has become useless.
    """

    def __init__(self, job: Callable[[], Result], changed: threading.Condition) -> None:
        self._job: Callable[[], Result] | None = job
        self._changed = changed
        self._outcome: tuple[Result | None, BaseException | None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self._outcome is not None

    def do(self) -> None:
        """Wait, on the thread of a `Waiter`."""
        job, self._job = self._job, None  # it refers to buffers
        assert job is not None
        outcome: tuple[Result | None, BaseException | None]
        try:
            outcome = job(), None
        except BaseException as error:
            outcome = None, error
        del job
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()

    def result(self, problem: Callable[[], str | None]) -> Result:
        """Return what the job returns, or raise what it raises.

        Parameters
        ----------
        problem : callable
            Returns why the wait has become useless, if it has. It is asked whenever ``changed`` is notified.

        Raises
        ------
        CommunicatorError
            With that text; the job is left behind.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._outcome is not None or problem() is not None)
        if self._outcome is None:
            raise CommunicatorError(problem())
        result, error = self._outcome
        if error is not None:
            raise error
        return result  # type: ignore[return-value]


class Waiter:
    """A thread that does one wait after the other."""

    def __init__(self) -> None:
        self._waits: queue.SimpleQueue[Waiting[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Waiting[Any] | None = None

    def start(self, waiting: Waiting[Any]) -> None:
        """Do a wait after those that were started before."""
        if self._thread is None:
            # It must not hold up the end of the process: after a failure its wait may last until a timeout.
            self._thread = threading.Thread(
                target=_work, args=(self._waits,), name="qcomp waits", daemon=True
            )
            self._thread.start()
        self._last = waiting
        self._waits.put(waiting)

    def end(self) -> bool:
        """End the thread after the waits that were started; return whether it has nothing left to wait for."""
        self._waits.put(None)
        return self._last is None or self._last.is_over

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread, at most for some seconds."""
        if self._thread is not None:
            self._thread.join(timeout)


def _work(waits: queue.SimpleQueue[Waiting[Any] | None]) -> None:
    while (waiting := waits.get()) is not None:
        waiting.do()
