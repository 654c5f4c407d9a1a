"""`on_signal`: tells all ranks, at the same step, that a signal asks the job to end, so that they can save."""

import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from qcomp.core.handshake import handshake
from qcomp.core.mean.stages import AllGather, Owner, Stages, Transport, drive, owned
from qcomp.core.numeric.arrays import from_host_bytes, host_bytes

_LIKE = np.empty(0, dtype=np.uint8)
_ADVICE = "call it on all ranks after the same steps"
_ANNOUNCED = 5.0
"""Seconds in which a further signal repeats the first: the scheduler sends one, and a launcher passes on another."""


class on_signal:  # noqa: N801 - it reads as a function
    """Tells all ranks at the same step that any of them has received a signal, so that they can save and end.

    Schedulers announce the end of a job by a signal, to one process or to all, and not at the same moment. Call the
    object after every step: it returns True on all ranks in the same call. The constructor and the calls are
    collective.

    Parameters
    ----------
    comm : Communicator
        The ranks. Each exchange sends one byte to every other rank.
    signals : iterable of signal.Signals, default (SIGTERM,)
        The signals, such as ``signal.SIGUSR1`` of Slurm's ``--signal=USR1@120``. Until `close`, the first signal of
        each kind is only noted. Further signals of its kind within 5 seconds are also only noted, because a scheduler
        may signal every process, and a launcher then pass the signal on. The next signal after the 5 seconds is also
        only noted: it may have arrived within them, since Python handles a signal only when a long call, such as a
        backward pass, has returned. The signal after that has the effect that it had before this object was made, so a
        job that does not save still ends. In a forked child, SIGTERM has that effect at once, and the other signals
        have none.
    every : int, default 1
        The number of calls from one exchange to the next; calls in between return False at once. It must be the same on
        all ranks.

    Raises
    ------
    MismatchError
        On every rank, if ``every`` differs. From a call, if other ranks make another exchange at the same time.
    RuntimeError
        If this is not the main thread, where Python's signal handlers run.

    Examples
    --------
    >>> import os, signal, qcomp
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> with qcomp.checkpoint.on_signal(comm, [signal.SIGUSR1]) as ends:
    ...     for step in range(100):
    ...         if step == 3:
    ...             os.kill(os.getpid(), signal.SIGUSR1)
    ...         if ends():
    ...             break  # save here
    >>> step
    3
    """

    def __init__(
        self, comm: Transport, signals: Iterable[int] = (signal.SIGTERM,), *, every: int = 1
    ) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"every is {every!r}; expected an integer of at least 1")
        numbers = list(dict.fromkeys(signals)) if isinstance(signals, Iterable) else [None]
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError(f"signals is {signals!r}; expected several signals, such as (signal.SIGTERM,)")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"on_signal was called in thread {threading.current_thread().name!r}; expected the main thread, since "
                "only there Python runs signal handlers"
            )
        handshake(comm, {"every": every}, like=_LIKE)
        self._comm = comm
        self._every = every
        self._calls = 0
        self._first: dict[int, float] = {}
        # One is enough: signals of a kind that arrive during the same call run the handler once.
        self._had_late: set[int] = set()
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        try:
            for number in numbers:
                # None stands for a handler that was not installed from Python, and cannot be installed again.
                self._before[number] = signal.signal(number, self._note) or signal.SIG_DFL
        except (OSError, TypeError, ValueError):  # not a signal, or one that cannot be handled
            self.close()
            raise

    def __call__(self) -> bool:
        """Return True on all ranks if any of them had received a signal before its call."""
        self._calls += 1
        if self._calls % self._every:
            return False
        owner = Owner("on_signal", 0, (), 0, f"call {self._calls}", _ADVICE)
        return drive(owned(self._stages(), owner), self._comm)

    def _stages(self) -> Stages[bool]:
        arrived = yield AllGather(from_host_bytes(bytes([bool(self._first)]), _LIKE), (1,) * self._comm.size)
        return any(host_bytes(part) != b"\0" for part in arrived)

    def _note(self, number: int, _: object) -> None:
        inherited = os.getpid() != self._process
        if inherited and number != signal.SIGTERM:
            return  # sent to all processes of the job: the rank decides when its children end
        now = time.monotonic()
        late = now - self._first.setdefault(number, now) > _ANNOUNCED
        if inherited or (late and number in self._had_late):
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
        elif late:
            self._had_late.add(number)

    def close(self) -> None:
        """Give all signals the effect that they had before."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)

    def __enter__(self) -> "on_signal":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close()
        if self._first and isinstance(error, Exception):
            error.add_note(
                "on_signal had noted a signal before. If it also ended workers of a data loader, let these leave the "
                "process group of their rank: pass worker_init_fn, as the page about checkpoints shows"
            )
