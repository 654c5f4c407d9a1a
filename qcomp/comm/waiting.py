"""Runs waits that cannot be interrupted on a thread of their own, so that their caller can be interrupted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from qcomp.core.errors import CommunicatorError

if TYPE_CHECKING:
    from qcomp.comm.lifelines import Lifelines


class Waiting:
    """A wait under way; ``lines`` notice when it has become useless."""

    def __init__(self, wait: Callable[[], None], lines: Lifelines) -> None:
        self._wait: Callable[[], None] | None = wait
        self._lines = lines
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
        with self._lines.changed:
            self._error, self.is_over = error, True
            self._lines.changed.notify_all()

    def join(self, exchange: int, verb: str) -> None:
        """Block until the wait is over; raise the exception that it has raised, if any.

        Raises CommunicatorError if the exchange cannot be completed; the wait may then last on in its thread. Warns if
        a rank is silent, and if it is heard again. Errors name the verb.
        """
        lines = self._lines
        while not self.is_over:
            with lines.changed:
                lines.changed.wait_for(
                    lambda: self.is_over or lines.has_news or lines.problem(exchange, verb) is not None
                )
                problem = None if self.is_over else lines.problem(exchange, verb)
            if problem is not None:
                raise CommunicatorError(problem)
            lines.report()
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
        """Wait for the thread to end, for at most ``timeout`` seconds."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout)


def _work(waits: queue.SimpleQueue[Waiting | None]) -> None:
    while (waiting := waits.get()) is not None:
        waiting.do()
