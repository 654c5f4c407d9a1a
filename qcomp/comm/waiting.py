"""Runs waits that cannot be interrupted on a thread of their own, so that their caller can be interrupted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from qcomp.core.errors import CommunicatorError

__all__ = ["Waiter", "Waiting"]


class Waiting:
    """A wait under way.

    Parameters
    ----------
    wait : callable
        Returns when the wait is over.
    changed : threading.Condition
        Notified when the wait is over; others notify it when the wait has become useless.
    """

    def __init__(self, wait: Callable[[], None], changed: threading.Condition) -> None:
        self._wait: Callable[[], None] | None = wait
        self._changed = changed
        self._error: BaseException | None = None
        self.is_over = False

    def do(self) -> None:
        """Wait, on the thread of a `Waiter`."""
        wait, self._wait = self._wait, None  # it refers to buffers
        assert wait is not None
        error = None
        try:
            wait()
        except BaseException as raised:
            error = raised
        del wait
        with self._changed:
            self._error, self.is_over = error, True
            self._changed.notify_all()

    def join(self, problem: Callable[[], str | None]) -> None:
        """Block until the wait is over; raise the exception that it has raised, if any.

        Parameters
        ----------
        problem : callable
            Returns why the wait has become useless, or None. It is called whenever ``changed`` is notified.

        Raises
        ------
        CommunicatorError
            With that text; the wait is left behind.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or problem() is not None)
            if not self.is_over:
                raise CommunicatorError(problem())
        if self._error is not None:
            raise self._error


class Waiter:
    """A thread that does one wait after the other."""

    def __init__(self) -> None:
        self._waits: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Waiting | None = None

    def start(self, waiting: Waiting) -> None:
        """Queue a wait after those that were started before."""
        if self._thread is None:
            # The thread must not delay the end of the process: after a failure its wait may last until a timeout.
            self._thread = threading.Thread(
                target=_work, args=(self._waits,), name="qcomp waits", daemon=True
            )
            self._thread.start()
        self._last = waiting
        self._waits.put(waiting)

    @property
    def is_waiting(self) -> bool:
        """Whether a wait that was started is not over."""
        return self._last is not None and not self._last.is_over

    def end(self) -> bool:
        """Let the thread end after the waits that were started; return whether all of them are over."""
        self._waits.put(None)
        return not self.is_waiting

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread, at most for some seconds."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout)


def _work(waits: queue.SimpleQueue[Waiting | None]) -> None:
    while (waiting := waits.get()) is not None:
        waiting.do()
