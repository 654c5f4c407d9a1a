"""Signs of life of ranks that exchange files: each rank rewrites a file again and again, and reads those of others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

_BEATS = 4
"""Signs of life that a rank writes in ``silence`` seconds. After so long without one, the others take it for dead."""


class Beats:
    """The signs of life that a thread of this rank writes, and those that this rank has read from others.

    Clocks are not compared: a rank is silent if its file has stayed the same in several looks, which take ``silence``
    seconds or more. A silent rank counts as dead. While a store stalls, fewer looks are made, so a stall makes no rank
    count as dead.

    ``read`` returns None for a rank that has given no sign of life yet. Such a rank does not count as dead.
    """

    def __init__(
        self, write: Callable[[bytes], None], read: Callable[[int], bytes | None], silence: float
    ) -> None:
        self._write, self._read = write, read
        self._pause = silence / _BEATS
        self._ended = threading.Event()
        self._seen: dict[int, tuple[bytes, int, float]] = {}
        write(b"0")
        self._thread = threading.Thread(target=self._beat, name="qcomp beats", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        number = 0
        while not self._ended.wait(self._pause):
            number += 1
            with contextlib.suppress(Exception):  # the next one may succeed
                self._write(b"%d" % number)

    def end(self) -> None:
        """Stop writing."""
        self._ended.set()
        if self._thread is not threading.current_thread():  # in which the garbage collector may call this
            self._thread.join(timeout=self._pause)

    def is_silent(self, rank: int, now: float) -> bool:
        """Return whether a rank counts as dead; call it again and again, with seconds on a monotonic clock."""
        last, times, looked = self._seen.get(rank, (b"", 0, -self._pause))
        if now - looked < self._pause:
            return False
        sign = self._read(rank)
        if sign is None:
            return False
        times = times + 1 if sign == last else 0
        self._seen[rank] = sign, times, now
        return times >= _BEATS
