"""Exchanges texts between ranks of torch.distributed before they are connected, through the store of its rendezvous."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from qcomp.comm.torch_library import transport_errors
from qcomp.core.errors import CommunicatorError
from qcomp.core.reporting import name_ranks

_WHO = "TorchCommunicator"
_FAILED = "failed"
_FIRST_PAUSE, _LONGEST_PAUSE = 1e-3, 0.05
_RANKS_IN_A_PAUSE = 200
"""With more ranks the pauses are longer, so that the store answers all of them."""


class StoreMeeting:
    """Ranks that meet within ``timeout`` seconds in a store of torch.distributed, which they use for nothing else.

    ``look_for`` is called with the ranks that have not come yet, and raises if one of them cannot come any more.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        size: int,
        timeout: float,
        look_for: Callable[[Collection[int]], None],
    ) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._look_for = look_for
        self._round = 0

    def share(self, text: str, check: Callable[[], None]) -> Iterator[tuple[int, str]]:
        """Give a text to all ranks, and yield every rank with its text, in the order in which they come.

        ``check`` is called again and again, and raises if a rank has ended. Raises CommunicatorError if a rank has
        failed or does not come in time, or the store cannot be reached.
        """
        number, self._round = self._round, self._round + 1
        with transport_errors(f"{_WHO}: the store in which the ranks meet failed"):
            place = self._store.add(f"{number}", 1)
            self._store.set(f"{number}/{place}", f"{self._rank} {text}")
        missing = set(range(self._size))
        for place in range(1, self._size + 1):
            rank, _, told = self._await(f"{number}/{place}", missing, check).partition(" ")
            missing.discard(int(rank))
            yield int(rank), told
        if missing:
            raise CommunicatorError(
                f"{_WHO}: {self._size} processes have joined, but not {name_ranks(missing)}: two processes have the "
                "same rank, so give each process a rank of its own"
            )

    def fail(self, reason: str) -> None:
        """Tell all ranks, including ranks that come later, that this one has failed."""
        with contextlib.suppress(RuntimeError):  # then they notice by themselves
            self._store.set(_FAILED, f"{_WHO}: rank {self._rank} failed: {reason}")

    def _await(self, key: str, missing: set[int], check: Callable[[], None]) -> str:
        """Return the value of a key in the store, once it is set."""
        pause = _FIRST_PAUSE
        while True:
            with transport_errors(f"{_WHO}: the store in which the ranks meet failed"):
                if self._store.check([key]):
                    return str(self._store.get(key), "utf-8")
                if self._store.check([_FAILED]):
                    raise CommunicatorError(str(self._store.get(_FAILED), "utf-8"))
            check()
            if pause >= _LONGEST_PAUSE:
                self._look_for(missing - {self._rank})
            if time.monotonic() > self._deadline:
                raise CommunicatorError(
                    f"{_WHO}: waited {self._timeout:g} s for {name_ranks(missing)} to create one"
                )
            # The store's own wait cannot be interrupted, and would not notice that a rank has died.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE * max(1.0, self._size / _RANKS_IN_A_PAUSE))
